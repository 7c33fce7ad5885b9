"""The study of a real robot in docs/videos.md: masks of its arm, and its videos with other clips behind the arm.

    python -m benchmarks.robot_study --env g1 --out data/g1-study
    python -m benchmarks.robot_study --env g1 --mask-source arm --backgrounds data/DAVIS --out data/g1-davis-study

Without --backgrounds it writes masks of what moves before a still camera and has the arm's colours, for make_masks.py
--import. With --backgrounds, videos/, masks/ and actions/ to import as a dataset of their own: clips play wherever the
mask is false, those of DAVIS's train list in the train split, those of its val list in the test split.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image
from scipy import ndimage

from common.cli import Name, Progress, cli
from common.dataset import Dataset
from common.distractors import BackgroundPlayer, DistractorConfig, load_clips
from common.tasks import get_task

MOVED = 28  # difference to the episode's median in any colour, of 255, from which a pixel has moved
DARK, BLUE = 75, 5  # the arm is black, or more blue than red by this much; floor and shadows are brown, the can orange
SMALLEST = 12  # pixels of a part that is kept


@dataclass
class Args:
    env: Name = "g1"
    """name of the dataset"""
    out: Path = Path("data/g1-study")
    """folder to write to"""
    mask_source: Name = ""
    """masks of the arm, for --backgrounds"""
    backgrounds: Path | None = None
    """DAVIS in one of its layouts"""
    data_dir: Path = Path("data")
    """folder of the datasets"""


def arm_masks(frames: np.ndarray) -> np.ndarray:
    """Bool (T, H, W): what has the arm's colours and moves in uint8 frames (T, H, W, 3) of a still camera."""
    values = frames.astype(np.int16)
    moved = abs(values - np.median(values, axis=0)).max(-1) > MOVED
    arm = moved & ((values.max(-1) < DARK) | (values[..., 2] - values[..., 0] >= BLUE))
    for mask in arm:
        mask[:] = ndimage.binary_closing(mask, iterations=2)
        parts, count = ndimage.label(mask)
        sizes = ndimage.sum_labels(mask, parts, np.arange(1, count + 1))
        mask[:] = np.isin(parts, 1 + np.flatnonzero(sizes >= SMALLEST))
    return arm


def composite(frames: np.ndarray, masks: np.ndarray, player: BackgroundPlayer) -> np.ndarray:
    """The frames inside the masks (T, H, W), a clip outside."""
    images = []
    for frame, mask in zip(frames, masks):
        images.append(np.where(mask[..., None], frame, player.frame))
        player.step()
    return np.stack(images)


def main(args: Args) -> None:
    for split in ("train", "test"):
        dataset = Dataset(args.data_dir, args.env, split, None, args.mask_source or "gt")
        size = dataset.image_size
        if args.backgrounds is not None:  # a Meta-World task, where clips fill the picture and are not mirrored
            config = DistractorConfig(davis_dir=args.backgrounds, num_videos=4)
            clips = load_clips(config, get_task("reach"), split, size)
        with Progress(f"{args.env} {split}", dataset.num_episodes, "episodes") as progress:
            for episode, (first, end) in enumerate(zip(dataset.episode_start, dataset.episode_start[1:])):
                index, name = np.arange(first, end), f"{split}{episode:05d}"
                frames = dataset.frames(index)
                if args.backgrounds is None:
                    path = args.out / args.env / split / "video" / f"{episode:05d}.npy"
                    path.parent.mkdir(parents=True, exist_ok=True)
                    np.save(path, arm_masks(frames))
                else:
                    masks = np.unpackbits(dataset.masks(index), axis=1).reshape(-1, size, size).astype(bool)
                    player = BackgroundPlayer(clips, np.random.default_rng([split == "test", episode]))
                    for folder in ("masks", "actions", f"videos/{split}/{name}"):
                        (args.out / folder).mkdir(parents=True, exist_ok=True)
                    np.save(args.out / "masks" / f"{name}.npy", masks)
                    np.save(args.out / "actions" / f"{name}.npy", dataset.original_action(dataset.action[index[:-1]]))
                    for number, image in enumerate(composite(frames, masks, player)):
                        Image.fromarray(image).save(args.out / "videos" / split / name / f"{number:05d}.png")
                progress.update()


if __name__ == "__main__":
    cli(main, Args())
