"""What scripts share around their work: command line, signals, atomic files, run directory, checkpoints, progress.

A run directory holds ``args.json``, ``metrics.jsonl``, ``checkpoints/`` (two per unfinished stage), one ``<stage>.pt``
per finished stage, pictures and, at the end, ``result.json``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import hashlib
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
import uuid
import zipfile
from pathlib import Path
from typing import Any

from common.cli import Progress, Stopped, UserError, cli, stop_requested  # noqa: F401
from common.store import atomic_path, write_json

ROOT = Path(__file__).parents[1]


# ---------------------------------------------------------------------------------------------------------------------
# Facts about the machine


def git_commit() -> str | None:
    """The commit of the code, with ``+changes`` if tracked files differ from it; None outside a repository."""
    root = Path(__file__).parents[1]
    try:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, check=True)
        status = subprocess.run(
            ["git", "status", "--porcelain", "-uno"], cwd=root, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return commit.stdout.strip() + ("+changes" if status.stdout.strip() else "")


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
    """The torch device called "auto" (the GPU, if there is one), "cuda" or "cpu". UserError if there is no GPU."""
    import torch

    found = torch.cuda.is_available()
    if name == "cuda" and not found:
        raise UserError(
            "--device cuda, but torch finds no GPU; use --device cpu, or a torch that was built for your GPU"
        )
    return torch.device(("cuda" if found else "cpu") if name == "auto" else name)


def peak_memory_gib(device: Any) -> float:
    """Peak memory in GiB: allocated on the GPU for a CUDA device, else resident in this process."""
    import torch

    if torch.device(device).type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


# ---------------------------------------------------------------------------------------------------------------------
# Run directory

# Fields that may differ between two commands that continue one run: they change neither data nor method. (Compiled code
# rounds differently; the kind of device is part of a run's identity.)
RUNTIME_FIELDS = frozenset(
    "data_dir runs_dir clips_dir raft_checkpoint dino_checkpoint dino_cache lam_from variant device data_on_gpu "
    "compile compile_mode eval_envs log_every checkpoint_every track wandb_project".split()
)

LONGEST_NAME = 180  # of a variant, in characters

# What a run may change against the one that it takes its latent action model from (`lam_from` is known by its weights).
LATER_STAGES = ("policy_", "decoder_", "eval_", "num_labels")


def check_at_least(args: Any, least: int, *names: str) -> None:
    """Raises UserError for a field that is given and below `least`."""
    for name in names:
        value = getattr(args, name)
        if value is not None and value < least:
            raise UserError(f"--{name.replace('_', '-')} is {value}, must be at least {least}")


def variant_name(args: Any, default: Any) -> str:
    """Names what `args` changes against the defaults of its environment, for the run directory: ``default`` or
    ``no-loss-mask_latent-dim=64``. Seed, environment and runtime fields have their own place and are left out.
    """
    if args.variant:
        return args.variant
    source = getattr(args, "lam_from", None)
    parts = ["quick"] if args.quick and source is None else []
    if source is not None:  # whose name says what the model is
        parts.append(f"lam-from={source.resolve().parent.name}")
    for field in dataclasses.fields(args):
        value = getattr(args, field.name)
        if field.name in RUNTIME_FIELDS | {"env", "seed", "quick"} or value == getattr(default, field.name):
            continue
        if source is not None and not field.name.startswith(LATER_STAGES):
            continue
        name = field.name.replace("_", "-")
        parts.append((name if value else f"no-{name}") if isinstance(value, bool) else f"{name}={value}")
    name = "_".join(parts).replace("/", "-") or "default"
    if len(name) > LONGEST_NAME:  # file systems take 255 bytes
        name = f"{name[: LONGEST_NAME - 9]}~{hashlib.sha256(name.encode()).hexdigest()[:8]}"
    return name


def jsonable(args: Any) -> dict[str, Any]:
    """The dataclass `args` as JSON values (paths as strings)."""
    return {key: str(value) if isinstance(value, Path) else value for key, value in dataclasses.asdict(args).items()}


class Run:
    """The directory of one run: refuses other arguments, keeps metrics and checkpoints, resumes.

    Args:
        args: the script's arguments; needs ``env``, ``seed``, ``runs_dir``, ``track`` and ``wandb_project``.
        script: the script's name without ``.py``.
        variant: the folder between environment and seed.
        identity: further values that must be the same when the run goes on (the dataset hash).

    With ``args.lam_from``, the directory of a finished run, the stages up to the latent action model are that run's; so
    is the latent policy, unless its arguments differ.

    Raises:
        UserError: the directory was made with other arguments, or another process uses it; the run in
            ``args.lam_from`` is not finished, or differs in what its latent action model depends on.
    """

    def __init__(self, args: Any, script: str, variant: str, identity: dict[str, Any]) -> None:
        self.args, self.script, self.variant, self.identity = args, script, variant, identity
        self.dir = Path(args.runs_dir) / script / args.env / variant / f"seed{args.seed}"
        self.dir.mkdir(parents=True, exist_ok=True)
        self._lock = open(self.dir / ".lock", "w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"another process is writing to {self.dir}; wait for it or choose --variant") from None
        for leftover in self.dir.rglob(".*.part*"):  # of a process that was killed while it wrote
            leftover.unlink()
        self.about: dict[str, Any] = {}  # what a method adds to the result
        source = getattr(args, "lam_from", None)
        taken = [] if source is None or self._keep_held(Path(source)) else self._held_fixed(Path(source))
        self._check_args()
        for path in taken:
            self._take(path)
        self.commit, self.versions = git_commit(), versions()
        self.passed: set[str] = set()  # stages and caches that this process found or made
        self.metrics_path = self.dir / "metrics.jsonl"
        self._metrics = open(self.metrics_path, "a")
        self.wandb = None
        if args.track:
            self._start_wandb()

    def _check_args(self) -> None:
        path = self.dir / "args.json"
        new = jsonable(self.args) | self.identity
        if not path.exists():
            write_json(path, new)
            return
        try:
            old = json.loads(path.read_text())
        except json.JSONDecodeError:
            raise UserError(f"{path} is damaged; remove {self.dir} and repeat the command") from None
        bound = {key for key in old if key.endswith("_hash") and key not in new} - {"lam_from_hash"}  # see `bind`
        lines = [
            f"  {key}: {old.get(key)!r} there, {new.get(key)!r} now"
            for key in sorted(old.keys() | new.keys())
            if key not in RUNTIME_FIELDS | bound and old.get(key) != new.get(key)
        ]
        if lines:
            raise UserError(
                f"{self.dir} was made with other arguments:\n" + "\n".join(lines) + "\n"
                "Use the same arguments to go on, --variant NAME for a new run, or remove the directory."
            )

    def _keep_held(self, source: Path) -> bool:
        """True for a finished run whose source is gone: its model stays the one that it has."""
        if (source / "lam.pt").exists() or not (self.dir / "result.json").exists():
            return False
        with contextlib.suppress(OSError, json.JSONDecodeError, KeyError):
            known = json.loads((self.dir / "args.json").read_text())
            self.identity = self.identity | {"lam_from_hash": known["lam_from_hash"]}
            return True
        return False

    def _held_fixed(self, source: Path) -> list[Path]:
        """The files of a finished run whose stages are not trained again; what they depend on becomes part of the
        identity. UserError if that run is not finished or was made with something else.
        """
        if source.resolve() == self.dir.resolve():
            raise UserError(f"--lam-from {source} is this run's own directory; name another run, or choose --variant")
        try:
            result = json.loads((source / "result.json").read_text())
            there = json.loads((source / "args.json").read_text())
        except (OSError, json.JSONDecodeError):
            raise UserError(
                f"--lam-from {source}: no finished run here; finish it first, or name the directory that has its "
                "result.json"
            ) from None
        if result["script"] != self.script:
            raise UserError(f"--lam-from {source}: a run of {result['script']}.py, not of {self.script}.py")
        if "lam_from_hash" in there:
            raise UserError(
                f"--lam-from {source}: this run took its latent action model from another one; name that one, "
                f"{result['lam_from']['run']}"
            )
        here = jsonable(self.args) | self.identity
        bound = {key: value for key, value in there.items() if key.endswith("_hash") and key not in here}
        differ = [key for key in sorted(there.keys() | here.keys()) if there.get(key) != here.get(key)]
        lines = [
            f"  {key}: {there.get(key)!r} there, {here.get(key)!r} now"
            for key in differ
            if key not in RUNTIME_FIELDS | bound.keys() and not key.startswith(LATER_STAGES)
        ]
        if lines:
            raise UserError(
                f"--lam-from {source}: its latent action model depends on what is different now:\n"
                + "\n".join(lines)
                + "\nUse the same values, or train a model with these without --lam-from."
            )
        same_policy = not any(key.startswith("policy_") for key in differ)
        stages = [name for name in ("slots", "lam", *(["bc"] if same_policy else [])) if name in result["stages"]]
        files = [source / f"{stage}.pt" for stage in stages]
        files += [source / name for name in ("slots.json", "slots.png") if "slots" in stages]
        gone = [path.name for path in files if not path.exists()]
        if gone:
            raise UserError(
                f"--lam-from {source}: {', '.join(gone)} is gone; take another run, or train that one again"
            )
        with open(source / "lam.pt", "rb") as file:
            self.identity = self.identity | bound | {"lam_from_hash": hashlib.file_digest(file, "sha256").hexdigest()}
        self.about["lam_from"] = {
            "run": str(source),
            "commit": result["commit"],
            "num_labels": there["num_labels"],
            "stages": stages,
        }
        return files

    def _take(self, path: Path) -> None:
        """Gives this run a file of another one, if it has not got it: as a second name, or as a copy."""
        if (self.dir / path.name).exists():
            return
        with atomic_path(self.dir / path.name) as temporary:
            try:
                os.link(path, temporary)
            except OSError:
                shutil.copyfile(path, temporary)

    def bind(self, name: str, value: str) -> None:
        """Adds a value that is known only now to what must be the same when the run goes on. UserError if it is not."""
        self.identity[name] = value
        known = json.loads((self.dir / "args.json").read_text())
        if known.setdefault(name, value) != value:
            raise UserError(
                f"{self.dir} was made with another {name}: {known[name]!r} there, {value!r} now; use that one, or "
                "train under another --variant"
            )
        write_json(self.dir / "args.json", known)

    def _start_wandb(self) -> None:
        try:
            import wandb
        except ImportError:
            raise UserError("--track needs wandb: pip install wandb") from None
        path = self.dir / "wandb_id"
        if not path.exists():
            with atomic_path(path) as temporary:
                temporary.write_text(uuid.uuid4().hex[:8])
        self.wandb = wandb.init(
            project=self.args.wandb_project,
            id=path.read_text().strip(),
            resume="allow",
            name=f"{self.script}-{self.args.env}-{self.variant}-seed{self.args.seed}",
            config=jsonable(self.args) | self.identity,
            dir=str(self.dir),
        )

    # Metrics

    def log(self, stage: str, step: int, values: dict[str, float]) -> None:
        """Appends one line to ``metrics.jsonl``: stage, step (updates in this stage) and `values`."""
        line = {"stage": stage, "step": step} | {key: float(value) for key, value in values.items()}
        self._metrics.write(json.dumps(line) + "\n")
        self._metrics.flush()
        if self.wandb is not None:
            self.wandb.log({f"{stage}/step": step} | values)

    def read_metrics(self) -> list[dict[str, float]]:
        """All lines of ``metrics.jsonl``; a line torn by a kill is left out."""
        lines = []
        for line in self.metrics_path.read_text().splitlines():
            with contextlib.suppress(json.JSONDecodeError):
                lines.append(json.loads(line))
        return lines

    def rewind_metrics(self, stage: str, step: int) -> None:
        """Drops the lines of `stage` after `step`, which the resumed run writes again."""
        lines = [line for line in self.read_metrics() if not (line["stage"] == stage and line["step"] > step)]
        self._metrics.close()
        with atomic_path(self.metrics_path) as temporary:
            temporary.write_text("".join(json.dumps(line) + "\n" for line in lines))
        self._metrics = open(self.metrics_path, "a")

    # Checkpoints

    def save(self, stage: str, step: int, state: dict[str, Any]) -> Path:
        """Writes a checkpoint of an unfinished stage and keeps the newest two.

        `state` holds what `torch.load(weights_only=True)` reads: tensors, numbers, strings, dicts and lists.
        """
        path = self.dir / "checkpoints" / f"{stage}-{step:08d}.pt"
        self._write(path, stage, step, state)
        for old in sorted(path.parent.glob(f"{stage}-*.pt"))[:-2]:
            old.unlink()
        return path

    def restore(self, stage: str) -> dict[str, Any] | None:
        """The newest readable checkpoint of an unfinished stage, or None. A broken one is reported and set aside.

        Raises:
            UserError: there are results of later stages, which were made from another outcome of this one.
        """
        files = [*self.dir.glob("*.pt"), *self.dir.glob("*.npy")]
        later = sorted(path.name for path in files if path.stem not in self.passed)
        if later:
            raise UserError(
                f"{self.dir / stage}.pt is gone, but {', '.join(later)} were made from it; remove them too, or train "
                "again under another --variant"
            )
        for path in sorted((self.dir / "checkpoints").glob(f"{stage}-*.pt"), reverse=True):
            try:
                state = self._read(path)
            except UserError as error:
                print(f"warning: {error}; using the checkpoint before it", file=sys.stderr)
                path.rename(path.with_suffix(".broken"))
                continue
            self.rewind_metrics(stage, state["step"])
            return state
        self.rewind_metrics(stage, 0)
        return None

    def finish(self, stage: str, step: int, state: dict[str, Any]) -> None:
        """Writes ``<stage>.pt``, which marks the stage as finished, and removes its checkpoints."""
        self._write(self.dir / f"{stage}.pt", stage, step, state)
        self.passed.add(stage)
        for old in (self.dir / "checkpoints").glob(f"{stage}-*"):
            old.unlink()

    def finished(self, stage: str) -> dict[str, Any] | None:
        """The state of a finished stage, or None.

        Raises:
            UserError: the file is damaged.
        """
        path = self.dir / f"{stage}.pt"
        if not path.exists():
            return None
        try:
            state = self._read(path)
            self.passed.add(stage)
            return state
        except UserError as error:
            files = [found for kind in ("*.pt", "*.npy") for found in self.dir.glob(kind)]
            later = sorted((found.stat().st_mtime, found.name) for found in files if found.stem not in self.passed)
            raise UserError(
                f"{error}; remove it and the later ones of {', '.join(name for _, name in later)}, then repeat the "
                "command to train from there"
            ) from None

    def not_finite(self, stage: str, update: int, episodes: list[int], saved: int) -> UserError:
        """The error of a loss or weights that are not finite; saved: update of the newest checkpoint, 0 without one."""
        flag = {"slots": "--slot-lr", "lam": "--lam-lr", "bc": "--policy-lr", "decoder": "--decoder-lr"}.get(
            stage, "learning rate"
        )
        good = f"at update {saved} in {self.dir / 'checkpoints'}" if saved else "the stage's start"
        return UserError(
            f"{stage}: loss or weights are not finite at update {update}, episodes {episodes}. The last good "
            f"checkpoint is {good}; a lower {flag} may help, which starts a new run, or make_dataset.py --verify if "
            "the data is damaged."
        )

    def write_result(self, metrics: dict[str, float | None], **about: Any) -> None:
        """Writes ``result.json``, which marks the run as finished, and prints the metrics."""
        result = {
            "script": self.script,
            "env": self.args.env,
            "variant": self.variant,
            "seed": self.args.seed,
            "metrics": metrics,
            "args": jsonable(self.args),
            "commit": self.commit,
            "versions": self.versions,
            "machine": machine(),
        }
        write_json(self.dir / "result.json", result | self.about | about)
        for name, value in metrics.items():
            print(f"{name:26} {'-' if value is None else f'{value:.4f}'}")
        print(f"result: {self.dir / 'result.json'}", flush=True)

    def _write(self, path: Path, stage: str, step: int, state: dict[str, Any]) -> None:
        import torch

        wandb_id = self.wandb.id if self.wandb is not None else None
        about = {
            "stage": stage,
            "step": step,
            "args": jsonable(self.args) | self.identity,
            "commit": self.commit,
            "versions": self.versions,
            "wandb_id": wandb_id,
        }
        with atomic_path(path) as temporary:
            try:
                torch.save(state | about, temporary)
            except RuntimeError as error:  # torch wraps a failed write of its archive in a RuntimeError
                if "PytorchStreamWriter" not in str(error) and "unexpected pos" not in str(error):
                    raise
                raise OSError(errno.ENOSPC, "cannot write the checkpoint", str(path)) from error

    def _read(self, path: Path) -> dict[str, Any]:
        import torch

        try:
            with zipfile.ZipFile(path) as archive:
                bad = archive.testzip()
            if bad is None:
                return torch.load(path, map_location="cpu", weights_only=True)
        except (OSError, zipfile.BadZipFile, RuntimeError, EOFError, ValueError, KeyError):
            pass
        raise UserError(f"{path} is damaged")

    def close(self) -> None:
        """Ends the run's files; the directory is free for another process."""
        self._metrics.close()
        if self.wandb is not None:
            self.wandb.finish()
        self._lock.close()
