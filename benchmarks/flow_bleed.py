"""How much of RAFT's flow inside the agent's mask is the background's motion.

    python -m benchmarks.flow_bleed --env cheetah-run --raft small --raft-checkpoint raft_small.pth

Both renders of a data set show the same states, so where only the background differs, as with `make_dataset.py
--quick`, the flow inside the mask should be the same in both. Reported are the speeds inside the mask, the distance
between the two flows, and over transitions the correlation of the mean flow inside the mask with that in a ring around
it and with that of the rest of the picture (for both renders), and with the clean one.
"""

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from scipy import ndimage

import laof
from common import runs
from common.dataset import Dataset
from common.errors import UserError
from common.raft import load_raft
from common.shards import RENDERS

RING, FAR = (1, 5), 12  # pixels from the mask to the edges of the ring, and to the rest of the picture
BATCH = 8


@dataclass
class Args:
    env: str = "cheetah-run"
    """task whose data is read"""
    data_dir: Path = Path("data")
    """folder of the data sets"""
    split: Literal["train", "test"] = "test"
    """split of the data set"""
    transitions: int = 100
    """transitions, evenly spaced over the split"""
    raft: Literal["large", "small"] = "large"
    """which RAFT computes the flow"""
    raft_checkpoint: Path | None = None
    """RAFT's weights; None: torchvision downloads its own"""
    raft_iterations: int = 12
    """RAFT's updates of the flow"""
    out: Path | None = None
    """also write the figures to this file, as JSON"""


def correlation(a: np.ndarray, b: np.ndarray) -> list[float]:
    """Of mean flows (N, 2) over transitions, for x and y; 0 where one of them never changes."""
    with np.errstate(invalid="ignore"):
        return [float(np.nan_to_num(np.corrcoef(a[:, axis], b[:, axis])[0, 1])) for axis in (0, 1)]


def measure(flow: dict[str, np.ndarray], masks: np.ndarray) -> dict[str, Any]:
    """The figures, from both renders' flow (N, H, W, 2) in pixels and the next frame's masks, bool (N, H, W)."""
    inner, outer, near = (
        np.stack([ndimage.binary_dilation(mask, iterations=width) for mask in masks]) for width in (*RING, FAR)
    )
    rings, far = outer & ~inner, ~near
    seen = masks.any((1, 2)) & rings.any((1, 2)) & far.any((1, 2))
    if seen.sum() < 3:
        raise UserError("too few transitions show the agent; take more --transitions")

    def mean(field: np.ndarray, where: np.ndarray) -> np.ndarray:
        return np.stack([one[here].mean(0) for one, here in zip(field[seen], where[seen])])

    speed = {render: np.linalg.norm(field, axis=-1)[masks] for render, field in flow.items()}
    distance = np.linalg.norm(flow["distractor"] - flow["clean"], axis=-1)[masks]
    inside = {render: mean(field, masks) for render, field in flow.items()}
    around = {
        f"correlation_with_{name}": {
            render: correlation(inside[render], mean(flow[render], where)) for render in RENDERS
        }
        for name, where in (("ring", rings), ("far", far))
    }
    return around | {
        "median_speed_inside": {render: float(np.median(values)) for render, values in speed.items()},
        "mean_speed_inside": {render: float(values.mean()) for render, values in speed.items()},
        "median_distance_to_clean": float(np.median(distance)),
        "mean_distance_to_clean": float(distance.mean()),
        "correlation_with_clean": correlation(inside["distractor"], inside["clean"]),
    }


def main(args: Args) -> None:
    runs.check_at_least(args, 3, "transitions")
    runs.check_at_least(args, 1, "raft_iterations")
    device = runs.choose_device("auto")
    sets = {render: Dataset(args.data_dir, args.env, args.split, render) for render in RENDERS}
    if any(sets["clean"].plan["distractors"].get(name) for name in ("camera_scale", "color_scale")):
        raise UserError(
            f"{sets['clean'].folder}: camera or colours move too, so the renders cannot be compared; make data with "
            f"backgrounds only: python make_dataset.py --env {args.env} --quick --data-dir DIR"
        )
    raft, weights = load_raft(args.raft, args.raft_checkpoint, device)
    dataset = sets["clean"]
    index = dataset.transitions[:: max(1, dataset.num_transitions // args.transitions)][: args.transitions]
    size, flow = dataset.image_size, {}
    progress = runs.Progress(f"flow {args.env}", 2 * len(index), "transitions")
    for render, frames in sets.items():
        parts = []
        for start in range(0, len(index), BATCH):
            t = index[start : start + BATCH]
            pair = (torch.from_numpy(frames.frames(where)).to(device) for where in (t, t + 1))
            parts.append(laof.optical_flow(raft, *pair, args.raft_iterations).float().cpu().numpy())
            progress.update(len(t))
        flow[render] = np.concatenate(parts)
    masks = np.unpackbits(sets["distractor"].masks(index + 1), axis=-1).reshape(-1, size, size).astype(bool)
    found = measure(flow, masks)
    for name, value in found.items():
        print(f"{name:26} {value}")
    if args.out is not None:
        about = {"command": shlex.join(["python", "-m", "benchmarks.flow_bleed", *sys.argv[1:]])}
        about |= {"commit": runs.git_commit(), "machine": runs.machine(), "versions": runs.versions()}
        about |= {"env": args.env, "image_size": size, "transitions": len(index), "dataset": dataset.hash}
        about |= {"distractors": dataset.plan["distractors"], "raft": args.raft, "iterations": args.raft_iterations}
        runs.write_json(args.out, about | {"weights": weights} | found)


if __name__ == "__main__":
    runs.cli(main, Args())
