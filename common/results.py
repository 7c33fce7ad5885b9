"""Finished runs as tables and figures see them: found in a folder, sorted into cells, with what is wrong with each."""

from __future__ import annotations

import collections
import dataclasses
import functools
import importlib
import json
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from common import runs
from common.errors import UserError
from common.tasks import get_task

SCRIPTS = ("lapo", "laom_labels", "laof", "lapo_slots", "masklam")
# What the paper's experiments vary. A run belongs to a cell if these are exactly the cell's.
FACTORS = frozenset(
    "distractors mask_source loss_mask mask_channel input_mask max_offset latent_dim num_labels occlusion "
    "mask_dilation".split()
)


@functools.cache
def script_defaults(script: str, env: str, quick: bool) -> dict[str, Any]:
    """The default arguments of a method script as JSON values."""
    module = importlib.import_module(script)
    return runs.jsonable(module.defaults([f"--env={env}", *(["--quick"] if quick else [])]))


@dataclass
class Run:
    """A run directory: its arguments, and its result if it is finished.

    `changes`: arguments that differ from the script's defaults for its task and scale, without environment, seed and
    what does not change the numbers; and ``lam_from``, the labels of the run that it has its latent action model from.
    """

    dir: Path
    script: str
    env: str
    seed: int
    args: dict[str, Any]
    result: dict[str, Any] | None
    problem: str = ""
    changes: dict[str, Any] = field(default_factory=dict)

    @property
    def quick(self) -> bool:
        return bool(self.args.get("quick"))

    @property
    def frames(self) -> tuple[str, str]:
        """What tells data sets apart: the hashes of both splits, the same for every method."""
        return str(self.args.get("train_hash")), str(self.args.get("test_hash"))

    @property
    def data(self) -> tuple[tuple[str, str], ...]:
        """What tells everything apart that a run has learned from: also masks, and weights behind flow and features."""
        known = (key for key in self.args if key.endswith("_hash") and key != "lam_from_hash")
        return tuple((key, str(self.args[key])) for key in sorted(known))

    @property
    def commits(self) -> set[str]:
        """The commits of the run and of the one that it has its latent action model from."""
        assert self.result is not None
        held = self.result.get("lam_from", self.result)
        return {self.result.get("commit") or "unknown", held.get("commit") or "unknown"}


def read_run(directory: Path) -> Run | None:
    """The run in a directory with an args.json; None if its arguments cannot be read."""
    try:
        args = json.loads((directory / "args.json").read_text())
        env, seed = args["env"], int(args["seed"])
    except (OSError, json.JSONDecodeError, KeyError, ValueError):
        return None
    script = directory.parents[2].name
    result, problem = None, ""
    path = directory / "result.json"
    if not path.exists():
        problem = "is not finished"
    else:
        try:
            result = json.loads(path.read_text())
            if not isinstance(result["metrics"], dict):
                raise KeyError("metrics")
        except (json.JSONDecodeError, KeyError, TypeError):
            result, problem = None, "has a damaged result.json"
    run = Run(directory, script, env, seed, args, result, problem)
    base = script_defaults(script, env, run.quick)
    ignored = runs.RUNTIME_FIELDS | {"env", "seed", "quick"}
    run.changes = {key: args[key] for key in base if key in args and key not in ignored and args[key] != base[key]}
    if "lam_from_hash" in args:
        run.changes["lam_from"] = result["lam_from"]["num_labels"] if result else _labels_of(args)
    return run


def _labels_of(args: dict[str, Any]) -> int | None:
    """Labels of the run that an unfinished one has its latent action model from; None if that is gone."""
    try:
        return json.loads((Path(args["lam_from"]) / "args.json").read_text())["num_labels"]
    except (OSError, json.JSONDecodeError, KeyError, TypeError):
        return None


def find_runs(folder: Path) -> list[Run]:
    """Every run below a folder of run directories (script/env/variant/seed<n>), in order."""
    found = [
        read_run(path.parent) for script in SCRIPTS for path in sorted((folder / script).glob("*/*/seed*/args.json"))
    ]
    return [run for run in found if run is not None]


@dataclass(frozen=True)
class Stat:
    """Mean and standard deviation (n - 1; None for a single value) over seeds."""

    mean: float
    std: float | None
    values: tuple[float, ...]


@dataclass
class Cell:
    """The runs of one method, task and setting that differ in their seeds alone.

    `runs`: finished ones. `notes`: what a reader must know before trusting the average. `mixed`: the runs saw different
    data, so that they are not averaged.
    """

    runs: list[Run] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    mixed: bool = False

    def values(self, metric: Callable[[Run], float | None] | str) -> list[float]:
        """A metric of each run that has it; a name means one of ``result["metrics"]``."""
        read = (lambda run: run.result["metrics"].get(metric)) if isinstance(metric, str) else metric
        return [value for value in map(read, self.runs) if value is not None]

    def stat(self, metric: Callable[[Run], float | None] | str) -> Stat | None:
        """Mean and deviation of a metric; None without values, or if the runs must not be averaged."""
        values = self.values(metric)
        return None if self.mixed or not values else stat(values)


def stat(values: Iterable[float]) -> Stat:
    """Mean and sample standard deviation."""
    values = tuple(values)
    return Stat(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None, values)


def average(stats: list[Stat]) -> Stat | None:
    """The paper's aggregate over tasks: the mean of their means, and the mean of their standard deviations."""
    if not stats:
        return None
    deviations = [one.std for one in stats if one.std is not None]
    std = statistics.fmean(deviations) if len(deviations) == len(stats) else None
    return Stat(statistics.fmean(one.mean for one in stats), std, tuple(one.mean for one in stats))


def shown(changes: dict[str, Any]) -> str:
    """Changed arguments as flags: ``lam-updates=20, no-augment``."""
    parts = []
    for key, value in sorted(changes.items()):
        name = key.replace("_", "-")
        if key == "lam_from":
            parts.append(f"the model of a run with {value} labels" if value else "a latent action model of its own")
            continue
        parts.append((name if value else f"no-{name}") if isinstance(value, bool) else f"{name}={value}")
    return ", ".join(parts)


@dataclass
class Finished:
    """The runs of a folder at one scale, and how many seeds a cell should have."""

    runs: list[Run]
    quick: bool = False
    seeds: int = 3

    def select(self, script: str, env: str) -> list[Run]:
        return [run for run in self.runs if (run.script, run.env, run.quick) == (script, env, self.quick)]

    def envs(self) -> set[str]:
        return {run.env for run in self.runs if run.quick == self.quick}

    def cell(self, script: str, env: str, wanted: dict[str, Any], usual: dict[str, Any] | None = None) -> Cell:
        """The cell of a script, a task and the factors that are `wanted` beside their defaults.

        usual: other changed arguments that the paper's experiment has.
        """
        base = script_defaults(script, env, self.quick)
        wanted = {key: value for key, value in wanted.items() if key in base and base[key] != value}
        usual = {key: value for key, value in (usual or {}).items() if base.get(key) != value}
        groups: dict[str, list[Run]] = {}
        for run in self.select(script, env):
            if {key: value for key, value in run.changes.items() if key in FACTORS} == wanted:
                rest = {key: value for key, value in run.changes.items() if key not in FACTORS}
                groups.setdefault(json.dumps(rest, sort_keys=True), []).append(run)
        if not groups:
            return Cell()
        expected = json.dumps(usual, sort_keys=True)
        # With the experiment's own settings if there are such runs, else the settings with most finished runs.
        rank = lambda key: (key == expected, sum(run.result is not None for run in groups[key]), -len(key))  # noqa: E731
        chosen = max(groups, key=rank)
        cell = Cell()
        if chosen != expected:
            settings = json.loads(chosen)
            different = {k: v for k, v in settings.items() if usual.get(k) != v}
            different |= {key: base[key] for key in usual if key not in settings}
            cell.notes.append(f"with {shown(different)}")
        for key in groups:
            if key != chosen:
                other = shown(json.loads(key)) or "default settings"
                cell.notes.append(f"{len(groups[key])} more with {other} left out")
        unique: dict[int, Run] = {}
        for run in groups[chosen]:
            if run.result is None:
                cell.notes.append(f"seed {run.seed} {run.problem}")
            elif run.seed in unique:
                cell.notes.append(f"seed {run.seed} is there twice, {run.dir.parent.name} left out")
            else:
                unique[run.seed] = run
        cell.runs = [unique[seed] for seed in sorted(unique)]
        self._check(cell)
        return cell

    def _check(self, cell: Cell) -> None:
        """Notes what keeps the runs of a cell from being seeds of one experiment."""
        if not cell.runs:
            return
        if len(cell.runs) < self.seeds:
            cell.notes.append(f"{len(cell.runs)} of {self.seeds} seeds")
        if len({run.data for run in cell.runs}) > 1:
            cell.mixed = True
            cell.notes.append("different data sets, masks or weights behind them, not averaged")
        if len({run.args.get("device_type") for run in cell.runs}) > 1:
            cell.notes.append("some on a GPU, some on a CPU")
        commits = sorted(set.union(*(run.commits for run in cell.runs)))
        if len(commits) > 1:
            cell.notes.append(f"different commits: {', '.join(commit[:8] + commit[40:] for commit in commits)}")
        elif commits[0].endswith("+changes"):
            cell.notes.append("made from uncommitted changes")


def mark_odd_data(cells: Iterable[Cell]) -> None:
    """Notes at cells of one task that most others' runs saw another data set."""
    there = [cell for cell in cells if cell.runs and not cell.mixed]
    counts = collections.Counter(cell.runs[0].frames for cell in there)
    if len(counts) > 1:
        usual = max(counts, key=lambda frames: counts[frames])
        for cell in there:
            if cell.runs[0].frames != usual:
                cell.notes.append("another data set than the other rows")


def iqm(values: np.ndarray, axis: int = -1) -> np.ndarray:
    """Interquartile mean: the mean of what is left without the lowest and the highest quarter (arXiv 2108.13264)."""
    from scipy.stats import trim_mean

    return trim_mean(values, 0.25, axis=axis)


def iqm_interval(
    by_task: list[list[float]], resamples: int = 10_000, seed: int = 0
) -> tuple[float, float, float] | None:
    """Interquartile mean over runs of all tasks, and its 95% interval by the stratified percentile bootstrap.

    Stratified: each task's runs are drawn anew among themselves, as many as there are (arXiv 2108.13264).

    Returns None without values, and an interval of NaN if a task has a single run.
    """
    from scipy.stats import bootstrap

    samples = [np.asarray(values, float) for values in by_task if len(values)]
    if not samples:
        return None
    point = float(iqm(np.concatenate(samples)))
    if min(map(len, samples)) < 2:
        return point, float("nan"), float("nan")

    def statistic(*parts: np.ndarray, axis: int = -1) -> np.ndarray:
        return iqm(np.concatenate(parts, axis=axis), axis=axis)

    found = bootstrap(
        samples, statistic, n_resamples=resamples, vectorized=True, method="percentile", axis=-1,
        rng=np.random.default_rng(seed),
    )  # fmt: skip
    return point, float(found.confidence_interval.low), float(found.confidence_interval.high)


def load_model(run: Run, device: str = "cpu") -> tuple[Any, Any, Any]:
    """The script's module, the run's arguments and its trained latent action model, in evaluation mode.

    Raises:
        UserError: the weights are missing, or do not fit this version of the script.
    """
    import inspect

    import torch

    assert run.result is not None
    module = importlib.import_module(run.script)
    names = {item.name for item in dataclasses.fields(module.Args)}
    args = module.Args(**{key: value for key, value in run.args.items() if key in names})
    size = run.result["dataset"]["train"]["plan"]["image_size"]
    known = {"args": args, "size": size, "action_dim": get_task(run.env).action_dim}
    wanted = [known[name] for name in inspect.signature(module.LatentActionModel.__init__).parameters if name in known]
    model = module.LatentActionModel(*wanted)
    try:
        model.load_state_dict(torch.load(run.dir / "lam.pt", map_location="cpu", weights_only=True)["model"])
    except (OSError, RuntimeError, KeyError) as error:
        raise UserError(f"{run.dir / 'lam.pt'}: {str(error).splitlines()[0]}") from None
    return module, args, model.to(device).eval()
