"""Make a dataset: roll out the expert and render every state clean and with distractors, with the agent's mask in each.

    python make_dataset.py --env cheetah-run --backgrounds synthetic --quick
    python make_dataset.py --env all --backgrounds synthetic --quick --preview

Writes data/<env>/train and data/<env>/test with one process per core. The same command again goes on where the last one
stopped. What a shard holds depends on the arguments and its number alone, never on how many processes made it. Paper
scale (the default without --quick) takes about 260 GB for a task of the Control Suite, 110 GB for one of Meta-World.
"""

import math
import multiprocessing
import multiprocessing.connection
import os
import shutil
import signal
import sys
import time
import traceback
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from common.errors import UserError
from common.experts import default_expert, load_expert
from common.runs import Progress, Stopped, atomic_path, cli, stop_requested, versions
from common.shards import (
    DamagedShard,
    Shard,
    ShardTaken,
    ShardWriter,
    frame_bytes,
    frame_schema,
    plan_differences,
    read_shard,
    remove_stale_parts,
    shard_paths,
)
from common.tasks import TASKS, get_task

EnvName = Literal[(*TASKS, "all")]
SPLITS = ("train", "test")
SHARD_BYTES = 10**9
MIN_SHARDS = 16  # so that a small set keeps several cores busy and loses little when it is stopped
QUICK_STEPS = 250
QUICK = {"episode_length": QUICK_STEPS, "quality": "fast", "camera_scale": 0.0, "color_scale": 0.0}
QUICK_TRANSITIONS = {  # by suite
    "dcs": {"train_transitions": 60 * QUICK_STEPS, "test_transitions": 12 * QUICK_STEPS},
    "dmw": {"train_transitions": 6000, "test_transitions": 1500, "image_size": 64},
}


@dataclass
class Args:
    env: EnvName = "cheetah-run"
    """Task. all: all fourteen, one after the other, each with its own defaults (help: cheetah-run's)."""
    data_dir: Path = Path("data")
    """Where datasets are."""
    train_transitions: int = 9_000_000
    """Transitions of the train split, reached by whole episodes."""
    test_transitions: int = 1_000_000
    """Transitions of the test split: other seeds, and backgrounds that the train split never shows."""
    episode_length: int = 1000
    """Steps after which an episode is cut (on Meta-World it also ends on success)."""
    episodes_per_shard: int | None = None
    """Default: as many as fit in 1 GB, at most a sixteenth of the split."""
    workers: int = len(os.sched_getaffinity(0))
    """Processes. Has no influence on what is written."""
    split: Literal["both", "train", "test"] = "both"
    """Which splits to make."""
    render: Literal["both", "clean", "distractor"] = "both"
    """Which renders to store."""
    quality: Literal["full", "fast"] = "full"
    """fast: no shadows, reflections and multisampling, coarser round shapes and floors; 7 (Meta-World)
    to 15 times as fast without a GPU."""
    image_size: int = 64
    """Height and width of a frame in pixels, a multiple of 8."""
    expert: Literal["student", "laom", "scripted"] = "student"
    """student: this project's small policies in experts/. laom: the policies that collected the paper's data on the
    Control Suite. scripted: Meta-World's own, the only ones for its tasks."""
    expert_dir: Path | None = None
    """Where the expert's weights are, if not in the usual place."""
    backgrounds: str = "davis"
    """davis, synthetic (no download), or a folder of clips (folders of images, or video files)."""
    davis_dir: Path = Path("data/DAVIS")
    """DAVIS 2017 in its official layout; downloaded if it is missing."""
    num_videos: int | None = None
    """Clips per split. Default: 4 on the Control Suite, all on Meta-World."""
    camera_scale: float = 0.1
    """Difficulty of the moving camera (Control Suite only); 0 switches it off."""
    color_scale: float = 0.1
    """Difficulty of the changing colours (Control Suite only); 0 switches them off."""
    seed: int = 0
    """Base seed; every episode's seed follows from it, the task, the split and the episode's number."""
    quick: bool = False
    """A small set for two cores: 15,000 train and 3,000 test transitions (6,000 and 1,500 on Meta-World, at 64 pixels),
    episodes of at most 250 steps, fast rendering, moving backgrounds only (a few minutes of training do not suffice
    under a moving camera)."""
    verify: bool = False
    """Make nothing: read all of the splits again and compare with their hashes."""
    preview: bool = False
    """Also write data/<env>/<split>.png, a contact sheet of an episode: clean, distractor and the masks' outlines."""


RUNTIME_FIELDS = {"data_dir", "workers", "split", "verify", "preview"}  # they do not change what a shard holds
PATH_FIELDS = {"expert_dir", "davis_dir"}


def env_in(argv: list[str]) -> tuple[int, str]:
    """The place in the command line of the word with the task, and the task; (-1, default) if it is not given."""
    place, name = -1, Args.env
    for i, word in enumerate(argv):
        if i and argv[i - 1] == "--env":
            place, name = i, word
        elif word.startswith("--env="):
            place, name = i, word.split("=", 1)[1]
    return place, name


def default_args(argv: list[str]) -> Args:
    """The defaults for the `--env` and `--quick` of a command line; those of the Control Suite for `--env all`."""
    _, name = env_in(argv)
    task = get_task(Args.env if name == "all" else name)
    args = Args(env=name, episode_length=task.max_steps, image_size=task.image_size, expert=default_expert(task.name))
    if task.suite == "dmw":
        args = replace(args, train_transitions=1_000_000, test_transitions=100_000)
    if "--quick" in argv:
        args = replace(args, quick=True, **QUICK, **QUICK_TRANSITIONS[task.suite])
    return args


def task_args(argv: list[str], env: str) -> Args:
    """What a command line with `--env all` asks of one task. An expert of the Control Suite is for that suite only."""
    import tyro

    place, name = env_in(argv)
    assert name == "all", argv
    words = [*argv[:place], f"--env={env}" if argv[place].startswith("--env=") else env, *argv[place + 1 :]]
    args = tyro.cli(Args, args=words, default=default_args(words))
    if get_task(env).suite == "dmw":
        args = replace(args, expert=default_expert(env), expert_dir=None)
    return args


def describe_command(args: Args) -> str:
    """The command that makes the same shards, for the messages of readers. Folders of this machine are not told."""
    default = default_args(["--env", args.env] + ["--quick"] * args.quick)
    words = ["python make_dataset.py", f"--env {args.env}"] + ["--quick"] * args.quick
    for name, value in vars(args).items():
        if name in RUNTIME_FIELDS | {"env", "quick"} or value == getattr(default, name):
            continue
        if name in PATH_FIELDS or (name == "backgrounds" and value not in ("davis", "synthetic")):
            value = name.upper()
        words.append(f"--{name.replace('_', '-')} {value}")
    return " ".join(words)


# ---------------------------------------------------------------------------------------------------------------- plan


def distractor_config(args: Args):
    from common.distractors import DistractorConfig

    return DistractorConfig(args.backgrounds, args.davis_dir, args.num_videos, args.camera_scale, args.color_scale)


def check_args(args: Args) -> None:
    """UserError for impossible numbers."""
    task = get_task(args.env)
    for name in ("train_transitions", "test_transitions", "episode_length", "image_size", "workers"):
        if getattr(args, name) < 1:
            raise UserError(f"--{name.replace('_', '-')} is {getattr(args, name)}, must be at least 1")
    if args.episodes_per_shard is not None and args.episodes_per_shard < 1:
        raise UserError(f"--episodes-per-shard is {args.episodes_per_shard}, must be at least 1")
    if args.episode_length > task.max_steps:
        raise UserError(f"--episode-length is {args.episode_length}, but {task.name} ends after {task.max_steps} steps")
    if args.image_size % 8:
        raise UserError(
            f"--image-size is {args.image_size}, must be a multiple of 8: the networks halve it three times"
        )


def make_plan(args: Args, split: str) -> dict[str, Any]:
    """Everything that decides what the shards of a split hold. Raises UserError for impossible arguments."""
    from common.distractors import clips_digest

    task = get_task(args.env)
    transitions = args.train_transitions if split == "train" else args.test_transitions
    expert = load_expert(task.name, args.expert, args.expert_dir)
    renders = ["clean", "distractor"] if args.render == "both" else [args.render]
    distractors = None
    if "distractor" in renders:
        distractors = {
            "backgrounds": args.backgrounds if args.backgrounds in ("davis", "synthetic") else "folder",
            "clips": clips_digest(distractor_config(args), task, split, args.image_size),
            "camera_scale": args.camera_scale if task.suite == "dcs" else 0.0,
            "color_scale": args.color_scale if task.suite == "dcs" else 0.0,
        }
    plan: dict[str, Any] = {
        "env": task.name,
        "split": split,
        "seed": args.seed,
        "num_transitions": transitions,
        "episode_length": args.episode_length,
        "renders": renders,
        "quality": args.quality,
        "image_size": args.image_size,
        "state_dim": task.state_dim,
        "action_dim": task.action_dim,
        "success": task.suite == "dmw",
        "expert": expert.name,
        "expert_sha256": expert.sha256,
        "distractors": distractors,
    }
    episodes = math.ceil(transitions / args.episode_length)  # on Meta-World, the fewest that can suffice
    per_shard = args.episodes_per_shard
    if per_shard is None:
        fit = SHARD_BYTES // (frame_bytes(plan) * (args.episode_length + 1))
        per_shard = max(1, min(fit, math.ceil(episodes / MIN_SHARDS)))
    plan["episodes_per_shard"] = per_shard
    # Episodes that end on success make the number of shards an outcome: see `Split`.
    plan["num_episodes"] = episodes if task.suite == "dcs" else None
    plan["num_shards"] = math.ceil(episodes / per_shard) if task.suite == "dcs" else None
    return plan


def episode_seed(plan: dict[str, Any], episode: int) -> int:
    """A seed of 63 bits from task, split, base seed and episode number; its last bit keeps the splits apart."""
    split = SPLITS.index(plan["split"])
    key = [plan["seed"], zlib.crc32(plan["env"].encode()), split, episode]
    return int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0]) >> 2 << 1 | split


def shard_episodes(plan: dict[str, Any], shard: int) -> range:
    """The episodes of a shard: [shard * n, (shard + 1) * n), the last shard of the Control Suite may have fewer."""
    start = shard * plan["episodes_per_shard"]
    stop = start + plan["episodes_per_shard"]
    return range(start, stop if plan["num_episodes"] is None else min(stop, plan["num_episodes"]))


def shard_frames(plan: dict[str, Any], shard: int) -> int:
    """Frames of a shard, at most."""
    return len(shard_episodes(plan, shard)) * (plan["episode_length"] + 1)


@dataclass
class Split:
    """Which shards of a split exist, and which one to make next.

    On the Control Suite the plan fixes the number of shards. On Meta-World episodes end on success, so shards are made
    in order until the unbroken row from shard 0 on has the transitions that were asked for; what several processes
    made beyond that shard is removed again. Either way the outcome is the same for any number of processes.
    """

    folder: Path
    plan: dict[str, Any]
    transitions: dict[int, int] = field(default_factory=dict)  # of complete shards
    started: set[int] = field(default_factory=set)
    taken: dict[int, float] = field(default_factory=dict)  # being made by another run: when to look again

    def path(self, shard: int) -> Path:
        return self.folder / f"{shard:05d}.h5"

    def end(self) -> int | None:
        """Number of shards, None while it is not known."""
        if self.plan["num_shards"] is not None:
            return self.plan["num_shards"]
        total, shard = 0, 0
        while shard in self.transitions:
            total += self.transitions[shard]
            shard += 1
            if total >= self.plan["num_transitions"]:
                return shard
        return None

    def complete(self) -> bool:
        end = self.end()
        return end is not None and all(shard in self.transitions for shard in range(end))

    def take(self) -> int | None:
        """The next shard to make, None if there is none (for now)."""
        end, shard, below, now = self.plan["num_shards"], 0, 0, time.monotonic()
        while shard in self.transitions or shard in self.started or self.taken.get(shard, now) > now:
            below += self.transitions.get(shard, 0)
            shard += 1
        if shard >= end if end is not None else below >= self.plan["num_transitions"]:
            return None
        self.started.add(shard)
        return shard

    def finish(self, shard: int, transitions: int | None) -> None:
        """The shard exists now. None: another run is making it, so look again in a while."""
        self.started.discard(shard)
        if transitions is None:
            self.taken[shard] = time.monotonic() + 2
        else:
            self.transitions[shard] = transitions

    def scan(self) -> None:
        """Take over complete shards of the same plan. Raises UserError if there are shards of another plan."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for part in remove_stale_parts(self.folder):
            print(f"removed {part}, left by a run that was killed")
        for path in shard_paths(self.folder):
            try:
                shard = read_shard(path)
            except DamagedShard as error:
                print(f"{error}; making it again")
                continue
            check_plan(shard, self.plan)
            if shard.number != int(path.stem):
                raise UserError(f"{path}: this is shard {shard.number} under another name; remove it and try again")
            self.transitions[shard.number] = shard.frames - shard.num_episodes

    def trim(self) -> None:
        """Remove what was made beyond the last shard, also by a worker that finished it when the others were done."""
        for path in shard_paths(self.folder):
            if int(path.stem) >= self.end():
                path.unlink(missing_ok=True)
                self.transitions.pop(int(path.stem), None)

    def missing_bytes(self) -> int:
        """What is still to be written, at most about."""
        if self.plan["num_shards"] is not None:
            missing = [shard for shard in range(self.plan["num_shards"]) if shard not in self.transitions]
            frames = sum(shard_frames(self.plan, shard) for shard in missing)
        else:
            frames = max(0, self.plan["num_transitions"] - sum(self.transitions.values()))
            frames = 0 if self.complete() else frames + shard_frames(self.plan, 0)
            missing = [0] * math.ceil(frames / shard_frames(self.plan, 0))
        return frames * frame_bytes(self.plan) + len(missing) * 65536


def check_plan(shard: Shard, plan: dict[str, Any]) -> None:
    if shard.plan != plan:
        raise UserError(
            f"{shard.path}: made with other settings ({'; '.join(plan_differences(shard.plan, plan))}). Use the same "
            f"arguments to go on, another --data-dir for a new set, or remove {shard.path.parent} to make it again"
        )


# ------------------------------------------------------------------------------------------------------------- rollout


class _StopWorker(Exception):
    """The parent asked for the end, or is gone."""


def rollout(
    env: Any,
    act: Callable[[np.ndarray], np.ndarray],
    seed: int,
    buffers: dict[str, np.ndarray],
    tick: Callable[[], None],
) -> tuple[dict[str, np.ndarray], tuple[str, int, int]]:
    """Play one episode into `buffers` (named as in `frame_schema`, at least as long as the episode).

    Returns views of L+1 frames and the background (clip, start, direction). `tick` is called once per frame.
    """
    observation, info = env.reset(seed=seed)
    background = (
        info.get("background", ""),
        info.get("background_start", 0),
        info.get("background_direction", 0),
    )
    frame, done = 0, False
    while True:
        for name, value in observation.items():
            buffers[name][frame] = np.packbits(value) if name.endswith("/mask") else value
        tick()
        if done:
            break
        action = act(observation["state"])
        observation, reward, terminated, truncated, info = env.step(action)
        buffers["action"][frame], buffers["reward"][frame] = action, reward
        if "success" in buffers:
            buffers["success"][frame] = info["success"]
        done = terminated or truncated
        frame += 1
    buffers["action"][frame], buffers["reward"][frame] = np.nan, 0
    if "success" in buffers:
        buffers["success"][frame] = False
    return {name: buffer[: frame + 1] for name, buffer in buffers.items()}, background


class _Maker:
    """Makes shards; keeps environment, clips and buffers from one to the next."""

    def __init__(self, args: Args, plans: dict[str, dict[str, Any]], tick: Callable[[], None]):
        self.args, self.plans, self.tick = args, plans, tick
        self.expert = load_expert(args.env, args.expert, args.expert_dir)
        self.split: str | None = None
        self.env: Any = None
        self.buffers: dict[str, np.ndarray] = {}

    def _prepare(self, split: str) -> None:
        from common.envs import make_env

        if self.split == split:
            return
        self.close()
        plan = self.plans[split]
        self.env = make_env(
            plan["env"],
            split=split,
            renders=tuple(plan["renders"]),
            quality=plan["quality"],
            distractors=distractor_config(self.args),
            image_size=plan["image_size"],
            max_steps=plan["episode_length"],
        )
        length = plan["episode_length"] + 1
        self.buffers = {name: np.empty((length, *shape), dtype) for name, (dtype, shape) in frame_schema(plan).items()}
        self.split = split

    def make(self, split: str, number: int, path: Path) -> tuple[str, int]:
        """("made" | "kept", transitions) of a shard, or ("taken", 0) if another run is making it."""
        plan, episodes = self.plans[split], shard_episodes(self.plans[split], number)
        try:
            writer = ShardWriter(
                path,
                plan,
                number,
                shard_frames(plan, number),
                len(episodes),
                command=describe_command(self.args),
                versions=versions(),
            )
        except ShardTaken:
            return "taken", 0
        with writer:
            try:  # another run may have made it since this one looked
                shard = read_shard(path)
            except DamagedShard:
                shard = None
            if shard is not None:
                check_plan(shard, plan)
                return "kept", shard.frames - shard.num_episodes
            self._prepare(split)
            for episode in episodes:
                seed = episode_seed(plan, episode)
                arrays, background = rollout(self.env, self.expert.act, seed, self.buffers, self.tick)
                writer.append(arrays, seed, background)
            writer.commit()
            return "made", writer.frames - len(episodes)

    def close(self) -> None:
        if self.env is not None:
            self.env.close()


# -------------------------------------------------------------------------------------------------------------- workers


def _work(connection: Any, shared: Any, worker: int, parent: int, args: Args, plans: dict[str, dict[str, Any]]) -> None:
    """A worker process: gets (split, shard, path), answers (outcome, ...). Ends when its parent does."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the parent decides

    def tick() -> None:
        shared[worker] += 1
        if shared[-1] or os.getppid() != parent:
            raise _StopWorker

    maker = None
    try:
        while True:
            job = connection.recv()
            start = time.monotonic()
            try:
                maker = maker or _Maker(args, plans, tick)
                outcome, transitions = maker.make(*job)
                connection.send((outcome, transitions, time.monotonic() - start))
            except _StopWorker:
                connection.send(("stopped", 0, 0.0))
            except UserError as error:
                connection.send(("refused", str(error), ""))
            except Exception as error:
                connection.send(("failed", f"{type(error).__name__}: {error}", traceback.format_exc()))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass
    if maker is not None:
        maker.close()


class _Worker:
    def __init__(self, context: Any, shared: Any, number: int, args: Args, plans: dict[str, dict[str, Any]]):
        self.number, self.job = number, None
        self.connection, theirs = context.Pipe()
        self.process = context.Process(
            target=_work, args=(theirs, shared, number, os.getpid(), args, plans), daemon=True
        )
        self.process.start()
        theirs.close()  # so that a dead worker ends the pipe


def make_shards(args: Args, splits: dict[str, Split], name: str) -> tuple[int, float]:
    """Make every missing shard. Returns the frames made and the seconds of all workers that it took.

    Raises Stopped on a signal and UserError if a worker fails or is killed; no half-written shard stays either way.
    """
    plans = {split: part.plan for split, part in splits.items()}
    total = sum(
        sum(shard_frames(part.plan, shard) for shard in range(part.plan["num_shards"]))
        if part.plan["num_shards"]
        else part.plan["num_transitions"]
        for part in splits.values()
    )
    done = sum(
        transitions + len(shard_episodes(part.plan, shard))
        for part in splits.values()
        for shard, transitions in part.transitions.items()
    )
    left = sum(
        len([shard for shard in range(part.plan["num_shards"]) if shard not in part.transitions])
        if part.plan["num_shards"]
        else args.workers
        for part in splits.values()
    )
    os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"  # one core per worker
    context = multiprocessing.get_context("spawn")
    count = min(args.workers, left)
    shared = context.RawArray("q", count + 1)  # frames of each worker's present shard; the last one says stop
    progress = Progress(name, total, "frames", done, every=10)
    made, seconds, shown, problem = 0, 0.0, done, None
    workers = [_Worker(context, shared, number, args, plans) for number in range(count)]
    try:
        while problem is None and not stop_requested() and not all(part.complete() for part in splits.values()):
            for worker in workers:
                if worker.job is None and (job := _next_job(splits)):
                    worker.job, shared[worker.number] = job, 0
                    try:
                        worker.connection.send((*job, splits[job[0]].path(job[1])))
                    except (BrokenPipeError, ConnectionResetError):
                        pass  # it died while idle; seen below
            multiprocessing.connection.wait([worker.connection for worker in workers], timeout=0.3)
            for worker in workers:
                if problem is not None or not worker.connection.poll():
                    continue
                try:
                    outcome, *rest = worker.connection.recv()
                except (EOFError, ConnectionResetError):
                    worker.process.join(10)
                    problem = _death(worker, splits)
                    continue
                split, shard = worker.job
                worker.job = None
                if outcome in ("made", "kept"):
                    splits[split].finish(shard, rest[0])
                    frames = rest[0] + len(shard_episodes(plans[split], shard))
                    done += frames
                    if outcome == "made":
                        made, seconds = made + frames, seconds + rest[1]
                elif outcome == "taken":
                    splits[split].finish(shard, None)
                elif outcome == "refused":
                    problem = rest[0]
                elif outcome == "failed":
                    print(rest[1], file=sys.stderr)
                    problem = f"{splits[split].path(shard)}: worker {worker.number} failed: {rest[0]}"
                shared[worker.number] = 0
            now = min(total, done + sum(shared[:count]))
            progress.update(max(0, now - shown))
            shown = max(shown, now)
    finally:
        shared[-1] = 1
        for worker in workers:
            worker.connection.close()
        deadline = time.monotonic() + 20
        for worker in workers:
            worker.process.join(max(0, deadline - time.monotonic()))
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()
        progress.close()
        for part in splits.values():
            remove_stale_parts(part.folder)
    if problem is not None:
        raise UserError(problem)
    if not all(part.complete() for part in splits.values()):
        have = sum(len(part.transitions) for part in splits.values())
        raise Stopped(f"{have} shards are complete; the same command goes on from there")
    return made, seconds


def _next_job(splits: dict[str, Split]) -> tuple[str, int] | None:
    for split, part in splits.items():
        if (shard := part.take()) is not None:
            return split, shard
    return None


def _death(worker: _Worker, splits: dict[str, Split]) -> str:
    code = worker.process.exitcode
    what = f"worker {worker.number} ended with exit code {code}"
    if code is not None and code < 0:
        what = f"worker {worker.number} was killed by {signal.Signals(-code).name}"
        if -code == signal.SIGKILL:
            what += ", as a machine that runs out of memory does; try fewer --workers"
    where = f"{splits[worker.job[0]].path(worker.job[1])}: " if worker.job else ""
    return f"{where}{what}. The same command goes on from the complete shards"


# --------------------------------------------------------------------------------------------------------------- report


def check_disk(folder: Path, needed: int) -> None:
    """Print what will be written; UserError if it does not fit."""
    free = shutil.disk_usage(folder).free
    print(f"{folder}: {needed / 1e9:.2f} GB to write, {free / 1e9:.2f} GB free")
    if needed > free:
        raise UserError(
            f"{folder}: {needed / 1e9:.2f} GB are to be written, but {free / 1e9:.2f} GB are free; make room, use "
            "another --data-dir, lower --train-transitions and --test-transitions, or store one --render"
        )


def report(args: Args, split: str) -> None:
    """Print what a split holds, beside the paper's numbers."""
    from common.dataset import Dataset

    plan_render = "distractor" if args.render != "clean" else "clean"
    dataset, task = Dataset(args.data_dir, args.env, split, plan_render), get_task(args.env)
    size = sum(shard.path.stat().st_size for shard in dataset.shards)
    returns = dataset.episode_return
    print(f"{dataset.folder}: {len(dataset.shards)} shards, {dataset.num_transitions:,} transitions in "
          f"{dataset.num_episodes:,} episodes, {size / 1e9:.2f} GB")  # fmt: skip
    full = args.episode_length == task.max_steps
    scale = "" if full else f" for {task.max_steps} steps, these have {args.episode_length}"
    if dataset.episode_success is not None:
        scale = "" if full else f" within {task.max_steps} steps, these have at most {args.episode_length}"
        print(f"  success rate {dataset.episode_success.mean():.3f} (paper's expert {task.expert_score}{scale})")
        print(f"  mean return {returns.mean():.1f} +- {returns.std():.1f}")
    else:
        print(f"  mean return {returns.mean():.1f} +- {returns.std():.1f} (paper's expert {task.expert_score}{scale})")
    print(f"  action variance {dataset.action_variance:.4f} (paper {task.action_variance})")
    print(f"  hash {dataset.hash}")


def preview(data_dir: Path, env: str, split: str, columns: int = 10, height: int = 256) -> Path:
    """Write `<env>/<split>.png`, a contact sheet of the split's first episode from its first frame to its last.

    One row of frames for each render, and one with the mask's outline in it.
    """
    import imageio.v3 as iio

    from common.dataset import Dataset

    rows = []
    for render in read_shard(shard_paths(data_dir / env / split)[0]).plan["renders"]:
        dataset = Dataset(data_dir, env, split, render)
        size, scale = dataset.image_size, max(1, height // dataset.image_size)
        first, end = dataset.episode_start[:2]
        index = np.linspace(first, end - 1, min(columns, end - first)).round().astype(np.int64)
        frames = dataset.frames(index).repeat(scale, 1).repeat(scale, 2)
        masks = np.unpackbits(dataset.masks(index), axis=-1).reshape(len(index), size, size).astype(bool)
        masks = np.pad(masks.repeat(scale, 1).repeat(scale, 2), ((0, 0), (1, 1), (1, 1)))
        inner = masks[:, 1:-1, :-2] & masks[:, 1:-1, 2:] & masks[:, :-2, 1:-1] & masks[:, 2:, 1:-1]
        outlined = frames.copy()
        outlined[masks[:, 1:-1, 1:-1] & ~inner] = (255, 0, 255)
        rows += [frames, outlined]
    sheet = np.pad(np.stack(rows), ((0, 0), (0, 0), (2, 2), (2, 2), (0, 0)), constant_values=255)
    tall, wide = sheet.shape[2:4]
    picture = sheet.transpose(0, 2, 1, 3, 4).reshape(len(rows) * tall, sheet.shape[1] * wide, 3)
    path = data_dir / env / f"{split}.png"
    with atomic_path(path) as temporary:
        iio.imwrite(temporary, picture)
    return path


def verify(args: Args, split: str) -> None:
    from common.dataset import Dataset

    paths = shard_paths(args.data_dir / args.env / split)
    render = "distractor"
    if paths:
        try:
            render = read_shard(paths[0]).plan["renders"][-1]
        except DamagedShard:
            pass  # opening the dataset says so, with the command that repairs it
    dataset = Dataset(args.data_dir, args.env, split, render)
    progress = Progress(f"verify {args.env}/{split}", dataset.num_frames, "frames")

    def update(frames: int) -> None:
        progress.update(frames)
        if stop_requested():
            raise Stopped("nothing was changed")

    dataset.verify(update)
    progress.close()
    print(f"{dataset.folder}: {len(dataset.shards)} shards are as they were written, hash {dataset.hash}")


def prepare(args: Args) -> dict[str, Split]:
    """The splits with what there is of them. UserError for what cannot be made and for shards of other settings."""
    names = SPLITS if args.split == "both" else (args.split,)
    splits = {split: Split(args.data_dir / args.env / split, make_plan(args, split)) for split in names}
    for part in splits.values():
        part.scan()
    return splits


def make(args: Args, splits: dict[str, Split]) -> None:
    made, seconds = 0, 0.0
    if not all(part.complete() for part in splits.values()):
        made, seconds = make_shards(args, splits, args.env)
    for split, part in splits.items():
        part.trim()
        report(args, split)
        if args.preview:
            print(f"  preview {preview(args.data_dir, args.env, split)}")
    if made:
        print(f"{made:,} frames made, {made / seconds:.1f} frames/s per worker")


def main(args: Args, argv: list[str] | None = None) -> None:
    """`argv`: the command line that `args` came from, for `--env all`; default: that of this process."""
    argv = sys.argv[1:] if argv is None else argv
    tasks = [task_args(argv, env) for env in TASKS] if args.env == "all" else [args]
    if args.verify:
        for one in tasks:
            for split in SPLITS if one.split == "both" else (one.split,):
                verify(one, split)
        return
    for one in tasks:
        check_args(one)
    prepared = [prepare(one) for one in tasks]  # everything is checked before the first shard is made
    if needed := sum(part.missing_bytes() for splits in prepared for part in splits.values()):
        check_disk(args.data_dir, needed)
    for one, splits in zip(tasks, prepared):
        make(one, splits)


if __name__ == "__main__":
    cli(main, default_args)
