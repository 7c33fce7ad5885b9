"""make_masks.py: files, resume, refusals, imported masks, report; on planted data, SAM 2.1 with random weights."""

import contextlib
import hashlib
import itertools
import json
import os
import shutil
import signal
import subprocess
from pathlib import Path

import numpy as np
import planted
import pytest
import torch
from methods import python, wait_until

import make_masks
from common import sam, store
from common.cli import UserError
from common.dataset import Dataset
from common.distractors import DistractorConfig
from common.envs import make_env
from common.shards import read_derived, read_shard, write_shard
from common.tasks import TASKS

NAMES = ("test/00000", "test/00001", "train/00000", "train/00001")  # of the planted shards
MASKS = np.random.default_rng(0).random((12, 32, 32)) < 0.3  # of an episode


@pytest.fixture(scope="module")
def planted_data(tmp_path_factory) -> Path:
    """Episodes of 5 and 3 frames, two in each train shard and one in each test shard; tests copy it."""
    return planted.write(tmp_path_factory.mktemp("planted") / "data", train=4, test=2, lengths=(4, 2), shards=2)


@pytest.fixture
def data(planted_data, tmp_path) -> Path:
    return shutil.copytree(planted_data, tmp_path / "data")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    """Random weights of SAM 2.1 hiera-tiny for which the object is seen, as the file that a user has."""
    pytest.importorskip("sam2", reason="sam2 is not installed")
    torch.manual_seed(0)
    state = sam.load_predictor("tiny", None, 128, torch.device("cpu")).state_dict()
    state["sam_mask_decoder.pred_obj_score_head.layers.2.bias"] += 1.0
    path = tmp_path_factory.mktemp("weights") / "random.pt"
    torch.save({"model": state}, path)
    return path


@pytest.fixture(scope="module")
def complete(tmp_path_factory, planted_data, checkpoint) -> Path:
    """A data folder with complete masks 'sam' of the distractor render."""
    folder = shutil.copytree(planted_data, tmp_path_factory.mktemp("complete") / "data")
    make(folder, checkpoint=checkpoint, render="distractor")
    return folder


@pytest.fixture
def masked(complete, tmp_path) -> Path:
    """A copy of `complete`."""
    return shutil.copytree(complete, tmp_path / "masked")


def make(folder: Path, **changes) -> None:
    make_masks.main(make_masks.Args(data_dir=folder, image_size=128, device="cpu", **changes))


def start(folder: Path, checkpoint: Path) -> subprocess.Popen:
    """make_masks.py in a process of its own, which is making a file on return."""
    # As many threads as here, since masks of random weights may depend on it.
    environment = os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads()), "PYTHONPATH": "."}
    words = ("--data-dir", folder, "--checkpoint", checkpoint, "--render", "distractor", "--device", "cpu")
    process = python("tests/masks_driver.py", *words, env=environment)
    wait_until(lambda: list(folder.rglob(".*.claim")), process)
    return process


def hashes(folder: Path) -> dict[str, str]:
    """Of the mask files."""
    paths = sorted(folder.rglob("[0-9]*.*.h5"))
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def test_mask_files_hold_what_the_tracker_gives(complete, checkpoint, capsys):
    settings = {
        "method": "sam2.1",
        "model": "tiny",
        "image_size": 128,
        "box": [6.5, 12.0, 27.0, 25.0],  # the task's, for frames of 32 pixels
        "checkpoint_sha256": hashlib.sha256(checkpoint.read_bytes()).hexdigest(),
    }
    assert sorted(hashes(complete)) == [f"cheetah-run/{name}.sam.h5" for name in NAMES]
    predictor = sam.load_predictor("tiny", sam.read_checkpoint(checkpoint)[0], 128, torch.device("cpu"))
    shard = read_shard(complete / "cheetah-run/train/00001.h5")
    stored = read_derived(shard, "sam")
    assert stored.attributes == {"shard_hash": shard.content_hash, "settings": settings}
    assert stored.about["command"] == "python make_masks.py --env cheetah-run --checkpoint CHECKPOINT --image-size 128"
    episodes = np.split(shard.arrays["distractor/observation"], [5])
    masks = np.concatenate(sam.segment_episodes(predictor, episodes, settings["box"], 1))
    found = make_masks.scores(masks, shard.arrays["distractor/mask"], shard.episode_start)
    for name, expected in ({"mask": masks} | found).items():
        assert np.array_equal(stored.arrays[f"distractor/{name}"], expected)
    assert 0 < found["iou"].min() and found["iou"].max() < 1
    dataset = Dataset(complete, "cheetah-run", "train", "distractor", "sam")
    dataset.verify()
    assert dataset.summary()["mask_source"] == "sam" and len(dataset.summary()["mask_hash"]) == 64
    before = {path: path.stat().st_mtime_ns for path in complete.rglob("*.sam.h5")}
    make(complete, render="distractor")  # again, without weights
    assert "masks 'sam' are complete" in capsys.readouterr().out
    assert before == {path: path.stat().st_mtime_ns for path in complete.rglob("*.sam.h5")}


def test_recorded_videos_need_a_box_and_may_have_one_for_each_episode(tmp_path, checkpoint):
    data = planted.write_recorded(tmp_path, masks=False, train=2, test=2, length=2)
    boxes = {"train": [[0, 0, 8, 8], [10, 12, 30, 28]], "test": [[5, 5, 20, 20]] * 2}
    (tmp_path / "boxes.json").write_text(json.dumps(boxes))
    args = {"env": "own", "checkpoint": checkpoint}
    with pytest.raises(UserError, match=r"where is the agent\? Give --box"):
        make(data, **args)
    make(data, boxes=tmp_path / "boxes.json", **args)
    predictor = sam.load_predictor("tiny", sam.read_checkpoint(checkpoint)[0], 128, torch.device("cpu"))
    for split, expected in (("train", boxes["train"]), ("test", boxes["test"])):
        dataset = Dataset(data, "own", split, mask_source="sam")
        for episode, box in enumerate(expected):
            index = np.arange(*dataset.episode_start[episode : episode + 2])
            masks = sam.segment_episodes(predictor, [dataset.frames(index)], box, 1)[0]
            assert np.array_equal(dataset.masks(index), masks), (split, episode)
        report = json.loads((data / f"own/{split}.sam.json").read_text())["renders"]["video"]
        assert report.keys() == {"empty_share", "episode_empty"} and (data / f"own/{split}.sam.png").exists()
    (tmp_path / "boxes.json").write_text(json.dumps(boxes | {"train": [[0, 0, 8, 8]]}))
    with pytest.raises(UserError, match="a box of four numbers for each of the 2 episodes of the train split"):
        make(data, boxes=tmp_path / "boxes.json", name="other", **args)


def test_a_second_render_is_added_to_the_first(masked, checkpoint):
    before = Dataset(masked, "cheetah-run", "test", "distractor", "sam").mask_hash
    make(masked, checkpoint=checkpoint, split="test")
    assert Dataset(masked, "cheetah-run", "test", "distractor", "sam").mask_hash == before
    assert Dataset(masked, "cheetah-run", "test", "clean", "sam").mask_hash != before


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_run_that_was_stopped_resumes(data, complete, checkpoint, number):
    process = start(data, checkpoint)
    process.send_signal(number)
    _, errors = process.communicate()
    assert len(hashes(data)) < 4 and hashes(data).items() <= hashes(complete).items()
    if number == signal.SIGTERM:
        assert process.returncode == 128 + number and "rerun the same command to resume" in errors
    make(data, checkpoint=checkpoint, render="distractor")
    assert hashes(data) == hashes(complete)
    assert not [path for path in data.rglob(".*") if path.is_file()]  # neither claims nor temporary files


def test_stale_and_damaged_files_are_made_again(masked, complete, checkpoint, tmp_path, capsys):
    stale, broken = (masked / "cheetah-run" / name for name in ("train/00001.sam.h5", "test/00000.sam.h5"))
    other = planted.write(tmp_path / "other", train=4, test=2, lengths=(4, 2), shards=2, moving=False)
    shutil.copy(other / "cheetah-run/train/00001.h5", masked / "cheetah-run/train/00001.h5")
    broken.write_bytes(broken.read_bytes()[:-4096])
    make(masked, checkpoint=checkpoint, render="distractor")
    output = capsys.readouterr().out
    assert f"{stale}: made from another version of 00001.h5; making it again" in output
    assert f"{broken}: truncated" in output
    before, after = hashes(complete), hashes(masked)
    assert [name for name in before if before[name] != after[name]] == ["cheetah-run/train/00001.sam.h5"]


def test_other_settings_are_refused_and_another_name_is_not(masked, given, checkpoint, tmp_path):
    box = (2, 3, 30, 31)
    (masked / "cheetah-run/train/00000.sam.h5").unlink()
    before = hashes(masked)
    with pytest.raises(
        UserError, match=r"\(box: \[6.5, 12.0, 27.0, 25.0\] -> \[2.0, 3.0, 30.0, 31.0\]\).* another --name"
    ):
        make(masked, checkpoint=checkpoint, box=box)
    state = torch.load(checkpoint, weights_only=True)
    state["model"]["no_obj_ptr"] += 1
    torch.save(state, tmp_path / "other.pt")
    with pytest.raises(UserError, match=r"made with other settings \(checkpoint_sha256: "):
        make(masked, checkpoint=tmp_path / "other.pt")
    assert hashes(masked) == before
    make(masked, checkpoint=checkpoint, box=box, name="wide", split="test", render="clean")
    stored = store.read(masked / "cheetah-run/test/00000.wide.h5")
    assert stored.attributes["settings"]["box"] == [*box] and "distractor/mask" not in stored.arrays
    assert stored.about["command"].endswith("--name wide --checkpoint CHECKPOINT --image-size 128 --box 2 3 30 31")
    with pytest.raises(UserError, match=r"made with other settings \(method: sam2.1 -> import\)"):
        make(masked, import_dir=given, name="wide")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"box": (0, 0, 33, 10)}, "--box 0 0 33 10 does not lie in the frames of cheetah-run"),
        ({"name": "gt"}, "--name 'gt'"),
        ({"import_dir": Path("tests")}, "--import needs a --name"),
        ({"import_dir": Path("tests"), "name": "mine", "box": (0, 0, 9, 9)}, "--import takes masks as they are"),
        ({"boxes": Path("boxes.json"), "box": (0, 0, 9, 9)}, "--box and --boxes both say where the agent is"),
        ({"import_dir": Path("nowhere"), "name": "mine"}, r"--import: nowhere.* needs 00000.npy .*; 2 missing"),
    ],
)
def test_impossible_arguments_are_refused_before_anything_is_written(data, changes, message):
    with pytest.raises(UserError, match=message):
        make(data, split="test", **changes)
    assert not hashes(data)


@pytest.fixture
def given(planted_data, tmp_path) -> Path:
    return planted.write_given_masks(planted_data, tmp_path / "given")


def test_imported_arrays_are_understood_or_refused(tmp_path):
    path, packed = tmp_path / "00000.npy", np.packbits(MASKS.reshape(12, -1), axis=1)
    for values in (MASKS, MASKS.astype(np.uint8), MASKS * np.uint8(255), MASKS * 0.8 + 0.1):
        np.save(path, values)
        assert np.array_equal(make_masks.read_episode(path, 12, 32), packed)
    for values, message in (
        (MASKS[:-1], r"shape \(11, 32, 32\), expected \(frames, .*\) = \(12, 32, 32\)"),
        (MASKS * np.uint8(7), "uint8 from 0 to 7; masks hold"),
        (np.where(MASKS, np.nan, 0), "float64 from nan to nan; masks hold"),
        (MASKS.astype(str), "<U5; masks hold"),
        (MASKS.astype(object), "cannot be read as masks"),  # pickled
    ):
        np.save(path, values)
        with pytest.raises(UserError, match=f"00000.npy: {message}"):
            make_masks.read_episode(path, 12, 32)


@pytest.mark.parametrize("contents", [b"", b"<html>", b"PK\3\4", b"\x93NUMPY\1\0v\0{'descr'"], ids=repr)
def test_a_damaged_array_is_one_line(tmp_path, contents):
    (tmp_path / "0.npy").write_bytes(contents)
    with pytest.raises(UserError, match=r"0\.npy: cannot be read as masks") as caught:
        make_masks.read_episode(tmp_path / "0.npy", 12, 32)
    assert str(caught.value).isprintable()


def test_an_import_has_every_episode(tmp_path):
    for name in ("00000", "2", "first"):
        (tmp_path / name).mkdir()
    (tmp_path / "00001.NPY").touch()
    with pytest.raises(UserError, match=r"5 episodes; 2 missing: \['00003', '00004'\], 1 too many: \['first'\]"):
        make_masks.episode_paths(tmp_path, 5)


def test_masks_by_the_names_of_the_videos(tmp_path):
    """Each video has its own masks: one file for videos in train and test, or for parts of one, is refused."""
    data, given = planted.write_recorded(tmp_path, train=2, test=2, length=2), tmp_path / "given"

    def call_videos(clip_seconds: float | None) -> None:
        for split, second in (("train", "b.mp4"), ("test", "cafe\u0301.mp4")):
            shard = read_shard(data / f"own/{split}/00000.h5")
            plan = shard.plan | {"source": {"kind": "videos", "clip_seconds": clip_seconds}}
            write_shard(shard.path, plan, shard.arrays, {"source": ["a.mp4", second], "start_seconds": [0.0, 0.0]})

    for number, name in enumerate(("a", "b", "train/a", "train/b", "test/a", "test/caf\u00e9")):
        (given / name).parent.mkdir(parents=True, exist_ok=True)
        np.save(given / f"{name}.npy", np.arange(3 * 32 * 32).reshape(3, 32, 32) % 7 == number)
    call_videos(1.0)
    with pytest.raises(UserError, match=r"cut into several .* numbered by episode: DIR/own/train/video/00000.npy"):
        make(data, env="own", import_dir=given, name="mine")
    call_videos(None)
    make(data, env="own", import_dir=given, name="mine")
    for split, numbers in (("train", (2, 3)), ("test", (4, 5))):
        dataset = Dataset(data, "own", split, mask_source="mine")
        masks = make_masks.unpack(dataset.masks(np.arange(6)), 32)
        expected = [np.arange(3 * 32 * 32).reshape(3, 32, 32) % 7 == number for number in numbers]
        assert np.array_equal(masks, np.concatenate(expected))
    shutil.move(data / "own/test", tmp_path / "test")
    make(data, env="own", import_dir=given / "train", name="alone", split="train")  # which need not know of the other
    shutil.move(tmp_path / "test", data / "own/test")
    shutil.rmtree(given / "test")
    with pytest.raises(UserError, match="train and test both have a, so folders train and test are needed here too"):
        make(data, env="own", import_dir=given, name="other")


def test_imported_masks_that_are_all_empty_are_refused_and_mostly_empty_ones_announced(data, given, capsys):
    folder = given / "cheetah-run/test/distractor"
    for first in (False, True):
        for path in folder.iterdir():
            masks = np.zeros_like(np.load(path))
            masks[0] = first
            np.save(path, masks)
        with contextlib.nullcontext() if first else pytest.raises(UserError, match=f"all masks in {folder} are empty"):
            make(data, import_dir=given, name="mine", split="test")
        assert bool(hashes(data)) == first
    assert f"warning: {data / 'cheetah-run/test'}, distractor: most masks are empty" in capsys.readouterr().err


def test_imported_masks_become_mask_files_and_replace_changed_ones(data, given):
    last = given / "cheetah-run/test/distractor/00001.npy"
    masks = np.load(last)
    np.save(last, masks * 7)
    with pytest.raises(UserError, match="masks hold"):
        make(data, import_dir=given, name="mine")
    assert not hashes(data)  # checked before anything is written
    np.save(last, masks)
    make(data, import_dir=given, name="mine")
    for split, render in itertools.product(("train", "test"), ("clean", "distractor")):
        truth, mine = (Dataset(data, "cheetah-run", split, render, source) for source in ("gt", "mine"))
        frames = np.arange(truth.num_frames)
        expected = make_masks.unpack(truth.masks(frames), 32)
        expected[:, -1] = False
        assert np.array_equal(make_masks.unpack(mine.masks(frames), 32), expected)
    before = hashes(data)
    masks[1] = False
    np.save(last, masks)
    make(data, import_dir=given, name="mine", render="distractor")
    changed = "cheetah-run/test/00001.mine.h5"
    assert [name for name in before if before[name] != hashes(data)[name]] == [changed]
    stored = store.read(data / changed)
    assert stored.arrays["distractor/empty"].tolist() == [1] and stored.arrays["clean/empty"].tolist() == [0]
    assert stored.attributes["settings"] == {"method": "import"}


def test_work_is_shared_with_other_processes(data, given, capsys, monkeypatch):
    paths = [data / "cheetah-run/test" / f"{number:05d}.mine.h5" for number in (0, 1)]
    other_process = contextlib.ExitStack()
    other_process.enter_context(store.claim(paths[0]))
    monkeypatch.setattr(store.time, "sleep", lambda _: other_process.close())  # while it is waited for
    make(data, import_dir=given, name="mine", split="test")
    assert "waiting for another process that makes 1 files" in capsys.readouterr().out
    assert all(path.exists() for path in paths)


def test_scores_of_empty_and_perfect_masks():
    truth = np.zeros((5, 8), np.uint8)
    truth[:4] = 0b11110000
    masks = truth.copy()
    masks[1] = 0  # no mask
    masks[2] = 0b11000000  # half of it
    masks[3] = 0b11111111  # twice as much
    found = make_masks.scores(masks, truth, np.array([0, 2, 5]))
    iou, empty = found["iou"], found["empty"]
    assert iou.tolist() == [0.5, pytest.approx((0.5 + 0.5 + 1) / 3)] and empty.tolist() == [1, 1]


def test_the_report_names_the_worst_episodes(data, given, capsys):
    path = given / "cheetah-run/train/clean/00002.npy"
    masks = np.load(path)
    masks[2:] = False
    np.save(path, masks)
    make(data, import_dir=given, name="mine", split="train", render="clean")
    output = capsys.readouterr()
    assert "worst episodes: 2 (" in output.out and "1 episodes below 0.5 or with empty masks" in output.out
    assert "train, clean, episode 2: mIoU 0." in output.err and "3 of 5 masks empty" in output.err
    assert "episode 1" not in output.err and (data / "cheetah-run/train.mine.png").exists()
    scores = json.loads((data / "cheetah-run/train.mine.json").read_text())["renders"]["clean"]
    assert scores["empty_share"] == pytest.approx(3 / 16) and scores["episode_empty"] == [0, 0, 3, 0]
    assert scores["miou"] == pytest.approx((np.array(scores["episode_miou"]) * [5, 3, 5, 3]).sum() / 16)


def test_show_boxes_draws_and_writes_no_masks(data, capsys):
    make(data, show_boxes=True, box=(0, 0, 16, 32), split="train", render="clean")
    truth = Dataset(data, "cheetah-run", "train", "clean")
    first = np.unpackbits(truth.masks(truth.episode_start[:-1]), axis=1).reshape(-1, 32, 32)
    share = (first[:, :, :16].sum((1, 2)) / first.sum((1, 2))).mean()
    assert f"{share:.1%} of its pixels are in the box" in capsys.readouterr().out
    assert (data / "cheetah-run/train_boxes.png").exists() and not hashes(data)


@pytest.mark.parametrize("env", TASKS)
def test_boxes_hold_the_agent(env):
    """Over a few seeds of the simulator; --show-boxes tells it of a whole dataset."""
    task = TASKS[env]
    x0, y0, x1, y1 = task.box
    assert 0 <= x0 < x1 <= task.image_size and 0 <= y0 < y1 <= task.image_size
    simulator = make_env(env, quality="fast", distractors=DistractorConfig(backgrounds="synthetic", num_videos=1))
    covered = []
    for seed in range(4 if task.suite == "dcs" else 1):
        observation, _ = simulator.reset(seed=1000 + seed)
        for mask in (observation["clean/mask"], observation["distractor/mask"]):
            covered.append(mask[y0:y1, x0:x1].sum() / mask.sum())
    simulator.close()
    assert np.mean(covered) > 0.9 and min(covered) > 0.5
