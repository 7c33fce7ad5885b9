"""Reads robots' datasets in LeRobot's formats v2.1 and v3.0, from a folder or the Hugging Face hub."""

import itertools
import json
import re
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from common import media
from common.cli import Progress, UserError
from common.recordings import CORES, Recording, Source, frame_times, read_rows


def fetch(repository: str, patterns: list[str]) -> Path:
    """Downloads files of a dataset on the hub, unless they are there, and returns the folder that they are in."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(repository, repo_type="dataset", allow_patterns=patterns))
    except Exception as error:  # of many classes: no network, no such dataset, no permission
        reason = str(error).partition("\n")[0]
        raise UserError(f"{repository}: cannot be had from the hub ({reason}); or give a folder") from error


def read_information(root: Path) -> dict[str, Any]:
    """A LeRobot dataset's meta/info.json."""
    path = root / "meta/info.json"
    try:
        information = json.loads(path.read_text(encoding="utf-8"))
        lacking = {"codebase_version", "fps", "features"} - information.keys()
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(f"{path}: no description of a LeRobot dataset ({error}); copy the dataset again") from error
    if lacking or not re.match(r"v[23]\.", str(information["codebase_version"])):
        what = f"lacks {', '.join(sorted(lacking))}" if lacking else f"format {information['codebase_version']}"
        raise UserError(f"{path}: {what}; the formats v2.1 and v3.0 can be read")
    return information


def locate(place: str, camera: str | None) -> tuple[Path, str]:
    """The folder of a dataset, which is downloaded if `place` is user/repo, and the feature that holds the frames."""
    root, on_hub = Path(place).expanduser(), False
    if not root.is_dir() and re.fullmatch(r"[\w.-]+/[\w.-]+", place):
        root, on_hub = fetch(place, ["meta/*"]), True
    camera = choose_camera(root, read_information(root)["features"], camera)
    if on_hub:
        fetch(place, ["data/*", f"*/{camera}/*"])
    return root, camera


def choose_camera(root: Path, features: dict[str, Any], camera: str | None) -> str:
    """The feature that holds the frames: the one that was asked for, or the only one of type video or image."""
    cameras = [name for name, feature in features.items() if feature.get("dtype") in ("video", "image")]
    if camera in cameras or (camera is None and len(cameras) == 1):
        return camera or cameras[0]
    problem = f"no camera {camera}" if camera else f"{len(cameras)} cameras"
    raise UserError(f"{root}: {problem}; choose with --camera one of: {', '.join(cameras)}")


def listed_episodes(root: Path, information: dict[str, Any], video: str | None) -> dict[int, tuple[str, int, int]]:
    """Number of an episode -> its video file, the number of its first frame there, and its length.

    video: the camera's key, None if the pictures are in the tables.
    """
    old, listed = information["codebase_version"] < "v3", {}
    folder = root / ("meta/episodes.jsonl" if old else "meta/episodes")
    keys = ("chunk_index", "file_index", "from_timestamp", "to_timestamp") if video and not old else ()
    for path in [folder] if old else sorted(folder.rglob("*.parquet")):
        with media.readable(path, "a list of episodes"):
            if old:
                rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
            else:
                columns = ["episode_index", "length", *(f"videos/{video}/{key}" for key in keys)]
                rows = pq.read_table(path, columns=columns).to_pylist()
            for row in rows:
                number, length = row["episode_index"], row["length"]
                about = {key: row[f"videos/{video}/{key}"] for key in keys}
                about |= {"episode_chunk": number // information.get("chunks_size", 1000), "episode_index": number}
                first, end = (round(about.get(f"{side}_timestamp", 0) * information["fps"]) for side in ("from", "to"))
                if keys and end - first != length:
                    raise UserError(f"{path}: episode {number} has {length} frames, but {end - first} by its times")
                file = information["video_path"].format(video_key=video, **about) if video else ""
                listed[number] = (file, first, length)
    if not listed:
        raise UserError(f"{folder}: lists no episodes; copy the dataset again")
    claims = sorted((file, first, length, number) for number, (file, first, length) in listed.items() if file)
    for (file, first, length, number), (next_file, next_first, _, other) in itertools.pairwise(claims):
        if file == next_file and first + length > next_first:
            raise UserError(
                f"{folder}: episodes {number} and {other} claim the same frames of {file}; the list is wrong"
            )
    return listed


def _find_video(root: Path, file: str) -> Path:
    """The path of a video; some datasets call the folder video/ that their description calls videos/."""
    for path in (root / file, root / re.sub("^videos/", "video/", file), root / re.sub("^video/", "videos/", file)):
        if path.is_file():
            return path
    raise UserError(f"{root / file}: no such video, but it is listed")


def _check_video(root: Path, file: str, frames: int) -> None:
    path = _find_video(root, file)
    count, _, _ = frame_times(path, decode=True)
    if count != frames:
        raise UserError(f"{path}: has {count} frames, its episodes have {frames}")


def episode_range(text: str | None) -> range:
    """`0:50` as a range."""
    match = re.fullmatch(r"(\d*):(\d*)", text or ":")
    if match is None:
        raise UserError(f"--episodes {text}: write the first one and the one after the last, such as 0:50")
    return range(int(match[1] or 0), int(match[2] or 2**31))


def read_lerobot(source: Source, camera: str, action: str | None, episodes: range) -> None:
    """Episodes of a robot's dataset in the format v2.1 or v3.0."""
    root, information = source.root, read_information(source.root)
    features, fps = information["features"], information["fps"]
    in_tables = features[camera]["dtype"] == "image"
    listed = listed_episodes(root, information, None if in_tables else camera)
    if action is not None and action not in features:
        raise UserError(f"--action {action}: {root} has no such feature; it has {', '.join(features)}")
    keys = {"action": action or "action", "state": "observation.state"}
    keys = {name: key for name, key in keys.items() if key in features}
    source.action_names = _flat(features[keys["action"]].get("names")) if "action" in keys else None
    source.columns = {"video/observation": camera} if in_tables else {}

    # Rows are grouped by what they say of themselves: lists of episodes at times name wrong files.
    indices = {"episode": "episode_index", "frame": "frame_index"}
    parts = list(read_rows(source, sorted(root.glob("data/**/*.parquet")), keys | indices))
    if not parts:
        raise UserError(f"{root / 'data'}: holds no tables that can be read; copy the dataset again")
    with media.readable(root / "data", "tables of one kind"):
        rows = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    order = np.lexsort((rows["frame"][:, 0], rows["episode"][:, 0]))
    rows = {name: values[order] for name, values in rows.items()}
    ends: dict[str, int] = defaultdict(int)  # the frames that each video must have
    for file, first, length in listed.values():
        ends[file] = max(ends[file], first + length)

    wanted = {number: listed[number] for number in sorted(listed) if number in episodes}
    files = {file for file, _, _ in wanted.values()} if source.skip_bad and not in_tables else set()
    # Decoding is ffmpeg's work.
    with ThreadPoolExecutor(CORES) as pool, Progress(str(root), len(wanted), "recordings") as progress:
        checks = {file: pool.submit(_check_video, root, file, ends[file]) for file in files}
        for number, (file, first, length) in wanted.items():
            with source.checked():
                mine = slice(*np.searchsorted(rows["episode"][:, 0], (number, number + 1)))
                place, tables = rows["place"][mine], {name: rows[name][mine] for name in keys}
                if not np.array_equal(rows["frame"][mine, 0], np.arange(length)):
                    raise UserError(f"{root / 'data'}: {len(place)} rows for the {length} frames of episode {number}")

                def row_of(row: int, place: np.ndarray = place) -> str:
                    return f"{root / source.files[place[row, 0]]}: row {place[row, 1]}"

                if not in_tables:
                    video = source.number(_find_video(root, file), ends[file])
                    place = np.stack([np.full(length, video), first + np.arange(length)], axis=1)
                if file in checks:
                    checks[file].result()
                seconds = np.arange(length) / fps
                source.recordings.append(Recording(f"episode {number}", place, seconds, tables, row_of))
            progress.update()


def _flat(names: Any) -> list[str]:
    """Names of a feature's dimensions, which datasets give as a list, nested lists, or {"motors": a list}."""
    if isinstance(names, dict):
        names = list(names.values())
    return [name for item in names or [] for name in (_flat(item) if isinstance(item, (list, dict)) else [str(item)])]
