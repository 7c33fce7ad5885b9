"""The paper's experiments: which runs each consists of, and running them on this machine or on a Slurm cluster.

    python reproduce.py main-table --env cheetah-run --dry-run
    python reproduce.py all --executor slurm --partition gpu --hours 48
    python make_figures.py

Data sets and masks that are missing are made first. Finished runs are skipped; rerun the same command to resume. Runs
that experiments share (MaskLAM at its defaults) are done once. Logs: <runs-dir>/reproduce/<job>.log.

Figures find runs by the same table, since a run's folder is named by its experiment's flags alone:

    for cell in EXPERIMENTS["occlusion"].cells(envs=["cheetah-run"], quick=True):
        print(cell.row, cell.value, cell.run_dir(Path("runs"), seed=1))
"""

from __future__ import annotations

import functools
import importlib
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from common import runs
from common.errors import UserError
from common.tasks import TASKS

# ---------------------------------------------------------------------------------------------------------------------
# The experiments


@dataclass(frozen=True)
class Method:
    """A row of a table or a line of a plot: a method script with flags."""

    script: str
    flags: tuple[str, ...] = ()
    paper_scale_flags: tuple[str, ...] = ()
    """flags that --quick leaves out"""


METHODS: dict[str, Method] = {
    "LAPO": Method("lapo"),
    "LAOM-Labels": Method("laom_labels", paper_scale_flags=("--policy-scale", "32")),
    "LAOF": Method("laof"),
    "LAPO-Slots": Method("lapo_slots"),
    "MaskLAM@GT": Method("masklam"),
    "MaskLAM@SAM": Method("masklam", ("--mask-source", "sam")),
}
LOSSES = {"with masked loss": Method("masklam"), "without masked loss": Method("masklam", ("--no-loss-mask",))}
ABLATIONS = {
    "MaskLAM": Method("masklam"),
    "w/o loss masking": Method("masklam", ("--no-loss-mask",)),
    "w/o mask channel": Method("masklam", ("--no-mask-channel",)),
    "w/o all masking": Method("masklam", ("--no-loss-mask", "--no-mask-channel")),
    "w/ k=1": Method("masklam", ("--max-offset", "1")),
    "w/o all masking, k=1 (LAPO)": Method("masklam", ("--no-loss-mask", "--no-mask-channel", "--max-offset", "1")),
    "w/ input masking": Method("masklam", ("--input-mask", "--no-loss-mask")),
}
RENDERS: dict[str, tuple[str, ...]] = {"distractor": (), "vanilla": ("--no-distractors",)}
DCS = [task.name for task in TASKS.values() if task.suite == "dcs"]
DMW = [task.name for task in TASKS.values() if task.suite == "dmw"]


@functools.cache
def parse(script: str, argv: tuple[str, ...]) -> tuple[Any, str]:
    """The arguments of a method script's command line, and the name of its variant. UserError if they are refused."""
    module = importlib.import_module(script)
    try:
        args = tyro.cli(module.Args, default=module.defaults(list(argv)), args=list(argv), console_outputs=False)
    except SystemExit:
        raise UserError(f"{script}.py refuses {shlex.join(argv)}; python {script}.py --help lists its flags") from None
    base = module.defaults([f"--env={args.env}", *(["--quick"] if args.quick else [])])
    return args, runs.variant_name(args, base)


def variant(script: str, env: str, quick: bool, flags: Sequence[str] = ()) -> str:
    """The folder between environment and seed of the runs that a method script makes with `flags`."""
    return parse(script, ("--env", env, *(["--quick"] if quick else []), *flags))[1]


@dataclass(frozen=True)
class Cell:
    """One value of one row of an experiment on one task: a run per seed."""

    row: str
    value: str
    """of the sweep, or the render of the main table; empty where an experiment has neither"""
    env: str
    quick: bool
    method: Method
    value_flags: tuple[str, ...] = ()
    label_budgets: tuple[int, ...] = ()
    """further decoders besides that of the usual number of labels; none: only that one"""

    def words(self, further: Sequence[str] = ()) -> tuple[str, ...]:
        """The command line without seed and folders. `further` flags give way to the experiment's own."""
        scale = ("--quick",) if self.quick else self.method.paper_scale_flags
        words = ("--env", self.env, *scale, *further, *self.method.flags, *self.value_flags)
        if self.label_budgets:
            usual = parse(self.method.script, words)[0].num_labels
            words += ("--num-labels", *(str(count) for count in sorted({*self.label_budgets, *usual})))
        return words

    @property
    def variant(self) -> str:
        """The name of the run's folder: by the experiment's own flags, whatever --set adds to them."""
        return parse(self.method.script, self.words())[1]

    def run_dir(self, runs_dir: Path, seed: int) -> Path:
        return runs_dir / self.method.script / self.env / self.variant / f"seed{seed}"


@dataclass(frozen=True)
class Experiment:
    """Rows times values times tasks times seeds."""

    title: str
    envs: list[str]
    rows: dict[str, Method]
    flag: str = ""
    """what a sweep varies"""
    values: tuple[Any, ...] = ()
    quick_values: tuple[Any, ...] = ()
    """if --quick needs others"""
    one_run: bool = False
    """all values in one run, which trains a decoder for each"""

    def cells(
        self,
        envs: Sequence[str] = (),
        quick: bool = False,
        values: Sequence[Any] = (),
        rows: dict[str, Method] | None = None,
    ) -> list[Cell]:
        """The cells on `envs` at `values`, of `rows`: by default all that the paper's experiment has."""
        values = values or (quick and self.quick_values) or self.values
        budgets: tuple[int, ...] = ()
        if self.one_run:
            conditions: dict[str, tuple[str, ...]] = {"": ()}
            budgets = tuple(int(value) for value in values)
        elif self.flag:
            conditions = {str(value): (self.flag, str(value)) for value in values}
        else:
            conditions = {name: RENDERS[name] for name in values} or {"": ()}
        return [
            Cell(row, value, env, quick, method, flags, budgets)
            for env in envs or self.envs
            for value, flags in conditions.items()
            for row, method in (rows or self.rows).items()
        ]


EXPERIMENTS = {
    "main-table": Experiment("all methods, clean and with distractors", [*DCS, *DMW], METHODS, values=tuple(RENDERS)),
    "label-budget": Experiment(
        "the policy's score against labelled transitions: one run of each method, with a decoder per budget",
        [*DCS, *DMW],
        METHODS,
        "--num-labels",
        values=(2000, 4000, 8000, 16_000, 32_000, 64_000, 128_000),
        quick_values=(500, 1000, 2000, 4000),  # and the usual 5000; Meta-World's quick data has 6000 transitions
        one_run=True,
    ),
    "latent-dim": Experiment(
        "NMSE against the latent dimension", DCS, LOSSES, "--latent-dim", values=(32, 64, 128, 256, 512, 1024)
    ),
    "occlusion": Experiment(
        "NMSE against the agent's occlusion", DCS, LOSSES, "--occlusion", values=(0.0, 0.25, 0.5, 0.75)
    ),
    "mask-dilation": Experiment(
        "NMSE against grown masks",
        DMW,
        {"MaskLAM@GT": METHODS["MaskLAM@GT"]},
        "--mask-dilation",
        values=(-3, -2, -1, 0, 1, 2, 3),
    ),
    "ablations": Experiment("MaskLAM without each of its parts", [*DCS, *DMW], ABLATIONS),
}
