"""Frames/s and memory of SAM 2.1 by image size, episodes side by side and compilation, beside the package's own path.

    python -m benchmarks.sam --out runs/sam.json
    python -m benchmarks.sam --sizes 512 --batches 1 --compiled-batches None --no-package --frames 980

Weights are random: they cost what trained ones do. On a GPU under bf16 autocast. The paper's figure is 91.5 frames/s on
an A100. "package" is `init_state` on a folder of JPEG files and `propagate_in_video`, loading included; the other rows
are what make_masks.py does. The second command shows that memory stays flat over an episode of 1000 frames.
"""

from __future__ import annotations

import resource
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from benchmarks import about, clock
from common import runs, sam
from common.cli import Count, cli
from common.store import write_json

FRAME_SIZE = 64  # of the Control Suite
BOX = (13, 24, 54, 50)


@dataclass
class Args:
    model: Literal["tiny", "small", "base-plus", "large"] = "tiny"
    """size of the image encoder"""
    sizes: tuple[Count, ...] = (1024, 512)
    """heights and widths at which SAM sees a frame"""
    package: bool = True
    """time the package's own path"""
    batches: tuple[Count, ...] = (1, 8, 16)
    """numbers of episodes side by side"""
    compiled_batches: tuple[Count, ...] | None = (8,)
    """numbers of episodes side by side, with compiled networks; None: time none of them"""
    warmup: Count = 20
    """frames of each episode before the clock starts: by then SAM's memory is full and code is compiled"""
    frames: Count = 40
    """frames of each episode that are timed"""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """where"""
    out: Path | None = None
    """JSON file for the figures, written after every row"""


def moving_texture(frames: int, seed: int) -> np.ndarray:
    """An episode, uint8 (frames, 64, 64, 3): a texture that drifts."""
    rng = np.random.default_rng(seed)
    texture = rng.integers(0, 256, (8, 8, 3), np.uint8).repeat(FRAME_SIZE // 8, 0).repeat(FRAME_SIZE // 8, 1)
    return np.stack([np.roll(texture, t, axis=1) for t in range(frames)])


def resident_mib() -> float:
    """Memory of this process that is in use now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20


def time_ours(predictor: Any, args: Args, batch: int, device: torch.device) -> dict[str, Any]:
    """Frames/s of all episodes together after the warm-up; memory then, after every 100 frames and at the end."""
    total = args.warmup + args.frames
    start = clock(device)
    begin, done, memory = start, 0, []

    def tick(_frames: int) -> None:
        nonlocal begin, done
        done += 1
        if done == args.warmup:
            begin = clock(device)
        if done in (args.warmup, total) or done % 100 == 0:
            point = {"frame": done, "resident_mib": resident_mib()}
            if device.type == "cuda":
                point["gpu_mib"] = torch.cuda.memory_allocated(device) / 2**20
            memory.append(point)

    sam.segment_episodes(predictor, [moving_texture(total, seed) for seed in range(batch)], BOX, batch, tick)
    seconds = clock(device) - begin
    return {"frames_per_s": batch * args.frames / seconds, "warmup_seconds": begin - start, "memory": memory}


def time_package(predictor: Any, args: Args, device: torch.device) -> dict[str, Any]:
    """An episode through the package's own functions, from JPEG files to masks."""
    from PIL import Image

    total = args.warmup + args.frames
    with tempfile.TemporaryDirectory() as folder:
        for t, frame in enumerate(moving_texture(total, 0)):
            Image.fromarray(frame).save(Path(folder) / f"{t:05d}.jpg", quality=95)
        start = clock(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            state = predictor.init_state(folder)
            loaded = begin = clock(device)
            predictor.add_new_points_or_box(state, 0, 1, box=np.array(BOX, np.float32))
            for t, _, logits in predictor.propagate_in_video(state):
                (logits > 0).cpu()
                if t == args.warmup - 1:
                    begin = clock(device)
            seconds = clock(device) - begin
    loading = (loaded - start) / total * args.frames
    return {"frames_per_s": args.frames / (seconds + loading), "frames_per_s_without_loading": args.frames / seconds}


def main(args: Args) -> None:
    warnings.filterwarnings("ignore", module="sam2")
    device = runs.choose_device(args.device)
    record = about("benchmarks.sam", args) | {"frame_size": FRAME_SIZE, "rows": []}
    rows = [("package", 1, False)] if args.package else []
    rows += [("ours", batch, False) for batch in args.batches]
    rows += [("ours", batch, True) for batch in args.compiled_batches or ()]
    for size in args.sizes:
        for path, batch, compiled in rows:
            entry: dict[str, Any] = {"size": size, "path": path, "batch": batch, "compiled": compiled}
            name = f"{size} x {size}, {path}, {batch} side by side{', compiled' if compiled else ''}"
            torch.manual_seed(0)
            predictor = sam.load_predictor(args.model, None, size, device)
            if compiled:
                torch._dynamo.reset()  # else the second size is traced with symbols, which does not end
                sam.compile_predictor(predictor)
            runs.reset_peak_memory(device)
            try:
                if path == "package":
                    entry |= time_package(predictor, args, device)
                else:
                    entry |= time_ours(predictor, args, batch, device)
                entry["peak_memory_gib"] = runs.peak_memory_gib(device)
                print(
                    f"{name}: {entry['frames_per_s']:,.2f} frames/s, peak {entry['peak_memory_gib']:.2f} GiB",
                    flush=True,
                )
            except torch.cuda.OutOfMemoryError as error:
                entry["error"] = str(error).splitlines()[0]
                print(f"{name}: {entry['error']}", flush=True)
            record["rows"].append(entry)
            if args.out is not None:
                write_json(args.out, record)


if __name__ == "__main__":
    cli(main, Args())
