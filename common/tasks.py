"""The fourteen tasks: sizes, cameras and the paper's reference numbers."""

import difflib
from dataclasses import dataclass
from typing import Literal

from common.errors import UserError


@dataclass(frozen=True)
class Task:
    """What is fixed about a task; everything else is an option of `common.envs.make_env`."""

    name: str
    suite: Literal["dcs", "dmw"]
    action_dim: int
    state_dim: int
    """Length of the flattened state. DCS: the observation dict in alphabetical key order."""
    max_steps: int
    """Transitions per episode, at most."""
    image_size: int
    """Height and width of a frame in pixels."""
    camera: int | str
    expert_score: float
    """The paper's expert: mean return (DCS) or success rate (DMW)."""
    action_variance: float
    """The paper's mean per-dimension variance of the expert's actions."""
    floor_alpha: float | None
    """Opacity of the floor in the distractor render, so that the background shows through (DCS only)."""


def _dcs(name: str, action_dim: int, state_dim: int, score: float, variance: float, floor_alpha: float = 1.0) -> Task:
    return Task(name, "dcs", action_dim, state_dim, 1000, 64, 0, score, variance, floor_alpha)


def _dmw(name: str, score: float, variance: float) -> Task:
    return Task(name, "dmw", 4, 39, 500, 128, "corner", score, variance, None)


TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        _dcs("cheetah-run", 6, 17, 837.67, 0.6787),
        _dcs("walker-run", 6, 24, 738.37, 0.6729),
        _dcs("hopper-hop", 4, 15, 307.33, 0.7454),
        _dcs("humanoid-walk", 21, 67, 616.52, 0.4221, floor_alpha=0.3),
        _dmw("reach", 1.0, 0.0372),
        _dmw("push", 1.0, 0.1311),
        _dmw("pick-place", 1.0, 0.2286),
        _dmw("door-open", 0.917, 0.4266),
        _dmw("drawer-open", 1.0, 0.1483),
        _dmw("drawer-close", 1.0, 0.2466),
        _dmw("button-press-topdown", 1.0, 0.2085),
        _dmw("peg-insert-side", 0.772, 0.2497),
        _dmw("window-open", 1.0, 0.2979),
        _dmw("window-close", 1.0, 0.365),
    )
}


def get_task(name: str) -> Task:
    """Return the task called `name`; `UserError` with the list of tasks if there is none."""
    if name in TASKS:
        return TASKS[name]
    close = difflib.get_close_matches(name, TASKS, n=1, cutoff=0.4)
    hint = f"; did you mean {close[0]!r}?" if close else "."
    raise UserError(f"unknown task {name!r}{hint} Tasks: {', '.join(TASKS)}")
