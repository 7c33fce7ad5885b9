"""The paper's experiments: which runs each consists of, and running them on this machine or on a Slurm cluster.

    python reproduce.py main-table --env cheetah-run --dry-run
    python reproduce.py all --executor slurm --slurm partition=gpu time=48:00:00
    python make_figures.py

Data sets and masks that are missing are made first. Finished runs are skipped; rerun the same command to resume. Runs
that experiments share (MaskLAM at its defaults) are done once. Logs: <runs-dir>/reproduce/<job>.log.

Figures find runs by the same table, since a run's folder is named by its experiment's flags alone:

    for cell in EXPERIMENTS["occlusion"].cells(envs=["cheetah-run"], quick=True):
        print(cell.row, cell.value, cell.run_dir(Path("runs"), seed=1))
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import itertools
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from common import runs
from common.cli import Count, Stopped, UserError, check_ranges, cli, stop_requested
from common.dataset import Dataset
from common.tasks import TASKS, get_task

ROOT = Path(__file__).parent
NUMBERS = ROOT / "benchmarks" / "paper_numbers.json"  # what the paper prints
DATA_GB = {"dcs": 256, "dmw": 113}  # of a task at the paper's scale

# ---------------------------------------------------------------------------------------------------------------------
# The experiments


@dataclass(frozen=True)
class Method:
    """A row of a table or a line of a plot: a method script with flags."""

    script: str
    flags: tuple[str, ...] = ()
    paper_scale_flags: tuple[str, ...] = ()
    """flags that --quick leaves out"""


Rows = dict[str, Method]
METHODS: Rows = {
    "LAPO": Method("lapo"),
    "LAOM-Labels": Method("laom_labels", paper_scale_flags=("--policy-scale", "32")),
    "LAOF": Method("laof"),
    "LAPO-Slots": Method("lapo_slots"),
    "MaskLAM@GT": Method("masklam"),
    "MaskLAM@SAM": Method("masklam", ("--mask-source", "sam")),
}
GROWN = {"MaskLAM@GT": METHODS["MaskLAM@GT"]}
LOSSES = {"with masked loss": Method("masklam"), "without masked loss": Method("masklam", ("--no-loss-mask",))}
ABLATIONS = {
    "MaskLAM": Method("masklam"),
    "w/o loss masking": Method("masklam", ("--no-loss-mask",)),
    "w/o mask channel": Method("masklam", ("--no-mask-channel",)),
    "w/o all masking": Method("masklam", ("--no-loss-mask", "--no-mask-channel")),
    "w/ k=1": Method("masklam", ("--max-offset", "1")),
    "w/o all masking, k=1 (LAPO)": Method("masklam", ("--no-loss-mask", "--no-mask-channel", "--max-offset", "1")),
    "w/ input masking": Method("masklam", ("--input-mask",)),
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
    check_ranges(args)
    return args, runs.directory(args, script, module.defaults).parent.name


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
    label_budgets: tuple[str, ...] = ()
    """numbers of labels for decoders besides the usual one; none: only that one"""
    stages: str = "all"
    """lam: the experiment needs the latent action model's NMSE alone"""

    def words(self, further: Sequence[str] = ()) -> tuple[str, ...]:
        """The command line without seed and folders. `further` flags give way to the experiment's own."""
        scale = ("--quick",) if self.quick else self.method.paper_scale_flags
        words = ("--env", self.env, *scale, *further, *self.method.flags, *self.value_flags)
        if self.label_budgets:
            usual = parse(self.method.script, words)[0].num_labels
            budgets = parse(self.method.script, (*words, "--num-labels", *self.label_budgets))[0].num_labels
            words += ("--num-labels", *(str(count) for count in sorted({*budgets, *usual})))
        words += ("--stages", "lam") if self.stages == "lam" else ()
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
    rows: Rows
    flag: str = ""
    """what a sweep varies"""
    values: tuple[Any, ...] = ()
    quick_values: tuple[Any, ...] = ()
    """if --quick needs others"""
    stages: str = "all"

    def cells(
        self, envs: Sequence[str] = (), quick: bool = False, values: Sequence[Any] = (), rows: Rows | None = None
    ) -> list[Cell]:
        """The cells on `envs` at `values`, of `rows`: by default all that the paper's experiment has."""
        values = values or (quick and self.quick_values) or self.values
        budgets: tuple[str, ...] = ()
        if self.flag == "--num-labels":  # one run, which trains a decoder for each
            conditions: dict[str, tuple[str, ...]] = {"": ()}
            budgets = tuple(str(value) for value in values)
        elif self.flag:
            conditions = {str(value): (self.flag, str(value)) for value in values}
        else:
            conditions = {name: RENDERS[name] for name in values} or {"": ()}
        return [
            Cell(row, value, env, quick, method, flags, budgets, self.stages)
            for env in envs or self.envs
            for value, flags in conditions.items()
            for row, method in (rows or self.rows).items()
        ]


BUDGETS = (2000, 4000, 8000, 16_000, 32_000, 64_000, 128_000)
QUICK_BUDGETS = (500, 1000, 2000, 4000, 5000)  # Meta-World's quick data has 6000 transitions
EXPERIMENTS = {
    "main-table": Experiment("all methods, clean and with distractors", [*DCS, *DMW], METHODS, values=tuple(RENDERS)),
    "label-budget": Experiment("score against labels", [*DCS, *DMW], METHODS, "--num-labels", BUDGETS, QUICK_BUDGETS),
    "latent-dim": Experiment(
        "NMSE against d_z", DCS, LOSSES, "--latent-dim", (32, 64, 128, 256, 512, 1024), stages="lam"
    ),
    "occlusion": Experiment(
        "NMSE against the agent's occlusion", DCS, LOSSES, "--occlusion", (0.0, 0.25, 0.5, 0.75), stages="lam"
    ),
    "mask-dilation": Experiment(
        "NMSE against grown masks", DMW, GROWN, "--mask-dilation", (-3, -2, -1, 0, 1, 2, 3), stages="lam"
    ),
    "ablations": Experiment("MaskLAM without each of its parts", [*DCS, *DMW], ABLATIONS, stages="lam"),
}


# ---------------------------------------------------------------------------------------------------------------------
# Jobs


@dataclass(eq=False)
class Job:
    """A command that must have been done.

    Args:
        name: unique; names the log.
        argv: words after ``python``.
        done: whether there is nothing left to do. Jobs that share a data set are done together.
        needs: jobs that must be finished before.
        slurm_id: of the task in Slurm's queue, such as 12_3; it was last in the queue at `last_seen`.
    """

    name: str
    argv: Sequence[str]
    done: Callable[[], bool]
    needs: tuple[Job, ...] = ()
    state: Literal["waiting", "running", "finished", "failed", "not started"] = "waiting"
    reason: str = ""
    slurm_id: str = ""
    last_seen: float = 0.0

    def __post_init__(self) -> None:
        if self.done():
            self.state = "finished"

    @property
    def command(self) -> str:
        return f"python {shlex.join(self.argv)}"

    def ended(self, reason: str, started: bool = True) -> None:
        self.state = "finished" if self.done() else "failed" if started else "not started"
        self.reason = reason
        print(f"{self.state}: {self.name}", flush=True)

    def ready(self) -> bool:
        """True if it can start; a job that needs one that failed is not started at all."""
        if self.state != "waiting" or any(need.state in ("waiting", "running") for need in self.needs):
            return False
        if not all(need.state == "finished" or need.done() for need in self.needs):
            self.state = "not started"
        return self.state == "waiting"


@dataclass(eq=False, kw_only=True)
class RunJob(Job):
    """The job that makes one run: a cell with a seed."""

    cell: Cell
    args: Any
    """of the method script"""
    run_dir: Path

    @property
    def inputs(self) -> set[tuple[str, str]]:
        """The data set, and the masks if they are not its own: task, and masks' name or gt."""
        return {(self.cell.env, "gt"), (self.cell.env, getattr(self.args, "mask_source", "gt"))}

    def ready(self) -> bool:
        """As any job, and not while another process makes the run, such as one that outlived a killed reproduce.py."""
        if not super().ready():
            return False
        if taken := runs.is_taken(self.run_dir):
            if not self.reason:
                print(f"waiting for another process that makes {self.name}", flush=True)
            self.reason = "another process makes it"
        return not taken


# ---------------------------------------------------------------------------------------------------------------------
# The command line, and the runs that it asks for

ExperimentName = Literal[(*EXPERIMENTS, "all")]


@dataclass
class Args:
    experiment: Annotated[ExperimentName, tyro.conf.Positional] = "main-table"
    """which experiment; all: each of them"""
    env: list[str] = field(default_factory=list)
    """tasks; none: those of the paper's experiment"""
    methods: list[str] = field(default_factory=list)
    """rows of main-table and label-budget, such as LAPO MaskLAM@GT, or method scripts of your own, such as my_masklam;
    none: the paper's six rows"""
    seeds: Count = 3
    """seeds 1 to this one"""
    values: list[str] = field(default_factory=list)
    """values of a sweep instead of the paper's, such as 2000 8000; for main-table: distractor or vanilla alone"""
    quick: bool = False
    """--quick for scripts and data: small networks, a short schedule, for a CPU"""
    set: list[str] = field(default_factory=list)
    """further flags of the method scripts, NAME=VALUE or NAME: lam-updates=100 no-augment; scripts without such a flag
    run without it. The runs keep their names, so use another --runs-dir for each choice."""
    data_set: list[str] = field(default_factory=list)
    """further flags of make_dataset.py for data that is missing: backgrounds=synthetic train-transitions=2000"""
    mask_set: list[str] = field(default_factory=list)
    """further flags of make_masks.py for masks that are missing: checkpoint=sam2.1_hiera_tiny.pt image-size=512"""
    data_dir: Path = Path("data")
    """folder of the data sets"""
    runs_dir: Path = Path("runs")
    """folder of the run directories; reproduce/ in it gets the logs"""
    executor: Literal["local", "slurm"] = "local"
    """local: processes on this machine; slurm: jobs of a cluster, whose file system all nodes share"""
    jobs: Count | None = None
    """jobs at a time; None: locally one per GPU (without one: per core, one thread each), on Slurm as many as it
    starts. On Slurm the limit is that of each job array: the runs on a task are one"""
    data_jobs: Count | None = None
    """jobs that share the shards of a data set, and of its masks; None: 1 locally, 8 on Slurm"""
    slurm: list[str] = field(default_factory=list)
    """Slurm: options for sbatch beside gpus-per-node=1 cpus-per-task=16 mem=64G time=24:00:00, or instead:
    partition=gpu account=lab time=48:00:00. A job that reaches its time limit saves and is queued again"""
    dry_run: bool = False
    """print what would run, with estimates, and run nothing"""


def flag_words(items: list[str], option: str) -> list[str]:
    """``["a_b=1", "no-c"]`` as ``["--a-b=1", "--no-c"]``. UserError for what cannot be a flag."""
    words = []
    for item in items:
        name, equals, value = item.lstrip("-").partition("=")
        if not name or " " in name:
            raise UserError(f"{option} {item!r}: write NAME=VALUE, or NAME for a switch")
        words.append(f"--{name.replace('_', '-')}{equals}{value}")
    return words


def field_of(word: str, script: str) -> str | None:
    """The field of a script's arguments that a word such as --no-augment or --lam-lr=1e-3 sets, or None."""
    name = word.removeprefix("--").partition("=")[0].replace("-", "_")
    fields = {field.name for field in dataclasses.fields(importlib.import_module(script).Args)}
    return next((field for field in (name, name.removeprefix("no_")) if field in fields), None)


def is_finished(run_dir: Path, args: Any) -> bool:
    """Whether a run is finished; one that cannot be read is not: its own command says why, and the others go on."""
    with contextlib.suppress(UserError, OSError):
        return runs.is_finished(run_dir, args)
    return False


def planned_run(cell: Cell, seed: int, args: Args) -> RunJob:
    """The job of a cell's run. UserError if its script refuses the command."""
    script, run_dir = cell.method.script, cell.run_dir(args.runs_dir, seed)
    further = [word for word in flag_words(args.set, "--set") if field_of(word, script)]
    words = ["--seed", str(seed), "--data-dir", str(args.data_dir), "--runs-dir", str(args.runs_dir)]
    words += ["--variant", cell.variant] if further else []  # else --set would be part of the name
    # The clips that make the data are those of the evaluation.
    data = dict(word.removeprefix("--").partition("=")[::2] for word in flag_words(args.data_set, "--data-set"))
    backgrounds = data.get("backgrounds", "davis")
    clips = data.get("davis-dir") if backgrounds == "davis" else backgrounds
    if clips and backgrounds != "synthetic":
        further.insert(0, f"--clips-dir={clips}")
    argv = cell.words(further)
    run_args, _ = parse(script, argv)
    return RunJob(
        name="-".join(run_dir.relative_to(args.runs_dir).parts),
        argv=(f"{script}.py", *argv, *words),
        done=functools.partial(is_finished, run_dir, run_args),
        cell=cell,
        args=run_args,
        run_dir=run_dir,
    )


def plan(args: Args) -> list[RunJob]:
    """The runs of an experiment. Those that experiments share are there once, with the decoders of all of them."""
    for name in args.env:
        get_task(name)
    names = list(EXPERIMENTS) if args.experiment == "all" else [args.experiment]
    varied = EXPERIMENTS[names[0]]
    if args.values and (len(names) > 1 or not varied.values):
        possible = [name for name, experiment in EXPERIMENTS.items() if experiment.values]
        raise UserError(f"--values is for one of {', '.join(possible)}")
    if not varied.flag and (unknown := set(args.values) - set(varied.values)):
        raise UserError(f"--values {' '.join(sorted(unknown))}: main-table has {', '.join(varied.values)}")
    if args.methods and any(EXPERIMENTS[name].rows is not METHODS for name in names):
        raise UserError("--methods is for main-table and label-budget; the other experiments are MaskLAM's")
    known = METHODS | {script: Method(script) for script in runs.method_scripts()}
    if unknown := set(args.methods) - set(known):
        raise UserError(f"--methods {' '.join(unknown)}: no such row or method script; there are {', '.join(known)}")
    rows = {name: known[name] for name in args.methods}
    cells: dict[tuple[str, str, str], Cell] = {}
    for name in names:
        for cell in EXPERIMENTS[name].cells(args.env, args.quick, args.values, rows):
            key = (cell.method.script, cell.env, cell.variant)
            same = cells.get(key, cell)
            stages = "all" if "all" in (same.stages, cell.stages) else "lam"
            cells[key] = replace(same, label_budgets=(*same.label_budgets, *cell.label_budgets), stages=stages)
    for word in flag_words(args.set, "--set"):
        fields = {field_of(word, cell.method.script) for cell in cells.values()} - {None}
        if not fields:
            raise UserError(f"--set {word}: no method script has this flag")
        if fields & {"env", "seed", "quick", "variant", "data_dir", "runs_dir"}:
            raise UserError(f"--set {word}: the experiments decide this; see --env, --seeds, --quick")
    return [planned_run(cell, seed, args) for cell in cells.values() for seed in range(1, args.seeds + 1)]


# ---------------------------------------------------------------------------------------------------------------------
# Data sets and masks that runs need


def data_is_there(data_dir: Path, env: str, renders: Sequence[str], masks: str) -> bool:
    """True if both splits of a data set are complete, with masks of that name; "gt" are the data set's own."""
    try:
        for render, split in itertools.product(renders, ("train", "test")):
            Dataset(data_dir, env, split, render, masks)
    except UserError:
        return False
    return True


def maker(args: Args, env: str, masks: str) -> list[str]:
    """The command that makes a data set, or masks of it. UserError for masks that cannot be made here."""
    if masks == "gt":
        words = ["make_dataset.py", "--env", env, *(["--quick"] if args.quick else [])]
        words += flag_words(args.data_set, "--data-set")
    elif masks == "sam":
        words = ["make_masks.py", "--env", env, *flag_words(args.mask_set, "--mask-set")]
    else:
        raise UserError(f"masks '{masks}' of {env} are missing: make_masks.py --env {env} --import DIR --name {masks}")
    return [*words, "--data-dir", str(args.data_dir)]


def all_jobs(args: Args, planned: list[RunJob]) -> list[Job]:
    """What makes missing data and masks, shared by several jobs each, and then the runs."""
    count = args.data_jobs or (1 if args.executor == "local" else 8)
    renders: dict[tuple[str, str], set[str]] = {}  # by task and masks, what unfinished runs need
    for run in planned:
        for key in run.inputs if run.state != "finished" else ():
            renders.setdefault(key, set()).add("distractor" if run.args.distractors else "clean")
    makers: dict[tuple[str, str], list[Job]] = {}
    for env, masks in sorted(renders, key=lambda key: key[1] != "gt"):  # masks after the data that they are of
        done = functools.partial(data_is_there, args.data_dir, env, sorted(renders[env, masks]), masks)
        if not done():
            argv, needs = maker(args, env, masks), tuple(makers.get((env, "gt"), ()))
            name = f"data-{env}" if masks == "gt" else f"masks-{masks}-{env}"
            makers[env, masks] = [Job(f"{name}-{number}", argv, done, needs) for number in range(1, count + 1)]
    for run in planned:
        run.needs = tuple(job for key in run.inputs for job in makers.get(key, ()))
    return [*itertools.chain(*makers.values()), *planned]


def describe(args: Args, jobs: list[Job]) -> str:
    """What is going to run, and what is known beforehand about hours and disk: at the paper's scale, the paper's."""
    planned = [job for job in jobs if isinstance(job, RunJob)]
    unfinished = [run for run in planned if run.state != "finished"]
    resumed = sum((run.run_dir / "args.json").exists() for run in unfinished)
    finished, new = len(planned) - len(unfinished), len(unfinished) - resumed
    lines = [f"{len(planned)} runs: {finished} finished, {resumed} to resume, {new} to start"]
    published = json.loads(NUMBERS.read_text(encoding="utf-8"))["wall_clock_hours_a100"]
    labels = {method.script: row.split("@")[0] for row, method in METHODS.items()}
    timed = [run.cell for run in unfinished if run.cell.method.script in labels and not args.quick]
    if timed:
        hours = sum(published[labels[cell.method.script]][get_task(cell.env).suite] for cell in timed)
        lines.append(f"{len(timed)} of them: {hours:,.0f} hours of one A100, if each trains as long as the paper's")
    missing = sorted({job.argv[2] for job in jobs if job.argv[0] == "make_dataset.py"})
    if missing:
        size = sum(DATA_GB[get_task(env).suite] for env in missing)
        size = "" if args.quick or args.data_set else f", {size:,} GB with both renders"
        lines.append(f"data to make first: {', '.join(missing)}{size}")
    return "\n".join(lines)


# ---------------------------------------------------------------------------------------------------------------------
# Running them

LOG_LINES = 12  # of a failed job that are shown
ARRAY = 500  # jobs per array: Slurm's limit is 1001 by default
QUEUE_SECONDS = 10  # between two looks at Slurm's queue
FILE_SECONDS = 60.0  # until what a job wrote must be seen here, on a network file system
SLURM = ("gpus-per-node=1", "cpus-per-task=16", "mem=64G", "time=24:00:00")  # options of sbatch
SIGNAL_SECONDS = 120  # before Slurm's time limit, for the script to save


def run_local(jobs: list[Job], folder: Path, at_once: int | None) -> None:
    """Runs jobs as processes on this machine, each after those that it needs.

    Raises Stopped at a signal, after the processes have saved and ended.
    """
    import torch

    count, cores = torch.cuda.device_count(), len(os.sched_getaffinity(0))
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count)))).split(",")[:count]
    slots = at_once or len(gpus) or cores
    # Threads that wait in a loop for their turn would take the cores from the other jobs.
    usual = {"OMP_NUM_THREADS": str(max(1, cores // slots)), "OMP_WAIT_POLICY": "passive"}
    processes: dict[int, tuple[Job, subprocess.Popen[bytes]]] = {}  # by slot
    while any(job.state in ("waiting", "running") for job in jobs):
        for slot, (job, process) in list(processes.items()):
            if process.poll() is not None:
                del processes[slot]
                job.ended(f"exit code {process.returncode}")
        if stop_requested():
            print(f"stopping {len(processes)} jobs, which save what they have", flush=True)
            for _, process in processes.values():
                process.terminate()
            for _, process in processes.values():
                process.wait()
            raise Stopped(f"{sum(job.state != 'finished' for job in jobs)} jobs are left")
        ready = [job for job in jobs if job.ready()]
        for slot, job in zip([slot for slot in range(slots) if slot not in processes], ready):
            environment = usual | os.environ
            if gpus:
                environment["CUDA_VISIBLE_DEVICES"] = gpus[slot % len(gpus)]
            with open(folder / f"{job.name}.log", "ab") as log:
                log.write(f"\n$ {job.command}\n".encode())
                log.flush()
                process = subprocess.Popen(
                    [sys.executable, "-u", *job.argv],
                    cwd=ROOT,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # a Ctrl-C in the terminal is for this process, which decides
                )
            processes[slot] = (job, process)
            job.state = "running"
            print(f"start: {job.name}", flush=True)
        time.sleep(0.2)


def slurm_queue() -> set[str] | None:
    """Slurm's numbers of this user's jobs that have not ended, such as 12_3; None if Slurm does not answer."""
    command = ["squeue", "--me", "--noheader", "--array", "--format=%i"]
    result = subprocess.run(command, capture_output=True, text=True)
    return set(result.stdout.split()) if result.returncode == 0 else None


JOB_SCRIPT = """#!/bin/bash
# Runs one command per task of the array. Before its time limit, or when it is preempted, a task gets SIGTERM: the
# command saves and ends with 143 (128 + SIGTERM), the task is queued again, and the command resumes.
cd {root}
case $SLURM_ARRAY_TASK_ID in
{cases}
esac
echo "$ python ${{command[*]}}"
{python} -u "${{command[@]}}" &
trap 'kill -TERM $!' TERM
until wait $!; code=$?; ! kill -0 $! 2>/dev/null; do :; done
task=${{SLURM_ARRAY_JOB_ID}}_$SLURM_ARRAY_TASK_ID
# A task that is not RUNNING any more was cancelled, or Slurm itself queues it again.
if [ $code = 143 ] && scontrol show job "$task" | grep -q JobState=RUNNING; then
    scontrol requeue "$task"
fi
exit $code
"""


def submit(jobs: list[Job], args: Args, folder: Path) -> None:
    """Submits jobs that need the same ones as an array. UserError if Slurm refuses it."""
    cases = "\n".join(f"{number}) command=({shlex.join(job.argv)}) ;;" for number, job in enumerate(jobs))
    script = JOB_SCRIPT.format(root=shlex.quote(str(ROOT)), cases=cases, python=shlex.quote(sys.executable))
    options = [f"--array=0-{len(jobs) - 1}" + (f"%{args.jobs}" if args.jobs else ""), "--job-name=reproduce"]
    options += [f"--signal=B:TERM@{SIGNAL_SECONDS}", "--requeue"]
    options += [f"--output={folder}/slurm-%A_%a.log", "--open-mode=append"]
    unfinished = [need.slurm_id for need in jobs[0].needs if need.state == "running"]
    if unfinished:
        options += [f"--dependency=afterok:{':'.join(unfinished)}", "--kill-on-invalid-dep=yes"]
    options += [f"--{word.removeprefix('--')}" for word in (*SLURM, *args.slurm)]  # the last one counts
    result = subprocess.run(["sbatch", "--parsable", *options], input=script, capture_output=True, text=True)
    if result.returncode:
        raise UserError(f"sbatch refused {len(jobs)} jobs: {result.stderr.strip()}\nsbatch {shlex.join(options)}")
    array = result.stdout.strip().split(";")[0]
    print(f"submitted: {len(jobs)} jobs as Slurm's array {array}", flush=True)
    for number, job in enumerate(jobs):
        job.state, job.slurm_id = "running", f"{array}_{number}"
        # The log's name leads to the task's output, and tells a later command which task it was.
        link = folder / f"{job.name}.log"
        link.unlink(missing_ok=True)
        link.symlink_to(f"slurm-{job.slurm_id}.log")


def run_slurm(jobs: list[Job], args: Args, folder: Path) -> None:
    """Submits jobs to Slurm, which starts each after those that it needs, and waits for them.

    Raises Stopped at a signal: what was submitted stays in the queue, and a later command finds it there.
    """
    queue = slurm_queue() if shutil.which("sbatch") else None
    if queue is None:
        raise UserError("--executor slurm: sbatch or squeue does not work here; use a login node, or --executor local")
    arrays: dict[tuple[str, ...], list[Job]] = {}
    for job in jobs:
        link = folder / f"{job.name}.log"
        earlier = link.readlink().stem.removeprefix("slurm-") if link.is_symlink() else ""
        if earlier in queue:
            job.slurm_id, job.state = earlier, "running"
            print(f"in the queue: {job.name}, Slurm job {job.slurm_id}", flush=True)
        elif job.state == "waiting":
            arrays.setdefault(tuple(need.name for need in job.needs), []).append(job)
    for array in arrays.values():
        for first in range(0, len(array), ARRAY):
            submit(array[first : first + ARRAY], args, folder)
    for job in jobs:
        job.last_seen = time.monotonic()
    while running := [job for job in jobs if job.state == "running"]:
        queue = slurm_queue()
        for job in running if queue is not None else []:
            if job.slurm_id in queue:
                job.last_seen = time.monotonic()
            elif job.done() or time.monotonic() - job.last_seen > FILE_SECONDS:
                job.ended(f"Slurm job {job.slurm_id}", started=(folder / f"{job.name}.log").exists())
        for _ in range(5 * QUEUE_SECONDS):
            if stop_requested():
                left = " ".join(sorted({job.slurm_id.split("_")[0] for job in running}))
                raise Stopped(f"{len(running)} jobs stay in Slurm's queue (scancel {left} ends them)")
            time.sleep(0.2)


def report(jobs: list[Job], folder: Path) -> None:
    """UserError with commands and the ends of logs if not all jobs are finished, whoever finished them."""
    failed = [job for job in jobs if job.state == "failed" and not job.done()]
    not_started = [job for job in jobs if job.state == "not started" and not job.done()]
    lines = [f"{len(failed)} of {len(jobs)} jobs failed"]
    for job in failed:
        log = folder / f"{job.name}.log"
        text = log.read_text(encoding="utf-8", errors="replace").rstrip() if log.exists() else "no log"
        lines += ["", f"{job.name} ({job.reason}), log {log}", f"  {job.command}"]
        # Of a progress bar that was printed over itself, only the last state.
        lines += ["  | " + line.rsplit("\r", 1)[-1] for line in text.splitlines()[-LOG_LINES:]]
    if not_started:
        lines += ["", f"{len(not_started)} jobs were not started: cancelled, or others that they need did not finish"]
        lines += [f"  {job.name}" for job in not_started]
    lines += ["", "Rerun the same command to try them again; what is finished is skipped."]
    if failed or not_started:
        raise UserError("\n".join(lines))


def main(args: Args) -> None:
    jobs = all_jobs(args, plan(args))
    for name, experiment in EXPERIMENTS.items():
        if args.experiment in (name, "all"):
            print(f"{name}: {experiment.title}")
    print(describe(args, jobs), flush=True)
    if args.dry_run:
        for job in jobs:
            print(f"{'# finished: ' if job.state == 'finished' else ''}{job.command}")
        return
    folder = (args.runs_dir / "reproduce").absolute()
    folder.mkdir(parents=True, exist_ok=True)
    if args.executor == "slurm":
        run_slurm(jobs, args, folder)
    else:
        run_local(jobs, folder, args.jobs)
    report(jobs, folder)
    figures = ["python", "make_figures.py", *(["--quick"] if args.quick else []), "--seeds", str(args.seeds)]
    print(f"all finished; tables and figures: {shlex.join([*figures, '--runs-dir', str(args.runs_dir)])}")


if __name__ == "__main__":
    cli(main, Args())
