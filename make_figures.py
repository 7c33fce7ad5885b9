"""Tables and figures of the paper from finished runs, and one page with all of them.

    python make_figures.py                      # runs/ to figures/, the paper's scale
    python make_figures.py --quick --seeds 2    # from runs with --quick

Writes PNGs, tables as Markdown and LaTeX too, and figures/index.html, which needs nothing else. What cannot be drawn is
listed there with the command that makes what it needs; runs come from python -m benchmarks.paper or from the scripts.
"""

from __future__ import annotations

import collections
import itertools
import json
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import paper
from common import pictures, results, runs
from common.dataset import Batch, Dataset, normalise, sequential, unpack_masks
from common.errors import UserError
from common.report import Entry, Item, Table, number, page
from common.results import Cell, Finished, Run, Stat, average, iqm_interval, load_model
from common.tasks import get_task

SUITES = {"dcs": paper.DCS, "dmw": paper.DMW}
NAMES = {"dcs": "Distracting Control Suite", "dmw": "Distracting Meta-World"}
RENDERS = {"vanilla": {"distractors": False}, "distractor": {}}  # the paper's words, and the arguments that make them
COLORS = dict(zip(paper.METHODS, ("tab:orange", "tab:green", "tab:purple", "tab:brown", "tab:blue", "tab:cyan")))
STRIP = 10  # consecutive frames in a strip
DIMENSIONS = 8  # of the action that the UMAP figure shows at most


@dataclass
class Args:
    runs_dir: Path = Path("runs")
    """folder of the run directories"""
    out: Path = Path("figures")
    """folder of the tables, figures and index.html"""
    quick: bool = False
    """take the runs that were made with --quick"""
    seeds: int = 3
    """seeds that a cell of a table should have; fewer get a mark"""
    set: list[str] = field(default_factory=list)
    """the flags that benchmarks.paper was given with --set: what the runs should have besides the paper's settings"""
    data_dir: Path | None = None
    """folder of the data sets; None: where each run had them"""
    env: list[str] = field(default_factory=list)
    """tasks of the pictures; none: cheetah-run and push, or the first of each suite that has runs"""
    umap_seed: int = 0
    """seed of UMAP"""
    bootstrap: int = 10_000
    """resamples of the bootstrap behind the 95% intervals"""


@dataclass
class Context:
    """What every figure needs: the runs, where to write, and how to repeat the command."""

    finished: Finished
    out: Path
    args: Args
    rows: dict[tuple[str, str], dict[str, Cell]] = field(default_factory=dict)

    def experiment(self, name: str, *more: str) -> str:
        """The command that makes the runs of an experiment, at this scale."""
        words = ["python", "-m", "benchmarks.paper", name, *more, *(["--quick"] if self.args.quick else [])]
        words += ["--seeds", str(self.args.seeds)] if self.args.seeds != 3 else []
        words += ["--set", *self.args.set] if self.args.set else []
        words += ["--runs-dir", str(self.args.runs_dir)] if self.args.runs_dir != Path("runs") else []
        folders = collections.Counter(str(run.args.get("data_dir", "data")) for run in self.finished.runs)
        folder = str(self.args.data_dir or folders.most_common(1)[0][0])
        words += ["--data-dir", folder] if folder != "data" else []
        return shlex.join(words)

    def cell(self, method: str, env: str, held: int | None = None, **factors: Any) -> Cell:
        """The runs of a row of the main table on a task, with further arguments.

        held: labels of the runs that they should have their latent action model from; None: they trained their own.
        """
        script, own, paper_scale = paper.METHODS[method]
        flags = [] if self.finished.quick else paper_scale
        flags = [*flags, *paper.known_flags(self.args.set, script), *own]
        values = changed_by(script, env, self.finished.quick, tuple(flags)) | factors
        wanted = {key: value for key, value in values.items() if key in results.FACTORS}
        usual = {key: value for key, value in values.items() if key not in results.FACTORS}
        if held is not None:
            usual["lam_from"] = held
        return self.finished.cell(script, env, wanted, usual)

    def row_cells(self, env: str, render: str) -> dict[str, Cell]:
        """The main table's cells of a task: one per row. Those on other data than the others are marked."""
        if (env, render) not in self.rows:
            cells = {method: self.cell(method, env, **RENDERS[render]) for method in paper.METHODS}
            results.mark_odd_data(cells.values())
            self.rows[env, render] = cells
        return self.rows[env, render]

    def tasks(self, suite: str) -> list[str]:
        """The suite's tasks that have runs."""
        there = self.finished.envs()
        return [env for env in SUITES[suite] if env in there]

    def test_set(self, run: Run, mask_source: str | None = "gt") -> Dataset:
        """The held-out split that a run was tested on. UserError if it is not there any more."""
        folder = self.args.data_dir or Path(run.args["data_dir"])
        render = "distractor" if run.args["distractors"] else "clean"
        dataset = Dataset(folder, run.env, "test", render, mask_source)
        if dataset.hash != run.args["test_hash"]:
            raise UserError(f"{dataset.folder} is not the data that {run.dir} was tested on; name it with --data-dir")
        return dataset


def changed_by(script: str, env: str, quick: bool, flags: tuple[str, ...]) -> dict[str, Any]:
    """The arguments that flags of a method script change, of those that decide the numbers."""
    parsed, _ = paper.parse(script, ("--env", env, *(["--quick"] if quick else []), *flags))
    base, values = results.script_defaults(script, env, quick), runs.jsonable(parsed)
    return {key: value for key, value in values.items() if base[key] != value and key not in runs.RUNTIME_FIELDS}


RAW = {"dcs": "eval/return", "dmw": "eval/success_rate"}


def score_name(suite: str, members: list[Run]) -> str:
    """The score by which these runs can be compared: relative to the paper's expert, or to the data's if episodes were
    shorter (what more of them have); as it is, if no run has either.
    """
    found = [run.result["metrics"] for run in members if get_task(run.env).suite == suite]
    counts = {
        name: sum(metrics.get(name) is not None for metrics in found)
        for name in ("eval/normalised_paper", "eval/normalised_dataset")
    }
    best = max(counts, key=lambda name: counts[name])  # the first of equals
    return best if counts[best] else RAW[suite]


def score_label(suite: str, members: list[Run]) -> str:
    """What an axis says about it."""
    word = "return" if suite == "dcs" else "success rate"
    whose = {"eval/normalised_paper": " / the paper's expert's", "eval/normalised_dataset": " / the data's expert's"}
    return word + whose.get(score_name(suite, members), ", short episodes")


# ---------------------------------------------------------------------------------------------------------------------
# Tables


def published(kind: str, suite: str, render: str, method: str, envs: list[str]) -> Stat | None:
    """The paper's mean over tasks of one of its tables, and the mean of its deviations. kind: nmse or return."""
    numbers = json.loads(paper.NUMBERS.read_text())[kind][suite][render][method]
    return average([Stat(numbers[env][0], numbers[env][1], ()) for env in envs])


def suite_tasks(context: Context, method: str, suite: str, render: str, metric: str) -> list[str]:
    """The tasks of a suite over which our mean of a metric goes: those with a value that may be averaged."""
    return [e for e in context.tasks(suite) if context.row_cells(e, render)[method].stat(metric) is not None]


def suite_entry(context: Context, method: str, suite: str, render: str, metric: str, digits: int = 4) -> Entry:
    """Our mean over a suite's tasks, as the paper aggregates, with the notes of all cells."""
    by_note: dict[str, list[str]] = {}
    for env in context.tasks(suite):
        cell = context.row_cells(env, render)[method]
        for note in cell.notes if cell.values(metric) else []:
            by_note.setdefault(note, []).append(env)
    envs = suite_tasks(context, method, suite, render, metric)
    if not envs and not by_note:
        return Entry("-")
    everywhere = len(context.tasks(suite))
    notes = [note if len(those) == everywhere else f"{note} ({', '.join(those)})" for note, those in by_note.items()]
    if len(envs) < len(SUITES[suite]):
        notes.insert(0, f"over {len(envs)} of {len(SUITES[suite])} tasks")
    value = average([context.row_cells(env, render)[method].stat(metric) for env in envs])
    return Entry(number(value, digits), notes)


def embolden(rows: list[list[Entry]], column: int, lowest: bool, over: list[list[str]] | None = None) -> None:
    """Sets the best of a column of ``mean ± deviation`` in bold, if there are at least two and all mean the same tasks.

    over: the tasks behind each row's mean.
    """
    values = [(float(row[column].text.split()[0]), row) for row in rows if row[column].text[:1].isdigit()]
    if len(values) < 2 or (over is not None and len({tuple(envs) for envs in over if envs}) > 1):
        return
    best = (min if lowest else max)(value for value, _ in values)
    for value, row in values:
        row[column].bold = value == best


def both_suites(one: Entry, other: Entry, stats: list[Stat | None]) -> Entry:
    """The paper's single number: the mean of the two suites' aggregates."""
    if None in stats:
        return Entry("-")
    return Entry(number(average(stats)), list(dict.fromkeys([*one.notes, *other.notes])))


def aggregate_table(context: Context) -> Item:
    """The paper's main table: each suite, clean and with distractors, NMSE and normalised score; ours beside its."""
    columns = [
        (suite, kind, render) for suite in SUITES for kind in ("nmse", "return") for render in ("vanilla", "distractor")
    ]
    words = {"vanilla": "clean", "distractor": "distr."}
    head = ["method"]
    for suite, kind, render in columns:
        score = "NR" if suite == "dcs" else "NSR"
        head.append(f"{suite.upper()} {'NMSE' if kind == 'nmse' else score} {words[render]}")
    head += [f"both NMSE {words[render]}" for render in RENDERS]
    table = Table("Latent action quality and behaviour cloning", head)
    kinds = [
        ("", {"nmse": "eval/nmse", "return": "eval/normalised_paper"}),
        (", untrained", {"nmse": "eval/nmse_untrained"}),
        (", data's expert", {"return": "eval/normalised_dataset"}),
    ]
    ours_rows: list[list[Entry]] = []
    over: dict[tuple[str, int], list[str]] = {}
    for method in paper.METHODS:
        for name, metrics in kinds:
            row = [Entry(method + name, beside=bool(name))]
            for suite, kind, render in columns:
                row.append(Entry("-"))
                if kind in metrics:
                    row[-1] = suite_entry(context, method, suite, render, metrics[kind])
            for render in RENDERS:
                places = [1 + columns.index((suite, "nmse", render)) for suite in SUITES]
                stats = [
                    average(
                        [
                            context.row_cells(env, render)[method].stat(metrics["nmse"])
                            for env in suite_tasks(context, method, suite, render, metrics["nmse"])
                        ]
                    )
                    for suite in (SUITES if "nmse" in metrics else ())
                ]
                row.append(both_suites(*(row[place] for place in places), stats or [None]))
            if name == "" or any(entry.text != "-" for entry in row[1:]):
                table.rows.append(row)
            if name == "":
                ours_rows.append(row)
        row, stats = [Entry(f"{method}, paper", beside=True)], {}
        for column, (suite, kind, render) in enumerate(columns, 1):
            envs = suite_tasks(context, method, suite, render, kinds[0][1][kind])
            over[method, column] = envs
            envs = envs or SUITES[suite]
            notes = [] if len(envs) == len(SUITES[suite]) else ["the paper's mean over the same tasks as ours"]
            stats[suite, kind, render] = published(kind, suite, render, method, envs)
            row.append(Entry(number(stats[suite, kind, render]), notes))
        for render in RENDERS:
            places = [1 + columns.index((suite, "nmse", render)) for suite in SUITES]
            parts = [stats[suite, "nmse", render] for suite in SUITES]
            notes = row
            if any(not over[method, place] for place in places):  # ours has no such number: the paper's over all tasks
                parts = [published("nmse", suite, render, method, SUITES[suite]) for suite in SUITES]
                notes = [Entry("")] * len(row)
            row.append(both_suites(*(notes[place] for place in places), parts))
        table.rows.append(row)
    for column, (_, kind, _) in enumerate(columns, 1):
        embolden(ours_rows, column, kind == "nmse", [over[method, column] for method in paper.METHODS])
    table.caption = (
        "Mean over tasks of means over seeds ± mean of standard deviations over seeds (n - 1); both: mean of the two "
        "suites. NMSE: error of a linear probe, lower is better; untrained: the same probe before training. NR, NSR: "
        "return and success rate relative to the paper's expert, or to the data's; only of whole episodes. Bold: best "
        "of ours."
    )
    table.write(context.out, "aggregate")
    return Item("aggregate", "Main table", "Tables", context.experiment("main-table"), table=table)


def task_table(context: Context, kind: str, suite: str, render: str) -> tuple[Table, bool]:
    """NMSE or normalised score of every task of a suite, and whether there are any runs. kind: nmse or return."""
    envs, metric = SUITES[suite], "eval/nmse" if kind == "nmse" else "eval/normalised_paper"
    word = {"nmse": "NMSE", "return": "normalised return" if suite == "dcs" else "normalised success rate"}[kind]
    where = "with distractors" if render == "distractor" else "clean"
    table = Table(f"{NAMES[suite]}, {where}: {word}", ["method", *envs])
    table.caption = "Mean ± standard deviation (n - 1) over seeds."
    beside = [("untrained", "eval/nmse_untrained")] if kind == "nmse" else []
    beside += [("data's expert", "eval/normalised_dataset")] if kind == "return" else []
    ours_rows, any_runs = [], False
    for method in paper.METHODS:
        cells = [context.row_cells(env, render)[method] for env in envs]
        any_runs |= any(cell.runs for cell in cells)
        ours_rows.append([Entry(method), *(cell_entry(cell, metric) for cell in cells)])
        table.rows.append(ours_rows[-1])
        for name, other in beside:
            if any(cell.values(other) for cell in cells):
                values = [Entry(number(cell.stat(other))) for cell in cells]
                table.rows.append([Entry(f"{method}, {name}", beside=True), *values])
        numbers = [Entry(number(published(kind, suite, render, method, [env]))) for env in envs]
        table.rows.append([Entry(f"{method}, paper", beside=True), *numbers])
    for column in range(1, len(envs) + 1):
        embolden(ours_rows, column, lowest=kind == "nmse")
    return table, any_runs


def task_tables(context: Context) -> list[Item]:
    """NMSE and normalised score of every task: one table per suite, render and metric."""
    items = []
    for kind, suite, render in itertools.product(("nmse", "return"), SUITES, ("distractor", "vanilla")):
        table, any_runs = task_table(context, kind, suite, render)
        name, command = f"{kind}_{suite}_{render}", context.experiment("main-table", "--env", *SUITES[suite])
        table.write(context.out, name)
        item = Item(name, table.title, "Tables", command, table=table)
        item.missing = "" if any_runs else "No runs of these tasks yet: only the paper's numbers."
        items.append(item)
    return items


def cell_entry(cell: Cell, metric: str, digits: int = 4) -> Entry:
    """A cell's mean and deviation with its notes; values of different data sets beside each other, never averaged."""
    if cell.mixed:
        return Entry(" / ".join(f"{value:.{digits}f}" for value in cell.values(metric)) or "-", list(cell.notes))
    value = cell.stat(metric)
    return Entry(number(value, digits), list(cell.notes) if value is not None or not cell.runs else [])


def interval_figure(context: Context) -> Item:
    """Interquartile means over tasks and seeds with stratified bootstrap 95% intervals, per suite and render."""
    panels = [(suite, kind) for suite in SUITES if context.tasks(suite) for kind in ("nmse", "score")]
    members = {
        suite: [
            run
            for env in context.tasks(suite)
            for render in RENDERS
            for cell in context.row_cells(env, render).values()
            for run in cell.runs
        ]
        for suite in SUITES
    }
    table = Table("Interquartile means and 95% intervals", ["method", "suite", "setting", "NMSE", "normalised score"])
    figure, axes = new_figure(len(panels), 2, 2.6)
    drawn: dict[tuple[str, str, str, str], Any] = {}
    for suite in SUITES:
        for render in RENDERS:
            for method in paper.METHODS:
                cells = [context.row_cells(env, render)[method] for env in context.tasks(suite)]
                cells = [cell for cell in cells if cell.runs and not cell.mixed]
                if not cells:
                    continue
                row = [Entry(method), Entry(suite.upper()), Entry("clean" if render == "vanilla" else "distractors")]
                for kind in ("nmse", "score"):
                    metric = "eval/nmse" if kind == "nmse" else score_name(suite, members[suite])
                    values = [cell.values(metric) for cell in cells if cell.values(metric)]
                    found = iqm_interval(values, context.args.bootstrap)
                    drawn[suite, render, method, kind] = found
                    unit = [] if metric.endswith(("nmse", "paper")) else [score_label(suite, members[suite])]
                    few = unit + [f"over {len(values)} of {len(SUITES[suite])} tasks"] * (
                        len(values) < len(SUITES[suite])
                    )
                    if found is None:
                        row.append(Entry("-"))
                    elif np.isnan(found[1]):
                        row.append(Entry(f"{found[0]:.4f}", [*few, "no interval: a task has a single run"]))
                    else:
                        row.append(Entry(f"{found[0]:.4f} [{found[1]:.4f}, {found[2]:.4f}]", few))
                row[0].notes = list(dict.fromkeys(note for cell in cells for note in cell.notes))
                table.rows.append(row)
    for axis, (suite, kind) in zip(axes, panels):
        for place, method in enumerate(reversed(paper.METHODS)):
            for render, marker, shift in (("vanilla", "o", 0.15), ("distractor", "s", -0.15)):
                found = drawn.get((suite, render, method, kind))
                if found is None:
                    continue
                point, low, high = found
                axis.plot([low, high], [place + shift] * 2, color=COLORS[method], lw=2)
                axis.plot(
                    point, place + shift, marker, color=COLORS[method], mfc="white" if render == "vanilla" else None
                )
        axis.set_yticks(range(len(paper.METHODS)), list(reversed(paper.METHODS)))
        axis.set_ylim(-0.5, len(paper.METHODS) - 0.5)
        axis.set_title(
            f"{suite.upper()}: {'NMSE' if kind == 'nmse' else score_label(suite, members[suite])}", fontsize=10
        )
        axis.grid(alpha=0.3)
    table.caption = (
        "Mean of the middle half of all runs; each task's runs are drawn anew among themselves "
        f"({context.args.bootstrap:,} resamples, percentiles)."
    )
    item = Item("iqm", table.title, "Tables", context.experiment("main-table"))
    if not table.rows:
        item.missing = "No finished runs of the main table that may be averaged."
        return item
    item.text, item.table = "Hollow circles: clean. Squares: with distractors.", table
    item.pictures = [save(figure, context.out / "iqm.png")]
    table.write(context.out, "iqm_table")
    return item


def cost_table(context: Context) -> Item:
    """Hours, memory and speed of whole runs, per method and suite, beside the paper's hours."""
    published_hours = json.loads(paper.NUMBERS.read_text())["wall_clock_hours_a100"]
    stages = ["slots", "lam", "bc", "decoder", "rest"]
    head = ["method", "suite", "machine", "runs", "hours", *stages, "peak GiB", "samples/s of lam", "paper, A100 hours"]
    table = Table("Wall-clock time and memory per run", head)
    for method, suite in itertools.product(paper.METHODS, SUITES):
        cells = [context.row_cells(env, render)[method] for env in context.tasks(suite) for render in RENDERS]
        notes = list(dict.fromkeys(note for cell in cells for note in cell.notes if cell.runs))
        whole = [run for cell in cells for run in cell.runs if "lam_from" not in run.result]
        by_machine: dict[str, list[Run]] = {}
        for run in whole:
            machine = run.result["machine"].get("gpu") or run.result["machine"]["cpu"]
            by_machine.setdefault(machine, []).append(run)
        for machine, found in by_machine.items():
            hours = {name: [run.result["seconds"].get(name, 0.0) / 3600 for run in found] for name in stages[:-1]}
            total = [sum(run.result["seconds"].values()) / 3600 for run in found]
            hours["rest"] = [whole - sum(parts) for whole, parts in zip(total, zip(*hours.values()))]
            speed = [run.result["stages"]["lam"]["samples_per_s"] for run in found]
            memory = max(run.result["peak_memory_gib"] for run in found)
            name = "MaskLAM" if method.startswith("MaskLAM") else method
            row = [Entry(method, notes), Entry(suite.upper()), Entry(machine), Entry(str(len(found)))]
            row += [Entry(f"{np.mean(values):.2f}") for values in (total, *hours.values())]
            row += [
                Entry(f"{memory:.1f}"),
                Entry(f"{np.mean(speed):.0f}"),
                Entry(f"{published_hours[name][suite]:.1f}"),
            ]
            table.rows.append(row)
    table.caption = (
        "Means over runs, hours of one process. Memory: the largest peak, of the GPU, or of the process without one. "
        "rest: labels, features, probe, rollouts, and flow or DINOv2's features where the run computed them."
    )
    item = Item("cost", table.title, "Tables", context.experiment("main-table"), table=table)
    if table.rows:
        table.write(context.out, "cost")
    else:
        item.table, item.missing = None, "No finished runs of the main table."
    return item


# ---------------------------------------------------------------------------------------------------------------------
# Curves and bars


def new_figure(count: int, columns: int, height: float = 2.8) -> tuple[Any, list[Any]]:
    """A figure with `count` panels in rows of `columns`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    count = max(count, 1)
    columns = min(columns, count)
    lines = -(-count // columns)
    size = (4.2 * columns, height * lines + 0.3)
    figure, axes = plt.subplots(lines, columns, figsize=size, squeeze=False, layout="constrained")
    for axis in axes.flat[count:]:
        axis.set_visible(False)
    return figure, list(axes.flat[:count])


def save(figure: Any, path: Path) -> Path:
    """Writes a figure as PNG and forgets it."""
    from matplotlib import pyplot as plt

    with runs.atomic_path(path) as temporary:
        figure.savefig(temporary, dpi=130)
    plt.close(figure)
    return path


Points = dict[float, Cell]  # value of the swept argument to its cell


def panels_of(context: Context, envs: list[str]) -> list[tuple[str, list[str]]]:
    """Titles and tasks of panels: the mean of each suite that has several tasks, then every task."""
    found = []
    for suite in SUITES:
        there = [env for env in SUITES[suite] if env in envs]
        if len(there) > 1:
            found.append((f"{suite.upper()}, mean of {len(there)} tasks", there))
    return found + [(env, [env]) for env in envs]


def swept(context: Context, methods: dict[str, tuple[str, dict[str, Any]]], env: str, factor: str) -> dict[str, Points]:
    """For each line, the cells of every value of `factor` that has finished runs. methods: line to row and factors."""
    found: dict[str, Points] = {}
    for line, (method, factors) in methods.items():
        script = paper.METHODS[method][0]
        values = {run.args[factor] for run in context.finished.select(script, env) if factor in run.args}
        usual = changed_by(script, env, context.finished.quick, tuple(paper.known_flags(context.args.set, script)))
        usual = usual.get(factor, results.script_defaults(script, env, context.finished.quick).get(factor))
        cells = {}
        for value in sorted(values):  # the decoder's labels alone change while the model is held fixed
            held = usual if factor == "num_labels" and value != usual else None
            cells[value] = context.cell(method, env, held, **factors, **{factor: value})
        found[line] = {value: cell for value, cell in cells.items() if cell.runs}
    return found


def sweep_figure(
    context: Context,
    name: str,
    factor: str,
    methods: dict[str, tuple[str, dict[str, Any]]],
    *,
    title: str,
    label: str,
    metric: str | None = "eval/nmse",
    log: bool = False,
    dashed: tuple[str, ...] = (),
    text: str = "",
) -> Item:
    """A metric against an argument, a line per method or loss with a band of one standard deviation, a panel per task.

    dashed: rows of the main table that are drawn as horizontal lines. metric: None is the suite's normalised score.
    """

    def read(env: str) -> str:
        return metric or score_name(get_task(env).suite, members)

    envs = [env for suite in SUITES for env in context.tasks(suite)]
    by_env = {env: swept(context, methods, env, factor) for env in envs}
    by_env = {env: lines for env, lines in by_env.items() if any(len(points) > 1 for points in lines.values())}
    baselines = {env: {method: context.cell(method, env) for method in dashed} for env in by_env}
    for env, lines in by_env.items():
        cells = [cell for points in lines.values() for cell in points.values()]
        results.mark_odd_data(cells + list(baselines[env].values()))
    members = [run for lines in by_env.values() for points in lines.values() for c in points.values() for run in c.runs]
    more = [] if not context.args.env else ["--env", *context.args.env]
    item = Item(name, title, "Sweeps", context.experiment(name.replace("_", "-"), *more), text)
    if not by_env:
        item.missing = f"No task has finished runs with two values of --{factor.replace('_', '-')}."
        return item
    panels = panels_of(context, list(by_env))
    figure, axes = new_figure(len(panels), 3)
    table = Table(title, ["task", "line", "value", "mean ± std"])
    colors = dict(zip(methods, ("tab:blue", "tab:orange"))) if len(methods) < 3 else COLORS
    for axis, (panel, tasks) in zip(axes, panels):
        for line in methods:
            points = [by_env[env][line] for env in tasks]
            common = sorted(set.intersection(*(set(found) for found in points)))
            drawn = []
            for x in common:  # where every task of the panel has a value
                stats = [found[x].stat(read(env)) for env, found in zip(tasks, points)]
                if None not in stats:
                    drawn.append((x, average(stats)))
            if not drawn:
                continue
            x = np.array([value for value, _ in drawn], float)
            mean = np.array([value.mean for _, value in drawn])
            std = np.array([np.nan if value.std is None else value.std for _, value in drawn])  # no band for one seed
            axis.plot(x, mean, marker="o", color=colors[line], label=line)
            axis.fill_between(x, mean - std, mean + std, color=colors[line], alpha=0.2, lw=0)
        for method in dashed:
            stats = [baselines[env][method].stat(read(env)) for env in tasks]
            if None not in stats:
                axis.axhline(average(stats).mean, color=COLORS[method], ls="--", label=method)
        if log:
            axis.set_xscale("log", base=2)
            ticks = sorted({x for env in tasks for points in by_env[env].values() for x in points})
            axis.set_xticks(ticks, [f"{t // 1000}k" if t >= 2000 else str(t) for t in map(int, ticks)], minor=False)
        axis.set(title=panel, xlabel=label)
        axis.grid(alpha=0.3)
        axis.set_ylabel("NMSE" if metric else score_label(get_task(tasks[0]).suite, members))
    handles = {text: handle for axis in axes for handle, text in zip(*axis.get_legend_handles_labels())}
    axes[0].legend(handles.values(), handles.keys(), fontsize=7)
    for env, lines in by_env.items():
        for line, points in lines.items():
            for x, cell in points.items():
                table.rows.append([Entry(env), Entry(line), Entry(f"{x:g}"), cell_entry(cell, read(env))])
        for method, cell in baselines[env].items():
            if cell.runs:
                table.rows.append([Entry(env), Entry(method), Entry("dashed"), cell_entry(cell, read(env))])
    item.pictures = [save(figure, context.out / f"{name}.png")]
    table.write(context.out, f"{name}_table")
    item.table = table
    return item


def sweep_figures(context: Context) -> list[Item]:
    """Label budget, latent dimension, occlusion, mask dilation."""
    losses = {
        line: ("MaskLAM@GT", {"loss_mask": not flags}) for line, flags in paper.LOSSES.items()
    }  # with and without --no-loss-mask
    rows = {method: (method, {}) for method in paper.METHODS}
    return [
        sweep_figure(
            context, "label_budget", "num_labels", rows, title="Score against labels for the decoder",
            label="labelled transitions", metric=None, log=True,
            text="The latent action model is held fixed: that of LAOM-Labels has seen the labels of the main table's "
            "run at every budget, and LAPO-Slots' slot was chosen with them.",
        ),
        sweep_figure(
            context, "latent_dim", "latent_dim", losses, title="NMSE against the latent dimension",
            label="dimension of the latent action", log=True,
        ),
        sweep_figure(
            context, "occlusion", "occlusion", losses, title="NMSE against the agent's occlusion",
            label="occluded share of the agent's box",
        ),
        sweep_figure(
            context, "mask_dilation", "mask_dilation", {"MaskLAM@GT": rows["MaskLAM@GT"]},
            title="NMSE against mask dilation", label="pixels (negative: erosion)",
            dashed=("LAPO", "LAOM-Labels", "LAOF", "LAPO-Slots"),
        ),
    ]  # fmt: skip


def ablation_figure(context: Context) -> Item:
    """NMSE without each part of MaskLAM: bars with standard deviations and a dot per seed."""
    item = Item("ablations", "Ablations of MaskLAM", "Sweeps", context.experiment("ablations"))
    cells: dict[str, dict[str, Cell]] = {}
    for env in [env for suite in SUITES for env in context.tasks(suite)]:
        found = {}
        for name, flags in paper.ABLATIONS.items():
            factors = changed_by("masklam", env, context.finished.quick, tuple(flags))
            cell = context.cell("MaskLAM@GT", env, **factors)
            if cell.runs:
                found[name] = cell
        if len(found) > 1:
            cells[env] = found
    if not cells:
        item.missing = "No task has finished runs of an ablation."
        return item
    for found in cells.values():
        results.mark_odd_data(found.values())
    panels = panels_of(context, list(cells))
    if len({get_task(env).suite for env in cells}) == 2:
        panels.insert(0, ("both suites, mean of their means", list(cells)))
    figure, axes = new_figure(len(panels), 2, 3.4)
    for axis, (panel, tasks) in zip(axes, panels):
        for place, name in enumerate(paper.ABLATIONS):
            stats = [s for env in tasks if name in cells[env] and (s := cells[env][name].stat("eval/nmse"))]
            if len(stats) < len(tasks):
                continue
            value = average(stats)
            if panel.startswith("both"):
                suites = [[cells[e][name].stat("eval/nmse") for e in tasks if e in SUITES[suite]] for suite in SUITES]
                value = average([average(each) for each in suites])
            color = "tab:blue" if name == "MaskLAM" else "tab:gray"
            axis.barh(place, value.mean, xerr=value.std, color=color, alpha=0.8, error_kw={"lw": 1})
            if len(tasks) == 1:
                axis.plot(
                    cells[tasks[0]][name].values("eval/nmse"), [place] * len(cells[tasks[0]][name].runs), "k.", ms=4
                )
        axis.set_yticks(range(len(paper.ABLATIONS)), list(paper.ABLATIONS), fontsize=8)
        axis.set_ylim(len(paper.ABLATIONS) - 0.5, -0.5)
        axis.set(title=panel, xlabel="NMSE")
        axis.grid(alpha=0.3, axis="x")
    item.pictures = [save(figure, context.out / "ablations.png")]
    table = Table(item.title + ": NMSE", ["variant", "flags", *cells])
    for name, flags in paper.ABLATIONS.items():
        row = [cell_entry(cells[env].get(name, Cell()), "eval/nmse") for env in cells]
        table.rows.append([Entry(name), Entry(" ".join(flags) or "-"), *row])
    table.write(context.out, "ablations_table")
    item.table = table
    return item


# ---------------------------------------------------------------------------------------------------------------------
# Pictures of what was learned


def first_runs(context: Context, env: str, methods: tuple[str, ...] = tuple(paper.METHODS)) -> dict[str, Run]:
    """The first seed of each row of the main table on a task, under distractors."""
    found = {method: context.row_cells(env, "distractor")[method].runs for method in methods}
    return {method: members[0] for method, members in found.items() if members}


def picture_notes(context: Context, env: str, chosen: dict[str, Run]) -> str:
    """Which seeds a picture shows, and what must be known of them."""
    seeds = {run.seed for run in chosen.values()}
    text = (
        f"Seed {seeds.pop()}."
        if len(seeds) == 1
        else f"Seeds {', '.join(f'{m}: {r.seed}' for m, r in chosen.items())}."
    )
    for method in chosen:
        settings = [
            note
            for note in context.row_cells(env, "distractor")[method].notes
            if note.startswith(("with ", "another data", "different data", "made from"))
        ]
        text += f" {method}: {'; '.join(settings)}." if settings else ""
    return " " + text


def umap_figure(context: Context, env: str) -> Item:
    """UMAP of held-out latent actions: a row per method, a column per action dimension that colours the points."""
    item = Item(
        f"umap_{env}", f"UMAP of latent actions, {env}", "Latent space", context.experiment("main-table", "--env", env)
    )
    chosen = first_runs(context, env)
    kept = {method: run.dir / "latents.npz" for method, run in chosen.items()}
    lacking = [method for method, path in kept.items() if not path.exists()]
    kept = {method: path for method, path in kept.items() if path.exists()}
    if not kept:
        item.missing = f"No run on {env} with latents.npz (runs of older versions have none)."
        return item
    try:
        import umap
    except ImportError:
        item.missing = "UMAP is an optional package: pip install umap-learn, then repeat the command."
        return item
    columns = min(DIMENSIONS, get_task(env).action_dim)
    figure, axes = new_figure(len(kept) * columns, columns, 2.4)
    figure.set_size_inches(1.9 * columns + 0.6, 1.9 * len(kept) + 0.3)
    for row, (method, path) in enumerate(kept.items()):
        with np.load(path) as file:
            z, action = file["z"], file["action"]
        neighbours, dot = min(15, len(z) - 1), float(np.clip(6000 / len(z), 1, 12))
        place = umap.UMAP(n_neighbors=neighbours, random_state=context.args.umap_seed, n_jobs=1).fit_transform(z)
        for dimension in range(columns):
            axis = axes[row * columns + dimension]
            dots = axis.scatter(*place.T, c=action[:, dimension], s=dot, cmap="bwr", vmin=-1, vmax=1, lw=0)
            axis.set(xticks=[], yticks=[], facecolor="0.88")  # actions near zero are white
            if row == 0:
                axis.set_title(f"action {dimension}", fontsize=9)
            if dimension == 0:
                axis.set_ylabel(method, fontsize=9)
    figure.colorbar(dots, ax=axes, shrink=0.5, aspect=40)
    item.pictures = [save(figure, context.out / f"umap_{env}.png")]
    item.text = f"Held-out transitions; UMAP's seed is {context.args.umap_seed}. Colour: the true action."
    item.text += picture_notes(context, env, chosen)
    if lacking:
        item.text += f" Left out, since their runs are of an older version: {', '.join(lacking)}."
    return item


def eigen_cam(activations: Tensor) -> Tensor:
    """Eigen-CAM (arXiv 2008.00299): activations (B, C, h, w), not negative, to saliency (B, h, w) in [0, 1].

    Each picture's activations, a matrix of places and channels, are projected on their first right singular vector. It
    is not negative where they are not, so its sign is known. A picture without activations has no saliency.
    """
    matrix = activations.double().flatten(2).transpose(1, 2)  # (B, h w, C)
    _, _, right = torch.linalg.svd(matrix, full_matrices=False)
    saliency = (matrix @ right[:, 0, :, None]).squeeze(-1).abs().view(len(matrix), *activations.shape[-2:])
    low, high = saliency.amin((1, 2), keepdim=True), saliency.amax((1, 2), keepdim=True)
    return ((saliency - low) / (high - low).clamp(min=1e-12)).to(activations.dtype)


def last_activations(encoder: nn.Module, function: Callable[[], Any]) -> Tensor:
    """What the last convolutional block of an encoder gives while `function` runs, after the ReLU that follows it."""
    found: list[Tensor] = []
    hooks = [
        module.register_forward_hook(lambda module, inputs, out: found.append(out) if out.dim() == 4 else None)
        for module in encoder.modules()
    ]
    try:
        with torch.inference_mode():
            function()
    finally:
        for hook in hooks:
            hook.remove()
    if not found:
        raise UserError("the encoder has no convolutional block")
    return F.relu(found[-1])


def strip(dataset: Dataset, episode: int = 0) -> np.ndarray:
    """Global indices of STRIP consecutive transitions of an episode, or of all that it has."""
    start, stop = dataset.episode_start[episode : episode + 2]
    first = start + max(0, min(20, stop - 1 - start - STRIP))
    return np.arange(first, min(first + STRIP, stop - 1))


def strip_batch(context: Context, run: Run) -> tuple[Batch, Tensor, Tensor]:
    """Consecutive held-out transitions as a run sees them: a batch, its frames o_t (B, 3, H, W), masks (B, 1, H, W)."""
    dataset = context.test_set(run, run.args.get("mask_source", "gt"))
    index = strip(dataset)
    batch = next(sequential(dataset, len(index), max_offset=1, device=torch.device("cpu"), masks=True, indices=index))
    size = dataset.image_size
    return batch, normalise(batch.frames)[:, 2], unpack_masks(batch.masks, size, size)[:, 2]


def heat(frames: Tensor, saliency: Tensor) -> np.ndarray:
    """Frames (B, 3, H, W) in [-1/2, 1/2] under a heat map (B, h, w) in [0, 1]: uint8 (B, H, W, 3)."""
    import matplotlib

    large = F.interpolate(saliency[:, None].float(), frames.shape[-2:], mode="bilinear", align_corners=False)[:, 0]
    colors = matplotlib.colormaps["jet"](large.clamp(0, 1).numpy())[..., :3]
    mixed = 0.5 * (frames.movedim(1, -1).numpy() + 0.5) + 0.5 * colors
    return (mixed.clip(0, 1) * 255).round().astype(np.uint8)


def method_rows(
    item: Item, chosen: dict[str, Run], label: str, draw: Callable[[Run], tuple[Any, Tensor, Tensor]]
) -> tuple[dict[str, Any], Tensor | None, dict[str, Run]]:
    """A row of pictures per run, below the frames that the first one sees; what cannot be drawn is said in the item.

    draw: from a run to its pictures, frames and masks. Returns the rows by their labels, the first run's masks, and the
    runs that are shown.
    """
    named: dict[str, Any] = {}
    outline, shown = None, {}
    for method, run in chosen.items():
        try:
            images, frames, masks = draw(run)
        except UserError as error:
            item.missing += f"{method}: {error} "
            continue
        if not shown:
            named[label], outline = frames, masks
        named[method], shown[method] = images, run
    return named, outline, shown


def eigen_cam_figure(context: Context, env: str) -> Item:
    """Where each method's inverse model looks in consecutive frames."""
    item = Item(
        f"eigen_cam_{env}",
        f"Eigen-CAM of the IDM, {env}",
        "Latent space",
        context.experiment("main-table", "--env", env),
    )

    def draw(run: Run) -> tuple[np.ndarray, Tensor, Tensor]:
        module, args, model = load_model(run)
        batch, frames, masks = strip_batch(context, run)
        encoder = model.idm if hasattr(model, "idm") else model.encoder
        found = last_activations(encoder, lambda: module.encode(model, batch, args))
        return heat(frames, eigen_cam(found[: len(frames)])), frames, masks

    chosen = {method: run for method, run in first_runs(context, env).items() if run.script != "lapo_slots"}
    named, outline, shown = method_rows(item, chosen, "o(t)", draw)
    if not named:
        item.missing = item.missing or f"No finished runs on {env} with an IDM that sees pixels."
        return item
    path = context.out / f"eigen_cam_{env}.png"
    item.pictures = [pictures.rows(path, named, outline, f"Eigen-CAM, {env}: consecutive held-out frames")]
    item.text = (
        "Projection of the last convolutional block's output (after its ReLU) on its first singular vector, per frame; "
        "red is high. For LAOM-Labels: the encoder's, of the current stack. LAPO-Slots' IDM sees slots and no pixels. "
        "The outline is the agent's mask." + picture_notes(context, env, shown)
    )
    return item


def predicted(context: Context, run: Run) -> tuple[Tensor, Tensor, Tensor]:
    """Predicted and true next frames (B, 3, H, W) of consecutive held-out transitions, and masks (B, 1, H, W)."""
    module, args, model = load_model(run)
    batch, _, _ = strip_batch(context, run)
    with torch.inference_mode():
        seen = module.observe(batch, args)
        window, frames = (seen[0], seen[1]) if isinstance(seen, tuple) else (seen, seen)
        prediction = model(window)[0]
    size = frames.shape[-1]
    masks = unpack_masks(batch.masks, size, size)[:, 3]
    return prediction.float(), frames[:, 3, :3], masks


def world_model_figure(context: Context, env: str) -> Item:
    """Predicted next frames of the methods that predict pixels, below the true ones."""
    item = Item(
        f"world_model_{env}", f"World models, {env}", "World models", context.experiment("main-table", "--env", env)
    )
    chosen = first_runs(context, env, ("LAPO", "LAOF", "MaskLAM@GT", "MaskLAM@SAM"))
    named, outline, shown = method_rows(item, chosen, "o(t+1)", lambda run: predicted(context, run))
    if not named:
        item.missing = item.missing or f"No finished runs on {env} of a method that predicts pixels."
        return item
    path = context.out / f"world_model_{env}.png"
    item.pictures = [pictures.rows(path, named, outline, f"{env}: consecutive held-out transitions")]
    item.text = (
        "LAOM-Labels and LAPO-Slots predict embeddings and slots, which have no picture. Outline: the agent's mask."
    )
    item.text += picture_notes(context, env, shown)
    return item


def occlusion_figure(context: Context, env: str) -> Item:
    """Predictions under growing occlusion, with and without the masked loss."""
    name = f"world_model_occlusion_{env}"
    item = Item(
        name, f"World models under occlusion, {env}", "World models", context.experiment("occlusion", "--env", env)
    )
    for line, flags in paper.LOSSES.items():
        named: dict[str, Any] = {}
        for value in paper.OCCLUSIONS:
            members = context.cell("MaskLAM@GT", env, loss_mask=not flags, occlusion=value).runs
            if not members:
                continue
            try:
                prediction, frames, _ = predicted(context, members[0])
            except UserError as error:
                item.missing += f"{line}, {value:.0%}: {error} "
                continue
            named[f"{value:.0%}\npredicted"], named[f"{value:.0%}\no(t+1)"] = prediction, frames
        if len(named) > 2:
            path = context.out / f"{name}_{line.split()[0]}.png"
            item.pictures.append(pictures.rows(path, named, None, f"{env}, {line}: share of the agent's box occluded"))
    if not item.pictures:
        item.missing = item.missing or f"No finished runs on {env} with an occlusion."
    return item


def some_data(context: Context, env: str, mask_source: str) -> Dataset:
    """The held-out split of a task, from where one of its runs had it. UserError if it is gone."""
    members = [run for run in context.finished.runs if run.env == env and run.result is not None]
    render = "distractor"
    folders = [context.args.data_dir] if context.args.data_dir else [Path(run.args["data_dir"]) for run in members]
    problem: UserError | None = None
    for folder in dict.fromkeys(folders):
        try:
            return Dataset(folder, env, "test", render, mask_source)
        except UserError as error:
            problem = error
    raise problem or UserError(f"no runs on {env}")


def sam_figure(context: Context, envs: list[str], source: str = "sam") -> Item:
    """The first frame with the prompt's box, and the masks that SAM made from it."""
    item = Item("sam_masks", "Masks of SAM 2.1", "Masks", f"python make_masks.py --env {envs[0] if envs else 'all'}")
    columns: list[tuple[str, np.ndarray, np.ndarray, tuple[float, ...]]] = []
    for env in envs:
        try:
            dataset = some_data(context, env, source)
        except UserError as error:
            item.missing += f"{env}: {error} "
            continue
        size, later = dataset.image_size, dataset.episode_start[0] + min(20, np.diff(dataset.episode_start)[0] - 1)
        index = np.array([dataset.episode_start[0], later])
        masks = unpack_masks(torch.from_numpy(dataset.masks(index))[None], size, size)[0, :, 0].bool().numpy()
        columns.append((env, dataset.frames(index), masks, get_task(env).scaled_box(size)))
    if not columns:
        item.missing = item.missing or "No task with runs has masks of SAM."
        return item
    names = ("first frame", "prompt", "mask", "frame 20", "its mask")
    figure, axes = new_figure(len(columns) * len(names), len(columns), 1.9)
    figure.set_size_inches(2.0 * len(columns) + 0.6, 1.9 * len(names))
    from matplotlib.patches import Rectangle

    for column, (env, frames, masks, box) in enumerate(columns):
        shown = (frames[0], frames[0], masks[0], frames[1], masks[1])
        for row, (name, image) in enumerate(zip(names, shown)):
            axis = axes[row * len(columns) + column]
            axis.imshow(image, cmap="gray", interpolation="nearest", vmin=0, vmax=None if image.ndim == 3 else 1)
            axis.set(xticks=[], yticks=[])
            if name == "prompt":
                x0, y0, x1, y1 = box
                axis.add_patch(Rectangle((x0 - 0.5, y0 - 0.5), x1 - x0, y1 - y0, fill=False, ec="lime", lw=2))
            if column == 0:
                axis.set_ylabel(name)
            if row == 0:
                axis.set_title(env)
    item.pictures = [save(figure, context.out / "sam_masks.png")]
    item.text = "One box per task in an episode's first frame; the tracker follows the agent from there."
    return item


def dilation_figure(context: Context, env: str) -> Item:
    """A frame and its mask, grown and shrunk by 0 to 3 pixels, through MaskLAM's own code."""
    import masklam

    item = Item(f"mask_dilation_masks_{env}", f"Grown and shrunk masks, {env}", "Masks", "python make_figures.py")
    try:
        dataset = some_data(context, env, "gt")
    except UserError as error:
        item.missing = str(error)
        return item
    index = strip(dataset)[len(strip(dataset)) // 2 :][:1]
    batch = next(sequential(dataset, 1, max_offset=1, device=torch.device("cpu"), masks=True, indices=index))
    named = {}
    for label, sign in (("dilation", 1), ("erosion", -1)):
        images = [normalise(batch.frames)[0, 2]]
        for width in range(4):
            mask = masklam.observe(batch, masklam.Args(mask_dilation=sign * width))[2][0, 2]
            images.append(mask.expand(3, -1, -1) - 0.5)
        named[label] = torch.stack(images)
    path = context.out / f"{item.name}.png"
    item.pictures = [pictures.rows(path, named, None, f"{env}: o(t), then 0, 1, 2, 3 pixels")]
    return item


def own_pictures(context: Context, env: str) -> Iterator[Item]:
    """LAOF's flow figure and LAPO-Slots' slots, as the runs drew them: slots of the steadiest and least steady seed."""
    for method, name, title in (("LAOF", "flow.png", "LAOF's flow target"), ("LAPO-Slots", "slots.png", "Slots")):
        item = Item(
            f"{name.split('.')[0]}_{env}", f"{title}, {env}", "Baselines",
            context.experiment("main-table", "--env", env, "--methods", method),
        )  # fmt: skip
        members = [run for run in context.cell(method, env).runs if (run.dir / name).exists()]
        if method == "LAPO-Slots" and members:
            changes = {run.dir: run.result["slots"]["agent"]["changes"] or 0.0 for run in members}
            members.sort(key=lambda run: changes[run.dir])
            members = members[:1] + members[1:][-1:]
            item.text = "; ".join(
                f"seed {run.seed}: slot {run.result['slots']['selected']} selected, the agent's slot changes in "
                f"{changes[run.dir]:.0%} of the steps"
                for run in members
            )
        else:
            members = members[:1]
        if not members:
            item.missing = f"No finished run of {method} on {env}."
        for run in members:
            with runs.atomic_path(context.out / f"{item.name}_seed{run.seed}.png") as temporary:
                temporary.write_bytes((run.dir / name).read_bytes())
            item.pictures.append(context.out / f"{item.name}_seed{run.seed}.png")
        yield item


# ---------------------------------------------------------------------------------------------------------------------


def picture_envs(context: Context) -> list[str]:
    """The tasks that get pictures: those asked for, or the paper's, or the first of each suite that has runs."""
    if context.args.env:
        for env in context.args.env:
            get_task(env)
        return context.args.env
    found = []
    for suite, usual in (("dcs", "cheetah-run"), ("dmw", "push")):
        there = context.tasks(suite)
        found += [usual] if usual in there else there[:1]
    return found


def main(args: Args) -> None:
    paper.check_set(args.set)
    found = results.find_runs(args.runs_dir)
    here = [run for run in found if run.quick == args.quick]
    first = "python -m benchmarks.paper main-table --env cheetah-run" + (" --quick" if args.quick else "")
    if not here:
        other = sum(run.quick != args.quick for run in found)
        hint = f"; there are {other} {'without' if args.quick else 'with'} --quick" if other else ""
        wanted = "with --quick" if args.quick else "at the paper's scale"
        raise UserError(f"{args.runs_dir}: no runs {wanted}{hint}. Start with: {first}")
    context = Context(Finished(here, args.quick, args.seeds), args.out, args)
    args.out.mkdir(parents=True, exist_ok=True)
    done = sum(run.result is not None for run in here)
    print(f"{len(here)} runs, {done} finished")

    items: list[Item] = []
    steps: list[Callable[[], Any]] = [lambda: aggregate_table(context), lambda: task_tables(context)]
    steps += [lambda: interval_figure(context), lambda: cost_table(context)]
    steps += [lambda: sweep_figures(context), lambda: ablation_figure(context)]
    for env in picture_envs(context):
        functions = [umap_figure, eigen_cam_figure, world_model_figure]
        occluded = any(run.env == env and run.args.get("occlusion") for run in here)
        functions += [occlusion_figure] if occluded or env in paper.EXPERIMENTS["occlusion"].envs else []
        for function in functions:
            steps.append(lambda function=function, env=env: function(context, env))
        steps.append(lambda env=env: list(own_pictures(context, env)))
        steps.append(lambda env=env: dilation_figure(context, env))
    steps.append(lambda: sam_figure(context, [env for suite in SUITES for env in context.tasks(suite)]))
    progress = runs.Progress("figures", len(steps), "steps")
    for step in steps:
        if runs.stop_requested():
            raise runs.Stopped("what is drawn stays; the same command draws everything again")
        made = step()
        items += made if isinstance(made, list) else [made]
        progress.update(1)
    progress.close()
    seen = set().union(*(run.commits for run in here if run.result is not None))
    commits = sorted(commit[:8] + commit[40:] for commit in seen)
    about = f"{done} finished runs of {len(here)} in {args.runs_dir}, {'--quick' if args.quick else 'paper scale'}"
    about += f", {args.seeds} seeds asked for; commits: {', '.join(commits) or 'none'}."
    path = page(args.out / "index.html", "MaskLAM: tables and figures", about, items)
    missing = [item for item in items if item.missing]
    for item in missing:
        print(f"missing: {item.title}: {item.missing.strip()}\n    {item.command}")
    print(f"{len(items) - len(missing)} tables and figures, {len(missing)} with something missing: {path}")


if __name__ == "__main__":
    runs.cli(main, Args())
