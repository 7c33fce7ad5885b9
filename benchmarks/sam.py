"""Frames/s of SAM 2.1 by image size, batch and compilation, beside the package's own path; and memory over an episode.

    python -m benchmarks.sam --out runs/sam.json
    python -m benchmarks.sam --rows --memory-frames 1000 --memory-size 512

Weights are random: they cost what trained ones do. On a GPU under bf16 autocast. The paper's figure is 91.5 frames/s on
an A100. "package" is `init_state` on a folder of JPEG files and `propagate_in_video`, loading included.
"""

import resource
import shlex
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from common import runs, sam

FRAME_SIZE = 64  # of the Control Suite
BOX = (13, 24, 54, 50)


@dataclass
class Args:
    model: Literal["tiny", "small", "base-plus", "large"] = "tiny"
    """size of the image encoder"""
    sizes: tuple[int, ...] = (1024, 512)
    """heights and widths at which SAM sees a frame"""
    rows: tuple[Literal["package", "1", "2", "4", "8", "16", "32", "1c", "2c", "4c", "8c", "16c", "32c"], ...] = (
        "package",
        "1",
        "8",
        "16",
        "8c",
    )
    """what to time: the package's own path, or this number of episodes side by side; c: compiled"""
    warmup: int = 20
    """frames of each episode before the clock starts: by then the memory is full and code is compiled"""
    frames: int = 40
    """frames of each episode that are timed"""
    memory_frames: int = 0
    """also follow memory over one episode of this many frames"""
    memory_size: int = 1024
    """height and width for that"""
    memory_batch: int = 1
    """episodes side by side for that"""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """where"""
    out: Path | None = None
    """JSON file for the figures, written after every row"""


def episode(frames: int, seed: int) -> np.ndarray:
    """Frames uint8 (frames, 64, 64, 3) of a texture that drifts."""
    rng = np.random.default_rng(seed)
    texture = rng.integers(0, 256, (8, 8, 3), np.uint8).repeat(FRAME_SIZE // 8, 0).repeat(FRAME_SIZE // 8, 1)
    return np.stack([np.roll(texture, t, axis=1) for t in range(frames)])


def clock(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def load(args: Args, size: int, device: torch.device) -> Any:
    torch.manual_seed(0)
    return sam.load_predictor(args.model, None, size, device)


def time_batch(args: Args, size: int, batch: int, compiled: bool, device: torch.device) -> dict[str, Any]:
    """Frames/s of all episodes together once the memory is full, and the seconds until then."""
    predictor = load(args, size, device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    start = clock(device)
    if compiled:
        sam.compile_predictor(predictor)
    total = args.warmup + args.frames
    frames = torch.from_numpy(np.stack([episode(total, seed) for seed in range(batch)])).to(device)
    tracker = sam.Tracker(predictor, BOX, (FRAME_SIZE, FRAME_SIZE), batch, total)
    for t in range(args.warmup):
        sam.pack(tracker.step(frames[:, t]))
    begin = clock(device)
    for t in range(args.warmup, total):
        sam.pack(tracker.step(frames[:, t]))
    seconds = clock(device) - begin
    return {
        "frames_per_s": batch * args.frames / seconds,
        "warmup_s": begin - start,
        "peak_gib": runs.peak_memory_gib(device),
        "share": shares(predictor, tracker, frames[:, -1], device),
    }


def shares(predictor: Any, tracker: sam.Tracker, frames: torch.Tensor, device: torch.device) -> dict[str, float]:
    """The share of each network in the time of one step, waiting for the device around each."""
    spent: dict[str, float] = {}
    hooks = []
    for name in ("image_encoder", "memory_attention", "sam_mask_decoder", "memory_encoder"):

        def before(*_: Any, name: str = name) -> None:
            spent[name] = spent.get(name, 0.0) - clock(device)

        def after(*_: Any, name: str = name) -> None:
            spent[name] += clock(device)

        module = getattr(predictor, name)
        hooks += [module.register_forward_pre_hook(before), module.register_forward_hook(after)]
    start = clock(device)
    tracker.step(frames)
    whole = clock(device) - start
    for hook in hooks:
        hook.remove()
    return {name: seconds / whole for name, seconds in spent.items()}


def time_package(args: Args, size: int, device: torch.device) -> dict[str, float]:
    """The same episode through the package's own functions, from JPEG files to masks."""
    from PIL import Image

    predictor = load(args, size, device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    total = args.warmup + args.frames
    with tempfile.TemporaryDirectory() as folder:
        for t, frame in enumerate(episode(total, 0)):
            Image.fromarray(frame).save(Path(folder) / f"{t:05d}.jpg", quality=95)
        start = clock(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            state = predictor.init_state(folder)
            loaded = clock(device)
            predictor.add_new_points_or_box(state, 0, 1, box=np.array(BOX, np.float32))
            for t, _, logits in predictor.propagate_in_video(state):
                (logits > 0).cpu()
                if t == args.warmup - 1:
                    begin = clock(device)
            seconds = clock(device) - begin
    loading = (loaded - start) / total * args.frames
    return {
        "frames_per_s": args.frames / (seconds + loading),
        "frames_per_s_without_loading": args.frames / seconds,
        "peak_gib": runs.peak_memory_gib(device),
    }


def follow_memory(args: Args, device: torch.device) -> Iterator[dict[str, float]]:
    """Memory of the process (and the GPU) at some frames of one long episode."""
    predictor = load(args, args.memory_size, device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    points: list[dict[str, float]] = []
    seen = 0
    marks = {1, 10, 20, 50, *range(100, args.memory_frames + 1, 100), args.memory_frames}

    def tick(frames: int) -> None:
        nonlocal seen
        seen += 1
        if seen in marks:
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            point = {
                "frame": seen,
                "resident_mib": pages * resource.getpagesize() / 2**20,
                "peak_resident_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10,
            }
            if device.type == "cuda":
                point["gpu_mib"] = torch.cuda.memory_allocated(device) / 2**20
                point["peak_gpu_mib"] = torch.cuda.max_memory_allocated(device) / 2**20
            points.append(point)
            print("  ".join(f"{name} {value:.1f}" for name, value in point.items()), flush=True)

    episodes = [episode(args.memory_frames, seed) for seed in range(args.memory_batch)]
    sam.segment_episodes(predictor, episodes, BOX, args.memory_batch, tick)
    yield from points


def main(args: Args) -> None:
    warnings.filterwarnings("ignore", module="sam2")
    name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name if args.device == "auto" else args.device)
    outcome: dict[str, Any] = {
        "command": shlex.join(["python", "-m", "benchmarks.sam", *sys.argv[1:]]),
        "commit": runs.git_commit(),
        "machine": runs.machine(),
        "versions": runs.versions(),
        "frame_size": FRAME_SIZE,
        "rows": [],
        "memory": None,
    }

    def save() -> None:
        if args.out:
            runs.write_json(args.out, outcome)

    for size in args.sizes:
        for row in args.rows:
            compiled, batch = row.endswith("c"), 1 if row == "package" else int(row.rstrip("c"))
            try:
                found = (
                    time_package(args, size, device)
                    if row == "package"
                    else time_batch(args, size, batch, compiled, device)
                )
            except torch.cuda.OutOfMemoryError as error:
                found = {"error": str(error).splitlines()[0]}
            outcome["rows"].append({"size": size, "row": row, "batch": batch, "compiled": compiled} | found)
            flat = {k: v for k, v in found.items() if k != "share"} | found.get("share", {})
            numbers = "  ".join(f"{k} {v:.2f}" if isinstance(v, float) else f"{k} {v}" for k, v in flat.items())
            print(f"{size:5} {row:8} {numbers}", flush=True)
            save()
    if args.memory_frames:
        points = list(follow_memory(args, device))
        outcome["memory"] = {"size": args.memory_size, "batch": args.memory_batch, "points": points}
        save()


if __name__ == "__main__":
    runs.cli(main, Args())
