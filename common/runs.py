"""The directory of a run: its arguments, metrics, checkpoints and result; and what a result says of the machine.

A run directory holds ``args.json``, ``metrics.jsonl``, ``checkpoints/`` (two per unfinished stage), one ``<stage>.pt``
per finished stage, ``tables/`` (what frozen networks gave, until the run is finished), pictures and, at the end,
``result.json``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import pickle
import platform
import resource
import shutil
import subprocess
import sys
import time
import uuid
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common.cli import PathComponent, UserError
from common.store import Damaged, Taken, atomic_path, differences, lock_file, read_json, system_error, write_json
from common.tasks import get_task

ROOT = Path(__file__).parents[1]


# ---------------------------------------------------------------------------------------------------------------------
# Facts about the machine


def git_commit() -> str | None:
    """The commit of the code, with ``+changes`` if tracked files differ from it; None outside a repository."""
    command = ["git", "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=+changes"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    except OSError:  # no git
        return None
    return done.stdout.strip() or None


def versions() -> dict[str, str]:
    """Python and the packages that decide the numbers."""
    from importlib.metadata import PackageNotFoundError, version

    found = {"python": platform.python_version()}
    for package in ("torch", "numpy", "h5py", "dm_control", "mujoco", "metaworld", "gymnasium", "timm", "sam2"):
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def machine() -> dict[str, Any]:
    """Processor, cores, and the accelerator if there is one."""
    import torch

    cpu = platform.processor() or platform.machine()
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {"cpu": cpu, "cores": os.cpu_count(), "gpu": gpu, "torch_threads": torch.get_num_threads()}


def choose_device(name: str) -> Any:
    """The torch device called "auto" (the GPU, if there is one), "cuda" or "cpu". UserError if there is no GPU.

    Sets torch up for speed: TF32 matrix products, and cuDNN's fastest kernels, since shapes are fixed.
    """
    import torch

    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.benchmark = True
    found = torch.cuda.is_available()
    if name == "cuda" and not found:
        raise UserError(
            "--device cuda, but torch finds no GPU; use --device cpu, or a torch that was built for your GPU"
        )
    on_gpu = found and name != "cpu"  # with its number, as tensors on it have
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


def reset_peak_memory(device: Any) -> None:
    """Begins a new measurement of `peak_memory_gib`."""
    import torch

    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        with contextlib.suppress(OSError):  # Linux only; elsewhere the peak is that of the process
            Path("/proc/self/clear_refs").write_text("5")


def peak_memory_gib(device: Any) -> float:
    """Peak memory in GiB since `reset_peak_memory`: allocated on a CUDA device, else resident in this process."""
    import torch

    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/self/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("VmHWM:")).split()[1]) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


# ---------------------------------------------------------------------------------------------------------------------
# Run directory

# Fields that may differ between two commands that continue one run: they change neither data nor method. (Compiled code
# rounds differently; the kind of device is part of a run's identity.) So may paths: what they hold is known by hashes.
RUNTIME_FIELDS = frozenset(
    "stages variant device data_on_gpu eval_envs compile compile_mode log_every probe_at checkpoint_every "
    "track wandb_project".split()
)
LONGEST_NAME = 180  # of a variant, in bytes


def method_scripts() -> list[str]:
    """The names of the method scripts, without ``.py``: the files beside `common/` with the methods' marked regions."""
    mark = "# --- method: about ---"
    return sorted(path.stem for path in ROOT.glob("*.py") if path.read_text(encoding="utf-8").startswith(mark))


def is_runtime(field: dataclasses.Field[Any]) -> bool:
    """Whether a field of a script's arguments has no influence on the numbers."""
    return field.name in RUNTIME_FIELDS or "Path" in str(field.type)


def variant_name(args: Any, default: Any) -> str:
    """Names what `args` changes against the defaults of its environment, for the run directory: ``default`` or
    ``no-loss-mask_latent-dim=64``. Seed, environment and runtime fields have their own place and are left out; of
    several label budgets the largest counts.
    """
    if args.variant:
        return args.variant
    parts = ["quick"] if args.quick else []
    for field in dataclasses.fields(args):
        value, usual = getattr(args, field.name), getattr(default, field.name)
        if field.name == "num_labels":
            value, usual = max(value, default=max(usual)), max(usual)
        if is_runtime(field) or field.name in ("env", "seed", "quick") or value == usual:
            continue
        name = field.name.replace("_", "-")
        parts.append((name if value else f"no-{name}") if isinstance(value, bool) else f"{name}={value}")
    name = "_".join(parts).replace("/", "-") or "default"
    whole = name.encode()
    if len(whole) > LONGEST_NAME:  # file systems take 255 bytes
        name = f"{whole[: LONGEST_NAME - 9].decode(errors='ignore')}~{hashlib.sha256(whole).hexdigest()[:8]}"
    if complaint := PathComponent().complaint(name):
        raise UserError(f"the name of the run {complaint}; choose --variant")
    return name


def of_budget(name: str, num_labels: int, args: Any) -> str:
    """The name of a stage of one label budget: the largest has the plain one, which runs with a single budget use."""
    return name if num_labels == max(args.num_labels) else f"{name}-{num_labels}"


def jsonable(args: Any) -> dict[str, Any]:
    """The dataclass `args` as JSON values (paths as strings, tuples as lists)."""
    return json.loads(json.dumps(dataclasses.asdict(args), default=str))


def directory(args: Any, script: str, defaults: Callable[[list[str]], Any]) -> Path:
    """The run directory of a command. defaults: the script's function from a command line to the default arguments."""
    default = defaults([f"--env={args.env}", *(["--quick"] if args.quick else [])])
    return Path(args.runs_dir) / script / args.env / variant_name(args, default) / f"seed{args.seed}"


def is_finished(run_dir: Path, args: Any) -> bool:
    """Whether a run's result is there, for the stages and all label budgets that a script's arguments ask for."""
    path = run_dir / "result.json"
    if not path.exists():
        return False
    try:
        result = read_json(path)
        if not {"decoders", "stages"} <= result.keys():
            raise UserError(f"{run_dir} is of an earlier version, which does not resume; choose --variant")
        budgets = {decoder["num_labels"] for decoder in result["decoders"]}
        return args.stages == "lam" or ("policy" in result["stages"] and budgets >= set(args.num_labels))
    except (Damaged, KeyError, TypeError):
        raise UserError(f"{path} is damaged; remove it and rerun the command to make it again") from None


def is_taken(run_dir: Path) -> bool:
    """Whether a live process is writing to a run directory."""
    path = run_dir / ".lock"
    try:
        if path.exists():
            os.close(lock_file(path))
    except Taken:
        return True
    except OSError:  # no locks, no permission: who writes to it says so
        return False
    return False


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """All lines of a run's ``metrics.jsonl``; a line torn by a kill is left out."""
    lines = []
    for text in (run_dir / "metrics.jsonl").read_bytes().splitlines():
        with contextlib.suppress(ValueError):  # no JSON, or no UTF-8
            line = json.loads(text)
            lines += [line] if isinstance(line, dict) and {"stage", "step"} <= line.keys() else []
    return lines


def read_checkpoint(path: Path) -> dict[str, Any]:
    """What `torch.save` wrote. Damaged if the file does not hold it; other errors say nothing about the file."""
    import torch

    try:
        with zipfile.ZipFile(path) as archive:
            bad = archive.testzip()
        state = torch.load(path, map_location="cpu", weights_only=True) if bad is None else None
        if isinstance(state, dict):
            return state
    except (
        OSError, zipfile.BadZipFile, RuntimeError, EOFError, ValueError, KeyError, pickle.UnpicklingError
    ) as error:  # fmt: skip
        if "allocate memory" in str(error):
            raise MemoryError(f"no memory to read {path}") from error
        if system := system_error(error, path):
            raise system from error
    raise Damaged(f"{path} is damaged")


class Run:
    """The directory of one run: refuses other arguments, keeps metrics and checkpoints, resumes.

    Args:
        args: the script's arguments; needs ``env``, ``seed``, ``runs_dir``, ``track`` and ``wandb_project``. Label
            budgets that the run had before are added to ``num_labels``.
        script: the script's name without ``.py``.
        variant: the folder between environment and seed.
        identity: further values that must be the same when the run is resumed (hashes of the data).

    Raises:
        UserError: the directory was made with other arguments, or another process uses it.
    """

    def __init__(self, args: Any, script: str, variant: str, identity: dict[str, Any]) -> None:
        self.args, self.script, self.variant, self.identity = args, script, variant, identity
        self.dir = Path(args.runs_dir) / script / args.env / variant / f"seed{args.seed}"
        self.dir.mkdir(parents=True, exist_ok=True)
        try:
            self._lock = lock_file(self.dir / ".lock")
        except Taken:
            raise UserError(f"another process is writing to {self.dir}; wait for it or choose --variant") from None
        for leftover in self.dir.rglob(".*.part*"):  # of a process that was killed while it wrote
            leftover.unlink()
        self._check_args()
        self.train_set = self.test_set = None  # see `open`
        self.about: dict[str, Any] = {}  # what a method adds to the result
        self.earlier: dict[str, Any] = {}  # the result, where a run goes on that had fewer stages or budgets
        self.costs: dict[str, dict[str, Any]] = {}  # seconds, the commit and more of each stage
        self.commit, self.versions = git_commit(), versions()
        self._complete: set[str] = set()  # stages and tables that this process read or wrote
        self.metrics_path = self.dir / "metrics.jsonl"
        self.metrics_path.touch()
        self.wandb = None

    @classmethod
    def open(cls, args: Any, script: str, defaults: Any, train_set: Any, test_set: Any, device: Any) -> Run:
        """The run of a command: its name is what `args` changes, its identity the data it sees.

        defaults: the script's function from a command line to the default arguments.
        """
        if train_set.image_size != test_set.image_size:
            raise UserError(
                f"the frames of {train_set.folder} have {train_set.image_size} pixels, those of {test_set.folder} "
                f"{test_set.image_size}: make one of them again with make_dataset.py"
            )
        if not train_set.is_recorded and (args.eval_steps or 0) > (steps := get_task(args.env).max_steps):
            raise UserError(f"--eval-steps is {args.eval_steps}, but {args.env} ends after {steps} steps")
        if not train_set.action_dim:
            args.num_labels = ()  # the run ends after the latent policy
        elif not train_set.action_variance:
            raise UserError(f"{train_set.folder}: its actions never change, so nothing can be learned from them")
        if train_set.is_recorded and not args.distractors and not directory(args, script, defaults).exists():
            raise UserError(f"{train_set.folder}: recorded videos are there as they are; leave out --no-distractors")
        identity = {
            "train_hash": train_set.hash,
            "test_hash": test_set.hash,
            "mask_hash": train_set.mask_hash + test_set.mask_hash,
            "device_type": device.type,
        }
        run = cls(args, script, directory(args, script, defaults).parent.name, identity)
        run.train_set, run.test_set = train_set, test_set
        print(f"{script}: {run.dir} on {device}, {train_set.num_transitions:,} transitions for training", flush=True)
        if run.is_finished():
            shutil.rmtree(run.dir / "tables", ignore_errors=True)
            probes = "; --probe-at looks at a model while it is trained" if args.probe_at else ""
            print(f"finished before; {run.dir / 'result.json'} has the result{probes}")
            run.close()
            return run
        if (run.dir / "result.json").exists():
            run.earlier = read_json(run.dir / "result.json")
            run.costs |= run.earlier["stages"]
        if args.track:
            run.start_wandb()
        return run

    def is_finished(self) -> bool:
        return is_finished(self.dir, self.args)

    def _check_args(self) -> None:
        path = self.dir / "args.json"
        new = jsonable(self.args) | self.identity
        if path.exists():
            try:
                old = read_json(path, keys=["num_labels"])
                budgets = {*map(int, old["num_labels"])}
                most = max(budgets, default=0)
            except (Damaged, ValueError, TypeError):
                raise UserError(f"{path} is damaged; remove {self.dir} and repeat the command") from None
            # What `add_identity` will compare, as it is not known yet.
            new |= {key: value for key, value in old.items() if key.endswith("_hash") and key not in new}
            runtime = {field.name for field in dataclasses.fields(self.args) if is_runtime(field)}
            lines = differences(old, new | {key: old.get(key) for key in (*runtime, "num_labels")})
            if most != max(new["num_labels"], default=0):  # the latent action model may depend on it
                lines.append(f"num_labels: {old['num_labels']} -> {new['num_labels']}")
            if lines:
                raise UserError(
                    f"{self.dir} was made with other arguments:\n  " + "\n  ".join(lines) + "\n"
                    "Use the same arguments to resume, --variant NAME for a new run, or remove the directory."
                )
            self.args.num_labels = tuple(sorted({*budgets, *new["num_labels"]}))
            new["num_labels"] = list(self.args.num_labels)
        write_json(path, new)

    def add_identity(self, name: str, value: str) -> None:
        """Adds a hash that is known only now to what must be the same when the run is resumed. UserError if it is not.

        name: ends in `_hash`.
        """
        self.identity[name] = value
        args = read_json(self.dir / "args.json")
        if args.setdefault(name, value) != value:
            raise UserError(
                f"{self.dir} was made with another {name}: {args[name]!r} -> {value!r}; use that one, or train under "
                "another --variant"
            )
        write_json(self.dir / "args.json", args)

    def start_wandb(self) -> None:
        """Sends the metrics to Weights & Biases too; a resumed run goes on under its old id."""
        try:
            import wandb
        except ImportError:
            raise UserError("--track needs wandb: pip install wandb") from None
        path = self.dir / "wandb_id"
        if not path.exists():
            with atomic_path(path) as temporary:
                temporary.write_text(uuid.uuid4().hex[:8], encoding="utf-8")
        identity = path.read_text(encoding="utf-8", errors="replace").strip()
        try:
            self.wandb = wandb.init(
                project=self.args.wandb_project,
                id=identity,
                resume="allow",
                name=f"{self.script}-{self.args.env}-{self.variant}-seed{self.args.seed}",
                config=jsonable(self.args) | self.identity,
                dir=str(self.dir),
            )
        except Exception as error:  # its own, those of the network, and pydantic's for settings
            raise UserError(
                f"--track: wandb cannot start ({' '.join(str(error).split())[:300]}); `wandb login`, set "
                f"WANDB_MODE=offline, or leave out --track. {path} says that this is wandb's run {identity!r}"
            ) from error

    # Metrics

    def log(self, stage: str, step: int, values: dict[str, float]) -> None:
        """Appends one line to ``metrics.jsonl``: stage, step (updates in this stage) and `values`."""
        line = {"stage": stage, "step": step} | {key: float(value) for key, value in values.items()}
        with open(self.metrics_path, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        if self.wandb is not None:
            self.wandb.log({f"{stage}/step": step} | values)

    def rewind_metrics(self, stage: str, step: int) -> None:
        """Drops the lines of `stage` after `step`, which are written again."""
        lines = [line for line in read_metrics(self.dir) if not (line["stage"] == stage and line["step"] > step)]
        with atomic_path(self.metrics_path) as temporary:
            temporary.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")

    # Checkpoints

    def save(self, stage: str, step: int, state: dict[str, Any]) -> Path:
        """Writes a checkpoint of an unfinished stage and keeps the newest two.

        `state` holds what `torch.load(weights_only=True)` reads: tensors, numbers, strings, dicts and lists.
        """
        path = self.dir / "checkpoints" / f"{stage}-{step:08d}.pt"
        self._write(path, stage, step, state)
        for old in self._checkpoints(stage)[:-2]:
            old.unlink()
        return path

    def _checkpoints(self, stage: str) -> list[Path]:
        return sorted((self.dir / "checkpoints").glob(f"{stage}-{'[0-9]' * 8}*.pt"))

    def restore(self, stage: str) -> dict[str, Any] | None:
        """The newest readable checkpoint of an unfinished stage, or None. A broken one is reported and set aside.

        Raises:
            UserError: there are results of later stages, which were made from another outcome of this one.
        """
        if later := self._made_from(stage):
            raise UserError(
                f"{self.dir / stage}.pt is missing, but {', '.join(later)} were made from it; remove them too, or "
                "train again under another --variant"
            )
        for path in reversed(self._checkpoints(stage)):
            try:
                state = read_checkpoint(path)
            except Damaged as error:
                print(f"warning: {error}; using the checkpoint before it", file=sys.stderr)
                path.rename(path.with_suffix(".broken"))
                continue
            self.rewind_metrics(stage, state["step"])
            return state
        self.rewind_metrics(stage, 0)
        return None

    def _made_from(self, stage: str) -> list[str]:
        """Files in the run's directory that `stage` leads to: of stages that this process has not come to yet."""
        stages = {}
        for path in sorted(self.dir.rglob("*.pt")):
            in_progress = path.parent.name == "checkpoints"
            stages[str(path.relative_to(self.dir))] = path.stem.rpartition("-")[0] if in_progress else path.stem
        if stage.startswith("decoder"):  # decoder-2000: its rollout-2000 alone, nothing of other label budgets
            own = {stage.replace("decoder", name) for name in ("rollout", "open_loop")}
            return [name for name, other in stages.items() if other in own]
        return [name for name, other in stages.items() if other not in self._complete | {stage}]

    def finish(self, stage: str, step: int, state: dict[str, Any], folder: str = ".") -> None:
        """Writes ``<stage>.pt``, which marks the stage as finished, and removes its checkpoints."""
        self._write(self.dir / folder / f"{stage}.pt", stage, step, state)
        self._completed(stage, state)

    def _completed(self, stage: str, state: dict[str, Any]) -> None:
        self._complete.add(stage)
        self.costs[stage] = state["cost"] | {"commit": state.get("commit", self.commit)}
        # Also those that a process left which was killed right after it had finished the stage.
        for old in (self.dir / "checkpoints").glob(f"{stage}-{'[0-9]' * 8}*"):
            old.unlink()

    def finished(self, stage: str, folder: str = ".") -> dict[str, Any] | None:
        """The state of a finished stage, or None.

        Raises:
            UserError: the file is damaged.
        """
        path = self.dir / folder / f"{stage}.pt"
        if not path.exists():
            return None
        try:
            state = read_checkpoint(path)
        except Damaged as error:
            files = ", ".join([str(path.relative_to(self.dir)), *self._made_from(stage)])
            raise UserError(f"{error}; remove {files}, then rerun the command to train from there") from None
        self._completed(stage, state)
        return state

    def once(self, name: str, compute: Callable[[], Any]) -> Any:
        """What `compute` gives, from ``tables/`` if it was computed before; removed when the run is finished.

        A tensor, or what else `torch.load(weights_only=True)` reads. A kill meanwhile costs the computation.
        """
        state = self.finished(name, "tables")
        if state is None:
            start = time.monotonic()
            state = {"value": compute()}
            state["cost"] = {"seconds": time.monotonic() - start}
            self.finish(name, 0, state, "tables")
        return state["value"]

    def spent(self, name: str, seconds: float) -> None:
        """Counts the seconds that making files of a data set took, those of the first process that came to its end."""
        first = self.once(name, lambda: seconds)
        self.costs[name] = {"seconds": self.earlier.get("seconds", {}).get(name, first)}

    def not_finite(self, stage: str, update: int, episodes: list[int], saved: int) -> UserError:
        """The error of a loss or weights that are not finite; saved: update of the newest checkpoint, 0 without one."""
        rates = [field.name for field in dataclasses.fields(self.args) if field.name.endswith("_lr")]
        flags = [f"--{rate.replace('_', '-')}" for rate in rates if stage.startswith(rate.removesuffix("_lr"))]
        good = f"at update {saved} in {self.dir / 'checkpoints'}" if saved else "the stage's start"
        return UserError(
            f"{stage}: loss or weights are not finite at update {update}, episodes {episodes}. The last good "
            f"checkpoint is {good}; a lower {' or '.join(flags) or 'learning rate'} may help, which starts a new run, "
            "or make_dataset.py --verify if the data is damaged."
        )

    def write_result(self, metrics: dict[str, float | None], **about: Any) -> None:
        """Writes ``result.json``, which marks the run as finished, prints the metrics and removes the tables."""
        result = {
            "script": self.script,
            "env": self.args.env,
            "variant": self.variant,
            "seed": self.args.seed,
            "metrics": metrics,
            "seconds": {name: cost["seconds"] for name, cost in self.costs.items()},
            "stages": self.costs,
            "peak_memory_gib": max(cost.get("peak_memory_gib", 0) for cost in self.costs.values()),
            "args": jsonable(self.args),
            "commit": self.commit,
            "versions": self.versions,
            "machine": machine(),
        }
        write_json(self.dir / "result.json", result | self.about | about, with_hash=True)
        shutil.rmtree(self.dir / "tables", ignore_errors=True)
        for name, value in metrics.items():
            print(f"{name:26} {'-' if value is None else f'{value:.4f}'}")
        print(f"result: {self.dir / 'result.json'}", flush=True)
        self.close()

    def _write(self, path: Path, stage: str, step: int, state: dict[str, Any]) -> None:
        import torch

        about = {
            "stage": stage,
            "step": step,
            "args": jsonable(self.args) | self.identity,
            "commit": self.commit,
            "versions": self.versions,
            "wandb_id": self.wandb.id if self.wandb is not None else None,
        }
        with atomic_path(path) as temporary:
            try:
                with open(temporary, "wb") as file:
                    torch.save(state | about, file)
            except RuntimeError as error:  # torch ends its archive after a failed write too, which fails as well
                if isinstance(error.__context__, OSError):
                    raise error.__context__ from None
                raise

    def close(self) -> None:
        """Ends the run's files; the directory is free for another process."""
        if self.wandb is not None:
            self.wandb.finish()
        os.close(self._lock)
