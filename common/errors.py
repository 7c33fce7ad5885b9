"""The one exception that scripts show to a user as a plain message."""


class UserError(Exception):
    """Something the user can mend. The message names the file, if there is one, and the command that helps."""
