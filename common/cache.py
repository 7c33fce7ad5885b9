"""What a frozen network gives for every transition, computed once per run and mapped from a file."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from common import runs
from common.dataset import Batch, Dataset, sequential


def cached(
    run: runs.Run,
    name: str,
    function: Callable[[Batch], Tensor],
    dataset: Dataset,
    batch_size: int,
    device: torch.device,
    **windows: Any,
) -> Tensor:
    """`function` of every batch of `sequential(dataset, ...)`, computed once: float32 (N, d), mapped from a file.

    A killed computation goes on where it was saved last.
    """
    path, part, progress_path = (run.dir / f"{name}{suffix}" for suffix in (".npy", ".npy.part", ".progress.json"))
    if path.exists():
        return torch.from_numpy(np.load(path, mmap_mode="c"))
    rows = len(windows["indices"])
    first = 0
    if part.exists() and progress_path.exists():
        first = json.loads(progress_path.read_text())["batches"]
    values: np.ndarray | None = np.load(part, mmap_mode="r+") if first else None
    batches = -(-rows // batch_size)
    progress = runs.Progress(f"{run.script} {name}", rows, "transitions", done=first * batch_size)
    last_saved = time.monotonic()
    for number, batch in enumerate(sequential(dataset, batch_size, device=device, start=first, **windows), first):
        with torch.inference_mode(), torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            out = function(batch).float().cpu().numpy()
        if values is None:
            values = np.lib.format.open_memmap(part, "w+", np.float32, (rows, out.shape[1]))
            with open(part, "r+b") as file:  # reserve the space now: a full disk under a memory map kills the process
                os.posix_fallocate(file.fileno(), 0, part.stat().st_size)
        values[number * batch_size : number * batch_size + len(out)] = out
        progress.update(len(out))
        if runs.stop_requested() or time.monotonic() - last_saved > 60:
            values.flush()
            runs.write_json(progress_path, {"batches": number + 1})
            last_saved = time.monotonic()
            if runs.stop_requested() and number + 1 < batches:
                raise runs.Stopped(f"{name} at batch {number + 1} of {batches}; the same command goes on")
    progress.close()
    values.flush()
    runs.publish(part, path)
    progress_path.unlink(missing_ok=True)
    return torch.from_numpy(np.load(path, mmap_mode="c"))
