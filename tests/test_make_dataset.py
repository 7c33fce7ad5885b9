"""make_dataset.py: small real datasets of both suites, and everything that can stop it."""

import os
import resource
import signal
import subprocess
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import tyro
from methods import contents, finish, python, wait_until

import make_dataset
from common.cli import UserError, check_ranges
from common.dataset import Dataset
from common.distractors import DistractorConfig
from common.envs import make_env
from common.experts import load_expert
from common.shards import read_shard, write_shard
from make_dataset import Args, Split, default_args, episode_seed, make_plan

WORDS = [
    *("--quick", "--backgrounds", "synthetic", "--num-videos", "2", "--image-size", "32", "--episode-length", "60"),
    *("--camera-scale", "0.1", "--train-transitions", "170", "--test-transitions", "70", "--episodes-per-shard", "2"),
]
DCS, DMW = "walker-run", "reach"
MANY = ("--train-transitions", 720)  # six shards, so that there is one left to make whenever a process is killed


def arguments(data_dir: Path, env: str, *words: object) -> Args:
    """Args as the command line gives them."""
    argv = ["--env", env, *WORDS, "--data-dir", str(data_dir), *map(str, words)]
    args = tyro.cli(Args, args=argv, default=default_args(argv))
    check_ranges(args)
    return args


def make(data_dir: Path, env: str, *words: object) -> None:
    """Makes a dataset in this process, as one worker does."""
    args = arguments(data_dir, env, *words)
    splits = [Split(data_dir / env / name, make_plan(args, name)) for name in ("train", "test")]
    make_dataset.make_missing(args, splits, tick=lambda: None, stop=lambda: False)


def start(data_dir: Path, env: str, *words: object, **options) -> subprocess.Popen:
    return python("make_dataset.py", "--env", env, *WORDS, "--data-dir", data_dir, *words, **options)


def worker_of(process: subprocess.Popen) -> int | None:
    """The process id of a worker, once there is one."""
    for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
        if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes():
            return int(pid)
    return None


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory) -> Path:
    """The folder of a set of each suite, made without trouble by one process."""
    folder = tmp_path_factory.mktemp("data")
    for env in (DCS, DMW):
        make(folder, env)
    return folder


@pytest.mark.parametrize("env", [DCS, DMW])
def test_content(data_dir, env):
    expert, clips = load_expert(env, make_dataset.default_expert(env)), {}
    for split, transitions in (("train", 170), ("test", 70)):
        data, clean = Dataset(data_dir, env, split), Dataset(data_dir, env, split, "clean")
        t, last, everything = data.transitions, data.episode_start[1:] - 1, np.arange(data.num_frames)
        lengths = np.diff(data.episode_start) - 1
        assert lengths.sum() >= transitions > lengths[:-2].sum()  # and no shard of two episodes too many
        np.testing.assert_array_equal(data.action[t], expert.act(data.state)[t])
        assert np.isnan(data.action[last]).all() and (data.reward[t] > 0).any()
        assert (data.plan["expert"], data.plan["expert_sha256"]) == (expert.name, expert.sha256)
        command = data.command.split()[2:]  # that the shards remember
        assert make_plan(tyro.cli(Args, args=command, default=default_args(command)), split) == data.plan
        seeds = [seed for shard in data.shards for seed in shard.episodes["seed"]]
        assert seeds == [episode_seed(data.plan, episode) for episode in range(data.num_episodes)]
        clips[split] = {name for shard in data.shards for name in shard.episodes["background"]}
        masks = np.unpackbits(data.masks(everything), axis=-1).reshape(-1, 32, 32)
        assert (masks.mean((1, 2)) > 0.005).all() and (masks.mean((1, 2)) < 0.5).all()
        same = (clean.frames(everything) == data.frames(everything)).all(-1)
        assert 0.2 < (~same).mean()
        if env == DCS:
            assert set(lengths) == {60} and data.episode_success is None
        else:  # episodes end on success, or after 60 steps
            success = np.concatenate([shard.arrays["success"] for shard in data.shards])
            np.testing.assert_array_equal(np.flatnonzero(success), last[lengths < 60] - 1)
            assert (data.episode_success == (lengths < 60)).all() and len(set(lengths)) > 1
            assert same[masks.astype(bool)].all()  # only the background changes
    assert clips["train"] and clips["test"] and not clips["train"] & clips["test"]


def test_frames_are_those_of_the_seed(data_dir):
    """An episode from the middle, made again alone from its stored seed in a fresh environment."""
    shard = read_shard(data_dir / DCS / "train" / "00000.h5")
    distractors = DistractorConfig("synthetic", num_videos=2, color_scale=0.0)
    options = {"quality": "fast", "distractors": distractors, "image_size": 32, "max_steps": 60}
    env = make_env(DCS, renders=("distractor",), **options)
    observation, _ = env.reset(seed=shard.episodes["seed"][1])
    for frame in range(61, 122):
        np.testing.assert_array_equal(observation["state"], shard.arrays["state"][frame])
        for name in ("observation", "mask"):
            image = observation[f"distractor/{name}"]
            image = np.packbits(image) if name == "mask" else image
            np.testing.assert_array_equal(image, shard.arrays[f"distractor/{name}"][frame])
        if frame < 121:
            observation, reward, _, truncated, _ = env.step(shard.arrays["action"][frame])
            assert reward == pytest.approx(float(shard.arrays["reward"][frame]))
    env.close()
    assert truncated


def test_complete_sets_are_left_alone_and_shown(data_dir, monkeypatch, capsys):
    """With `--env all`, which asks of each task what its own command does."""
    monkeypatch.setattr(make_dataset, "TASKS", {env: make_dataset.TASKS[env] for env in (DCS, DMW)})
    before = {path: path.stat().st_mtime_ns for path in data_dir.rglob("*.h5")}
    argv = [*WORDS, "--env", "all", "--data-dir", str(data_dir), "--split", "test"]
    args = tyro.cli(Args, args=argv, default=default_args(argv))
    make_dataset.main(args, argv)
    assert before == {path: path.stat().st_mtime_ns for path in data_dir.rglob("*.h5")}
    output, test_set = capsys.readouterr().out, Dataset(data_dir, DMW, "test")
    assert "frames made" not in output and test_set.hash in output
    assert f"{DCS}/test: 1 shards, 120 transitions in 2 episodes" in output and "(paper 0.6729)" in output
    assert "paper's expert 738.37 within 1000 steps, these have at most 60)" in output
    assert f"success rate {test_set.episode_success.mean():.3f} (paper's expert 1.0 within 500 steps" in output
    make_dataset.main(arguments(data_dir, DCS, "--preview", "--split", "test"))
    assert (data_dir / DCS / "test.png").stat().st_size > 10_000
    args.verify = True
    make_dataset.main(args, argv)
    assert capsys.readouterr().out.count("shards are as they were written") == 2


def test_interrupted_in_every_way_gives_the_same_files(tmp_path):
    folder = tmp_path / "killed" / DCS / "train"
    killed = start(tmp_path / "killed", DCS, *MANY, "--workers", 1)
    wait_until(lambda: list(folder.glob("00000.h5")), killed)
    worker = worker_of(killed)
    killed.kill()
    killed.communicate()
    wait_until(lambda: not Path(f"/proc/{worker}").exists())  # the worker notices that its parent is gone

    words = (tmp_path / "killed", DCS, *MANY, "--workers", 1)
    stopped, orphaned = (start(*words, start_new_session=True) for _ in range(2))
    wait_until(lambda: len(list(folder.glob(".*.claim"))) == 2, stopped, orphaned)
    os.kill(worker_of(orphaned), signal.SIGKILL)
    os.killpg(stopped.pid, signal.SIGTERM)  # as a scheduler does; the parent decides, not the worker
    stopped = finish(stopped)
    assert stopped.returncode == 128 + signal.SIGTERM and "Traceback" not in stopped.stderr
    assert "make_dataset.py: stopped: the complete shards in" in stopped.stderr
    assert "rerun the same command to resume" in stopped.stderr
    orphaned = finish(orphaned)
    assert orphaned.returncode == 1 and "Traceback" not in orphaned.stderr
    assert "error: a worker was killed by SIGKILL" in orphaned.stderr and "try fewer --workers" in orphaned.stderr
    assert contents(folder, "*.h5") == contents(folder)  # nothing half-made, no claims

    os.truncate(folder / "00000.h5", 10_000)
    made = finish(start(tmp_path / "killed", DCS, *MANY, "--workers", 3))
    assert made.returncode == 0, made.stderr
    assert f"{folder / '00000.h5'}: truncated; making it again" in made.stdout
    assert "GB to write" in made.stdout and "frames/s per worker" in made.stdout
    make(tmp_path / "alone", DCS, *MANY)
    assert contents(tmp_path / "killed") == contents(tmp_path / "alone")


def test_meta_world_is_the_same_for_two_processes(data_dir, tmp_path):
    """How many shards it takes is an outcome, and one made too many is removed."""
    made = finish(start(tmp_path, DMW, "--workers", 2))
    assert made.returncode == 0, made.stderr
    assert contents(tmp_path / DMW) == contents(data_dir / DMW, "*.h5")
    count = len(list((tmp_path / DMW / "train").iterdir()))
    first = read_shard(tmp_path / DMW / "train" / "00000.h5")
    write_shard(first.path.with_name(f"{count:05d}.h5"), first.plan, first.arrays, first.episodes)
    make_dataset.main(arguments(tmp_path, DMW))
    assert contents(tmp_path / DMW) == contents(data_dir / DMW, "*.h5")


def test_full_disk(tmp_path):
    limit = (50_000, 50_000)
    made = finish(
        start(tmp_path, DCS, "--workers", 1, preexec_fn=partial(resource.setrlimit, resource.RLIMIT_FSIZE, limit))
    )
    assert made.returncode == 1 and "Traceback" not in made.stderr
    assert f"error: {tmp_path / DCS}/train/00000.h5: File too large; make room and rerun" in made.stderr
    assert not contents(tmp_path)


@pytest.mark.parametrize(
    ("env", "words", "match"),
    [
        (DCS, ("--episode-length", 1001), "ends after 1000 steps"),
        (DCS, ("--image-size", 60), "--image-size is 60, must be a multiple of 8"),
        (DCS, ("--train-transitions", 10**10, "--episodes-per-shard", 10**5), "GB are free; make room"),
        (DMW, ("--expert", "student"), "no student expert for reach: choose scripted"),
        ("all", ("--episode-length", 501), "--episode-length is 501, but reach ends after 500 steps"),
        (DCS, ("--verify",), "no dataset here; make it with"),
    ],
)
def test_impossible_arguments(tmp_path, monkeypatch, env, words, match):
    monkeypatch.setattr(make_dataset, "TASKS", {env: make_dataset.TASKS[env] for env in (DCS, DMW)})
    argv = ["--env", env, *WORDS, "--data-dir", str(tmp_path), *map(str, words)]
    with pytest.raises(UserError, match=match):
        make_dataset.main(arguments(tmp_path, env, *words), argv)
    assert not contents(tmp_path)


@pytest.mark.parametrize(
    ("words", "field"),
    [
        (("--seed", 1), "seed: 0 -> 1"),
        (("--camera-scale", 0.2), "distractors.camera_scale: 0.1 -> 0.2"),
        (("--render", "clean"), "renders"),
    ],
)
def test_other_settings_are_refused(data_dir, words, field):
    with pytest.raises(UserError) as error:
        make_dataset.main(arguments(data_dir, DCS, *words))
    assert field in str(error.value) and "another --data-dir for a new set" in str(error.value)


def test_defaults():
    args = default_args(["--env", "hopper-hop"])
    assert (args.train_transitions, args.test_transitions, args.episode_length) == (9_000_000, 1_000_000, 1000)
    args = default_args(["--env=push"])
    assert (args.train_transitions, args.test_transitions, args.episode_length) == (1_000_000, 100_000, 500)
    assert (args.image_size, args.expert) == (128, "scripted")
    args = default_args(["--quick", "--env", "hopper-hop"])
    assert (args.train_transitions, args.test_transitions, args.quality) == (15_000, 3_000, "fast")
    with pytest.raises(UserError, match="did you mean 'walker-run'"):
        default_args(["--env", "walker"])
    argv = ["--expert", "laom", "--env", "all", "--quick", "--expert-dir", "here", "--seed", "3"]
    args = tyro.cli(Args, args=argv, default=default_args(argv))
    cheetah, push = (make_dataset.task_args(argv, env) for env in ("cheetah-run", "push"))
    assert (cheetah.env, cheetah.expert, cheetah.expert_dir) == ("cheetah-run", "laom", Path("here"))
    assert (push.env, push.expert, push.expert_dir, push.seed) == ("push", "scripted", None, 3)
    assert (cheetah.train_transitions, push.train_transitions, push.image_size) == (15_000, 6_000, 64)


def test_shards_of_paper_scale_fit_in_memory():
    args = default_args(["--env", DCS])
    args.backgrounds = "synthetic"
    plan = make_plan(args, "train")
    size = make_dataset.frame_bytes(plan) * plan["episodes_per_shard"] * (plan["episode_length"] + 1)
    assert plan["num_episodes"] == 9000 and 0.9 * make_dataset.SHARD_BYTES < size <= make_dataset.SHARD_BYTES
