"""Make a dataset: roll out the expert and render every state clean and with distractors, with the agent's mask in each.

    python make_dataset.py --env cheetah-run --backgrounds synthetic --quick
    python make_dataset.py --env all --backgrounds synthetic --quick --preview

Writes data/<env>/train and data/<env>/test with one process per core. Rerun the same command to resume after a stop.
What a shard holds depends on the arguments and its number alone, never on how many processes made it. Paper scale (the
default without --quick) takes about 260 GB for a task of the Control Suite, 110 GB for one of Meta-World.
"""

import itertools
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
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from common import store
from common.cli import Count, NotNegative, Progress, Seed, Stopped, UserError, cli, stop_requested
from common.experts import default_expert, load_expert
from common.runs import versions
from common.shards import frame_bytes, frame_schema, read_shard, shard_paths, write_shard
from common.tasks import TASKS, get_task

EnvName = Literal[(*TASKS, "all")]
SPLITS = ("train", "test")
CORES = len(os.sched_getaffinity(0))
SHARD_BYTES = 250 * 10**6  # a shard is built in memory, once as arrays and once as a file
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

    def path(self, shard: int) -> Path:
        return self.folder / f"{shard:05d}.h5"

    def end(self) -> int | None:
        """Number of shards, None while it is not known."""
        if self.plan["num_shards"] is not None:
            return self.plan["num_shards"]
        total = 0
        for shard in itertools.count():
            if shard not in self.transitions:
                return None
            total += self.transitions[shard]
            if total >= self.plan["num_transitions"]:
                return shard + 1

    def complete(self) -> bool:
        end = self.end()
        return end is not None and all(shard in self.transitions for shard in range(end))

    def candidates(self) -> Iterator[Path]:
        """Shards that may have to be made, in order; on Meta-World until those before have enough transitions."""
        before = 0
        for shard in itertools.count():
            if shard == self.plan["num_shards"] or before >= self.plan["num_transitions"]:
                return
            yield self.path(shard)
            before += self.transitions.get(shard, 0)

    def is_missing(self, path: Path, announce: bool = False) -> bool:
        """Looks for a shard. UserError if it is of another plan; `announce` prints what is wrong with a damaged one."""
        try:
            shard = read_shard(path)
        except store.Damaged as error:
            if announce:
                print(f"{error}; making it again")
            return True
        if shard.plan != self.plan:
            lines = "; ".join(store.differences(shard.plan, self.plan))
            raise UserError(
                f"{path}: made with other settings ({lines}). Use the same arguments to resume, another --data-dir for "
                f"a new set, or remove {path.parent} to make it again"
            )
        self.transitions[int(path.stem)] = shard.num_transitions
        return False

    def scan(self) -> None:
        """Finds the shards that are there. Raises UserError if some are of another plan."""
        self.folder.mkdir(parents=True, exist_ok=True)
        store.remove_leftovers(self.folder)
        for path in shard_paths(self.folder):
            self.is_missing(path, announce=True)

    def trim(self) -> None:
        """Remove what was made beyond the last shard, also by a worker that finished it when the others were done."""
        for path in shard_paths(self.folder):
            if int(path.stem) >= self.end():
                path.unlink(missing_ok=True)
                self.transitions.pop(int(path.stem), None)

    def num_frames(self) -> int:
        """Frames of the whole split; on Meta-World about as many."""
        count = self.plan["num_episodes"]
        return self.plan["num_transitions"] if count is None else count * (self.plan["episode_length"] + 1)

    def missing_frames(self) -> int:
        """Frames that are still to be made, at most about."""
        if self.complete():
            return 0
        shards = self.transitions.items()
        return self.num_frames() - sum(count + len(shard_episodes(self.plan, shard)) for shard, count in shards)


# ------------------------------------------------------------------------------------------------------------- rollout


class Maker:
    """Makes shards; keeps environment, clips and buffers from one to the next. `tick` is called once per frame."""

    def __init__(self, args: Args, tick: Callable[[], None]):
        self.args, self.tick = args, tick
        self.expert = load_expert(args.env, args.expert, args.expert_dir)
        self.plan: dict[str, Any] | None = None
        self.env: Any = None
        self.frames = 0  # of all shards that it made

    def prepare(self, plan: dict[str, Any]) -> None:
        """Makes the environment and the buffers for a split, unless they are those of the shard before."""
        from common.envs import make_env

        if self.plan is plan:
            return
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
        most = plan["episodes_per_shard"] * (plan["episode_length"] + 1)
        self.buffers = {name: np.empty((most, *shape), dtype) for name, (dtype, shape) in frame_schema(plan).items()}

    def rollout(self, seed: int, first: int) -> tuple[int, dict[str, Any]]:
        """Plays one episode into the buffers from frame `first` on. Returns the frame after it and the reset's info."""
        observation, about = self.env.reset(seed=seed)
        buffers, frame, done = self.buffers, first, False
        while True:
            for name, value in observation.items():
                buffers[name][frame] = np.packbits(value) if name.endswith("/mask") else value
            self.tick()
            if done:
                break
            action = self.expert.act(observation["state"])
            observation, reward, terminated, truncated, info = self.env.step(action)
            buffers["action"][frame], buffers["reward"][frame] = action, reward
            if "success" in buffers:
                buffers["success"][frame] = info["success"]
            done = terminated or truncated
            frame += 1
        buffers["action"][frame], buffers["reward"][frame] = np.nan, 0
        if "success" in buffers:
            buffers["success"][frame] = False
        return frame + 1, about

    def make(self, path: Path, plan: dict[str, Any]) -> None:
        """Plays and writes the episodes of a shard."""
        self.prepare(plan)
        starts = [0]
        about: dict[str, list[Any]] = {"seed": [], "background": [], "background_start": [], "background_direction": []}
        for episode in shard_episodes(plan, int(path.stem)):
            seed = episode_seed(plan, episode)
            end, info = self.rollout(seed, starts[-1])
            starts.append(end)
            about["seed"].append(seed)
            about["background"].append(info.get("background", ""))
            about["background_start"].append(int(info.get("background_start", 0)))
            about["background_direction"].append(int(info.get("background_direction", 0)))
        arrays = {name: buffer[: starts[-1]] for name, buffer in self.buffers.items()}
        arrays["episode_start"] = np.array(starts, np.int64)
        write_shard(path, plan, arrays, about, {"command": describe_command(self.args), "versions": versions()})
        self.frames += starts[-1]

    def close(self) -> None:
        if self.env is not None:
            self.env.close()


# -------------------------------------------------------------------------------------------------------------- workers


def work(connection: Any, shared: Any, worker: int, parent: int, args: Args, splits: list[Split]) -> None:
    """A worker process: makes missing shards until none is left, as other workers do, and sends (frames, seconds).

    An exception is sent instead. shared: frames of each worker; the last entry tells all to stop.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C reaches all processes of a terminal; the parent decides
    signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def tick() -> None:
        shared[worker] += 1
        if shared[-1] or os.getppid() != parent:
            raise Stopped("the complete shards stay")

    by_folder = {split.folder: split for split in splits}
    maker, start = None, time.monotonic()
    try:
        maker = Maker(args, tick)
        store.fill(
            paths=lambda: itertools.chain.from_iterable(split.candidates() for split in splits),
            is_missing=lambda path: by_folder[path.parent].is_missing(path),
            make=lambda path: maker.make(path, by_folder[path.parent].plan),
        )
        connection.send((maker.frames, time.monotonic() - start))
    except (UserError, Stopped, OSError) as error:
        connection.send(error)
    except Exception as error:
        connection.send(UserError(f"a worker failed: {type(error).__name__}: {error}\n{traceback.format_exc()}"))
    finally:
        if maker is not None:
            maker.close()


def make_shards(args: Args, splits: dict[str, Split]) -> tuple[int, float]:
    """Make every missing shard. Returns the frames made and the seconds of all workers that it took.

    Raises Stopped on a signal and UserError if a worker fails or is killed; no half-written shard stays either way.
    """
    os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"  # one core per worker
    context = multiprocessing.get_context("spawn")
    parts = list(splits.values())
    shared = context.RawArray("q", args.workers + 1)
    workers = {}
    for number in range(args.workers):
        connection, theirs = context.Pipe(duplex=False)
        process = context.Process(target=work, args=(theirs, shared, number, os.getpid(), args, parts), daemon=True)
        process.start()
        theirs.close()  # so that a dead worker ends the pipe
        workers[connection] = process
    total = sum(part.num_frames() for part in parts)
    shown = total - sum(part.missing_frames() for part in parts)
    progress = Progress(args.env, total, "frames", shown)
    frames, seconds, problem = 0, 0.0, None
    try:
        while workers:
            for connection in multiprocessing.connection.wait(list(workers), timeout=0.3):
                process = workers.pop(connection)
                try:
                    outcome = connection.recv()
                except (EOFError, ConnectionResetError):
                    outcome = UserError(describe_death(process))
                if isinstance(outcome, Exception):
                    problem = problem or outcome
                    shared[-1] = 1
                else:
                    frames, seconds = frames + outcome[0], seconds + outcome[1]
            if stop_requested():
                shared[-1] = 1
            progress.update(sum(shared[: args.workers]) - progress.n + shown)
    finally:
        shared[-1] = 1
        for process in workers.values():
            process.join(20)
        progress.close()
        for part in parts:
            store.remove_leftovers(part.folder)
    if stop_requested():
        raise Stopped(f"the complete shards in {args.data_dir / args.env} stay")
    if problem is not None:
        raise problem
    return frames, seconds


def describe_death(process: Any) -> str:
    process.join(10)
    code = process.exitcode
    how = f"ended with exit code {code}"
    if code is not None and code < 0:
        how = f"was killed by {signal.Signals(-code).name}"
        if -code == signal.SIGKILL:
            how += ", as a machine that runs out of memory does; try fewer --workers"
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


def preview(data_dir: Path, env: str, split: str, columns: int = 10) -> Path:
    """Write `<env>/<split>.png`, a contact sheet of the split's first episode from its first frame to its last.

    One row of frames for each render, and one with the mask's outline in it.
    """
    from common import pictures
    from common.dataset import Dataset

    rows = {}
    for render in read_shard(shard_paths(data_dir / env / split)[0]).plan["renders"]:
        dataset = Dataset(data_dir, env, split, render)
        first, end = dataset.episode_start[:2]
        index = np.linspace(first, end - 1, min(columns, end - first)).round().astype(np.int64)
        frames, size = dataset.frames(index), dataset.image_size
        masks = np.unpackbits(dataset.masks(index), axis=-1).reshape(len(index), size, size)
        rows[render] = frames
        rows[f"{render}, mask"] = pictures.outline(frames, masks, zoom=max(1, round(192 / size)))
    return pictures.rows(data_dir / env / f"{split}.png", rows, title=f"{env}, {split}: first episode")


def verify(args: Args, split: str) -> None:
    """Reads a split again and compares it with its hashes."""
    from common.dataset import Dataset

    folder = args.data_dir / args.env / split
    render = "distractor"
    for path in shard_paths(folder)[:1]:
        try:
            render = read_shard(path).plan["renders"][-1]
        except store.Damaged:
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
        made, seconds = make_shards(args, splits)
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
    parts = [part for splits in prepared for part in splits.values()]
    if needed := sum(part.missing_frames() * frame_bytes(part.plan) for part in parts):
        check_disk(args.data_dir, needed)
    for one, splits in zip(tasks, prepared):
        make(one, splits)


if __name__ == "__main__":
    cli(main, default_args)
