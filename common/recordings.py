"""Recordings as episodes: frames in files, tables beside them, at a rate, cut into clips. And videos, one kind of them.

What reads a kind of source (`read_videos` here, `read_lerobot` elsewhere) decodes all that is wanted once, so that what
is wrong shows before the first shard; `Pictures` decodes the frames that are stored.
"""

import contextlib
import csv
import io
import os
import re
import unicodedata
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq

from common import media
from common.cli import Progress, Stopped, UserError, stop_requested

SPLITS = ("train", "test")
MASKS = (".npy", "/")  # a slash stands for a folder of images
PERCENTILES = (0.1, 99.9)  # of the train actions in a dimension, which become -1 and 1
CONSTANT = 1e-6  # the range, relative to the values, below which a dimension counts as constant
MOST_CATEGORIES = 1000
Episodes = list["Recording"]


@dataclass
class Recording:
    """An episode. Its frame t is frame place[t, 1] (a row, in tables with pictures) of the file number place[t, 0]."""

    name: str
    place: np.ndarray  # int64 (T, 2)
    seconds: np.ndarray | None  # float64 (T,), None where no rate is known
    tables: dict[str, np.ndarray] = field(default_factory=dict)  # action (T or T-1, A), state (T, S), ...
    row: Callable[[int], str] = str  # file and number of a row of the tables, for messages
    split: str | None = None  # train or test; None until `split_episodes`, unless the data say so

    def kept_frames(self, fps: float | None, stride: int | None) -> np.ndarray:
        """The frames that are shown at the beats of a rate, or every stride-th: int64 (K,), rising, not strictly."""
        count, seconds = len(self.place), self.seconds
        if fps is None or seconds is None or count < 2:
            return np.arange(0, count, stride or 1)
        steps = np.diff(seconds)
        step = float(np.percentile(steps, 10))  # a variable rate pauses where nothing happens
        if steps.min() < 0 or step == 0:
            raise UserError(f"{self.name}: the times of its frames do not rise, so --fps is not possible")
        if fps * step > 1.01:
            raise UserError(f"{self.name}: has {1 / step:.4g} frames per second, fewer than --fps {fps:g}")
        tolerance = step / 4  # files round times, to milliseconds for example
        beats = seconds[0] + np.arange(int((seconds[-1] - seconds[0] + tolerance) * fps) + 1) / fps
        return np.searchsorted(seconds, beats + tolerance, "right") - 1

    def at_rate(self, fps: float | None, stride: int | None, how: str) -> "Recording":
        """Fewer frames. The actions from a kept frame to the next become one: their last, sum or mean; K-th: NaN.

        From a frame that is kept twice there is no action to itself: a sum is zero, last and mean take the next one.
        """
        kept = self.kept_frames(fps, stride)
        tables = {}
        for name, values in self.tables.items():
            starts, stops = kept, kept + 1
            if name == "action":
                starts, stops = kept[:-1], kept[1:] if how == "sum" else np.maximum(kept[1:], kept[:-1] + 1)
            values = values[: stops.max(initial=0)].astype(np.float64)
            wrong = np.flatnonzero(~np.isfinite(values).all(axis=1))
            if len(wrong):
                raise UserError(f"{self.row(int(wrong[0]))}: {name} is not finite, in {self.name}")
            if name != "action" or how == "last":
                tables[name] = values[stops - 1]
            else:
                sums = np.concatenate([np.zeros((1, values.shape[1])), np.cumsum(values, axis=0)])
                tables[name] = (sums[stops] - sums[starts]) / (1 if how == "sum" else (stops - starts)[:, None])
            missing = np.full((len(kept) - len(starts), values.shape[1]), np.nan)
            tables[name] = np.concatenate([tables[name], missing])
        seconds = None if self.seconds is None else self.seconds[kept]
        if fps is not None:  # the beats, also where a variable rate pauses
            seconds = (0.0 if seconds is None else seconds[:1]) + np.arange(len(kept)) / fps
        return replace(self, place=self.place[kept], seconds=seconds, tables=tables)

    def clips(self, length: float | None) -> Episodes:
        """Parts of so many seconds, the last one shorter; their last actions lead out of them. None: all of it."""
        if length is None:
            return [self]
        if self.seconds is None:
            raise UserError(f"{self.name}: --clip-seconds needs --fps, since a folder of images has no times")
        number = ((self.seconds - self.seconds[:1]) / length + 1e-6).astype(int)
        parts = []
        for frames in np.split(np.arange(len(number)), np.flatnonzero(np.diff(number)) + 1):
            tables = {name: values[frames] for name, values in self.tables.items()}
            if "action" in tables:
                tables["action"][-1:] = np.nan
            parts.append(replace(self, place=self.place[frames], seconds=self.seconds[frames], tables=tables))
        return parts


@dataclass
class Source:
    """What was found: files, the episodes in them, and what is wrong with what was left out."""

    root: Path
    skip_bad: bool | None = None  # None where the user has no such choice
    files: dict[str, int] = field(default_factory=dict)  # relative to root -> number
    columns: dict[str, str] = field(default_factory=dict)  # array of a shard -> column with pictures; empty for videos
    masks: dict[str, str] = field(default_factory=dict)  # file -> its masks, relative to the masks' folder
    skipped: list[str] = field(default_factory=list)
    recordings: Episodes = field(default_factory=list)
    action_names: list[str] | None = None

    def number(self, path: Path) -> int:
        """The number of a file, which is added if it is new."""
        return self.files.setdefault(str(path.relative_to(self.root)), len(self.files))

    @contextlib.contextmanager
    def checked(self) -> Iterator[None]:
        """A UserError inside leaves out an episode with --skip-bad; without, it ends the import."""
        try:
            yield
        except UserError as error:
            if not self.skip_bad:
                hint = "" if self.skip_bad is None else "; or leave out what is bad with --skip-bad"
                raise UserError(f"{error}{hint}") from error
            self.skipped.append(str(error))


class Pictures:
    """The pictures of a dataset by file and number. A file stays open: numbers that rise take one pass."""

    def __init__(self, root: Path, files: Iterable[str], columns: dict[str, str], masks: dict[str, Path]):
        self.paths, self.columns = [root / file for file in files], columns
        self.masks = {root / file: path for file, path in masks.items()}
        self.path, self.number = None, -1  # the file, and the frame or row group in it, that was read last

    def read(self, file: int, number: int) -> dict[str, np.ndarray]:
        """Array of a shard -> uint8 (H, W, 3), or bool (H, W) for masks."""
        path = self.paths[file]
        if self.columns:
            with media.readable(path, "a table"):
                return self._row(path, number)
        if path != self.path or number < self.number:
            self.frames, self.path, self.number = media.frames(path), path, -1
            self.mask = media.open_masks(self.masks[path])[1] if path in self.masks else None
        while self.number < number:
            self.frame = next(self.frames, None)
            if self.frame is None:
                raise UserError(f"{path}: has fewer frames than when the import began; remove the set to import again")
            self.number += 1
        return {"video/observation": self.frame} | ({"video/mask": self.mask(number)} if self.mask else {})

    def _row(self, path: Path, row: int) -> dict[str, np.ndarray]:
        if path != self.path:
            self.table, self.path, self.number = pq.ParquetFile(path), path, -1
            about = self.table.metadata
            self.starts = np.cumsum([0] + [about.row_group(group).num_rows for group in range(about.num_row_groups)])
        group = int(np.searchsorted(self.starts, row, "right")) - 1
        if group != self.number:
            self.group = self.table.read_row_group(group, columns=sorted(set(self.columns.values())))
            self.number = group
        values = {name: self.group[key][row - self.starts[group]].as_py() for name, key in self.columns.items()}
        return {name: media.stored_picture(value, path, name.endswith("/mask")) for name, value in values.items()}


# ---------------------------------------------------------------------------------------------------- files and tables


def matrix(column: pa.ChunkedArray, path: Path) -> np.ndarray:
    """A column of numbers, or of lists of numbers of one length, as (rows, values); integers stay integers."""
    array = pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)
    while pa.types.is_list(array.type) or pa.types.is_large_list(array.type) or pa.types.is_fixed_size_list(array.type):
        if array.null_count or pc.count_distinct(pc.list_value_length(array)).as_py() > 1:
            raise UserError(f"{path}: a column has lists of different lengths, or rows without one")
        array = array.flatten()
    values = array.to_numpy(zero_copy_only=False)  # NaN where there is no value
    if values.dtype.kind not in "iufb":
        raise UserError(f"{path}: a column of {array.type} where numbers are expected")
    return values.reshape(len(column), -1)


def read_table(path: Path, frames: int) -> tuple[list[np.ndarray], list[str] | None]:
    """The columns (T, n) of an episode's table, and their names if it has some. frames: of the episode."""
    with media.readable(path, "a table"):
        if media.kind_of(path) == ".npy":
            values = np.load(path, allow_pickle=False)
            if values.dtype.kind not in "iufb" or not values.size:
                raise UserError(f"{path}: {values.dtype} of shape {values.shape} where numbers are expected")
            if values.ndim > 2:
                raise UserError(f"{path}: has the shape {values.shape}; a table has a row of numbers for each frame")
            return [values.reshape(len(values), -1)], None
        named = True
        if media.kind_of(path) == ".csv":
            text = path.read_text(encoding="utf-8-sig")
            named = _has_header(path, text, frames)
            options = pyarrow.csv.ReadOptions(autogenerate_column_names=not named)
            table = pyarrow.csv.read_csv(io.BytesIO(text.encode()), options)
            if len(table) < frames and len(table.column_names) == 1:
                data = text.strip().partition("\n")[2] if named else text
                lines = [line.strip() for line in data.strip().splitlines()]
                if not all(lines) and any(lines[1::2]):  # not one behind each row
                    raise UserError(f"{path}: has empty lines, and {len(table)} rows for {frames} frames: are these?")
        else:
            table = pq.read_table(path)
            numbers = [name for name in table.column_names if re.fullmatch(r"__index_level_\d+__", name)]
            table = table.drop_columns(numbers)  # by which pandas counts rows
            if not table.column_names:
                raise UserError(f"{path}: holds nothing but numbers of rows")
        return [matrix(table[name], path) for name in table.column_names], table.column_names if named else None


def _has_header(path: Path, text: str, frames: int) -> bool:
    """Whether a CSV's first row has names: none of its words is a number, empty, a date, true or false."""
    lines = [f"{line}\n" for line in text.splitlines() if line.strip()]
    words = [word.strip() for word in next(csv.reader(lines[:1]), [])]
    if words == list(map(str, range(len(words)))):  # what pandas writes above columns without names
        if len(lines) == frames:  # with a header there is a row less than frames, which may be too
            raise UserError(f"{path}: is {lines[0].strip()} above it a header? Name the columns, or write 0.0 for 0")
        return len(lines) > frames
    options = pyarrow.csv.ReadOptions(autogenerate_column_names=True)
    return all(map(pa.types.is_string, pyarrow.csv.read_csv(io.BytesIO(lines[0].encode()), options).schema.types))


def read_rows(source: Source, paths: Iterable[Path], keys: dict[str, str]) -> Iterator[dict[str, np.ndarray]]:
    """Columns of parquet files, row group by row group: name -> (rows, values), and `place` (rows, 2).

    keys: name -> column. What cannot be read is left out with --skip-bad.
    """
    for path in paths:
        with source.checked(), media.readable(path, "a table"):
            file, start = pq.ParquetFile(path), 0
            for group in range(file.num_row_groups):
                table = file.read_row_group(group, columns=list(keys.values()))
                place = np.stack(np.broadcast_arrays(source.number(path), start + np.arange(table.num_rows)), axis=1)
                yield {name: matrix(table[key], path) for name, key in keys.items()} | {"place": place}
                start += table.num_rows


# --------------------------------------------------------------------------------------------------------------- videos


def beside(folder: Path | None, kinds: tuple[str, ...], paths: list[Path]) -> Callable[[Path], Path | None]:
    """A function from a recording to what has its name in a folder, or in its folders train and test."""
    if folder is None:
        return lambda path: None
    mirrored = all(path.parent.name in SPLITS and (folder / path.parent.name).is_dir() for path in paths)
    names = [media.episode_name(path) for path in paths]
    if not mirrored and len(set(names)) < len(names):
        double = max(names, key=names.count)
        raise UserError(f"{folder}: train and test both have {double}, so folders train and test are needed here too")
    held: dict[Path, list[Path]] = defaultdict(list)
    for place in [folder / split for split in SPLITS] if mirrored else [folder]:
        for path in media.listing(place):
            if media.kind_of(path) in kinds and (path.is_file() or media.image_files(path)):
                held[place / media.episode_name(path)].append(path)

    def find(path: Path) -> Path:
        name, place = media.episode_name(path), folder / path.parent.name if mirrored else folder
        found = held[place / name] or held[place / unicodedata.normalize("NFC", path.name)]
        if len(found) != 1:
            *first, last = (f"{name}{kind}" for kind in kinds)
            raise UserError(f"{folder}: of {', '.join(first)} and {last} one is needed, {len(found)} are there")
        return found[0]

    return find


def decode_all(path: Path, masks: Path | None = None) -> list[float | None]:
    """Decodes a recording and its masks. Returns the times of its frames in seconds, None in folders of images."""
    seconds: list[float | None] = []
    count, mask = (0, None) if masks is None else media.open_masks(masks)
    for time, frame in media.timed_frames(path):
        if len(seconds) < count and (shape := mask(len(seconds)).shape) != frame.shape[:2]:
            raise UserError(f"{masks}: mask {len(seconds)} has the shape {shape}, its frame {frame.shape[:2]}")
        seconds.append(time)
        if stop_requested():
            raise Stopped("nothing was written")
    if masks is not None and count != len(seconds):
        raise UserError(f"{masks}: {count} masks for {len(seconds)} frames; each frame needs one")
    return seconds


def in_threads(work: Callable[[Any], Any], items: list[Any], name: str) -> Iterator[Future]:
    """The finished job of each item, in order. Equal items share one. Close it to cancel those that wait."""
    pool = ThreadPoolExecutor(len(os.sched_getaffinity(0)))  # decoding is ffmpeg's work
    try:
        jobs = {item: pool.submit(work, item) for item in dict.fromkeys(items)}
        with Progress(name, len(items), "recordings") as progress:
            for item in items:
                wait([jobs[item]])
                yield jobs[item]
                progress.update()
    finally:
        pool.shutdown(cancel_futures=True)


def read_videos(source: Source, masks: Path | None, actions: Path | None) -> None:
    """Video files and folders of images, an episode each; in the folders train and test, if there are both."""
    splits = [source.root / split for split in SPLITS]
    split_by_folder = all(folder.is_dir() for folder in splits)
    listed = [path for folder in (splits if split_by_folder else [source.root]) for path in media.listing(folder)]
    paths = [path for path in listed if media.kind_of(path) in media.VIDEO_SUFFIXES | {"/"}]
    beyond = {path for path in media.listing(source.root) if split_by_folder} - {*splits}
    if others := sorted(str(path.relative_to(source.root)) for path in ({*listed} - {*paths}) | beyond):
        kinds = " ".join(sorted(media.VIDEO_SUFFIXES))
        where = ", and lie in train or test, as there are such folders" if beyond else ""
        print(f"not taken: {', '.join(others[:9])}{' ...' if others[9:] else ''}; videos end in {kinds}{where}")
    if not paths:
        raise UserError(f"{source.root}: holds no video files and no folders of images, one for each episode")
    names = [(path.parent, media.episode_name(path)) for path in paths]
    if len(set(names)) < len(names):
        raise UserError(f"{source.root}: two episodes are called {max(names, key=names.count)[1]}; rename one")
    find_masks, find_actions = beside(masks, MASKS, paths), beside(actions, media.TABLES, paths)

    def read(path: Path) -> tuple[Recording, Path | None, list[np.ndarray], list[str] | None]:
        mask, table = find_masks(path), find_actions(path)
        times = decode_all(path, mask)
        columns, columns_names = ([], None) if table is None else read_table(table, len(times))
        if columns and len(columns[0]) not in (len(times), len(times) - 1):
            raise UserError(f"{table}: {len(columns[0])} rows for {len(times)} frames; the last one may be missing")
        place = np.stack([np.zeros(len(times), int), np.arange(len(times))], axis=1)
        seconds, split = None if path.is_dir() else np.array(times), path.parent.name if split_by_folder else None
        recording = Recording(path.name, place, seconds, row=lambda row: f"{table}: row {row}", split=split)
        return recording, mask, columns, columns_names

    order: list[str] | None = None  # of the actions' columns
    with contextlib.closing(in_threads(read, paths, str(source.root))) as jobs:
        for path, job in zip(paths, jobs):
            with source.checked():
                recording, mask, columns, found = job.result()
                if found is not None:
                    order = order or found
                    if sorted(found) != sorted(order):
                        both = " and ".join(", ".join(some) for some in (order, found))
                        raise UserError(f"{recording.row(0)}: the columns differ between files: {both}")
                    columns = [columns[found.index(name)] for name in order]
                recording.place[:, 0] = source.number(path)
                if mask is not None:
                    source.masks[str(path.relative_to(source.root))] = str(mask.relative_to(masks))
                if columns:
                    recording.tables["action"] = np.concatenate(columns, axis=1)
                source.recordings.append(recording)
    source.action_names = order


# --------------------------------------------------------------------------------------------------- splits and actions


def cut_recordings(source: Source, cut: Callable[[Recording], Episodes]) -> list[Episodes]:
    """What `cut` makes of each recording, where it has at least two frames; notes how many have fewer."""
    groups, short = [], 0
    for recording in source.recordings:
        with source.checked():
            clips = cut(recording)
            groups.append([clip for clip in clips if len(clip.place) > 1])
            short += len(clips) - len(groups[-1])
    if short:
        source.skipped.append(f"{short} episodes of fewer than two frames")
    return groups


def split_episodes(source: Source, groups: list[Episodes], share: float, seed: int) -> tuple[Episodes, Episodes]:
    """Train and test episodes. What a recording gives for testing is its last episodes, so that they lie apart in time.

    At least one episode is in each split; recordings take turns in an order that the seed decides.
    """
    everything = [one for group in groups for one in group]
    if not any(one.split for one in everything):  # else the data say it themselves
        total, before = len(everything), 0
        wanted = min(max(1, round(share * total)), total - 1)
        for number in np.random.default_rng(seed).permutation(len(groups)).tolist():
            group = groups[number]
            count = wanted * (before + len(group)) // max(1, total) - wanted * before // max(1, total)
            for place, one in enumerate(group):
                one.split = "train" if place < len(group) - count else "test"
            before += len(group)
    train, test = ([one for one in everything if one.split == split] for split in SPLITS)
    if not train or not test:
        left_out = f". {len(source.skipped)} left out, such as: {source.skipped[0]}" if source.skipped else ""
        raise UserError(
            f"{len(train)} episodes of two frames and more for training, {len(test)} for testing; "
            f"one is needed for each: see --clip-seconds{left_out}"
        )
    return train, test


def as_categories(source: Source, reduce: str) -> bool:
    """Whether the actions are categories: integers in one column; these become vectors of zeros and ones.

    Where a table has no last value, or one file has floats, its integers come as floats.
    """
    recordings, parts = [], []
    for recording in source.recordings:
        steps, last = np.split(recording.tables.get("action", np.empty((0, 0))), [len(recording.place) - 1])
        if len(steps) and np.isfinite(steps).all():  # else it is an error later on
            recordings.append(recording)
            parts.append((steps, steps.dtype.kind != "f" or not np.isfinite(last).all()))
    whole = all(steps.shape[1] == 1 and (steps == np.round(steps)).all() for steps, _ in parts)
    if not whole or not any(integers for _, integers in parts):
        if parts:
            print("actions: numbers, normalised in each dimension")
        return False
    categories = np.unique(np.concatenate([steps for steps, _ in parts]))
    if len(categories) > MOST_CATEGORIES or reduce != "last":
        raise UserError(
            f"the actions are {len(categories)} different integers, taken as categories, at most {MOST_CATEGORIES} and "
            "with --reduce last; if they are numbers, store them as floats, the last one too"
        )
    for recording in recordings:
        recording.tables["action"] = (recording.tables["action"] == categories).astype(np.float64)
    source.action_names = [str(int(value) if value.dtype.kind == "f" else value) for value in categories]
    print(f"actions: {len(categories)} categories, stored one-hot")
    return True


def common_width(name: str, episodes: Episodes) -> int:
    """The dimensions of the actions or states of all episodes, 0 if there are none. UserError if they differ."""
    widths = {episode.tables[name].shape[1] if name in episode.tables else 0 for episode in episodes}
    if len(widths) > 1:
        raise UserError(f"the {name}s have {' and '.join(map(str, sorted(widths)))} dimensions; they must agree")
    return widths.pop()


def common_rate(episodes: Episodes) -> float | None:
    """The frames per second, None if they are not known or vary."""
    steps = [np.diff(episode.seconds) for episode in episodes if episode.seconds is not None]
    means = [float(each.mean()) for each in steps]
    # What rounding the times does is less.
    varying = any(abs(mean - np.median(each)) > 0.05 * mean or not mean > 0 for mean, each in zip(means, steps))
    if len(steps) < len(episodes) or varying or max(means) >= 1.01 * min(means):
        return None
    return round(1 / means[0], 3)


def normalise_actions(train: Episodes, test: Episodes, names: list[str] | None, discrete: bool) -> dict[str, Any]:
    """Normalises the actions of all episodes by those of the train split, and returns the scale for the plan.

    What becomes -1 and 1 in each dimension is equal for a constant one, which is said, and stored as zero.
    """
    action = np.concatenate([episode.tables["action"][:-1] for episode in train])
    named = names if len(names or []) == action.shape[1] else None
    high = np.ones(action.shape[1])
    low = -high  # which leaves one-hot vectors as they are
    if not discrete:
        low, high = np.percentile(action, PERCENTILES, axis=0)
        least, most = action.min(axis=0), action.max(axis=0)
        smallest = CONSTANT * np.maximum(abs(least), abs(most))
        moves_rarely = high - low <= smallest  # in less than 0.1% of the steps, if at all
        low, high = np.where(moves_rarely, least, low), np.where(moves_rarely, most, high)
        constant = high - low <= smallest
        high = np.where(constant, low, high)
        if constant.any():
            labels = np.array(named or range(len(low))).astype(str)
            print(f"actions: constant, stored as zero: {', '.join(labels[constant])}")
    span = np.where(high > low, high - low, np.inf)
    for episode in train + test:
        episode.tables["action"] = np.where(high > low, 2 * (episode.tables["action"] - low) / span - 1, 0)
    return {"low": low.tolist(), "high": high.tolist(), "names": named}


def plan_arrays(episodes: Episodes, schema: dict[str, tuple[str, tuple[int, ...]]]) -> dict[str, np.ndarray]:
    """The tables of all episodes as a shard has them, and `place` int64 (T, 2) and `episode_start` int64 (N + 1,)."""
    arrays = {
        name: np.concatenate([episode.tables[name] for episode in episodes]).astype(dtype)
        for name, (dtype, _) in schema.items()
        if "/" not in name
    }
    arrays["place"] = np.concatenate([episode.place for episode in episodes]).astype(np.int64)
    arrays["episode_start"] = np.cumsum([0] + [len(episode.place) for episode in episodes])
    if "action" in arrays:
        arrays["action"][arrays["episode_start"][1:] - 1] = np.nan
    return arrays
