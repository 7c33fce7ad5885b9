"""Recordings as episodes: frames in files, tables beside them, at a rate, cut into clips. And videos, one kind of them.

A reader (`read_videos` here, others in common/lerobot.py) finds the recordings with their tables and the times of
their frames; `Source.pictures` decodes the frames that are stored.
"""

import contextlib
import functools
import io
import os
import re
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq
from PIL import Image, ImageOps

from common import media
from common.cli import Progress, Stopped, UserError, stop_requested

CORES = len(os.sched_getaffinity(0))
PERCENTILES = (0.1, 99.9)  # of the train actions in a dimension, which become -1 and 1
CONSTANT = 1e-6  # the range, relative to the values, below which a dimension counts as constant
MOST_CATEGORIES = 1000


@dataclass
class Recording:
    """An episode. Its frame t is frame place[t, 1] (a row, in tables with pictures) of the file number place[t, 0]."""

    name: str
    place: np.ndarray  # int64 (T, 2)
    seconds: np.ndarray | None  # float64 (T,), None where no rate is known
    tables: dict[str, np.ndarray] = field(default_factory=dict)  # action (T or T-1, A), state (T, S), ...
    row: Callable[[int], str] = str  # file and number of a row of the tables, for messages
    split: str | None = None  # train or test, where the data say so

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
        """Fewer frames. The actions from a kept frame to the next become one: their last, sum or mean; K-th: NaN."""
        kept = self.kept_frames(fps, stride)
        tables = {}
        for name, values in self.tables.items():
            starts, stops = kept, kept + 1
            if name == "action":
                starts, stops = kept[:-1], np.maximum(kept[1:], kept[:-1] + 1)
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
        if seconds is None and fps is not None:
            seconds = np.arange(len(kept)) / fps
        return replace(self, place=self.place[kept], seconds=seconds, tables=tables)

    def clips(self, length: float | None) -> "list[Recording]":
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
    """Files, and what a reader found in them."""

    root: Path
    skip_bad: bool | None = None  # None where the user has no such choice
    files: list[str] = field(default_factory=list)  # relative to root
    frames: list[int | None] = field(default_factory=list)  # that each file must have, None: any number
    columns: dict[str, str] = field(default_factory=dict)  # array of a shard -> column with pictures; empty for videos
    masks: dict[str, str] = field(default_factory=dict)  # file -> its masks, relative to the masks' folder
    skipped: list[str] = field(default_factory=list)  # what is wrong with what was left out
    recordings: list[Recording] = field(default_factory=list)
    action_names: list[str] | None = None

    def number(self, file: Path | str, frames: int | None = None) -> int:
        """The number of a file, which is added if it is new."""
        name = str(Path(file).relative_to(self.root)) if isinstance(file, Path) else file
        if name not in self.files:
            self.files.append(name)
            self.frames.append(frames)
        return self.files.index(name)

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

    def pictures(self, place: np.ndarray, last: np.ndarray, masks: Path | None) -> Iterator[dict[str, np.ndarray]]:
        """The frames at `place` (T, 2): array of a shard -> uint8 (H, W, 3), or bool (H, W) for masks.

        last: the highest frame of each file that any episode needs. Whoever reads that far reads to the file's end, and
        compares the number of frames: UserError if it is not what the lists say.
        """
        new_file = (np.diff(place[:, 0]) != 0) | (np.diff(place[:, 1]) < 0)
        for run in np.split(place, np.flatnonzero(new_file) + 1):
            number, ordinals = run[0, 0], run[:, 1]
            name = self.files[number]
            if self.columns:
                yield from _table_pictures(self.root / name, ordinals, self.columns)
                continue
            to_end = self.frames[number] if ordinals[-1] == last[number] else None
            read_mask = _mask_reader(masks / self.masks[name]) if name in self.masks else None
            for frame, ordinal in zip(_video_pictures(self.root / name, ordinals, to_end), ordinals):
                mask = {"video/mask": read_mask(ordinal)} if read_mask else {}
                yield {"video/observation": frame} | mask


def _video_pictures(path: Path, ordinals: np.ndarray, expected: int | None) -> Iterator[np.ndarray]:
    """The frames with these numbers, in rising order. expected: of the whole file, None to stop after the last one."""
    count = given = 0
    for count, frame in enumerate(media.frames(path), 1):
        while given < len(ordinals) and ordinals[given] == count - 1:
            yield frame
            given += 1
        if given == len(ordinals) and expected is None:
            return
    if given < len(ordinals) or count != expected:
        needed = ordinals[-1] + 1 if expected is None else expected
        raise UserError(
            f"{path}: has {count} frames, its episodes have {needed}; it is damaged, or the lists are wrong"
        )


def _mask_reader(path: Path) -> Callable[[int], np.ndarray]:
    """A function from the number of a frame to its mask, bool (H, W)."""
    if path.is_dir():
        images = media.image_files(path)
        return lambda ordinal: media.read_mask(images[ordinal])
    masks = np.load(path, mmap_mode="r")
    half = 0.5 if masks.max() <= 1 else 127.5
    return lambda ordinal: masks[ordinal] >= half


def _table_pictures(path: Path, rows: np.ndarray, columns: dict[str, str]) -> Iterator[dict[str, np.ndarray]]:
    """The pictures in rows of a parquet file, in rising order; reads the row groups that have some."""
    with media.readable(path, "a table"):
        file, start = pq.ParquetFile(path), 0
        for group in range(file.num_row_groups):
            stop = start + file.metadata.row_group(group).num_rows
            wanted = rows[(rows >= start) & (rows < stop)] - start
            if len(wanted):
                table = file.read_row_group(group, columns=sorted(set(columns.values())))
                for row in wanted.tolist():
                    yield {name: _picture(table[key][row].as_py(), name, path) for name, key in columns.items()}
            start = stop


def _picture(value: Any, name: str, path: Path) -> np.ndarray:
    """A picture in a table: a struct of bytes and path, or lists of numbers, HWC or CHW."""
    if isinstance(value, dict):
        try:
            image = media.read_image(io.BytesIO(value["bytes"]) if value["bytes"] else path.parent / value["path"])
        except UserError as error:
            raise UserError(f"{path}: a picture in it {str(error).partition(': ')[2]}") from error
    else:
        image = np.array(value, np.uint8)
        if image.ndim == 3 and image.shape[0] in (1, 3) and image.shape[2] > 3:
            image = image.transpose(1, 2, 0)
    if name.endswith("/mask"):
        return image.any(axis=2) if image.ndim == 3 else image > 0
    return image


def as_square(picture: np.ndarray, size: int, how: str | None, file: str) -> np.ndarray:
    """A frame, uint8 (H, W, 3), or a mask, bool (H, W), as a square; how: crop or pad, None if it must be one."""
    if picture.shape[:2] == (size, size):
        return picture
    if how is None:
        raise UserError(f"{file}: pictures of {picture.shape[1]} x {picture.shape[0]} pixels, expected {size} x {size}")
    image = Image.fromarray(picture * np.uint8(255) if picture.dtype == bool else picture)
    image = (ImageOps.fit if how == "crop" else ImageOps.pad)(image, (size, size), Image.Resampling.BICUBIC)
    return np.asarray(image) > 127 if picture.dtype == bool else np.asarray(image)


# --------------------------------------------------------------------------------------------------------------- tables


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


def read_table(folder: Path, stem: str) -> tuple[Path, np.ndarray, list[str] | None]:
    """The table of an episode in a folder: its path, the values (rows, columns) and the columns' names."""
    paths = [path for suffix in (".npy", ".csv", ".parquet") if (path := folder / f"{stem}{suffix}").exists()]
    if len(paths) != 1:
        raise UserError(f"{folder}: of {stem}.npy, {stem}.csv and {stem}.parquet one is needed, {len(paths)} are there")
    path = paths[0]
    with media.readable(path, "a table"):
        if path.suffix == ".npy":
            values = np.load(path, allow_pickle=False)
            return path, values.reshape(len(values), -1), None
        named = True
        if path.suffix == ".csv":
            first = path.read_text(encoding="utf-8").partition("\n")[0].split(",")
            named = any(re.fullmatch(r"\s*[\d.eE+-]+\s*|\s*[+-]?(nan|inf)\s*", word, re.I) is None for word in first)
            table = pyarrow.csv.read_csv(path, pyarrow.csv.ReadOptions(autogenerate_column_names=not named))
        else:
            table = pq.read_table(path)
        values = [matrix(table[name], path) for name in table.column_names]
        named = named and len(values) == sum(value.shape[1] for value in values)
        return path, np.concatenate(values, axis=1), table.column_names if named else None


def read_rows(source: Source, paths: Iterable[Path], keys: dict[str, str]) -> Iterator[dict[str, np.ndarray]]:
    """Columns of parquet files, row group by row group: name -> (rows, values), and `place` (rows, 2).

    keys: name -> column. What cannot be read is left out with --skip-bad.
    """
    for path in paths:
        with source.checked(), media.readable(path, "a table"):
            file, start = pq.ParquetFile(path), 0
            for group in range(file.num_row_groups):
                table = file.read_row_group(group, columns=list(keys.values()))
                rows = start + np.arange(table.num_rows)
                place = np.stack([np.full(table.num_rows, source.number(path)), rows], axis=1)
                yield {name: matrix(table[key], path) for name, key in keys.items()} | {"place": place}
                start += table.num_rows


# --------------------------------------------------------------------------------------------------------------- videos


def read_videos(source: Source, masks: Path | None, actions: Path | None) -> None:
    """Video files and folders of images, an episode each; in the folders train and test, if there are both."""
    folders = [source.root / split for split in ("train", "test")]
    split_by_folder = all(folder.is_dir() for folder in folders)
    listed = [path for folder in (folders if split_by_folder else [source.root]) for path in media.listing(folder)]
    paths = [path for path in listed if path.is_dir() or path.suffix.lower() in media.VIDEO_SUFFIXES]
    stems = [path.name if path.is_dir() else path.stem for path in paths]
    if not paths:
        raise UserError(f"{source.root}: holds no video files and no folders of images, one for each episode")
    if len(set(stems)) < len(stems):
        raise UserError(f"{source.root}: two episodes are called {max(stems, key=stems.count)}; rename one")
    pool = ThreadPoolExecutor(CORES)  # decoding is ffmpeg's work
    jobs = [pool.submit(frame_times, path, decode=bool(source.skip_bad)) for path in paths]
    progress = Progress(str(source.root), len(paths), "recordings")
    try:
        for path, stem, job in zip(paths, stems, jobs):
            with source.checked():
                count, seconds, size = job.result()
                split = path.parent.name if split_by_folder else None
                recording = Recording(path.name, np.empty((0, 2)), seconds, split=split)
                if actions is not None:
                    table, recording.tables["action"], source.action_names = read_table(actions, stem)
                    rows = len(recording.tables["action"])
                    if rows not in (count, count - 1):
                        raise UserError(f"{table}: {rows} rows for {count} frames; the last one may be missing")
                    recording.row = functools.partial("{}: row {}".format, table)
                if masks is not None:
                    source.masks[str(path.relative_to(source.root))] = _find_masks(masks, stem, (count, *size))
                file = source.number(path, count)
                recording.place = np.stack([np.full(count, file), np.arange(count)], axis=1)
                source.recordings.append(recording)
            progress.update()
    finally:
        progress.close()
        pool.shutdown(cancel_futures=True)


def frame_times(path: Path, decode: bool) -> tuple[int, np.ndarray | None, tuple[int, int]]:
    """The number of frames, their times in seconds, and their height and width.

    A folder of images has no times, and is decoded only if asked.
    """
    if path.is_dir():
        images = media.image_files(path)
        count = sum(1 for _ in media.frames(path)) if decode or not images else len(images)
        return count, None, media.read_image(images[0]).shape[:2]
    seconds, sizes = [], set()
    for time, frame in media.timed_frames(path):
        seconds.append(time)
        sizes.add(frame.shape[:2])
        if stop_requested():
            raise Stopped("nothing was written")
    if len(sizes) > 1:
        raise UserError(f"{path}: the size of its frames changes")
    return len(seconds), np.array(seconds), sizes.pop()


def _find_masks(folder: Path, stem: str, expected: tuple[int, int, int]) -> str:
    """The name of an episode's masks in a folder: .npy (frames, H, W), or a folder of images, one for each frame."""
    path = folder / stem if (folder / stem).is_dir() else folder / f"{stem}.npy"
    with media.readable(path, "masks"):
        if path.is_dir():
            images = media.image_files(path)
            shape = (len(images), *(media.read_mask(images[0]).shape if images else ()))
        else:
            masks = np.load(path, mmap_mode="r")
            shape, top = masks.shape, masks.max()
            fraction = masks.dtype.kind == "f" and masks.min() >= 0 and top <= 1
            if not fraction and not (top in (0, 1, 255) and np.isin(masks, (0, top)).all()):
                raise UserError(f"{path}: from {masks.min()} to {top}; masks hold 0 and 1, 0 and 255, or 0.0 to 1.0")
    if shape != expected:
        raise UserError(f"{path}: shape {shape}, expected (frames, height, width) = {expected}")
    return path.name


# --------------------------------------------------------------------------------------------------- splits and actions


def cut_recordings(
    source: Source, fps: float | None, stride: int | None, reduce: str, clip_seconds: float | None
) -> list[list[Recording]]:
    """The episodes of each recording, of at least two frames; notes how many had fewer."""
    groups, short = [], 0
    for recording in source.recordings:
        with source.checked():
            clips = recording.at_rate(fps, stride, reduce).clips(clip_seconds)
            groups.append([clip for clip in clips if len(clip.place) > 1])
            short += len(clips) - len(groups[-1])
    if short:
        source.skipped.append(f"{short} episodes of fewer than two frames")
    return groups


def split_episodes(groups: list[list[Recording]], share: float, seed: int) -> tuple[list[Recording], list[Recording]]:
    """Train and test episodes. What a recording gives for testing is its last episodes, so that they lie apart in time.

    At least one episode is in each split; recordings take turns in an order that the seed decides.
    """
    named = {split: [one for group in groups for one in group if one.split == split] for split in ("train", "test")}
    if all(named.values()):  # the data say it themselves
        return named["train"], named["test"]
    total = sum(map(len, groups))
    if total < 2:
        raise UserError(f"{total} episodes of two frames and more; two are needed, one for testing: see --clip-seconds")
    wanted, before = min(max(1, round(share * total)), total - 1), 0
    train: dict[int, list[Recording]] = {}
    test: dict[int, list[Recording]] = {}
    for number in np.random.default_rng(seed).permutation(len(groups)).tolist():
        group = groups[number]
        count = wanted * (before + len(group)) // total - wanted * before // total
        train[number], test[number] = group[: len(group) - count], group[len(group) - count :]
        before += len(group)
    in_order = range(len(groups))
    return [one for i in in_order for one in train[i]], [one for i in in_order for one in test[i]]


def one_hot(source: Source) -> bool:
    """Whether the actions are categories, one column of integers; turns them into vectors of zeros and ones."""
    with_actions = [recording for recording in source.recordings if "action" in recording.tables]
    columns = [recording.tables["action"][: len(recording.place) - 1] for recording in with_actions]
    if not columns or any(column.dtype.kind == "f" or column.shape[1] != 1 for column in columns):
        return False
    categories = np.unique(np.concatenate(columns))
    if len(categories) > MOST_CATEGORIES:
        raise UserError(
            f"the actions are {len(categories)} different integers; store them as floats if they are numbers"
        )
    for recording in with_actions:
        recording.tables["action"] = (recording.tables["action"] == categories).astype(np.float64)
    source.action_names = [str(category) for category in categories]
    print(f"actions: {len(categories)} categories, stored one-hot")
    return True


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


def common_width(name: str, episodes: list[Recording]) -> int:
    """The dimensions of the actions or states of all episodes, 0 if there are none. UserError if they differ."""
    widths = {episode.tables[name].shape[1] if name in episode.tables else 0 for episode in episodes}
    if len(widths) > 1:
        raise UserError(f"the {name}s have {' and '.join(map(str, sorted(widths)))} dimensions; they must agree")
    return widths.pop()


def common_rate(episodes: list[Recording]) -> float | None:
    """The frames per second, None if they are not known or vary."""
    if any(episode.seconds is None for episode in episodes):
        return None
    rates = []
    for episode in episodes:
        steps = np.diff(episode.seconds)
        if abs(steps.mean() - np.median(steps)) > 0.05 * steps.mean() or not steps.mean() > 0:
            return None  # more than what rounding the times does
        rates.append(1 / float(steps.mean()))
    return round(rates[0], 3) if max(rates) < 1.01 * min(rates) else None


def normalise_actions(
    train: list[Recording], test: list[Recording], names: list[str] | None, discrete: bool
) -> dict[str, Any]:
    """Normalises the actions of all episodes by those of the train split, and returns the scale for the plan."""
    width, names = train[0].tables["action"].shape[1], names or []
    labels = names if len(names) == width else [str(number) for number in range(width)]
    low, high = np.full(width, -1.0), np.full(width, 1.0)  # which leaves one-hot vectors as they are
    if not discrete:
        action = np.concatenate([episode.tables["action"][:-1] for episode in train])
        low, high = scale_of(action, labels)
    span = np.where(high > low, high - low, np.inf)
    for episode in train + test:
        episode.tables["action"] = np.where(high > low, 2 * (episode.tables["action"] - low) / span - 1, 0)
    return {"low": low.tolist(), "high": high.tolist(), "names": names if labels == names else None}


def plan_arrays(episodes: list[Recording], schema: dict[str, tuple[str, tuple[int, ...]]]) -> dict[str, np.ndarray]:
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
