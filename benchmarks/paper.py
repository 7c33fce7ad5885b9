"""The paper's experiments: which commands each consists of, and running them here or on a Slurm cluster.

    python -m benchmarks.paper main-table --env cheetah-run --dry-run
    python -m benchmarks.paper all --executor slurm --partition gpu --hours 48
    python make_figures.py

Data sets and masks that are missing are made first. Runs that are finished are skipped, so the same command goes on
after a stop. What the experiments share (MaskLAM at its defaults) is run once. Logs: <runs-dir>/paper/logs.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import json
import os
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from benchmarks.jobs import Cluster, Job, Runner
from common import runs
from common.dataset import Dataset
from common.errors import UserError
from common.shards import sidecar_path
from common.tasks import TASKS, get_task

# ---------------------------------------------------------------------------------------------------------------------
# The experiments. A row of the main table: its script and flags, and those that only the paper's scale has.

METHODS: dict[str, tuple[str, list[str], list[str]]] = {
    "LAPO": ("lapo", [], []),
    "LAOM-Labels": ("laom_labels", [], ["--policy-scale", "32"]),
    "LAOF": ("laof", [], []),
    "LAPO-Slots": ("lapo_slots", [], []),
    "MaskLAM@GT": ("masklam", [], []),
    "MaskLAM@SAM": ("masklam", ["--mask-source", "sam"], []),
}
DCS = [task.name for task in TASKS.values() if task.suite == "dcs"]
DMW = [task.name for task in TASKS.values() if task.suite == "dmw"]
QUICK_BUDGETS = [500, 1000, 2000, 4000]  # the quick data of Meta-World has 6,000 transitions
LABEL_BUDGETS = [2000, 4000, 8000, 16_000, 32_000, 64_000, 128_000]
LATENT_DIMS = [32, 64, 128, 256, 512, 1024]
OCCLUSIONS = [0.0, 0.25, 0.5, 0.75]
DILATIONS = [-3, -2, -1, 0, 1, 2, 3]
LOSSES = {"with masked loss": [], "without masked loss": ["--no-loss-mask"]}
ABLATIONS = {
    "MaskLAM": [],
    "w/o loss masking": ["--no-loss-mask"],
    "w/o mask channel": ["--no-mask-channel"],
    "w/o all masking": ["--no-loss-mask", "--no-mask-channel"],
    "w/ k=1": ["--max-offset", "1"],
    "w/o all masking, k=1 (LAPO)": ["--no-loss-mask", "--no-mask-channel", "--max-offset", "1"],
    "w/ input masking": ["--input-mask", "--no-loss-mask"],
}


@dataclass(frozen=True)
class Planned:
    """One run of an experiment: a method script's command, without the flags that all share."""

    method: str
    env: str
    seed: int
    flags: tuple[str, ...] = ()
    lam_from: Planned | None = None


def main_table(envs: list[str], methods: list[str], seeds: list[int], values: list[str]) -> list[Planned]:
    renders: list[tuple[str, ...]] = [(), ("--no-distractors",)]
    return [Planned(m, env, seed, flags) for env in envs for flags in renders for m in methods for seed in seeds]


def label_budget(envs: list[str], methods: list[str], seeds: list[int], values: list[str]) -> list[Planned]:
    """The latent action model and the policy are those of the main table's run; only the decoder is trained again."""
    found = []
    for env, method, seed in ((e, m, s) for e in envs for m in methods for s in seeds):
        whole = Planned(method, env, seed)
        found.append(whole)
        found += [Planned(method, env, seed, ("--num-labels", budget), whole) for budget in values]
    return found


def sweep(name: str, lines: dict[str, list[str]]) -> Callable[..., list[Planned]]:
    """MaskLAM at each value of a flag, with the flags of each line. A value that is the default is the main table's."""

    def planned(envs: list[str], methods: list[str], seeds: list[int], values: list[str]) -> list[Planned]:
        return [
            Planned("MaskLAM@GT", env, seed, (*flags, name, value))
            for env in envs
            for value in values
            for flags in lines.values()
            for seed in seeds
        ]

    return planned


def ablations(envs: list[str], methods: list[str], seeds: list[int], values: list[str]) -> list[Planned]:
    return [Planned("MaskLAM@GT", env, seed, tuple(f)) for env in envs for f in ABLATIONS.values() for seed in seeds]


@dataclass(frozen=True)
class Experiment:
    title: str
    envs: list[str]
    plan: Callable[..., list[Planned]]
    values: list[Any] = field(default_factory=list)


EXPERIMENTS = {
    "main-table": Experiment("all methods, clean and with distractors", [*DCS, *DMW], main_table),
    "label-budget": Experiment("the policy's score against labels", [*DCS, *DMW], label_budget, LABEL_BUDGETS),
    "latent-dim": Experiment("NMSE against the latent dimension", DCS, sweep("--latent-dim", LOSSES), LATENT_DIMS),
    "occlusion": Experiment("NMSE against the agent's occlusion", DCS, sweep("--occlusion", LOSSES), OCCLUSIONS),
    "mask-dilation": Experiment("NMSE against grown masks", DMW, sweep("--mask-dilation", {"": []}), DILATIONS),
    "ablations": Experiment("MaskLAM without each of its parts", [*DCS, *DMW], ablations),
}


# ---------------------------------------------------------------------------------------------------------------------
# Commands


@dataclass
class Args:
    experiment: Annotated[
        Literal["main-table", "label-budget", "latent-dim", "occlusion", "mask-dilation", "ablations", "all"],
        tyro.conf.Positional,
    ] = "main-table"
    """which experiment; all: each of them"""
    env: list[str] = field(default_factory=list)
    """tasks; none: those of the paper's experiment"""
    methods: list[str] = field(default_factory=list)
    """rows of main-table and label-budget, such as LAPO MaskLAM@GT; none: all six"""
    seeds: int = 3
    """seeds 1 to this one"""
    values: list[str] = field(default_factory=list)
    """values of a sweep instead of the paper's, such as 2000 8000"""
    quick: bool = False
    """--quick for scripts and data: small networks, a short schedule, for a CPU"""
    set: list[str] = field(default_factory=list)
    """further flags of the method scripts, NAME=VALUE or NAME: lam-updates=100 no-augment; scripts without such a flag
    run without it"""
    data_set: list[str] = field(default_factory=list)
    """further flags of make_dataset.py for data that is missing: backgrounds=synthetic train-transitions=2000"""
    mask_set: list[str] = field(default_factory=list)
    """further flags of make_masks.py for masks that are missing: checkpoint=sam2.1_hiera_tiny.pt image-size=512"""
    data_dir: Path = Path("data")
    """folder of the data sets"""
    runs_dir: Path = Path("runs")
    """folder of the run directories; paper/ in it gets logs"""
    executor: Literal["local", "slurm"] = "local"
    """local: processes on this machine; slurm: jobs of a cluster, whose file system all nodes share"""
    jobs: int | None = None
    """jobs at a time; None: locally one per GPU (without one: per core, one thread each), on Slurm all at once"""
    data_jobs: int | None = None
    """jobs that share the shards of a data set, and of its masks; None: 1 locally, 8 on Slurm"""
    hours: float = 24.0
    """Slurm: time limit of a job; one that reaches it saves and is queued again"""
    partition: str | None = None
    """Slurm: partition"""
    gpus: int = 1
    """Slurm: GPUs per job"""
    cpus: int = 16
    """Slurm: cores per job"""
    memory_gb: int = 64
    """Slurm: memory per job"""
    slurm: list[str] = field(default_factory=list)
    """Slurm: further options of sbatch: account=lab constraint=a100"""
    dry_run: bool = False
    """print what would run, with estimates, and run nothing"""


def flag_words(items: list[str], option: str) -> list[list[str]]:
    """``["a=1", "no-b"]`` as ``[["--a", "1"], ["--no-b"]]``. UserError for what cannot be a flag."""
    words = []
    for item in items:
        name, equals, value = item.lstrip("-").partition("=")
        name = name.replace("_", "-")
        if not name or " " in name:
            raise UserError(f"{option} {item!r}: write NAME=VALUE, or NAME for a switch")
        words.append([f"--{name}", value] if equals else [f"--{name}"])
    return words


@functools.cache
def script_fields(script: str) -> frozenset[str]:
    return frozenset(f.name for f in dataclasses.fields(importlib.import_module(script).Args))


def field_of(flag: str, script: str) -> str | None:
    """The field of a script's arguments that a flag sets, or None."""
    name = flag.removeprefix("--").replace("-", "_")
    known = script_fields(script)
    return name if name in known else name.removeprefix("no_") if name.removeprefix("no_") in known else None


RESERVED = {"env", "seed", "quick", "variant", "lam_from", "data_dir", "runs_dir"}


def check_set(items: list[str]) -> None:
    """UserError for a flag in --set that no method script has, or that the experiments themselves decide."""
    for flag, *_ in flag_words(items, "--set"):
        names = {field_of(flag, script) for script, _, _ in METHODS.values()} - {None}
        if not names:
            raise UserError(f"--set {flag.removeprefix('--')}: no method script has {flag}")
        if names & RESERVED:
            raise UserError(
                f"--set {flag.removeprefix('--')}: the experiments decide this; see --env, --seeds, --quick"
            )


def known_flags(items: list[str], script: str) -> list[str]:
    """The words of --set that a script has a flag for."""
    return [word for flag in flag_words(items, "--set") if field_of(flag[0], script) for word in flag]


@functools.cache
def parse(script: str, argv: tuple[str, ...]) -> tuple[Any, Path]:
    """The arguments of a method script's command line, and its run directory. UserError if they are refused."""
    module = importlib.import_module(script)
    try:
        args = tyro.cli(module.Args, default=module.defaults(list(argv)), args=list(argv), console_outputs=False)
    except SystemExit:
        raise UserError(f"{script}.py refuses {shlex.join(argv)}; python {script}.py --help lists its flags") from None
    base = module.defaults([f"--env={args.env}", *(["--quick"] if args.quick else [])])
    return args, Path(args.runs_dir) / script / args.env / runs.variant_name(args, base) / f"seed{args.seed}"


@dataclass(frozen=True)
class Command:
    """A planned run as a command line."""

    planned: Planned
    script: str
    argv: tuple[str, ...]
    run_dir: Path

    @property
    def args(self) -> Any:
        return parse(self.script, self.argv)[0]

    @property
    def text(self) -> str:
        return f"python {self.script}.py {shlex.join(self.argv)}"

    @property
    def finished(self) -> bool:
        return (self.run_dir / "result.json").exists()


def command(planned: Planned, args: Args) -> Command:
    """The command line of a planned run with the flags that all share. UserError if its script refuses them."""
    script, own, paper_scale = METHODS[planned.method]
    words = ["--env", planned.env, "--seed", str(planned.seed), *(["--quick"] if args.quick else paper_scale)]
    words += [*known_flags(args.set, script), *own, *planned.flags]  # later ones win: a sweep's value over --set
    data = dict(flag for flag in flag_words(args.data_set, "--data-set") if len(flag) == 2)
    backgrounds = data.get("--backgrounds", "davis")
    clips = data.get("--davis-dir") if backgrounds == "davis" else backgrounds if backgrounds != "synthetic" else None
    if clips is not None and "--clips-dir" not in words:  # the clips that make the data are those of the evaluation
        words += ["--clips-dir", clips]
    if planned.lam_from is not None:
        words += ["--lam-from", str(command(planned.lam_from, args).run_dir)]
    words += ["--data-dir", str(args.data_dir), "--runs-dir", str(args.runs_dir)]
    return Command(planned, script, tuple(words), parse(script, tuple(words))[1])


def plan(args: Args) -> list[Command]:
    """The runs of an experiment, each directory once, those that others need before them."""
    for name in args.env:
        get_task(name)
    unknown = set(args.methods) - set(METHODS)
    if unknown:
        raise UserError(f"--methods {' '.join(sorted(unknown))}: no such row; there are {', '.join(METHODS)}")
    if args.seeds < 1:
        raise UserError(f"--seeds is {args.seeds}, must be at least 1")
    names = list(EXPERIMENTS) if args.experiment == "all" else [args.experiment]
    if args.values and (len(names) > 1 or not EXPERIMENTS[names[0]].values):
        raise UserError("--values is for one of the sweeps: label-budget, latent-dim, occlusion, mask-dilation")
    check_set(args.set)
    methods, seeds = args.methods or list(METHODS), list(range(1, args.seeds + 1))
    found: dict[Path, Command] = {}
    for name in names:
        experiment = EXPERIMENTS[name]
        usual = QUICK_BUDGETS if name == "label-budget" and args.quick else experiment.values
        values = args.values or [str(value) for value in usual]
        for planned in experiment.plan(args.env or experiment.envs, methods, seeds, values):
            made = command(planned, args)
            if planned.lam_from is not None:
                whole = command(planned.lam_from, args)
                found.setdefault(whole.run_dir, whole)
                if made.args.num_labels == whole.args.num_labels:  # nothing to train again
                    continue
            found.setdefault(made.run_dir, made)
    return list(found.values())


# ---------------------------------------------------------------------------------------------------------------------
# Jobs: data sets, masks, runs


def opened(args: Args, env: str, render: str, mask_source: str | None) -> list[Dataset] | UserError:
    """Both splits of a data set, or why they cannot be used."""
    try:
        return [Dataset(args.data_dir, env, split, render, mask_source) for split in ("train", "test")]
    except UserError as error:
        return error


def needed(commands: list[Command]) -> dict[str, set[tuple[str, str]]]:
    """What unfinished runs need of each task: pairs of render and mask source."""
    found: dict[str, set[tuple[str, str]]] = {}
    for one in commands:
        if not one.finished:
            render = "distractor" if one.args.distractors else "clean"
            found.setdefault(one.planned.env, set()).add((render, getattr(one.args, "mask_source", "gt")))
    return found


def data_jobs(args: Args, commands: list[Command]) -> dict[str, dict[str, list[Job]]]:
    """The jobs that make what is missing: by task, "gt" for the data set and by the names of masks."""
    count = args.data_jobs or (1 if args.executor == "local" else 8)
    shared = ["--data-dir", str(args.data_dir)]
    extra = [word for flag in flag_words(args.data_set, "--data-set") for word in flag]
    mask_extra = [word for flag in flag_words(args.mask_set, "--mask-set") for word in flag]
    found: dict[str, dict[str, list[Job]]] = {}
    for env, wanted in needed(commands).items():
        renders = sorted({render for render, _ in wanted})
        made = found.setdefault(env, {})

        def has(render: str, masks: str, env: str = env) -> bool:
            return not isinstance(opened(args, env, render, masks), UserError)

        if not all(has(render, "gt") for render in renders):
            argv = ["make_dataset.py", "--env", env, *(["--quick"] if args.quick else []), *extra, *shared]
            done = functools.partial(lambda has, renders: all(has(r, "gt") for r in renders), has, renders)
            made["gt"] = [Job(f"data-{env}-{i}", argv, done) for i in range(1, count + 1)]
        for name in sorted({masks for _, masks in wanted} - {"gt"}):
            lacking = [render for render, masks in sorted(wanted) if masks == name and not has(render, name)]
            if not lacking:
                continue
            if name != "sam":
                raise UserError(
                    f"the masks '{name}' of {env} are missing, and only SAM's can be made here: "
                    f"python make_masks.py --env {env} --import DIR --name {name}"
                )
            argv = ["make_masks.py", "--env", env, *mask_extra, *shared]
            done = functools.partial(lambda has, name, renders: all(has(r, name) for r in renders), has, name, lacking)
            jobs = [Job(f"masks-{name}-{env}-{i}", argv, done) for i in range(1, count + 1)]
            for job in jobs:
                job.needs += made.get("gt", [])
            made[name] = jobs
    return found


def all_jobs(args: Args, commands: list[Command]) -> list[Job]:
    """Data, masks and runs as jobs that know what they need."""
    data = data_jobs(args, commands)
    by_dir: dict[Path, Job] = {}
    for one in commands:
        planned, made = one.planned, data.get(one.planned.env, {})
        needs = [*made.get("gt", []), *made.get(getattr(one.args, "mask_source", "gt"), [])]
        if planned.lam_from is not None:
            needs.append(by_dir[command(planned.lam_from, args).run_dir])
        name = "-".join(one.run_dir.relative_to(args.runs_dir).parts)
        done = functools.partial(lambda one: one.finished, one)
        argv = [f"{one.script}.py", *one.argv]
        by_dir[one.run_dir] = Job(name, argv, done, needs, one.run_dir / ".lock")
    made = [job for kinds in data.values() for jobs in kinds.values() for job in jobs]
    return made + list(by_dir.values())


# ---------------------------------------------------------------------------------------------------------------------
# Estimates

RESULTS = Path(__file__).parent / "results"
NUMBERS = Path(__file__).parent / "paper_numbers.json"
COUNTED = {"lam": "lam_updates", "bc": "policy_updates", "decoder": "decoder_updates", "slots": "slot_updates"}
SHARED_STAGES = ("flow", "dino")  # computed once per data set, not per run


def recorded_runs() -> list[dict[str, Any]]:
    """Every run in benchmarks/results."""
    found = []
    for path in sorted(RESULTS.glob("*.json")):
        content = json.loads(path.read_text())
        runs_ = content if isinstance(content, list) else content.get("runs", []) if isinstance(content, dict) else []
        found += [run for run in runs_ if isinstance(run, dict) and {"script", "seconds", "args"} <= run.keys()]
    return found


def run_hours(one: Command, recorded: list[dict[str, Any]], paper: dict[str, Any]) -> tuple[float | None, str]:
    """Estimated hours of a run and where they come from: runs of this script, suite and scale in benchmarks/results,
    their stages scaled to this run's updates and episodes; else the paper's figure for a whole run; else None.
    """
    suite = get_task(one.planned.env).suite
    alike = [
        run
        for run in recorded
        if run["script"] == one.script
        and get_task(run["env"]).suite == suite
        and bool(run["args"].get("quick")) == one.args.quick
        and (one.args.quick or run["machine"].get("gpu"))
    ]
    if alike:
        totals = []
        for run in alike:
            total = 0.0
            for stage, seconds in run["seconds"].items():
                if stage in SHARED_STAGES or (one.planned.lam_from and stage in ("lam", "slots", "bc")):
                    continue
                wanted = getattr(one.args, COUNTED.get(stage, ""), None)
                made = run["stages"].get(stage, {}).get("updates")
                if wanted and made:
                    seconds *= wanted / made
                if stage == "rollout":
                    steps = sum(run["rollout"]["lengths"]) if "rollout" in run else None
                    mine = one.args.eval_episodes * (one.args.eval_steps or get_task(one.planned.env).max_steps)
                    theirs = steps or run["args"]["eval_episodes"] * (
                        run["args"]["eval_steps"] or get_task(run["env"]).max_steps
                    )
                    seconds *= mine / theirs
                total += seconds
            totals.append(total / 3600)
        where = "GPU" if alike[0]["machine"].get("gpu") else "core of a CPU"
        return sum(totals) / len(totals), where
    if one.args.quick or one.planned.lam_from is not None:
        return None, ""
    label = "MaskLAM" if one.script == "masklam" else one.planned.method
    return paper["wall_clock_hours_a100"][label][suite], "A100, the paper's figures"


def weight_bytes(one: Command, image_size: int) -> int:
    """Bytes of the trained networks of a run, from its own classes, without making them."""
    import torch

    module, task = importlib.import_module(one.script), get_task(one.planned.env)
    known = {"args": one.args, "size": image_size, "action_dim": task.action_dim}
    wanted = [known[name] for name in inspect.signature(module.LatentActionModel.__init__).parameters if name in known]
    with torch.device("meta"):
        networks = [
            module.LatentActionModel(*wanted),
            module.Encoder(9, one.args.policy_scale, image_size, one.args.latent_dim),
        ]
    return sum(w.numel() * w.element_size() for network in networks for w in network.parameters())


def data_bytes(args: Args, env: str, splits: list[str]) -> tuple[int, int, int]:
    """Bytes of a data set that make_dataset.py would write, and frames and pixels per frame."""
    import make_dataset

    argv = ["--env", env, *(["--quick"] if args.quick else [])]
    argv += [word for flag in flag_words(args.data_set, "--data-set") for word in flag]
    try:
        made = tyro.cli(make_dataset.Args, default=make_dataset.default_args(argv), args=argv, console_outputs=False)
    except SystemExit:
        raise UserError(f"make_dataset.py refuses {shlex.join(argv)}; python make_dataset.py --help") from None
    frames = made.train_transitions + made.test_transitions
    pixels = made.image_size**2
    renders = 2 if made.render == "both" else 1
    return frames * renders * (pixels * 3 + pixels // 8), frames, pixels


def size(count: float) -> str:
    """Bytes in words."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def describe(args: Args, commands: list[Command], jobs: list[Job]) -> str:
    """What is going to run, on which data, how long it may take and how much disk it needs."""
    import torch

    lines = []
    unfinished = [one for one in commands if not one.finished]
    started = [one for one in unfinished if (one.run_dir / "args.json").exists()]
    lines.append(
        f"{len(commands)} runs: {len(commands) - len(unfinished)} finished, {len(started)} to go on with, "
        f"{len(unfinished) - len(started)} to start"
    )
    recorded, paper = recorded_runs(), json.loads(NUMBERS.read_text())
    hours: dict[str, float] = {}
    unknown = 0
    for one in unfinished:
        estimate, source = run_hours(one, recorded, paper)
        if estimate is None:
            unknown += 1
        else:
            hours[source] = hours.get(source, 0.0) + estimate
    for source, total in hours.items():
        lines.append(f"training: about {total:.1f} hours of one {source}")
    if unknown:
        lines.append(f"training: no record to estimate {unknown} of the runs from, which are not in these hours")

    disk, temporary = 0.0, {}
    hashes = {}
    for env in {one.planned.env for one in commands}:
        there = opened(args, env, "distractor", "gt")
        if not isinstance(there, UserError):
            hashes[env] = there[0].hash
    for env, wanted in needed(commands).items():
        render = sorted(wanted)[0][0]
        there = opened(args, env, render, "gt")
        if isinstance(there, UserError):
            missing, frames, pixels = data_bytes(args, env, ["train", "test"])
            lines.append(f"data {env}: to be made, about {frames:,} transitions, {size(missing)}")
            disk += missing
        else:
            train, test = there
            frames, pixels = train.num_frames + test.num_frames, train.image_size**2
            settings = train.plan["distractors"]
            shown = settings["backgrounds"] if settings else "no distractors"
            count = f"{train.num_transitions:,} + {test.num_transitions:,} transitions"
            lines.append(
                f"data {env}: there, {count}, {train.image_size} pixels, {shown}, expert {train.expert['name']}"
            )
        scripts = {one.script: one for one in unfinished if one.planned.env == env}
        renders = {render for render, _ in wanted}
        derived = 0.0
        if "laof" in scripts and not _has(args, env, "raft"):
            derived += frames * pixels * 4 * len(renders)
        derived += sum(frames * pixels / 8 for _, masks in wanted if masks != "gt" and not _has(args, env, masks))
        if derived:
            lines.append(f"data {env}: flow and masks beside the shards, at most {size(derived)}")
        if "lapo_slots" in scripts and not _has(args, env, "dino"):
            features = _dino_bytes(scripts["lapo_slots"]) * frames * len(renders)
            lines.append(f"data {env}: DINOv2's features beside the shards, {size(features)} if there is room for them")
        weights = sum(weight_bytes(one, int(pixels**0.5)) for one in unfinished if one.planned.env == env)
        labels = max(frames * one.args.latent_dim * 4 for one in scripts.values())
        largest = max(weight_bytes(one, int(pixels**0.5)) for one in scripts.values())
        here = torch.cuda.device_count() or len(os.sched_getaffinity(0))
        here = here if args.executor == "local" else len(unfinished)
        at_once = min(args.jobs or here, len(unfinished))
        temporary[env] = at_once * (labels + 6 * largest)  # two checkpoints with AdamW's moments
        lines.append(f"runs {env}: {size(weights)} of weights stay")
        disk += derived + weights
    if unfinished:
        most = max(temporary.values())
        lines.append(
            f"disk: about {size(disk)} in all, and up to {size(most)} while the runs train (labels, checkpoints)"
        )
    stale = []
    for one in commands:
        if one.finished and one.planned.env in hashes:
            there = json.loads((one.run_dir / "result.json").read_text())["dataset"]["train"]["hash"]
            stale += [one] if there != hashes[one.planned.env] else []
    if stale:
        lines.append(f"warning: {len(stale)} finished runs saw other data than what is in {args.data_dir} now")
    counts = [sum(job.name.startswith(kind) and not job.done() for job in jobs) for kind in ("data-", "masks-")]
    if any(counts):
        lines.append(f"before the runs: {counts[0]} jobs for data, {counts[1]} for masks (not in the hours)")
    return "\n".join(lines)


def _has(args: Args, env: str, suffix: str) -> bool:
    """True if something of that name lies beside every shard of a task."""
    shards = [path for split in ("train", "test") for path in (args.data_dir / env / split).glob("[0-9]*.h5")]
    shards = [path for path in shards if path.name.count(".") == 1]
    return bool(shards) and all(sidecar_path(path, suffix).exists() for path in shards)


def _dino_bytes(one: Command) -> float:
    """Bytes of LAPO-Slots' features of one frame: outputs and keys in float16."""
    width = 768 if "base" in one.args.dino_model else 384
    return (one.args.dino_image_size // 14) ** 2 * 2 * width * 2


# ---------------------------------------------------------------------------------------------------------------------


def main(args: Args) -> None:
    commands = plan(args)
    jobs = all_jobs(args, commands)
    for name, experiment in EXPERIMENTS.items():
        if args.experiment in (name, "all"):
            print(f"{name}: {experiment.title}")
    print(describe(args, commands, jobs), flush=True)
    if args.dry_run:
        print()
        for job in jobs:
            print(f"{'# finished: ' if job.done() else ''}{job.command}")
        return
    figures = ["python", "make_figures.py", *(["--quick"] if args.quick else []), "--seeds", str(args.seeds)]
    figures += ["--runs-dir", str(args.runs_dir), *(["--set", *args.set] if args.set else [])]
    if all(job.done() for job in jobs):
        print(f"nothing to run; tables and figures: {shlex.join(figures)}")
        return
    places = {name: getattr(args, name) for name in ("partition", "gpus", "cpus", "memory_gb", "hours")}
    folder = args.runs_dir.absolute() / "paper"
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "commands.log", "a") as file:
        file.write(f"python -m benchmarks.paper {shlex.join(sys.argv[1:])}\n")
    cluster = Cluster(args.executor, folder, args.jobs, slurm=tuple(args.slurm), **places)
    Runner(cluster).run(jobs)
    print(f"all finished; tables and figures: {shlex.join(figures)}")


if __name__ == "__main__":
    runs.cli(main, Args())
