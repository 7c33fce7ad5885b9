"""Make a dataset of your own videos, of a robot's dataset, or of the data that the paper's authors published.

    python import_data.py videos DIR --name mine --size 128 --fps 10
    python import_data.py lerobot DIR --name robot --fps 10
    python import_data.py authors cheetah-run --distractor low

Writes data/<name>/train and /test, as make_dataset.py does; no simulator is needed. First comes data/<name>/plan.h5:
the episodes, splits, actions and their scale. Rerun the same command to resume, or beside the first one to share
the work. docs/videos.md has the rest.
"""

import contextlib
import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import tyro

from common import authors, lerobot, media, recordings, shards, store
from common.cli import Count, Positive, Range, Seed, UserError, checked, cli
from common.recordings import SPLITS, Pictures, Source
from common.runs import versions
from common.shards import Split, describe_command, frame_schema, shard_episodes
from common.store import StoppableProgress
from common.tasks import TASKS, get_task


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
    size: Annotated[int, Range(8, 4096)] = 64
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
    """leave out episodes with something wrong, and list them"""


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


def default_args(argv: list[str]) -> Import:
    """A command line without a subcommand is an error."""
    return Import(tyro.MISSING)


def describe(options: Any) -> tuple[dict[str, Any], str]:
    """The settings that decide what shards hold, and the command that makes them, without folders of this machine."""
    kind = type(options).__name__.lower()
    values = {name: value for name, value in vars(options).items() if name not in ("data_dir", "verify")}
    folders = {name: values[name] is not None for name in ("folder", "masks", "actions") if name in values}
    start = f"python import_data.py {kind} {getattr(options, 'task', 'DIR')}"
    start += " --from COPY" if kind == "authors" and options.folder else ""
    hidden = ("data_dir", "verify", "task", "folder")
    return {"kind": kind} | values | folders, describe_command(start, options, type(options), hidden)


def check(options: Videos | Lerobot | Authors) -> None:
    """Raises UserError for options that are not possible."""
    if isinstance(options, Authors):
        return
    if not re.fullmatch(r"[A-Za-z0-9_-]+", options.name) or options.name in (*TASKS, "all", "DAVIS"):
        raise UserError(f"--name {options.name!r}: take letters, digits, - and _, but no task's name, all or DAVIS")
    if options.size % 8:
        raise UserError(f"--size is {options.size}, must be a multiple of 8: the networks halve frames three times")
    if isinstance(options, Lerobot) and options.fps and options.stride:
        raise UserError("--fps and --stride both say which frames are kept; give one of them")


# ----------------------------------------------------------------------------------------------------------------- plan


def open_source(options: Videos | Lerobot | Authors) -> tuple[Source, Callable[[], Any], dict[str, Path]]:
    """Where the data are, what reads them, and the files by whose names and sizes a later run knows them again."""
    if isinstance(options, Videos):
        pictures = media.VIDEO_SUFFIXES | media.IMAGE_SUFFIXES
        suffixes = {"folder": pictures, "masks": media.IMAGE_SUFFIXES | {".npy"}, "actions": {*media.TABLES}}
        source, files = Source(options.folder, options.skip_bad), {}
        for name, read in suffixes.items():
            if (folder := getattr(options, name)) is not None:
                if not folder.is_dir():
                    raise UserError(f"{folder}: no such folder")
                files |= {f"{name}/{path.relative_to(folder)}": path for path in media.walk(folder, read)}
        return source, partial(recordings.read_videos, source, options.masks, options.actions), files
    if isinstance(options, Lerobot):
        robot = lerobot.open_robot(options.folder, options.camera, options.episodes)
        source, options.camera = Source(robot.root, options.skip_bad), robot.camera
        files = {str(path.relative_to(robot.root)): path for path in robot.files}
        return source, partial(lerobot.read_lerobot, source, robot, options.action), files
    task, distractor = get_task(options.task), options.distractor
    root, folder, repository = authors.locate(task, distractor, options.folder)
    source = Source(root)
    read = partial(authors.read_authors, source, task, distractor, folder, repository, options.max_transitions)
    return source, read, {} if repository else {path.name: path for path in media.walk(root / folder, {".parquet"})}


def plan_own(options: Videos | Lerobot, source: Source) -> dict[str, Any]:
    """Cuts recordings into episodes at their rate, in splits, with normalised actions. Returns what the plans say."""
    discrete, stride = recordings.as_categories(source, options.reduce), getattr(options, "stride", None)
    groups = recordings.cut_recordings(
        source, lambda one: one.at_rate(options.fps, stride, options.reduce).clips(options.clip_seconds)
    )
    train, test = recordings.split_episodes(source, groups, options.test, options.seed)
    source.recordings = train + test
    width = {name: recordings.common_width(name, train + test) for name in ("action", "state")}
    scale = recordings.normalise_actions(train, test, source.action_names, discrete) if width["action"] else None
    return dict.fromkeys(("quality", "expert", "expert_sha256", "distractors")) | {
        "env": options.name,
        "seed": options.seed,
        "renders": ["video"],
        "image_size": options.size,
        "state_dim": width["state"],
        "action_dim": width["action"],
        "success": False,
        "masks": bool(source.masks),
        "reward": False,
        "fps": options.fps or recordings.common_rate(train + test),
        "action_scale": scale,
    }


def make_plan(path: Path, options: Any, source: Source, read: Callable[[], Any], settings: dict[str, Any]) -> None:
    """Reads everything once, and writes the plans of both splits, where each frame is, and the numbers."""
    plan = read() or plan_own(options, source)
    digest = hashlib.sha256(json.dumps(settings["files"], sort_keys=True).encode()).hexdigest()
    lengths = {split: [len(one.place) for one in source.recordings if one.split == split] for split in SPLITS}
    about = {"source": settings | {"files": digest}}
    plans = {split: shards.divide(plan, each) | plan | {"split": split} | about for split, each in lengths.items()}
    starts = [0.0 if one.seconds is None else float(one.seconds[0]) for one in source.recordings]
    episodes = {"source": [one.name for one in source.recordings], "start_seconds": starts}
    found = {name: getattr(source, name) for name in ("columns", "masks", "skipped")} | {"files": list(source.files)}
    attributes = {"settings": settings, "plans": plans, "episodes": episodes, "source": found}
    arrays = recordings.plan_arrays(source.recordings, frame_schema(plan))
    store.write(path, arrays, attributes, {"command": describe(options)[1], "versions": versions()})


def read_plan(path: Path, settings: dict[str, Any]) -> store.StoredFile | None:
    """What `make_plan` wrote, None if it has to be made. UserError for other settings, or other files."""

    def read(path: Path) -> store.StoredFile:
        plan = store.read(path)
        store.verify(plan)
        return plan

    advice = "use those, and the same files, to resume, another --data-dir for a new set, or remove "
    advice += f"{path.parent} to import again"
    return store.read_kept(path, read, "settings", settings, advice, announce=True)


# --------------------------------------------------------------------------------------------------------------- shards


def make_shard(
    path: Path, plan: store.StoredFile, split: Split, pictures: Pictures, options: Any, progress: StoppableProgress
) -> None:
    """Writes a shard and, beside it, the masks that the authors predicted."""
    # The plan's arrays hold the train episodes first, then the test episodes.
    numbers, starts = shard_episodes(split.plan, int(path.stem)), plan.arrays["episode_start"]
    before = 0 if split.plan["split"] == "train" else len(starts) - 1 - split.plan["num_episodes"]
    episodes = slice(before + numbers.start, before + numbers.stop)
    frames = slice(starts[episodes.start], starts[episodes.stop])
    size, schema, place = split.plan["image_size"], frame_schema(split.plan), plan.arrays["place"][frames]
    arrays = {name: array[frames] for name, array in plan.arrays.items() if name in schema}
    arrays["episode_start"] = starts[episodes.start : episodes.stop + 1] - frames.start
    shapes = {name: shape for name, (_, shape) in schema.items() if "/" in name}
    shapes |= dict.fromkeys(pictures.columns.keys() - shapes.keys(), (size**2 // 8,))  # sam/mask
    arrays |= {name: np.empty((len(place), *shape), np.uint8) for name, shape in shapes.items()}
    for frame, (file, number) in enumerate(place.tolist()):
        found = pictures.read(file, number)
        for name in shapes:
            picture = media.as_square(found[name], size, getattr(options, "fit", None), pictures.paths[file])
            arrays[name][frame] = np.packbits(picture) if picture.dtype == bool else picture
        progress.update()
    predicted = arrays.pop("sam/mask", None)
    columns = {name: values[episodes] for name, values in plan.attributes["episodes"].items()}
    about = {"command": describe(options)[1], "versions": versions()}
    shards.write_shard(path, split.plan, arrays, columns, about)
    if predicted is not None:
        masks = {f"{render}/mask": predicted for render in split.plan["renders"]}
        shards.write_derived(shards.read_shard(path), "sam", masks, {"method": "authors"}, about["command"])


def run_import(options: Any, folder: Path) -> None:
    """Makes the plan, then every shard that is missing, together with other processes that do the same."""
    source, read, files = open_source(options)
    settings, path = describe(options)[0], folder / "plan.h5"
    settings["files"] = {name: file.stat().st_size for name, file in files.items()}
    store.fill(
        paths=lambda: [path],
        is_missing=lambda path: read_plan(path, settings) is None,
        make=lambda path: make_plan(path, options, source, read, settings),
    )
    plan = read_plan(path, settings)
    found, splits = plan.attributes["source"], {}
    if isinstance(options, Authors) and options.folder is None:
        lerobot.fetch(authors.REPOSITORIES[get_task(options.task).suite], found["files"])
    masks = {file: options.masks / name for file, name in found["masks"].items()}
    pictures = Pictures(source.root, found["files"], found["columns"], masks)
    for name in SPLITS:  # in the order of the frames in a video that is cut
        about = plan.attributes["plans"][name]
        splits[folder / name] = Split(folder / name, about | {"source": about["source"] | {"plan": plan.content_hash}})
        splits[folder / name].scan()

    def is_missing(path: Path) -> bool:
        predicted = "sam/mask" in pictures.columns and not shards.derived_path(path, "sam").exists()
        return predicted or splits[path.parent].is_missing(path)

    done = sum(split.frames_there() for split in splits.values())
    with StoppableProgress(folder.name, len(plan.arrays["place"]), "frames", done) as progress:
        paths = [path for split in splits.values() for path in split.candidates()]
        make = lambda path: make_shard(path, plan, splits[path.parent], pictures, options, progress)  # noqa: E731
        store.fill(lambda: paths, is_missing, make)
    for line in found["skipped"]:
        print(f"left out: {line}")


def main(args: Import) -> None:
    from common.dataset import Dataset

    options = checked(args.source)
    name = options.task if isinstance(options, Authors) else options.name
    check(options)
    if not options.verify:
        try:
            run_import(options, options.data_dir / name)
        except UserError:
            with contextlib.suppress(OSError):  # a folder that is not empty stays
                (options.data_dir / name).rmdir()
            raise
    for split in SPLITS:
        dataset = Dataset(options.data_dir, name, split, render=None)
        if options.verify:
            dataset.verify()
        print(dataset.describe())


if __name__ == "__main__":
    cli(main, default_args)
