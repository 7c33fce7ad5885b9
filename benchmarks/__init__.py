"""What the benchmarks share: the head of a record, the device's clock, its memory."""

from __future__ import annotations

import contextlib
import shlex
import sys
import time
from pathlib import Path
from typing import Any

import torch

from common import runs


def about(module: str, args: Any) -> dict[str, Any]:
    """The head of every record: command, commit, machine, versions, all arguments."""
    return {
        "command": shlex.join(["python", "-m", module, *sys.argv[1:]]),
        "commit": runs.git_commit(),
        "machine": runs.machine(),
        "versions": runs.versions(),
        "args": runs.jsonable(args),
    }


def clock(device: torch.device) -> float:
    """Seconds, read once the device has done all that is queued."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def reset_peak_memory(device: torch.device) -> None:
    """Starts a new count of peak memory, on Linux also of this process's resident memory."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with contextlib.suppress(OSError):  # elsewhere the count goes on from the start of the process
        Path("/proc/self/clear_refs").write_text("5")


def peak_memory_gib(device: torch.device) -> float:
    """Peak memory in GiB since `reset_peak_memory`: allocated on the GPU, else resident in this process."""
    if device.type == "cpu":
        # getrusage, which runs.peak_memory_gib reads, cannot start over.
        with contextlib.suppress(OSError, StopIteration):
            lines = Path("/proc/self/status").read_text().splitlines()
            return int(next(line for line in lines if line.startswith("VmHWM:")).split()[1]) / 2**20
    return runs.peak_memory_gib(device)
