"""Make a dataset: roll out the expert and render every state clean and with distractors, with the agent's mask in each.

    python make_dataset.py --env cheetah-run --backgrounds synthetic --quick
    python make_dataset.py --env all --backgrounds synthetic --quick --preview

Writes data/<env>/train and data/<env>/test with one process per core. Rerun the same command to resume after a stop.
What a shard holds depends on the arguments and its number alone, never on how many processes made it. Paper scale (the
default without --quick) takes about 260 GB for a task of the Control Suite, 113 GB for one of Meta-World.
"""

import contextlib
import itertools
import math
import multiprocessing
import multiprocessing.connection
import os
import shutil
import signal
import sys
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import tyro

from common import store
from common.cli import (
    Count,
    NotNegative,
    Progress,
    Seed,
    Stopped,
    UserError,
    checked,
    cli,
    env_and_quick,
    signals_blocked,
    stop_requested,
)
from common.distractors import DistractorConfig, clips_digest
from common.experts import default_expert, load_expert
from common.runs import versions
from common.shards import (
    SHARD_BYTES,
    Split,
    describe_command,
    frame_bytes,
    frame_schema,
    shard_episodes,
    write_shard,
)
from common.tasks import TASKS, get_task

if TYPE_CHECKING:  # torch comes with it, which no worker needs
    from common.dataset import Dataset

EnvName = Literal[(*TASKS, "all")]
SPLITS = ("train", "test")
CORES = len(os.sched_getaffinity(0))
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
    train_transitions: Count = 9_000_000
    """Transitions of the train split, reached by whole episodes."""
    test_transitions: Count = 1_000_000
    """Transitions of the test split: other seeds, and backgrounds that the train split never shows."""
    episode_length: Count = 1000
    """Steps after which an episode is cut (on Meta-World it also ends on success)."""
    episodes_per_shard: Count | None = None
    """Default: as many as fit in 250 MB, at most a sixteenth of the split."""
    workers: Count = CORES
    """Processes. Has no influence on what is written."""
    split: Literal["both", "train", "test"] = "both"
    """Which splits to make."""
    render: Literal["both", "clean", "distractor"] = "both"
    """Which renders to store."""
    quality: Literal["full", "fast"] = "full"
    """fast: no shadows, reflections and multisampling, coarser round shapes and floors; 7 (Meta-World)
    to 15 times as fast without a GPU."""
    image_size: Count = 64
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
    num_videos: Count | None = None
    """Clips per split. Default: 4 on the Control Suite, all on Meta-World."""
    camera_scale: NotNegative = 0.1
    """Difficulty of the moving camera (Control Suite only); 0 switches it off."""
    color_scale: NotNegative = 0.1
    """Difficulty of the changing colours (Control Suite only); 0 switches them off."""
    seed: Seed = 0
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


def default_args(argv: list[str]) -> Args:
    """The defaults for the `--env` and `--quick` of a command line; those of cheetah-run for `--env all`."""
    name, quick = env_and_quick(argv, Args.env)
    task = get_task(Args.env if name == "all" else name)
    args = Args(env=name, episode_length=task.max_steps, image_size=task.image_size, expert=default_expert(task.name))
    if task.suite == "dmw":
        args = replace(args, train_transitions=1_000_000, test_transitions=100_000)
    if quick:
        args = replace(args, quick=True, **QUICK, **QUICK_TRANSITIONS[task.suite])
    return args


def task_args(argv: list[str], env: str) -> Args:
    """What a command line with `--env all` asks of one task. An expert of the Control Suite is for that suite only."""
    argv = [*argv, "--env", env]  # the last one counts
    one = checked(tyro.cli(Args, args=argv, default=default_args(argv)))
    if get_task(env).suite == "dmw":
        one = replace(one, expert=default_expert(env), expert_dir=None)
    return one


def command(args: Args) -> str:
    """The command that makes the same shards, for the messages of readers. Folders of this machine are not told."""
    words = ["--env", args.env] + ["--quick"] * args.quick
    if args.backgrounds not in ("davis", "synthetic"):
        args = replace(args, backgrounds=Path(args.backgrounds))
    start = " ".join(["python make_dataset.py", *words])
    return describe_command(start, args, default_args(words), RUNTIME_FIELDS | {"env", "quick"})


# ---------------------------------------------------------------------------------------------------------------- plan


def distractor_config(args: Args) -> DistractorConfig:
    return DistractorConfig(args.backgrounds, args.davis_dir, args.num_videos, args.camera_scale, args.color_scale)


def make_plan(args: Args, split: str) -> dict[str, Any]:
    """Everything that decides what the shards of a split hold. Raises UserError for impossible arguments."""
    task = get_task(args.env)
    if args.episode_length > task.max_steps:
        raise UserError(f"--episode-length is {args.episode_length}, but {task.name} ends after {task.max_steps} steps")
    if args.image_size % 8:
        raise UserError(
            f"--image-size is {args.image_size}, must be a multiple of 8: the networks halve it three times"
        )
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


# ------------------------------------------------------------------------------------------------------------- rollout


class Maker:
    """Makes shards; keeps the environment from one to the next. `tick` is called once per frame."""

    def __init__(self, args: Args, tick: Callable[[], None]):
        self.args, self.tick = args, tick
        self.expert = load_expert(args.env, args.expert, args.expert_dir)
        self.plan: dict[str, Any] | None = None
        self.env: Any = None

    def rollout(self, arrays: dict[str, np.ndarray], seed: int, first: int) -> tuple[int, dict[str, Any]]:
        """Plays one episode into `arrays` from frame `first` on. Returns the frame after it and the reset's info."""
        observation, about = self.env.reset(seed=seed)
        frame, done = first, False
        while True:
            for name, value in observation.items():
                arrays[name][frame] = np.packbits(value) if name.endswith("/mask") else value
            self.tick()
            if done:
                break
            action = self.expert.act(observation["state"])
            observation, reward, terminated, truncated, info = self.env.step(action)
            arrays["action"][frame], arrays["reward"][frame] = action, reward
            if "success" in arrays:
                arrays["success"][frame] = info["success"]
            done = terminated or truncated
            frame += 1
        arrays["action"][frame] = np.nan  # reward and success stay zero
        return frame + 1, about

    def make(self, path: Path, plan: dict[str, Any]) -> int:
        """Plays and writes the episodes of a shard. Returns their transitions."""
        from common.envs import make_env

        if self.plan is not plan:
            self.close()
            self.plan = plan
            self.env = make_env(
                plan["env"],
                split=plan["split"],
                renders=tuple(plan["renders"]),
                quality=plan["quality"],
                distractors=distractor_config(self.args),
                image_size=plan["image_size"],
                max_steps=plan["episode_length"],
            )
        numbers = shard_episodes(plan, int(path.stem))
        most = len(numbers) * (plan["episode_length"] + 1)
        arrays = {name: np.zeros((most, *shape), dtype) for name, (dtype, shape) in frame_schema(plan).items()}
        starts, episodes = [0], []
        for episode in numbers:
            seed = episode_seed(plan, episode)
            end, info = self.rollout(arrays, seed, starts[-1])
            starts.append(end)
            episodes.append({"seed": seed} | info)
        arrays = {name: array[: starts[-1]] for name, array in arrays.items()}
        arrays["episode_start"] = np.array(starts, np.int64)
        columns = {name: [episode[name] for episode in episodes] for name in episodes[0]}
        write_shard(path, plan, arrays, columns, {"command": command(self.args), "versions": versions()})
        return starts[-1] - len(episodes)

    def close(self) -> None:
        if self.env is not None:
            self.env.close()


# -------------------------------------------------------------------------------------------------------------- workers


def make_missing(args: Args, splits: list[Split], tick: Callable[[], None], stop: Callable[[], bool]) -> None:
    """Makes shards until none is missing; other processes may do the same.

    tick: called once per frame. stop: asked before every shard, whether to end.
    """
    by_folder = {split.folder: split for split in splits}

    def make(path: Path) -> None:
        split = by_folder[path.parent]
        split.transitions[path] = maker.make(path, split.plan)

    with contextlib.closing(Maker(args, tick)) as maker:
        store.fill(
            paths=lambda: itertools.chain.from_iterable(split.candidates() for split in splits),
            is_missing=lambda path: by_folder[path.parent].is_missing(path),
            stop=stop,
            make=make,
        )


def work(connection: Any, counts: Any, worker: int, parent: int, args: Args, splits: list[Split]) -> None:
    """A worker process: makes what is missing and sends None or the error that ended it.

    counts: frames of each worker; the last entry tells all to stop.
    """

    def stop() -> bool:
        return bool(counts[-1]) or os.getppid() != parent

    def tick() -> None:
        counts[worker] += 1
        if stop():
            raise Stopped("the complete shards stay")

    outcome = None
    try:
        make_missing(args, splits, tick, stop)
    except (UserError, Stopped, OSError, MemoryError) as error:
        outcome = error
    with contextlib.suppress(BrokenPipeError):  # the parent was killed
        connection.send(outcome)


def make_shards(args: Args, splits: list[Split]) -> None:
    """Makes every missing shard of a task, with processes that share the work.

    Raises Stopped on a signal and UserError if a worker fails or is killed; no half-written shard stays either way.
    """
    os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"  # one core per worker
    context = multiprocessing.get_context("spawn")
    counts = context.RawArray("q", args.workers + 1)
    total, there = map(sum, zip(*[split.frames() for split in splits]))
    progress, start = Progress(args.env, total, "frames", there), time.monotonic()
    workers, problem = {}, None
    try:
        for number in range(args.workers):
            ours, theirs = context.Pipe(duplex=False)
            words = (theirs, counts, number, os.getpid(), args, splits)
            process = context.Process(target=work, args=words, daemon=True)
            with signals_blocked():
                process.start()
            theirs.close()  # so that a dead worker ends the pipe
            workers[ours] = process
        while workers:
            for connection in multiprocessing.connection.wait(list(workers), timeout=0.3):
                process = workers.pop(connection)
                try:
                    problem = problem or connection.recv()
                except (EOFError, ConnectionResetError):
                    problem = problem or UserError(describe_death(process))
            counts[-1] = stop_requested() or problem is not None
            progress.update(there + sum(counts[:-1]) - progress.n)
    finally:
        counts[-1] = 1
        deadline = time.monotonic() + 20
        for process in workers.values():
            process.join(max(0, deadline - time.monotonic()))
        progress.close()
        for split in splits:
            store.remove_leftovers(split.folder)
    if stop_requested():
        raise Stopped(f"the complete shards in {args.data_dir / args.env} stay")
    if problem is not None:
        raise problem
    frames, seconds = sum(counts[:-1]), time.monotonic() - start
    print(f"{frames:,} frames made, {frames / seconds / args.workers:.1f} frames/s per worker")


def describe_death(process: Any) -> str:
    process.join(10)
    how = f"ended with exit code {process.exitcode}"
    if process.exitcode == -signal.SIGKILL:
        how = "was killed by SIGKILL, as a machine that runs out of memory does; try fewer --workers"
    return f"a worker {how}. The complete shards stay; rerun the same command to resume"


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


def report(dataset: "Dataset") -> None:
    """Prints what a split holds, beside the paper's numbers."""
    task, returns, success = get_task(dataset.env), dataset.episode_return, dataset.episode_success
    length = dataset.plan["episode_length"]
    steps = f" within {task.max_steps} steps, these have at most {length}" if length < task.max_steps else ""
    expert = f" (paper's expert {task.expert_score}{steps})"
    print(dataset.describe())
    if success is not None:
        print(f"  success rate {success.mean():.3f}{expert}")
    print(f"  mean return {returns.mean():.1f} +- {returns.std():.1f}{expert if success is None else ''}")
    print(f"  action variance {dataset.action_variance:.4f} (paper {task.action_variance})")


def preview(dataset: "Dataset", columns: int = 10) -> Path:
    """Writes `<env>/<split>.png`, a contact sheet of the split's first episode from its first frame to its last.

    One row of frames for each render, and one with the mask's outline in it.
    """
    from common import pictures
    from common.dataset import Dataset

    first, end = dataset.episode_start[:2]
    index, size = np.linspace(first, end - 1, min(columns, end - first)).round().astype(np.int64), dataset.image_size
    rows = {}
    for render in dataset.plan["renders"]:
        rendered = Dataset(dataset.data_dir, dataset.env, dataset.split, render)
        masks = np.unpackbits(rendered.masks(index), axis=-1).reshape(len(index), size, size)
        rows[render] = rendered.frames(index)
        rows[f"{render}, mask"] = pictures.outline(rows[render], masks, zoom=max(1, round(192 / size)))
    path = dataset.folder.with_suffix(".png")
    return pictures.rows(path, rows, title=f"{dataset.env}, {dataset.split}: first episode")


def main(args: Args, argv: list[str] | None = None) -> None:
    """`argv`: the command line that `args` came from, for `--env all`; default: that of this process."""
    from common.dataset import Dataset

    argv = sys.argv[1:] if argv is None else argv
    names = SPLITS if args.split == "both" else (args.split,)
    tasks = [task_args(argv, env) for env in TASKS] if args.env == "all" else [args]
    if args.verify:
        for one, name in itertools.product(tasks, names):
            Dataset(args.data_dir, one.env, name, render=None).verify()
        return
    # Everything is checked before the first shard is made.
    planned = [[Split(one.data_dir / one.env / name, make_plan(one, name)) for name in names] for one in tasks]
    needed = 0
    for split in itertools.chain.from_iterable(planned):
        split.scan()
        total, there = split.frames()
        needed += (total - there) * frame_bytes(split.plan)
    if needed:
        check_disk(args.data_dir, needed)
    for one, splits in zip(tasks, planned):
        if not all(split.is_complete() for split in splits):
            make_shards(one, splits)
        for split in splits:
            split.trim()
            dataset = Dataset(one.data_dir, one.env, split.plan["split"], render=None)
            report(dataset)
            if args.preview:
                print(f"  preview {preview(dataset)}")


if __name__ == "__main__":
    cli(main, default_args)
