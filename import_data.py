"""Make a dataset of your own videos, of a robot's dataset, or of the data that the paper's authors published.

    python import_data.py videos DIR --name mine --size 128 --fps 10
    python import_data.py lerobot DIR --name robot --fps 10
    python import_data.py authors cheetah-run --distractor low

Writes data/<name>/train and /test, as make_dataset.py does; no simulator is needed. First comes data/<name>/plan.h5:
the episodes, splits, actions and their scale. Rerun the same command to resume, or beside the first one to share
the work. docs/videos.md has the rest.
"""

import hashlib
import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import tyro

from common import authors, lerobot, recordings, shards, store
from common.cli import Count, Positive, Progress, Range, Seed, Stopped, UserError, checked, cli, stop_requested
from common.recordings import Recording, Source
from common.runs import versions
from common.shards import Split, frame_schema, shard_episodes
from common.tasks import TASKS, get_task

SPLITS = ("train", "test")


@dataclass(kw_only=True)
class Common:
    data_dir: Path = Path("data")
    """where datasets are"""
    verify: bool = False
    """import nothing: read both splits again and compare with their hashes"""


@dataclass(kw_only=True)
class Own(Common):
    name: str
    """name of the dataset: data/<name>, and --env <name> in the other scripts"""
    size: Count = 64
    """height and width of the frames in pixels, a multiple of 8"""
    fit: Literal["crop", "pad"] = "crop"
    """how a frame becomes square: crop takes the middle, pad adds black"""
    fps: Positive | None = None
    """frames per second that are kept; None: all frames. Folders of images have no times: it says what theirs is"""
    clip_seconds: Positive | None = None
    """cut what is longer into episodes of this length; of each recording, the last part is then for testing"""
    reduce: Literal["last", "sum", "mean"] = "last"
    """how the actions between two frames that are kept become one: last suits targets, sum displacements"""
    test: Annotated[float, Range(0, 1)] = 0.1
    """share of the episodes that is for testing, at least one"""
    seed: Seed = 0
    """which episodes are for testing"""
    skip_bad: bool = False
    """leave out episodes with something wrong, and list them; all videos are then decoded before the first shard"""


@dataclass(kw_only=True)
class Videos(Own):
    """Video files, or folders of images in the order of their numbers; an episode each."""

    folder: Annotated[Path, tyro.conf.Positional]
    """folder with the files or folders"""
    masks: Path | None = None
    """folder with the agent's masks under the same names: .npy (frames, height, width), or folders of images"""
    actions: Path | None = None
    """folder with the actions under the same names: .npy, .csv or .parquet, a row for each frame (but the last)"""


@dataclass(kw_only=True)
class Lerobot(Own):
    """A robot's dataset in LeRobot's format v2.1 or v3.0."""

    folder: Annotated[str, tyro.conf.Positional]
    """its folder, or user/repo on the Hugging Face hub"""
    camera: str | None = None
    """feature with the frames, if there are several"""
    action: str | None = None
    """feature with the actions; None: action, if there is one"""
    episodes: str | None = None
    """numbers of the episodes, such as 0:50 for the first fifty; None: all"""
    stride: Count | None = None
    """keep every frame of this distance; instead of --fps"""


@dataclass(kw_only=True)
class Authors(Common):
    """The datasets that the paper's authors published, under the task's own name."""

    task: Annotated[Literal[(*TASKS,)], tyro.conf.Positional]
    """task"""
    distractor: Literal["low", "hard", "none"] = "low"
    """which distractors (Meta-World has one kind; none leaves it out)"""
    folder: Annotated[Path | None, tyro.conf.arg(name="from")] = None
    """a copy of the hub's dataset on this machine; None: download it"""
    max_transitions: Count | None = None
    """stop at whole episodes with this many train transitions, and a tenth of it for testing; None: take all"""


@dataclass
class Import:
    source: tyro.conf.OmitSubcommandPrefixes[tyro.conf.OmitArgPrefixes[Videos | Lerobot | Authors]]


RUNTIME_FIELDS = {"data_dir", "verify"}  # they do not change what a shard holds
PLACES = {"folder", "masks", "actions"}  # folders of this machine, which no shard and no message tells


def default_args(argv: list[str]) -> Import:
    """A command line without a subcommand is an error."""
    return Import(tyro.MISSING)


def describe_command(options: Any) -> str:
    """The command that makes the same shards, for the messages of readers."""
    kind = type(options).__name__.lower()
    words = ["python import_data.py", kind, options.task if kind == "authors" else "DIR"]
    for entry in fields(options):
        name, value = entry.name, getattr(options, entry.name)
        if name not in RUNTIME_FIELDS | {"task", "folder"} and value != entry.default:
            words.append(f"--{name.replace('_', '-')}")
            words += [] if value is True else [name.upper() if name in PLACES else shlex.quote(str(value))]
    return " ".join(words)


# --------------------------------------------------------------------------------------------------------------- source


def check(options: Videos | Lerobot | Authors) -> None:
    """Raises UserError for options that are not possible."""
    if isinstance(options, Authors):
        return
    if not re.fullmatch(r"[A-Za-z0-9_-]+", options.name) or options.name in (*TASKS, "all"):
        raise UserError(f"--name {options.name!r}: take letters, digits, - and _, and neither a task's name nor all")
    if options.size % 8:
        raise UserError(f"--size is {options.size}, must be a multiple of 8: the networks halve frames three times")
    if isinstance(options, Lerobot) and options.fps and options.stride:
        raise UserError("--fps and --stride both say which frames are kept; give one of them")


def open_source(options: Videos | Lerobot | Authors) -> tuple[Source, Iterable[Path]]:
    """Where the data are, and the files whose names and sizes tell whether a later run finds the same data."""
    if isinstance(options, Videos):
        folders = [folder for folder in (options.folder, options.masks, options.actions) if folder is not None]
        if absent := [folder for folder in folders if not folder.is_dir()]:
            raise UserError(f"{absent[0]}: no such folder")
        return Source(options.folder, options.skip_bad), [path for folder in folders for path in folder.rglob("*")]
    if isinstance(options, Lerobot):
        root, options.camera = lerobot.locate(options.folder, options.camera)
        return Source(root, options.skip_bad), root.glob("meta/**/*")
    root, folder, repository = authors.locate(options.task, options.distractor, options.folder)
    return Source(root), [] if repository else root.glob(f"{folder}/*.parquet")


def describe_settings(options: Any, files: Iterable[Path]) -> dict[str, Any]:
    """Everything that decides what the shards hold, without folders of this machine."""
    listing = sorted(f"{path.name} {path.stat().st_size}" for path in files if path.is_file())
    digest = hashlib.sha256("\n".join(listing).encode()).hexdigest()
    settings = {"kind": type(options).__name__.lower(), "files": digest}
    for name in vars(options).keys() - RUNTIME_FIELDS:
        settings[name] = getattr(options, name) is not None if name in PLACES else getattr(options, name)
    return settings


# ----------------------------------------------------------------------------------------------------------------- plan


def read_own(options: Videos | Lerobot, source: Source) -> tuple[dict[str, Any], list[list[Recording]]]:
    """Reads videos or a robot's dataset. Returns what the plans of both splits say, and the episodes of each."""
    if isinstance(options, Videos):
        recordings.read_videos(source, options.masks, options.actions)
    else:
        lerobot.read_lerobot(source, options.camera, options.action, lerobot.episode_range(options.episodes))
    discrete, stride = recordings.one_hot(source), getattr(options, "stride", None)
    groups = recordings.cut_recordings(source, options.fps, stride, options.reduce, options.clip_seconds)
    train, test = recordings.split_episodes(groups, options.test, options.seed)
    width = {name: recordings.common_width(name, train + test) for name in ("action", "state")}
    scale = recordings.normalise_actions(train, test, source.action_names, discrete) if width["action"] else None
    plan = {
        "env": options.name,
        "seed": options.seed,
        "renders": ["video"],
        "quality": None,
        "image_size": options.size,
        "state_dim": width["state"],
        "action_dim": width["action"],
        "success": False,
        "expert": None,
        "expert_sha256": None,
        "distractors": None,
        "masks": bool(source.masks),
        "reward": False,
        "fps": options.fps or recordings.common_rate(train + test),
        "action_scale": scale,
    }
    return plan, [train, test]


def make_plan(path: Path, options: Any, source: Source, settings: dict[str, Any]) -> None:
    """Reads all but the pictures, and writes the plans of both splits, where each frame is, and the numbers."""
    if isinstance(options, Authors):
        plan = authors.read_authors(source, options.task, options.distractor, options.max_transitions, options.folder)
        splits = [[episode for episode in source.recordings if episode.split == split] for split in SPLITS]
    else:
        plan, splits = read_own(options, source)
    everything = splits[0] + splits[1]
    plans = {
        name: plan | shards.divide(plan, [len(episode.place) for episode in part]) | {"split": name, "source": settings}
        for name, part in zip(SPLITS, splits)
    }
    arrays = recordings.plan_arrays(everything, frame_schema(plan))
    episodes = {
        "source": [episode.name for episode in everything],
        "start_seconds": [0.0 if episode.seconds is None else float(episode.seconds[0]) for episode in everything],
    }
    found = {name: getattr(source, name) for name in ("files", "frames", "columns", "masks", "skipped")}
    attributes = {"settings": settings, "plans": plans, "episodes": episodes, "source": found}
    store.write(path, arrays, attributes, {"command": describe_command(options), "versions": versions()})


def read_plan(path: Path, settings: dict[str, Any]) -> store.StoredFile | None:
    """What `make_plan` wrote, None if it has to be made. UserError for other settings, or other files."""
    try:
        plan = store.read(path)
        store.verify(plan)
    except store.Damaged as error:
        if path.exists():
            print(f"{error}; making it again")
        return None
    if lines := store.differences(plan.attributes["settings"], settings):
        raise UserError(
            f"{path}: made with other settings or from other files ({'; '.join(lines)}). Use the same arguments to "
            f"resume, another --data-dir for a new set, or remove {path.parent} to import again"
        )
    return plan


# --------------------------------------------------------------------------------------------------------------- shards


class Maker:
    """Makes shards from what plan.h5 says. Its arrays hold the train episodes first, then the test episodes."""

    def __init__(self, options: Any, source: Source, folder: Path, plan: store.StoredFile):
        self.options, self.source, self.folder = options, source, folder
        self.arrays, self.episodes = plan.arrays, plan.attributes["episodes"]
        self.splits = {}
        for name, one in plan.attributes["plans"].items():
            split = Split(folder / name, one | {"source": one["source"] | {"plan": plan.content_hash}})
            split.scan()
            self.splits[split.folder] = split
        self.last_used = np.full(len(source.files), -1)  # frame of each file
        np.maximum.at(self.last_used, *self.arrays["place"].T)

    def is_missing(self, path: Path) -> bool:
        predicted = "sam/mask" in self.source.columns and not shards.derived_path(path, "sam").exists()
        return predicted or self.splits[path.parent].is_missing(path)

    def decode(self, place: np.ndarray, plan: dict[str, Any]) -> dict[str, np.ndarray]:
        """The pictures at `place` (T, 2), and their masks: arrays of a shard, and sam/mask if there is one."""
        shapes = {name: shape for name, (_, shape) in frame_schema(plan).items() if "/" in name}
        shapes |= dict.fromkeys(self.source.columns.keys() - shapes.keys(), (plan["image_size"] ** 2 // 8,))
        stacks = {name: np.empty((len(place), *shape), np.uint8) for name, shape in shapes.items()}
        masks_folder, fit = (getattr(self.options, name, None) for name in ("masks", "fit"))
        for frame, pictures in enumerate(self.source.pictures(place, self.last_used, masks_folder)):
            file = self.source.files[place[frame, 0]]
            for name in stacks:
                picture = recordings.as_square(pictures[name], plan["image_size"], fit, file)
                stacks[name][frame] = np.packbits(picture) if picture.dtype == bool else picture
            self.progress.update()
            if stop_requested():
                raise Stopped(f"the complete shards in {self.folder} stay")
        return stacks

    def make(self, path: Path) -> None:
        """Writes a shard and, beside it, the masks that the authors predicted."""
        split = self.splits[path.parent]
        numbers, starts = shard_episodes(split.plan, int(path.stem)), self.arrays["episode_start"]
        before = 0 if split.plan["split"] == "train" else len(starts) - 1 - split.plan["num_episodes"]
        episodes = slice(before + numbers.start, before + numbers.stop)
        frames = slice(starts[episodes.start], starts[episodes.stop])
        arrays = {name: array[frames] for name, array in self.arrays.items() if name in frame_schema(split.plan)}
        arrays["episode_start"] = starts[episodes.start : episodes.stop + 1] - frames.start
        try:
            arrays |= self.decode(self.arrays["place"][frames], split.plan)
        except UserError as error:
            if isinstance(self.options, Authors):
                raise
            raise UserError(f"{error}; or leave it out: remove {self.folder} and use --skip-bad") from error
        predicted = arrays.pop("sam/mask", None)
        columns = {name: values[episodes] for name, values in self.episodes.items()}
        about = {"command": describe_command(self.options), "versions": versions()}
        shards.write_shard(path, split.plan, arrays, columns, about)
        if predicted is not None:
            masks = {f"{render}/mask": predicted for render in split.plan["renders"]}
            shards.write_derived(shards.read_shard(path), "sam", masks, {"method": "authors"}, about["command"])

    def make_all(self) -> None:
        """Makes every shard that is missing, together with other processes that do the same."""
        done = sum(split.frames_there() for split in self.splits.values())
        with Progress(self.folder.name, len(self.arrays["place"]), "frames", done) as self.progress:
            paths = [path for split in self.splits.values() for path in split.candidates()]
            store.fill(lambda: paths, self.is_missing, self.make)


def run_import(options: Any, folder: Path) -> None:
    """Makes the plan, then the shards."""
    source, files = open_source(options)
    settings, path = describe_settings(options, files), folder / "plan.h5"
    store.fill(
        paths=lambda: [path],
        is_missing=lambda path: read_plan(path, settings) is None,
        make=lambda path: make_plan(path, options, source, settings),
    )
    plan = read_plan(path, settings)
    source = replace(source, **plan.attributes["source"], recordings=[])
    if isinstance(options, Authors) and options.folder is None:
        lerobot.fetch(authors.REPOSITORIES[get_task(options.task).suite], source.files)
    Maker(options, source, folder, plan).make_all()
    for line in source.skipped:
        print(f"left out: {line}")


def main(args: Import) -> None:
    from common.dataset import Dataset

    options = checked(args.source)
    name = options.task if isinstance(options, Authors) else options.name
    check(options)
    if not options.verify:
        run_import(options, options.data_dir / name)
    for split in SPLITS:
        dataset = Dataset(options.data_dir, name, split, render=None)
        if options.verify:
            dataset.verify()
            print(f"{dataset.folder}: as it was written")
        size = sum(shard.path.stat().st_size for shard in dataset.shards)
        print(
            f"{dataset.folder}: {len(dataset.shards)} shards, {dataset.num_transitions:,} transitions in "
            f"{dataset.num_episodes:,} episodes, {size / 1e9:.2f} GB, hash {dataset.hash}"
        )


if __name__ == "__main__":
    cli(main, default_args)
