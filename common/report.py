"""Finished runs in cells, with what is wrong with each; tables in three notations; the page with all of them."""

from __future__ import annotations

import base64
import dataclasses
import importlib
import math
import statistics
import string
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from common import runs
from common.cli import UserError, describe
from common.store import atomic_path, read_json

# ---------------------------------------------------------------------------------------------------------------------
# Runs


@dataclass
class Run:
    """A run directory: its arguments, and its result if it is finished."""

    dir: Path
    script: str
    env: str
    variant: str
    seed: int
    args: dict[str, Any]
    result: dict[str, Any] | None = None

    @property
    def commits(self) -> set[str]:
        """The first letters of the commits of a finished run's stages, with the mark of uncommitted changes."""
        last = self.result["commit"]
        stages = (stage.get("commit", last) for stage in self.result["stages"].values())
        return {commit[:8] + commit[40:] for commit in (each or "unknown" for each in (last, *stages))}

    def metrics(self, budget: int | None = None) -> dict[str, float | None]:
        """What a finished run measured. budget: the scores of its decoder with so many labels; empty without one."""
        if budget is None:
            return self.result["metrics"]
        decoders = [one for one in self.result["decoders"] if one["num_labels"] == budget]
        return {f"eval/{name.removesuffix('_mean')}": value for one in decoders for name, value in one.items()}


RESULT_KEYS = ("metrics", "seconds", "stages", "peak_memory_gib", "machine", "commit", "dataset", "decoders")


def read_run(directory: Path) -> Run:
    """The run in a directory <script>/<env>/<variant>/seed<n>, which is its name, whatever its arguments say.

    UserError if a file is missing, damaged, or lacks what every run has.
    """
    script, env, variant, seed = directory.absolute().parts[-4:]
    path = directory / "args.json"
    try:
        args = read_json(path, keys=("quick", "batch_size", "distractors", "data_dir", "train_hash", "test_hash"))
        run = Run(directory, script, env, variant, int(seed.removeprefix("seed")), args)
        path = directory / "result.json"
        if path.exists():
            run.result = read_json(path, keys=RESULT_KEYS)
    except FileNotFoundError:
        raise UserError(f"{path} is missing: name the directory of a run, as .../seed1") from None
    except OSError as error:
        raise UserError(describe(error)) from None
    except (ValueError, UserError) as error:
        raise UserError(f"{path} cannot be read ({error!r}): rerun the run's command, or remove the run") from None
    return run


def find_runs(folder: Path) -> tuple[list[Run], list[str]]:
    """Every run below a folder of run directories, and what is wrong with those that are left out."""
    members, problems = [], []
    for path in sorted(folder.glob("*/*/*/seed*/args.json")):
        try:
            members.append(read_run(path.parent))
        except UserError as error:
            problems.append(str(error))
    return members, problems


class Stat(NamedTuple):
    """Mean and standard deviation over seeds (n - 1; NaN for a single value)."""

    mean: float
    std: float


def stat(values: list[float]) -> Stat:
    """Mean and sample standard deviation."""
    return Stat(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else math.nan)


def average(stats: list[Stat]) -> Stat:
    """The paper's aggregate over tasks: the mean of their means, and the mean of their standard deviations."""
    return Stat(*np.mean(stats, axis=0).tolist())


@dataclass
class Cell:
    """The runs of one method, task and setting that differ in their seeds alone.

    `runs`: finished ones. `notes`: what a reader must know before trusting the average. `mixed`: the runs saw different
    data, so that they are not averaged. `budget`: labelled transitions of the action decoder whose scores count; None:
    the run's largest.
    """

    runs: list[Run] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    mixed: bool = False
    budget: int | None = None

    def values(self, metric: str) -> list[float]:
        """A metric of each run that has it."""
        values = [run.metrics(self.budget).get(metric) for run in self.runs]
        return [value for value in values if value is not None]

    def stat(self, metric: str) -> Stat | None:
        """Mean and deviation of a metric; None without values, or if the runs must not be averaged."""
        values = self.values(metric)
        return None if self.mixed or not values else stat(values)


def make_cell(members: list[Run], seeds: int, budget: int | None = None) -> Cell:
    """A cell of `members`, finished or not, with notes on what keeps them from being `seeds` seeds of one experiment.

    Only those with a decoder of that `budget` count.
    """
    finished = [run for run in members if run.result is not None and run.metrics(budget)]
    cell = Cell(finished, [f"seed {run.seed} is not finished" for run in members if run.result is None], budget=budget)
    if not finished:
        return cell
    if len(finished) < seeds:
        cell.notes.append(f"{len(finished)} of {seeds} seeds")
    keys = set().union(*(run.args for run in finished)) - runs.RUNTIME_FIELDS - {"seed"}
    # Where files lie does not matter, hashes tell what they hold; and scores are compared at one label budget.
    keys = {key for key in keys if not key.endswith(("_dir", "_checkpoint")) and key != "num_labels"}
    different = sorted(key for key in keys if any(run.args.get(key) != finished[0].args.get(key) for run in finished))
    # Hashes of the data set, of masks, and of weights behind flow and features: what the runs have learned from.
    cell.mixed = any(key.endswith("_hash") for key in different)
    if different:
        cell.notes.append(f"seeds differ in {', '.join(different)}{', not averaged' if cell.mixed else ''}")
    commits = sorted(set().union(*(run.commits for run in finished)))
    if len(commits) > 1:
        cell.notes.append(f"different commits: {', '.join(commits)}")
    elif commits[0].endswith("+changes"):
        cell.notes.append("made from uncommitted changes")
    return cell


def mark_odd_data(rows: list[dict[Any, Cell]]) -> None:
    """Notes at cells whose runs saw another data set than those of most rows. rows: cells by task and render."""
    for key in set().union(*rows):
        cells = [row[key] for row in rows if key in row and row[key].runs and not row[key].mixed]
        hashes = [(cell.runs[0].args.get("train_hash"), cell.runs[0].args.get("test_hash")) for cell in cells]
        for cell, own in zip(cells, hashes):
            if own != statistics.mode(hashes):
                cell.notes.append("another data set than the other rows")


def iqm_interval(by_task: list[list[float]], resamples: int, seed: int = 0) -> tuple[float, float, float] | None:
    """Interquartile mean over the runs of all tasks and its 95% interval by the stratified percentile bootstrap, which
    draws each task's runs anew among themselves (arXiv 2108.13264).

    Returns None without values, and an interval of NaN if a task has a single run.
    """
    from scipy.stats import bootstrap, trim_mean

    samples = [np.asarray(values, float) for values in by_task if values]
    if not samples:
        return None

    def statistic(*parts: np.ndarray, axis: int = -1) -> np.ndarray:
        return trim_mean(np.concatenate(parts, axis=axis), 0.25, axis=axis)

    point = float(statistic(*samples))
    if min(map(len, samples)) < 2:
        return point, math.nan, math.nan
    rng = np.random.default_rng(seed)
    result = bootstrap(samples, statistic, n_resamples=resamples, vectorized=True, method="percentile", rng=rng)
    return point, float(result.confidence_interval.low), float(result.confidence_interval.high)


def load_model(run: Run) -> tuple[Any, Any, Any]:
    """The script's module, a finished run's arguments, and its trained latent action model, in evaluation mode.

    UserError if the script or the weights are missing, or do not fit each other.
    """
    if run.script not in runs.method_scripts():
        raise UserError(f"{run.script}.py is missing, which made this run")
    module = importlib.import_module(run.script)
    default = module.defaults([f"--env={run.env}", *(["--quick"] if run.args["quick"] else [])])
    values: dict[str, Any] = {}
    for item in dataclasses.fields(default):
        value = run.args.get(item.name, getattr(default, item.name))
        if value is not None and "Path" in str(item.type):
            value = Path(value)
        values[item.name] = tuple(value) if isinstance(value, list) else value
    args, plan = type(default)(**values), run.result["dataset"]["train"]["plan"]
    model = module.LatentActionModel(args, plan["image_size"], max(plan["action_dim"], 1))
    try:
        model.load_state_dict(runs.read_checkpoint(run.dir / "lam.pt")["model"])
    except OSError as error:
        raise UserError(describe(error)) from None
    except (RuntimeError, KeyError, TypeError) as error:
        raise UserError(f"{run.dir / 'lam.pt'}: not the weights of {run.script}.py ({type(error).__name__})") from None
    return module, args, model.eval()


def load_latents(run: Run) -> tuple[np.ndarray, np.ndarray]:
    """Latent actions of held-out transitions (N, d_z), and the true actions (N, A). UserError if they are not there."""
    path = run.dir / "latents.npz"
    try:
        with np.load(path) as file:
            return file["z"], file["action"]
    except FileNotFoundError:
        raise UserError(f"{path} is missing") from None
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as error:
        raise UserError(f"{path} cannot be read ({error!r})") from None


# ---------------------------------------------------------------------------------------------------------------------
# Tables and the page

LATEX = str.maketrans({"\\": r"\textbackslash{}", "±": r"$\pm$", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"})
LATEX |= str.maketrans({character: f"\\{character}" for character in "&%_#${}"})


@dataclass
class Entry:
    """One place of a table: the text, notes that become footnotes, and whether it is set in bold.

    `beside`: at the start of a row that only stands beside the one above it (the paper's numbers, a control).
    """

    text: str
    notes: list[str] = field(default_factory=list)
    bold: bool = False
    beside: bool = False


def number(stat: Stat | None) -> str:
    """``0.2061 ± 0.0093``, without the deviation if there is none; a dash for nothing."""
    if stat is None:
        return "-"
    return f"{stat.mean:.4f}" + ("" if math.isnan(stat.std) else f" ± {stat.std:.4f}")


@dataclass
class Item:
    """Something on the page: a table (head and rows), pictures, or what is missing; and the command behind it."""

    name: str
    title: str = ""
    section: str = ""
    command: str = ""
    text: str = ""
    head: list[str] = field(default_factory=list)
    rows: list[list[Entry]] = field(default_factory=list)
    pictures: list[Path] = field(default_factory=list)
    missing: str = ""

    def add(self, name: str, entries: Iterable[Entry | str], beside: bool = False, always: bool = False) -> None:
        """A row of the table, if it has more than dashes, or always."""
        row = [entry if isinstance(entry, Entry) else Entry(entry) for entry in entries]
        if always or any(entry.text != "-" for entry in row):
            self.rows.append([Entry(name, beside=beside), *row])

    @property
    def footnotes(self) -> dict[str, str]:
        """Note to letter, in the order of their first use: a, b, ..., z, aa, ..."""
        letters = ["", *string.ascii_lowercase]
        notes = dict.fromkeys(note for row in self.rows for entry in row for note in entry.notes)
        return {note: letters[index // 26] + letters[index % 26 + 1] for index, note in enumerate(notes)}

    def texts(self, escaped: Callable[[str], str], bold: str, mark: str) -> list[list[str]]:
        """Every row's entries in one notation. bold, mark: formats of a bold text and of footnote letters."""
        letters = self.footnotes

        def text(entry: Entry) -> str:
            marks = ",".join(letters[note] for note in entry.notes)
            return (bold if entry.bold else "{}").format(escaped(entry.text)) + (mark.format(marks) if marks else "")

        return [[text(entry) for entry in row] for row in self.rows]

    def markdown(self) -> str:
        """A pipe table; footnotes as superscripts and a list."""
        lines = [self.head, *self.texts(lambda text: text.replace("|", r"\|"), "**{}**", " <sup>{}</sup>")]
        widths = [max(map(len, column)) for column in zip(*lines)]
        text = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths)) + " |" for line in lines]
        text.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
        notes = [f"<sup>{letter}</sup> {note}" for note, letter in self.footnotes.items()]
        parts = [self.title and f"**{self.title}**", "\n".join(text), self.text, "  \n".join(notes)]
        return "\n\n".join(part for part in parts if part) + "\n"

    def latex(self) -> str:
        """A table environment that needs booktabs; footnotes below the table."""
        lines = self.texts(lambda text: text.translate(LATEX), r"\textbf{{{}}}", r"\textsuperscript{{{}}}")
        notes = [rf"\textsuperscript{{{letter}}} {note.translate(LATEX)}" for note, letter in self.footnotes.items()]
        below = "\\par\\smallskip\\footnotesize\n" + " \\quad ".join(notes) + "\n" if notes else ""
        body = "".join(" & ".join(line) + " \\\\\n" for line in lines)
        return rf"""\begin{{table}}[t]
\centering
\caption{{{self.title.translate(LATEX)}. {self.text.translate(LATEX)}}}
\begin{{tabular}}{{l{"c" * (len(self.head) - 1)}}}
\toprule
{" & ".join(name.translate(LATEX) for name in self.head)} \\
\midrule
{body}\bottomrule
\end{{tabular}}
{below}\end{{table}}
"""

    def write(self, folder: Path) -> None:
        """Writes the table as .md and .tex into a folder."""
        write_text(folder / f"{self.name}.md", self.markdown())
        write_text(folder / f"{self.name}.tex", self.latex())


def write_text(path: Path, text: str) -> None:
    """Writes a text file, completely or not at all."""
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def page(path: Path, title: str, about: str, items: list[Item]) -> Path:
    """Writes one HTML file that needs no other: tables as text, pictures inside, what is missing with its command."""
    import jinja2

    sections: dict[str, list[Item]] = {}
    for item in items:
        sections.setdefault(item.section, []).append(item)
    environment = jinja2.Environment(autoescape=True, trim_blocks=True)
    environment.globals = {"zip": zip, "escape": escape}
    environment.filters["base64"] = lambda picture: base64.b64encode(picture.read_bytes()).decode()
    template = environment.from_string(Path(__file__).with_name("page.html").read_text(encoding="utf-8"))
    write_text(path, template.render(title=title, about=about, sections=sections))
    return path
