"""The shards of a dataset: what a file of `common.store` holds when it holds episodes.

A split is a folder of immutable shards, `data/<env>/<split>/00000.h5, ...`, each of whole episodes. Frames lie flat. An
episode of L transitions has L+1 frames; action, reward and success at frame t belong to the step from t to t+1 (last
frame: NaN, 0, False). What is derived from a shard (masks, flow) lies beside it as `<stem>.<name>.h5`.

| array | dtype, shape |
|---|---|
| `<render>/observation` | uint8 (T, H, W, 3), render = clean, distractor; or video for what was filmed |
| `<render>/mask` | uint8 (T, H*W/8), bit-packed, most significant bit first |
| `state`, `action`, `reward` | float32 (T, S), float32 (T, A) unclipped, float32 (T,) |
| `success` | bool (T,), Meta-World only |
| `episode_start` | int64 (N+1,), in frames of the shard |

The attribute `plan` is the same in every shard of a split and says what the whole split holds. What `import_data.py`
brings in may lack actions, states, rewards and masks: the plan says so, and the arrays are not there.
"""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from common import store
from common.cli import UserError
from common.store import Damaged

SHARD_BYTES = 250 * 10**6  # a shard is built in memory, once as arrays and once as a file
MIN_SHARDS = 8  # of what is imported, so that several processes share it, and little is lost when one is stopped
DERIVED = ("raft",)  # names of files beside a shard that are no masks; training makes them


def frame_schema(plan: dict[str, Any]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Name -> (dtype, shape of one frame) of every array whose first axis is frames."""
    size = plan["image_size"]
    schema: dict[str, tuple[str, tuple[int, ...]]] = {}
    if plan["action_dim"]:
        schema["action"] = ("float32", (plan["action_dim"],))
    if plan.get("reward", True):  # plans of the simulators do not say that they have rewards and masks
        schema["reward"] = ("float32", ())
    if plan["state_dim"]:
        schema["state"] = ("float32", (plan["state_dim"],))
    if plan["success"]:
        schema["success"] = ("bool", ())
    for render in plan["renders"]:
        if plan.get("masks", True):
            schema[f"{render}/mask"] = ("uint8", (size * size // 8,))
        schema[f"{render}/observation"] = ("uint8", (size, size, 3))
    return schema


def frame_bytes(plan: dict[str, Any]) -> int:
    """Bytes of one frame over all arrays."""
    return sum(np.dtype(dtype).itemsize * int(np.prod(shape)) for dtype, shape in frame_schema(plan).values())


class Shard(store.StoredFile):
    """A shard whose header was checked."""

    @property
    def plan(self) -> dict[str, Any]:
        return self.attributes["plan"]

    @property
    def episodes(self) -> dict[str, list[Any]]:
        return self.attributes["episodes"]

    @property
    def episode_start(self) -> np.ndarray:
        """int64 (N + 1,)."""
        return self.arrays["episode_start"]

    @property
    def frames(self) -> int:
        return int(self.episode_start[-1])

    @property
    def num_episodes(self) -> int:
        return len(self.episode_start) - 1

    @property
    def num_transitions(self) -> int:
        return self.frames - self.num_episodes


def write_shard(
    path: Path,
    plan: dict[str, Any],
    arrays: dict[str, np.ndarray],
    episodes: dict[str, list[Any]],
    about: dict[str, Any] | None = None,
) -> str:
    """Writes a shard. Returns its content hash.

    Args:
        arrays: `episode_start` and what `frame_schema` names, (T, ...) each.
        episodes: lists of one JSON value per episode (seeds, backgrounds, returns).
        about: the command and versions of packages, which no hash covers.
    """
    attributes = {"plan": plan, "number": int(path.stem), "episodes": episodes}
    return store.write(path, arrays, attributes, about)


def read_shard(path: Path) -> Shard:
    """Opens a shard and checks its header. Damaged, or UserError for another format version."""
    shard = Shard(**vars(store.read(path)))
    try:
        number = shard.attributes["number"]
        len(shard.episodes)  # so that it is missed here
        starts, schema = shard.episode_start, frame_schema(shard.plan)
    except (KeyError, TypeError) as error:
        raise Damaged(f"{path}: not a shard ({error} is missing)") from error
    if len(starts) < 2 or starts[0] != 0 or np.diff(starts).min() < 2:
        raise Damaged(f"{path}: episode_start is not increasing")
    for name, (dtype, shape) in schema.items():
        array, expected = shard.arrays.get(name), (int(starts[-1]), *shape)
        if array is None or (array.dtype, array.shape) != (np.dtype(dtype), expected):
            actual = "missing" if array is None else f"{array.dtype} {array.shape}"
            raise Damaged(f"{path}: {name} is {actual}, expected {np.dtype(dtype)} {expected}")
    if number != int(path.stem):
        raise UserError(f"{path}: this is shard {number} under another name; remove it and make {path.name} again")
    return shard


def describe_command(start: str, args: Any, default: Any, hidden: Iterable[str]) -> str:
    """The command that makes the same files, for messages of readers. Paths of this machine are told as names.

    start: its first words. default: what has the usual values. hidden: fields that `start` has, or that change nothing.
    """
    words = [start]
    for name, value in vars(args).items():
        if name not in hidden and value != getattr(default, name, None):
            values = value if isinstance(value, tuple) else () if value is True else (value,)
            words.append(f"--{name.replace('_', '-')}")
            words += [name.upper() if isinstance(each, Path) else shlex.quote(str(each)) for each in values]
    return " ".join(words)


def shard_paths(folder: Path) -> list[Path]:
    """The shards of a folder in order; `00000.sam.h5` and the like are not shards."""
    paths = [path for path in folder.glob("*.h5") if re.fullmatch(r"\d{5,}\.h5", path.name)]
    return sorted(paths, key=lambda path: int(path.stem))


# ---------------------------------------------------------------------------------------- which shards there are


def shard_episodes(plan: dict[str, Any], shard: int) -> range:
    """The episodes of a shard: [shard * n, (shard + 1) * n), fewer in the last one where their number is fixed."""
    start = shard * plan["episodes_per_shard"]
    stop = start + plan["episodes_per_shard"]
    return range(start, stop if plan["num_episodes"] is None else min(stop, plan["num_episodes"]))


def divide(plan: dict[str, Any], frames: list[int]) -> dict[str, Any]:
    """What the plan of a split says of episodes with so many frames each, to be stored in shards of at most 250 MB.

    plan: what `frame_schema` needs. UserError if an episode is larger than a shard.
    """
    size = frame_bytes(plan) * max(frames)
    if size > SHARD_BYTES:
        raise UserError(
            f"an episode of {max(frames):,} frames takes {size / 1e6:.0f} MB, and a shard has at most "
            f"{SHARD_BYTES / 1e6:.0f} MB; cut it with --clip-seconds, or lower --fps or --size"
        )
    per_shard = min(SHARD_BYTES // size, -(-len(frames) // MIN_SHARDS))
    return {
        "num_transitions": sum(frames) - len(frames),
        "episode_length": max(frames) - 1,
        "episodes_per_shard": per_shard,
        "num_episodes": len(frames),
        "num_shards": -(-len(frames) // per_shard),
    }


@dataclass
class Split:
    """Which shards of a split exist, and which one to make next.

    The plan fixes the number of shards, but for Meta-World. There episodes end on success, so shards are made
    in order until the unbroken row from shard 0 on has the transitions that were asked for; what several processes
    made beyond that shard is removed again. Either way the outcome is the same for any number of processes.
    """

    folder: Path
    plan: dict[str, Any]
    transitions: dict[Path, int] = field(default_factory=dict)  # of the shards that are complete

    def candidates(self) -> Iterator[Path]:
        """Shards that may have to be made, in order; on Meta-World until those before have enough transitions."""
        before = 0
        for shard in itertools.count():
            if shard == self.plan["num_shards"] or before >= self.plan["num_transitions"]:
                return
            path = self.folder / f"{shard:05d}.h5"
            yield path
            before += self.transitions.get(path, 0)

    def first_missing(self) -> Path | None:
        """The first shard that is not there, None if the split is complete."""
        return next((path for path in self.candidates() if path not in self.transitions), None)

    def is_complete(self) -> bool:
        return self.first_missing() is None

    def is_missing(self, path: Path, announce: bool = False) -> bool:
        """Looks for a shard. UserError if it is of another plan; `announce` prints what is wrong with a damaged one."""
        advice = f"use those to resume, another --data-dir for a new set, or remove {path.parent} to make it again"
        shard = store.read_kept(path, read_shard, "plan", self.plan, advice, announce)
        if shard is not None:
            self.transitions[path] = shard.num_transitions
        return shard is None

    def scan(self) -> None:
        """Finds the shards that are there. Raises UserError if some are of another plan."""
        self.folder.mkdir(parents=True, exist_ok=True)
        store.remove_leftovers(self.folder)
        for path in shard_paths(self.folder):
            self.is_missing(path, announce=True)

    def trim(self) -> None:
        """Removes what was made beyond the last shard of a complete split, while not all before it were there."""
        self.scan()
        if self.is_complete():
            for path in set(shard_paths(self.folder)) - set(self.candidates()):
                path.unlink(missing_ok=True)

    def frames_there(self) -> int:
        """The frames of the shards that are complete."""
        shards = self.transitions.items()
        return sum(count + len(shard_episodes(self.plan, int(path.stem))) for path, count in shards)

    def frames(self) -> tuple[int, int]:
        """The frames of the whole split (on Meta-World about as many), and how many of them are there."""
        episodes = self.plan["num_episodes"]
        total = self.plan["num_transitions"] if episodes is None else episodes * (self.plan["episode_length"] + 1)
        return total, total if self.is_complete() else min(self.frames_there(), total)


# ---------------------------------------------------------------------------------- files that are derived from a shard


def derived_path(shard: Path, name: str) -> Path:
    return shard.with_name(f"{shard.stem}.{name}.h5")


def write_derived(
    shard: Shard, name: str, arrays: dict[str, np.ndarray], settings: dict[str, Any], command: str = ""
) -> Path:
    """Writes `<shard stem>.<name>.h5`. settings: how the arrays came about."""
    path = derived_path(shard.path, name)
    attributes = {"shard_hash": shard.content_hash, "settings": settings}
    store.write(path, arrays, attributes, about={"command": command})
    return path


def read_derived(shard: Shard, name: str) -> store.StoredFile:
    """Opens a file derived from a shard. Raises Damaged, also if it was made from another version of the shard."""
    stored = store.read(derived_path(shard.path, name))
    if stored.attributes.get("shard_hash") != shard.content_hash:
        raise Damaged(f"{stored.path}: made from another version of {shard.path.name}")
    return stored


def read_finished(
    shard: Shard, name: str, settings: dict[str, Any], advice: str, announce: bool = False
) -> store.StoredFile | None:
    """A file derived from a shard; None if it has to be made, as it is missing or damaged, which `announce` prints.

    Raises UserError, which ends in `advice`, if it was made with other settings.
    """
    path = derived_path(shard.path, name)
    return store.read_kept(path, lambda _: read_derived(shard, name), "settings", settings, advice, announce)
