"""Tables and figures of the paper from finished runs, and one page with all of them.

    python make_figures.py                      # runs/ to figures/, the paper's scale
    python make_figures.py --quick --seeds 2    # from runs with --quick
    python make_figures.py --compare runs/lapo/cheetah-run/default/seed1 runs/masklam/cheetah-run/default/seed1

Writes PNGs, tables as Markdown and LaTeX, and figures/index.html, which needs nothing else. What cannot be drawn is
listed there with the command that makes what it needs. A run is found by its folder's name: those of reproduce.py have
their places, all others (your script, your --variant) are rows of their own in the main table.
"""

from __future__ import annotations

import collections
import functools
import importlib
import itertools
import json
import os
import shlex
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import reproduce
from common import pictures, report, runs
from common.cli import Count, Stopped, UserError, cli, describe, stop_requested
from common.dataset import Batch, Dataset, sequential
from common.masks import dilate, unpack_masks
from common.report import Cell, Entry, Item, Run, Stat, average, number
from common.tasks import TASKS, get_task

SUITES = {"dcs": reproduce.DCS, "dmw": reproduce.DMW}
NAMES = {"dcs": "Distracting Control Suite", "dmw": "Distracting Meta-World"}
SCORES = {"dcs": "return", "dmw": "success rate"}
WORDS = {"vanilla": "clean", "distractor": "distr."}  # for the paper's names of the renders
SCORE_WORDS = "NR, NSR: return and success rate relative to the paper's expert; only of whole episodes."
PAPER = json.loads((Path(__file__).parent / "benchmarks/paper_numbers.json").read_text(encoding="utf-8"))
LABELS = "--num-labels"  # the flag whose values one run has all of
BOOTSTRAP = 10_000  # resamples behind the 95% intervals
UMAP_SEED = 0
STRIP = 10  # consecutive frames in a strip
SHOWN = 20  # the frame of an episode in pictures, when the agent moves
DIMENSIONS = 8  # of the action that the UMAP figure shows at most


@dataclass
class Args:
    runs_dir: Path = Path("runs")
    """folder of the run directories"""
    out: Path = Path("figures")
    """folder of the tables, figures and index.html"""
    quick: bool = False
    """take the runs that were made with --quick"""
    seeds: Count = 3
    """seeds that a cell of a table should have; fewer get a mark"""
    data_dir: Path | None = None
    """folder of the data sets; None: where each run had them"""
    env: list[str] = field(default_factory=list)
    """tasks of the pictures; none: cheetah-run and push, or the first that has runs"""
    compare: list[Path] | None = None
    """only print a small table of these run directories"""


# ---------------------------------------------------------------------------------------------------------------------
# Which runs belong where


@dataclass(frozen=True)
class Column:
    """A column of a table or a panel of a figure: a metric, and the tasks of each suite that it is averaged over."""

    head: str
    metric: str
    render: str
    suites: list[list[str]]


@dataclass
class Row:
    """A row of a table or a point of a line: its runs by task and render."""

    name: str
    cells: dict[tuple[str, str], Cell] = field(default_factory=lambda: collections.defaultdict(Cell))

    def over(self, column: Column) -> list[list[str]]:
        """The tasks of a column, by suite, that have a value that may be averaged."""
        return [[env for env in suite if self.cells[env, column.render].stat(column.metric)] for suite in column.suites]

    def stat(self, column: Column, whole: bool = False) -> Stat | None:
        """As the paper aggregates: means over seeds, then over tasks, then over suites, which count alike.

        None if a suite has no value; whole: also if a task has none.
        """
        over = self.over(column)
        if not all(over) or (whole and over != column.suites):
            return None
        return average(
            [average([self.cells[env, column.render].stat(column.metric) for env in suite]) for suite in over]
        )

    def entry(self, column: Column) -> Entry:
        """The number in a column, with what must be known of the runs behind it."""
        notes = []
        for envs, suite in zip(self.over(column), column.suites):
            notes += [f"over {len(envs)} of {len(suite)} tasks"] if 0 < len(envs) < len(suite) else []
        cells = {env: self.cells[env, column.render] for env in itertools.chain(*column.suites)}
        counts = {env: len(cell.values(column.metric)) for env, cell in cells.items()}
        notes_of = {env: list(cell.notes) for env, cell in cells.items() if counts[env] or not cell.runs}
        for env in notes_of:
            if counts[env] < len(cells[env].runs):
                notes_of[env].append(f"{counts[env]} of {len(cells[env].runs)} runs have it")
        averaged = list(itertools.chain(*self.over(column)))
        for note in dict.fromkeys(itertools.chain(*notes_of.values())):
            envs = [env for env in notes_of if note in notes_of[env]]
            everywhere = envs == averaged or column.suites == [envs]
            notes.append(note if everywhere else f"{note} ({', '.join(envs)})")
        return Entry(number(self.stat(column)), notes)


class Context:
    """What every figure needs: the runs at this scale, where to write, and how to repeat the commands."""

    def __init__(self, args: Args, members: list[Run]) -> None:
        self.args, self.runs, self.out = args, members, args.out
        self.finished = [run for run in members if run.result is not None]
        self.by_name: dict[tuple[str, str, str], list[Run]] = {}
        for run in members:
            self.by_name.setdefault((run.script, run.env, run.variant), []).append(run)
        self.envs = [env for suite in SUITES.values() for env in suite if any(run.env == env for run in members)]

    def row(self, name: str, method: reproduce.Method, flags: tuple[str, ...] = (), budget: int | None = None) -> Row:
        """The runs of a method of the paper's experiments with further flags. budget: see `Cell`."""
        row = Row(name)
        for env, (render, render_flags) in itertools.product(self.envs, reproduce.RENDERS.items()):
            variant = reproduce.Cell(name, "", env, self.args.quick, method, (*flags, *render_flags)).variant
            members = self.by_name.get((method.script, env, variant), [])
            row.cells[env, render] = cell = report.make_cell(members, self.args.seeds, budget)
            if any(run.args.get("variant") for run in cell.runs):  # named like the experiment's, though they differ
                cell.notes.append("further settings by --set, see args.json")
        return row

    @functools.cached_property
    def main(self) -> list[Row]:
        """The rows of the main table: the paper's, then those of scripts and variants that no experiment has."""
        rows = [self.row(name, method) for name, method in reproduce.METHODS.items()]
        planned = {
            (cell.method.script, cell.env, cell.variant)
            for experiment in reproduce.EXPERIMENTS.values()
            if experiment.flag != LABELS  # whose runs are the main table's
            for cell in experiment.cells(self.envs, self.args.quick)
        }
        others: dict[str, Row] = {}
        for (script, env, variant), members in self.by_name.items():
            if (script, env, variant) not in planned:
                usual = ("default", "quick", "no-distractors")
                own = "_".join(part for part in variant.split("_") if part not in usual)
                name = f"{script} {own}".strip()
                render = "distractor" if members[0].args.get("distractors", True) else "vanilla"
                others.setdefault(name, Row(name)).cells[env, render] = report.make_cell(members, self.args.seeds)
        rows += others.values()
        report.mark_odd_data([row.cells for row in rows])
        return rows

    def first_runs(self, env: str) -> dict[str, Run]:
        """The first finished seed of each row of the main table on a task, under distractors."""
        cells = {row.name: row.cells[env, "distractor"] for row in self.main}
        return {name: cell.runs[0] for name, cell in cells.items() if cell.runs}

    def command(self, experiment: str, *more: str) -> str:
        """The command that makes the runs of an experiment, at this scale."""
        words = ["python", "reproduce.py", experiment, *more, *(["--quick"] if self.args.quick else [])]
        words += ["--seeds", str(self.args.seeds)] if self.args.seeds != 3 else []
        return shlex.join([*words, *self.runs_words(), *self.data_words()])

    def data_words(self) -> list[str]:
        """The flag that names the folder of the data sets."""
        folder = str(self.args.data_dir or self.runs[0].args.get("data_dir", "data"))
        return ["--data-dir", folder] if folder != "data" else []

    def probed_command(self) -> str:
        """A command that trains MaskLAM at this scale, probes it on the way, and has a name of its own."""
        run = [f"--env={self.envs[0]}", *(["--quick"] if self.args.quick else [])]
        updates = importlib.import_module("masklam").defaults(run).lam_updates or 30_000  # the paper's are a few more
        probes = [str(updates // part) for part in (16, 4, 1)]
        words = ["python", "masklam.py", *run, "--stages", "lam", "--probe-at", *probes, "--variant", "probed"]
        return shlex.join([*words, *self.data_words(), *self.runs_words()])

    def runs_words(self) -> list[str]:
        """The flag that names the folder of the runs."""
        return ["--runs-dir", str(self.args.runs_dir)] if self.args.runs_dir != Path("runs") else []

    def test_set(self, run: Run, mask_source: str | None = None) -> Dataset:
        """The held-out split that a run was tested on. UserError if it is not there any more."""
        folder = self.args.data_dir or Path(run.args["data_dir"])
        render = "distractor" if run.args["distractors"] else "clean"
        dataset = Dataset(folder, run.env, "test", render, mask_source or run.args.get("mask_source", "gt"))
        if dataset.hash != run.args["test_hash"]:
            raise UserError(f"{dataset.folder} is not the data that {run.dir} was tested on; name it with --data-dir")
        return dataset

    def some_test_set(self, env: str, mask_source: str) -> Dataset:
        """The held-out split of a task, as any of its runs saw it. UserError if none is there any more."""
        problem = UserError(f"no finished runs on {env}")
        for run in self.finished:
            if run.env == env:
                try:
                    return self.test_set(run, mask_source)
                except UserError as error:
                    problem = error
        raise problem


# ---------------------------------------------------------------------------------------------------------------------
# Tables

CONTROLS = {
    "untrained": {"eval/nmse": "eval/nmse_untrained"},
    "data's expert": {"eval/normalised_paper": "eval/normalised_dataset"},
}


def published(method: str, column: Column, suites: list[list[str]]) -> Stat:
    """The paper's number over tasks: the mean of means, and of standard deviations."""
    kind = "nmse" if column.metric == "eval/nmse" else "return"
    tables = [PAPER[kind][get_task(suite[0]).suite][column.render][method] for suite in suites]
    return average([average([Stat(*table[env]) for env in suite]) for suite, table in zip(suites, tables)])


def add_scores(context: Context, item: Item, columns: list[Column]) -> None:
    """Ours, its controls and the paper's numbers below each other; the best of ours is bold."""
    item.head = ["method", *(column.head for column in columns)]
    ours: dict[str, list[Entry]] = {}
    for row in context.main:
        ours[row.name] = [row.entry(column) for column in columns]
        item.add(row.name, ours[row.name], always=row.name in reproduce.METHODS)
        for name, metrics in CONTROLS.items():
            controls = [replace(column, metric=metrics.get(column.metric, "")) for column in columns]
            item.add(f"{row.name}, {name}", [row.entry(column) for column in controls], beside=True)
        if row.name in reproduce.METHODS:
            papers = []
            for column in columns:
                over = row.over(column)
                same = all(over) and over != column.suites  # ours lacks tasks; if it lacks a suite, there is no number
                text = number(published(row.name, column, over if same else column.suites))
                papers.append(Entry(text, ["the paper's mean over the same tasks as ours"] if same else []))
            item.add(f"{row.name}, paper", papers, beside=True)
    for place, column in enumerate(columns):
        stats = {row.name: row.stat(column) for row in context.main if row.stat(column)}
        over = {str(row.over(column)) for row in context.main if row.name in stats}
        if len(stats) > 1 and len(over) == 1:  # else there is nothing to compare, or they are over different tasks
            best = (min if column.metric == "eval/nmse" else max)(stat.mean for stat in stats.values())
            for name, stat in stats.items():
                ours[name][place].bold = stat.mean == best


def metric_word(suite: str, metric: str) -> str:
    """What heads and axes call a metric."""
    words = {"eval/nmse": "NMSE", "eval/normalised_paper": "NR" if suite == "dcs" else "NSR"}
    short = {"eval/normalised_dataset": f"{SCORES[suite]} / the data's expert's"}
    return (words | short).get(metric, f"{SCORES[suite]}, short episodes")


def summary_columns(scores: dict[str, str]) -> list[Column]:
    """NMSE and score of each suite, clean and with distractors. scores: the metric of each suite."""
    columns = []
    for suite, score in scores.items():
        for metric, render in itertools.product(("eval/nmse", score), WORDS):
            head = f"{suite.upper()} {metric_word(suite, metric)} {WORDS[render]}"
            columns.append(Column(head, metric, render, [SUITES[suite]]))
    return columns


def score_tables(context: Context) -> Iterator[Item]:
    """The paper's main table, and one table per metric, suite and render with every task."""
    columns = summary_columns(dict.fromkeys(SUITES, "eval/normalised_paper"))
    for render, word in WORDS.items():
        columns.append(Column(f"both NMSE {word}", "eval/nmse", render, list(SUITES.values())))
    title = "Latent action quality and behaviour cloning"
    item = Item("aggregate", title, "Tables", context.command("main-table"))
    item.text = (
        "Mean over tasks of means over seeds ± mean of standard deviations over seeds (n - 1); both: mean of the two "
        "suites. NMSE: error of a linear probe, lower is better; untrained: the same probe before training. "
        f"{SCORE_WORDS} data's expert: relative to that. Bold: best of ours."
    )
    add_scores(context, item, columns)
    yield item
    for kind, suite, render in itertools.product(("nmse", "return"), SUITES, ("distractor", "vanilla")):
        metric = "eval/nmse" if kind == "nmse" else "eval/normalised_paper"
        word = "NMSE" if kind == "nmse" else f"normalised {SCORES[suite]}"
        title = f"{NAMES[suite]}, {'clean' if render == 'vanilla' else 'with distractors'}: {word}"
        command = context.command("main-table", "--env", *SUITES[suite])
        item = Item(f"{kind}_{suite}_{render}", title, "Tables", command)
        item.text = "Mean ± standard deviation (n - 1) over seeds."
        if not any(row.cells[key].runs for row in context.main for key in row.cells if key[0] in SUITES[suite]):
            item.missing = "No runs of these tasks yet: only the paper's numbers."
        add_scores(context, item, [Column(env, metric, render, [[env]]) for env in SUITES[suite]])
        yield item


def cost_table(context: Context) -> Item:
    """Hours, memory and speed of runs, per method, suite and machine, beside the paper's hours."""
    item = Item("cost", "Wall-clock time and memory per run", "Tables", context.command("main-table"))
    item.text = (
        "Means over runs, hours of one process. Memory: the largest peak, of the GPU, or of the process without one. "
        "rest: latents, features, probe, rollouts, and flow or DINOv2's features where the run computed them."
    )
    stages = ["slots", "lam", "policy", "decoder", "rest"]
    item.head = ["method", "suite", "machine", "runs", "hours", *stages, "peak GiB", "samples/s of lam"]
    item.head.append("paper, A100 hours")
    for row, (suite, envs) in itertools.product(context.main, SUITES.items()):
        cells = [cell for (env, _), cell in row.cells.items() if env in envs and cell.runs]
        by_machine = collections.defaultdict(list)
        for result in (run.result for cell in cells for run in cell.runs):
            if "policy" not in result["stages"]:  # a run of stage 1 alone
                continue
            by_machine[result["machine"].get("gpu") or result["machine"]["cpu"]].append(result)
        for machine, members in by_machine.items():
            hours = collections.Counter()  # by stage, mean over the runs
            for name, seconds in itertools.chain(*(one["seconds"].items() for one in members)):
                # decoder-2000 and rollout-2000 belong to a further label budget, which a usual run has not.
                if "-" not in name:
                    hours[name if name in stages else "rest"] += seconds / 3600 / len(members)
            texts = [suite.upper(), machine, f"{len(members)}", f"{hours.total():.2f}"]
            texts += [f"{hours[stage]:.2f}" for stage in stages]
            texts.append(f"{max(one['peak_memory_gib'] for one in members):.1f}")
            texts.append(f"{np.mean([one['stages']['lam']['samples_per_s'] for one in members]):.0f}")
            theirs = PAPER["wall_clock_hours_a100"].get(row.name.split("@")[0])
            item.add(row.name, [*texts, f"{theirs[suite]:.1f}" if theirs else "-"])
            item.rows[-1][0].notes = list(dict.fromkeys(note for cell in cells for note in cell.notes))
    item.missing = "" if item.rows else "No finished runs of the main table."
    return item


def compute_table(context: Context) -> Item:
    """Hours of all finished runs of each method script: every seed, task, ablation and sweep."""
    item = Item("compute", "Total hours of all finished runs", "Tables", context.command("all"))
    item.text = "What a run took from another one, such as its untrained control, counts where it was computed."
    item.head = ["script", "runs", "hours on a GPU", "hours on a CPU"]
    counts = collections.Counter(run.script for run in context.finished)
    hours = collections.Counter()
    for run in context.finished:
        on_gpu = run.result["machine"].get("gpu") is not None
        hours[run.script, on_gpu] += sum(run.result["seconds"].values()) / 3600
    for script, count in sorted(counts.items()):
        item.add(script, [f"{count}", f"{hours[script, True]:.1f}", f"{hours[script, False]:.1f}"])
    return item


def expert_table(context: Context) -> Item:
    """Return or success rate and action variance of the experts behind the data of these runs, beside the paper's."""
    item = Item("experts", "Experts", "Tables", "python make_dataset.py --env all")
    item.text = "Score: mean return, on Meta-World the success rate, of the train split."
    item.head = ["task", "expert", "score", "paper's score", "action variance", "paper's variance"]
    experts = {(run.env, run.args["train_hash"]): run.result["dataset"]["train"] for run in context.finished}
    for (env, _), data in sorted(experts.items(), key=lambda pair: list(TASKS).index(pair[0][0])):
        task, plan = get_task(env), data["plan"]
        score = data["mean_return"] if data["success_rate"] is None else data["success_rate"]
        short = plan["episode_length"] < task.max_steps
        notes = [f"episodes of at most {plan['episode_length']} steps, the task has {task.max_steps}"] if short else []
        variances = [f"{data['action_variance']:.4f}", f"{task.action_variance}"]
        item.add(env, [plan["expert"], Entry(f"{score:.3f}", notes), f"{task.expert_score}", *variances])
    return item


# ---------------------------------------------------------------------------------------------------------------------
# Figures with numbers


@dataclass
class Panel:
    """One plot: lines of points, each with its interval (value, low, high), and dashed horizontal lines.

    A dashed line that is named like a line has its colour. stars: single points (x, y).
    """

    title: str
    lines: dict[str, dict[Any, tuple[float, float, float]]]
    dashed: dict[str, float] = field(default_factory=dict)
    stars: dict[str, tuple[float, float]] = field(default_factory=dict)
    log: bool = False
    """the y axis is logarithmic"""


def short(count: int) -> str:
    """A number of samples or labels: 500, 16k, 18M."""
    return str(count) if count < 2000 else f"{count / 1000:.3g}k" if count < 10**6 else f"{count / 10**6:.3g}M"


def draw(path: Path, panels: list[Panel], label: str, names: list[str] | None = None) -> Path:
    """Writes panels with a common x axis as PNG. names: its categories in order; None: numbers, joined by lines."""
    figure, axes = pictures.panels(len(panels), 3, 4.2, 3.6 if names else 2.8)
    named = dict.fromkeys(name for panel in panels for name in (*panel.lines, *panel.dashed, *panel.stars))
    colours = {name: f"C{place}" for place, name in enumerate(named)}  # the same in all panels
    for axis, panel in zip(axes, panels):
        values = sorted({x for points in panel.lines.values() for x in points} | {x for x, _ in panel.stars.values()})
        for place, (line, points) in enumerate(panel.lines.items()):
            # Categories of several lines stand beside each other, so that no interval hides another.
            x = [names.index(name) + 0.2 * place for name in points] if names else list(points)
            middle, low, high = np.reshape(list(points.values()), (-1, 3)).T
            style = "none" if names else "-"
            axis.errorbar(
                x, middle, [middle - low, high - middle], marker="o", ls=style, color=colours[line], label=line
            )
        for line, value in panel.dashed.items():
            axis.axhline(value, color=colours[line], ls="--", label=None if line in panel.lines else line)
        for name, point in panel.stars.items():
            axis.plot(*point, marker="*", ms=12, ls="none", color=colours[name], label=name)
        if names:
            axis.set_xticks(range(len(names)), map(pictures.label, names), rotation=30, ha="right", fontsize=8)
            axis.set_xlim(-0.5, len(names) - 0.5)
        elif values[0] > 0 and values[-1] >= 8 * values[0]:
            axis.set_xscale("log", base=2)
            axis.set_xticks(values, [short(x) for x in values], minor=False, fontsize=8)
        if panel.log:
            pictures.log_scale(axis)
        axis.set(title=panel.title, xlabel=label)
        axis.grid(alpha=0.3)
    handles = {text: handle for axis in axes for handle, text in zip(*axis.get_legend_handles_labels())}
    if handles:
        axes[0].legend(handles.values(), handles.keys(), fontsize=7)
    return pictures.save(figure, path)


def score_metric(suite: str, rows: Iterable[Row]) -> str:
    """The score of a suite's figures: relative to the paper's expert; to the data's if all episodes were shorter than
    the task's; as it is, if no run has either.
    """
    cells = [cell for row in rows for (env, _), cell in row.cells.items() if env in SUITES[suite]]
    names = ("eval/normalised_paper", "eval/normalised_dataset", f"eval/{SCORES[suite].replace(' ', '_')}")
    return next((name for name in names if any(cell.values(name) for cell in cells)), names[-1])


def interval_figure(context: Context) -> Item:
    """Interquartile means over tasks and seeds with stratified bootstrap 95% intervals, per suite and render."""
    item = Item("iqm", "Interquartile means and 95% intervals", "Tables", context.command("main-table"))
    item.text = (
        "Mean of the middle half of all runs; for the interval each task's runs are drawn anew among themselves "
        f"({BOOTSTRAP:,} resamples, percentiles), which needs two runs of every task. {SCORE_WORDS}"
    )
    suites = [suite for suite, envs in SUITES.items() if set(envs) & set(context.envs)]
    columns = summary_columns({suite: score_metric(suite, context.main) for suite in suites})
    item.head = ["method", *(column.head for column in columns)]
    panels: dict[str, Panel] = {}
    for row in context.main:
        entries = [row.entry(column) for column in columns]
        for column, entry in zip(columns, entries):
            values = [row.cells[env, column.render].values(column.metric) for env in row.over(column)[0]]
            interval = report.iqm_interval(values, BOOTSTRAP)
            if interval is not None:
                entry.text = ("{:.4f}" if np.isnan(interval[1]) else "{:.4f} [{:.4f}, {:.4f}]").format(*interval)
                head, _, word = column.head.rpartition(" ")
                panel = panels.setdefault(head, Panel(head, {word: {} for word in WORDS.values()}))
                panel.lines[word][row.name] = interval
        item.add(row.name, entries)
    if panels:
        names = [row[0].text for row in item.rows]
        item.pictures = [draw(context.out / "iqm.png", list(panels.values()), "", names)]
    else:
        item.missing = "No finished runs of the main table that may be averaged."
    return item


def panel_columns(envs: list[str], metrics: dict[str, str]) -> list[Column]:
    """The mean of both suites if they have one metric, of each suite with several tasks, then every task.

    metrics: of each suite.
    """
    suites = {suite: [env for env in members if env in envs] for suite, members in SUITES.items()}
    columns = []
    if all(suites.values()) and metrics["dcs"] == metrics["dmw"] == "eval/nmse":
        columns.append(Column("mean of both suites' means", "eval/nmse", "distractor", list(suites.values())))
    for suite, members in suites.items():
        word = metric_word(suite, metrics[suite])
        if len(members) > 1:
            columns.append(Column(f"mean of {suite.upper()}: {word}", metrics[suite], "distractor", [members]))
        columns += [Column(f"{env}: {word}", metrics[suite], "distractor", [[env]]) for env in members]
    return columns


def experiment_rows(context: Context, experiment: reproduce.Experiment) -> dict[str, dict[Any, Row]]:
    """The lines of an experiment's figure, and their points by the value of its flag, also others than the paper's;
    without a flag, one line with a point for each of the experiment's rows.
    """
    if not experiment.flag:
        return {"": {name: context.row(name, method) for name, method in experiment.rows.items()}}
    methods = dict(experiment.rows)
    if experiment.flag == LABELS:  # a decoder of the same run per value, and scripts of one's own
        values = {one["num_labels"] for run in context.finished for one in run.result.get("decoders", [])}
        own = {run.script for run in context.finished} & set(runs.method_scripts())
        methods |= {
            script: reproduce.Method(script) for script in sorted(own - {method.script for method in methods.values()})
        }
    else:
        argument = experiment.flag.removeprefix("--").replace("-", "_")
        scripts = {method.script for method in methods.values()}
        values = {run.args[argument] for run in context.finished if run.script in scripts and argument in run.args}
    lines: dict[str, dict[Any, Row]] = {line: {} for line in methods}
    for (line, method), value in itertools.product(methods.items(), sorted(values)):
        flags, budget = ((), value) if experiment.flag == LABELS else ((experiment.flag, str(value)), None)
        lines[line][value] = context.row(f"{line}, {value}", method, flags, budget)
    return lines


def experiment_figure(context: Context, name: str) -> Item:
    """NMSE, or the policy's score against labels, against what an experiment varies. A panel per task and mean."""
    experiment = reproduce.EXPERIMENTS[name]
    lines = experiment_rows(context, experiment)
    baselines = list(reproduce.METHODS)[:4] if name == "mask-dilation" else []
    dashed = [context.row(baseline, reproduce.METHODS[baseline]) for baseline in baselines]
    rows = [row for points in lines.values() for row in points.values()] + dashed
    report.mark_odd_data([row.cells for row in rows])

    item = Item(
        name.replace("-", "_"), experiment.title[:1].upper() + experiment.title[1:], "Sweeps", context.command(name)
    )
    flags = [f"{row}: {' '.join(method.flags)}. " for row, method in experiment.rows.items() if method.flags]
    item.text = f"Intervals: one standard deviation over seeds (n - 1). {''.join(flags)}"
    metrics = dict.fromkeys(SUITES, "eval/nmse")
    if experiment.flag == LABELS:
        metrics = {suite: score_metric(suite, rows) for suite in SUITES}
        item.text += f"LAOM-Labels' latent action model has seen the labels of the largest budget. {SCORE_WORDS}"
    envs = []  # with a line of two points
    for env in context.envs:
        counts = [sum(bool(row.cells[env, "distractor"].runs) for row in points.values()) for points in lines.values()]
        envs += [env] if max(counts) > 1 else []
    columns, panels = panel_columns(envs, metrics), []
    for column in columns:  # in a mean over tasks only points that each of them has
        stats = {row.name: stat for row in rows if (stat := row.stat(column, whole=True))}
        panel = Panel(column.head, {}, {row.name: stats[row.name].mean for row in dashed if row.name in stats})
        for line, points in lines.items():
            there = {x: stats[row.name] for x, row in points.items() if row.name in stats}
            panel.lines[line] = {x: (mean, mean - std, mean + std) for x, (mean, std) in there.items()}
        panels += [panel] if any(panel.lines.values()) else []
    if panels:
        names = None if experiment.flag else list(experiment.rows)
        item.pictures = [draw(context.out / f"{item.name}.png", panels, experiment.flag, names)]
    else:
        item.missing = (
            f"No task has finished runs of two values of {experiment.flag or 'its rows'} on the same data, under the "
            "experiment's own names, which runs with further flags or --variant do not have."
        )
    item.head = ["", *(column.head for column in columns)]
    for row in rows:
        item.add(row.name, [row.entry(column) for column in columns])
    return item


def learning_curves(context: Context) -> Item:
    """NMSE against samples, from the probes on the way (--probe-at) of all runs, also of those not finished yet."""
    item = Item("learning_curves", "NMSE against samples", "Sweeps", context.probed_command())
    item.text = (
        "Means over seeds; intervals: one standard deviation (n - 1). Dashed: the untrained control, of finished runs. "
        "Stars: the paper's numbers, at the samples that they took."
    )
    curves: dict[tuple[str, str, str], dict[int, list[float]]] = {}  # NMSE of every seed by samples
    for key, members in sorted(context.by_name.items()):
        values = collections.defaultdict(list)
        for run in members:
            try:
                lines = runs.read_metrics(run.dir)
            except OSError as error:
                item.missing += f"{describe(error)}. "
                continue
            for line in lines:
                if "lam/nmse" in line:
                    values[line["step"] * run.args["batch_size"]].append(line["lam/nmse"])
        data = {tuple(run.args.get(name) for name in ("train_hash", "test_hash", "mask_hash")) for run in members}
        if values and len(data) > 1:
            item.missing += f"{' '.join(key)}: its seeds saw different data. "
        elif values:
            curves[key] = values
    if not curves:
        item.missing = item.missing or "No run was probed on the way."
        return item
    common = set.intersection(*(set(variant.split("_")) for _, _, variant in curves))  # tells no line from another
    columns = sorted(set().union(*curves.values()))
    item.head = ["", "task", "untrained", *(short(samples) for samples in columns)]
    methods = {method.script: name for name, method in reproduce.METHODS.items() if not method.flags}
    panels: dict[tuple[str, str], Panel] = {}
    for (script, env, variant), values in curves.items():
        members = context.by_name[script, env, variant]
        render = "distractor" if members[0].args["distractors"] else "vanilla"
        panel = panels.setdefault((env, render), Panel(f"{env}: NMSE {WORDS[render]}", {}, log=True))
        name = " ".join([script, *(part for part in variant.split("_") if part not in common)])
        stats = {samples: report.stat(values[samples]) for samples in sorted(values)}
        panel.lines[name] = {samples: (mean, mean - std, mean + std) for samples, (mean, std) in stats.items()}
        cell = report.make_cell(members, context.args.seeds)
        control = cell.stat("eval/nmse_untrained")
        if control is not None:
            panel.dashed[name] = control.mean
        if script in methods:
            suite = get_task(env).suite
            samples = reproduce.parse(script, ("--env", env))[0].lam_epochs * PAPER["train_transitions"][suite]
            point = PAPER["nmse"][suite][render][methods[script]][env][0]
            panel.stars[f"{methods[script]}, paper"] = (round(samples), point)
        entries = [Entry(number(stats.get(samples))) for samples in columns]
        for samples, entry in zip(columns, entries):
            if 0 < len(values.get(samples, [])) < len(members):
                entry.notes.append(f"{len(values[samples])} of {len(members)} seeds")
        item.add(name, [Entry(env, cell.notes), number(control), *entries])
    item.pictures = [draw(context.out / "learning_curves.png", list(panels.values()), "samples")]
    return item


# ---------------------------------------------------------------------------------------------------------------------
# Pictures of what was learned


def umap_figure(context: Context, env: str) -> Item:
    """UMAP of held-out latent actions: a row per method, a column per action dimension that colours the points."""
    import umap

    command = context.command("main-table", "--env", env)
    item = Item(f"umap_{env}", f"UMAP of latent actions, {env}", "Latent space", command)
    item.text = f"Held-out transitions of the first seed; UMAP's seed is {UMAP_SEED}. Colour: the true action."
    latents = {}
    for name, run in context.first_runs(env).items():
        try:
            latents[name] = report.load_latents(run)
        except UserError as error:
            item.missing += f"{error}. "
    if not latents:
        item.missing = item.missing or f"No run on {env} with latents.npz."
        return item
    columns = min(DIMENSIONS, get_task(env).action_dim)
    figure, axes = pictures.panels(len(latents) * columns, columns, 1.9, 1.9)
    for line, (name, (z, action)) in enumerate(latents.items()):
        reducer = umap.UMAP(n_neighbors=min(15, len(z) - 1), random_state=UMAP_SEED, n_jobs=1)
        place, size = reducer.fit_transform(z), float(np.clip(6000 / len(z), 1, 12))
        for dimension, axis in enumerate(axes[line * columns : (line + 1) * columns]):
            dots = axis.scatter(*place.T, c=action[:, dimension], s=size, cmap="bwr", vmin=-1, vmax=1, lw=0)
            axis.set(xticks=[], yticks=[], facecolor="0.88")  # actions near zero are white
            axis.set_title(f"action {dimension}" if line == 0 else "", fontsize=9)
            axis.set_ylabel(pictures.label(name) if dimension == 0 else "", fontsize=7)
    figure.colorbar(dots, ax=axes, shrink=0.5, aspect=40)
    item.pictures = [pictures.save(figure, context.out / f"umap_{env}.png")]
    return item


def eigen_cam(activations: Tensor) -> Tensor:
    """Eigen-CAM (arXiv 2008.00299): activations (B, C, h, w), not negative, to saliency (B, h, w) in [0, 1].

    Each picture's activations, a matrix of places and channels, are projected on their first right singular vector. It
    is not negative where they are not, so its sign is known. A picture without activations has no saliency.
    """
    matrix = activations.double().flatten(2).transpose(1, 2)  # (B, h w, C)
    left, values, _ = torch.linalg.svd(matrix, full_matrices=False)
    saliency = (left[..., 0] * values[:, :1]).abs().view(len(matrix), *activations.shape[-2:])
    low, high = saliency.amin((1, 2), keepdim=True), saliency.amax((1, 2), keepdim=True)
    return ((saliency - low) / (high - low).clamp(min=1e-12)).to(activations.dtype)


def last_activations(model: Any, inputs: Tensor) -> Tensor:
    """What the last convolutional block gives that inference of latent actions runs, after the ReLU that follows it."""
    outputs: list[Tensor] = []

    def keep(module: nn.Module, inputs: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.dim() == 4:
            outputs.append(output)

    with nn.modules.module.register_module_forward_hook(keep), torch.inference_mode():
        model.infer(inputs)
    return F.relu(outputs[-1])


def heat(frames: Tensor, saliency: Tensor) -> np.ndarray:
    """Frames (B, 3, H, W) in [-1/2, 1/2] under a heat map (B, h, w) in [0, 1]: uint8 (B, H, W, 3)."""
    import matplotlib

    large = F.interpolate(saliency[:, None].float(), frames.shape[-2:], mode="bilinear", align_corners=False)[:, 0]
    colors = matplotlib.colormaps["jet"](large.clamp(0, 1).numpy())[..., :3]
    mixed = 0.5 * (frames.movedim(1, -1).numpy() + 0.5) + 0.5 * colors
    return (mixed.clip(0, 1) * 255).round().astype(np.uint8)


def strip_batch(dataset: Dataset, fields: set[str]) -> Batch:
    """Consecutive transitions of the first episode from `frame_shown` on, or the last that it has."""
    stop = dataset.episode_start[1] - 1
    index = np.arange(stop)[max(0, min(SHOWN, stop - STRIP)) :][:STRIP]
    return next(
        sequential(dataset, STRIP, max_offset=1, device=torch.device("cpu"), fields=tuple(fields), indices=index)
    )


def strip_figure(context: Context, item: Item, chosen: dict[str, Run], cam: bool = False) -> Item:
    """Rows of consecutive held-out transitions: the frames that the rows below are about, then a row per run.

    cam: Eigen-CAM of the IDM over the current frames; else the predicted next frames. What cannot be drawn is said in
    the item.
    """
    item.text += " The outline is the agent's mask. LAPO-Slots' model sees and predicts slots, which are no pictures."
    label, place = ("o(t)", 2) if cam else ("o(t+1)", 3)
    rows: dict[str, Tensor | np.ndarray] = {}
    above, masks = torch.empty(0), None
    for name, run in chosen.items():
        try:
            module, args, model = report.load_model(run)
            fields = set(module.input_fields(args))
            if "frames" not in fields:  # it sees no pictures
                continue
            args.data_dir = context.test_set(run).data_dir
            batch = strip_batch(module.open_split(args, "test"), fields | {"masks"})
        except UserError as error:
            item.missing += f"{name}: {error}. "
            continue
        inputs = module.model_inputs(batch, args)
        frames = inputs[:, place, :3]  # as the model sees them
        if cam:
            # A model that encodes the current and the later stack in one pass has the current ones first.
            images = heat(frames, eigen_cam(last_activations(model, inputs)[: len(frames)]))
        else:
            with torch.inference_mode():
                images = model(inputs)[0].float()
        if images.ndim != 4:  # it predicts no pictures
            continue
        if not torch.equal(frames, above):  # the first ones, or others than those above
            rows[f"{label}, {name}" if rows else label] = above = frames
        masks = unpack_masks(batch.masks, *frames.shape[-2:])[:, place] if masks is None else masks
        rows[name] = images
    if rows:
        item.pictures = [pictures.rows(context.out / f"{item.name}.png", rows, masks, item.title)]
    item.missing = item.missing or ("" if rows else "No finished runs for this.")
    return item


def strip_figures(context: Context, env: str) -> Iterator[Item]:
    """Eigen-CAM of the IDMs, next frames of the world models, and those under occlusion."""
    command, chosen = context.command("main-table", "--env", env), context.first_runs(env)
    item = Item(f"eigen_cam_{env}", f"Eigen-CAM of the IDM, {env}", "Latent space", command)
    item.text = (
        "Projection of the last convolutional block's output (after its ReLU) on its first singular vector, per frame; "
        "red is high. For LAOM-Labels: the encoder's, of the current stack."
    )
    yield strip_figure(context, item, chosen, cam=True)
    item = Item(f"world_model_{env}", f"World models, {env}", "World models", command)
    item.text = "LAOM-Labels predicts embeddings, which have no picture."
    yield strip_figure(context, item, chosen)
    occlusion, command = reproduce.EXPERIMENTS["occlusion"], context.command("occlusion", "--env", env)
    for line, points in experiment_rows(context, occlusion).items():
        members = {f"{share:.0%}": row.cells[env, "distractor"].runs for share, row in points.items()}
        chosen = {share: finished[0] for share, finished in members.items() if finished}
        if len(chosen) > 1 or env in occlusion.envs:
            item = Item(f"occlusion_{env}_{line.split()[0]}", f"Occlusion {line}, {env}", "World models", command)
            item.text = "Shares of the agent's box that are occluded."
            yield strip_figure(context, item, chosen)


def true_masks(dataset: Dataset, index: np.ndarray) -> Tensor:
    """Masks of frames, float32 (N, 1, H, W) of zeros and ones."""
    return unpack_masks(torch.from_numpy(dataset.masks(index)), dataset.image_size, dataset.image_size)


def in_white(masks: Tensor) -> np.ndarray:
    """Pictures of masks (N, 1, H, W): uint8 (N, H, W, 3)."""
    return (255 * masks.movedim(1, -1).expand(-1, -1, -1, 3)).byte().numpy()


def frame_shown(dataset: Dataset) -> int:
    """A frame of the first episode in which the agent moves."""
    return min(SHOWN, dataset.episode_start[1] - 1)


def task_figure(context: Context, item: Item, mask_source: str, images: Callable[[Dataset], list[np.ndarray]]) -> Item:
    """A row of pictures of every task that has runs, and data with such masks."""
    rows: dict[str, np.ndarray] = {}
    for env in context.envs:
        try:
            rows[env] = np.concatenate(images(context.some_test_set(env, mask_source)))
        except UserError as error:
            item.missing += f"{env}: {error}. "
    if rows:
        item.pictures = [pictures.rows(context.out / f"{item.name}.png", rows)]
    return item


def sam_figure(context: Context) -> Item:
    """The prompt and the masks of SAM of every task that has them."""
    command = shlex.join(["python", "make_masks.py", "--env", "all", *context.data_words()])
    item = Item("sam_masks", "Masks of SAM 2.1", "Masks", command)
    item.text = (
        f"From the left: an episode's first frame, the prompt (one box per task), the mask there; frame {SHOWN}, its "
        "mask. The tracker follows the agent from the first frame on."
    )

    def images(dataset: Dataset) -> list[np.ndarray]:
        index, size = np.array([0, frame_shown(dataset)]), dataset.image_size
        frames, masks = dataset.frames(index), in_white(true_masks(dataset, index))
        x0, y0, x1, y1 = (round(edge) for edge in get_task(dataset.env).scaled_box(size))
        box = np.zeros((1, size, size), bool)
        box[:, y0:y1, x0:x1] = True
        prompt = pictures.outline(frames[:1], box, 1, pictures.TRUTH)
        return [frames[:1], prompt, masks[:1], frames[1:], masks[1:]]

    return task_figure(context, item, "sam", images)


def environment_figure(context: Context) -> Item:
    """A held-out frame of every task that has data: clean, with distractors, and the agent's mask."""
    item = Item("environments", "Environments", "Masks", "python make_dataset.py --env all")
    item.text = "From the left: the clean render, the same state with distractors, and the agent's mask there."

    def images(dataset: Dataset) -> list[np.ndarray]:
        renders = [Dataset(dataset.data_dir, dataset.env, "test", render) for render in ("clean", "distractor")]
        index = np.array([frame_shown(dataset)])
        return [*(render.frames(index) for render in renders), in_white(true_masks(renders[1], index))]

    return task_figure(context, item, "gt", images)


def dilation_figure(context: Context, env: str) -> Item:
    """A frame and its mask, grown and shrunk by 0 to 3 pixels as MaskLAM does."""
    item = Item(f"mask_dilation_masks_{env}", f"Grown and shrunk masks, {env}", "Masks", "python make_figures.py")
    try:
        dataset = context.some_test_set(env, "gt")
    except UserError as error:
        item.missing = str(error)
        return item
    index = np.array([frame_shown(dataset)])
    mask = true_masks(dataset, index)[None]  # dilate's are (B, F, 1, H, W)
    rows = {}
    for label, sign in (("dilation", 1), ("erosion", -1)):
        masks = [in_white(dilate(mask, sign * pixels)[0]) for pixels in range(4)]
        rows[label] = np.concatenate([dataset.frames(index), *masks])
    item.pictures = [pictures.rows(context.out / f"{item.name}.png", rows)]
    item.text = "o(t), then its mask, grown (above) or shrunk by 0, 1, 2, 3 pixels."
    item.text += " mIoU with the true masks over held-out frames:"
    truth = true_masks(dataset, dataset.transitions[:: max(1, dataset.num_transitions // 200)])[None]
    for pixels in reproduce.EXPERIMENTS["mask-dilation"].values:
        changed = dilate(truth, pixels)
        both, either = (truth * changed).sum((2, 3, 4)), torch.maximum(truth, changed).sum((2, 3, 4))
        item.text += f" {pixels:+d}: {(both / either.clamp(min=1)).mean():.3f};"
    return item


def own_pictures(context: Context, env: str) -> Iterator[Item]:
    """What methods draw of themselves at the end of a run, of every seed: LAOF's flow, LAPO-Slots' slots."""
    command = context.command("main-table", "--env", env)
    for row, name in itertools.product(context.main, ("flow", "slots")):
        members = [run for run in row.cells[env, "distractor"].runs if os.access(run.dir / f"{name}.png", os.R_OK)]
        if members:
            item = Item(f"{name}_{env}", f"{row.name}: {name}, {env}", "Baselines", command)
            item.text = f"Seeds {', '.join(str(run.seed) for run in members)}."
            item.pictures = [run.dir / f"{name}.png" for run in members]
            yield item


# ---------------------------------------------------------------------------------------------------------------------


COMPARED = {
    "eval/nmse": ("NMSE", "{:.3f}"),
    "eval/nmse_untrained": ("untrained", "{:.3f}"),
    "eval/return": ("return", "{:.1f}"),
    "eval/success_rate": ("success", "{:.2f}"),
    "eval/normalised_paper": ("of the paper's expert", "{:.1%}"),
    "eval/open_loop_policy": ("open-loop error", "{:.3f}"),
    "eval/open_loop_mean_action": ("of the mean action", "{:.3f}"),
    "eval/open_loop_previous_action": ("of the previous action", "{:.3f}"),
    "eval/open_loop_ridge": ("of ridge regression", "{:.3f}"),
}


def compare(run_dirs: list[Path]) -> str:
    """A small table of runs: NMSE with its untrained control, return, success rate, seconds; and where pictures are."""
    members = [report.read_run(run_dir) for run_dir in run_dirs]
    for run in members:
        if run.result is None:
            raise UserError(f"{run.dir} is not finished: rerun its command")
    stages = list(dict.fromkeys(stage for run in members for stage in run.result["seconds"]))
    shown = {name: form for name, form in COMPARED.items() if any(name in run.result["metrics"] for run in members)}
    heads = [head for head, _ in shown.values()]
    item = Item("", head=["method", "env", "variant", "seed", *heads, *(f"{stage} s" for stage in stages)])
    seeds = collections.defaultdict(list)
    for run in members:
        metrics, seconds = run.result["metrics"], run.result["seconds"]
        values = [(metrics.get(name), form) for name, (_, form) in shown.items()]
        values += [(seconds.get(stage), "{:.0f}") for stage in stages]
        texts = ["-" if value is None else form.format(value) for value, form in values]
        item.add(run.script, [run.env, run.variant, str(run.seed), *texts])
        if "eval/nmse" in metrics:
            data = tuple(run.args.get(f"{name}_hash") for name in ("train", "test", "mask"))
            seeds[f"{run.script} {run.env} {run.variant}", data].append((run.seed, metrics["eval/nmse"]))
    lines = [item.markdown()]
    for (name, _), values in seeds.items():
        if 1 < len(values) == len({seed for seed, _ in values}):  # else they differ in something else
            lines.append(f"{name}: NMSE {number(report.stat([nmse for _, nmse in values]))} over {len(values)} seeds")
    return "\n".join([*lines, *(picture for run in members for picture in run.result.get("pictures", []))])


def figures(context: Context, envs: list[str]) -> Iterator[Item]:
    """Everything on the page, one after the other. envs: tasks of the pictures."""
    yield from score_tables(context)
    for table in (interval_figure, cost_table, compute_table, expert_table):
        yield table(context)
    for experiment in list(reproduce.EXPERIMENTS)[1:]:
        yield experiment_figure(context, experiment)
    yield learning_curves(context)
    for env in envs:
        yield umap_figure(context, env)
        yield from strip_figures(context, env)
        yield from own_pictures(context, env)
        yield dilation_figure(context, env)
    yield environment_figure(context)
    yield sam_figure(context)


def main(args: Args) -> None:
    if args.compare is not None:
        if not args.compare:
            raise UserError("--compare needs directories of finished runs, as .../seed1")
        print(compare(args.compare))
        return
    all_runs, problems = report.find_runs(args.runs_dir)
    for problem in problems:
        print(f"left out: {problem}")
    # Runs on recorded videos have no place in the paper's tables; --compare shows them.
    all_runs = [run for run in all_runs if run.env in TASKS]
    members = [run for run in all_runs if bool(run.args.get("quick")) == args.quick]
    scale = "with --quick" if args.quick else "at the paper's scale"
    if not members:
        other = f"; there are {len(all_runs)} {'without' if args.quick else 'with'} --quick" if all_runs else ""
        command = f"python reproduce.py main-table --env cheetah-run{' --quick' if args.quick else ''}"
        raise UserError(f"{args.runs_dir}: no runs {scale}{other}. Start with: {command}")
    context = Context(args, members)
    print(f"{len(members)} runs, {len(context.finished)} finished")
    usual = [env for env in ("cheetah-run", "push") if env in context.envs] or context.envs[:1]
    envs = [get_task(env).name for env in args.env] or usual
    items = []
    for item in figures(context, envs):
        items.append(item)
        print(
            item.title + (f"; missing: {item.missing.strip()}\n    {item.command}" if item.missing else ""), flush=True
        )
        if item.rows:
            item.write(args.out)
        if stop_requested():
            raise Stopped("what is drawn stays; rerun the same command to draw everything again")
    about = f"{len(context.finished)} finished runs of {len(members)} in {args.runs_dir}, {scale}, {args.seeds} seeds "
    about += (
        f"asked for; commits: {', '.join(sorted(set().union(*(run.commits for run in context.finished)))) or 'none'}. "
    )
    path = report.page(args.out / "index.html", "MaskLAM: tables and figures", about + " ".join(problems), items)
    missing = sum(bool(item.missing) for item in items)
    print(f"{len(items) - missing} tables and figures, {missing} with something missing: {path}")


if __name__ == "__main__":
    cli(main, Args())
