"""What every script does around its work: the command line, one-line errors, signals, and progress."""

from __future__ import annotations

import argparse
import dataclasses
import errno
import math
import os
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

from tqdm import tqdm

FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class UserError(Exception):
    """Something the user can mend. The message names the file, if there is one, and the command that helps."""


class Stopped(Exception):
    """A signal asked for the end; what is finished is saved, and rerunning the same command resumes."""


# ---------------------------------------------------------------------------------------------------------------------
# Ranges of numbers on the command line


@dataclasses.dataclass(frozen=True)
class Range:
    """What a number on the command line must be: from `low` to `high`, or above `low`; always finite."""

    low: float
    high: float = math.inf
    above: bool = False

    def complaint(self, value: float) -> str:
        """Why a value is out of range; empty if it is not."""
        fits = value > self.low if self.above else value >= self.low
        if fits and value <= self.high and math.isfinite(value):
            return ""
        if math.isfinite(self.high):
            return f"is {value}, must be from {self.low} to {self.high}"
        return f"is {value}, must be a finite number " + (
            f"above {self.low}" if self.above else f"of at least {self.low}"
        )


Count = Annotated[int, Range(1)]
Seed = Annotated[int, Range(0, 2**31 - 1)]
Positive = Annotated[float, Range(0, above=True)]
NotNegative = Annotated[float, Range(0)]
Share = Annotated[float, Range(0, 1)]


def declared_range(annotation: Any) -> Range | None:
    """The range in a type such as `Count`, `Count | None` or `tuple[Count, ...]`; None if it declares none."""
    for part in (*getattr(annotation, "__metadata__", ()), *get_args(annotation)):
        if isinstance(part, Range):
            return part
        if nested := declared_range(part):
            return nested
    return None


def check_ranges(args: Any) -> None:
    """Raises UserError for a number in the dataclass `args` that is outside its declared range."""
    for name, annotation in get_type_hints(type(args), include_extras=True).items():
        limits, value = declared_range(annotation), getattr(args, name)
        if value == ():
            raise UserError(f"--{name.replace('_', '-')} needs at least one value")
        for number in value if isinstance(value, tuple) else () if value is None else (value,):
            if limits is not None and (complaint := limits.complaint(number)):
                raise UserError(f"--{name.replace('_', '-')} {complaint}")


# ---------------------------------------------------------------------------------------------------------------------
# Signals, errors, progress

_stop_signal: int | None = None


def install_signal_handlers() -> None:
    """SIGINT and SIGTERM set a flag that long loops read through `stop_requested`; a second SIGINT ends at once."""

    def handler(number: int, _frame: Any) -> None:
        global _stop_signal
        if _stop_signal is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        _stop_signal = number

    signal.signal(signal.SIGINT, handler)
    signal.signal(signal.SIGTERM, handler)


def stop_requested() -> bool:
    """True once SIGINT or SIGTERM has arrived."""
    return _stop_signal is not None


def env_and_quick(argv: list[str], env: str) -> tuple[str, bool]:
    """The ``--env`` of a command line (`env` if it has none) and whether ``--quick`` is on it; defaults follow."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--env", default=env)
    parser.add_argument("--quick", action="store_true")
    chosen, _ = parser.parse_known_args(argv)
    return chosen.env, chosen.quick


def cli(main: Callable[[Any], None], default: Any) -> None:
    """Parses the command line into the dataclass of `default` and calls `main(args)`.

    `default` is an instance, or a function from argv to an instance (defaults that depend on ``--env``).
    A `UserError` and a full disk end in one line on stderr and exit code 1, a signal in exit code 128 + its number.
    """
    import tyro

    install_signal_handlers()
    # A data set at the paper's scale is a thousand memory-mapped files, each with a descriptor; the default is 1024.
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))
    name = Path(sys.argv[0]).name
    try:
        if callable(default):
            default = default(sys.argv[1:])
        args = tyro.cli(type(default), default=default, description=sys.modules["__main__"].__doc__)
        check_ranges(args)
        main(args)
    except UserError as error:
        print(f"{name}: error: {error}", file=sys.stderr)
        sys.exit(1)
    except Stopped as stopped:
        print(f"{name}: stopped: {stopped}; rerun the same command to resume", file=sys.stderr)
        sys.exit(128 + (_stop_signal or signal.SIGINT))
    except KeyboardInterrupt:
        print(f"{name}: interrupted; rerun the same command to resume from what was saved last", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
    except BrokenPipeError:  # whoever read the output has had enough: | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(128 + signal.SIGPIPE)
    except OSError as error:
        if error.errno not in FULL_DISK:
            raise
        where = f" while writing {error.filename}" if error.filename else ""
        print(
            f"{name}: error: the disk is full (or a quota is){where}; make room and rerun the same command to resume",
            file=sys.stderr,
        )
        sys.exit(1)


class _Lines:
    """A file for tqdm that gets lines, not a bar that is drawn over itself: for logs."""

    def write(self, text: str) -> None:
        if text.strip():
            print(text.strip(), file=sys.stderr, flush=True)

    def flush(self) -> None:
        pass


class Progress(tqdm):
    """A progress bar with rate and ETA; where the output is no terminal, a line every 20 seconds.

    Args:
        name: what is counted, shown first.
        total: the number of `unit`s at the end.
        done: how many were done before (a resumed stage); they do not count for the rate.
    """

    def __init__(self, name: str, total: int, unit: str, done: int = 0) -> None:
        options: dict[str, Any] = {"desc": name, "total": total, "unit": f" {unit}", "initial": done}
        if not sys.stderr.isatty():
            line = "{desc}: {n_fmt}/{total_fmt}{unit}, {rate_noinv_fmt}, ETA {remaining}{postfix}"
            # A delay, however short, leaves out the line that says that nothing is done yet.
            options |= {"file": _Lines(), "bar_format": line, "delay": 1e-9, "mininterval": 20, "maxinterval": 20}
        super().__init__(**options)

    def update(self, count: int = 1, note: str | None = None) -> None:
        """Counts `count` more units; `note` replaces the numbers shown beside the rate."""
        if note is not None:
            self.set_postfix_str(note, refresh=False)
        super().update(count)
