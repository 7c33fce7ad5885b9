"""One store for everything that is made once and read often: shards, masks, optical flow.

A file is an HDF5 file of arrays that lie contiguous and uncompressed, so that readers map them into memory. It appears
under its name complete or not at all, and carries SHA-256 hashes of its content:

| in the file | what |
|---|---|
| any dataset | an array |
| `sha256/<array>` | uint8 (P, 32), the hash of each piece: of each episode for frames of a shard, else P = 1 |
| attribute `attributes` | JSON: what the arrays are and how they came about |
| attribute `content_hash` | SHA-256 of `attributes`, of names, types and shapes, and of all hashes in `sha256` |
| attribute `about` | JSON that no hash covers: the command, versions of packages |

Several processes, on one machine or on several that share the folder, fill it together: see `fill`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import hashlib
import io
import itertools
import json
import mmap
import os
import re
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import h5py
import numpy as np

from common.cli import Progress, Stopped, UserError, stop_requested

FORMAT_VERSION = 2
HDF5_FORMAT = ("v110", "v110")  # fixed, so that the same content gives the same bytes with any newer HDF5
PAGE = 4096
SMALL = 1 << 16  # bytes up to which an array is checked against its hash on every read
POLL_SECONDS = 2.0


class Damaged(UserError):
    """A file that may be made again: missing, unreadable, truncated, or made from something that is not there now."""


class Taken(Exception):
    """A live process is making this file."""


def system_error(error: Exception, path: Path) -> OSError | None:
    """The system's own error behind one from reading a file (no permission, a failing disk, too many open files).

    It says nothing about the content, and nothing may be replaced because of it. None for those of HDF5 and of other
    libraries, which have no number of the system; they may hide one of its. "Invalid argument" does come from content:
    a library asks for a place that a truncated file does not have.
    """
    for cause in (error, error.__context__):
        if isinstance(cause, OSError) and cause.errno not in (None, errno.EINVAL):
            return OSError(cause.errno, cause.strerror, str(path))
    return None


# ------------------------------------------------------------------------------------------------------------- writing


def fsync_folder(folder: Path) -> None:
    """Makes a rename inside `folder` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove_unlocked(paths: Iterable[Path]) -> None:
    """Removes files that no live process has locked, and that may be removed."""
    for path in paths:
        with contextlib.suppress(OSError), open(path, "r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()


@contextlib.contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yields a temporary path in the same folder: renamed to `path` when the block ends well, else removed.

    What killed processes left of the same file is removed: a live one locks its temporary file. An OSError names
    `path`, not the temporary one.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # The suffix stays, since libraries choose a format by it.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part{path.suffix}")
    try:
        with open(temporary, "xb") as lock:
            with contextlib.suppress(OSError):  # on a file system without locks leftovers stay
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove_unlocked(path.parent.glob(f".{glob.escape(path.name)}.*.part{path.suffix}"))
            yield temporary
            with open(temporary, "rb") as file:
                os.fsync(file.fileno())
            os.replace(temporary, path)
            fsync_folder(path.parent)
    except BaseException as error:
        with contextlib.suppress(OSError):  # the first error is the one to tell
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno is not None and error.filename in (None, str(temporary)):
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


def _json_hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def write_json(path: Path, value: Any, with_hash: bool = False) -> None:
    """Writes `value` as JSON, completely or not at all; with_hash: an object, and the hash of it under ``sha256``."""
    value = json.loads(json.dumps(value, default=str))  # as it is read again
    if with_hash:
        value["sha256"] = _json_hash(value)
    with atomic_path(path) as temporary:
        temporary.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def read_json(path: Path, kind: type = dict, keys: Iterable[str] = ()) -> Any:
    """A JSON value of a kind, by default an object that has some keys; without its hash.

    Damaged if the file holds something else, or values of another hash.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:  # no JSON, or no UTF-8
        raise Damaged(f"{path} is damaged") from None
    if not isinstance(value, kind) or not all(key in value for key in keys):
        raise Damaged(f"{path} is damaged")
    if isinstance(value, dict) and "sha256" in value and value.pop("sha256") != _json_hash(value):
        raise Damaged(f"{path} is damaged: its values do not have the hash that it holds (was it edited?)")
    return value


def _pieces(arrays: dict[str, np.ndarray], name: str) -> list[slice]:
    """The parts in which an array is hashed: the episodes, if it has a row for each of a shard's frames."""
    starts = arrays.get("episode_start")
    if starts is None or name == "episode_start" or len(arrays[name]) != starts[-1]:
        return [slice(None)]
    return [slice(start, stop) for start, stop in itertools.pairwise(starts)]


def _hashes(arrays: dict[str, np.ndarray], name: str) -> np.ndarray:
    """The SHA-256 of each piece of an array, uint8 (P, 32)."""
    pieces = [np.ascontiguousarray(arrays[name][piece]) for piece in _pieces(arrays, name)]
    return np.stack([np.frombuffer(hashlib.sha256(piece.data).digest(), np.uint8) for piece in pieces])


def _content_hash(attributes: str, arrays: dict[str, np.ndarray], hashes: dict[str, np.ndarray]) -> str:
    digest = hashlib.sha256(f"{FORMAT_VERSION} {attributes}".encode())
    for name in sorted(arrays):
        digest.update(_array_hash(name, arrays[name], hashes[name]).encode())
    return digest.hexdigest()


def _array_hash(name: str, array: np.ndarray, hashes: np.ndarray) -> str:
    kind = json.dumps([name, str(array.dtype), list(array.shape)])
    return hashlib.sha256(kind.encode() + hashes.tobytes()).hexdigest()


def write(
    path: Path,
    arrays: dict[str, np.ndarray],
    attributes: dict[str, Any],
    about: dict[str, Any] | None = None,
) -> str:
    """Writes a file of the store. Returns its content hash.

    The file is built in memory first, since HDF5 2.0 crashes when it closes a file on a full disk; so that takes twice
    the size of the arrays, and a full disk is an ordinary OSError.

    Args:
        arrays: name -> array; with an int64 array `episode_start` (N + 1,), arrays of as many rows as there are frames
            are hashed by episode.
        attributes: JSON values that say what the arrays are. about: further ones that no hash covers.
    """
    description = json.dumps(attributes, sort_keys=True)
    arrays = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    hashes = {name: _hashes(arrays, name) for name in arrays}
    content_hash = _content_hash(description, arrays, hashes)
    image = io.BytesIO()
    with h5py.File(image, "w", libver=HDF5_FORMAT, alignment_threshold=SMALL, alignment_interval=PAGE) as file:
        for name in sorted(arrays):
            file.create_dataset(name, data=arrays[name], track_times=False)
            file.create_dataset(f"sha256/{name}", data=hashes[name], track_times=False)
        file.attrs["format_version"] = FORMAT_VERSION
        file.attrs["attributes"] = description
        file.attrs["content_hash"] = content_hash
        file.attrs["about"] = json.dumps(about or {}, sort_keys=True)
    with atomic_path(path) as temporary:
        temporary.write_bytes(image.getbuffer())
    return content_hash


# ------------------------------------------------------------------------------------------------------------- reading


@dataclass
class StoredFile:
    """A file of the store whose header was checked; its arrays are read-only memory maps.

    The maps were made from the same open file as the header: another process may replace the file meanwhile.
    """

    path: Path
    arrays: dict[str, np.ndarray]
    hashes: dict[str, np.ndarray]
    attributes: dict[str, Any]
    about: dict[str, Any]
    content_hash: str

    def array_hash(self, name: str) -> str:
        """The hash of one array alone, from the header."""
        return _array_hash(name, self.arrays[name], self.hashes[name])


Stored = TypeVar("Stored", bound=StoredFile)


def _map(file: h5py.File, buffer: mmap.mmap, name: str) -> np.ndarray:
    dataset = file[name]
    if dataset.size == 0:
        return np.empty(dataset.shape, dataset.dtype)
    return np.frombuffer(buffer, dataset.dtype, dataset.size, dataset.id.get_offset()).reshape(dataset.shape)


def read(path: Path) -> StoredFile:
    """Opens a file of the store and checks its header and its small arrays, not the large ones.

    Raises Damaged, or UserError for a file of another format version.
    """
    try:
        with open(path, "rb") as handle, h5py.File(handle, "r") as file:
            version = file.attrs.get("format_version")
            if version is not None and int(version) != FORMAT_VERSION:
                about = json.loads(file.attrs.get("about", "{}"))
                command = about.get("command") or file.attrs.get("command", "the script that made them")
                raise UserError(
                    f"{path}: format version {version}, this code reads {FORMAT_VERSION}; remove {path.parent} and "
                    f"make its files again with: {command}"
                )
            buffer = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)
            hashes = {}
            file["sha256"].visititems(
                lambda name, item: hashes.update({name: item[:]}) if isinstance(item, h5py.Dataset) else None
            )
            description = str(file.attrs["attributes"])
            stored = StoredFile(
                path=path,
                arrays={name: _map(file, buffer, name) for name in hashes},
                hashes=hashes,
                attributes=json.loads(description),
                about=json.loads(file.attrs["about"]),
                content_hash=str(file.attrs["content_hash"]),
            )
        if _content_hash(description, stored.arrays, hashes) != stored.content_hash:
            raise Damaged(f"{path}: the header does not match its hash")
        small = {name for name, array in stored.arrays.items() if array.nbytes <= SMALL or name == "episode_start"}
        verify(stored, small)
        return stored
    except FileNotFoundError:
        raise Damaged(f"{path}: no such file") from None
    except (OSError, RuntimeError, KeyError, ValueError, TypeError, IndexError) as error:
        if system := system_error(error, path):
            raise system from error
        reason = "truncated" if "truncated" in str(error) else f"not a readable file of this program ({error})"
        raise Damaged(f"{path}: {reason}") from error


def verify(stored: StoredFile, names: Iterable[str] | None = None) -> None:
    """Reads arrays, by default all, and compares them with their hashes. Raises Damaged."""
    # The episodes' starts come first: the pieces of the other arrays follow from them.
    for name in sorted(stored.arrays if names is None else names, key=lambda name: (name != "episode_start", name)):
        wrong = np.flatnonzero((_hashes(stored.arrays, name) != stored.hashes[name]).any(1))
        if len(wrong):
            place = f"episode {wrong[0]} of {name}" if len(stored.hashes[name]) > 1 else name
            raise Damaged(f"{stored.path}: {place} does not match its hash")


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """`field: old -> new` for every field that differs, nested ones as `outer.inner`."""
    lines = []
    for key in sorted(old.keys() | new.keys()):
        before, after = old.get(key), new.get(key)
        if isinstance(before, dict) and isinstance(after, dict):
            lines += [f"{key}.{line}" for line in differences(before, after)]
        elif before != after:
            lines.append(f"{key}: {before} -> {after}")
    return lines


def read_kept(
    path: Path, read: Callable[[Path], Stored], key: str, settings: dict[str, Any], advice: str, announce: bool = False
) -> Stored | None:
    """What `read` finds in a file; None if it has to be made, as it is missing or damaged, which `announce` prints.

    Raises UserError, which ends in `advice`, if it was made with other settings than those: its attribute `key` has
    them, maybe among others.
    """
    try:
        stored = read(path)
    except Damaged as error:
        if announce and path.exists():
            print(f"{error}; making it again", flush=True)
        return None
    there = {name: stored.attributes[key].get(name) for name in settings}
    if lines := [line[:150] for line in differences(there, settings)[:5]]:
        raise UserError(f"{path}: made with other settings ({'; '.join(lines)}); {advice}")
    return stored


# -------------------------------------------------------------------------------------------- sharing work on a folder


def lock_file(path: Path) -> int:
    """Creates a file and locks it, for as long as the returned descriptor is open. Raises Taken if it is locked."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.path.samestat(os.fstat(descriptor), os.stat(path)):
            raise FileNotFoundError  # its holder removed it while we opened it
        return descriptor
    except OSError as error:
        os.close(descriptor)
        if isinstance(error, (BlockingIOError, FileNotFoundError)):
            raise Taken(path) from None
        raise OSError(error.errno, error.strerror, str(path)) from error


@contextlib.contextmanager
def claim(path: Path) -> Iterator[None]:
    """Holds the right to make `path`. Raises Taken if a live process has it.

    It is a lock on a file beside `path`, which ends with the process that holds it, so that what a killed process left
    can be told from what is being made.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = path.with_name(f".{path.name}.claim")
    descriptor = lock_file(lock)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # the first error is the one to tell; a lock that stays is no claim
            lock.unlink()
        os.close(descriptor)


def remove_leftovers(folder: Path) -> None:
    """Removes claims and temporary files of processes that were killed; those of live ones stay.

    So do those that may not be removed: whoever makes these files says why.
    """
    pattern = re.compile(r"\..+\.(?:claim|[0-9a-f]+\.part\.\w+)")
    _remove_unlocked(path for path in folder.glob(".*") if pattern.fullmatch(path.name))


class StoppableProgress(Progress):
    """Counts what is made or verified, file by file, and ends that at a signal."""

    def update(self, count: int = 1) -> None:
        super().update(count)
        if stop_requested():
            raise Stopped("the complete files stay")


def fill(
    paths: Callable[[], Iterable[Path]],
    is_missing: Callable[[Path], bool],
    make: Callable[[Path], None],
    stop: Callable[[], bool] = stop_requested,
) -> None:
    """Makes every file that is missing, together with other processes that do the same.

    Args:
        paths: called whenever the folder is looked through; may yield lazily, as later paths may depend on what was
            made of earlier ones.
        is_missing: whether a path has to be made; asked again under the claim.
        make: makes a path, which this process has claimed.
        stop: whether to end before the next file.

    Raises Stopped at a signal, before the next file; what is complete stays.
    """
    complete: set[Path] = set()
    waiting_for = 0
    while True:
        taken = []
        for path in paths():
            if path in complete:
                continue
            if stop():
                raise Stopped(f"the complete files in {path.parent} stay")
            if not is_missing(path):
                complete.add(path)
                continue
            try:
                with claim(path):
                    if is_missing(path):  # else another process was faster
                        make(path)
            except Taken:
                taken.append(path)
                continue
            complete.add(path)
            break  # what other processes made meanwhile decides which paths are left
        else:
            if not taken:
                return
            if len(taken) != waiting_for:
                waiting_for = len(taken)
                print(f"waiting for another process that makes {waiting_for} files in {taken[0].parent}", flush=True)
            time.sleep(POLL_SECONDS)  # that process may be killed, so look again
