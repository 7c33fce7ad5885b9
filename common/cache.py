"""What a frozen network gives, computed once: for every transition and a run, or for every frame and a dataset."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import shlex
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from common import runs
from common.dataset import Batch, Dataset, sequential
from common.errors import UserError
from common.shards import (
    COPY_CHUNK,
    DamagedShard,
    Shard,
    ShardTaken,
    Sidecar,
    SidecarWriter,
    plan_differences,
    read_sidecar,
    sidecar_path,
)


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

    def parts(start: int) -> Iterator[Tensor]:
        for batch in sequential(dataset, batch_size, device=device, start=start, **windows):
            with torch.inference_mode(), torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                yield function(batch)

    rows = len(windows["indices"])
    return cached_parts(run, name, rows, -(-rows // batch_size), parts)


def cached_parts(
    run: runs.Run,
    name: str,
    rows: int,
    count: int,
    parts: Callable[[int], Iterator[Tensor]],
    unit: str = "transitions",
    dtype: Any = np.float32,
) -> tuple[Tensor, float]:
    """Rows that come in `count` parts, computed once: (rows, ...), mapped from a file, and the seconds that it took.

    parts: called with the number of the first part that is wanted, gives that one (n, ...) and those after it. A killed
    computation goes on where it was saved last.
    """
    path, part, progress_path = (run.dir / f"{name}{suffix}" for suffix in (".npy", ".npy.part", ".progress.json"))
    start, earlier = time.monotonic(), 0.0
    saved = json.loads(progress_path.read_text()) if progress_path.exists() else {}
    if path.exists():
        run.passed.add(name)
        return torch.from_numpy(np.load(path, mmap_mode="c")), saved.get("seconds", 0.0)
    first = done = 0
    if part.exists() and "rows" in saved:
        first, done, earlier = saved["parts"], saved["rows"], saved["seconds"]
    values: np.ndarray | None = np.load(part, mmap_mode="r+") if first else None
    progress = runs.Progress(f"{run.script} {name}", rows, unit, done=done)
    last_saved = time.monotonic()

    def save(made: int) -> None:
        if values is not None:
            values.flush()
            state = {"parts": made, "rows": done, "seconds": earlier + time.monotonic() - start}
            runs.write_json(progress_path, state)

    made = first
    try:
        for made, out in enumerate(parts(first), first + 1):
            out = out.cpu().float().numpy().astype(dtype, copy=False)
            if values is None:
                values = np.lib.format.open_memmap(part, "w+", dtype, (rows, *out.shape[1:]))
                with open(part, "r+b") as file:  # reserve it now: a full disk under a memory map kills the process
                    os.posix_fallocate(file.fileno(), 0, part.stat().st_size)
            values[done : done + len(out)] = out
            done += len(out)
            progress.update(len(out))
            if runs.stop_requested() and made < count:
                raise runs.Stopped(f"{name} at part {made} of {count}; the same command goes on")
            if time.monotonic() - last_saved > 60:
                save(made)
                last_saved = time.monotonic()
    except runs.Stopped:
        save(made)
        raise
    progress.close()
    values.flush()
    seconds = earlier + time.monotonic() - start
    runs.write_json(progress_path, {"parts": count, "rows": rows, "seconds": seconds})
    runs.publish(part, path)
    run.passed.add(name)
    return torch.from_numpy(np.load(path, mmap_mode="c")), seconds


def remove_cached(run: runs.Run) -> None:
    """Removes what `cached` left, once the run's result is written."""
    for path in [*run.dir.glob("*.npy"), *run.dir.glob("*.progress.json")]:
        path.unlink()


PerFrame = Callable[..., Tensor]


def attach_per_frame(
    dataset: Dataset,
    suffix: str,
    name: str,
    settings: dict[str, Any],
    prepare: Callable[[], tuple[PerFrame, dict[str, Any]]],
    device: torch.device,
    pairs: bool = True,
    offsets: tuple[int, ...] | None = None,
) -> float:
    """Attach to `dataset`, as `suffix`, what is computed once per frame: array <render>/<name> of <shard>.<suffix>.h5.

    Files that are missing are written first, each whole or not at all, together with other processes that do the same.

    Args:
        dataset: its shards are what the files belong to; a file of another version of its shard is written again.
        settings: what decides the content, known beforehand; files made with others are refused.
        prepare: called if something is missing. Gives the function from frames, uint8 (B, H, W, 3) on `device`, to
            rows (B, ...), and further settings (of weights that it had to load).
        pairs: the function also gets the frames that follow; the last frame of an episode, which nothing follows,
            gets zeros.
        offsets: for `Dataset.attach`.

    Returns the seconds that this process took. Raises UserError for other settings or a full disk, and Stopped at a
    signal; files that are complete stay.
    """
    start, name = time.monotonic(), f"{dataset.render}/{name}"
    known, function = dict(settings), None
    found: dict[int, Sidecar] = {}
    damaged: set[Path] = set()
    folders = sorted(path for path in dataset.folder.parent.iterdir() if path.is_dir())  # of all splits
    removal = f"rm {' '.join(f'{shlex.quote(str(folder))}/*.{suffix}.h5' for folder in folders)}"

    def look(shard: Shard) -> Sidecar | None:
        """The file of a shard, if it has what is wanted or at least fits it."""
        path = sidecar_path(shard.path, suffix)
        if not path.exists():
            return None
        try:
            sidecar = read_sidecar(path, shard)
        except DamagedShard as error:
            if path not in damaged:
                print(f"{error}; it is computed again", flush=True)
            damaged.add(path)
            return None
        different = plan_differences({key: sidecar.settings.get(key) for key in known}, known)
        if different:
            raise UserError(
                f"{path}: made with other settings ({', '.join(different)}); use those, or compute everything again "
                f"after: {removal} (this also removes what the other render has)"
            )
        return sidecar

    def scan() -> list[int]:
        """Finds the files that are complete. Returns the numbers of the others."""
        for number, shard in enumerate(dataset.shards):
            sidecar = None if number in found else look(shard)
            if sidecar is not None and name in sidecar.datasets:
                found[number] = sidecar
                known.update({key: value for key, value in sidecar.settings.items() if key not in known})
        return [number for number in range(len(dataset.shards)) if number not in found]

    todo = scan()
    progress: runs.Progress | None = None
    waited: list[int] = []
    made: set[int] = set()

    def compute(shard: Shard) -> Iterator[tuple[str, int, np.ndarray]]:
        frames, ends = shard.array(f"{dataset.render}/observation"), shard.episode_start[1:] - 1
        batch = 64 if device.type == "cuda" else 8
        for first in range(0, shard.frames, batch):
            index = np.arange(first, min(first + batch, shard.frames))
            shown = [torch.from_numpy(frames[index]).to(device)]
            if pairs:
                shown.append(torch.from_numpy(frames[np.minimum(index + 1, shard.frames - 1)]).to(device))
            out = function(*shown)
            if pairs:
                last = torch.from_numpy(np.isin(index, ends)).to(device)
                out = out.masked_fill(last.view(-1, *[1] * (out.dim() - 1)), 0)
            if not out.isfinite().all():
                raise UserError(
                    f"{shard.path}: what is computed from it is not finite; the weights may be damaged ({settings})"
                )
            progress.update(len(out))
            yield name, first, out.cpu().numpy()
            if runs.stop_requested() and first + batch < shard.frames:
                raise runs.Stopped(
                    f"the complete files in {dataset.folder} stay; the same command goes on with the next one"
                )

    def copy(old: Sidecar, key: str) -> Iterator[tuple[str, int, np.ndarray]]:
        rows = old.array(key)
        for first in range(0, len(rows), COPY_CHUNK):
            yield key, first, rows[first : first + COPY_CHUNK]

    while todo:
        if function is None:
            function, further = prepare()
            settings = settings | further
            known.update({key: value for key, value in further.items() if key not in known})
            if settings != known:  # the files that are there came from others
                differences = ", ".join(plan_differences(known, settings))
                raise UserError(
                    f"{dataset.folder}: has {suffix} files made with other settings ({differences}); use those, or "
                    f"compute everything again after: {removal} (this also removes what the other render has)"
                )
            done = sum(dataset.shards[number].frames for number in found)
            progress = runs.Progress(f"{suffix} {dataset.env} {dataset.split}", dataset.num_frames, "frames", done=done)
        for number in todo:
            if runs.stop_requested():
                raise runs.Stopped(f"the complete files in {dataset.folder} stay; the same command goes on")
            try:
                with SidecarWriter(dataset.shards[number].path, suffix) as writer:
                    if writer.shard.content_hash != dataset.shards[number].content_hash:
                        raise UserError(f"{writer.shard.path}: was replaced while this command ran; repeat it")
                    old = look(writer.shard)
                    if old is not None and name in old.datasets:  # another process was faster
                        continue
                    schema = {key: kind[:2] for key, kind in old.datasets.items()} if old is not None else {}
                    parts = {key: copy(old, key) for key in schema}
                    attributes = {f"{key}_hash": str(old.attributes[f"{key}_hash"]) for key in schema}
                    attributes["settings"] = json.dumps(settings, sort_keys=True)
                    rest = compute(writer.shard)
                    first = next(rest)  # tells the kind of a row
                    schema[name] = first[2].dtype, (writer.shard.frames, *first[2].shape[1:])
                    parts[name] = itertools.chain([first], rest)
                    pieces = itertools.chain.from_iterable(parts[key] for key in sorted(parts))
                    writer.stream(schema, pieces, **attributes)
                    made.add(number)
            except ShardTaken:
                continue
        others = [number for number in todo if number not in made]
        todo = scan()
        progress.update(sum(dataset.shards[number].frames for number in others if number in found))
        if todo:  # another process is at them; it may be killed
            if runs.stop_requested():
                raise runs.Stopped("another process is computing the rest; the same command goes on")
            if todo != waited:
                print(f"waiting for another process that computes {len(todo)} files of {dataset.folder}", flush=True)
            waited = todo
            time.sleep(2)
    if progress is not None:
        progress.close()
    hashes = "".join(str(found[number].attributes[f"{name}_hash"]) for number in sorted(found))
    arrays = [found[number].array(name) for number in sorted(found)]
    settings = found[min(found)].settings
    dataset.attach(suffix, arrays, hashlib.sha256(hashes.encode()).hexdigest(), settings, offsets)
    about = ", ".join(f"{key} {str(value)[:8]}" for key, value in settings.items())
    print(f"{suffix} of {dataset.folder}, {dataset.render}: {about}", flush=True)
    return time.monotonic() - start
