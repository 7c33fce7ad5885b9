"""Reads the datasets that the paper's authors published on the Hugging Face hub."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from common import media
from common.cli import UserError
from common.lerobot import fetch
from common.recordings import Recording, Source, read_rows
from common.tasks import Task

REPOSITORIES = {
    "dcs": "EpicPinkPenguin/visual_distracting_control_suite",
    "dmw": "EpicPinkPenguin/visual_distracting_metaworld",
}
DIFFICULTY = {"none": 0.0, "low": 0.1, "hard": 0.3}  # of the moving camera and the changing colours


def locate(task: Task, distractor: str, copy: Path | None) -> tuple[Path, str, str | None]:
    """The folder of the dataset, the folder of the task's files in it, and the repository, None for a copy of it."""
    ending = "" if distractor == "none" else f"_distractor_{distractor}"
    folder = f"{task.name}-v3" if task.suite == "dmw" else task.name.replace("-", "_") + ending
    if copy is not None:
        return copy, folder, None
    return fetch(REPOSITORIES[task.suite], ["README.md"]), folder, REPOSITORIES[task.suite]


def _files(root: Path, folder: str, split: str, repository: str | None) -> Iterator[Path]:
    """The parquet files of a split; those of a repository are downloaded one by one, when they are asked for."""
    if repository is None:
        yield from (path for path in media.walk(root / folder, {".parquet"}) if path.name.startswith(f"{split}-"))
        return
    from huggingface_hub import list_repo_files

    with media.readable(Path(repository), "a dataset of the hub"):
        names = sorted(list_repo_files(repository, repo_type="dataset"))
    for name in names:
        if re.fullmatch(rf"{folder}/{split}-.*\.parquet", name):
            yield fetch(repository, [name]) / name


def _episodes(parts: Iterator[dict[str, np.ndarray]], most: int | None) -> Iterator[dict[str, np.ndarray]]:
    """Splits rows after each flagged one, until `most` transitions have come; an episode that does not end is dropped.

    A row has an observation and the action that was taken there. The flagged row is the last observation, so that its
    action is filler.
    """
    pending: list[dict[str, np.ndarray]] = []
    transitions = 0
    for part in parts:
        start = 0
        for stop in (np.flatnonzero(part["terminated"] | part["truncated"]) + 1).tolist():
            pending.append({name: values[start:stop] for name, values in part.items()})
            yield {name: np.concatenate([piece[name] for piece in pending]) for name in part}
            transitions += sum(len(piece["place"]) for piece in pending) - 1
            pending, start = [], stop
            if most is not None and transitions >= most:
                return
        pending.append({name: values[start:] for name, values in part.items()})


def read_authors(
    source: Source, task: Task, distractor: str, folder: str, repository: str | None, most: int | None
) -> dict[str, Any]:
    """Reads both splits by whole episodes. Returns what the plan says, as make_dataset.py would.

    most: train transitions that suffice; a tenth of it for the test split. repository: None for a copy of it.

    On Meta-World reward and flags came with the observation beside them, so that they belong to the row before; on the
    Control Suite they belong to the action of their row.
    """
    meta_world = task.suite == "dmw"
    observations = {"clean": "observation"} if meta_world or distractor == "none" else {"distractor": "observation"}
    if meta_world and distractor != "none":
        observations["distractor"] = "observation_distracted"
    keys = {name: name for name in ("state", "action", "reward", "terminated", "truncated")}
    for split, enough in (("train", most), ("test", most and -(-most // 10))):
        rows = read_rows(source, _files(source.root, folder, split, repository), keys)
        for number, episode in enumerate(_episodes(rows, enough)):
            tables = {name: episode[name] for name in ("action", "state")}
            reward, terminated = episode["reward"][:, 0], episode["terminated"][:, 0]
            if meta_world:
                reward, tables["success"] = np.append(reward[1:], 0), np.append(terminated[1:], False)
            tables["reward"] = np.append(reward[:-1], 0)
            source.recordings.append(Recording(f"{split} {number}", episode["place"], None, tables, split=split))
        if not source.recordings or source.recordings[-1].split != split:
            raise UserError(f"{source.root / folder}: no {split}-*.parquet with a whole episode in it")
    source.columns = {f"{render}/observation": column for render, column in observations.items()}
    source.columns |= {f"{render}/mask": "mask" for render in observations}
    if "pred_mask" in pq.read_schema(source.root / min(source.files, key=source.files.get)).names:
        source.columns["sam/mask"] = "pred_mask"
    moving = 0.0 if meta_world else DIFFICULTY[distractor]
    distractors = {"backgrounds": "davis", "clips": None, "camera_scale": moving, "color_scale": moving}
    return {
        "env": task.name,
        "seed": 0,
        "renders": list(observations),
        "quality": "full",
        "image_size": task.image_size,
        "state_dim": task.state_dim,
        "action_dim": task.action_dim,
        "success": meta_world,
        "episode_length": task.max_steps,  # where none was as long, all ended by success
        "expert": "authors",
        "expert_sha256": "",
        "distractors": distractors if "distractor" in observations else None,  # which clips they took is not known
    }
