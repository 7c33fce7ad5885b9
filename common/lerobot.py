"""Datasets of the Hugging Face hub: robots' (LeRobot's formats v2.1 and v3.0), and those of the paper's authors."""

import itertools
import json
import re
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from common import media
from common.cli import UserError
from common.recordings import CORES, Recording, Source, frame_times, read_rows
from common.tasks import get_task

AUTHORS = {
    "dcs": "EpicPinkPenguin/visual_distracting_control_suite",
    "dmw": "EpicPinkPenguin/visual_distracting_metaworld",
}


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
    if lacking or not re.match(r"v[23]\.", information["codebase_version"]):
        what = f"lacks {', '.join(sorted(lacking))}" if lacking else f"format {information['codebase_version']}"
        raise UserError(f"{path}: {what}; the formats v2.1 and v3.0 can be read")
    return information


def choose_camera(root: Path, information: dict[str, Any], camera: str | None) -> str:
    """The feature that holds the frames: the one that was asked for, or the only one of type video or image."""
    cameras = [name for name, feature in information["features"].items() if feature["dtype"] in ("video", "image")]
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
    count, _ = frame_times(path, decode=True)
    if count != frames:
        raise UserError(f"{path}: has {count} frames, its episodes have {frames}")


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
    rows = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    order = np.lexsort((rows["frame"][:, 0], rows["episode"][:, 0]))
    rows = {name: values[order] for name, values in rows.items()}
    ends: dict[str, int] = defaultdict(int)  # the frames that each video must have
    for file, first, length in listed.values():
        ends[file] = max(ends[file], first + length)

    wanted = {number: listed[number] for number in sorted(listed) if number in episodes}
    files = {file for file, _, _ in wanted.values()} if source.skip_bad and not in_tables else set()
    with ThreadPoolExecutor(CORES) as pool:  # decoding is ffmpeg's work
        checks = {file: pool.submit(_check_video, root, file, ends[file]) for file in files}
        for number, (file, first, length) in wanted.items():
            with source.checked():
                mine = slice(*np.searchsorted(rows["episode"][:, 0], (number, number + 1)))
                place, tables = rows["place"][mine], {name: rows[name][mine] for name in keys}
                if not np.array_equal(rows["frame"][mine, 0], np.arange(length)):
                    raise UserError(f"{root / 'data'}: {len(place)} rows for the {length} frames of episode {number}")
                row = [f"{root / source.files[table]}: row {index}" for table, index in place].__getitem__
                if not in_tables:
                    video = source.number(_find_video(root, file), ends[file])
                    place = np.stack([np.full(length, video), first + np.arange(length)], axis=1)
                if file in checks:
                    checks[file].result()
                source.recordings.append(Recording(f"episode {number}", place, np.arange(length) / fps, tables, row))


def _flat(names: Any) -> list[str]:
    """Names of a feature's dimensions, which datasets give as a list, nested lists, or {"motors": a list}."""
    if isinstance(names, dict):
        names = list(names.values())
    return [name for item in names or [] for name in (_flat(item) if isinstance(item, (list, dict)) else [str(item)])]


# -------------------------------------------------------------------------------------------------- the paper's authors


def read_authors(source: Source, task: str, distractor: str, on_hub: bool, most: dict[str, int | None]) -> list[str]:
    """Whole episodes of both splits. Returns the renders that there are. most: transitions of a split that suffice.

    A row has an observation and the action taken there. On Meta-World its reward and flags came with the observation,
    so that they belong to the action in the row before; on the Control Suite the reward belongs to the row's action.
    Either way an episode ends with the flagged row, whose action leads nowhere.
    """
    meta_world = get_task(task).suite == "dmw"
    configuration = authors_configuration(task, distractor)
    renders = {"clean": "observation"} if distractor == "none" or meta_world else {"distractor": "observation"}
    if meta_world and distractor != "none":
        renders["distractor"] = "observation_distracted"
    keys = {name: name for name in ("state", "action", "reward", "terminated", "truncated")}
    for split in ("train", "test"):
        parts, transitions = [], 0
        for part in read_rows(
            source,
            _authors_files(source.root, configuration, split, on_hub and AUTHORS["dmw" if meta_world else "dcs"]),
            keys,
        ):
            parts.append(part)
            ended = np.flatnonzero(part["terminated"] | part["truncated"])
            if len(ended) and most[split] is not None and transitions + ended[-1] + 1 - len(ended) >= most[split]:
                break
            transitions += len(part["place"]) - len(ended)
        rows = {name: np.concatenate([part[name] for part in parts]) for name in keys | {"place": ""}} if parts else {}
        stops = np.flatnonzero(rows["terminated"] | rows["truncated"]) + 1 if parts else []
        if not len(stops):
            raise UserError(f"{source.root / configuration}: no whole episode of the {split} split in it")
        transitions = 0
        for number, (start, stop) in enumerate(itertools.pairwise([0, *stops.tolist()])):
            if most[split] is not None and transitions >= most[split]:
                break
            mine = slice(start, stop)
            tables = {name: rows[name][mine] for name in ("action", "state")}
            tables["reward"] = rows["reward"][mine, 0]
            if meta_world:
                tables["reward"] = np.append(tables["reward"][1:], 0)
                tables["success"] = np.append(rows["terminated"][mine, 0][1:], False)
            tables["reward"][-1] = 0
            transitions += stop - start - 1
            source.recordings.append(Recording(f"{split} {number}", rows["place"][mine], None, tables, split=split))
    columns = pq.read_schema(source.root / source.files[0]).names
    source.columns = {f"{render}/observation": column for render, column in renders.items()}
    source.columns |= {f"{render}/mask": "mask" for render in renders}
    source.columns |= {"sam/mask": "pred_mask"} if "pred_mask" in columns else {}
    return list(renders)


def authors_configuration(task: str, distractor: str) -> str:
    """The name of a configuration of the authors' datasets."""
    if get_task(task).suite == "dmw":
        return f"{task}-v3"
    return task.replace("-", "_") + ("" if distractor == "none" else f"_distractor_{distractor}")


def _authors_files(root: Path, configuration: str, split: str, repository: str | None) -> Iterator[Path]:
    """The parquet files of a split, from the hub each when it is asked for."""
    if not repository:
        yield from sorted(root.glob(f"{configuration}/{split}-*.parquet"))
        return
    from huggingface_hub import list_repo_files

    with media.readable(Path(repository), "a dataset of the hub"):
        names = sorted(list_repo_files(repository, repo_type="dataset"))
    for name in names:
        if re.fullmatch(rf"{configuration}/{split}-.*\.parquet", name):
            yield fetch(repository, [name]) / name
