"""What the server of test processes imports before it forks: see methods.SERVER."""

from common.rendering import import_simulator

import_simulator("dm_control.suite")
