"""A planted data set: a square that goes where the action says, over a background that moves by itself."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np

from common.dataset import Dataset
from common.distractors import DistractorConfig, clips_digest
from common.shards import frame_schema, read_shard, shard_paths, write_shard
from common.tasks import get_task


def background(rng: np.random.Generator, size: int) -> np.ndarray:
    """A texture with a 1/f spectrum, uint8 (size, size, 3), periodic."""
    frequency = np.hypot(*np.meshgrid(np.fft.fftfreq(size), np.fft.fftfreq(size)))
    frequency[0, 0] = np.inf
    noise = np.fft.fft2(rng.standard_normal((3, size, size))) / frequency
    texture = np.fft.ifft2(noise).real
    return np.clip(128 + 50 * texture / texture.std((1, 2), keepdims=True), 0, 255).astype(np.uint8).transpose(1, 2, 0)


def episode(rng: np.random.Generator, length: int, size: int, action_dim: int, moving: bool) -> dict[str, np.ndarray]:
    """Arrays of one episode; the first two action dimensions say where the square goes, the others do nothing."""
    side = size // 3
    reach = (size - side) / 2
    action = rng.uniform(-1, 1, (length + 1, action_dim)).astype(np.float32)
    ramp = np.linspace(0, 255, side)  # the square's colours tell each of its pixels from the others
    patch = np.stack(np.broadcast_arrays(ramp[:, None], ramp[None], 128.0), axis=-1).astype(np.uint8)
    texture = background(rng, size)
    place, drift = np.full(2, reach), np.zeros(2)
    frames, masks, states = [], [], []
    for step in range(length + 1):
        frame = np.roll(texture, tuple(np.round(drift).astype(int)), (0, 1)).copy()
        top, left = np.round(place).astype(int)
        frame[top : top + side, left : left + side] = patch
        mask = np.zeros((size, size), bool)
        mask[top : top + side, left : left + side] = True
        frames.append(frame)
        masks.append(np.packbits(mask))
        states.append(place)
        place = reach + reach * action[step, :2]
        drift = drift + (rng.uniform(-4, 4, 2) if moving else 0)
    action[-1] = np.nan
    reward = np.append(np.ones(length), 0).astype(np.float32)
    arrays = {"action": action, "reward": reward, "state": np.array(states, np.float32)}
    for render in ("clean", "distractor"):
        arrays |= {f"{render}/observation": np.stack(frames), f"{render}/mask": np.stack(masks)}
    return arrays


def write(
    data_dir: Path,
    *,
    train: int = 4,
    test: int = 2,
    length: int = 20,
    size: int = 32,
    action_dim: int = 6,
    env: str = "cheetah-run",
    moving: bool = True,
    success: tuple[bool, ...] | None = None,
    shards: int = 1,
    lengths: tuple[int, ...] | None = None,
    scale: float = 0.1,
) -> Path:
    """Writes both splits of a planted set (episodes of `length` transitions) and returns `data_dir`.

    `shards`: of each split, episodes dealt evenly. `lengths`: of a split's episodes in turn, instead of `length`.

    `scale`: what the plan says of camera and colour distractors.

    `success`: for Meta-World, whether each of the train episodes succeeds at its end; those of the test split do.
    """
    for number, (split, episodes) in enumerate((("train", train), ("test", test))):
        steps = [(lengths or (length,))[i % len(lengths or (length,))] for i in range(episodes)]
        plan = {
            "env": env,
            "split": split,
            "image_size": size,
            "action_dim": action_dim,
            "state_dim": 2,
            "success": success is not None,
            "renders": ["clean", "distractor"],
            "num_shards": shards,
            "num_transitions": sum(steps),
            "episode_length": max(steps),
            "expert": "planted",
            "expert_sha256": "",
            "quality": "fast",
            "distractors": {
                "backgrounds": "synthetic",
                "clips": clips_digest(
                    DistractorConfig(backgrounds="synthetic", num_videos=1), get_task(env), split, size
                ),
                "camera_scale": scale,
                "color_scale": scale,
            },
        }
        folder = data_dir / env / split
        folder.mkdir(parents=True, exist_ok=True)
        rng = np.random.default_rng([number, 7])
        for shard, part in enumerate(np.array_split(np.arange(episodes), shards)):
            rolled = []
            for index in part.tolist():
                arrays = episode(rng, steps[index], size, action_dim, moving)
                if success is not None:
                    arrays["success"] = np.zeros(steps[index] + 1, bool)
                    arrays["success"][steps[index] - 1] = split == "test" or success[index]
                rolled.append(arrays)
            whole = {name: np.concatenate([arrays[name] for arrays in rolled]) for name in frame_schema(plan)}
            whole["episode_start"] = np.cumsum([0] + [len(arrays["action"]) for arrays in rolled])
            write_shard(folder / f"{shard:05d}.h5", plan, whole, {"seed": part.tolist()})
    return data_dir


def write_recorded(data_dir: Path, *, actions: bool = True, masks: bool = True, **options: Any) -> Path:
    """Writes a planted set, `own`, as import_data.py writes recorded videos. options: as for `write`."""
    simulated = write(data_dir / "simulated", **options) / "cheetah-run"
    for split in ("train", "test"):
        (data_dir / "own" / split).mkdir(parents=True)
        for path in shard_paths(simulated / split):
            shard = read_shard(path)
            plan = shard.plan | {"env": "own", "renders": ["video"], "state_dim": 0, "quality": None, "fps": 10.0}
            plan |= {"expert": None, "distractors": None, "reward": False, "masks": masks, "source": {"kind": "videos"}}
            if not actions:
                plan["action_dim"] = 0
            else:
                ones = np.ones(plan["action_dim"])
                plan["action_scale"] = {"low": (-3 * ones).tolist(), "high": (3 * ones).tolist(), "names": None}
            arrays = {name.replace("distractor/", "video/"): array for name, array in shard.arrays.items()}
            kept = {name: arrays[name] for name in (*frame_schema(plan), "episode_start")}
            sources = [f"{split}{number}.mp4" for number in range(shard.num_episodes)]
            episodes = {"source": sources, "start_seconds": [0.5] * len(sources)}
            write_shard(data_dir / "own" / split / path.name, plan, kept, episodes)
    return data_dir


def write_given_masks(data_dir: Path, folder: Path) -> Path:
    """Writes a planted set's masks, the last row erased, as make_masks.py --import reads them. Returns `folder`."""
    for split, render in itertools.product(("train", "test"), ("clean", "distractor")):
        dataset = Dataset(data_dir, "cheetah-run", split, render)
        masks = np.unpackbits(dataset.masks(np.arange(dataset.num_frames)), axis=1)
        masks = masks.reshape(-1, dataset.image_size, dataset.image_size).astype(bool)
        masks[:, -1] = False
        place = folder / "cheetah-run" / split / render
        place.mkdir(parents=True)
        for episode, values in enumerate(np.split(masks, dataset.episode_start[1:-1])):
            np.save(place / f"{episode:05d}.npy", values)
    return folder
