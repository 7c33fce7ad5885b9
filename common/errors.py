"""Kept until every import names common.cli."""

from common.cli import UserError  # noqa: F401
