"""Where the agent is in first frames, over many seeds: the boxes in common/tasks.py that prompt SAM.

    python -m benchmarks.boxes --out runs/boxes.json

Every episode starts with the paper's distractors. "box" is the median of the agent's bounding boxes over the seeds,
edge by edge, the wider one of the two renders', and a margin of a 32nd of the picture. "union" holds every one of them.
"""

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from common import runs
from common.distractors import DistractorConfig
from common.envs import RENDERS, make_env
from common.tasks import TASKS, get_task


@dataclass
class Args:
    envs: tuple[str, ...] = tuple(TASKS)
    """tasks to measure"""
    seeds: int = 200
    """first frames of each"""
    out: Path | None = None
    """JSON file for the boxes"""


def main(args: Args) -> None:
    outcome = {}
    for name in args.envs:
        task = get_task(name)
        env = make_env(name, quality="fast", distractors=DistractorConfig(backgrounds="synthetic", num_videos=2))
        boxes: dict[str, list[tuple[int, int, int, int]]] = {render: [] for render in RENDERS}
        for seed in range(args.seeds):
            if runs.stop_requested():
                raise runs.Stopped("nothing was written")
            observation, _ = env.reset(seed=seed)
            for render, found in boxes.items():
                rows, columns = (np.flatnonzero(observation[f"{render}/mask"].any(axis)) for axis in (1, 0))
                found.append((columns[0], rows[0], columns[-1] + 1, rows[-1] + 1))
        env.close()
        edges = np.array([boxes[render] for render in RENDERS])  # (2, seeds, 4)
        median, margin = np.median(edges, 1), task.image_size // 32
        low, high = np.floor(median[:, :2].min(0)) - margin, np.ceil(median[:, 2:].max(0)) + margin
        box = np.clip([*low, *high], 0, task.image_size).astype(int).tolist()
        union = [*edges[..., :2].min((0, 1)).tolist(), *edges[..., 2:].max((0, 1)).tolist()]
        outcome[name] = {"box": box, "union": union, "table": list(task.box)}
        print(f"{name:22} box {box}  union {union}  in common/tasks.py {list(task.box)}", flush=True)
    if args.out:
        about = {
            "command": shlex.join(["python", "-m", "benchmarks.boxes", *sys.argv[1:]]),
            "commit": runs.git_commit(),
            "seeds": args.seeds,
        }
        runs.write_json(args.out, about | {"machine": runs.machine(), "versions": runs.versions(), "boxes": outcome})


if __name__ == "__main__":
    runs.cli(main, Args())
