"""What tests need to build, train and run each method script on a planted data set."""

import contextlib
import dataclasses
import importlib
import json
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

from common import evaluation, runs, store
from common.cli import cli
from common.dataset import Dataset, LabelledSampler, Sampler, sequential

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[1]
TINY = {"policy_scale": 1, "batch_size": 16, "latent_dim": 16, "num_labels": (40,)}
# Each method's own small networks.
OWN: dict[str, dict[str, Any]] = {
    "lapo": {"idm_scale": 1, "fdm_scale": 1},
    "laom_labels": {"idm_scale": 1, "head_dim": 32},
    "laof": {"idm_scale": 1, "lam_clip": 2.0, "world_model_width": 4},
    "lapo_slots": {"lam_clip": 1.0, "slot_dim": 8, "renderer_dim": 16, "lam_dim": 32},
    "masklam": {"idm_scale": 1, "fdm_scale": 1},
}
SCRIPTS = tuple(OWN)
# What whole runs need beside: small frozen networks with seeded random weights, since the real ones are large.
FROZEN: dict[str, dict[str, Any]] = {
    "laof": {"raft": "small", "raft_iterations": 1},
    "lapo_slots": {"dino_model": "test_vit", "dino_weights": "random", "dino_image_size": 48}
    | {"slot_updates": 10, "slot_warmup": 2},
}


def raft_checkpoint(folder: Path) -> Path:
    """Writes random weights of RAFT small, seeded, as a checkpoint: the real ones are not on every machine."""
    from torchvision.models.optical_flow import raft_small

    path = folder / "raft_random.pth"
    if not path.exists():
        torch.manual_seed(0)
        torch.save(raft_small().state_dict(), path)
    return path


def words(values: dict[str, Any]) -> list[str]:
    """Arguments as they stand on the command line."""
    listed = []
    for name, value in values.items():
        listed += [f"--{name.replace('_', '-')}", *map(str, value if isinstance(value, tuple) else (value,))]
    return listed


def flags(script: str, folder: Path) -> list[str]:
    """A script's own flags for a tiny run; files that they name are written to `folder`."""
    raft = {"raft_checkpoint": raft_checkpoint(folder)} if script == "laof" else {}
    return words(OWN.get(script, {}) | FROZEN.get(script, {}) | raft)


def build(script: str, size: int = 32, seed: int = 0, action_dim: int = 6, **changes) -> tuple[ModuleType, Any, Any]:
    """The script's module, tiny arguments, and its model with seeded weights."""
    module = importlib.import_module(script)
    args = module.Args(**(TINY | OWN.get(script, {}) | changes))
    torch.manual_seed(seed)
    model = module.LatentActionModel(args, size, action_dim).apply(module.orthogonal_init)
    if script == "laom_labels":
        model.move_target(rate=1.0)
    return module, args, model


@contextlib.contextmanager
def double_precision() -> Iterator[None]:
    """Trains in float64 on one thread, where rounding differs between processors by 1e-16, not 1e-7.

    The methods write `.float()` where autocast would leave bfloat16; here that must not round to float32.
    """
    threads, to_float = torch.get_num_threads(), torch.Tensor.float
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    torch.Tensor.float = torch.Tensor.double
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.set_default_dtype(torch.float32)
        torch.Tensor.float = to_float


def attach_planted_flow(dataset: Dataset) -> None:
    """The true flow of a planted set as LAOF's: the square's displacement inside its mask, zero elsewhere."""
    size = dataset.image_size
    masks = np.unpackbits(dataset.masks(np.arange(dataset.num_frames)), axis=-1).reshape(-1, size, size, 1)
    step = np.diff(np.round(dataset.state), axis=0, append=0)[:, ::-1]  # to the next frame, x before y
    step[dataset.episode_start[1:] - 1] = 0
    flow = (masks * step[:, None, None]).astype(np.float16)
    cuts = np.cumsum([shard.frames for shard in dataset.shards])[:-1]
    dataset.attach("raft", [np.ascontiguousarray(part) for part in np.split(flow, cuts)], "planted")


def attach_planted_slots(dataset: Dataset, args: Any) -> None:
    """Slots of a planted set that depend on the state: the second is a random function of where the square is."""
    from common.slots import attach_slot

    rng = np.random.default_rng(0)
    mixing = rng.standard_normal((dataset.state_dim, args.slot_dim))  # the same for every split
    table = rng.standard_normal((dataset.num_frames, args.num_slots, args.slot_dim)).astype(np.float16)
    table[:, 1] = np.tanh(2 / dataset.image_size * dataset.state @ mixing)
    attach_slot(dataset, torch.from_numpy(table[:, 1]), 2, args.offset)


def lam_sampler(script: str, args: Any, dataset: Dataset) -> Any:
    """The sampler of stage 1."""
    options: dict[str, Any] = {"max_offset": getattr(args, "max_offset", 1), "seed": args.seed, "device": CPU}
    if script == "laof":
        attach_planted_flow(dataset)
        return Sampler(dataset, args.batch_size, fields=("frames", "masks", "raft"), **options)
    if script == "lapo_slots":
        attach_planted_slots(dataset, args)
        return Sampler(dataset, args.batch_size, fields=("slots",), **options)
    if script == "laom_labels":
        labelled = dataset.labelled(max(args.num_labels), args.seed)
        return LabelledSampler(dataset, labelled, args.batch_size, **options)
    return Sampler(dataset, args.batch_size, fields=("frames", "masks"), **options)


def lam_training(
    module: ModuleType, args: Any, model: nn.Module, data_dir: Path, updates: int, updated=lambda model: None
) -> nn.Module:
    """Trains stage 1 on a planted set and returns the model. `updated` is called after every update."""
    script = module.__name__
    dataset = Dataset(data_dir, "cheetah-run", "train")
    if torch.get_default_dtype() == torch.float64:  # a loss does not mix types
        dataset.action = dataset.action.astype(np.float64)
    run = runs.Run(args, script, "test", {})
    probe = nn.Linear(args.latent_dim, dataset.action_dim)
    sampler = lam_sampler(script, args, dataset)

    def after_update(model: nn.Module) -> None:
        updated(model)
        if script == "laom_labels":
            model.move_target(args.target_rate)

    rates = (args.lam_lr, args.lam_clip)
    module.train(run, args, "lam", model, module.lam_loss, sampler, updates, *rates, probe, after_update)
    sampler.close()
    run.close()
    return model


def pair_nmse(module: ModuleType, args: Any, model: nn.Module, data_dir: Path, prepare=lambda dataset: None) -> float:
    """NMSE of the actions given a planted set's latent actions. `prepare` is called with each split before."""
    sets = [Dataset(data_dir, "cheetah-run", split) for split in ("train", "test")]
    fields = ("slots",) if module.__name__ == "lapo_slots" else ("frames", "masks")

    def pairs(dataset: Dataset) -> evaluation.Pairs:
        with torch.inference_mode():
            for batch in sequential(dataset, 256, max_offset=1, device=CPU, fields=fields):
                yield module.encode(model, batch, args), batch.action

    for dataset in sets:
        prepare(dataset)
    return evaluation.nmse(pairs(sets[0]), pairs(sets[1]), sets[0].action_variance)["nmse"]


def command_lines() -> dict[str, Any]:
    """The usual arguments of every script and benchmark by its module's name; of import_data, those of each kind."""
    required = {"name": "x", "folder": Path("x"), "task": "push", "run": Path("x")}
    found = {}
    for path in sorted([*ROOT.glob("*.py"), *ROOT.glob("benchmarks/*.py")]):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        if "    cli(main, " in path.read_text(encoding="utf-8"):
            module = importlib.import_module(name)
            make = getattr(module, "defaults", None) or getattr(module, "default_args", None)
            kinds = (module.Videos, module.Lerobot, module.Authors) if name == "import_data" else ()
            for kind in kinds or (() if make else (module.Args,)):
                needed = required.keys() & {field.name for field in dataclasses.fields(kind)}
                default = kind(**{field: required[field] for field in needed if not hasattr(kind, field)})
                found[f"{name} {kind.__name__}" if kinds else name] = default
            if make and not kinds:
                found[name] = make([])
    return found


# --- scripts as processes

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)  # signals that save and end


def _run_script(
    script: str, words: list[str], output: Path, file_limit: int | None, prepare: Callable[[], object] | None
) -> None:
    """What a child process does: the script's command line, with its output in files."""
    os.setsid()  # so that a test can signal it together with its environments' processes
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(output / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644), descriptor)
    for number in STOPS:  # tests in the background ignore some of them, as after nohup
        signal.signal(number, signal.SIG_DFL)
    if file_limit is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_limit, resource.RLIM_INFINITY))
    torch.set_num_threads(1)
    sys.argv = [f"{script}.py", *words]
    module = importlib.import_module(script)
    if prepare is not None:
        prepare()
    cli(module.main, module.defaults if hasattr(module, "defaults") else module.Args())


# A server that has imported what is slow to import forks the processes; it has used none of it, so that is safe.
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(
    "torch torch._dynamo gymnasium h5py matplotlib.pyplot torchvision timm sklearn.pipeline tests.preload".split()
)


class ScriptProcess:
    """A script (not make_dataset.py) that runs in a process of its own, as from the command line.

    file_limit: bytes that a file may have; more is an error of the operating system, as on a full disk.
    prepare: called in the process before the script.
    """

    def __init__(
        self,
        script: str,
        words: list[str],
        output: Path,
        file_limit: int | None = None,
        prepare: Callable[[], object] | None = None,
    ) -> None:
        output.mkdir(parents=True, exist_ok=True)
        self.output = output
        self.process = SERVER.Process(target=_run_script, args=(script, words, output, file_limit, prepare))
        self.process.start()

    def until(self, happened: Callable[[], bool]) -> None:
        """Waits until `happened()`, while the process runs."""
        while not happened():
            assert self.process.is_alive(), self.wait()
            time.sleep(0.01)

    def signal(self, number: int) -> None:
        """Sends a signal to the process and to those that it started."""
        os.killpg(self.process.pid, number)

    def size(self) -> int:
        """How many processes there are: this one and those that it started."""
        count = 0
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(ProcessLookupError):
                count += os.getpgid(int(path.name)) == self.process.pid
        return count

    def wait(self) -> subprocess.CompletedProcess:
        self.process.join(600)
        texts = ((self.output / name).read_text() for name in ("stdout", "stderr"))
        return subprocess.CompletedProcess(self.process.name, self.process.exitcode, *texts)


def python(*words: object, **options: Any) -> subprocess.Popen:
    """Starts a new interpreter in the repository's folder; its output is kept."""
    command = [sys.executable, *map(os.fsencode, map(str, words))]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=ROOT, **pipes | options)


def finish(process: subprocess.Popen) -> subprocess.CompletedProcess:
    """Waits for what `python` started."""
    output, errors = process.communicate(timeout=600)
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)


def wait_until(condition: Callable[[], object], *processes: subprocess.Popen) -> None:
    """Waits, five minutes at most, while the processes run."""
    deadline = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        for process in processes:
            assert process.poll() is None, process.communicate()
        time.sleep(0.005)


def metrics(directory: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics; one that is being written is left out."""
    lines, path = [], directory / "metrics.jsonl"
    for line in path.read_text().splitlines() if path.exists() else []:
        with contextlib.suppress(json.JSONDecodeError):
            lines.append(json.loads(line))
    return lines


# --- files

HASHES = {"train_hash": "d", "test_hash": "d", "mask_hash": "gt", "device_type": "cpu"}


def open_run(runs_dir: Path, identity: dict[str, str] | None = None, **changes: Any) -> runs.Run:
    """A run of lapo.py, `test`, without networks."""
    args = importlib.import_module("lapo").Args(runs_dir=runs_dir, **changes)
    return runs.Run(args, "lapo", "test", identity or {"train_hash": "a"})


def write_run(
    runs_dir: Path,
    /,
    script: str,
    env: str,
    seed: int,
    nmse: float | None = 0.5,
    *,
    variant: str | None = None,
    quick: bool = False,
    commit: str = "a" * 40,
    identity: dict[str, Any] | None = None,
    metrics: dict[str, Any] | None = None,
    decoders: dict[int, float] | None = None,
    **changes: Any,
) -> Path:
    """Makes the directory of a finished run by hand, with a script's defaults and `changes`.

    nmse: None for a run without a result. identity: hashes that differ from the usual. decoders: budgets and their
    scores. metrics: instead of the usual.
    """
    base = importlib.import_module(script).defaults([f"--env={env}", *(["--quick"] if quick else [])])
    args = dataclasses.replace(base, seed=seed, **changes)
    directory = runs_dir / script / env / (variant or runs.variant_name(args, base)) / f"seed{seed}"
    store.write_json(directory / "args.json", runs.jsonable(args) | HASHES | (identity or {}))
    (directory / "metrics.jsonl").touch()
    if nmse is None:
        return directory
    usual = {"eval/nmse": nmse, "eval/nmse_untrained": nmse + 0.125, "eval/return": 5.0}
    usual |= {"eval/normalised_paper": 0.25, "eval/normalised_dataset": 0.125}
    plan = {"image_size": 32, "action_dim": 6, "expert": "laom", "episode_length": 250}
    result = {
        "metrics": usual | (metrics or {}),
        "commit": commit,
        "peak_memory_gib": 2.5,
        "seconds": {"lam": 3600.0, "policy": 1800.0, "probe": 360.0, "rollout-2000": 99.0},
        "machine": {"cpu": "a CPU", "gpu": None},
        "stages": {"lam": {"seconds": 3600.0, "samples_per_s": 80.0}, "policy": {}},
        "dataset": {"train": {"plan": plan, "mean_return": 123.5, "success_rate": None, "action_variance": 0.625}},
        "decoders": [{"num_labels": count, "normalised_paper": score} for count, score in (decoders or {}).items()],
    }
    store.write_json(directory / "result.json", result, with_hash=True)
    return directory


def contents(folder: Path, pattern: str = "*") -> dict[str, bytes]:
    """What the files in a folder hold, hidden ones too, by their path in it."""
    paths = [path for path in folder.rglob(pattern) if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}
