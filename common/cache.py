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
) -> tuple[Tensor, float]:
    """`function` of every batch of `sequential(dataset, ...)`, computed once: float32 (N, d), mapped from a file.

    Also returns the seconds that it took. A killed computation goes on where it was saved last.
    """
    path, part, progress_path = (run.dir / f"{name}{suffix}" for suffix in (".npy", ".npy.part", ".progress.json"))
    start, earlier = time.monotonic(), 0.0
    saved = json.loads(progress_path.read_text()) if progress_path.exists() else {"batches": 0, "seconds": 0.0}
    if path.exists():
        run.passed.add(name)
        return torch.from_numpy(np.load(path, mmap_mode="c")), saved["seconds"]
    rows = len(windows["indices"])
    first = 0
    if part.exists():
        first, earlier = saved["batches"], saved["seconds"]
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
            runs.write_json(progress_path, {"batches": number + 1, "seconds": earlier + time.monotonic() - start})
            last_saved = time.monotonic()
            if runs.stop_requested() and number + 1 < batches:
                raise runs.Stopped(f"{name} at batch {number + 1} of {batches}; the same command goes on")
    progress.close()
    values.flush()
    seconds = earlier + time.monotonic() - start
    runs.write_json(progress_path, {"batches": batches, "seconds": seconds})
    runs.publish(part, path)
    run.passed.add(name)
    return torch.from_numpy(np.load(path, mmap_mode="c")), seconds


def remove_cached(run: runs.Run) -> None:
    """Removes what `cached` left, once the run's result is written."""
    for path in [*run.dir.glob("*.npy"), *run.dir.glob("*.progress.json")]:
        path.unlink()
