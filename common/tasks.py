"""The fourteen tasks: sizes, cameras and the paper's reference numbers."""

import difflib
from dataclasses import dataclass
from typing import Literal

from common.cli import UserError


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
    box: tuple[int, int, int, int]
    """Where the agent is in an episode's first frame, (x0, y0, x1, y1) in pixels of `image_size`, x1 and y1 exclusive:
    the prompt for SAM; docs/studies.md says how it was measured."""

    def scaled_box(self, image_size: int) -> tuple[float, float, float, float]:
        """`box` in pixels of frames of another size."""
        x0, y0, x1, y1 = (value * image_size / self.image_size for value in self.box)
        return x0, y0, x1, y1


Box = tuple[int, int, int, int]
# The robot's first pose depends on the workbench that it stands at, not on the seed.
ARM_LOW, ARM_HIGH = (59, 1, 128, 128), (60, 0, 128, 128)


def _dcs(
    name: str, action_dim: int, state_dim: int, score: float, variance: float, box: Box, floor_alpha: float = 1.0
) -> Task:
    return Task(name, "dcs", action_dim, state_dim, 1000, 64, 0, score, variance, floor_alpha, box)


def _dmw(name: str, score: float, variance: float, box: Box) -> Task:
    return Task(name, "dmw", 4, 39, 500, 128, "corner", score, variance, None, box)


TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        _dcs("cheetah-run", 6, 17, 837.67, 0.6787, (13, 24, 54, 50)),
        _dcs("walker-run", 6, 24, 738.37, 0.6729, (9, 12, 55, 52)),
        _dcs("hopper-hop", 4, 15, 307.33, 0.7454, (20, 21, 44, 44)),
        _dcs("humanoid-walk", 21, 67, 616.52, 0.4221, (17, 16, 44, 46), floor_alpha=0.3),
        _dmw("reach", 1.0, 0.0372, ARM_LOW),
        _dmw("push", 1.0, 0.1311, ARM_LOW),
        _dmw("pick-place", 1.0, 0.2286, ARM_LOW),
        _dmw("door-open", 0.917, 0.4266, ARM_LOW),
        _dmw("drawer-open", 1.0, 0.1483, ARM_LOW),
        _dmw("drawer-close", 1.0, 0.2466, ARM_LOW),
        _dmw("button-press-topdown", 1.0, 0.2085, ARM_HIGH),
        _dmw("peg-insert-side", 0.772, 0.2497, ARM_LOW),
        _dmw("window-open", 1.0, 0.2979, ARM_HIGH),
        _dmw("window-close", 1.0, 0.365, ARM_HIGH),
    )
}


def get_task(name: str) -> Task:
    """Return the task called `name`; `UserError` with the list of tasks if there is none."""
    if name in TASKS:
        return TASKS[name]
    close = difflib.get_close_matches(name, TASKS, n=1, cutoff=0.4)
    hint = f"; did you mean {close[0]!r}?" if close else "."
    raise UserError(f"unknown task {name!r}{hint} Tasks: {', '.join(TASKS)}")


def is_meta_world(name: str) -> bool:
    """Whether a dataset's name is that of a Meta-World task."""
    return name in TASKS and TASKS[name].suite == "dmw"
