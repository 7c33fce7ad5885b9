"""What LAPO-Slots costs beside policy and decoder: DINOv2's features, the slots, the latent action model on them.

    python -m benchmarks.slots_cost --env cheetah-run
    python -m benchmarks.slots_cost --env cheetah-run --quick --out benchmarks/results/slots_cost.json

Every piece is timed alone on random numbers of the right size and extrapolated to the data and the schedule that the
script's flags ask for. Weights are random: they change no time. Reading files is not included.
"""

from __future__ import annotations

import copy
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import lapo_slots
from benchmarks.throughput import seconds_per_call
from common import runs
from common.dino import Features
from common.slots import AT_ONCE, CHUNK
from common.tasks import get_task
from make_dataset import default_args


@dataclass
class Args(lapo_slots.Args):
    clips: int = 4
    """clips in a timed update of the slots; on a GPU batch_size is a fair choice"""
    frames: int = 8
    """frames in a timed pass of DINOv2"""
    seconds: float = 5.0
    """least time for each piece"""
    threads: int | None = None
    """torch's threads on the CPU; None: as torch chooses"""
    out: Path | None = None
    """also write the figures to this file, as JSON"""


def defaults(argv: list[str]) -> Args:
    """The script's defaults for the --env and --quick on the command line."""
    return Args(**vars(lapo_slots.defaults(argv)))


def update(
    model: nn.Module, loss: Callable[[], torch.Tensor], clip: float, compiled: bool
) -> tuple[Callable[[], None], Callable[[], None]]:
    """One update of a model, as the script's training loop makes it, and what of it is counted: loss and gradients."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    timed = torch.compile(loss) if compiled else loss

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        timed().backward()
        nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()

    return step, lambda: loss().backward()


def pieces(
    args: Args, device: torch.device
) -> dict[str, tuple[tuple[Callable[[], Any], Callable[[], Any]], int, str, float]]:
    """Name -> (what is timed and what is counted, units in a call, what a unit is, units of the whole run)."""
    size = get_task(args.env).image_size
    data = default_args(["--env", args.env, *(["--quick"] if args.quick else [])])
    size = data.image_size or size
    total = data.train_transitions + data.test_transitions
    features = Features(args.dino_model, None, True, args.dino_image_size, False, device)
    network = features.dino  # made here, and not while its operations are counted
    video_saur = lapo_slots.VideoSaur(args, features.patches, features.dim).to(device)
    lam = lapo_slots.LatentActionModel(args).to(device)
    frames = torch.randint(0, 256, (args.frames, size, size, 3), dtype=torch.uint8, device=device)
    rows = (features.patches, 2 * features.dim)
    clips = SimpleNamespace(extra=torch.randn(args.clips, 4, *rows, device=device).half())
    episodes = torch.randn(AT_ONCE[device.type], CHUNK, features.patches, features.dim, device=device)
    pairs = SimpleNamespace(extra=torch.randn(args.batch_size, 2, args.slot_dim, device=device).half())

    def autocast() -> torch.autocast:
        return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")

    def loss_of(function: Callable, model: nn.Module, batch: Any) -> Callable[[], torch.Tensor]:
        def loss() -> torch.Tensor:
            with autocast():
                return function(model, batch, args)[0]

        return loss

    frozen = copy.deepcopy(video_saur).requires_grad_(False)

    def follow() -> None:
        with autocast():
            frozen.follow(episodes)

    slot_step = update(video_saur, loss_of(lapo_slots.slot_loss, video_saur, clips), args.slot_clip, args.compile)
    lam_step = update(lam, loss_of(lapo_slots.lam_loss, lam, pairs), args.lam_clip, args.compile)
    if args.lam_updates is None:
        lam_units = args.lam_epochs * data.train_transitions
    else:
        lam_units = args.lam_updates * args.batch_size
    slot_units = args.slot_updates * args.batch_size
    return {
        "features": (2 * (lambda: network(frames),), args.frames, "frames", total),
        "slot training": (slot_step, args.clips, "clips", slot_units),
        "slots of every frame": ((follow, follow), episodes.shape[0] * CHUNK, "frames", total),
        "latent action model": (lam_step, args.batch_size, "transitions", lam_units),
    }


def measure(args: Args, device: torch.device, save: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Rates, FLOPs and hours of every piece, and the disk that features and slots take; `save` gets what there is."""
    found: dict[str, Any] = {"complete": False, "pieces": {}}
    for name, ((call, counted), units, unit, total) in pieces(args, device).items():
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:  # other kernels are not counted
            counted()
        rate = units / seconds_per_call(call, device, args.seconds)
        piece = {"unit": unit, "per_second": rate, "units": total, "hours": total / rate / 3600}
        found["pieces"][name] = piece | {"gflops_per_unit": counter.get_total_flops() / units / 1e9}
        save(found)
    features = Features(args.dino_model, None, True, args.dino_image_size, False, device)
    frames = found["pieces"]["features"]["units"]
    found |= {"feature_bytes_per_frame": features.frame_bytes, "features_gb": frames * features.frame_bytes / 1e9}
    found["slots_gb"] = frames * args.num_slots * args.slot_dim * 2 / 1e9
    on_the_fly = frames + 4 * args.slot_updates * args.batch_size
    found["feature_hours_without_cache"] = on_the_fly / found["pieces"]["features"]["per_second"] / 3600
    found["complete"] = True
    save(found)
    return found


def main(args: Args) -> None:
    runs.check_at_least(args, 1, "clips", "frames", "threads")
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    device = runs.choose_device(args.device)
    torch.set_float32_matmul_precision("high")
    about = {"command": shlex.join(["python", "-m", "benchmarks.slots_cost", *sys.argv[1:]])}
    about |= {"commit": runs.git_commit(), "machine": runs.machine(), "versions": runs.versions()}
    about["args"] = runs.jsonable(args)

    def save(found: dict[str, Any]) -> None:
        if args.out is not None:
            runs.write_json(args.out, about | found)

    found = measure(args, device, save)
    print(f"{'piece':22} {'rate':>24} {'GFLOP per unit':>15} {'units of a run':>15} {'hours':>10}")
    for name, piece in found["pieces"].items():
        flops = f"{piece['gflops_per_unit']:,.2f}"
        rate = f"{piece['per_second']:,.1f} {piece['unit']}/s"
        print(f"{name:22} {rate:>24} {flops:>15} {piece['units']:>15,.0f} {piece['hours']:>10,.2f}")
    print(
        f"features: {found['feature_bytes_per_frame']:,} bytes per frame, {found['features_gb']:,.1f} GB; "
        f"without files {found['feature_hours_without_cache']:,.2f} hours; slots: {found['slots_gb']:,.2f} GB"
    )
    if args.out is not None:
        print(f"written: {args.out}")


if __name__ == "__main__":
    runs.cli(main, defaults)
