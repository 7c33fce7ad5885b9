"""make_dataset.py as a user runs it: small real datasets, and everything that can stop it."""

import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import make_dataset
from common.dataset import Dataset
from common.errors import UserError
from common.experts import load_expert
from common.shards import ShardWriter, read_shard
from make_dataset import Split, default_args, describe_command, episode_seed, make_plan
from tests.test_dataset import make_plan as random_plan
from tests.test_dataset import random_episode

ROOT = Path(__file__).parents[1]
ENV = "walker-run"
ARGUMENTS = [
    *("--env", ENV, "--quick", "--backgrounds", "synthetic", "--num-videos", "2", "--episode-length", "20"),
    *("--camera-scale", "0.1", "--color-scale", "0.1"),
    *("--train-transitions", "155", "--test-transitions", "60", "--episodes-per-shard", "2"),
]
TRAIN, TEST = 4, 2  # shards
DMW_ARGUMENTS = [
    *("--env", "reach", "--quick", "--backgrounds", "synthetic", "--num-videos", "2", "--image-size", "32"),
    *("--train-transitions", "160", "--test-transitions", "60", "--episodes-per-shard", "1"),
]


def start(data_dir, workers, *more, base=ARGUMENTS):
    command = [sys.executable, "make_dataset.py", *base, "--data-dir", data_dir, "--workers", workers, *more]
    return subprocess.Popen(
        list(map(str, command)), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def wait_for_shards(data_dir, count, process):
    while len(shards(data_dir)) < count:
        assert process.poll() is None, process.communicate()
        time.sleep(0.005)


def shards(data_dir):
    return sorted(path.relative_to(data_dir) for path in data_dir.rglob("*.h5"))


def parts(data_dir):
    return list(data_dir.rglob("*.part"))


def children(process):
    return [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]


def is_worker(pid):
    try:
        return b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except FileNotFoundError:
        return False


def arguments(data_dir, *more, base=ARGUMENTS):
    """Args as the command line gives them."""
    import tyro

    argv = [*base, "--data-dir", str(data_dir), *map(str, more)]
    return tyro.cli(make_dataset.Args, args=argv, default=default_args(argv))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A dataset made without trouble by two workers, and what was printed."""
    data_dir = tmp_path_factory.mktemp("made")
    output, errors = (process := start(data_dir, 2, "--preview")).communicate()
    assert process.returncode == 0, errors
    return data_dir, output


def test_content(made):
    data_dir, _ = made
    expert, clips = load_expert(ENV), {}
    for split, episodes in (("train", 8), ("test", 3)):
        dataset = Dataset(data_dir, ENV, split)
        assert dataset.num_episodes == episodes and dataset.num_transitions == episodes * 20
        assert len(dataset.shards) == {"train": TRAIN, "test": TEST}[split]
        t = dataset.transitions
        np.testing.assert_array_equal(dataset.action[t], expert.act(dataset.state)[t])
        assert np.isnan(dataset.action[dataset.episode_start[1:] - 1]).all()
        assert dataset.expert == {"name": "student", "sha256": expert.sha256}
        assert (dataset.reward[t] > 0).any()
        clips[split] = {name for shard in dataset.shards for name in shard.background}
        everything = np.arange(dataset.num_frames)
        clean = Dataset(data_dir, ENV, split, "clean")
        for render in (clean, dataset):
            share = np.unpackbits(render.masks(everything), axis=-1).mean(-1)
            assert (share > 0.01).all() and (share < 0.5).all()
        assert (clean.frames(everything) != dataset.frames(everything)).mean() > 0.5
        assert np.ptp(dataset.frames(everything[:20]).astype(int), axis=0).mean() > 1  # it moves
    assert clips["train"] and clips["test"] and not clips["train"] & clips["test"]


def test_frames_are_those_of_the_seed(made):
    """An episode from the middle, made again alone from its stored seed in a fresh environment."""
    from common.distractors import DistractorConfig
    from common.envs import make_env

    data_dir, _ = made
    shard = read_shard(data_dir / ENV / "train" / "00002.h5")
    seed = int(shard.episode_seed[1])
    assert seed == episode_seed(shard.plan, 5)
    env = make_env(
        ENV,
        quality="fast",
        distractors=DistractorConfig("synthetic", num_videos=2),
        max_steps=20,
        renders=("distractor",),
    )
    observation, _ = env.reset(seed=seed)
    for frame in range(21, 42):
        np.testing.assert_array_equal(observation["state"], shard.array("state")[frame])
        np.testing.assert_array_equal(
            observation["distractor/observation"], shard.array("distractor/observation")[frame]
        )
        mask = np.packbits(observation["distractor/mask"])
        np.testing.assert_array_equal(mask, shard.array("distractor/mask")[frame])
        if frame < 41:
            observation, reward, _, truncated, _ = env.step(shard.array("action")[frame])
            assert reward == pytest.approx(float(shard.array("reward")[frame]))
    env.close()
    assert truncated


def test_output(made):
    data_dir, output = made
    for text in (
        "train: 4 shards, 160 transitions in 8 episodes",
        "test: 2 shards, 60 transitions in 3 episodes",
        "mean return",
        "paper's expert 738.37",
        "action variance",
        "(paper 0.6729)",
        Dataset(data_dir, ENV, "train").hash,
        "frames/s per worker",
        "GB to write",
    ):
        assert text in output
    assert (data_dir / ENV / "train.png").stat().st_size > 10_000


def test_interrupted_in_every_way_gives_the_same_bytes(made, tmp_path):
    """SIGKILL, then SIGTERM, a killed worker, a truncated shard; finished by two runs at once, with 1 and 2 workers."""
    process = start(tmp_path, 1)
    wait_for_shards(tmp_path, 1, process)
    workers = [pid for pid in children(process) if is_worker(pid)]
    process.kill()
    process.communicate()
    assert workers
    for _ in range(1000):  # the worker notices that its parent is gone
        if not any(map(is_worker, workers)):
            break
        time.sleep(0.01)
    assert not any(map(is_worker, workers))
    stale = tmp_path / ENV / "train" / "00003.h5.part"
    stale.write_bytes(b"left by a run that was killed")

    count = len(shards(tmp_path))
    process = start(tmp_path, 1)
    wait_for_shards(tmp_path, count + 1, process)
    process.send_signal(signal.SIGTERM)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert "the same command goes on" in errors and "Traceback" not in errors
    assert f"removed {stale}" in output
    assert not parts(tmp_path) and len(shards(tmp_path)) > count

    count = len(shards(tmp_path))
    process = start(tmp_path, 1)
    wait_for_shards(tmp_path, count + 1, process)
    os.kill(next(pid for pid in children(process) if is_worker(pid)), signal.SIGKILL)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 1 and "killed by SIGKILL" in errors and "--workers" in errors
    assert not parts(tmp_path)

    damaged = tmp_path / ENV / "train" / "00000.h5"
    os.truncate(damaged, 10_000)
    processes = [start(tmp_path, 1), start(tmp_path, 2)]
    outputs = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert any(f"{damaged}: truncated" in output for output, _ in outputs)
    assert shards(tmp_path) == shards(made[0]) and not parts(tmp_path)
    for path in shards(tmp_path):
        assert (tmp_path / path).read_bytes() == (made[0] / path).read_bytes(), path


@pytest.fixture(scope="module")
def made_dmw(tmp_path_factory):
    """A set of Meta-World, made without trouble by two workers, and what was printed."""
    data_dir = tmp_path_factory.mktemp("made_dmw")
    process = start(data_dir, 2, "--preview", base=DMW_ARGUMENTS)
    output, errors = process.communicate()
    assert process.returncode == 0, errors
    return data_dir, output


def test_content_of_meta_world(made_dmw):
    data_dir, output = made_dmw
    expert = load_expert("reach", "scripted")
    assert (
        "success rate 1.000 (paper's expert 1.0 within 500 steps, these have at most 250)" in output
        and "(paper 0.0372)" in output
    )
    assert (data_dir / "reach" / "train.png").stat().st_size > 10_000
    for split, transitions in (("train", 160), ("test", 60)):
        dataset = Dataset(data_dir, "reach", split)
        lengths = np.diff(dataset.episode_start) - 1
        assert dataset.image_size == 32 and dataset.expert == {"name": "scripted", "sha256": expert.sha256}
        assert len(set(lengths)) > 1 and lengths.max() < 100  # they end on success
        assert dataset.num_transitions == lengths.sum() >= transitions > lengths[:-1].sum()  # and no shard too many
        assert dataset.episode_success.all()
        success = np.concatenate([shard.array("success") for shard in dataset.shards])
        np.testing.assert_array_equal(np.flatnonzero(success), dataset.episode_start[1:] - 2)
        t = dataset.transitions
        np.testing.assert_array_equal(dataset.action[t], expert.act(dataset.state)[t])
        assert abs(dataset.action[t]).max() == 1 and np.isnan(dataset.action[dataset.episode_start[1:] - 1]).all()
        clean, everything = Dataset(data_dir, "reach", split, "clean"), np.arange(dataset.num_frames)
        np.testing.assert_array_equal(clean.masks(everything), dataset.masks(everything))
        robot = np.unpackbits(clean.masks(everything), axis=-1).reshape(-1, 32, 32).astype(bool)
        same = (clean.frames(everything) == dataset.frames(everything)).all(-1)
        assert same[robot].all() and 0.2 < (~same).mean() < 0.8


def test_meta_world_is_the_same_for_one_worker_and_in_three_pieces(made_dmw, tmp_path):
    alone, pieces = tmp_path / "alone", tmp_path / "pieces"
    process = start(alone, 1, base=DMW_ARGUMENTS)
    assert process.wait(timeout=300) == 0, process.communicate()
    for number in (signal.SIGTERM, signal.SIGKILL):
        count = len(shards(pieces))
        process = start(pieces, 1, base=DMW_ARGUMENTS)
        wait_for_shards(pieces, count + 1, process)
        process.send_signal(number)
        process.communicate(timeout=60)
        assert process.returncode in (-number, 128 + number)
    process = start(pieces, 2, base=DMW_ARGUMENTS)
    assert process.wait(timeout=300) == 0, process.communicate()
    for folder in (alone, pieces):
        assert shards(folder) == shards(made_dmw[0]) and not parts(folder)
        for path in shards(folder):
            assert (folder / path).read_bytes() == (made_dmw[0] / path).read_bytes(), path


def test_a_shard_too_many_is_removed(made_dmw, tmp_path, capsys):
    """A worker may finish one at the moment when the others have made enough."""
    data_dir = tmp_path / "data"
    shutil.copytree(made_dmw[0], data_dir)
    count = len(Dataset(data_dir, "reach", "train").shards)
    more = arguments(tmp_path / "more", "--split", "train", "--train-transitions", "160", base=DMW_ARGUMENTS)
    maker = make_dataset._Maker(more, {"train": make_plan(more, "train")}, lambda: None)
    surplus = data_dir / "reach" / "train" / f"{count:05d}.h5"
    assert maker.make("train", count, surplus)[0] == "made"
    maker.close()
    make_dataset.main(arguments(data_dir, base=DMW_ARGUMENTS))
    assert not surplus.exists() and shards(data_dir) == shards(made_dmw[0])


def test_all_tasks_one_after_the_other(tmp_path, monkeypatch, capsys):
    import tyro

    argv = ["--env", "all", "--quick", "--backgrounds", "synthetic", "--num-videos", "1", "--workers", "1"]
    argv += ["--train-transitions", "40", "--test-transitions", "20", "--image-size", "16", "--preview"]
    argv += ["--data-dir", str(tmp_path), "--episode-length", "20"]
    monkeypatch.setattr(make_dataset, "TASKS", {name: make_dataset.TASKS[name] for name in ("hopper-hop", "push")})
    make_dataset.main(tyro.cli(make_dataset.Args, args=argv, default=default_args(argv)), argv)
    output = capsys.readouterr().out
    assert output.count("GB to write") == 1 and output.index("hopper-hop/train") < output.index("push/train")
    for env in ("hopper-hop", "push"):
        assert (tmp_path / env / "test.png").exists()
        assert Dataset(tmp_path, env, "train").num_transitions == 40


def test_all_tasks_have_their_own_defaults():
    argv = ["--expert", "laom", "--env", "all", "--quick", "--expert-dir", "here", "--seed", "3"]
    cheetah, push = make_dataset.task_args(argv, "cheetah-run"), make_dataset.task_args(argv, "push")
    assert (cheetah.env, cheetah.expert, cheetah.expert_dir) == ("cheetah-run", "laom", Path("here"))
    assert (push.env, push.expert, push.expert_dir) == ("push", "scripted", None)
    assert (cheetah.train_transitions, push.train_transitions, push.image_size) == (15_000, 6_000, 64)
    assert cheetah.seed == push.seed == 3
    argv = ["--env=all"]
    assert make_dataset.task_args(argv, "push") == default_args(["--env", "push"])
    assert make_dataset.task_args(argv, "walker-run") == default_args(["--env", "walker-run"])


@pytest.mark.parametrize(
    ("more", "match"),
    [
        (["--episode-length", "600"], "episode-length is 600, but reach ends after 500"),
        (["--train-transitions", "10000000000"], "GB are free; make room"),
    ],
)
def test_all_tasks_are_checked_before_the_first_is_made(tmp_path, more, match):
    import tyro

    argv = ["--env", "push", "--env=all", "--backgrounds", "synthetic", "--data-dir", str(tmp_path), *more]
    args = tyro.cli(make_dataset.Args, args=argv, default=default_args(argv))
    with pytest.raises(UserError, match=match):
        make_dataset.main(args, argv)
    assert not list(tmp_path.rglob("*.h5"))


def test_worker_that_fails_ends_the_run(tmp_path):
    obstacle = tmp_path / ENV / "train" / "00000.h5"
    (obstacle / "in the way").mkdir(parents=True)
    process = start(tmp_path, 1)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert f"error: {obstacle}: worker 0 failed: IsADirectoryError" in errors
    assert not parts(tmp_path)


def test_complete_set_is_left_alone(made, capsys):
    before = {path: (made[0] / path).stat().st_mtime_ns for path in shards(made[0])}
    make_dataset.main(arguments(made[0], "--workers", 7))
    assert before == {path: (made[0] / path).stat().st_mtime_ns for path in shards(made[0])}
    assert "frames made" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        (("--seed", 1), "seed: 0 -> 1"),
        (("--quality", "full"), "quality: fast -> full"),
        (("--train-transitions", 500), "num_transitions: 155 -> 500"),
        (("--camera-scale", 0.2), "distractors.camera_scale: 0.1 -> 0.2"),
        (("--num-videos", 1), "distractors.clips.synthetic-train-01"),
        (("--render", "clean"), "renders"),
    ],
)
def test_changed_arguments_are_refused(made, changed, field):
    with pytest.raises(UserError) as error:
        make_dataset.main(arguments(made[0], *changed))
    assert field in str(error.value) and "--data-dir" in str(error.value)


def test_verify_finds_a_flipped_bit(made, tmp_path, capsys):
    data_dir = tmp_path / "data"
    shutil.copytree(made[0], data_dir)
    make_dataset.main(arguments(data_dir, "--verify"))
    assert "4 shards are as they were written" in capsys.readouterr().out
    path = data_dir / ENV / "test" / "00001.h5"
    shard = read_shard(path)
    data = bytearray(path.read_bytes())
    data[shard.offset["clean/observation"] + 5 * 64 * 64 * 3] ^= 1
    path.write_bytes(data)
    with pytest.raises(UserError) as error:
        make_dataset.main(arguments(data_dir, "--verify"))
    assert f"{path}: episode 0 (frames 0 to 20) does not match its hash" in str(error.value)
    assert f"rm {path} && {describe_command(arguments(data_dir))} --data-dir {data_dir}" in str(error.value)
    with pytest.raises(UserError, match="no dataset here"):
        make_dataset.main(arguments(tmp_path / "nothing", "--verify"))


def test_remembered_command_makes_the_same_plan(made):
    dataset = Dataset(made[0], ENV, "train")
    assert dataset.command.startswith("python make_dataset.py --env walker-run --quick ")
    import tyro

    argv = dataset.command.split()[2:]
    args = tyro.cli(make_dataset.Args, args=argv, default=default_args(argv))
    assert args.data_dir == made[0] and make_plan(args, "train") == dataset.plan


def test_no_room(tmp_path, capsys):
    with pytest.raises(UserError, match="GB are free; make room"):
        make_dataset.main(arguments(tmp_path, "--train-transitions", 10**10, "--episodes-per-shard", 10**5))
    assert "GB to write" in capsys.readouterr().out


def fill(folder, frames=2000):
    plan = random_plan([[frames - 1]], image_size=64)
    with ShardWriter(folder / "00000.h5", plan, 0, frames, 1) as writer:
        writer.append(random_episode(plan, frames - 1, np.random.default_rng(0)), seed=0)
        writer.commit()


def test_full_disk(tmp_path):
    if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", tmp_path]).returncode:
        pytest.skip("needs the right to mount a small tmpfs")
    try:
        with pytest.raises(UserError, match=r"00000.h5: the disk is full"):
            fill(tmp_path)
        assert not list(tmp_path.iterdir())
        fill(tmp_path, frames=20)  # and it goes on once there is room
        assert read_shard(tmp_path / "00000.h5").frames == 20
    finally:
        subprocess.run(["umount", tmp_path], check=True)


def test_limit_of_file_size(tmp_path):
    """Like a full disk, for every user; it strikes while frames are written, after the space was reserved."""
    plan = random_plan([[99]], image_size=64)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with pytest.raises(UserError, match=r"00000.h5: the disk is full"):
        with ShardWriter(tmp_path / "00000.h5", plan, 0, 100, 1) as writer:
            resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
            try:
                writer.append(random_episode(plan, 99, np.random.default_rng(0)), seed=0)
                writer.commit()
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("more", "match"),
    [
        (("--train-transitions", 0), "--train-transitions is 0"),
        (("--episode-length", 1001), "ends after 1000 steps"),
        (("--workers", 0), "--workers is 0"),
        (("--num-videos", 0), "--num-videos is 0"),
        (("--image-size", 60), "--image-size is 60, must be a multiple of 8"),
        (("--expert", "scripted"), "no scripted expert for walker-run: choose student or laom"),
        (("--expert-dir", "nowhere"), "nowhere"),
        (("--backgrounds", "nowhere"), "nowhere"),
    ],
)
def test_impossible_arguments(tmp_path, more, match):
    with pytest.raises(UserError, match=match):
        make_dataset.main(arguments(tmp_path, *more))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("more", "match"),
    [
        (("--episode-length", 501), "ends after 500 steps"),
        (("--expert", "student"), "no student expert for reach: choose scripted"),
        (("--expert-dir", "somewhere"), "--expert-dir has no meaning for reach"),
    ],
)
def test_impossible_arguments_of_meta_world(tmp_path, more, match):
    with pytest.raises(UserError, match=match):
        make_dataset.main(arguments(tmp_path, *more, base=DMW_ARGUMENTS))
    assert not list(tmp_path.iterdir())


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


def test_paper_scale_shards_are_about_a_gigabyte():
    args = default_args(["--env", ENV])
    args.backgrounds = "synthetic"
    plan = make_plan(args, "train")
    assert plan["num_episodes"] == 9000 and 200 < plan["num_shards"] < 300
    size = make_dataset.frame_bytes(plan) * make_dataset.shard_frames(plan, 0)
    assert 0.9e9 < size <= 1e9


def test_episode_seeds_differ():
    seeds = [
        episode_seed({"env": env, "split": split, "seed": seed}, episode)
        for env in ("walker-run", "hopper-hop")
        for split in ("train", "test")
        for seed in (0, 1)
        for episode in range(500)
    ]
    assert len(set(seeds)) == len(seeds) and 0 <= min(seeds) and max(seeds) < 2**63


def test_shards_until_the_transitions_suffice(tmp_path):
    """Meta-World's rule: the same shards remain in whatever order several workers finish them."""
    plan = {"num_shards": None, "num_transitions": 100}
    lengths = [30, 50, 10, 40, 20, 60]
    ends = set()
    for seed in range(20):
        rng, split = np.random.default_rng(seed), Split(tmp_path, plan)
        running = []
        while not split.complete():
            while len(running) < 1 + seed % 3 and (shard := split.take()) is not None:
                running.append(shard)
            shard = running.pop(rng.integers(len(running)))
            split.finish(shard, lengths[shard])
        ends.add(split.end())
        assert max(split.transitions) <= 5  # few are made in vain, even if the first one comes last
    assert ends == {4}
