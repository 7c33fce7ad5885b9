"""Reads robots' datasets in LeRobot's formats v2.1 and v3.0, from a folder or the Hugging Face hub."""

import contextlib
import json
import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from common import media
from common.cli import Stopped, UserError, stop_requested
from common.recordings import Pictures, Recording, Source, decode_all, in_threads, read_rows


def fetch(repository: str, patterns: list[str]) -> Path:
    """Downloads files of a dataset on the hub, unless they are there, and returns the folder that they are in."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(repository, repo_type="dataset", allow_patterns=patterns))
    except Exception as error:  # of many classes: no network, no such dataset, no permission
        reason = str(error).partition("\n")[0]
        raise UserError(f"{repository}: cannot be had from the hub ({reason}); or give a folder") from error


# Its video ("" where pictures are in the tables), the number of its first frame there, its length; or what is wrong.
Entry = tuple[str, int, int] | UserError
Listed = dict[int | str, Entry]  # by the number of the episode, an entry without one by its beginning


@dataclass
class Robot:
    """A LeRobot dataset: what it says of itself and of its episodes."""

    root: Path
    information: dict[str, Any]
    camera: str  # the feature with the frames
    in_tables: bool  # and whether these are pictures in tables, not a video
    listed: Listed
    chosen: range  # --episodes
    wanted: Listed  # those of it
    files: list[Path]  # that belong to these


def read_information(root: Path, camera: str | None) -> tuple[dict[str, Any], str]:
    """A LeRobot dataset's meta/info.json, and which feature holds the frames: `camera`, or the only video or image."""
    path = root / "meta/info.json"
    with media.readable(path, "the description of a LeRobot dataset"):
        information = json.loads(path.read_text(encoding="utf-8"))
        version, fps, features = (information.get(key) for key in ("codebase_version", "fps", "features"))
        right = {
            "codebase_version": re.match(r"v[23]\.", str(version)),
            "fps": isinstance(fps, (int, float)) and 0 < fps < float("inf"),
            "features": isinstance(features, dict) and all(isinstance(each, dict) for each in features.values()),
        }
        if wrong := [f"{key} is {str(information.get(key))[:60]}" for key, good in right.items() if not good]:
            raise UserError(f"{path}: {', '.join(wrong)}; the formats v2.1 and v3.0 can be read")
    cameras = [name for name, feature in features.items() if feature.get("dtype") in ("video", "image")]
    if camera in cameras or (camera is None and len(cameras) == 1):
        return information, camera or cameras[0]
    problem = f"no camera {camera}" if camera else f"{len(cameras)} cameras"
    raise UserError(f"{root}: {problem}; choose with --camera one of: {', '.join(cameras)}")


def read_list(root: Path, information: dict[str, Any], camera: str) -> Listed:
    """The entries of all episodes."""
    old, in_tables = information["codebase_version"] < "v3", information["features"][camera]["dtype"] == "image"
    folder = root / ("meta/episodes.jsonl" if old else "meta/episodes")
    keys = () if old or in_tables else ("chunk_index", "file_index", "from_timestamp", "to_timestamp")
    listed: Listed = {}
    for path in [folder] if old else media.walk(folder, {".parquet"}):
        with media.readable(path, "a list of episodes"):
            if old:
                rows = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
            else:
                columns = ["episode_index", "length", *(f"videos/{camera}/{key}" for key in keys)]
                rows = pq.read_table(path, columns=columns).to_pylist()
        for row in rows:
            number: int | str = str(row)[:60]
            try:
                with media.readable(path, f"a list of episodes, at {number}"):
                    row = json.loads(row) if old else row
                    number = int(row["episode_index"])  # first, since it tells whether the rest matters
                    length = int(row["length"])
                    about = {key: row[f"videos/{camera}/{key}"] for key in keys}
                    about |= {"episode_chunk": number // information.get("chunks_size", 1000), "episode_index": number}
                    times = [about.get(f"{side}_timestamp", 0) for side in ("from", "to")]
                    first, end = (round(time * information["fps"]) for time in times)
                    if keys and end - first != length:
                        raise UserError(f"{path}: episode {number} has {length} frames, but {end - first} by its times")
                    file = "" if in_tables else information["video_path"].format(video_key=camera, **about)
                    listed[number] = (file, first, length)
            except UserError as error:
                listed[number] = error
    return listed


def open_robot(place: str, camera: str | None, episodes: str | None) -> Robot:
    """Finds a dataset in a folder, or on the hub, and then fetches what belongs to the episodes that are wanted."""
    match = re.fullmatch(r"(\d*):(\d*)", episodes or ":")
    if match is None:
        raise UserError(f"--episodes {episodes}: write the first one and the one after the last, such as 0:50")
    chosen = range(int(match[1] or 0), int(match[2] or 2**31))
    root, on_hub = Path(place).expanduser(), False
    if not root.is_dir() and re.fullmatch(r"[\w.-]+/[\w.-]+", place):
        root, on_hub = fetch(place, ["meta/*"]), True
    information, camera = read_information(root, camera)
    listed = read_list(root, information, camera)
    numbers = sorted(listed, key=lambda number: (isinstance(number, int), number))
    wanted = {number: listed[number] for number in numbers if isinstance(number, str) or number in chosen}
    if not wanted:
        which = f", {numbers[0]} to {numbers[-1]}, none of them in --episodes {episodes}" if listed else ""
        raise UserError(f"{root / 'meta'}: lists {len(listed)} episodes{which}")
    in_tables = information["features"][camera]["dtype"] == "image"
    videos = {entry[0].partition("/")[2] for entry in wanted.values() if isinstance(entry, tuple) and not in_tables}
    # In v3.0 any table may hold any episode.
    some_tables = episodes is not None and information["codebase_version"] < "v3"
    tables = {f"episode_{number:06d}" for number in wanted if isinstance(number, int) and some_tables}
    if on_hub:
        patterns = [f"data/*/{stem}.parquet" for stem in tables] if some_tables else ["data/*"]
        fetch(place, patterns + ([f"*/{video}" for video in videos] if episodes and videos else [f"*/{camera}/*"]))

    def is_wanted(path: Path) -> bool:
        first, *rest = path.relative_to(root).parts
        if first == "data":
            number = re.fullmatch(r"episode_(\d+)", path.stem)
            return not some_tables or (number is not None and int(number[1]) in chosen)
        return first == "meta" or "/".join(rest) in videos or (in_tables and camera in rest)

    suffixes = media.VIDEO_SUFFIXES | media.IMAGE_SUFFIXES | {".json", ".jsonl", ".parquet"}
    files = [path for path in media.walk(root, suffixes) if is_wanted(path)]
    return Robot(root, information, camera, in_tables, listed, chosen, wanted, files)


def find_video(root: Path, file: str) -> Path:
    """The path of a video; some datasets call the folder video/ that their description calls videos/."""
    for path in (root / file, root / re.sub("^videos/", "video/", file), root / re.sub("^video/", "videos/", file)):
        if path.is_file():
            return path
    raise UserError(f"{root / file}: no such video, but it is listed")


def read_lerobot(source: Source, robot: Robot, action: str | None) -> None:
    """Episodes of a robot's dataset in the format v2.1 or v3.0."""
    root, fps, features = robot.root, robot.information["fps"], robot.information["features"]
    if action is not None and action not in features:
        raise UserError(f"--action {action}: {root} has no such feature; it has {', '.join(features)}")
    keys = {"action": action or "action", "state": "observation.state"}
    keys = {name: key for name, key in keys.items() if key in features}
    source.action_names = _flat(features[keys["action"]].get("names")) if "action" in keys else None
    source.columns = {"video/observation": robot.camera} if robot.in_tables else {}

    # Rows are grouped by what they say of themselves: lists of episodes at times name wrong files.
    tables = [path for path in robot.files if path.suffix == ".parquet" and root / "data" in path.parents]
    parts = list(read_rows(source, tables, keys | {"episode": "episode_index", "frame": "frame_index"}))
    if not parts:
        raise UserError(f"{root / 'data'}: holds no tables that can be read; copy the dataset again")
    with media.readable(root / "data", "tables of one kind"):
        rows = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    order = np.lexsort((rows["frame"][:, 0], rows["episode"][:, 0]))
    rows = {name: values[order] for name, values in rows.items()}

    with source.checked():
        unlisted = {number for number in rows["episode"][:, 0].tolist() if number in robot.chosen} - robot.listed.keys()
        if unlisted and not any(isinstance(number, str) for number in robot.listed):  # which may be these
            some = ", ".join(map(str, sorted(unlisted)[:5]))
            raise UserError(f"{root / 'meta'}: the tables have {len(unlisted)} episodes that it does not list: {some}")
    pictures = Pictures(root, source.files, source.columns, {})
    good = [entry for entry in robot.listed.values() if isinstance(entry, tuple)]
    ends: dict[str, int] = defaultdict(int)  # the frames that each video must have
    for file, first, length in good:
        ends[file] = max(ends[file], first + length)
    claims: dict[str, list[tuple[int, int, int | str]]] = defaultdict(list)  # on the frames of each video
    for number, entry in robot.wanted.items():
        if isinstance(entry, tuple):
            claims[entry[0]].append((entry[1], entry[1] + entry[2], number))

    def count(file: str) -> tuple[Path, int] | None:
        path = find_video(root, file) if file else None
        return path and (path, len(decode_all(path)))

    files = [entry[0] if isinstance(entry, tuple) else "" for entry in robot.wanted.values()]
    with contextlib.closing(in_threads(count, files, str(root))) as jobs:
        for (number, entry), job in zip(robot.wanted.items(), jobs):
            with source.checked():
                if isinstance(entry, UserError):
                    raise entry
                file, first, length = entry
                mine = slice(*np.searchsorted(rows["episode"][:, 0], (number, number + 1)))
                place, values = rows["place"][mine], {name: rows[name][mine] for name in keys}
                if not np.array_equal(rows["frame"][mine, 0], np.arange(length)):
                    raise UserError(f"{root / 'data'}: {len(place)} rows for the {length} frames of episode {number}")

                def row_of(row: int, place: np.ndarray = place) -> str:
                    return f"{pictures.paths[place[row, 0]]}: row {place[row, 1]}"

                if robot.in_tables:
                    shapes = {pictures.read(*each)["video/observation"].shape for each in place.tolist()}
                    if len(shapes) > 1:
                        raise UserError(f"{row_of(0)}: the size of the pictures changes in episode {number}")
                    if stop_requested():
                        raise Stopped("nothing was written")
                else:
                    for start, end, other in claims[file]:
                        if start < first + length and first < end and other != number:
                            raise UserError(f"{root / 'meta'}: {number} and {other} claim the same frames of {file}")
                    path, frames = job.result()
                    # Where an entry is bad, more frames than those of the good ones are as it should be.
                    if frames < ends[file] or (frames > ends[file] and len(good) == len(robot.listed)):
                        raise UserError(f"{path}: has {frames} frames, its episodes have {ends[file]}")
                    place = np.stack(np.broadcast_arrays(source.number(path), first + np.arange(length)), axis=1)
                source.recordings.append(Recording(f"episode {number}", place, np.arange(length) / fps, values, row_of))


def _flat(names: Any) -> list[str]:
    """Names of a feature's dimensions, which datasets give as a list, nested lists, or {"motors": a list}."""
    if isinstance(names, dict):
        names = list(names.values())
    return [name for item in names or [] for name in (_flat(item) if isinstance(item, (list, dict)) else [str(item)])]
