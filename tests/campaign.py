"""Kills every script at random moments and checks that nothing is lost; run by hand, not by pytest.

    python tests/campaign.py --kills 1000 --seed 1 --out benchmarks/results/campaign.json

Each target is made once undisturbed. Then, in a fresh copy of its inputs, it is killed (SIGKILL to all its processes)
at a uniformly random moment, at times twice in quick succession or while it starts again, and rerun until it ends by
itself: files and weights must be those of the undisturbed run, and no temporary file may be left. In between a byte of
a finished file is flipped, which must be found, with a message whose repair works; a small disk fills up; the clock
jumps back; and one of two processes that share a folder is stopped for a while.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
import methods  # noqa: E402
import numpy as np  # noqa: E402
import planted  # noqa: E402
import torch  # noqa: E402

from common import runs, store  # noqa: E402
from common.cli import Count, Positive, Seed, cli  # noqa: E402

LIMIT = 600  # seconds that a command may take
TRAIN = methods.TINY | {"batch_size": 8, "lam_updates": 40, "policy_updates": 30, "decoder_updates": 60}
TRAIN |= {"checkpoint_every": 5, "log_every": 5, "eval_episodes": 1, "eval_envs": 1, "eval_steps": 5, "device": "cpu"}
RENDER = "--quick --backgrounds synthetic --num-videos 2 --image-size 32 --episode-length 60 --episodes-per-shard 2"
RENDER += " --train-transitions 900 --test-transitions 200"


@dataclass
class Args:
    kills: Count = 1000
    """kills in all, spread over the targets"""
    seed: Seed = 1
    """of all chance"""
    minutes: Positive | None = None
    """end after that time"""
    targets: tuple[str, ...] | None = None
    """only these"""
    out: Path = Path("campaign.json")
    """record to write"""


@dataclass
class Target:
    """A command with its inputs. `words` may hold {folder}, a copy of what `prepare` wrote."""

    words: list[str]
    prepare: Callable[[Path], Any] = lambda folder: None
    template: Path = Path()
    seconds: float = 0.0  # that it takes undisturbed
    expected: dict[str, str] = field(default_factory=dict)


# ------------------------------------------------------------------------------------------------------------- targets


def masks_to_import(folder: Path) -> None:
    planted.write(folder / "data", train=8, test=4, shards=4)
    for split, episodes in (("train", 8), ("test", 4)):
        for render in ("clean", "distractor"):
            path = folder / "masks/cheetah-run" / split / render
            path.mkdir(parents=True)
            for number in range(episodes):
                np.save(path / f"{number:05d}.npy", np.random.default_rng(number).random((21, 32, 32)) < 0.3)


def videos_to_import(folder: Path) -> None:
    from PIL import Image

    for episode in range(12):
        path = folder / f"videos/{episode}"
        path.mkdir(parents=True)
        for number in range(30):
            noise = np.random.default_rng([episode, number]).integers(0, 256, (40, 40, 3), np.uint8)
            Image.fromarray(noise).save(path / f"{number}.png")


def training_data(folder: Path) -> None:
    planted.write(folder / "data", train=6, test=3, length=30, shards=3)
    methods.raft_checkpoint(folder)


def targets() -> dict[str, Target]:
    """Every script that writes, by name."""
    found = {}
    for env, workers in (("walker-run", 1), ("walker-run", 3), ("reach", 1), ("reach", 3)):
        words = ["make_dataset.py", "--env", env, *RENDER.split(), "--workers", str(workers)]
        found[f"make_dataset {env} {workers}"] = Target([*words, "--data-dir", "{folder}/data"])
    imported = ["--import", "{folder}/masks", "--name", "mine", "--data-dir", "{folder}/data"]
    found["make_masks"] = Target(["make_masks.py", *imported], masks_to_import)
    imported = ["videos", "{folder}/videos", "--name", "own", "--size", "32", "--data-dir", "{folder}/data"]
    found["import_data"] = Target(["import_data.py", *imported], videos_to_import)
    folders = ["--data-dir", "{folder}/data", "--runs-dir", "{folder}/runs", "--variant", "test"]
    for script in ("lapo", "masklam", "laof"):
        own = methods.words(TRAIN | methods.OWN[script] | methods.FROZEN.get(script, {}))
        own += ["--raft-checkpoint", "{folder}/raft_random.pth"] if script == "laof" else []
        found[script] = Target([f"{script}.py", *own, *folders], training_data)
    settings = [f"{name.replace('_', '-')}={value}" for name, value in TRAIN.items() if name != "num_labels"]
    grid = ["ablations", "--env", "cheetah-run", "--quick", "--seeds", "1", "--set", *settings, "num-labels=40"]
    grid += ["idm-scale=1", "fdm-scale=1", *folders[:4]]
    found["reproduce"] = Target(["reproduce.py", *grid], training_data)
    return found


# ------------------------------------------------------------------------------------------------- running, and looking


def start(target: Target, folder: Path, log: Path) -> subprocess.Popen:
    words = [word.format(folder=folder) for word in target.words]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    with open(log, "w", encoding="utf-8") as output:
        return subprocess.Popen(
            [sys.executable, *words], cwd=ROOT, env=environment, stdout=output, stderr=output, start_new_session=True
        )


def members(session: int) -> list[int]:
    """The processes of a session that are alive."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()
            if int(fields[3]) == session and fields[0] != "Z":
                found.append(int(path.parent.name))
    return found


def kill(process: subprocess.Popen) -> None:
    """SIGKILL to a process and all that it started."""
    while alive := members(process.pid):
        for pid in alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    process.wait()


def finish(target: Target, folder: Path) -> tuple[int, str]:
    """Runs a target to its end: exit code and output."""
    log = folder.with_suffix(".log")
    process = start(target, folder, log)
    try:
        process.wait(LIMIT)
    except subprocess.TimeoutExpired:
        kill(process)
        return -1, f"still running after {LIMIT} s:\n{log.read_text()[-2000:]}"
    return process.returncode, log.read_text()


def contents(folder: Path) -> dict[str, str]:
    """What a target wrote: hashes of data, of all weights, and the metrics of results."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.suffix == ".h5":
            stored = store.read(path)
            store.verify(stored)
            found[name] = stored.content_hash
        elif path.suffix == ".pt":
            state = torch.load(path, weights_only=True)
            weights = [*(state.get("model") or {}).values(), *(state.get("probe") or {}).values()]
            found[name] = hashlib.sha256(b"".join(value.numpy().tobytes() for value in weights)).hexdigest()
        elif path.name == "result.json":
            found[name] = json.dumps(json.loads(path.read_text())["metrics"], sort_keys=True)
    return found


def leftovers(folder: Path) -> list[str]:
    """Temporary files and claims."""
    return [str(path) for path in folder.rglob(".*") if re.search(r"\.part\b|\.claim$", path.name)]


def stage(folder: Path) -> str:
    """What was going on: the newest stage in a run's metrics, or how many files there are."""
    lines = [path.read_text().splitlines()[-1:] for path in folder.rglob("metrics.jsonl")]
    with contextlib.suppress(IndexError, KeyError, json.JSONDecodeError, ValueError):
        return json.loads(lines[-1][0])["stage"]
    return "start" if not any(folder.rglob("*.h5")) else "data"


# -------------------------------------------------------------------------------------------------------- disturbances


class Campaign:
    """Chance, the counts, and the faults that were found."""

    def __init__(self, args: Args, root: Path) -> None:
        self.args, self.root, self.chance = args, root, random.Random(args.seed)
        self.kills: Counter[str] = Counter()
        self.other: Counter[str] = Counter()
        self.faults: list[dict[str, Any]] = []
        self.rounds = 0

    @contextlib.contextmanager
    def copy(self, target: Target) -> Iterator[Path]:
        """A fresh copy of a target's inputs; kept if a fault was found in it."""
        self.rounds += 1
        folder, before = self.root / f"round{self.rounds}", len(self.faults)
        shutil.copytree(target.template, folder)
        yield folder
        if len(self.faults) == before:
            shutil.rmtree(folder, ignore_errors=True)

    def check(self, name: str, target: Target, folder: Path, what: str) -> None:
        """Runs the target to its end and compares it with the undisturbed run."""
        code, output = finish(target, folder)
        problems = [] if code == 0 else [f"exit code {code}: {output[-1500:]}"]
        if not problems:
            there = contents(folder)
            names = {key for key in there.keys() | target.expected.keys() if there.get(key) != target.expected.get(key)}
            problems += [f"differ: {sorted(names)[:10]}"] if names else []
            problems += [f"left: {leftovers(folder)[:5]}"] if leftovers(folder) else []
        if problems:
            self.faults.append({"target": name, "round": self.rounds, "what": what, "problems": problems})
            print(f"FAULT {self.faults[-1]}", flush=True)

    def kill_and_rerun(self, name: str, target: Target) -> None:
        moments = [self.chance.uniform(0, target.seconds)]
        moments += self.chance.choice([[], [], [self.chance.uniform(0, 0.5)], [self.chance.uniform(0, 6)]])
        with self.copy(target) as folder:
            for moment in moments:
                process = start(target, folder, folder.with_suffix(".log"))
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(moment)
                self.kills[f"{name}: {stage(folder) if process.poll() is None else 'at its end'}"] += 1
                kill(process)
            self.check(name, target, folder, f"killed after {', '.join(f'{moment:.2f}' for moment in moments)} s")

    def flip(self, name: str, target: Target) -> None:
        """A byte of a finished file changes: the reader or --verify finds it, and what the message says mends it."""
        with self.copy(target) as folder:
            code, output = finish(target, folder)
            kinds = ("*.h5", "*.pt", "result.json")
            files = [
                path
                for kind in kinds
                for path in folder.rglob(kind)
                if str(path.relative_to(folder)) in target.expected
            ]
            path = self.chance.choice(files)
            data = bytearray(path.read_bytes())
            place = self.chance.randrange(len(data))
            data[place] ^= 1 << self.chance.randrange(8)
            path.write_bytes(data)
            verify = Target([*target.words, "--verify"]) if name.startswith(("make_dataset", "import_data")) else target
            code, output = finish(verify, folder)
            what = f"bit flipped in {path.relative_to(folder)} at byte {place}"
            for named in (path, *path.parents[:3]) if code else ():
                if re.search(rf"remove {re.escape(str(named))}\b|rm {re.escape(str(named))}\b", output):
                    shutil.rmtree(named) if named.is_dir() else named.unlink()
                    break
            self.other["flips found by an error" if code else "flips mended, or of no consequence"] += 1
            self.check(name, target, folder, f"{what}; {output.strip().splitlines()[-1:] if code else 'no error'}")

    def fill_the_disk(self, name: str, target: Target) -> None:
        """A disk that is too small; once there is room the same command ends well."""
        with self.copy(target) as folder:
            used = sum(-(-path.stat().st_size // 4096) * 4096 + 4096 for path in folder.rglob("*"))  # whole pages
            size = used + int(self.chance.uniform(0, 1) * 2_000_000) + 200_000
            disk = self.root / "disk"
            disk.mkdir(exist_ok=True)
            if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", disk]).returncode:
                self.other["disks that could not be mounted"] += 1
                return
            try:
                shutil.copytree(folder, disk / "work")
                code, output = finish(target, disk / "work")
                if code and "Traceback" in output:
                    self.faults.append({"target": name, "what": f"disk of {size} bytes", "problems": [output[-1500:]]})
                subprocess.run(["mount", "-o", "remount,size=1g", disk], check=True)
                self.other["full disks"] += 1
                self.check(name, target, disk / "work", f"disk of {size} bytes")
            finally:
                subprocess.run(["umount", disk], check=True)

    def jump_back(self, name: str, target: Target) -> None:
        """Half-way, all files are from the future, as after a clock that jumped back."""
        with self.copy(target) as folder:
            process = start(target, folder, folder.with_suffix(".log"))
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(target.seconds / 2)
            kill(process)
            for path in folder.rglob("*"):
                os.utime(path, (time.time() + 1e6,) * 2)
            self.other["clocks that jumped back"] += 1
            self.check(name, target, folder, "files from the future")

    def stop_one_of_two(self, name: str, target: Target) -> None:
        """Two processes share a folder; one is stopped for a while, then both go on."""
        with self.copy(target) as folder:
            first = start(target, folder, folder.with_suffix(".first.log"))
            second = start(target, folder, folder.with_suffix(".log"))
            time.sleep(self.chance.uniform(0, target.seconds))
            stopped = members(first.pid)
            for pid in stopped:
                os.kill(pid, signal.SIGSTOP)
            time.sleep(self.chance.uniform(1, 10))
            for pid in stopped:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
            for process in (first, second):
                process.wait(LIMIT)
            self.other["stopped processes"] += 1
            self.check(name, target, folder, "one of two processes was stopped")


def main(args: Args) -> None:
    begin, chosen = time.monotonic(), targets()
    chosen = {
        name: target for name, target in chosen.items() if args.targets is None or name.split()[0] in args.targets
    }
    root = Path(tempfile.mkdtemp(prefix="campaign"))
    campaign = Campaign(args, root)
    for name, target in chosen.items():
        target.template = root / f"template {name}".replace(" ", "_")
        target.template.mkdir()
        target.prepare(target.template)
        whole = root / f"whole {name}".replace(" ", "_")
        shutil.copytree(target.template, whole)
        start_time = time.monotonic()
        code, output = finish(target, whole)
        assert code == 0, f"{name}: {output}"
        target.seconds, target.expected = time.monotonic() - start_time, contents(whole)
        print(f"{name}: {target.seconds:.1f} s, {len(target.expected)} files", flush=True)

    shared = [name for name in chosen if name.startswith(("make_", "import_"))]
    disturbances = (campaign.flip, campaign.fill_the_disk, campaign.jump_back)
    while sum(campaign.kills.values()) < args.kills:
        if args.minutes is not None and time.monotonic() - begin > 60 * args.minutes:
            break
        for name, target in chosen.items():
            campaign.kill_and_rerun(name, target)
            if campaign.chance.random() < 0.1:
                campaign.chance.choice(disturbances)(name, target)
            if name in shared and campaign.chance.random() < 0.05:
                campaign.stop_one_of_two(name, target)
        record = {
            "command": f"python tests/campaign.py {' '.join(sys.argv[1:])}",
            "commit": runs.git_commit(),
            "machine": runs.machine(),
            "minutes": (time.monotonic() - begin) / 60,
            "kills": sum(campaign.kills.values()),
            "kills_by_stage": dict(sorted(campaign.kills.items())),
            "other": dict(campaign.other),
            "faults": campaign.faults,
        }
        store.write_json(args.out, record)
        print(f"{record['kills']} kills, {len(campaign.faults)} faults, {dict(campaign.other)}", flush=True)
    if not campaign.faults:
        shutil.rmtree(root)


if __name__ == "__main__":
    cli(main, Args())
