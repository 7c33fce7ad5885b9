"""SIGKILL at random moments, and other faults, against every script that writes; run by hand, for minutes or hours.

    python tests/campaign.py --kills 1000 --seed 1 --out campaign.json
    python tests/campaign.py --seed 1 --scripts lapo --rounds 16      # one round again

Each target, a tiny command, runs undisturbed first. A round starts it from fresh inputs in the same folder, kills it up
to eight times, and runs the same command to its end: every file must then be as the undisturbed run left it, with none
beside, and no process may live. A quarter of the rounds has another fault instead, see `FAULTS`. What a round does
follows from the seed and its number, but for the machine's speed. TMPDIR says where all this happens.
"""

import contextlib
import functools
import hashlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import methods  # noqa: E402  (after the path that it needs)
import numpy as np  # noqa: E402

from common import runs, store  # noqa: E402
from common.cli import cli, stop_requested  # noqa: E402

MARK = "CAMPAIGN_TARGET"  # in the environment of a target's processes: jobs of reproduce.py have their own groups
OWN_INTERPRETER = ("make_dataset.py", "import_data.py", "reproduce.py")  # the others are forked with torch imported
DATA = (
    "--quick --backgrounds synthetic --num-videos 1 --image-size 32 --episode-length 12 --camera-scale 0.1 "
    "--train-transitions 72 --test-transitions 36 --episodes-per-shard 1"
).split()
GRID = (
    "reproduce.py mask-dilation --env cheetah-run --seeds 1 --values 0 1 --quick --jobs 2 --set idm-scale=1 "
    "fdm-scale=1 policy-scale=1 latent-dim=16 batch-size=16 num-labels=20 device=cpu lam-updates=6 log-every=1 "
    "policy-updates=6 decoder-updates=10 checkpoint-every=2 eval-episodes=1 eval-envs=1 eval-steps=5 --data-set "
    "backgrounds=synthetic num-videos=1 train-transitions=36 test-transitions=12 episode-length=12 workers=1"
).split()
CHECKPOINT = "checkpoints/*.pt"


@dataclass
class Args:
    kills: int = 1000
    """end after this many"""
    minutes: float | None = None
    """end after this time"""
    seed: int = 1
    """of chance"""
    scripts: tuple[str, ...] | None = None
    """targets whose names begin with one of these; None: all"""
    rounds: tuple[int, ...] | None = None
    """numbers of the rounds; None: all"""
    faults: tuple[str, ...] | None = None
    """only these faults (flip, full disk, clock, stop) and no rounds of kills; None: a quarter of the rounds, all"""
    out: Path | None = None
    """file for the record, JSON, written after every round"""


class Found(Exception):
    """Something that a round found."""


@dataclass
class Target:
    """A command that works in `now`, always the same folder, since some files hold its name."""

    name: str
    folder: Path
    words: list[str]
    verify: list[str] = field(default_factory=list)  # a command that checks finished files
    flips: tuple[str, ...] = ()  # patterns of files that are damaged
    placeholders: dict[str, Path] = field(default_factory=dict)  # what messages call folders that they do not know
    shared: bool = False  # two processes may do it together
    # What the undisturbed run gave: times, digests of files, and files in the order in which they were written.
    seconds: float = 0.0
    startup: float = 0.0
    contents: dict[str, str] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)

    @property
    def now(self) -> Path:
        return self.folder / "now"

    def fresh(self, source: str = "inputs") -> None:
        shutil.rmtree(self.now, ignore_errors=True)
        shutil.copytree(self.folder / source, self.now)


def make_targets(work: Path) -> list[Target]:
    """All targets; their inputs are written to `work`."""
    import planted
    import test_resume
    from test_import_data import write_video

    found: dict[str, Target] = {}

    def add(name: str, *words: Any, **options: Any) -> Target:
        (work / name / "inputs").mkdir(parents=True)
        found[name] = Target(name, work / name, list(map(str, words)), **options)
        return found[name]

    for env in ("walker-run", "reach"):
        for workers in (1, 3):
            name = f"make_dataset-{env}-{workers}"
            words = ("make_dataset.py", "--env", env, *DATA, "--workers", workers, "--data-dir", work / name / "now")
            target = add(name, *words, flips=("[0-9]*.h5",), shared=True)
            target.verify = [*target.words, "--verify"]

    masks, verify = work / "masks_to_import", ("make_dataset.py", "--env", "cheetah-run", "--verify", "--data-dir")
    words = ("make_masks.py", "--env", "cheetah-run", "--import", masks, "--name", "mine", "--data-dir")
    target = add("make_masks", *words, work / "make_masks/now", flips=("*.mine.h5",), shared=True)
    target.verify, target.placeholders = [*verify, str(target.now)], {"DIR": masks}
    planted.write(target.folder / "inputs", train=6, test=4, length=12, shards=3)
    rng = np.random.default_rng(0)
    for split, render, episode in [(s, r, e) for s, n in (("train", 6), ("test", 4)) for r in ("clean", "distractor")
                                   for e in range(n)]:  # fmt: skip
        path = masks / f"cheetah-run/{split}/{render}/{episode:05d}.npy"
        path.parent.mkdir(parents=True, exist_ok=True)
        np.save(path, rng.random((13, 32, 32)) < 0.3)

    given = {name: work / f"{name.lower()}_to_import" for name in ("DIR", "MASKS", "ACTIONS")}
    words = ("import_data.py", "videos", given["DIR"], "--masks", given["MASKS"], "--actions", given["ACTIONS"])
    words += ("--name", "own", "--size", 16, "--data-dir", work / "import_data/now")
    target = add("import_data", *words, flips=("[0-9]*.h5", "plan.h5"), placeholders=given, shared=True)
    target.verify = [*target.words, "--verify"]
    for number in range(9):
        write_video(given["DIR"] / f"{number}.mp4", 20)
        for name, values in (("ACTIONS", rng.normal(size=(20, 2))), ("MASKS", rng.random((20, 24, 32)) < 0.3)):
            given[name].mkdir(exist_ok=True)
            np.save(given[name] / f"{number}.npy", values)

    for script in ("lapo", "masklam", "laof"):
        values = test_resume.TINY | {"num_labels": test_resume.BUDGETS.get(script, (20,))}
        values |= {"eval_envs": 2 if script == "lapo" else 1}  # two have a process each
        values |= {"data_dir": work / script / "now/data", "runs_dir": work / script / "now"}
        words = (f"{script}.py", *methods.words(values), *methods.flags(script, work))
        target = add(script, *words, flips=(CHECKPOINT, "lam.pt", "result.json"))
        planted.write(target.folder / "inputs/data", train=4, test=2, length=12, shards=2)
    target.flips, target.verify = (*target.flips, "*.raft.h5"), [*verify, str(target.now / "data")]

    now = work / "reproduce/now"
    add("reproduce", *GRID, "--data-dir", now / "data", "--runs-dir", now / "runs")
    return list(found.values())


# ----------------------------------------------------------------------------------------------- files of an outcome


def digest(path: Path) -> str:
    """Of what must be the same in two runs: all of a file but times, and nothing of logs."""
    from test_resume import losses, weights

    parts: Any = path.read_bytes()
    if path.suffix == ".log" or path.name == ".lock":
        parts = ""
    elif path.suffix == ".pt":  # all stages of its run together
        parts = [(name, value.numpy().tobytes()) for name, value in sorted(weights(path.parent).items())]
    elif path.name == "metrics.jsonl":
        parts = losses(path.parent)
    elif path.name == "result.json":
        result = json.loads(parts)
        parts = [result[name] for name in ("metrics", "decoders", "labelled_episodes", "nmse_per_dimension")]
    return hashlib.sha256(parts if isinstance(parts, bytes) else repr(parts).encode()).hexdigest()


def contents(folder: Path) -> dict[str, str]:
    """The digests of all files by their path in the folder."""
    return {str(path.relative_to(folder)): digest(path) for path in folder.rglob("*") if path.is_file()}


def differences(target: Target) -> str:
    """What is not as the undisturbed run left it; empty if all is."""
    try:
        here, there = contents(target.now), target.contents
    except Exception as error:  # whatever a damaged file leads to
        return f"a file cannot be read: {error!r}"
    names = {"missing": there.keys() - here.keys(), "left over": here.keys() - there.keys()}
    names["different"] = {name for name in here.keys() & there.keys() if here[name] != there[name]}
    return "; ".join(f"{kind}: {', '.join(sorted(some))}" for kind, some in names.items() if some)


def says_the_same(path: Path, good: bytes) -> bool:
    """Whether a file means what `good`, its content before, meant: the damage is in padding or in text without hash."""
    before = path.with_suffix(f".before{path.suffix}")
    before.write_bytes(good)
    try:
        if path.suffix == ".json":
            return json.loads(path.read_text(encoding="utf-8")) == json.loads(good)
        here, there = store.read(path), store.read(before)
        store.verify(here)
        return (here.attributes, here.content_hash) == (there.attributes, there.content_hash)
    except Exception:
        return False
    finally:
        before.unlink()


def stage(target: Target, started: float) -> str:
    """What a process that started at a time was doing, from the files."""
    times: dict[Path, float] = {}
    for path in (target.now, *target.now.rglob("*")):
        with contextlib.suppress(FileNotFoundError):  # another process is at work
            times[path] = path.stat().st_ctime  # which no fault changes
    if max(times.values()) < started:
        return "start-up"
    logs = sorted((path for path in times if path.name == "metrics.jsonl"), key=times.get)
    if logs and (lines := methods.metrics(logs[-1].parent)):
        last = lines[-1]["stage"]
        if logs[-1].with_name("result.json").exists():
            return "end"
        return f"after {last}" if logs[-1].with_name(f"{last}.pt").exists() else last
    missing = next((Path(name) for name in target.order if not (target.now / name).exists()), None)
    return "end" if missing is None else f"before {missing.parent.name}/{re.sub(r'^[0-9]{5}', 'N', missing.name)}"


def mount(options: str, folder: Path) -> bool:
    """Mounts a disk in memory, or changes it; whether that worked."""
    command = ["mount", "-t", "tmpfs", "-o", options, "campaign", str(folder)]
    return subprocess.run(command, capture_output=True).returncode == 0


# -------------------------------------------------------------------------------------------------------------- rounds


class Round:
    """One round of one target; its methods raise Found."""

    def __init__(self, target: Target, number: int, seed: int = 0) -> None:
        self.target, self.number = target, number
        self.rng = np.random.default_rng([seed, number])
        self.kills: list[tuple[str, str, float]] = []  # the stage, how, and seconds after the start
        self.outcome = ""
        self.processes: list[methods.ScriptProcess] = []
        self.started = 0.0

    def start(self, words: list[str] | None = None) -> methods.ScriptProcess:
        words = words or self.target.words
        command, marked = [sys.executable, *words], os.environ | {MARK: str(self.target.folder)}
        new = functools.partial(os.execve, sys.executable, command, marked) if words[0] in OWN_INTERPRETER else None
        output = self.target.folder / f"output/{self.number}-{len(self.processes)}"
        self.started = time.time()
        self.processes.append(methods.ScriptProcess(Path(words[0]).stem, words[1:], output, prepare=new))
        return self.processes[-1]

    def run(self, words: list[str] | None = None, process: methods.ScriptProcess | None = None) -> tuple[int, str]:
        """The exit code and the output of a command that ends by itself."""
        done = (process or self.start(words)).wait()
        text = done.stdout + done.stderr
        if done.returncode is None or done.returncode < 0 or "Traceback" in text:
            raise Found(f"ends with {done.returncode} (None: it hangs): {text[-2000:]}")
        return done.returncode, text

    def living(self) -> list[int]:
        """The processes of this round."""
        groups, found = {process.process.pid for process in self.processes}, []
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                marked = f"{MARK}={self.target.folder}\0".encode() in (path / "environ").read_bytes()
                zombie = (path / "stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
                if (marked or os.getpgid(int(path.name)) in groups) and not zombie:
                    found.append(int(path.name))
        return found

    def signal(self, process: methods.ScriptProcess, number: int, alone: bool = False) -> None:
        with contextlib.suppress(ProcessLookupError):
            try:
                (os.kill if alone else os.killpg)(process.process.pid, number)
            except ProcessLookupError:  # it has not made its group yet
                os.kill(process.process.pid, number)

    def end_all(self) -> None:
        while pids := self.living():
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)

    def kill_after(self, process: methods.ScriptProcess, seconds: float, how: str) -> bool:
        """SIGKILL, to it alone as when memory runs out, or to all as when a machine ends; False if it ended before."""
        process.process.join(seconds)
        alone = self.rng.random() < 0.25
        self.signal(process, signal.SIGKILL, alone)
        if not alone:
            self.end_all()
        process.process.join()
        if process.process.exitcode != -signal.SIGKILL:
            return False
        self.kills.append((stage(self.target, self.started), f"{how}{', alone' if alone else ''}", round(seconds, 2)))
        return True

    def finish(self) -> None:
        """The same command to its end, after which all must be as after the undisturbed run."""
        code, text = self.run()
        if code != 0:
            survivors = len(self.living())
            while self.living():
                time.sleep(0.1)
            again = "works then" if self.run()[0] == 0 and not differences(self.target) else "fails again"
            raise Found(f"the same command fails beside {survivors} processes of a killed one, {again}: {text[-2000:]}")
        self.check()

    def check(self) -> None:
        deadline = time.monotonic() + 20
        while (pids := self.living()) and time.monotonic() < deadline:
            time.sleep(0.05)
        if problem := f"{len(pids)} processes are left" if pids else differences(self.target):
            raise Found(problem)

    # --- what a round does

    def kill(self) -> None:
        """Kills at any moment of the expected time, at once after the kill before, or while the resumed one starts."""
        self.target.fresh()
        longest = {"any": self.target.seconds, "at once": 0.3, "start-up": self.target.startup}
        for number in range(self.rng.integers(1, 9)):
            how = str(self.rng.choice(list(longest), p=[0.6, 0.2, 0.2])) if number else "any"
            if not self.kill_after(self.start(), self.rng.uniform(0, longest[how]), how):
                break
        self.finish()

    def flip(self) -> None:
        """A byte of a file changes: the same command or --verify finds it, and what the message says repairs it."""
        target, pattern = self.target, str(self.rng.choice(self.target.flips))
        paths: list[Path] = []
        while not paths or (pattern in (CHECKPOINT, "lam.pt") and list(target.now.rglob("result.json"))):
            target.fresh("done" if pattern not in (CHECKPOINT, "lam.pt") else "inputs")
            if pattern in (CHECKPOINT, "lam.pt"):  # of a run that is not finished
                process = self.start()
                process.until(lambda: any(target.now.rglob(pattern)))
                self.kill_after(process, self.rng.uniform(0, 0.3 * target.seconds), "a file is there")
            paths = sorted(target.now.rglob(pattern))
        path = paths[-1] if pattern == CHECKPOINT else paths[self.rng.integers(len(paths))]
        good, times = path.read_bytes(), (path.stat().st_atime_ns, path.stat().st_mtime_ns)
        position, change = int(self.rng.integers(len(good))), int(self.rng.integers(1, 256))
        path.write_bytes(good[:position] + bytes([good[position] ^ change]) + good[position + 1 :])
        os.utime(path, ns=times)  # a disk that rots does not change them either
        where = f"{path.relative_to(target.now)}, byte {position} of {len(good)}, ^ {change}"

        checks = {"the same command": target.words}
        if path.suffix == ".h5":
            checks["--verify"] = target.verify
            if pattern == "*.raft.h5" or self.rng.random() < 0.5:
                del checks["the same command"]  # a finished run does not look at its flow
        for name, words in checks.items():
            code, text = self.run(words)
            if code != 0:
                self.outcome = f"{pattern}: found by {name}"
                self.repair(path, text, where)
                return self.finish()
            if name == "the same command" and not differences(target):
                self.outcome = f"{pattern}: {'mended by' if path.name in text else 'no harm to'} the same command"
                return self.check()
        if not says_the_same(path, good):
            raise Found(f"a flipped byte is not found: {where}")
        self.outcome = f"{pattern}: in padding, or in text without hash"

    def repair(self, path: Path, text: str, where: str) -> None:
        """Does what a message says."""
        line = next((line for line in text.splitlines() if "error: " in line and path.name in line), "")
        if match := re.search(r"repair with: (.*)", line):
            command = match[1].replace("python ", f"{sys.executable} ")
            for name, place in self.target.placeholders.items():
                command = re.sub(rf"\b{name}\b", str(place), command)
            done = subprocess.run(command, shell=True, cwd=ROOT, capture_output=True, text=True)
            if done.returncode:
                raise Found(f"the repair fails ({where}): {command}: {done.stderr[-500:]}")
            for result in self.target.now.rglob("result.json"):  # else the run does not compute its flow again
                result.unlink()
        elif match := re.search(r"remove ([^ ]*\.pt.*), then rerun", line):
            for name in match[1].split(", "):
                (path.parent / name).unlink()
        elif "remove it and rerun" in line:
            path.unlink()
        else:
            raise Found(f"no repair is named ({where}): {text[-2000:]}")

    def full_disk(self) -> None:
        """The disk is full from a random moment on, and has room again later."""
        target, mounted = self.target, self.target.now
        shutil.rmtree(mounted, ignore_errors=True)
        mounted.mkdir()
        if not mount("size=512m", mounted):
            self.outcome = "not tried: no right to mount a disk"
            return
        try:
            shutil.copytree(target.folder / "inputs", mounted, dirs_exist_ok=True)
            process, room = self.start(), 4096 * int(self.rng.integers(1, 40))
            process.process.join(self.rng.uniform(0, 0.8 * target.seconds))
            while not mount(f"remount,size={shutil.disk_usage(mounted).used + room}", mounted):
                pass  # more was written meanwhile
            code, text = self.run(process=process)
            self.outcome = "told" if code else "all was written before"
            if code and "make room" not in text:
                raise Found(f"a full disk is not told: {text[-2000:]}")
            mount("remount,size=512m", mounted)
            if left := [path.name for path in mounted.rglob(".*.part*")]:
                raise Found(f"a full disk leaves {left}")
            self.finish()
        finally:
            self.end_all()
            shutil.copytree(mounted, target.folder / "unmounted")
            while subprocess.run(["umount", mounted], capture_output=True).returncode:
                time.sleep(0.1)  # until the last process is gone
            mounted.rmdir()
            (target.folder / "unmounted").rename(mounted)

    def clock(self) -> None:
        """The clock jumps back by an hour: all files are from the future."""
        self.target.fresh()
        self.kill_after(self.start(), self.rng.uniform(0, self.target.seconds), "any")
        for path in self.target.now.rglob("*"):
            with contextlib.suppress(FileNotFoundError):
                os.utime(path, (time.time() + 3600,) * 2)
        self.finish()

    def stop(self) -> None:
        """Of two processes that share the work, one is stopped: for some seconds, or a minute."""
        self.target.fresh()
        stopped, other = self.start(), self.start()
        stopped.process.join(self.rng.uniform(0, self.target.seconds))
        self.signal(stopped, signal.SIGSTOP)
        other.process.join(60 if self.rng.random() < 0.25 else self.rng.uniform(2, 6))
        self.outcome = "the other waited" if other.process.is_alive() else "the other ended meanwhile"
        self.signal(stopped, signal.SIGCONT)
        for process in (stopped, other):
            code, text = self.run(process=process)
            if code:
                raise Found(f"one of two processes fails: {text[-2000:]}")
        self.check()


FAULTS = {"flip": Round.flip, "full disk": Round.full_disk, "clock": Round.clock, "stop": Round.stop}


def undisturbed(target: Target) -> None:
    """The reference, made twice: the first run fills caches, the second tells the times, and both must be the same."""
    for number in (10**6, 10**6 + 1):
        target.fresh()
        one, begin, target.startup = Round(target, number), time.monotonic(), 0.0
        process = one.start()
        while process.process.is_alive():
            if not target.startup and stage(target, one.started) != "start-up":
                target.startup = time.monotonic() - begin
            time.sleep(0.02)
        target.seconds = time.monotonic() - begin
        target.contents = target.contents or contents(target.now)
        if one.run(process=process)[0] or differences(target):
            raise SystemExit(f"{target.name} undisturbed: {differences(target)} {process.wait().stderr}")
    shutil.copytree(target.now, target.folder / "done")
    made = [path for path in target.now.rglob("*") if path.is_file()]
    names = [str(path.relative_to(target.now)) for path in sorted(made, key=lambda path: path.stat().st_mtime_ns)]
    target.order = [name for name in names if not (target.folder / "inputs" / name).exists()]
    print(f"{target.name}: {target.seconds:.1f} s, the first file after {target.startup:.1f} s", flush=True)


def main(args: Args) -> None:
    out = args.out and args.out.absolute()
    os.chdir(ROOT)
    os.environ |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    work = Path(tempfile.mkdtemp(prefix="campaign-"))
    targets = make_targets(work)
    chosen = [target for target in targets if target.name.startswith(tuple(args.scripts or [""]))]
    for target in chosen:
        undisturbed(target)
    kills, rounds = defaultdict(Counter), defaultdict(Counter)
    record: dict[str, Any] = {
        "command": f"python tests/campaign.py {' '.join(sys.argv[1:])}",
        "commit": runs.git_commit(),
        "machine": runs.machine(),
        "versions": runs.versions(),
        "seconds_undisturbed": {target.name: round(target.seconds, 2) for target in chosen},
        "kills": 0,
        "kills_by_script_and_stage": kills,
        "kills_by_moment": Counter(),
        "rounds": rounds,
        "found": [],
    }
    begin, number = time.monotonic(), -1
    while record["kills"] < args.kills and not stop_requested():
        number += 1
        record["minutes"] = round((time.monotonic() - begin) / 60, 1)
        if record["minutes"] > (args.minutes or 1e9) or number > max(args.rounds or [1e9]):
            break
        target = targets[number % len(targets)]  # so that a round is the same whatever targets are chosen
        if target not in chosen or (args.rounds and number not in args.rounds):
            continue
        one, kind = Round(target, number, args.seed), "kill"
        if args.faults or one.rng.random() < 0.25:
            possible = FAULTS.keys() - (set() if target.flips else {"flip"}) - (set() if target.shared else {"stop"})
            kinds = [name for name in args.faults or FAULTS if name in possible]
            if not kinds:
                continue
            kind = str(one.rng.choice(kinds))
        try:
            FAULTS.get(kind, Round.kill)(one)
        except Exception as problem:  # mistakes of the campaign are told too, and do not end it
            if not isinstance(problem, Found):
                traceback.print_exc()
            one.end_all()
            shutil.move(target.now, work / f"found-{number}")
            again = f"python tests/campaign.py --seed {args.seed} --scripts {target.name} --rounds {number}"
            again += f" --faults {shlex.join(args.faults)}" if args.faults else ""
            found = {"target": target.name, "kind": kind, "what": repr(problem), "again": again, "kills": one.kills}
            record["found"].append(found | {"files": str(work / f"found-{number}")})
            one.outcome = f"FOUND {problem}"
        for name, how, _ in one.kills:
            record["kills"] += 1
            kills[target.name][name] += 1
            record["kills_by_moment"][how] += 1
        rounds[kind][
            f"{target.name}: {one.outcome[:5] if 'FOUND' in one.outcome else one.outcome or 'nothing lost'}"
        ] += 1
        print(f"{number} {target.name}, {kind}: {one.outcome} {one.kills}", flush=True)
        if out:
            store.write_json(out, record)
    print(json.dumps({name: record[name] for name in ("kills", "minutes", "kills_by_script_and_stage")}, indent=1))
    if not record["found"]:
        shutil.rmtree(work)


if __name__ == "__main__":
    cli(main, Args())
