"""Datasets of rollouts: the shard format, its reader and the batch sampler.

A split is a folder of immutable HDF5 shards, `data/<env>/<split>/00000.h5, ...`. Frames lie flat, uncompressed and
contiguous, so that batches are gathered from memory maps; no HDF5 handle stays open. An episode of L transitions has
L+1 frames; action, reward and success at frame t belong to the step from t to t+1 (last frame: NaN, 0, False).

| dataset | dtype, shape |
|---|---|
| `<render>/observation` | uint8 (T, H, W, 3), render = clean, distractor |
| `<render>/mask` | uint8 (T, H*W/8), bit-packed, most significant bit first |
| `state`, `action`, `reward` | float32 (T, S), float32 (T, A) unclipped, float32 (T,) |
| `success` | bool (T,), Meta-World only |
| `episode_start` | int64 (N+1,), in frames of the shard |
| `episode_hash` | uint8 (N, 32), SHA-256 of the episode's bytes in all frame datasets, in alphabetical order |

The `plan` attribute (JSON) is the same in every shard of a split and says what the whole split holds. `content_hash`
covers everything but the package versions and the command. `complete` is written last.
"""

import errno
import fcntl
import hashlib
import json
import mmap
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import h5py
import numpy as np
import torch

from common.errors import UserError

FORMAT_VERSION = 1
RENDERS = ("clean", "distractor")
HDF5_FORMAT = ("v110", "v110")  # fixed, so that the same content gives the same bytes with any newer HDF5
PAGE = 4096
FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
NOISE_DIM = 8  # random numbers per sample of a batch
MAP_CHUNK = 1024  # frames per copy when a whole set is uploaded


class DamagedShard(UserError):
    """A shard that make_dataset.py may replace: unreadable, truncated, or not complete."""


class ShardTaken(Exception):
    """Another live process is writing this shard."""


# --------------------------------------------------------------------------------------------------------------- format


def frame_schema(plan: dict[str, Any]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Name -> (dtype, shape of one frame) of every dataset whose first axis is frames."""
    size = plan["image_size"]
    schema: dict[str, tuple[str, tuple[int, ...]]] = {
        "action": ("float32", (plan["action_dim"],)),
        "reward": ("float32", ()),
        "state": ("float32", (plan["state_dim"],)),
    }
    if plan["success"]:
        schema["success"] = ("bool", ())
    for render in plan["renders"]:
        schema[f"{render}/mask"] = ("uint8", (size * size // 8,))
        schema[f"{render}/observation"] = ("uint8", (size, size, 3))
    return dict(sorted(schema.items()))


def frame_bytes(plan: dict[str, Any]) -> int:
    """Bytes of one frame over all datasets."""
    return sum(np.dtype(dtype).itemsize * int(np.prod(shape)) for dtype, shape in frame_schema(plan).values())


def _episode_digest(arrays: dict[str, np.ndarray]) -> bytes:
    digest = hashlib.sha256()
    for name in sorted(arrays):
        digest.update(np.ascontiguousarray(arrays[name]).data)
    return digest.digest()


def _content_hash(attributes: dict[str, Any], episode_start: np.ndarray, episode_hash: np.ndarray) -> str:
    """SHA-256 of the attributes (plan included, which fixes names, dtypes and shapes) and of every episode's digest."""
    digest = hashlib.sha256(json.dumps(attributes, sort_keys=True).encode())
    digest.update(np.ascontiguousarray(episode_start, np.int64).data)
    digest.update(np.ascontiguousarray(episode_hash, np.uint8).data)
    return digest.hexdigest()


def _create_file(path: Path) -> h5py.File:
    return h5py.File(path, "w", libver=HDF5_FORMAT, locking=False, alignment_threshold=1 << 16, alignment_interval=PAGE)


def _create_dataset(file: h5py.File | h5py.Group, name: str, shape: tuple[int, ...], dtype: Any) -> h5py.Dataset:
    return file.create_dataset(name, shape=shape, dtype=dtype, track_times=False, fill_time="never")


def sync_path(path: Path) -> None:
    """fsync a file or a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_full_disk(error: BaseException) -> bool:
    """True if an error of the system, or of HDF5 (which hides the number in its text), says the disk is full."""
    if isinstance(error, OSError) and error.errno in FULL_DISK:
        return True
    return isinstance(error, (OSError, RuntimeError)) and any(f"errno = {code}," in str(error) for code in FULL_DISK)


def claim_part(path: Path) -> int:
    """Create or take over the temporary file `path` and lock it. Returns the open descriptor, whose lock is the claim.

    The lock goes with the process that holds it, so what a killed run left behind can be told from what is being
    written. Raises ShardTaken if a live process holds it.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            same = os.path.samestat(os.fstat(descriptor), os.stat(path))
        except FileNotFoundError:
            same = False
        if not same:  # renamed or removed by its owner between open and lock
            raise ShardTaken(path)
    except BlockingIOError:
        os.close(descriptor)
        raise ShardTaken(path) from None
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def remove_stale_parts(folder: Path) -> list[Path]:
    """Remove the temporary files of runs that are dead; those of live runs stay. Returns what was removed."""
    removed = []
    for path in sorted(folder.glob("*.part")):
        try:
            descriptor = claim_part(path)
        except ShardTaken:
            continue
        path.unlink(missing_ok=True)
        os.close(descriptor)
        removed.append(path)
    return removed


class ShardWriter:
    """Writes one shard, an episode at a time, to `<path>.part`; `commit` makes it appear under its name.

    The space for `max_frames` frames is allocated at once, so a full disk shows before any frame is rendered. Use as a
    context manager: without `commit` the temporary file is removed. Raises ShardTaken, and UserError on a full disk.
    """

    def __init__(
        self,
        path: Path,
        plan: dict[str, Any],
        shard: int,
        max_frames: int,
        num_episodes: int,
        command: str = "",
        versions: dict[str, str] | None = None,
    ):
        self.path, self.plan, self.shard = path, plan, shard
        self.max_frames, self.num_episodes = max_frames, num_episodes
        self.command, self.versions = command, versions or {}
        self.frames = 0
        self._starts, self._digests, self._backgrounds, self._seeds, self._returns = [0], [], [], [], []
        self._part = path.with_name(path.name + ".part")
        self._file: h5py.File | None = None
        self._claim = claim_part(self._part)
        try:
            with self._full_disk():
                self._file = self._create(self._part, max_frames)
                os.posix_fallocate(self._claim, 0, self._file.id.get_filesize())
        except BaseException:
            self.abort()
            raise

    def __enter__(self) -> "ShardWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self.abort()

    def _full_disk(self) -> "_FullDisk":
        return _FullDisk(self.path)

    def _create(self, path: Path, frames: int) -> h5py.File:
        file = _create_file(path)
        _create_dataset(file, "episode_start", (self.num_episodes + 1,), np.int64)
        _create_dataset(file, "episode_hash", (self.num_episodes, 32), np.uint8)
        for name, (dtype, shape) in frame_schema(self.plan).items():
            dataset = _create_dataset(file, name, (frames, *shape), dtype)
            # Reserve the extent now: writing the last byte makes HDF5 place the dataset, in this order.
            dataset[frames - 1 :] = np.zeros((1, *shape), dtype)
        file.flush()
        return file

    def append(self, episode: dict[str, np.ndarray], seed: int, background: tuple[str, int, int] = ("", 0, 0)) -> None:
        """Add an episode: arrays named as in `frame_schema`, L+1 frames each. background: clip, start, direction."""
        schema = frame_schema(self.plan)
        length = len(episode["action"])
        arrays = {name: np.ascontiguousarray(episode[name], dtype) for name, (dtype, _) in schema.items()}
        for name, (_, shape) in schema.items():
            if arrays[name].shape != (length, *shape):
                raise ValueError(f"{name}: shape {arrays[name].shape}, expected {(length, *shape)}")
        if length < 2 or self.frames + length > self.max_frames or len(self._digests) >= self.num_episodes:
            raise ValueError(f"episode of {length} frames does not fit the shard")
        assert self._file is not None
        with self._full_disk():
            for name, array in arrays.items():
                self._file[name][self.frames : self.frames + length] = array
        self._digests.append(np.frombuffer(_episode_digest(arrays), np.uint8))
        self._backgrounds.append(background)
        self._seeds.append(seed)
        self._returns.append(float(arrays["reward"].sum(dtype=np.float64)))
        self.frames += length
        self._starts.append(self.frames)

    def commit(self) -> str:
        """Finish the file and rename it into place. Returns the content hash."""
        if len(self._digests) != self.num_episodes:
            raise ValueError(f"{len(self._digests)} episodes written, {self.num_episodes} expected")
        with self._full_disk():
            if self.frames < self.max_frames:
                self._shrink()
            file = self._file
            assert file is not None
            starts, digests = np.array(self._starts, np.int64), np.stack(self._digests)
            file["episode_start"][:], file["episode_hash"][:] = starts, digests
            attributes = {
                "format_version": FORMAT_VERSION,
                "env": self.plan["env"],
                "split": self.plan["split"],
                "shard": self.shard,
                "plan": json.dumps(self.plan, sort_keys=True),
                "mean_return": float(np.mean(self._returns)),
                "episode_seed": self._seeds,
                "background": [name for name, _, _ in self._backgrounds],
                "background_start": [int(start) for _, start, _ in self._backgrounds],
                "background_direction": [int(direction) for _, _, direction in self._backgrounds],
            }
            content_hash = _content_hash(attributes, starts, digests)
            for name, value in attributes.items():
                file.attrs[name] = np.array([v.encode() for v in value]) if name == "background" else value
            file.attrs["versions"] = json.dumps(self.versions, sort_keys=True)
            file.attrs["command"] = self.command
            file.attrs["content_hash"] = content_hash
            file.flush()
            os.fsync(self._claim)
            file.attrs["complete"] = True
            file.close()
            self._file = None
            os.fsync(self._claim)
            os.replace(self._part, self.path)
            sync_path(self.path.parent)
        os.close(self._claim)
        self._claim = -1
        return content_hash

    def _shrink(self) -> None:
        """Copy to a file of exactly the frames written, if episodes ended early: contiguous datasets cannot shrink."""
        exact = self._part.with_name(self._part.name.replace(".part", ".exact.part"))
        claim = claim_part(exact)
        old, self._file = self._file, None
        assert old is not None
        try:
            self._file = self._create(exact, self.frames)
            for name in frame_schema(self.plan):
                for start in range(0, self.frames, MAP_CHUNK):
                    stop = min(start + MAP_CHUNK, self.frames)
                    self._file[name][start:stop] = old[name][start:stop]
            os.replace(exact, self._part)
        except BaseException:
            exact.unlink(missing_ok=True)
            os.close(claim)
            raise
        finally:
            old.close()
        os.close(self._claim)
        self._claim = claim

    def abort(self) -> None:
        """Drop the shard; does nothing after `commit`."""
        if self._claim < 0:
            return
        try:
            if self._file is not None:
                self._file.close()
        except (OSError, RuntimeError):
            pass  # a full disk also fails the flush of a file that is about to be removed
        self._file = None
        self._part.unlink(missing_ok=True)
        os.close(self._claim)
        self._claim = -1


class _FullDisk:
    """Turns the errors of a full disk into a UserError that names the file."""

    def __init__(self, path: Path):
        self.path = path

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and is_full_disk(error):
            raise UserError(
                f"{self.path}: the disk is full (or a quota is); make room and run the same command again, it goes on "
                "where it stopped"
            ) from error


def write_sidecar(shard: Path, name: str, arrays: dict[str, np.ndarray], **attributes: str | int | float) -> Path:
    """Write what was derived from a shard, e.g. `<render>/mask`, to `<shard stem>.<name>.h5`, atomically.

    arrays: dataset name -> array, first axis the shard's frames. The shard's content hash goes with it, so that it is
    refused once the shard changes.
    """
    path = shard.with_name(f"{shard.stem}.{name}.h5")
    part = path.with_name(path.name + ".part")
    claim = claim_part(part)
    try:
        with _FullDisk(path):
            with _create_file(part) as file:
                for key in sorted(arrays):
                    _create_dataset(file, key, arrays[key].shape, arrays[key].dtype)[:] = arrays[key]
                for key, value in sorted(attributes.items()):
                    file.attrs[key] = value
                file.attrs["format_version"] = FORMAT_VERSION
                file.attrs["shard_hash"] = read_shard(shard).content_hash
                file.attrs["content_hash"] = _sidecar_hash(arrays)
                file.flush()
                os.fsync(claim)
                file.attrs["complete"] = True
            os.fsync(claim)
            os.replace(part, path)
            sync_path(path.parent)
    finally:
        part.unlink(missing_ok=True)
        os.close(claim)
    return path


def _read_all(group: h5py.Group, prefix: str = "") -> dict[str, np.ndarray]:
    """Every dataset under a group, by its full name."""
    found: dict[str, np.ndarray] = {}
    for name, item in group.items():
        found |= {prefix + name: item[:]} if isinstance(item, h5py.Dataset) else _read_all(item, f"{prefix}{name}/")
    return found


def _sidecar_hash(arrays: dict[str, np.ndarray]) -> str:
    shapes = {name: [str(array.dtype), list(array.shape)] for name, array in arrays.items()}
    digest = hashlib.sha256(json.dumps(shapes, sort_keys=True).encode())
    digest.update(_episode_digest(arrays))
    return digest.hexdigest()


# --------------------------------------------------------------------------------------------------------------- reader


@dataclass
class Shard:
    """What the header of a shard says, checked."""

    path: Path
    plan: dict[str, Any]
    number: int
    frames: int
    episode_start: np.ndarray  # int64 (N+1,)
    episode_hash: np.ndarray  # uint8 (N, 32)
    episode_seed: np.ndarray  # int64 (N,)
    background: list[str]
    content_hash: str
    mean_return: float
    command: str
    offset: dict[str, int]  # dataset -> first byte in the file

    @property
    def num_episodes(self) -> int:
        return len(self.episode_start) - 1

    @cached_property
    def _map(self) -> mmap.mmap:
        with open(self.path, "rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def array(self, name: str) -> np.ndarray:
        """A read-only memory map of a frame dataset, (T, ...)."""
        dtype, shape = frame_schema(self.plan)[name]
        return _view(self._map, dtype, (self.frames, *shape), self.offset[name])


def _view(buffer: mmap.mmap, dtype: Any, shape: tuple[int, ...], offset: int) -> np.ndarray:
    return np.frombuffer(buffer, dtype, int(np.prod(shape)), offset).reshape(shape)


def _locate(file: h5py.File, path: Path, name: str, dtype: Any, shape: tuple[int, ...]) -> int:
    """Byte offset of a contiguous dataset, after checking type, shape, layout and that the file is long enough."""
    if name not in file:
        raise DamagedShard(f"{path}: dataset {name} is missing")
    dataset = file[name]
    if dataset.dtype != np.dtype(dtype) or dataset.shape != shape:
        raise DamagedShard(f"{path}: {name} is {dataset.dtype} {dataset.shape}, expected {np.dtype(dtype)} {shape}")
    offset = dataset.id.get_offset()
    if offset is None:
        raise DamagedShard(f"{path}: {name} is not stored contiguous and uncompressed")
    if offset + dataset.nbytes > path.stat().st_size:
        raise DamagedShard(
            f"{path}: truncated, {name} ends at byte {offset + dataset.nbytes:,} of {path.stat().st_size:,}"
        )
    return offset


def read_shard(path: Path) -> Shard:
    """Read and check a shard's header, not its frames. DamagedShard, or UserError for another format version."""
    try:
        with h5py.File(path, "r", locking=False) as file:
            attrs = dict(file.attrs)
            version = attrs.get("format_version")
            if version is not None and int(version) != FORMAT_VERSION:
                raise UserError(
                    f"{path}: format version {version}, this code reads version {FORMAT_VERSION}; use the code that "
                    "made it, or move the folder away and make the dataset again"
                )
            if not bool(attrs.get("complete", False)):
                raise DamagedShard(f"{path}: not complete (its writer was stopped, or it was copied in part)")
            plan = json.loads(attrs["plan"])
            starts, digests = file["episode_start"][:], file["episode_hash"][:]
            attributes = {
                name: _plain(attrs[name])
                for name in (
                    "format_version env split shard plan mean_return episode_seed background background_start "
                    "background_direction"
                ).split()
            }
            content_hash = str(attrs["content_hash"])
            if _content_hash(attributes, starts, digests) != content_hash:
                raise DamagedShard(f"{path}: the header does not match its content hash")
            if starts.ndim != 1 or len(starts) < 2 or starts[0] != 0 or np.diff(starts).min() < 2:
                raise DamagedShard(f"{path}: episode_start is not increasing")
            frames = int(starts[-1])
            offset = {
                name: _locate(file, path, name, dtype, (frames, *shape))
                for name, (dtype, shape) in frame_schema(plan).items()
            }
            return Shard(
                path=path,
                plan=plan,
                number=int(attributes["shard"]),
                frames=frames,
                episode_start=starts,
                episode_hash=digests,
                episode_seed=np.array(attributes["episode_seed"], np.int64),
                background=attributes["background"],
                content_hash=content_hash,
                mean_return=float(attributes["mean_return"]),
                command=str(attrs.get("command", "")),
                offset=offset,
            )
    except FileNotFoundError:
        raise DamagedShard(f"{path}: no such file") from None
    except (OSError, RuntimeError, KeyError, ValueError, UnicodeDecodeError, TypeError) as error:
        reason = "truncated" if "truncated" in str(error) else f"not a readable shard ({error})"
        raise DamagedShard(f"{path}: {reason}") from error


def _plain(value: Any) -> Any:
    """An HDF5 attribute as the JSON value that was hashed."""
    if isinstance(value, np.ndarray):
        return [v.decode() if isinstance(v, bytes) else v for v in value.tolist()]
    return value.item() if isinstance(value, np.generic) else value


def shard_paths(folder: Path) -> list[Path]:
    """The shards of a folder in order; `00000.sam.h5` and the like are not shards."""
    found = [path for path in folder.glob("*.h5") if re.fullmatch(r"\d{5,}\.h5", path.name)]
    return sorted(found, key=lambda path: int(path.stem))


def verify_shard(shard: Shard) -> None:
    """Re-hash every episode. Raises DamagedShard naming the episode."""
    names = list(frame_schema(shard.plan))
    arrays = {name: shard.array(name) for name in names}
    for episode in range(shard.num_episodes):
        start, stop = shard.episode_start[episode : episode + 2]
        digest = _episode_digest({name: arrays[name][start:stop] for name in names})
        if digest != shard.episode_hash[episode].tobytes():
            raise DamagedShard(
                f"{shard.path}: episode {episode} (frames {start} to {stop - 1}) does not match its hash"
            )


class Dataset:
    """One split of a dataset, seen through one render.

    Every check but the hashes of the frames runs on opening; `verify` does those. Frames are counted through all shards
    in order, so a global index names one frame. Raises UserError with the command that makes or repairs what is not
    as it should be.
    """

    def __init__(
        self,
        data_dir: Path,
        env: str,
        split: str,
        render: str = "distractor",
        mask_source: str | None = "gt",
    ):
        self.env, self.split, self.render, self.mask_source = env, split, render, mask_source
        self.data_dir, self.folder = Path(data_dir), Path(data_dir) / env / split
        self.shards = self._open_shards()
        plan = self.plan = self.shards[0].plan
        self.image_size: int = plan["image_size"]
        self.action_dim: int = plan["action_dim"]
        self.state_dim: int = plan["state_dim"]
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
        self.expert = {"name": plan["expert"], "sha256": plan["expert_sha256"]}
        self.action = np.concatenate([shard.array("action") for shard in self.shards])  # float32 (T, A), unclipped
        self._check_actions()
        self._frames = [shard.array(f"{render}/observation") for shard in self.shards]
        self._masks = None if mask_source is None else self._open_masks(mask_source)
        self._resident: dict[tuple[str, torch.device], torch.Tensor] = {}

    # --- opening and checking

    @property
    def command(self) -> str:
        """The command that makes this split, as its shards or the other split's remember it."""
        remembered = ""
        for path in shard_paths(self.folder) + sorted(self.folder.parent.glob("*/00000.h5")):
            try:
                remembered = read_shard(path).command
            except UserError:
                continue
            break
        command = remembered or f"python make_dataset.py --env {self.env}"
        if self.data_dir != Path("data"):
            command += f" --data-dir {shlex.quote(str(self.data_dir))}"
        return command

    def _open_shards(self) -> list[Shard]:
        paths = shard_paths(self.folder)
        if not paths:
            raise UserError(f"{self.folder}: no dataset here; make it with: {self.command}")
        self.shards: list[Shard] = []
        damage: DamagedShard | None = None
        for path in paths:
            try:
                self.shards.append(read_shard(path))
            except DamagedShard as error:
                damage = damage or error
        if damage is not None:
            raise UserError(f"{damage}; make it again with: {self.command}") from damage
        first = self.shards[0]
        for shard in self.shards:
            if (shard.plan["env"], shard.plan["split"]) != (self.env, self.split):
                raise UserError(
                    f"{shard.path}: holds {shard.plan['env']}/{shard.plan['split']}, not {self.env}/{self.split}; move "
                    f"it away and run: {self.command}"
                )
            if shard.number != int(shard.path.stem):
                raise UserError(
                    f"{shard.path}: this is shard {shard.number} under another name; remove it and run: {self.command}"
                )
            if shard.plan != first.plan:
                fields = ", ".join(plan_differences(first.plan, shard.plan))
                raise UserError(
                    f"{shard.path}: made with other settings than {first.path.name} ({fields}); remove the folder "
                    f"{self.folder} or the odd shards and run: {self.command}"
                )
        missing = missing_shards(self.shards)
        if missing:
            raise UserError(f"{self.folder}: incomplete, {missing}; finish it with: {self.command}")
        return self.shards

    def _check_actions(self) -> None:
        """Actions are finite, except NaN at the last frame of every episode."""
        bad = np.isnan(self.action).any(1)
        bad[self.episode_start[1:] - 1] ^= True
        bad |= np.isinf(self.action).any(1)
        if bad.any():
            frame = int(np.flatnonzero(bad)[0])
            shard = self.shards[int(np.searchsorted(self._frame_start, frame, "right")) - 1]
            episode = int(np.searchsorted(self.episode_start, frame, "right")) - 1
            raise UserError(
                f"{shard.path}: the actions of episode {episode} are damaged at frame {frame}; repair with: "
                f"rm {shlex.quote(str(shard.path))} && {self.command}"
            )

    def _sidecar(self, shard: Shard, source: str) -> Path:
        return shard.path.with_name(f"{shard.path.stem}.{source}.h5")

    def _open_masks(self, source: str) -> list[np.ndarray]:
        name = f"{self.render}/mask"
        if source == "gt":
            return [shard.array(name) for shard in self.shards]
        command = f"python make_masks.py --env {self.env}"
        if self.data_dir != Path("data"):
            command += f" --data-dir {shlex.quote(str(self.data_dir))}"
        files = [self._sidecar(shard, source) for shard in self.shards]
        absent = [path for path in files if not path.exists()]
        if len(absent) == len(files):
            present = {path.name.split(".")[1] for path in self.folder.glob("*.*.h5")}
            raise UserError(
                f"{absent[0]}: no masks named '{source}'; there are: {', '.join(['gt', *sorted(present)])}. SAM's are "
                f"made with: {command}"
            )
        if absent:
            raise UserError(
                f"{absent[0]}: masks '{source}' are missing for {len(absent)} of {len(files)} shards; finish them "
                f"with: {command}"
            )
        masks = []
        for shard, path in zip(self.shards, files):
            try:
                with h5py.File(path, "r", locking=False) as file:
                    if not bool(file.attrs.get("complete", False)):
                        raise DamagedShard(f"{path}: not complete")
                    if str(file.attrs.get("shard_hash", "")) != shard.content_hash:
                        raise DamagedShard(f"{path}: made from another version of {shard.path.name}")
                    if name not in file:
                        raise DamagedShard(f"{path}: holds no {name}")
                    shape = (shard.frames, self.image_size**2 // 8)
                    offset = _locate(file, path, name, np.uint8, shape)
            except DamagedShard as error:
                raise UserError(f"{error}; repair with: rm {shlex.quote(str(path))} && {command}") from error
            except (OSError, RuntimeError) as error:
                raise UserError(
                    f"{path}: not a readable mask file ({error}); repair with: rm {shlex.quote(str(path))} && {command}"
                ) from error
            with open(path, "rb") as handle:
                masks.append(_view(mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ), np.uint8, shape, offset))
        return masks

    def verify(self) -> None:
        """Re-read and re-hash every episode, and mask files that carry a hash. UserError names file and episode."""
        for shard in self.shards:
            try:
                verify_shard(shard)
            except DamagedShard as error:
                raise UserError(f"{error}; repair with: rm {shlex.quote(str(shard.path))} && {self.command}") from error
            if self.mask_source in (None, "gt"):
                continue
            path = self._sidecar(shard, self.mask_source)
            with h5py.File(path, "r", locking=False) as file:
                expected = file.attrs.get("content_hash")
                if expected is not None and str(expected) != _sidecar_hash(_read_all(file)):
                    raise UserError(
                        f"{path}: does not match its hash; repair with: rm {shlex.quote(str(path))} && "
                        f"python make_masks.py --env {self.env}"
                    )

    # --- content

    @cached_property
    def transitions(self) -> np.ndarray:
        """int64 (num_transitions,): every frame that has a next one in its episode, in order."""
        keep = np.ones(self.num_frames, bool)
        keep[self.episode_start[1:] - 1] = False
        return np.flatnonzero(keep)

    @cached_property
    def episode_of_frame(self) -> np.ndarray:
        """int32 (num_frames,)."""
        return np.repeat(np.arange(self.num_episodes, dtype=np.int32), np.diff(self.episode_start))

    @cached_property
    def state(self) -> np.ndarray:
        """float32 (num_frames, S)."""
        return np.concatenate([shard.array("state") for shard in self.shards])

    @cached_property
    def reward(self) -> np.ndarray:
        """float32 (num_frames,)."""
        return np.concatenate([shard.array("reward") for shard in self.shards])

    @cached_property
    def episode_return(self) -> np.ndarray:
        """float64 (num_episodes,): sum of rewards."""
        return np.add.reduceat(self.reward.astype(np.float64), self.episode_start[:-1])

    @cached_property
    def episode_success(self) -> np.ndarray | None:
        """bool (num_episodes,), or None where the suite knows no success."""
        if not self.plan["success"]:
            return None
        return np.logical_or.reduceat(
            np.concatenate([s.array("success") for s in self.shards]), self.episode_start[:-1]
        )

    @property
    def mean_return(self) -> float:
        return float(self.episode_return.mean())

    @cached_property
    def action_variance(self) -> float:
        """Population variance of the actions clipped to [-1, 1], averaged over dimensions: the denominator of NMSE."""
        count, total, squares = 0, np.zeros(self.action_dim), np.zeros(self.action_dim)
        for chunk in np.array_split(self.transitions, max(1, len(self.transitions) >> 18)):
            action = np.clip(self.action[chunk].astype(np.float64), -1, 1)
            count, total, squares = count + len(action), total + action.sum(0), squares + (action**2).sum(0)
        return float((squares / count - (total / count) ** 2).mean())

    def labelled(self, num_labels: int, seed: int) -> np.ndarray:
        """Exactly `num_labels` transitions, int64 sorted: whole episodes in random order, the last one cut short."""
        if not 0 < num_labels <= self.num_transitions:
            raise UserError(
                f"{self.folder}: holds {self.num_transitions:,} transitions, so --num-labels {num_labels:,} is not "
                "possible; lower it, or make a larger dataset"
            )
        order = np.random.default_rng(np.random.SeedSequence([seed, 0x1ABE1])).permutation(self.num_episodes)
        chosen, left = [], num_labels
        for episode in order:
            start, stop = self.episode_start[episode : episode + 2]
            frames = np.arange(start, stop - 1)[:left]
            chosen.append(frames)
            left -= len(frames)
            if not left:
                break
        return np.sort(np.concatenate(chosen))

    # --- gathering

    def frames(self, index: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        """Frames at global indices (...,): uint8 (..., H, W, 3). Fastest if the indices visit the shards in order."""
        return self._gather(self._frames, index, out)

    def masks(self, index: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        """Bit-packed masks at global indices (...,): uint8 (..., H*W/8)."""
        if self._masks is None:
            raise ValueError("this Dataset was opened with mask_source=None")
        return self._gather(self._masks, index, out)

    def _gather(self, parts: list[np.ndarray], index: np.ndarray, out: np.ndarray | None) -> np.ndarray:
        index = np.asarray(index, np.int64)
        flat, item = index.reshape(-1), parts[0].shape[1:]
        if out is None:
            out = np.empty((*index.shape, *item), np.uint8)
        if not len(flat):
            return out
        if flat.min() < 0 or flat.max() >= self.num_frames:
            raise IndexError(f"frame index out of range 0..{self.num_frames - 1}")
        rows = out.reshape(len(flat), *item)
        shard = np.searchsorted(self._frame_start, flat, "right") - 1
        order = None
        if (shard[1:] < shard[:-1]).any():
            order = np.argsort(shard, kind="stable")
            flat, shard = flat[order], shard[order]
        cuts = np.flatnonzero(np.diff(shard)) + 1
        for start, stop in zip([0, *cuts], [*cuts, len(flat)]):
            number = shard[start]
            local = flat[start:stop] - self._frame_start[number]
            if order is None:  # mode="clip" writes straight into `out`; the bounds were checked above
                np.take(parts[number], local, axis=0, out=rows[start:stop], mode="clip")
            else:
                rows[order[start:stop]] = parts[number][local]
        return out

    def resident(self, kind: Literal["frames", "masks"], device: torch.device) -> torch.Tensor:
        """All frames (T, H, W, 3) or packed masks (T, H*W/8) as one uint8 tensor on `device`, uploaded once."""
        if (kind, device) not in self._resident:
            parts = self._frames if kind == "frames" else self._masks
            if parts is None:
                raise ValueError("this Dataset was opened with mask_source=None")
            whole = torch.empty((self.num_frames, *parts[0].shape[1:]), dtype=torch.uint8, device=device)
            for part, first in zip(parts, self._frame_start):
                for start in range(0, len(part), MAP_CHUNK):
                    chunk = torch.from_numpy(part[start : start + MAP_CHUNK].copy())
                    whole[first + start : first + start + len(chunk)].copy_(chunk)
            if device.type == "cuda":
                torch.cuda.synchronize(device)  # other streams read it from now on
            self._resident[kind, device] = whole
        return self._resident[kind, device]

    def release(self) -> None:
        """Free what `resident` put on a device."""
        self._resident.clear()

    def _fits(self, device: torch.device, masks: bool) -> bool:
        """True if the set is on the GPU already or takes at most 60% of its free memory."""
        if device.type != "cuda":
            return False
        needed = 0 if ("frames", device) in self._resident else self.num_frames * self.image_size**2 * 3
        if masks and ("masks", device) not in self._resident:
            needed += self.num_frames * self.image_size**2 // 8
        return needed <= 0.6 * torch.cuda.mem_get_info(device)[0]


def plan_differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """`field: old -> new` for every field that differs, nested ones as `outer.inner`."""
    lines = []
    for key in sorted(old.keys() | new.keys()):
        a, b = old.get(key), new.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            lines += [f"{key}.{line}" for line in plan_differences(a, b)]
        elif a != b:
            lines.append(f"{key}: {a} -> {b}")
    return lines


def missing_shards(shards: list[Shard]) -> str:
    """What a sorted list of one split's shards lacks, as a phrase; empty if it is whole."""
    plan, numbers = shards[0].plan, {shard.number for shard in shards}
    last = plan["num_shards"] - 1 if plan["num_shards"] else max(numbers)
    gaps = [number for number in range(last + 1) if number not in numbers]
    if gaps:
        names = ", ".join(f"{number:05d}.h5" for number in gaps[:3]) + (", ..." if len(gaps) > 3 else "")
        return f"{len(gaps)} of {last + 1} shards missing ({names})"
    transitions = sum(shard.frames - shard.num_episodes for shard in shards)
    if transitions < plan["num_transitions"]:
        return f"{transitions:,} of {plan['num_transitions']:,} transitions present"
    return ""


# -------------------------------------------------------------------------------------------------------------- batches


def window_index(
    dataset: Dataset, t: np.ndarray, k: np.ndarray | None = None, *, max_offset: int, frame_stack: int = 3
) -> np.ndarray:
    """Global frame indices of the windows at t, int64 (B, F).

    max_offset 0: the stack [t-2, t-1, t] (frame_stack 3). 1: that and t+1. Above 1: that, t+1 and the stack that ends
    at t+k, k int64 (B,) >= 1. What lies before the episode's first frame repeats it; t+k must lie in the episode.
    """
    episode = np.searchsorted(dataset.episode_start, t, "right") - 1
    back = np.arange(1 - frame_stack, 1)
    offsets = np.broadcast_to(back, (len(t), frame_stack))
    if max_offset >= 1:
        offsets = np.concatenate([offsets, np.ones((len(t), 1), np.int64)], axis=1)
    if max_offset > 1:
        assert k is not None
        offsets = np.concatenate([offsets, k[:, None] + back], axis=1)
    index = t[:, None] + offsets
    if max_offset and (index.max(1) >= dataset.episode_start[episode + 1]).any():
        raise IndexError("a window reaches past the end of its episode")
    return np.maximum(index, dataset.episode_start[episode][:, None])


class Batch(NamedTuple):
    """Windows: frames[:, :3] is the current stack, frames[:, 3] the next frame, frames[:, -3:] the future stack."""

    frames: torch.Tensor  # uint8 (B, F, H, W, 3)
    masks: torch.Tensor | None  # uint8 (B, F, H*W/8), bit-packed
    action: torch.Tensor  # float32 (B, A), clipped to [-1, 1]; NaN at the last frame of an episode
    index: torch.Tensor  # int64 (B,), global frame index t
    noise: torch.Tensor  # float32 (B, NOISE_DIM), uniform in [0, 1), for what a method draws per sample

    def tensors(self) -> list[torch.Tensor]:
        return [tensor for tensor in self if tensor is not None]


class _Buffers:
    """Host memory for batches that is used again once no tensor shows it: fresh pages cost more than filling them.

    A tensor made from an array keeps a reference to it for as long as any view lives, so the reference count tells.
    """

    def __init__(self, keep: int = 4):
        self._arrays: list[np.ndarray] = []
        self._keep = keep

    def take(self, shape: tuple[int, ...]) -> np.ndarray:
        for i in range(len(self._arrays)):  # by index: a loop variable would be one more reference
            if self._arrays[i].shape == shape and sys.getrefcount(self._arrays[i]) <= 2:  # the list and the argument
                return self._arrays[i]
        self._arrays = [np.empty(shape, np.uint8), *self._arrays][: self._keep]
        return self._arrays[0]


def _load(
    dataset: Dataset,
    t: np.ndarray,
    window: np.ndarray,
    device: torch.device,
    masks: bool,
    on_device: bool,
    noise_seed: list[int],
    buffers: _Buffers,
) -> Batch:
    """Gather windows (B, F). On CUDA the copies are queued on the current stream and do not block."""
    pin = device.type == "cuda"  # the host allocator keeps a pinned block alive until its copy is done

    def send(array: np.ndarray) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        return tensor.pin_memory().to(device, non_blocking=True) if pin else tensor

    def gather(kind: Literal["frames", "masks"], item: tuple[int, ...]) -> torch.Tensor:
        if on_device:
            return dataset.resident(kind, device)[where]
        shape = (*window.shape, *item)
        host = torch.empty(shape, dtype=torch.uint8, pin_memory=True) if pin else torch.from_numpy(buffers.take(shape))
        (dataset.frames if kind == "frames" else dataset.masks)(window, out=host.numpy())
        return host.to(device, non_blocking=True) if pin else host

    size = dataset.image_size
    where = send(window) if on_device else None
    return Batch(
        frames=gather("frames", (size, size, 3)),
        masks=gather("masks", (size * size // 8,)) if masks else None,
        action=send(np.clip(dataset.action[t], -1, 1)),
        index=send(t),
        noise=send(np.random.default_rng(np.random.SeedSequence(noise_seed)).random((len(t), NOISE_DIM), np.float32)),
    )


T = TypeVar("T")


class _Prefetch(Generic[T]):
    """Calls `load(position)` one position ahead, in a thread and on a CUDA stream of its own."""

    def __init__(self, load: Callable[[int], Batch], start: int, stop: int | None, device: torch.device):
        self.load, self.position, self.stop, self.device = load, start, stop, device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="batches")
        self._submit()

    def _submit(self) -> None:
        if self.stop is None or self.position < self.stop:
            self._future = self._thread.submit(self._run, self.position)

    def _run(self, position: int) -> tuple[Batch, Any]:
        if self._stream is None:
            return self.load(position), None
        with torch.cuda.stream(self._stream):
            return self.load(position), self._stream.record_event()

    def next(self) -> Batch:
        batch, ready = self._future.result()
        self.position += 1
        self._submit()
        if ready is not None:
            stream = torch.cuda.current_stream(self.device)
            stream.wait_event(ready)
            for tensor in batch.tensors():
                tensor.record_stream(stream)
        return batch

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)


class Sampler:
    """Endless shuffled batches of windows, every transition once per epoch (but for the remainder of a batch).

    The order of an epoch and the offsets k of a batch come from (seed, epoch, batch) alone, so `start=position`
    continues exactly. A batch is sorted by frame. k is uniform in {1..min(max_offset, frames left)}.

    on_device: keep the whole set on the device ("auto": on a GPU, if it fits in 60% of the free memory); otherwise a
    thread gathers one batch ahead from memory-mapped shards. Raises UserError if the set is smaller than a batch.
    """

    def __init__(
        self,
        dataset: Dataset,
        batch_size: int,
        *,
        max_offset: int,
        seed: int,
        device: torch.device,
        masks: bool = False,
        start: int = 0,
        indices: np.ndarray | None = None,
        on_device: Literal["auto"] | bool = "auto",
    ):
        self.dataset, self.batch_size, self.max_offset, self.seed = dataset, batch_size, max_offset, seed
        self.device, self.masks = torch.device(device), masks
        self.indices = _check_indices(dataset, indices, max_offset)
        self.batches_per_epoch = len(self.indices) // batch_size
        if not self.batches_per_epoch:
            raise UserError(
                f"{dataset.folder}: {len(self.indices):,} transitions are fewer than one batch of {batch_size:,}; "
                "lower the batch size, or make a larger dataset"
            )
        self.on_device = dataset._fits(self.device, masks) if on_device == "auto" else on_device
        if self.on_device:  # upload here, not in the thread, whose stream would own the memory
            dataset.resident("frames", self.device)
            if masks:
                dataset.resident("masks", self.device)
        self._buffers = _Buffers()
        self._order: tuple[int, np.ndarray] = (-1, np.empty(0, np.int64))
        self._prefetch: _Prefetch = _Prefetch(self._load, start, None, self.device)

    @property
    def position(self) -> int:
        """Batches consumed so far."""
        return self._prefetch.position

    def next(self) -> Batch:
        return self._prefetch.next()

    def seek(self, position: int) -> None:
        """Go on at a position, as if that many batches had been consumed."""
        if position != self.position:
            self._prefetch.close()
            self._prefetch = _Prefetch(self._load, position, None, self.device)

    def close(self) -> None:
        """Stop the thread."""
        self._prefetch.close()

    def episodes(self, position: int) -> list[int]:
        """The episodes that the batch at a position is drawn from."""
        t, _ = self.draw(position)
        return np.unique(np.searchsorted(self.dataset.episode_start, t, "right") - 1).tolist()

    def draw(self, position: int) -> tuple[np.ndarray, np.ndarray]:
        """Frames t and offsets k, int64 (B,), of the batch at a position."""
        epoch, batch = divmod(position, self.batches_per_epoch)
        order = self._order  # read once: the thread and the caller may ask for different epochs
        if order[0] != epoch:
            rng = np.random.default_rng(np.random.SeedSequence([self.seed, epoch]))
            self._order = order = (epoch, rng.permutation(len(self.indices)))
        rows = order[1][batch * self.batch_size : (batch + 1) * self.batch_size]
        t = np.sort(self.indices[rows])
        if self.max_offset <= 1:
            return t, np.ones_like(t)
        ends = self.dataset.episode_start[np.searchsorted(self.dataset.episode_start, t, "right")]
        # The 1 keeps this apart from the epoch's order: [seed, epoch] and [seed, epoch, 0] seed the same generator.
        rng = np.random.default_rng(np.random.SeedSequence([self.seed, epoch, 1, batch]))
        return t, rng.integers(1, np.minimum(self.max_offset, ends - 1 - t) + 1)

    def _load(self, position: int) -> Batch:
        t, k = self.draw(position)
        window = window_index(self.dataset, t, k, max_offset=self.max_offset)
        epoch, batch = divmod(position, self.batches_per_epoch)
        noise_seed = [self.seed, epoch, 2, batch]
        return _load(self.dataset, t, window, self.device, self.masks, self.on_device, noise_seed, self._buffers)


class TensorSampler:
    """Endless shuffled batches of rows of tensors on the device, every row once per epoch but for the remainder.

    tensors: name -> (N, ...). `next()` gives the same names, (B, ...) each, B = min(batch_size, N). The order comes
    from (seed, epoch) alone, so `seek` continues exactly.
    """

    def __init__(self, tensors: dict[str, torch.Tensor], batch_size: int, *, seed: int):
        self.tensors, self.seed, self.position = tensors, seed, 0
        self.rows = len(next(iter(tensors.values())))
        self.batch_size = min(batch_size, self.rows)
        self.batches_per_epoch = self.rows // self.batch_size
        self._order: tuple[int, torch.Tensor] = (-1, torch.empty(0))

    def next(self) -> dict[str, torch.Tensor]:
        epoch, batch = divmod(self.position, self.batches_per_epoch)
        if self._order[0] != epoch:
            order = np.random.default_rng(np.random.SeedSequence([self.seed, epoch])).permutation(self.rows)
            self._order = (epoch, torch.from_numpy(order).to(next(iter(self.tensors.values())).device))
        rows = self._order[1][batch * self.batch_size : (batch + 1) * self.batch_size]
        self.position += 1
        return {name: tensor[rows] for name, tensor in self.tensors.items()}

    def seek(self, position: int) -> None:
        """Go on at a position, as if that many batches had been consumed."""
        self.position = position

    def close(self) -> None:
        """Nothing runs beside it."""


def _check_indices(dataset: Dataset, indices: np.ndarray | None, max_offset: int) -> np.ndarray:
    if indices is None:
        return dataset.transitions
    indices = np.asarray(indices, np.int64)
    if len(indices) and (indices.min() < 0 or indices.max() >= dataset.num_frames):
        raise IndexError(f"frame index out of range 0..{dataset.num_frames - 1}")
    if max_offset and np.isin(indices, dataset.episode_start[1:] - 1).any():
        raise IndexError("the last frame of an episode has no transition")
    return indices


def sequential(
    dataset: Dataset,
    batch_size: int,
    *,
    max_offset: Literal[0, 1],
    device: torch.device,
    masks: bool = False,
    indices: np.ndarray | None = None,
    start: int = 0,
) -> Iterator[Batch]:
    """Batches in the order of `indices` (default: all transitions), the last one smaller, from batch `start` on.

    Reads from the device if a Sampler put the set there, else from the memory-mapped shards, one batch ahead.
    """
    if max_offset not in (0, 1):
        raise ValueError("max_offset must be 0 or 1")
    device = torch.device(device)
    indices = _check_indices(dataset, indices, max_offset)
    on_device = ("frames", device) in dataset._resident and (not masks or ("masks", device) in dataset._resident)

    def load(position: int) -> Batch:
        t = indices[position * batch_size : (position + 1) * batch_size]
        window = window_index(dataset, t, max_offset=max_offset)
        return _load(dataset, t, window, device, masks, on_device, [position], buffers)

    buffers = _Buffers()
    stop = -(-len(indices) // batch_size)
    if start >= stop:
        return
    prefetch: _Prefetch = _Prefetch(load, start, stop, device)
    try:
        for _ in range(start, stop):
            yield prefetch.next()
    finally:
        prefetch.close()


def normalise(frames: torch.Tensor) -> torch.Tensor:
    """uint8 (B, F, H, W, 3) -> float32 (B, F, 3, H, W) in [-0.5, 0.5]; the memory stays channels-last."""
    return frames.movedim(-1, -3).to(torch.float32).div_(255).sub_(0.5)


def unpack_masks(packed: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """Bit-packed uint8 (B, F, H*W/8) -> float32 (B, F, 1, H, W) of zeros and ones."""
    shift = torch.arange(7, -1, -1, dtype=torch.uint8, device=packed.device)
    bits = (packed.unsqueeze(-1) >> shift) & 1
    return bits.view(*packed.shape[:-1], 1, height, width).to(torch.float32)
