"""Datasets of rollouts or videos as training sees them: a split through one render, and batches of windows from it.

`common/shards.py` has the content of the files.
"""

from __future__ import annotations

import contextlib
import ctypes
import difflib
import functools
import hashlib
import itertools
import mmap
import shlex
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from common import store
from common.cli import UserError
from common.shards import DERIVED, Shard, Split, derived_path, read_derived, read_shard, shard_paths
from common.store import Damaged, StoppableProgress
from common.tasks import TASKS

TRAINING_BYTES = 24 * 2**30  # what training takes at most beside the data: the peak that the paper reports
NOISE_DIM = 8  # random numbers per sample of a batch
MAP_CHUNK = 1024  # frames per copy when a whole set is uploaded
READ_AHEAD = 8  # batches that are read from the disk before they are needed
MADVISE = ctypes.CDLL(None).madvise  # of mmap's it would take which mapped file an array lies in
MADVISE.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class Dataset:
    """One split of a dataset, seen through one render.

    Every check but the hashes of the frames runs on opening; `verify` does those. Frames are counted through all shards
    in order, so a global index names one frame. Raises UserError with the command that makes or repairs what is not
    as it should be. What was imported may have no actions, states, rewards or masks: see the attributes.

    Args:
        render: clean or distractor; None for distractor, or clean if the set has no other. An imported video has one
            render, "video", and is seen through it whatever is asked for.
        mask_source: gt for the masks in the shards, or the name of the mask files beside them. A set without masks
            opens with gt too; the first use of its masks is a UserError.
    """

    def __init__(
        self, data_dir: Path, env: str, split: str, render: str | None = "distractor", mask_source: str = "gt"
    ):
        self.env, self.split, self.mask_source = env, split, mask_source
        self.data_dir, self.folder = Path(data_dir), Path(data_dir) / env / split
        self.shards = self._open_shards()
        plan = self.plan = self.shards[0].plan
        self.image_size: int = plan["image_size"]
        self.action_dim: int = plan["action_dim"]
        self.state_dim: int = plan["state_dim"]
        self.render = render = "video" if self.is_recorded else render or plan["renders"][-1]
        if render not in plan["renders"]:
            raise UserError(
                f"{self.folder}: holds no {render} frames, only {', '.join(plan['renders'])}; make the dataset again "
                f"with another --data-dir and: python make_dataset.py --env {env} --render both"
            )
        self._frame_start = np.concatenate([[0], np.cumsum([shard.frames for shard in self.shards])]).astype(np.int64)
        self.num_frames = int(self._frame_start[-1])
        starts = [shard.episode_start[:-1] + start for shard, start in zip(self.shards, self._frame_start)]
        self.episode_start = np.concatenate([*starts, self._frame_start[-1:]])  # int64 (N+1,)
        self.num_episodes = len(self.episode_start) - 1
        self.num_transitions = self.num_frames - self.num_episodes
        self.hash = hashlib.sha256("".join(shard.content_hash for shard in self.shards).encode()).hexdigest()
        self.action = self._matrix("action", self.action_dim)  # float32 (T, A), unclipped; A is 0 if there are none
        # What batches may carry: name -> an array (T, ...) per shard.
        self._rows = {"frames": [shard.arrays[f"{render}/observation"] for shard in self.shards]}
        self.attached: dict[str, dict[str, Any]] = {}  # of further ones: how they came about, and their hash
        self._resident: dict[tuple[str, torch.device], torch.Tensor] = {}
        self.mask_hash = "gt"  # of the mask files, if they are not the shards' own
        if mask_source != "gt":
            self._open_masks(mask_source)
        elif plan.get("masks", True):
            self._rows["masks"] = [shard.arrays[f"{render}/mask"] for shard in self.shards]
        else:
            self.mask_hash = "none"

    # --- opening and checking

    def _command(self, files: Iterable[Path], default: str) -> str:
        """The command that makes some files, as the first readable one remembers it, with this data folder."""
        for path in files:
            with contextlib.suppress(UserError, KeyError):
                default = store.read(path).about["command"] or default
                break
        return default if self.data_dir == Path("data") else f"{default} --data-dir {shlex.quote(str(self.data_dir))}"

    @property
    def command(self) -> str:
        """The command that makes this split, as its shards or the other split's remember it."""
        files = [*shard_paths(self.folder), *sorted(self.folder.parent.glob("*/00000.h5"))]
        imported = f"python import_data.py videos DIR --name {self.env}"
        return self._command(files, f"python make_dataset.py --env {self.env}" if self.env in TASKS else imported)

    def _mask_command(self, source: str) -> str:
        """The command that makes masks of that name, as one of the split's mask files remembers it."""
        default = f"python make_masks.py --env {self.env}"
        box = " --box X0 Y0 X1 Y1" if self.is_recorded else ""
        default += box if source == "sam" else f" --import DIR --name {source}"
        return self._command([derived_path(path, source) for path in shard_paths(self.folder)], default)

    @staticmethod
    def _damaged(error: Damaged, path: Path, command: str) -> UserError:
        return UserError(f"{error}; repair with: rm {shlex.quote(str(path))}{command and ' && '}{command}")

    def _open_shards(self) -> list[Shard]:
        paths = shard_paths(self.folder)
        if not paths and self.env == "all":
            raise UserError("--env all is for make_dataset.py and make_masks.py; name one task here")
        if not paths:
            close = difflib.get_close_matches(self.env, TASKS, n=1, cutoff=0.6)
            hint = f" (or did you mean {close[0]!r}?)" if close and self.env not in TASKS else ""
            raise UserError(f"{self.folder}: no dataset here; make it with: {self.command}{hint}")
        shards: list[Shard] = []
        for path in paths:
            try:
                shard = read_shard(path)
                store.verify(shard, {"action"} & shard.arrays.keys())  # small, and read as a whole anyway
            except Damaged as error:
                raise self._damaged(error, path, self.command) from error
            if (shard.plan["env"], shard.plan["split"]) != (self.env, self.split):
                raise UserError(
                    f"{path}: holds {shard.plan['env']}/{shard.plan['split']}, not {self.env}/{self.split}; move "
                    f"it away and run: {self.command}"
                )
            shards.append(shard)
            if fields := store.differences(shards[0].plan, shard.plan):
                raise UserError(
                    f"{path}: made with other settings than {paths[0].name} ({', '.join(fields)}); remove the folder "
                    f"{self.folder} or the odd shards and run: {self.command}"
                )
        split = Split(self.folder, shards[0].plan, {shard.path: shard.num_transitions for shard in shards})
        if missing := split.first_missing():
            raise UserError(
                f"{self.folder}: incomplete, {missing.name} is missing and {len(shards)} shards are there; finish it "
                f"with: {self.command}"
            )
        row = set(split.candidates())  # those beyond, which make_dataset.py was killed before it removed, do not count
        return [shard for shard in shards if shard.path in row]

    def _open_masks(self, source: str) -> None:
        files = [derived_path(shard.path, source) for shard in self.shards]
        absent = [path for path in files if not path.exists()]
        if absent:
            present = {path.name.split(".")[1] for path in self.folder.glob("[0-9]*.*.h5")} - set(DERIVED)
            present |= {"gt"} if self.plan.get("masks", True) else set()
            lack = f"no masks named '{source}'; there are: {', '.join(sorted(present)) or 'none'}. Make"
            if len(absent) < len(files):
                lack = f"masks '{source}' are missing for {len(absent)} of {len(files)} shards; finish"
            raise UserError(f"{absent[0]}: {lack} them with: {self._mask_command(source)}")
        name, bytes_per_mask = f"{self.render}/mask", self.image_size**2 // 8
        parts, hashes = [], []
        for shard, path in zip(self.shards, files):
            try:
                stored = read_derived(shard, source)
                masks = stored.arrays.get(name)
                if masks is not None and masks.shape != (shard.frames, bytes_per_mask):
                    raise Damaged(f"{path}: {name} is {masks.shape}, expected {(shard.frames, bytes_per_mask)}")
            except Damaged as error:
                raise self._damaged(error, path, self._mask_command(source)) from error
            if masks is None:
                command = f"{self._mask_command(source)} --render {self.render}"
                raise UserError(f"{path}: holds no {name}; add it with: {command}")
            parts.append(masks)
            hashes.append(stored.array_hash(name))
        self.mask_hash = hashlib.sha256("".join(hashes).encode()).hexdigest()
        self._rows["masks"] = parts

    def verify(self) -> None:
        """Re-read and re-hash every episode of both renders, and what was derived from the shards (masks, flow).

        Raises UserError naming file and episode, and Stopped at a signal.
        """
        with StoppableProgress(f"verify {self.env}/{self.split}", self.num_frames, "frames") as progress:
            for shard in self.shards:
                path, command = shard.path, self.command
                try:
                    store.verify(shard)
                    for path in sorted(self.folder.glob(f"{shard.path.stem}.*.h5")):
                        source = path.name.split(".")[1]
                        command = "" if source in DERIVED else self._mask_command(source)  # training makes those again
                        store.verify(read_derived(shard, source))
                except Damaged as error:
                    raise self._damaged(error, path, command) from error
                progress.update(shard.frames)
        print(f"{self.folder}: {len(self.shards)} shards are as they were written, hash {self.hash}")

    # --- content

    @property
    def is_recorded(self) -> bool:
        """Whether it was imported from recorded videos, so that no simulator can go on from its frames."""
        return self.plan["renders"] == ["video"]

    @property
    def has_masks(self) -> bool:
        return "masks" in self._rows

    def with_actions(self) -> Dataset:
        """The set itself, for a method that learns from true actions. UserError if it has none."""
        if not self.action_dim:
            raise UserError(f"{self.folder}: the set has no actions, from which this method learns")
        return self

    def max_offset(self, args: Any) -> int:
        """A script's --max-offset in frames, also if it is given in seconds. UserError if the rate is not known."""
        if args.max_offset_seconds is None:
            return args.max_offset
        if not self.plan.get("fps"):
            raise UserError(f"--max-offset-seconds: {self.folder} has no frame rate; use --max-offset, in frames")
        return max(1, round(args.max_offset_seconds * self.plan["fps"]))

    def episode_values(self, name: str) -> list[Any]:
        """What the shards say of each episode under a name (seed, source, ...), in order."""
        return [value for shard in self.shards for value in shard.episodes[name]]

    def _whole(self, name: str) -> np.ndarray:
        return np.concatenate([shard.arrays[name] for shard in self.shards])

    def _matrix(self, name: str, width: int) -> np.ndarray:
        """float32 (num_frames, width), where the shards leave out an array without columns."""
        return self._whole(name) if width else np.empty((self.num_frames, 0), np.float32)

    @cached_property
    def transitions(self) -> np.ndarray:
        """int64 (num_transitions,): every frame that has a next one in its episode, in order."""
        return np.delete(np.arange(self.num_frames), self.episode_start[1:] - 1)

    @cached_property
    def episode_of_frame(self) -> np.ndarray:
        """int32 (num_frames,)."""
        return np.repeat(np.arange(self.num_episodes, dtype=np.int32), np.diff(self.episode_start))

    @cached_property
    def state(self) -> np.ndarray:
        """float32 (num_frames, S); S is 0 if there are no states."""
        return self._matrix("state", self.state_dim)

    @cached_property
    def reward(self) -> np.ndarray | None:
        """float32 (num_frames,), or None where there are no rewards."""
        return self._whole("reward") if self.plan.get("reward", True) else None

    @cached_property
    def episode_return(self) -> np.ndarray | None:
        """float64 (num_episodes,): sum of rewards; None where there are none."""
        if self.reward is None:
            return None
        return np.add.reduceat(self.reward.astype(np.float64), self.episode_start[:-1])

    @cached_property
    def episode_success(self) -> np.ndarray | None:
        """bool (num_episodes,), or None where the suite knows no success."""
        if not self.plan["success"]:
            return None
        return np.logical_or.reduceat(self._whole("success"), self.episode_start[:-1])

    @property
    def mean_return(self) -> float | None:
        return None if self.episode_return is None else float(self.episode_return.mean())

    @cached_property
    def action_variance(self) -> float | None:
        """Population variance of the actions clipped to [-1, 1], averaged over dimensions: the denominator of NMSE.

        None where there are no actions.
        """
        if not self.action_dim:
            return None
        count, total, squares = 0, np.zeros(self.action_dim), np.zeros(self.action_dim)
        for chunk in np.array_split(self.transitions, max(1, len(self.transitions) >> 18)):
            action = np.clip(self.action[chunk].astype(np.float64), -1, 1)
            count, total, squares = count + len(action), total + action.sum(0), squares + (action**2).sum(0)
        return float((squares / count - (total / count) ** 2).mean())

    def describe(self) -> str:
        """Its folder and size in a line."""
        size = sum(shard.path.stat().st_size for shard in self.shards)
        counts = f"{self.num_transitions:,} transitions in {self.num_episodes:,} episodes"
        return f"{self.folder}: {len(self.shards)} shards, {counts}, {size / 1e9:.2f} GB, hash {self.hash}"

    def summary(self) -> dict[str, Any]:
        """What a result must say about its data, as JSON values."""
        return {
            "hash": self.hash,
            "episodes": self.num_episodes,
            "transitions": self.num_transitions,
            "mean_return": self.mean_return,
            "return_std": None if self.episode_return is None else float(self.episode_return.std()),
            "success_rate": None if self.episode_success is None else float(self.episode_success.mean()),
            "action_variance": self.action_variance,
            "render": self.render,
            "mask_source": self.mask_source,
            "mask_hash": self.mask_hash,
            "extra": self.attached,
            "plan": self.plan,
        }

    def original_action(self, action: np.ndarray) -> np.ndarray:
        """Actions (..., A) in the units that they were imported in: undoes the plan's `action_scale`, if it has one."""
        scale = self.plan.get("action_scale")
        if scale is None:
            return action
        low, high = np.array(scale["low"]), np.array(scale["high"])
        return (low + (action + 1) / 2 * (high - low)).astype(np.float32)

    def labelled(self, num_labels: int, seed: int) -> np.ndarray:
        """Exactly `num_labels` transitions, int64 sorted: whole episodes in random order, the last one cut short.

        None of a set without actions.
        """
        if not self.action_dim:
            return np.empty(0, np.int64)
        if not 0 < num_labels <= self.num_transitions:
            raise UserError(
                f"{self.folder}: holds {self.num_transitions:,} transitions, so --num-labels {num_labels:,} is not "
                "possible; lower it, or make a larger dataset"
            )
        order = np.random.default_rng(np.random.SeedSequence([seed, 0x1ABE1])).permutation(self.num_episodes)
        episodes = [np.arange(self.episode_start[i], self.episode_start[i + 1] - 1) for i in order]
        return np.sort(np.concatenate(episodes)[:num_labels])

    # --- gathering

    def frames(self, index: np.ndarray) -> np.ndarray:
        """Frames at global indices (...,): uint8 (..., H, W, 3). Fastest if the indices visit the shards in order."""
        return self.rows("frames", index)

    def masks(self, index: np.ndarray) -> np.ndarray:
        """Bit-packed masks at global indices (...,): uint8 (..., H*W/8)."""
        return self.rows("masks", index)

    def attach(self, name: str, parts: list[np.ndarray], digest: str, settings: dict[str, Any] | None = None) -> None:
        """Add something computed per frame, which batches then may carry: an array (T, ...) per shard.

        digest, settings: hash of the content and how it came about, for the result. Raises ValueError for arrays that
        do not fit the shards.
        """
        kinds = {(part.dtype, part.shape[1:]) for part in parts}
        if len(kinds) != 1 or [len(part) for part in parts] != [shard.frames for shard in self.shards]:
            raise ValueError(f"{name}: needs one array per shard, a row per frame, all of one kind")
        self._rows[name] = parts
        self.attached[name] = (settings or {}) | {"hash": digest}

    def _parts(self, name: str) -> list[np.ndarray]:
        """The array of each shard. UserError for masks where there are none."""
        if name == "masks" and name not in self._rows:
            raise UserError(
                f"{self.folder}: the set has no masks; make them and name them with --mask-source: "
                f"{self._mask_command('sam')}"
            )
        return self._rows[name]

    def row_kind(self, name: str) -> tuple[np.dtype, tuple[int, ...]]:
        """The dtype and the shape of a row of frames, masks, or of what was attached under a name."""
        part = self._parts(name)[0]
        return part.dtype, part.shape[1:]

    def rows(self, name: str, index: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        """Rows at global frame indices (...,): (..., *shape of a row). name: frames, masks, or something attached."""
        parts, (dtype, item) = self._parts(name), self.row_kind(name)
        index = np.asarray(index, np.int64)
        if out is None:
            out = np.empty((*index.shape, *item), dtype)
        flat, rows = index.reshape(-1), out.reshape(-1, *item)
        if len(flat) and (flat.min() < 0 or flat.max() >= self.num_frames):
            raise IndexError(f"frame index out of range 0..{self.num_frames - 1}")
        shard = np.searchsorted(self._frame_start, flat, "right") - 1
        if (shard[1:] < shard[:-1]).any():
            order = np.argsort(shard, kind="stable")
            rows[order] = self.rows(name, flat[order])
            return out
        for number in np.unique(shard):
            start, stop = np.searchsorted(shard, [number, number + 1])
            local = flat[start:stop] - self._frame_start[number]
            # mode="clip" writes straight into `out`; the bounds were checked above
            np.take(parts[number], local, axis=0, out=rows[start:stop], mode="clip")
        return out

    def read_ahead(self, name: str, index: np.ndarray) -> None:
        """Asks the system to read rows at global frame indices (...,) from the disk, and does not wait for it.

        Copying them later finds them in memory. Otherwise it would wait for the disk at every page, one after the
        other, since the copying thread must have one to go on to the next.
        """
        parts, frames = self._parts(name), np.unique(index)
        first = np.flatnonzero(np.diff(frames, prepend=-2) != 1)  # of each run of neighbours
        starts, stops = frames[first], frames[np.append(first[1:], len(frames)) - 1] + 1
        dtype, item = self.row_kind(name)
        row_bytes = dtype.itemsize * int(np.prod(item))
        shards = np.searchsorted(self._frame_start, starts, "right") - 1
        begins, ends = ((frame - self._frame_start[shards]) * row_bytes for frame in (starts, stops))
        for shard, begin, end in zip(shards.tolist(), begins.tolist(), ends.tolist()):
            address = parts[shard].ctypes.data
            page = (address + begin) // mmap.PAGESIZE * mmap.PAGESIZE
            MADVISE(page, address + end - page, mmap.MADV_WILLNEED)  # where it cannot, copying waits for the disk

    def resident(self, name: str, device: torch.device) -> torch.Tensor:
        """All rows of a name as one tensor on `device`, uploaded once: uint8 (T, bytes of a row)."""
        if (name, device) not in self._resident:
            dtype, item = self.row_kind(name)
            row_bytes = dtype.itemsize * int(np.prod(item))
            whole = torch.empty((self.num_frames, row_bytes), dtype=torch.uint8, device=device)
            for part, first in zip(self._parts(name), self._frame_start):
                for start in range(0, len(part), MAP_CHUNK):
                    rows = np.array(part[start : start + MAP_CHUNK])
                    chunk = torch.from_numpy(rows.reshape(len(rows), -1).view(np.uint8))
                    whole[first + start : first + start + len(chunk)].copy_(chunk)
            if device.type == "cuda":
                torch.cuda.synchronize(device)  # other streams read it from now on
            self._resident[name, device] = whole
        return self._resident[name, device]

    def fits(self, device: torch.device, fields: tuple[str, ...]) -> bool:
        """True if these are on the GPU already or leave enough of its free memory for training."""
        if device.type != "cuda":
            return False
        absent = [name for name in fields if (name, device) not in self._resident]
        needed = sum(part.nbytes for name in absent for part in self._parts(name))
        free = torch.cuda.mem_get_info(device)[0]
        return needed <= max(free / 4, free - TRAINING_BYTES)


# -------------------------------------------------------------------------------------------------------------- batches


def window_index(dataset: Dataset, t: np.ndarray, k: np.ndarray | None = None, *, max_offset: int) -> np.ndarray:
    """Global frame indices of the windows at t, int64 (B, F).

    max_offset 0: the stack [t-2, t-1, t]. 1: that and t+1. Above 1: that, t+1 and the stack that ends at t+k, k int64
    (B,) >= 1. What lies before the episode's first frame repeats it. IndexError if t+k is not in the episode.
    """
    episode = np.searchsorted(dataset.episode_start, t, "right") - 1
    stack = np.arange(-2, 1)
    offsets = np.broadcast_to([*stack, 1] if max_offset else stack, (len(t), 4 if max_offset else 3))
    if max_offset > 1:
        assert k is not None
        offsets = np.concatenate([offsets, k[:, None] + stack], axis=1)
    index = t[:, None] + offsets
    if max_offset and (index.max(1) >= dataset.episode_start[episode + 1]).any():
        raise IndexError("a window reaches past the end of its episode")
    return np.maximum(index, dataset.episode_start[episode][:, None])


class Batch(NamedTuple):
    """Windows: frames[:, :3] is the current stack, frames[:, 3] the next frame, frames[:, -3:] the future stack.

    What a batch holds of frames, masks and `extra` is chosen by the sampler's `fields`; the others are None.
    """

    frames: torch.Tensor | None  # uint8 (B, F, H, W, 3)
    masks: torch.Tensor | None  # uint8 (B, F, H*W/8), bit-packed
    action: torch.Tensor  # float32 (B, A), clipped to [-1, 1]; NaN at the last frame of an episode
    index: torch.Tensor  # int64 (B,), global frame index t
    noise: torch.Tensor  # float32 (B, NOISE_DIM), uniform in [0, 1), for what a method draws per sample
    extra: torch.Tensor | None  # the row at t of what was attached to the dataset, see Dataset.attach

    def tensors(self) -> list[torch.Tensor]:
        return [tensor for tensor in self if tensor is not None]


def _load(
    dataset: Dataset,
    t: np.ndarray,
    window: np.ndarray,
    device: torch.device,
    fields: tuple[str, ...],
    on_device: bool,
    noise_seed: list[int],
) -> Batch:
    """Gather windows (B, F). On CUDA the copies are queued on the current stream and do not block."""
    pin = device.type == "cuda"  # the host allocator keeps a pinned block alive until its copy is done

    def send(array: np.ndarray) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        return tensor.pin_memory().to(device, non_blocking=True) if pin else tensor

    def gather(name: str, index: np.ndarray) -> torch.Tensor:
        dtype, item = dataset.row_kind(name)
        shape, kind = (*index.shape, *item), torch.from_numpy(np.empty(0, dtype)).dtype
        if on_device:  # as int64, an eighth of the elements to index; rows are multiples of 8 bytes
            return dataset.resident(name, device).view(torch.int64)[send(index)].view(kind).view(shape)
        # torch's memory is aligned; numpy's is not, which makes copies 4 times slower
        host = torch.empty(shape, dtype=kind, pin_memory=pin)
        dataset.rows(name, index, out=host.numpy())
        return host.to(device, non_blocking=True)

    extra = [name for name in fields if name not in ("frames", "masks")]
    return Batch(
        frames=gather("frames", window) if "frames" in fields else None,
        masks=gather("masks", window) if "masks" in fields else None,
        action=send(np.clip(dataset.action[t], -1, 1)),
        index=send(t),
        noise=send(np.random.default_rng(np.random.SeedSequence(noise_seed)).random((len(t), NOISE_DIM), np.float32)),
        extra=gather(extra[0], t) if extra else None,
    )


def _prefetched(load: Callable[[int], Batch], positions: Iterable[int], device: torch.device) -> Iterator[Batch]:
    """`load(position)` of each, one position ahead, in a thread and on a CUDA stream of its own, which `close` ends."""
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def run(position: int) -> tuple[Batch, Any]:
        if stream is None:
            return load(position), None
        with torch.cuda.stream(stream):
            return load(position), stream.record_event()

    with ThreadPoolExecutor(1, thread_name_prefix="batches") as thread:
        jobs = (thread.submit(run, position) for position in positions)
        following = next(jobs, None)
        while following is not None:
            batch, ready = following.result()
            following = next(jobs, None)
            if ready is not None:
                consumer = torch.cuda.current_stream(device)
                consumer.wait_event(ready)
                for tensor in batch.tensors():
                    tensor.record_stream(consumer)
            yield batch


class Sampler:
    """Endless shuffled batches of windows, every transition once per epoch (but for the remainder of a batch).

    The order of an epoch and the offsets k of a batch come from (seed, epoch, batch) alone, so `seek` continues
    exactly. A batch is sorted by frame. k is uniform in {1..min(max_offset, frames left)}.

    fields: what batches hold: frames, masks, and at most one name of what was attached to the dataset.
    on_device: keep the whole set on the device (auto: on a GPU, if enough memory is left for training); otherwise a
    thread gathers one batch ahead from memory-mapped shards, and the disk reads `read_ahead` batches ahead. Raises
    UserError if the set is smaller than a batch.
    """

    def __init__(
        self,
        dataset: Dataset,
        batch_size: int,
        *,
        max_offset: int,
        seed: int,
        device: torch.device,
        fields: tuple[str, ...] = ("frames",),
        indices: np.ndarray | None = None,
        on_device: Literal["auto", "always", "never"] = "auto",
        read_ahead: int = READ_AHEAD,
    ):
        self.dataset, self.batch_size, self.max_offset, self.seed = dataset, batch_size, max_offset, seed
        self.device, self.fields = torch.device(device), fields
        self.indices = dataset.transitions if indices is None else indices
        self.batches_per_epoch = len(self.indices) // batch_size
        if not self.batches_per_epoch:
            raise UserError(
                f"{dataset.folder}: {len(self.indices):,} transitions are fewer than one batch of {batch_size:,}; "
                "lower the batch size, or make a larger dataset"
            )
        self.on_device = dataset.fits(self.device, fields) if on_device == "auto" else on_device == "always"
        if self.on_device:  # upload here, not in the thread, whose stream would own the memory
            for name in fields:
                dataset.resident(name, self.device)
        self._read_ahead, self._read_until = read_ahead, 0
        self._order = functools.lru_cache(maxsize=2)(self._shuffled)  # reading ahead sees the next epoch already
        self.position = 0  # batches consumed so far
        self._batches = _prefetched(self._load, itertools.count(), self.device)

    @property
    def data_bytes(self) -> int:
        """What the set takes in the device's memory."""
        return sum(tensor.nbytes for (_, where), tensor in self.dataset._resident.items() if where == self.device)

    def next(self) -> Batch:
        batch = next(self._batches)
        self.position += 1
        return batch

    def seek(self, position: int) -> None:
        """Go on at a position, as if that many batches had been consumed."""
        if position != self.position:
            self._batches.close()
            self.position = position
            self._batches = _prefetched(self._load, itertools.count(position), self.device)

    def close(self) -> None:
        """Stop the thread."""
        self._batches.close()

    def episodes(self, position: int) -> list[int]:
        """The episodes that the batch at a position is drawn from."""
        t, _ = self.draw(position)
        return np.unique(np.searchsorted(self.dataset.episode_start, t, "right") - 1).tolist()

    def draw(self, position: int) -> tuple[np.ndarray, np.ndarray]:
        """Frames t and offsets k, int64 (B,), of the batch at a position."""
        epoch, batch = divmod(position, self.batches_per_epoch)
        rows = self._order(epoch)[batch * self.batch_size : (batch + 1) * self.batch_size]
        t = np.sort(self.indices[rows])
        if self.max_offset <= 1:
            return t, np.ones_like(t)
        ends = self.dataset.episode_start[np.searchsorted(self.dataset.episode_start, t, "right")]
        # The 1 keeps this apart from the epoch's order: [seed, epoch] and [seed, epoch, 0] seed the same generator.
        rng = np.random.default_rng(np.random.SeedSequence([self.seed, epoch, 1, batch]))
        return t, rng.integers(1, np.minimum(self.max_offset, ends - 1 - t) + 1)

    def _shuffled(self, epoch: int) -> np.ndarray:
        """The order of an epoch, int64 (N,)."""
        return np.random.default_rng(np.random.SeedSequence([self.seed, epoch])).permutation(len(self.indices))

    def _window(self, position: int) -> tuple[np.ndarray, np.ndarray]:
        """Frames t (B,) of the batch at a position, and those of its windows (B, F)."""
        t, k = self.draw(position)
        return t, window_index(self.dataset, t, k, max_offset=self.max_offset)

    def _load(self, position: int) -> Batch:
        if not self.on_device:
            for ahead in range(max(position, self._read_until), position + self._read_ahead):
                t, window = self._window(ahead)
                for name in self.fields:
                    self.dataset.read_ahead(name, window if name in ("frames", "masks") else t)
            self._read_until = position + self._read_ahead
        t, window = self._window(position)
        noise_seed = [self.seed, position // self.batches_per_epoch, 2, position % self.batches_per_epoch]
        return _load(self.dataset, t, window, self.device, self.fields, self.on_device, noise_seed)


class LabelledBatch(NamedTuple):
    """A batch of windows, and an independent one of labelled transitions."""

    frames: torch.Tensor
    action: torch.Tensor  # of the first batch, which only the probe sees
    labelled: Batch


class LabelledSampler(Sampler):
    """Batches of all transitions and, beside them, of labelled ones (frames, int64); both draw their own k.

    An epoch is one pass over all transitions. options: as for a Sampler.
    """

    def __init__(self, dataset: Dataset, labelled: np.ndarray, batch_size: int, *, seed: int, **options: Any) -> None:
        super().__init__(dataset, batch_size, seed=seed, **options)
        size = min(batch_size, len(labelled))
        self.labelled = Sampler(dataset, size, seed=seed + 2**31, indices=labelled, **options)

    def episodes(self, position: int) -> list[int]:
        """The episodes that both batches at a position are drawn from."""
        return sorted({*super().episodes(position), *self.labelled.episodes(position)})

    def next(self) -> LabelledBatch:
        batch = super().next()
        return LabelledBatch(batch.frames, batch.action, self.labelled.next())

    def seek(self, position: int) -> None:
        super().seek(position)
        self.labelled.seek(position)

    def close(self) -> None:
        super().close()
        self.labelled.close()


class TensorSampler:
    """Endless shuffled batches of rows of tensors on the device, every row once per epoch but for the remainder.

    tensors: name -> (N, ...). `next()` gives the same names, (B, ...) each, B = min(batch_size, N). The order comes
    from (seed, epoch) alone, so `seek` continues exactly. episode: int (N,), the episode of each row, for messages.
    """

    def __init__(self, tensors: dict[str, torch.Tensor], batch_size: int, *, seed: int, episode: np.ndarray):
        self.tensors, self.seed, self.episode, self.position = tensors, seed, episode, 0
        self.rows = len(next(iter(tensors.values())))
        self.data_bytes = sum(tensor.nbytes for tensor in tensors.values())
        self.batch_size = min(batch_size, self.rows)
        self.batches_per_epoch = self.rows // self.batch_size
        self._order: tuple[int, torch.Tensor] = (-1, torch.empty(0))

    def _rows(self, position: int) -> torch.Tensor:
        epoch, batch = divmod(position, self.batches_per_epoch)
        if self._order[0] != epoch:
            order = np.random.default_rng(np.random.SeedSequence([self.seed, epoch])).permutation(self.rows)
            self._order = (epoch, torch.from_numpy(order).to(next(iter(self.tensors.values())).device))
        return self._order[1][batch * self.batch_size : (batch + 1) * self.batch_size]

    def next(self) -> dict[str, torch.Tensor]:
        rows = self._rows(self.position)
        self.position += 1
        return {name: tensor[rows] for name, tensor in self.tensors.items()}

    def seek(self, position: int) -> None:
        """Go on at a position, as if that many batches had been consumed."""
        self.position = position

    def episodes(self, position: int) -> list[int]:
        """The episodes that the batch at a position is drawn from."""
        return np.unique(self.episode[self._rows(position).cpu().numpy()]).tolist()

    def close(self) -> None:
        """Nothing runs beside it."""


def sequential(
    dataset: Dataset,
    batch_size: int,
    *,
    max_offset: Literal[0, 1],
    device: torch.device,
    fields: tuple[str, ...] = ("frames",),
    indices: np.ndarray | None = None,
) -> Iterator[Batch]:
    """Batches in the order of `indices` (default: all transitions), the last one smaller.

    Reads from the device if a Sampler put the set there, else from the memory-mapped shards, one batch ahead.
    """
    device = torch.device(device)
    indices = dataset.transitions if indices is None else indices
    on_device = all((name, device) in dataset._resident for name in fields)

    def load(position: int) -> Batch:
        t = indices[position * batch_size : (position + 1) * batch_size]
        window = window_index(dataset, t, max_offset=max_offset)
        return _load(dataset, t, window, device, fields, on_device, [position])

    return _prefetched(load, range(-(-len(indices) // batch_size)), device)


def updates_for(epochs: float, updates: int | None, sampler: Sampler) -> int:
    """Epochs turned into updates, at least one; `updates` wins if it is given."""
    return max(1, round(epochs * sampler.batches_per_epoch)) if updates is None else updates


def normalise(frames: torch.Tensor) -> torch.Tensor:
    """uint8 (B, F, H, W, 3) -> float32 (B, F, 3, H, W) in [-0.5, 0.5]; the memory stays channels-last."""
    return frames.movedim(-1, -3).float().div_(255).sub_(0.5)
