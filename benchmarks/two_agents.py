"""Writes videos of two agents under one moving background, with a mask and the actions of each, to import.

    python -m benchmarks.two_agents --out data/two-agents

In each half of the picture a square goes where its action says, a place that is drawn anew for every step. Below --out
are videos/<episode>/ (frames as PNG), left/ and right/ (masks for make_masks.py --import), and actions/<episode>.npy:
the next place of the left square and of the right one, down and to the right, from -1 to 1. docs/videos.md has the
commands that use them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
from PIL import Image

from common.cli import Count, Progress, Range, Seed, cli
from common.distractors import synthetic_clip

SIDE = 10  # of a square, in pixels
RAMP = np.linspace(0, 255, SIDE)
# Colours that tell each pixel of a square from the others: of a plain one, the masked loss needs no latent action.
PATCH = np.stack(np.broadcast_arrays(RAMP[:, None], RAMP[None], 128.0), axis=-1).astype(np.uint8)


@dataclass
class Args:
    out: Path = Path("data/two-agents")
    """folder to write to"""
    episodes: Count = 80
    """videos"""
    steps: Count = 100
    """transitions in each"""
    size: Annotated[int, Range(24, 1024)] = 64
    """height and width of the frames in pixels"""
    seed: Seed = 0
    """of the places and of the background"""


def main(args: Args) -> None:
    size, progress = args.size, Progress("two agents", args.episodes, "videos")
    ends = np.array([size, size // 2]) - SIDE
    for episode in range(args.episodes):
        rng = np.random.default_rng([args.seed, episode])
        frames = synthetic_clip("train", 1000 + episode, size, args.steps + 1)
        actions = []
        for name, patch, start in (("left", PATCH, 0), ("right", 255 - PATCH, size // 2)):
            places = rng.integers(0, ends + 1, (args.steps + 1, 2))  # of the upper left corner, in its half
            masks = np.zeros((args.steps + 1, size, size), bool)
            for frame, mask, (top, left) in zip(frames, masks, places + np.array([0, start])):
                mask[top : top + SIDE, left : left + SIDE] = True
                frame[top : top + SIDE, left : left + SIDE] = patch
            actions.append(2 * places[1:] / ends - 1)
            (args.out / name).mkdir(parents=True, exist_ok=True)
            np.save(args.out / name / f"{episode:05d}.npy", masks)
        (args.out / "actions").mkdir(exist_ok=True)
        np.save(args.out / "actions" / f"{episode:05d}.npy", np.concatenate(actions, axis=1))
        folder = args.out / "videos" / f"{episode:05d}"
        folder.mkdir(parents=True, exist_ok=True)
        for number, frame in enumerate(frames):
            Image.fromarray(frame).save(folder / f"{number:05d}.png")
        progress.update()
    progress.close()


if __name__ == "__main__":
    cli(main, Args())
