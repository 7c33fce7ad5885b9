"""What every script does around its work: the command line, one-line errors, signals, and progress."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import errno
import math
import os
import re
import resource
import signal
import sys
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

from tqdm import tqdm

FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class UserError(Exception):
    """Something the user can mend. The message names the file, if there is one, and the command that helps."""


class Stopped(Exception):
    """A signal asked for the end; what is finished is saved, and rerunning the same command resumes."""


# ---------------------------------------------------------------------------------------------------------------------
# What values on the command line may be


@dataclasses.dataclass(frozen=True)
class Range:
    """What a number on the command line must be: from `low` to `high`, or above `low`; always finite."""

    low: float
    high: float = math.inf
    above: bool = False

    def complaint(self, value: float) -> str:
        """Why a value is out of range; empty if it is not."""
        fits = value > self.low if self.above else value >= self.low
        if fits and value <= self.high and abs(value) < math.inf:
            return ""
        limits = f"a finite number {'above' if self.above else 'of at least'} {self.low}"
        if math.isfinite(self.high):
            limits = f"from {self.low} to {self.high}"
        return f"is {value}, must be {limits}"


@dataclasses.dataclass(frozen=True)
class PathComponent:
    """What a name must be that becomes one component of a path; an empty one stands for the default."""

    def complaint(self, value: str) -> str:
        """Why a value cannot be one; empty if it can."""
        if value in (".", "..") or "/" in value or not value.isprintable():
            return (
                f"is {value!r}: it becomes the name of a folder or file, so it must not be . or .. or hold slashes or "
                "control characters"
            )
        if (size := len(os.fsencode(value))) > 200:
            return f"has {size} bytes, must have at most 200: it becomes the name of a folder or file"
        return ""


Name = Annotated[str, PathComponent()]
Count = Annotated[int, Range(1, 2**53)]  # a float, with which it is compared, has no larger ones
Seed = Annotated[int, Range(0, 2**31 - 1)]
Positive = Annotated[float, Range(0, above=True)]
NotNegative = Annotated[float, Range(0)]
Share = Annotated[float, Range(0, 1)]


def declared_range(annotation: Any) -> Range | PathComponent | None:
    """What a type such as `Count`, `Count | None` or `tuple[Count, ...]` declares of its values; None for nothing."""
    for part in (*getattr(annotation, "__metadata__", ()), *get_args(annotation)):
        if isinstance(part, (Range, PathComponent)):
            return part
        if nested := declared_range(part):
            return nested
    return None


def check_ranges(args: Any) -> None:
    """Raises UserError for a value in the dataclass `args` that is not what its type declares."""
    for name, annotation in get_type_hints(type(args), include_extras=True).items():
        limits, value = declared_range(annotation), getattr(args, name)
        if value == ():
            raise UserError(f"--{name.replace('_', '-')} needs at least one value")
        for number in value if isinstance(value, tuple) else () if value is None else (value,):
            if limits is not None and (complaint := limits.complaint(number)):
                raise UserError(f"--{name.replace('_', '-')} {complaint}")


def _with_home(value: Any) -> Any:
    """A value with ~ at the start of its paths replaced. UserError if that is nobody's home."""
    if isinstance(value, (list, tuple)):
        return type(value)(map(_with_home, value))
    if not isinstance(value, Path) and not (isinstance(value, str) and value.startswith("~/")):
        return value
    expanded = os.path.expanduser(value)
    if expanded.startswith("~"):
        raise UserError(f"{value}: there is no such home; a folder of this name in the working directory is ./{value}")
    return type(value)(expanded)


def checked(args: Any) -> Any:
    """`args` with ~ expanded in its paths, after `check_ranges`.

    UserError also for a value that is empty, and for a file (or one below it) where a field `..._dir` wants a folder.
    """
    for word in sys.argv[1:]:
        if word == "" or re.fullmatch(r"--[\w-]+=", word):
            raise UserError(f"{word or 'an argument'} is empty; leave it out, or give it a value")
        if re.search(r"[\ud800-\udfff]", word):  # how Python shows bytes that it cannot decode
            raise UserError(f"{word!r} is not in UTF-8; rename it, or set LC_ALL=C.UTF-8 if only the locale is not")
    check_ranges(args)
    for field in dataclasses.fields(args):
        value = _with_home(getattr(args, field.name))
        setattr(args, field.name, value)
        if field.name.endswith("_dir") and value is not None:
            there = next(path for path in (value, *value.absolute().parents) if path.exists())
            if not there.is_dir():
                raise UserError(f"{there} is a file where a folder should be: choose another folder than {value}")
    return args


# ---------------------------------------------------------------------------------------------------------------------
# Signals, errors, progress

_stop_signal: int | None = None


def install_signal_handlers() -> None:
    """A signal sets a flag that long loops read through `stop_requested`; a second SIGINT ends at once.

    SIGTERM, SIGHUP (a closed terminal, unless nohup ignores it), SIGUSR1 and SIGUSR2 (what schedulers warn with) too.
    """

    def handler(number: int, _frame: Any) -> None:
        global _stop_signal
        if _stop_signal is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        _stop_signal = number

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handler)


def stop_requested() -> bool:
    """True once a signal has asked for the end."""
    return _stop_signal is not None


@contextlib.contextmanager
def signals_blocked() -> Iterator[None]:
    """Processes that are spawned meanwhile never see a signal, not even while they import; this one does at the end.

    A Ctrl-C reaches all processes of a terminal, a scheduler's signal all of a job: this process decides.
    """
    # The tracker of shared memory, which the first spawned process starts, would unblock some of them.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def advice(number: int | None) -> str:
    """What to do about an error of the system."""
    if number in FULL_DISK:
        return "make room and rerun the same command to resume"
    if number in (errno.EACCES, errno.EPERM, errno.EROFS):
        return "it may not be read or written here: change its permissions, or choose another folder"
    if number in (errno.ENOTDIR, errno.EEXIST):
        return "a file is where a folder should be: choose another folder"
    if number == errno.EISDIR:
        return "a folder is where a file should be: move it away"
    if number == errno.ENAMETOOLONG:
        return "choose a shorter name"
    if number in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):
        return "its file system knows no locks, which keep processes apart: choose a folder on another one"
    if number in (errno.EMFILE, errno.ENFILE):
        return "raise the limit of open files with ulimit -n"
    if number in (errno.ENOMEM, errno.EAGAIN):
        return "no more memory or processes: end other programs, or use fewer workers or smaller batches"
    if number in (errno.EIO, errno.ESTALE):
        return "the disk or the network file system failed; nothing was replaced because of it"
    return "mend it and rerun the same command to resume"


def describe(error: OSError) -> str:
    """An error of the system in one line: the file, what happened, and what to do."""
    where = f"{error.filename}: " if error.filename else ""
    return f"{where}{error.strerror or error}; {advice(error.errno)}"


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
    A `UserError` and an error of the system end in one line on stderr and exit code 1, a signal in exit code 128 + its
    number.
    """
    import tyro

    install_signal_handlers()
    # A data set at the paper's scale is a thousand memory-mapped files, each with a descriptor; the default is 1024.
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))
    for stream in (sys.stdout, sys.stderr):  # what the locale cannot show is no reason to stop
        stream.reconfigure(errors="backslashreplace")
    name = Path(sys.argv[0]).name
    try:
        if callable(default):
            default = default(sys.argv[1:])
        args = tyro.cli(type(default), default=default, description=sys.modules["__main__"].__doc__)
        main(checked(args))
    except UserError as error:
        sys.exit(f"{name}: error: {error}")  # with code 1
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
        if error.errno is None:
            raise
        sys.exit(f"{name}: error: {describe(error)}")
    except MemoryError as error:
        sys.exit(f"{name}: error: {error or 'out of memory'}; {advice(errno.ENOMEM)}")


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
