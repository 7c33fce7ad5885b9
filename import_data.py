"""Make a dataset of your own videos, of a robot's dataset, or of the data that the paper's authors published.

    python import_data.py videos DIR --name mine --size 128 --fps 10
    python import_data.py lerobot DIR --name robot --fps 10
    python import_data.py authors cheetah-run --distractor low

Writes data/<name>/train and data/<name>/test, as make_dataset.py does; no simulator is needed. data/<name>/plan.h5 comes
first: episodes, splits, actions and their scale. Rerun the same command to resume, or beside the first one to share the
work. docs/videos.md has the rest.
"""

import hashlib
import itertools
import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import tyro
from PIL import Image, ImageOps

from common import lerobot, store
from common.cli import Count, Positive, Progress, Range, Seed, Stopped, UserError, checked, cli, stop_requested
from common.recordings import Recording, Source, read_videos
from common.runs import versions
from common.shards import (
    SHARD_BYTES,
    Split,
    frame_bytes,
    frame_schema,
    read_derived,
    read_shard,
    shard_episodes,
    write_derived,
    write_shard,
)
from common.tasks import TASKS, get_task

SPLITS = ("train", "test")
MIN_SHARDS = 8  # so that several processes have something to do, and little is lost when one is stopped
PERCENTILES = (0.1, 99.9)  # of an action's dimension, which become -1 and 1
CONSTANT = 1e-6  # the range, relative to the values, below which a dimension counts as constant
MOST_CATEGORIES = 1000


@dataclass(kw_only=True)
class Options:
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
    """leave out episodes with something wrong, and list them; videos are then decoded once before all else"""
    data_dir: Path = Path("data")
    """where datasets are"""
    verify: bool = False
    """import nothing: read both splits again and compare with their hashes"""


@dataclass(kw_only=True)
class Videos(Options):
    """Video files, or folders of images in the order of their numbers; an episode each."""

    folder: Annotated[Path, tyro.conf.Positional]
    """folder with the files or folders"""
    masks: Path | None = None
    """folder with the agent's masks under the same names: .npy (frames, height, width), or folders of images"""
    actions: Path | None = None
    """folder with the actions under the same names: .npy, .csv or .parquet, a row for each frame (but the last)"""


@dataclass(kw_only=True)
class Lerobot(Options):
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
class Authors:
    """The datasets that the paper's authors published, under the task's own name."""

    task: Annotated[Literal[(*TASKS,)], tyro.conf.Positional]
    """task"""
    distractor: Literal["low", "hard", "none"] = "low"
    """which distractors (Meta-World has one kind; none leaves it out)"""
    folder: Annotated[Path | None, tyro.conf.arg(name="from")] = None
    """a copy of the hub's dataset on this machine; None: download it"""
    max_transitions: Count | None = None
    """stop at whole episodes with this many train transitions, and a tenth of it for testing; None: take all"""
    data_dir: Path = Path("data")
    """where datasets are"""
    verify: bool = False
    """import nothing: read both splits again and compare with their hashes"""


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


def episode_range(text: str | None) -> range:
    """`0:50` as a range."""
    match = re.fullmatch(r"(\d*):(\d*)", text or ":")
    if match is None:
        raise UserError(f"--episodes {text}: write the first one and the one after the last, such as 0:50")
    return range(int(match[1] or 0), int(match[2] or 2**31))


def check(options: Videos | Lerobot) -> None:
    """Raises UserError for options that are not possible."""
    if not re.fullmatch(r"[A-Za-z0-9_-]+", options.name) or options.name in (*TASKS, "all"):
        raise UserError(f"--name {options.name!r}: take letters, digits, - and _, and neither a task's name nor all")
    if options.size % 8:
        raise UserError(f"--size is {options.size}, must be a multiple of 8: the networks halve frames three times")
    if isinstance(options, Lerobot):
        episode_range(options.episodes)
        if options.fps and options.stride:
            raise UserError("--fps and --stride both say which frames are kept; give one of them")


def open_source(options: Videos | Lerobot | Authors) -> tuple[Source, Iterable[Path]]:
    """Where the data are, and the files whose names and sizes tell whether a later run finds the same data."""
    if isinstance(options, Videos):
        folders = [folder for folder in (options.folder, options.masks, options.actions) if folder is not None]
        for folder in folders:
            if not folder.is_dir():
                raise UserError(f"{folder}: no such folder")
        return Source(options.folder, skip_bad=options.skip_bad), [path for one in folders for path in one.rglob("*")]
    if isinstance(options, Lerobot):
        root, on_hub = Path(options.folder).expanduser(), False
        if not root.is_dir() and re.fullmatch(r"[\w.-]+/[\w.-]+", options.folder):
            root, on_hub = lerobot.fetch(options.folder, ["meta/*"]), True
        options.camera = lerobot.choose_camera(root, lerobot.read_information(root), options.camera)
        if on_hub:
            lerobot.fetch(options.folder, ["data/*", f"*/{options.camera}/*"])
        return Source(root, skip_bad=options.skip_bad), root.glob("meta/**/*")
    if options.folder is None:
        return Source(lerobot.fetch(lerobot.AUTHORS[get_task(options.task).suite], ["README.md"])), []
    configuration = lerobot.authors_configuration(options.task, options.distractor)
    return Source(options.folder), options.folder.glob(f"{configuration}/*.parquet")


def describe_settings(options: Any, files: Iterable[Path]) -> dict[str, Any]:
    """Everything that decides what the shards hold, without folders of this machine."""
    listing = sorted(f"{path.name} {path.stat().st_size}" for path in files if path.is_file())
    settings = {
        "kind": type(options).__name__.lower(),
        "files": hashlib.sha256("\n".join(listing).encode()).hexdigest(),
    }
    for name in vars(options).keys() - RUNTIME_FIELDS:
        settings[name] = getattr(options, name) is not None if name in PLACES else getattr(options, name)
    return settings


# ----------------------------------------------------------------------------------------------------------------- plan


def one_hot(source: Source) -> bool:
    """Whether the actions are categories, one column of integers; turns them into vectors of zeros and ones."""
    columns = [recording.tables["action"] for recording in source.recordings if "action" in recording.tables]
    if not columns or any(column.dtype.kind == "f" or column.shape[1] != 1 for column in columns):
        return False
    categories = np.unique(np.concatenate(columns))
    if len(categories) > MOST_CATEGORIES:
        raise UserError(
            f"the actions are {len(categories)} different integers; store them as floats if they are numbers"
        )
    for recording in source.recordings:
        recording.tables["action"] = (recording.tables["action"] == categories).astype(np.float64)
    source.action_names = [str(category) for category in categories]
    print(f"actions: {len(categories)} categories, stored one-hot")
    return True


def choose_test(counts: list[int], share: float, seed: int) -> list[int]:
    """How many of its last episodes each recording gives for testing. counts: of the episodes that it has."""
    total = sum(counts)
    if total < 2:
        raise UserError(f"{total} episodes of two frames and more; two are needed, one for testing: see --clip-seconds")
    wanted, chosen, before = min(max(1, round(share * total)), total - 1), [0] * len(counts), 0
    for number in np.random.default_rng(seed).permutation(len(counts)).tolist():
        chosen[number] = wanted * (before + counts[number]) // total - wanted * before // total
        before += counts[number]
    return chosen


def scale_of(action: np.ndarray, names: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """What becomes -1 and 1 in each dimension of actions (N, A); equal for a constant dimension, which is said."""
    low, high = np.percentile(action, PERCENTILES, axis=0)
    least, most = action.min(axis=0), action.max(axis=0)
    smallest = CONSTANT * np.maximum(abs(least), abs(most))
    moves_rarely = high - low <= smallest  # in less than 0.1% of the steps, if at all
    low, high = np.where(moves_rarely, least, low), np.where(moves_rarely, most, high)
    constant = high - low <= smallest
    if constant.any():
        print(f"actions: constant, stored as zero: {', '.join(np.array(names)[constant])}")
    return low, np.where(constant, low, high)


def normalise_actions(splits: dict[str, list[Recording]], names: list[str], discrete: bool) -> dict[str, Any]:
    """Normalises the actions of all episodes by those of the train split, and returns the scale for the plan."""
    width = splits["train"][0].tables["action"].shape[1]
    labels = names if len(names) == width else [str(number) for number in range(width)]
    low, high = np.full(width, -1.0), np.full(width, 1.0)  # which leaves one-hot vectors as they are
    if not discrete:
        action = np.concatenate([episode.tables["action"][:-1] for episode in splits["train"]])
        low, high = scale_of(action, labels)
    span = np.where(high > low, high - low, np.inf)
    for episode in splits["train"] + splits["test"]:
        episode.tables["action"] = np.where(high > low, 2 * (episode.tables["action"] - low) / span - 1, 0)
    return {"low": low.tolist(), "high": high.tolist(), "names": names if labels == names else None}


def own_plan(options: Videos | Lerobot, source: Source) -> tuple[dict[str, Any], dict[str, list[Recording]]]:
    """Reads videos or a robot's dataset. Returns what the plans of both splits share, and their episodes."""
    if isinstance(options, Videos):
        read_videos(source, options.masks, options.actions)
    else:
        lerobot.read_lerobot(source, options.camera, options.action, episode_range(options.episodes))
    discrete, groups, short = one_hot(source), [], 0
    for recording in source.recordings:
        with source.checked():
            clips = recording.at_rate(options.fps, getattr(options, "stride", None), options.reduce)
            episodes = clips.clips(options.clip_seconds)
            groups.append([episode for episode in episodes if len(episode.place) > 1])
            short += len(episodes) - len(groups[-1])
    if short:
        source.skipped.append(f"{short} episodes of fewer than two frames")
    splits: dict[str, list[Recording]] = {split: [] for split in SPLITS}
    for group, test in zip(groups, choose_test([len(group) for group in groups], options.test, options.seed)):
        splits["train"] += group[: len(group) - test]
        splits["test"] += group[len(group) - test :]
    everything, width = splits["train"] + splits["test"], {}
    for name in ("action", "state"):
        widths = {episode.tables[name].shape[1] if name in episode.tables else 0 for episode in everything}
        if len(widths) > 1:
            raise UserError(f"{source.root}: the episodes have {name}s of {sorted(widths)} dimensions; they must agree")
        width[name] = widths.pop()
    fps = options.fps
    if fps is None and all(episode.seconds is not None for episode in everything):
        rates = [1 / float(np.median(np.diff(episode.seconds))) for episode in everything]
        fps = round(rates[0], 3) if max(rates) < 1.01 * min(rates) else None
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
        "fps": fps,
        "action_scale": normalise_actions(splits, source.action_names or [], discrete) if width["action"] else None,
    }
    return plan, splits


def authors_plan(options: Authors, source: Source) -> tuple[dict[str, Any], dict[str, list[Recording]]]:
    """As `own_plan`, but the plan is like that of make_dataset.py, so that policies can be rolled out."""
    task, most = get_task(options.task), options.max_transitions
    suffices = {"train": most, "test": most and -(-most // 10)}
    renders = lerobot.read_authors(source, task.name, options.distractor, options.folder is None, suffices)
    moving = {"low": 0.1, "hard": 0.3}[options.distractor] if "distractor" in renders and task.suite == "dcs" else 0.0
    # Their clips are DAVIS's, but which ones of it is not known.
    distractors = {"backgrounds": "davis", "clips": None, "camera_scale": moving, "color_scale": moving}
    plan = {
        "env": task.name,
        "seed": 0,
        "renders": renders,
        "quality": "full",
        "image_size": task.image_size,
        "state_dim": task.state_dim,
        "action_dim": task.action_dim,
        "success": task.suite == "dmw",
        "expert": "authors",
        "expert_sha256": "",
        "distractors": distractors if "distractor" in renders else None,
    }
    return plan, {split: [episode for episode in source.recordings if episode.split == split] for split in SPLITS}


def make_plan(path: Path, options: Any, source: Source, settings: dict[str, Any]) -> None:
    """Reads all but the pictures, and writes the plans of both splits, the frames to store, and the numeric arrays."""
    plan, splits = authors_plan(options, source) if isinstance(options, Authors) else own_plan(options, source)
    plans, everything = {}, splits["train"] + splits["test"]
    for split, episodes in splits.items():
        longest = max(episodes, key=lambda episode: len(episode.place))
        bytes_of_longest = frame_bytes(plan) * len(longest.place)
        if bytes_of_longest > SHARD_BYTES:
            raise UserError(
                f"{longest.name}: {len(longest.place):,} frames take {bytes_of_longest / 1e6:.0f} MB, more than the "
                f"{SHARD_BYTES / 1e6:.0f} MB of a shard; cut it with --clip-seconds, or lower --fps or --size"
            )
        per_shard = min(SHARD_BYTES // bytes_of_longest, -(-len(episodes) // MIN_SHARDS))
        plans[split] = plan | {
            "split": split,
            "num_transitions": sum(len(episode.place) - 1 for episode in episodes),
            "episode_length": len(longest.place) - 1,
            "episodes_per_shard": per_shard,
            "num_episodes": len(episodes),
            "num_shards": -(-len(episodes) // per_shard),
            "source": settings,
        }
    arrays = {
        name: np.concatenate([episode.tables[name] for episode in everything]).astype(dtype)
        for name, (dtype, _) in frame_schema(plan).items()
        if "/" not in name
    }
    arrays["place"] = np.concatenate([episode.place for episode in everything]).astype(np.int64)
    arrays["episode_start"] = np.cumsum([0] + [len(episode.place) for episode in everything])
    if "action" in arrays:
        arrays["action"][arrays["episode_start"][1:] - 1] = np.nan
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


def fitted(picture: np.ndarray, size: int, how: str | None) -> np.ndarray:
    """A frame, uint8 (H, W, 3), or a mask, bool (H, W), as a square; how: crop or pad, None if it must be one."""
    if picture.shape[:2] == (size, size):
        return picture
    if how is None:
        raise UserError(f"a picture has {picture.shape[1]} x {picture.shape[0]} pixels, expected {size} x {size}")
    image = Image.fromarray(picture * np.uint8(255) if picture.dtype == bool else picture)
    image = (ImageOps.fit if how == "crop" else ImageOps.pad)(image, (size, size), Image.Resampling.BICUBIC)
    return np.asarray(image) > 127 if picture.dtype == bool else np.asarray(image)


class Importer:
    """Makes shards by what is in plan.h5."""

    def __init__(self, options: Any, source: Source, folder: Path, plan: store.StoredFile):
        self.options, self.source, self.arrays, self.episodes = (
            options,
            source,
            plan.arrays,
            plan.attributes["episodes"],
        )
        self.splits = []
        for split in SPLITS:
            one = plan.attributes["plans"][split]
            self.splits.append(Split(folder / split, one | {"source": one["source"] | {"plan": plan.content_hash}}))
            self.splits[-1].scan()
        self.by_folder = {split.folder: split for split in self.splits}
        place = self.arrays["place"]
        self.last_used = np.full(len(source.files), -1)
        np.maximum.at(self.last_used, place[:, 0], place[:, 1])

    def is_missing(self, path: Path) -> bool:
        if self.by_folder[path.parent].is_missing(path):
            return True
        try:
            return "sam/mask" in self.source.columns and not read_derived(read_shard(path), "sam")
        except store.Damaged:
            return True

    def make(self, path: Path) -> None:
        """Writes a shard, and the masks that the authors predicted beside it."""
        plan = self.by_folder[path.parent].plan
        numbers, starts = shard_episodes(plan, int(path.stem)), self.arrays["episode_start"]
        before = 0 if plan["split"] == "train" else self.splits[0].plan["num_episodes"]  # train comes first in plan.h5
        episodes = slice(before + numbers.start, before + numbers.stop)
        frames = slice(starts[episodes.start], starts[episodes.stop])
        schema = frame_schema(plan)
        arrays = {name: array[frames] for name, array in self.arrays.items() if name in schema}
        arrays["episode_start"] = starts[episodes.start : episodes.stop + 1] - frames.start
        stacks = {
            name: np.empty((frames.stop - frames.start, *schema[name][1]), np.uint8)
            for name in schema.keys() - arrays.keys()
        }
        if "sam/mask" in self.source.columns:
            stacks["sam/mask"] = np.empty_like(stacks[f"{plan['renders'][0]}/mask"])
        masks = self.options.masks if self.source.masks else None
        for frame, pictures in enumerate(self.source.pictures(self.arrays["place"][frames], self.last_used, masks)):
            for name, picture in pictures.items():
                picture = fitted(picture, plan["image_size"], getattr(self.options, "fit", None))
                stacks[name][frame] = np.packbits(picture) if picture.dtype == bool else picture
            self.progress.update()
            if stop_requested():
                raise Stopped(f"the complete shards in {path.parent} stay")
        predicted = stacks.pop("sam/mask", None)
        columns = {name: values[episodes] for name, values in self.episodes.items()}
        command = describe_command(self.options)
        write_shard(path, plan, arrays | stacks, columns, {"command": command, "versions": versions()})
        if predicted is not None:
            masks = {f"{render}/mask": predicted for render in plan["renders"]}
            write_derived(read_shard(path), "sam", masks, {"method": "authors"}, command)
        self.by_folder[path.parent].is_missing(path)  # counts it

    def make_all(self) -> None:
        """Makes every shard that is missing, together with other processes that do the same."""
        done = [
            count + len(shard_episodes(one.plan, int(path.stem)))
            for one in self.splits
            for path, count in one.transitions.items()
        ]
        with Progress(self.splits[0].plan["env"], len(self.arrays["place"]), "frames", sum(done)) as self.progress:
            store.fill(
                paths=lambda: itertools.chain.from_iterable(split.candidates() for split in self.splits),
                is_missing=self.is_missing,
                make=self.make,
            )


def main(args: Import) -> None:
    from common.dataset import Dataset

    options = checked(args.source)
    if not isinstance(options, Authors):
        check(options)
    name = options.task if isinstance(options, Authors) else options.name
    if not options.verify:
        source, files = open_source(options)
        settings, path = describe_settings(options, files), options.data_dir / name / "plan.h5"
        store.fill(
            paths=lambda: [path],
            is_missing=lambda path: read_plan(path, settings) is None,
            make=lambda path: make_plan(path, options, source, settings),
        )
        plan = read_plan(path, settings)
        source = replace(source, **plan.attributes["source"], recordings=[])
        Importer(options, source, path.parent, plan).make_all()
        for line in source.skipped:
            print(f"left out: {line}")
    for split in SPLITS:
        dataset = Dataset(options.data_dir, name, split, render=None)
        if options.verify:
            dataset.verify()
        size = sum(shard.path.stat().st_size for shard in dataset.shards)
        print(
            f"{dataset.folder}: {len(dataset.shards)} shards, {dataset.num_transitions:,} transitions in "
            f"{dataset.num_episodes:,} episodes, {size / 1e9:.2f} GB, {'verified, ' * options.verify}hash {dataset.hash}"
        )


if __name__ == "__main__":
    cli(main, default_args)
