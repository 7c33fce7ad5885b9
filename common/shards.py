"""The shard format of datasets: writing, checking and mapping single files.

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
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from common.errors import UserError
from common.runs import fsync_folder

FORMAT_VERSION = 1
RENDERS = ("clean", "distractor")
DERIVED = ("raft",)  # names of files beside a shard that are no masks; training makes them
HDF5_FORMAT = ("v110", "v110")  # fixed, so that the same content gives the same bytes with any newer HDF5
PAGE = 4096
FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
COPY_CHUNK = 1024  # frames per copy when a shard is rewritten


class DamagedShard(UserError):
    """A shard that make_dataset.py may replace: unreadable, truncated, or not complete."""


class ShardTaken(Exception):
    """Another live process is writing this shard."""


# -------------------------------------------------------------------------------------------------------------- writing


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


def _open_file(path: Path, mode: str) -> h5py.File:
    return h5py.File(
        path, mode, libver=HDF5_FORMAT, locking=False, alignment_threshold=1 << 16, alignment_interval=PAGE
    )


def _lay_out(path: Path, claim: int, schema: dict[str, tuple[Any, tuple[int, ...]]], spare: int) -> dict[str, int]:
    """Make an HDF5 file with empty contiguous datasets. Returns the offset of each; `claim` is the open file.

    The content is written past HDF5 with `_write`: HDF5 2.0 crashes when it closes a file after a failed write. The
    space for all of it and `spare` bytes for attributes is reserved, so that HDF5 itself does not meet a full disk.
    """
    size = spare + sum(np.dtype(dtype).itemsize * int(np.prod(shape)) + PAGE for dtype, shape in schema.values())
    os.posix_fallocate(claim, 0, size)
    with _open_file(path, "w") as file:  # shortens the file, so the space is reserved once more below
        for name, (dtype, shape) in schema.items():
            dataset = file.create_dataset(name, shape=shape, dtype=dtype, track_times=False, fill_time="never")
            dataset[-1:] = np.zeros((1, *shape[1:]), dtype)  # any write makes HDF5 place the dataset
        offsets = {name: file[name].id.get_offset() for name in schema}
    os.posix_fallocate(claim, 0, size)
    return offsets


def _write(descriptor: int, offset: int, array: np.ndarray) -> None:
    view = memoryview(np.ascontiguousarray(array)).cast("B")
    while len(view):
        count = os.pwrite(descriptor, view, offset)
        view, offset = view[count:], offset + count


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
        self._claim = claim_part(self._part)
        try:
            with _FullDisk(path):
                self._offset = self._create(self._part, self._claim, max_frames)
        except BaseException:
            self.abort()
            raise

    def __enter__(self) -> "ShardWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self.abort()

    def _create(self, path: Path, claim: int, frames: int) -> dict[str, int]:
        schema: dict[str, tuple[Any, tuple[int, ...]]] = {
            "episode_start": (np.int64, (self.num_episodes + 1,)),
            "episode_hash": (np.uint8, (self.num_episodes, 32)),
        }
        schema |= {name: (dtype, (frames, *shape)) for name, (dtype, shape) in frame_schema(self.plan).items()}
        return _lay_out(path, claim, schema, spare=(1 << 16) + 256 * self.num_episodes)

    def _place(self, name: str, frame: int) -> int:
        """Offset of a frame in the file."""
        dtype, shape = frame_schema(self.plan)[name]
        return self._offset[name] + frame * np.dtype(dtype).itemsize * int(np.prod(shape))

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
        with _FullDisk(self.path):
            for name, array in arrays.items():
                _write(self._claim, self._place(name, self.frames), array)
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
        starts, digests = np.array(self._starts, np.int64), np.stack(self._digests)
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
        with _FullDisk(self.path):
            if self.frames < self.max_frames:
                self._shrink()
            _write(self._claim, self._offset["episode_start"], starts)
            _write(self._claim, self._offset["episode_hash"], digests)
            with _open_file(self._part, "r+") as file:
                for name, value in attributes.items():
                    file.attrs[name] = np.array([v.encode() for v in value]) if name == "background" else value
                file.attrs["versions"] = json.dumps(self.versions, sort_keys=True)
                file.attrs["command"] = self.command
                file.attrs["content_hash"] = content_hash
                file.flush()
                os.fsync(self._claim)
                file.attrs["complete"] = True
            os.fsync(self._claim)
            os.replace(self._part, self.path)
            fsync_folder(self.path.parent)
        os.close(self._claim)
        self._claim = -1
        return content_hash

    def _shrink(self) -> None:
        """Copy to a file of exactly the frames written, if episodes ended early: contiguous datasets cannot shrink."""
        exact = self._part.with_name(self._part.name.replace(".part", ".exact.part"))
        claim = claim_part(exact)
        try:
            offset = self._create(exact, claim, self.frames)
            for name, (dtype, shape) in frame_schema(self.plan).items():
                item = np.dtype(dtype).itemsize * int(np.prod(shape))
                for frame in range(0, self.frames, COPY_CHUNK):
                    count = min(COPY_CHUNK, self.frames - frame)
                    data = os.pread(self._claim, count * item, self._place(name, frame))
                    _write(claim, offset[name] + frame * item, np.frombuffer(data, np.uint8))
            os.replace(exact, self._part)
        except BaseException:
            exact.unlink(missing_ok=True)
            os.close(claim)
            raise
        os.close(self._claim)
        self._claim, self._offset = claim, offset

    def abort(self) -> None:
        """Drop the shard; does nothing after `commit`."""
        if self._claim < 0:
            return
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


class SidecarWriter:
    """Writes what was derived from a shard, e.g. `<render>/mask`, to `<shard stem>.<name>.h5`, atomically.

    From the start on the file is claimed, so that other processes can work on other shards meanwhile, and bound to
    the shard as it was then (`shard`). Use as a context manager. Raises ShardTaken, and DamagedShard for the shard.
    """

    def __init__(self, shard: Path, name: str):
        self.path = sidecar_path(shard, name)
        self._part = self.path.with_name(self.path.name + ".part")
        self._claim, self._written = claim_part(self._part), False
        try:
            self.shard = read_shard(shard)
        except BaseException:
            self._close()
            raise

    def __enter__(self) -> "SidecarWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def _close(self) -> None:
        if not self._written:  # else a file of that name is another process's by now
            self._part.unlink(missing_ok=True)
        os.close(self._claim)

    def write(self, arrays: dict[str, np.ndarray], **attributes: str | int | float) -> Path:
        """Make the file appear. arrays: dataset name -> array; its first axis is the shard's frames or episodes."""
        schema = {key: (array.dtype, array.shape) for key, array in arrays.items()}
        return self.stream(schema, ((key, 0, arrays[key]) for key in sorted(arrays)), **attributes)

    def stream(
        self,
        schema: dict[str, tuple[Any, tuple[int, ...]]],
        pieces: Iterable[tuple[str, int, np.ndarray]],
        **attributes: str | int | float,
    ) -> Path:
        """As `write`, for arrays that need not fit in memory.

        schema: dataset name -> (dtype, shape). pieces: (dataset, number of the first row, rows), the datasets in
        alphabetical order, each from its first row to its last. Space for everything is reserved before they are asked
        for. The hash of each dataset alone is stored as attribute <dataset>_hash, unless `attributes` has it.
        """
        with _FullDisk(self.path):
            ordered = {key: (np.dtype(schema[key][0]), tuple(schema[key][1])) for key in sorted(schema)}
            offsets = _lay_out(self._part, self._claim, ordered, spare=1 << 16)
            expected = [(key, int(np.prod(shape)) * dtype.itemsize) for key, (dtype, shape) in ordered.items()]
            whole, each = hashlib.sha256(), {}
            for key, first, rows in pieces:
                rows = np.ascontiguousarray(rows)
                row = ordered[key][0].itemsize * int(np.prod(ordered[key][1][1:]))
                written, total = each.setdefault(key, [hashlib.sha256(), 0])[1], dict(expected)[key]
                if list(each) != list(ordered)[: len(each)] or first * row != written or written + rows.nbytes > total:
                    raise ValueError(f"{self.path}: rows of {key} from {first} on are not the next ones")
                _write(self._claim, offsets[key] + written, rows)
                whole.update(rows.data)
                if len(ordered) > 1 and f"{key}_hash" not in attributes:  # else the hash of all is its hash
                    each[key][0].update(rows.data)
                each[key][1] += rows.nbytes
            if [(key, written) for key, (_, written) in each.items()] != expected:
                raise ValueError(f"{self.path}: rows are missing")
            attributes["content_hash"] = _described_hash(ordered, whole.digest())
            for key, kind in ordered.items():
                own = (each[key][0] if len(ordered) > 1 else whole).digest()
                attributes.setdefault(f"{key}_hash", _described_hash({key: kind}, own))
            with _open_file(self._part, "r+") as file:
                for key, value in sorted(attributes.items()):
                    file.attrs[key] = value
                file.attrs["format_version"] = FORMAT_VERSION
                file.attrs["shard_hash"] = self.shard.content_hash
                file.flush()
                os.fsync(self._claim)
                file.attrs["complete"] = True
            os.fsync(self._claim)
            os.replace(self._part, self.path)
            self._written = True
            fsync_folder(self.path.parent)
        return self.path


def write_sidecar(shard: Path, name: str, arrays: dict[str, np.ndarray], **attributes: str | int | float) -> Path:
    """Write `<shard stem>.<name>.h5` in one go; see SidecarWriter."""
    with SidecarWriter(shard, name) as writer:
        return writer.write(arrays, **attributes)


def sidecar_path(shard: Path, name: str) -> Path:
    return shard.with_name(f"{shard.stem}.{name}.h5")


def sidecar_hash(arrays: dict[str, np.ndarray]) -> str:
    return _described_hash(
        {name: (array.dtype, array.shape) for name, array in arrays.items()}, _episode_digest(arrays)
    )


def _described_hash(schema: dict[str, tuple[Any, tuple[int, ...]]], digest: bytes) -> str:
    """SHA-256 of names, types and shapes, and of the digest of all bytes in alphabetical order of the names."""
    shapes = {name: [str(np.dtype(dtype)), list(shape)] for name, (dtype, shape) in schema.items()}
    return hashlib.sha256(json.dumps(shapes, sort_keys=True).encode() + digest).hexdigest()


# -------------------------------------------------------------------------------------------------------------- reading


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
        return map_array(self._map, dtype, (self.frames, *shape), self.offset[name])


def map_array(buffer: mmap.mmap, dtype: Any, shape: tuple[int, ...], offset: int) -> np.ndarray:
    return np.frombuffer(buffer, dtype, int(np.prod(shape)), offset).reshape(shape)


def locate(file: h5py.File, path: Path, name: str, dtype: Any, shape: tuple[int, ...]) -> int:
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
                name: locate(file, path, name, dtype, (frames, *shape))
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


@dataclass
class Sidecar:
    """What the header of a file derived from a shard says, checked. `settings`: how its content came about.

    The file is mapped together with its header: another process may replace it by one with further datasets, in which
    everything lies elsewhere.
    """

    path: Path
    settings: dict[str, Any]
    attributes: dict[str, Any]
    datasets: dict[str, tuple[np.dtype, tuple[int, ...], int]]  # name -> dtype, shape, offset
    buffer: mmap.mmap

    def array(self, name: str) -> np.ndarray:
        """A read-only memory map of one of its datasets."""
        dtype, shape, offset = self.datasets[name]
        return map_array(self.buffer, dtype, shape, offset)


def read_sidecar(path: Path, shard: Shard) -> Sidecar:
    """Read and check the header of a derived file. DamagedShard if it is partial, unreadable or of another shard."""
    try:
        with open(path, "rb") as handle, h5py.File(path, "r", locking=False) as file:
            if not os.path.samestat(os.fstat(handle.fileno()), os.stat(path)):
                return read_sidecar(path, shard)  # replaced in between: handle and file may differ
            attrs = dict(file.attrs)
            if not bool(attrs.get("complete", False)):
                raise DamagedShard(f"{path}: not complete")
            if str(attrs.get("shard_hash", "")) != shard.content_hash:
                raise DamagedShard(f"{path}: made from another version of {shard.path.name}")
            names: list[str] = []
            file.visititems(lambda name, item: names.append(name) if isinstance(item, h5py.Dataset) else None)
            kinds = {name: (file[name].dtype, file[name].shape) for name in names}
            return Sidecar(
                path=path,
                settings=json.loads(attrs.get("settings", "{}")),
                attributes=attrs,
                datasets={name: (*kind, locate(file, path, name, *kind)) for name, kind in kinds.items()},
                buffer=mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ),
            )
    except FileNotFoundError:
        raise DamagedShard(f"{path}: no such file") from None
    except (OSError, RuntimeError, KeyError, ValueError, TypeError) as error:
        raise DamagedShard(f"{path}: not readable ({error})") from error


@dataclass
class MaskFile:
    """What the header of a shard's mask file says, checked. `settings`: how the masks came about."""

    path: Path
    renders: tuple[str, ...]
    settings: dict[str, Any]
    command: str
    mask_hash: dict[str, str]  # render -> hash of its masks alone
    iou: dict[str, np.ndarray]  # render -> float64 (N,): mean IoU with the simulator's masks, by episode
    empty: dict[str, np.ndarray]  # render -> int64 (N,): frames without a mask, by episode
    masks: dict[str, np.ndarray]  # render -> bit-packed masks, uint8 (T, H W / 8), a read-only memory map


def read_mask_file(path: Path, shard: Shard) -> MaskFile:
    """Read and check the header of a mask file. DamagedShard if it is partial, unreadable or of another shard."""
    file = read_sidecar(path, shard)
    renders = tuple(render for render in RENDERS if f"{render}/mask" in file.datasets)
    expected = np.dtype(np.uint8), (shard.frames, shard.plan["image_size"] ** 2 // 8)
    for render in renders:
        dtype, shape, _ = file.datasets[f"{render}/mask"]
        if (dtype, shape) != expected:
            raise DamagedShard(f"{path}: {render}/mask is {dtype} {shape}, expected {expected[0]} {expected[1]}")

    def named(name: str) -> dict[str, np.ndarray]:
        return {render: file.array(f"{render}/{name}") for render in renders if f"{render}/{name}" in file.datasets}

    whole = file.attributes.get("content_hash", "")
    return MaskFile(
        path=path,
        renders=renders,
        settings=file.settings,
        command=str(file.attributes.get("command", "")),
        mask_hash={render: str(file.attributes.get(f"{render}_hash", whole)) for render in renders},
        iou=named("iou"),
        empty=named("empty"),
        masks=named("mask"),
    )


def sidecar_command(paths: list[Path]) -> str:
    """The command that the first readable one of some files remembers, complete or stale; empty if none does."""
    for path in paths:
        try:
            with h5py.File(path, "r", locking=False) as file:
                if command := str(file.attrs.get("command", "")):
                    return command
        except (OSError, RuntimeError):
            continue
    return ""


def verify_sidecar(path: Path, shard: Shard) -> None:
    """Re-hash a file that was derived from a shard. Raises DamagedShard."""
    file = read_sidecar(path, shard)
    arrays = {name: file.array(name) for name in file.datasets}
    if str(file.attributes.get("content_hash", "")) != sidecar_hash(arrays):
        raise DamagedShard(f"{path}: does not match its hash")
    for name, array in arrays.items():  # kept when the file got further datasets
        if str(file.attributes.get(f"{name}_hash", "")) not in ("", sidecar_hash({name: array})):
            raise DamagedShard(f"{path}: {name} does not match its hash")


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
