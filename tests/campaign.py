"""SIGKILL at random moments, and other faults, against every script that writes; run by hand, for minutes or hours.

    python tests/campaign.py --kills 1000 --seed 1 --out campaign.json
    python tests/campaign.py --seed 1 --scripts lapo --rounds 17        # one round again

Each target (a tiny command) runs once undisturbed. A round starts it from fresh inputs in the same folder, kills it a
few times, and runs the same command until it ends by itself; then every file must be as that undisturbed run left it,
with nothing beside, and no process may be left. Some rounds have another fault instead: see `FAULTS`. What a round does
follows from the seed and its number, but for the machine's speed.
"""

import contextlib
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import methods  # noqa: E402  (these need the path)
import numpy as np  # noqa: E402
import torch  # noqa: E402

from common import runs, store  # noqa: E402
from common.cli import cli, stop_requested  # noqa: E402

MARK = "CAMPAIGN_TARGET"  # in the environment of every process of a target, whatever its session
LIMIT = 180.0  # seconds after which a command that has not ended hangs
RESULT = ("metrics", "decoders", "labelled_episodes", "nmse_per_dimension")  # of result.json, compared
SMALL_SET = (
    "--quick --backgrounds synthetic --num-videos 1 --image-size 32 --episode-length 12 --camera-scale 0.1 "
    "--train-transitions 72 --test-transitions 36 --episodes-per-shard 1"
).split()


@dataclass
class Args:
    kills: int = 1000
    """end after this many kills"""
    minutes: float | None = None
    """end after this time, whatever was done"""
    seed: int = 1
    """of chance"""
    scripts: tuple[str, ...] | None = None
    """targets whose names begin with one of these; none: all"""
    rounds: tuple[int, ...] | None = None
    """only these rounds, with all targets counted as in a whole campaign"""
    fault_share: float = 0.25
    """share of the rounds that have another fault than kills"""
    out: Path | None = None
    """the record, JSON; it is written after every round"""


@dataclass
class Target:
    """A command, and what its undisturbed run gave."""

    name: str
    folder: Path
    words: list[str]
    """script and arguments; they name files in `now`"""
    verify: list[str] = field(default_factory=list)
    """script and arguments that check the finished files"""
    interpreter: bool = False
    """start a new interpreter, not a fork of one that has imported torch"""
    shared: bool = False
    """whether two processes may do it together"""
    flips: tuple[str, ...] = ()
    """patterns of files in `now` that are damaged"""
    placeholders: dict[str, Path] = field(default_factory=dict)
    """what stands in commands of messages for folders that they do not know"""
    seconds: float = 0.0
    startup: float = 0.0
    contents: dict[str, str] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)
    """the files in the order in which they were written"""

    @property
    def now(self) -> Path:
        """Where it works: always the same folder, since some files hold its name."""
        return self.folder / "now"

    def fresh(self, finished: bool = False) -> None:
        """The inputs alone, or the undisturbed run's outcome."""
        shutil.rmtree(self.now, ignore_errors=True)
        shutil.copytree(self.folder / ("done" if finished else "inputs"), self.now)


# -------------------------------------------------------------------------------------------------------------- targets


def make_targets(folder: Path) -> list[Target]:
    """All targets, with their inputs written below `folder`."""
    import planted
    import test_import_data
    import test_resume

    from common.dataset import Dataset

    found = []

    def add(name: str, words: Callable[[Path], list[str]], **options: Any) -> Path:
        """Adds a target, whose words are given for its folder `now`; returns its folder of inputs."""
        place = folder / name
        (place / "inputs").mkdir(parents=True)
        found.append(Target(name, place, words(place / "now"), **options))
        return place / "inputs"

    for env in ("walker-run", "reach"):
        for workers in (1, 3):
            words = ["make_dataset.py", "--env", env, *SMALL_SET, "--data-dir"]
            flips = ("data/*/*/[0-9]*.h5",)
            add(
                f"make_dataset-{env}-{workers}",
                lambda now, words=words, workers=workers: [*words, str(now / "data"), "--workers", str(workers)],
                interpreter=True, shared=True, flips=flips,
            )  # fmt: skip
            found[-1].verify = [*found[-1].words, "--verify"]

    given, flips = folder / "given", ("data/*/*/*.mine.h5",)
    words = ["make_masks.py", "--env", "cheetah-run", "--import", str(given), "--name", "mine", "--data-dir"]
    data = add("make_masks", lambda now: [*words, str(now / "data")], shared=True, flips=flips) / "data"
    planted.write(data, train=6, test=4, length=12, shards=3)
    for split, render in (("train", "clean"), ("train", "distractor"), ("test", "clean"), ("test", "distractor")):
        dataset = Dataset(data, "cheetah-run", split, render)
        masks = np.unpackbits(dataset.masks(np.arange(dataset.num_frames)), axis=-1).reshape(-1, 32, 32)
        place = given / "cheetah-run" / split / render
        place.mkdir(parents=True)
        for episode, values in enumerate(np.split(masks, dataset.episode_start[1:-1])):
            np.save(place / f"{episode:05d}.npy", values)
    verify_masks = ["make_dataset.py", "--env", "cheetah-run", "--verify", "--data-dir"]
    found[-1].verify = [*verify_masks, str(found[-1].now / "data")]
    found[-1].placeholders = {"DIR": given}

    clips = {name: folder / name for name in ("videos", "actions", "masks")}
    rng = np.random.default_rng(0)
    for number in range(9):
        test_import_data.write_video(clips["videos"] / f"{number}.mp4", 20)
        for name, values in (("actions", rng.normal(size=(20, 2))), ("masks", rng.random((20, 24, 32)) < 0.3)):
            clips[name].mkdir(exist_ok=True)
            np.save(clips[name] / f"{number}.npy", values)
    words_of_import = ["import_data.py", "videos", str(clips["videos"]), "--name", "own", "--size", "16"]
    words_of_import += ["--masks", str(clips["masks"]), "--actions", str(clips["actions"]), "--data-dir"]
    flips = ("data/own/*/[0-9]*.h5", "data/own/plan.h5")
    add("import_data", lambda now: [*words_of_import, str(now / "data")], interpreter=True, shared=True, flips=flips)
    found[-1].verify = [*found[-1].words, "--verify"]
    found[-1].placeholders = {"DIR": clips["videos"], "MASKS": clips["masks"], "ACTIONS": clips["actions"]}

    for script in ("lapo", "masklam", "laof"):
        values = test_resume.TINY | {"num_labels": test_resume.BUDGETS.get(script, (20,))}
        values["eval_envs"] = 2 if script == "lapo" else 1  # in processes of their own
        flips = ("checkpoints/*.pt", "lam.pt", "result.json")

        def words_of_run(now: Path, script: str = script, values: dict[str, Any] = values) -> list[str]:
            flags = methods.flags(script, folder)  # which writes random weights for RAFT
            return [f"{script}.py", *methods.words(values | {"data_dir": now / "data", "runs_dir": now}), *flags]

        inputs = add(script, words_of_run, flips=flips)
        planted.write(inputs / "data", train=4, test=2, length=12, shards=2)
    found[-1].flips = (*flips, "data/*/*/*.raft.h5")
    found[-1].verify = [*verify_masks, str(found[-1].now / "data")]

    tiny = "idm-scale=1 fdm-scale=1 policy-scale=1 latent-dim=16 batch-size=16 num-labels=20 device=cpu lam-updates=6"
    tiny += " log-every=1 policy-updates=6 decoder-updates=10 checkpoint-every=2 eval-episodes=1 eval-envs=1"
    grid = "reproduce.py mask-dilation --env cheetah-run --seeds 1 --values 0 1 --quick --jobs 2 --set"
    data_set = "backgrounds=synthetic num-videos=1 train-transitions=36 test-transitions=12 episode-length=12 workers=1"
    grid_words = [*grid.split(), *tiny.split(), "eval-steps=5", "--data-set", *data_set.split()]
    add(
        "reproduce",
        lambda now: [*grid_words, "--data-dir", str(now / "data"), "--runs-dir", str(now / "runs")],
        interpreter=True,
    )
    return found


# ------------------------------------------------------------------------------------------------------------ processes


class Interpreter:
    """A script in a new interpreter, with what a multiprocessing.Process has."""

    def __init__(self, words: list[str], output: Path) -> None:
        self.process, self.output = self, output
        output.mkdir(parents=True)
        with open(output / "stdout", "w") as out, open(output / "stderr", "w") as errors:
            options = {"stdout": out, "stderr": errors, "start_new_session": True}
            environment = os.environ | {MARK: str(output.parents[1])}
            self.popen = subprocess.Popen([sys.executable, *words], cwd=ROOT, env=environment, **options)
        self.pid = self.popen.pid

    def is_alive(self) -> bool:
        return self.popen.poll() is None

    def join(self, timeout: float) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.popen.wait(timeout)

    @property
    def exitcode(self) -> int | None:
        return self.popen.poll()


Process = Interpreter | methods.ScriptProcess


def said(process: Process) -> str:
    """What a process printed; one that was killed at once has no files."""
    texts = (process.output / name for name in ("stdout", "stderr"))
    return "".join(path.read_text(errors="replace") for path in texts if path.exists())


def signal_to(process: Process, number: int, alone: bool = False) -> None:
    """To its process group; to itself alone, also where a fork has not made its group yet."""
    with contextlib.suppress(ProcessLookupError):
        try:
            (os.kill if alone else os.killpg)(process.process.pid, number)
        except ProcessLookupError:
            os.kill(process.process.pid, number)


def mounted(options: str, folder: Path) -> bool:
    """Mounts a small disk in memory, or changes it."""
    command = ["mount", "-t", "tmpfs", "-o", options, "campaign", str(folder)]
    return subprocess.run(command, capture_output=True).returncode == 0


def files(folder: Path) -> Iterator[Path]:
    """All files below, hidden ones too."""
    for parent, _, names in os.walk(folder):
        yield from (Path(parent) / name for name in names)


# ------------------------------------------------------------------------------------------------------------ comparing


def tensors(value: Any) -> Iterator[bytes]:
    """The numbers of nested dictionaries of tensors, with their names."""
    for name, item in value.items() if isinstance(value, dict) else ():
        yield name.encode()
        yield from tensors(item)
    if isinstance(value, torch.Tensor):
        yield value.numpy().tobytes()


def digest(path: Path) -> str:
    """Of what must be the same in two runs; times, and logs as a whole, may differ."""
    from test_resume import losses

    if path.suffix == ".log" or path.name == ".lock":
        return ""
    if path.suffix == ".pt":
        state = torch.load(path, weights_only=True)
        parts = list(tensors({name: state.get(name) for name in ("model", "probe")}))
    elif path.name == "metrics.jsonl":
        parts = [repr(losses(path.parent)).encode()]
    elif path.name == "result.json":
        result = json.loads(path.read_text())
        parts = [json.dumps([result.get(name) for name in RESULT]).encode()]
    else:
        parts = [path.read_bytes()]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def contents(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): digest(path) for path in files(folder)}


def compare(target: Target) -> list[str]:
    """What is not as the undisturbed run left it."""
    try:
        here = contents(target.now)
    except Exception as error:  # whatever a damaged file may lead to
        return [f"a file cannot be read: {error!r}"]
    lost, extra = sorted(target.contents.keys() - here.keys()), sorted(here.keys() - target.contents.keys())
    changed = sorted(name for name in here.keys() & target.contents.keys() if here[name] != target.contents[name])
    found = {"missing": lost, "left over": extra, "different": changed}
    return [f"{kind}: {', '.join(names)}" for kind, names in found.items() if names]


def stage(target: Target, started: float) -> str:
    """What a process that started at a time did when it was killed, from the files."""
    times: dict[Path, float] = {}
    for path in (target.now, *(Path(parent) for parent, _, _ in os.walk(target.now)), *files(target.now)):
        with contextlib.suppress(FileNotFoundError):
            times[path] = path.stat().st_ctime  # nobody can set this one
    if max(times.values()) < started:
        return "start-up"
    runs_there = sorted((path for path in times if path.name == "metrics.jsonl"), key=times.get)
    if runs_there and (lines := methods.metrics(folder := runs_there[-1].parent)):
        last = lines[-1]["stage"].split("-")[0]  # of any label budget
        if (folder / "result.json").exists():
            return "end"
        return f"after {last}" if (folder / f"{lines[-1]['stage']}.pt").exists() else last
    for name in target.order:
        if not (target.now / name).exists():
            path = Path(name)
            return re.sub(r"^[0-9]{5}\.", "", f"{path.name}") + f" of {path.parent.name}"
    return "end"


# --------------------------------------------------------------------------------------------------------------- rounds


class Problem(Exception):
    """Something that a round found."""


class Round:
    """One round of one target. Its methods raise Problem."""

    def __init__(self, target: Target, number: int, seed: int) -> None:
        self.target, self.number = target, number
        self.rng = np.random.default_rng([seed, number])
        self.kills: list[tuple[str, str, float]] = []  # stage, how, seconds after the start
        self.outcome = ""
        self.processes: list[Process] = []
        self.started = 0.0

    def start(self, words: list[str] | None = None) -> Process:
        words = words or self.target.words
        output = self.target.folder / "output" / f"{self.number}-{len(self.processes)}"
        self.started = time.time()
        if self.target.interpreter or words[0] == "make_dataset.py":
            process: Process = Interpreter(words, output)
        else:
            process = methods.ScriptProcess(words[0].removesuffix(".py"), words[1:], output)
        self.processes.append(process)
        return process

    def left(self) -> list[int]:
        """The processes of this round that live."""
        groups = {process.process.pid for process in self.processes}
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                marked = f"{MARK}={self.target.folder}\0".encode() in (path / "environ").read_bytes()
                zombie = (path / "stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
                if (marked or os.getpgid(int(path.name)) in groups) and not zombie:
                    found.append(int(path.name))
        return found

    def kill_all(self) -> None:
        while found := self.left():
            for pid in found:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)

    def kill_after(self, process: Process, seconds: float, how: str) -> bool:
        """SIGKILL, unless the process ends by itself before."""
        process.process.join(seconds)
        alone = self.rng.random() < 0.25  # as when memory runs out; else the whole group, as with a machine that ends
        signal_to(process, signal.SIGKILL, alone)
        if not alone:
            self.kill_all()
        process.process.join(30)
        if process.process.exitcode != -signal.SIGKILL:
            return False
        how = f"{how}, alone" if alone else how
        self.kills.append((stage(self.target, self.started), how, round(seconds, 2)))
        return True

    def ended(self, process: Process) -> int:
        """The exit code of a process that ends by itself."""
        process.process.join(LIMIT)
        if process.process.exitcode is None:
            signal_to(process, signal.SIGKILL)
            raise Problem(f"hangs for {LIMIT} s: {said(process)[-500:]}")
        if "Traceback" in said(process):
            raise Problem(f"a traceback: {said(process)[-1500:]}")
        return process.process.exitcode

    def finish(self) -> None:
        """The same command until it ends by itself; everything must then be as after an undisturbed run."""
        if self.ended(process := self.start()) != 0:
            text = said(process)[-700:]
            survivors = len(self.left())
            while self.left():
                time.sleep(0.2)
            if self.ended(self.start()) != 0 or compare(self.target):
                raise Problem(f"the same command fails: {text}")
            raise Problem(f"the same command fails at first ({survivors} processes of the killed one lived): {text}")
        self.check()

    def check(self) -> None:
        deadline = time.monotonic() + 20
        while (left := self.left()) and time.monotonic() < deadline:
            time.sleep(0.05)
        if left:
            self.kill_all()
            raise Problem(f"{len(left)} processes are left")
        if lines := compare(self.target):
            raise Problem("; ".join(lines))

    # --- what a round does

    def kill(self) -> None:
        """Up to eight kills: at any moment of the expected time, soon after the one before, or while it starts up."""
        self.target.fresh()
        for number in range(self.rng.integers(1, 9)):
            how = self.rng.choice(["any", "soon", "start-up"]) if number else "any"
            longest = {"any": self.target.seconds, "soon": 0.3, "start-up": self.target.startup}[how]
            if not self.kill_after(self.start(), self.rng.uniform(0, longest), how):
                break
        self.finish()

    def until_there(self, pattern: str) -> Path:
        """Kills the command at a random moment after a file is there, and returns it; again, if it is gone by then."""
        for _ in range(10):
            self.target.fresh()
            process = self.start()
            while process.process.is_alive() and not list(self.target.now.rglob(pattern)):
                time.sleep(0.002)
            self.kill_after(process, self.rng.uniform(0, 0.3 * self.target.seconds), "file")
            found = sorted(self.target.now.rglob(pattern), key=lambda path: path.stat().st_ctime)
            if found and not list(self.target.now.rglob("result.json")):
                return found[-1]
        raise Problem(f"no {pattern} at any kill")

    def flip(self) -> None:
        """A byte of a file changes. It must be found, and what the message says must repair it."""
        target, pattern = self.target, str(self.rng.choice(self.target.flips))
        if pattern in ("checkpoints/*.pt", "lam.pt"):
            path = self.until_there(pattern)
        else:
            target.fresh(finished=True)
            path = Path(self.rng.choice(sorted(map(str, target.now.rglob(pattern)))))
        flow = pattern.endswith("raft.h5")
        good = path.read_bytes()
        position, change = int(self.rng.integers(len(good))), int(self.rng.integers(1, 256))
        damaged = bytearray(good)
        damaged[position] ^= change
        times = (path.stat().st_atime_ns, path.stat().st_mtime_ns)
        path.write_bytes(damaged)
        os.utime(path, ns=times)  # a disk that rots does not touch the times, by which messages tell what is later
        self.outcome = f"{pattern}: "
        about = f"{path.relative_to(target.now)}, byte {position} of {len(good)} ^ {change}"
        if not flow and (pattern != "data/own/*/[0-9]*.h5" or self.rng.random() < 0.5):
            # The reader may find it, and even mend it.
            process = self.start()
            if self.ended(process) != 0:
                self.repair(path, said(process), about)
                self.outcome += "found by the reader"
                return self.finish()
            if not compare(target):
                named = path.name in said(process)
                self.outcome += "mended by the same command" if named else "has no effect"
                return self.check()
        if target.verify and path.suffix == ".h5":
            process = self.start(target.verify)
            if self.ended(process) != 0:
                self.repair(path, said(process), about)
                for result in target.now.rglob("result.json") if flow else ():
                    result.unlink()  # a finished run does not make its flow again
                self.outcome += "found by --verify"
                return self.finish()
        if self.harmless(path, good):
            self.outcome += "padding, or text that no hash covers"
            return None
        raise Problem(f"a flipped byte is not found: {about}")

    def repair(self, path: Path, text: str, about: str) -> None:
        """Does what a message says."""
        line = next((line for line in text.splitlines() if "error:" in line and path.name in line), "")
        if match := re.search(r"repair with: (.*)", line):
            command = match[1].replace("python ", f"{sys.executable} ")
            for name, place in self.target.placeholders.items():
                command = re.sub(rf"\b{name}\b", str(place), command)
            done = subprocess.run(command, shell=True, cwd=ROOT, capture_output=True, text=True)
            if done.returncode:
                raise Problem(f"the repair fails ({about}): {command}: {done.stderr[-500:]}")
        elif match := re.search(r"remove it and the later ones of (.*), then repeat", line):
            names = match[1].split(", ")
            run = path.parent
            for name in names[names.index(path.name) :]:
                (run / name).unlink()
        elif "remove it and rerun" in line:
            path.unlink()
        else:
            raise Problem(f"no repair is named ({about}): {text[-500:]}")

    def harmless(self, path: Path, good: bytes) -> bool:
        """Whether a damaged file still says the same."""
        other = path.with_name("good" + path.suffix)
        try:
            if path.suffix == ".json":
                return json.loads(path.read_text()) == json.loads(good)
            if path.suffix != ".h5":
                return False
            other.write_bytes(good)
            here, there = store.read(path), store.read(other)
            same = all(np.array_equal(here.arrays[name], there.arrays[name], equal_nan=name == "action")
                       for name in there.arrays)  # fmt: skip
            return same and here.attributes == there.attributes and here.content_hash == there.content_hash
        except Exception:
            return False
        finally:
            other.unlink(missing_ok=True)

    def full_disk(self) -> None:
        """The disk is full from a random moment on, and grows later."""
        shutil.rmtree(self.target.now, ignore_errors=True)
        self.target.now.mkdir()
        if not mounted("size=512m", self.target.now):
            self.outcome = "not tried: no right to mount a small tmpfs"
            return
        try:
            shutil.copytree(self.target.folder / "inputs", self.target.now, dirs_exist_ok=True)
            process = self.start()
            process.process.join(self.rng.uniform(0, self.target.seconds))
            room = int(self.rng.integers(1, 40)) * 4096
            while not mounted(f"remount,size={shutil.disk_usage(self.target.now).used + room}", self.target.now):
                pass  # more was written meanwhile
            code, text = self.ended(process), said(process)
            if code not in (0, 1) or (code == 1 and "make room" not in text):
                raise Problem(f"a full disk is not told: exit code {code}, {text[-700:]}")
            self.outcome = "it had all been written" if code == 0 else "told"
            assert mounted("remount,size=512m", self.target.now)
            if left := [path.name for path in files(self.target.now) if ".part" in path.name]:
                raise Problem(f"a full disk leaves {left}")
            self.finish()
        finally:
            self.kill_all()
            kept = self.target.folder / "kept"
            shutil.rmtree(kept, ignore_errors=True)
            shutil.copytree(self.target.now, kept)
            while subprocess.run(["umount", str(self.target.now)], capture_output=True).returncode:
                time.sleep(0.1)  # a killed process may not be gone yet
            self.target.now.rmdir()
            kept.rename(self.target.now)

    def clock(self) -> None:
        """The clock jumps back by an hour: all files are from the future."""
        self.target.fresh()
        self.kill_after(self.start(), self.rng.uniform(0, self.target.seconds), "any")
        for path in files(self.target.now):
            os.utime(path, (time.time() + 3600,) * 2)
        self.finish()

    def stop(self) -> None:
        """Two processes share the work, and one is stopped for some seconds."""
        self.target.fresh()
        both = [self.start(), self.start()]
        both[0].process.join(self.rng.uniform(0, self.target.seconds))
        signal_to(both[0], signal.SIGSTOP)
        both[1].process.join(self.rng.uniform(2, 6))
        self.outcome = "the other ended meanwhile" if not both[1].process.is_alive() else "the other did not end"
        signal_to(both[0], signal.SIGCONT)
        for process in both:
            if self.ended(process) != 0:
                raise Problem(f"one of two processes fails: {said(process)[-700:]}")
        self.check()


FAULTS = {"flip": Round.flip, "full disk": Round.full_disk, "clock": Round.clock, "stop": Round.stop}


# ------------------------------------------------------------------------------------------------------------- campaign


def undisturbed(target: Target) -> None:
    """The reference, made twice: the first time fills caches; the second one tells the time."""
    for number in (10**6, 10**6 + 1):
        target.fresh()
        one = Round(target, number, 0)
        start = time.monotonic()
        process = one.start()
        target.startup = 0.0
        while process.process.is_alive():
            if not target.startup and stage(target, one.started) != "start-up":
                target.startup = time.monotonic() - start
            time.sleep(0.02)
        target.seconds = time.monotonic() - start
        if process.process.exitcode != 0:
            raise SystemExit(f"{target.name}: {said(process)}")
        here = contents(target.now)
        if target.contents and here != target.contents:
            raise SystemExit(f"{target.name}: two undisturbed runs differ: {compare(target)}")
        target.contents = here
    times = {str(path.relative_to(target.now)): path.stat().st_mtime_ns for path in files(target.now)}
    inputs = {str(path.relative_to(target.folder / "inputs")) for path in files(target.folder / "inputs")}
    target.order = [name for name in sorted(times, key=times.get) if name not in inputs]
    shutil.copytree(target.now, target.folder / "done")
    print(f"{target.name}: {target.seconds:.1f} s, first file after {target.startup:.1f} s", flush=True)


def main(args: Args) -> None:
    if args.out is not None:
        args.out = args.out.absolute()
    os.chdir(ROOT)
    work = Path(tempfile.mkdtemp(prefix="campaign-"))
    targets = make_targets(work)
    chosen = [one for one in targets if not args.scripts or one.name.startswith(tuple(args.scripts))]
    for target in chosen:
        undisturbed(target)
    begin, count = time.monotonic(), Counter()
    kills: dict[str, Counter] = defaultdict(Counter)
    tried: dict[str, Counter] = defaultdict(Counter)
    problems: list[dict[str, Any]] = []
    record = {
        "command": f"python tests/campaign.py {' '.join(sys.argv[1:])}",
        "commit": runs.git_commit(),
        "machine": runs.machine(),
        "versions": runs.versions(),
        "seconds_undisturbed": {one.name: round(one.seconds, 2) for one in chosen},
    }
    number = -1
    while not stop_requested() and count["kills"] < args.kills:
        number += 1
        minutes = (time.monotonic() - begin) / 60
        if (args.minutes and minutes > args.minutes) or (args.rounds and number > max(args.rounds)):
            break
        target = targets[number % len(targets)]
        if target not in chosen or (args.rounds and number not in args.rounds):
            continue
        one = Round(target, number, args.seed)
        kind = "kill"
        if one.rng.random() < args.fault_share:
            fitting = [
                name for name in FAULTS if (name != "stop" or target.shared) and (name != "flip" or target.flips)
            ]
            kind = str(one.rng.choice(fitting))
        try:
            FAULTS.get(kind, Round.kill)(one)
        except Exception as problem:  # the campaign's own mistakes are told like those that it looks for
            if not isinstance(problem, Problem):
                traceback.print_exc()
            one.kill_all()
            kept = work / f"found-{number}"
            shutil.move(target.now, kept)
            again = f"python tests/campaign.py --seed {args.seed} --scripts {target.name} --rounds {number}"
            about = {
                "target": target.name,
                "kind": kind,
                "what": str(problem) or repr(problem),
                "round": number,
                "again": again,
            }
            problems.append(about | {"kills": one.kills, "files": str(kept)})
            print(f"FOUND in round {number}, {target.name}, {kind}: {problem}", flush=True)
            one.outcome += "problem"
        for name, how, _ in one.kills:
            kills[target.name][name] += 1
            count["kills"] += 1
            count[how] += 1
        tried[f"{kind}, {target.name}"][one.outcome or "nothing lost"] += 1
        about = ", ".join(f"{name} ({how} {seconds} s)" for name, how, seconds in one.kills)
        print(f"round {number} {target.name} {kind} {one.outcome}: {about}", flush=True)
        record |= {
            "minutes": round((time.monotonic() - begin) / 60, 1),
            "kills": count["kills"],
            "kills_by_script_and_stage": {name: dict(stages) for name, stages in sorted(kills.items())},
            "kills_by_moment": {name: value for name, value in sorted(count.items()) if name != "kills"},
            "rounds": {name: dict(outcomes) for name, outcomes in sorted(tried.items())},
            "problems": problems,
        }
        if args.out is not None:
            store.write_json(args.out, record)
    print(json.dumps({name: record.get(name) for name in ("kills", "minutes", "kills_by_script_and_stage")}, indent=1))
    if not problems:
        shutil.rmtree(work)


if __name__ == "__main__":
    cli(main, Args())
