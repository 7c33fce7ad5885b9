"""What the benchmarks share: the head of a record, the device's clock, its memory."""

from __future__ import annotations

import shlex
import sys
import time
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
