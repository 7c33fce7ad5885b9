"""make_masks.py: files, resume, refusals, foreign masks, report; on planted data, SAM 2.1 with random weights."""

import hashlib
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import h5py
import numpy as np
import planted
import pytest
import torch
from PIL import Image

import make_masks
from common import sam
from common.dataset import Dataset
from common.distractors import DistractorConfig
from common.envs import make_env
from common.errors import UserError
from common.shards import read_mask_file, read_shard, write_sidecar
from common.tasks import TASKS

ROOT = Path(__file__).parents[1]
DRIVER = [sys.executable, str(ROOT / "tests" / "masks_driver.py")]
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


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


@pytest.fixture
def data(tmp_path) -> Path:
    return planted.write(tmp_path / "data", train=4, test=2, lengths=(5, 3), shards=2)


@pytest.fixture(scope="module")
def made(tmp_path_factory, checkpoint) -> Path:
    """A data folder with complete masks 'sam'; tests copy it."""
    folder = planted.write(tmp_path_factory.mktemp("made") / "data", train=4, test=2, lengths=(5, 3), shards=2)
    run(folder, checkpoint)
    return folder


def options(folder: Path, checkpoint: Path | None, *more: str) -> list[str]:
    weights = [] if checkpoint is None else ["--checkpoint", str(checkpoint)]
    return ["--env", "cheetah-run", "--data-dir", str(folder), *weights, "--device", "cpu", *more]


def run(folder: Path, checkpoint: Path | None, *more: str, code: int = 0) -> subprocess.CompletedProcess:
    found = subprocess.run(
        [*DRIVER, *options(folder, checkpoint, *more)], env=ENVIRONMENT, cwd=ROOT, capture_output=True, text=True
    )
    assert found.returncode == code, found.stdout + found.stderr
    return found


def hashes(folder: Path, pattern: str = "*.*.h5") -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob(pattern))
    }


# ---------------------------------------------------------------------------------------------------- SAM's mask files


def test_mask_files_hold_what_the_tracker_gives(made, checkpoint):
    settings = {
        "method": "sam2.1",
        "model": "tiny",
        "image_size": 128,
        "box": [6.5, 12.0, 27.0, 25.0],  # the task's, for frames of 32 pixels
        "checkpoint_sha256": hashlib.sha256(checkpoint.read_bytes()).hexdigest(),
    }
    predictor = sam.load_predictor("tiny", sam.read_checkpoint(checkpoint), 128, torch.device("cpu"))
    torch.set_num_threads(1)
    names = ["test/00000", "test/00001", "train/00000", "train/00001"]
    assert sorted(hashes(made)) == [f"cheetah-run/{name}.sam.h5" for name in names]
    for name in names:
        shard = read_shard(made / "cheetah-run" / f"{name}.h5")
        found = read_mask_file(made / "cheetah-run" / f"{name}.sam.h5", shard)
        assert found.renders == ("clean", "distractor") and found.settings == settings
        assert found.command == "python make_masks.py --env cheetah-run --image-size 128 --checkpoint FILE"
        for render in found.renders:
            frames, starts = shard.array(f"{render}/observation"), shard.episode_start
            episodes = [frames[start:stop] for start, stop in itertools.pairwise(starts)]
            expected = np.concatenate(sam.segment_episodes(predictor, episodes, settings["box"], 1))
            assert np.array_equal(found.masks[render], expected) and 0 < np.unpackbits(expected).mean() < 1
            truth = np.unpackbits(shard.array(f"{render}/mask"), axis=1).astype(bool)
            bits = np.unpackbits(expected, axis=1).astype(bool)
            for episode, (start, stop) in enumerate(itertools.pairwise(starts)):
                pairs = list(zip(bits[start:stop], truth[start:stop]))
                assert found.iou[render][episode] == pytest.approx(
                    np.mean([(a & b).sum() / (a | b).sum() for a, b in pairs])
                )
                assert found.empty[render][episode] == sum(not a.any() for a, _ in pairs)


def test_training_reads_them(made):
    truth, masks = (Dataset(made, "cheetah-run", "train", "distractor", source) for source in ("gt", "sam"))
    index = np.arange(truth.num_frames)
    assert masks.mask_hash != "gt" and not np.array_equal(truth.masks(index), masks.masks(index))
    masks.verify()


def test_the_same_command_again_changes_nothing_and_needs_no_weights(made, tmp_path):
    folder = shutil.copytree(made, tmp_path / "data")
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*.sam.h5")}
    assert "masks 'sam' are complete" in run(folder, None).stdout
    assert before == {path: path.stat().st_mtime_ns for path in folder.rglob("*.sam.h5")}


def test_a_second_render_is_added_to_the_first(data, made, checkpoint):
    run(data, checkpoint, "--render", "clean")
    with pytest.raises(UserError, match=r"holds no distractor/mask; add it with: .* --render distractor"):
        Dataset(data, "cheetah-run", "train", "distractor", "sam")
    before = Dataset(data, "cheetah-run", "train", "clean", "sam").mask_hash
    run(data, checkpoint)
    assert Dataset(data, "cheetah-run", "train", "clean", "sam").mask_hash == before  # a training that uses it goes on
    assert hashes(data) == hashes(made)


def test_five_kills_leave_the_same_files(data, made, checkpoint):
    rng = random.Random(0)
    start = time.monotonic()
    run(shutil.copytree(data, data.with_name("whole")), checkpoint)
    whole = time.monotonic() - start
    for _ in range(5):
        process = subprocess.Popen(
            [*DRIVER, *options(data, checkpoint)],
            env=ENVIRONMENT, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        time.sleep(rng.uniform(0.4, 1.0) * whole)
        process.kill()
        process.wait()
    run(data, checkpoint)
    assert hashes(data) == hashes(made)
    assert not list(data.rglob("*.part"))


def test_sigterm_keeps_what_is_complete(data, made, checkpoint):
    process = subprocess.Popen(
        [*DRIVER, *options(data, checkpoint)], env=ENVIRONMENT, cwd=ROOT, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    while not list(data.rglob("*.sam.h5")):
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate()
    assert process.returncode == 128 + signal.SIGTERM and "the same command goes on" in errors
    assert 0 < len(list(data.rglob("*.sam.h5"))) < 4 and not list(data.rglob("*.part"))
    assert hashes(data).items() <= hashes(made).items()


def test_two_processes_share_the_work(data, made, checkpoint):
    processes = [
        subprocess.Popen(
            [*DRIVER, *options(data, checkpoint)], env=ENVIRONMENT, cwd=ROOT, stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    outputs = [process.communicate()[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert hashes(data) == hashes(made)


# ------------------------------------------------------------------------------------------------------------ refusals


def test_a_shard_that_was_replaced_makes_its_masks_stale(made, checkpoint, tmp_path):
    folder = shutil.copytree(made, tmp_path / "data")
    other = planted.write(tmp_path / "other", train=4, test=2, lengths=(5, 3), shards=2, moving=False)
    shutil.copy(other / "cheetah-run/train/00001.h5", folder / "cheetah-run/train/00001.h5")
    stale = folder / "cheetah-run/train/00001.sam.h5"
    before = hashes(folder)
    with pytest.raises(
        UserError, match=r"00001.sam.h5: made from another version of 00001.h5; repair with: rm .*make_m"
    ):
        Dataset(folder, "cheetah-run", "train", "distractor", "sam")
    with pytest.raises(UserError, match=r"00001.sam.h5: made from another version"):
        Dataset(folder, "cheetah-run", "train", "distractor", "gt").verify()
    assert f"{stale}: made from another version of 00001.h5; making it again" in run(folder, checkpoint).stdout
    after = hashes(folder)
    changed = "cheetah-run/train/00001.sam.h5"
    assert {name for name in before if before[name] != after[name]} == {changed}
    Dataset(folder, "cheetah-run", "train", "distractor", "sam")


def test_a_broken_or_partial_mask_file_is_refused_and_made_again(made, checkpoint, tmp_path):
    folder = shutil.copytree(made, tmp_path / "data")
    path = folder / "cheetah-run/test/00000.sam.h5"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match=r"00000.sam.h5: not readable.*repair with: rm "):
        Dataset(folder, "cheetah-run", "test", "distractor", "sam")
    assert "making it again" in run(folder, checkpoint).stdout
    assert path.read_bytes() == whole
    with h5py.File(path, "r+") as file:
        file.attrs["complete"] = False
    with pytest.raises(UserError, match=r"00000.sam.h5: not complete; repair with: rm "):
        Dataset(folder, "cheetah-run", "test", "distractor", "sam")
    path.write_bytes(whole)
    with h5py.File(path, "r+") as file:
        file["distractor/mask"][0, 0] ^= 1
    with pytest.raises(UserError, match=r"00000.sam.h5: does not match its hash; repair with: rm .*make_masks.py"):
        Dataset(folder, "cheetah-run", "test", "distractor", "gt").verify()
    path.unlink()
    with pytest.raises(
        UserError, match=r"masks 'sam' are missing for 1 of 2 shards; finish them with: python make_masks"
    ):
        Dataset(folder, "cheetah-run", "test", "distractor", "sam")


def test_other_settings_are_refused_and_another_name_is_not(made, checkpoint, tmp_path):
    folder = shutil.copytree(made, tmp_path / "data")
    before = hashes(folder)
    found = run(folder, checkpoint, "--box", "2", "3", "30", "31", code=1)
    assert "made with other settings (box: [6.5, 12.0, 27.0, 25.0] -> [2.0, 3.0, 30.0, 31.0])" in found.stderr
    assert "--name" in found.stderr
    other = tmp_path / "other.pt"
    state = torch.load(checkpoint, weights_only=True)
    state["model"]["no_obj_ptr"] += 1
    torch.save(state, other)
    (folder / "cheetah-run/train/00001.sam.h5").unlink()
    assert "made with other settings (checkpoint_sha256: " in run(folder, other, code=1).stderr
    run(folder, checkpoint)
    assert hashes(folder) == before
    run(folder, checkpoint, "--box", "2", "3", "30", "31", "--name", "wide", "--split", "test", "--render", "clean")
    found = read_mask_file(folder / "cheetah-run/test/00000.wide.h5", read_shard(folder / "cheetah-run/test/00000.h5"))
    (folder / "cheetah-run/test/00001.wide.h5").unlink()
    with pytest.raises(UserError, match=r"finish them with: python make_masks.py .*--name wide .*--box 2 3 30 31"):
        Dataset(folder, "cheetah-run", "test", "clean", "wide")
    assert found.settings["box"] == [2.0, 3.0, 30.0, 31.0] and found.renders == ("clean",)
    assert found.command.endswith("--name wide --image-size 128 --checkpoint FILE --box 2 3 30 31")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--box", "0", "0", "33", "10"], "--box 0 0 33 10 does not lie in the frames of cheetah-run"),
        (["--box", "9", "0", "9", "10"], "--box 9 0 9 10 does not lie in the frames"),
        (["--name", "gt"], "--name 'gt'"),
        (["--name", "a/b"], "--name 'a/b'"),
        (["--import", "nowhere", "--name", "mine"], "--import nowhere: no such folder"),
        (["--import", "tests"], "--import needs a --name"),
        (["--checkpoint", "nowhere.pt"], "--checkpoint nowhere.pt: no such file"),
        (["--checkpoint", "README.md"], "--checkpoint README.md: not a checkpoint of torch"),
        (["--batch-episodes", "0"], "--batch-episodes is 0"),
    ],
)
def test_impossible_arguments_are_refused_before_anything_is_written(data, more, message):
    assert message in run(data, None, *more, code=1).stderr
    assert not hashes(data)


def test_without_weights_and_network_the_error_names_the_file(data, tmp_path, monkeypatch):
    monkeypatch.setitem(ENVIRONMENT, "HF_HUB_OFFLINE", "1")
    monkeypatch.setitem(ENVIRONMENT, "HF_HOME", str(tmp_path / "hub"))
    errors = run(data, None, code=1).stderr
    assert "sam2.1_hiera_tiny.pt" in errors and "--checkpoint" in errors and "Traceback" not in errors


def test_weights_of_another_size_are_refused(data, checkpoint):
    errors = run(data, checkpoint, "--model", "large", code=1).stderr
    assert "does not fit SAM 2.1 large" in errors and "choose the --model" in errors
    assert not hashes(data)


def test_no_dataset_names_the_command(tmp_path):
    errors = run(tmp_path, None, code=1).stderr
    assert "no dataset here; make it with: python make_dataset.py --env cheetah-run" in errors


# -------------------------------------------------------------------------------------------------------------- import


def foreign(data: Path, folder: Path, kind: str) -> Path:
    """The simulator's masks with the last row erased, as another tool would give them."""
    for split in ("train", "test"):
        for render in ("clean", "distractor"):
            dataset = Dataset(data, "cheetah-run", split, render)
            size = dataset.image_size
            for episode, (start, stop) in enumerate(zip(dataset.episode_start[:-1], dataset.episode_start[1:])):
                packed = dataset.masks(np.arange(start, stop))
                masks = np.unpackbits(packed, axis=1).reshape(-1, size, size).astype(bool)
                masks[:, -1] = False
                place = folder / "cheetah-run" / split / render
                place.mkdir(parents=True, exist_ok=True)
                if kind == "png":
                    (place / f"{episode:05d}").mkdir()
                    for frame, mask in enumerate(masks):  # 2.png comes before 10.png
                        Image.fromarray(mask.astype(np.uint8) * 255).save(place / f"{episode:05d}" / f"{frame}.png")
                elif kind == "palette":
                    (place / f"{episode:05d}").mkdir()
                    for frame, mask in enumerate(masks):
                        image = Image.fromarray(mask.astype(np.uint8), mode="P")
                        image.putpalette([0, 0, 0, 200, 0, 0])
                        image.save(place / f"{episode:05d}" / f"{frame:05d}.png")
                else:
                    dtype = {"bool": bool, "uint8": np.uint8, "float": np.float32}[kind]
                    values = masks.astype(dtype)
                    np.save(place / f"{episode:05d}.npy", values * 0.9 + 0.05 if kind == "float" else values)
    return folder


@pytest.mark.parametrize("kind", ["bool", "uint8", "float", "png", "palette"])
def test_foreign_masks_become_mask_files(tmp_path, kind):
    data = planted.write(tmp_path / "data", train=4, test=2, lengths=(12, 3), shards=2)
    given = foreign(data, tmp_path / "given", kind)
    make_masks.main(make_masks.Args(data_dir=data, import_dir=given, name="mine"))
    for split in ("train", "test"):
        for render in ("clean", "distractor"):
            truth, mine = (Dataset(data, "cheetah-run", split, render, source) for source in ("gt", "mine"))
            expected = np.unpackbits(truth.masks(np.arange(truth.num_frames)), axis=1).reshape(-1, 32, 32)
            expected[:, -1] = 0
            found = np.unpackbits(mine.masks(np.arange(mine.num_frames)), axis=1).reshape(-1, 32, 32)
            assert np.array_equal(found, expected)
    report = json.loads((data / "cheetah-run/train.mine.json").read_text())
    assert report["settings"] == {"method": "import"} and 0.5 < report["renders"]["clean"]["miou"] < 1
    before = hashes(data)
    make_masks.main(make_masks.Args(data_dir=data, import_dir=given, name="mine"))
    assert hashes(data) == before


def test_foreign_masks_that_changed_replace_the_old_ones(tmp_path, data):
    given = foreign(data, tmp_path / "given", "bool")
    args = make_masks.Args(data_dir=data, import_dir=given, name="mine")
    make_masks.main(args)
    path = given / "cheetah-run/train/distractor/00003.npy"
    masks = np.load(path)
    masks[1] = False
    np.save(path, masks)
    before = hashes(data)
    make_masks.main(args)
    after = hashes(data)
    assert [name for name in before if before[name] != after[name]] == ["cheetah-run/train/00001.mine.h5"]
    report = json.loads((data / "cheetah-run/train.mine.json").read_text())
    assert report["renders"]["distractor"]["episode_empty"] == [0, 0, 0, 1]


def test_pngs_are_in_the_order_of_their_numbers(tmp_path):
    for name in ("frame_10", "frame_2", "frame_1"):
        (tmp_path / f"{name}.png").touch()
    assert [path.stem for path in make_masks.pngs(tmp_path)] == ["frame_1", "frame_2", "frame_10"]
    (tmp_path / "frame_02.png").touch()
    with pytest.raises(UserError, match="the same number as"):
        make_masks.pngs(tmp_path)


def test_importing_one_render_keeps_the_other(tmp_path, data):
    given = foreign(data, tmp_path / "given", "bool")
    args = make_masks.Args(data_dir=data, import_dir=given, name="mine")
    make_masks.main(args)
    both = hashes(data)
    make_masks.main(make_masks.Args(data_dir=data, import_dir=given, name="mine", render="distractor"))
    assert hashes(data) == both


def test_import_does_not_overwrite_masks_of_sam(made, tmp_path):
    folder = shutil.copytree(made, tmp_path / "data")
    for path in folder.rglob("*.sam.h5"):
        path.rename(path.with_name(path.name.replace(".sam.", ".mine.")))
    before = hashes(folder)
    given = foreign(folder, tmp_path / "given", "bool")
    with pytest.raises(UserError, match=r"made with other settings \(method: sam2.1 -> import\)"):
        make_masks.main(make_masks.Args(data_dir=folder, import_dir=given, name="mine"))
    assert hashes(folder) == before


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        ("remove", r"1 of 4 episodes are missing \(00002\)"),
        ("extra", r"00004.npy is too many, the dataset has 4 episodes"),
        ("twice", r"a second one of episode 1"),
        ("name", r"first.npy: not the number of an episode"),
        ("length", r"00001.npy: shape \(3, 32, 32\), expected \(frames, height, width\) = \(4, 32, 32\)"),
        ("size", r"00001.npy: shape \(4, 64, 64\), expected"),
        ("values", r"00001.npy: uint8 from 0 to 7; a mask holds"),
        ("garbage", r"00001.npy: not a readable .npy array"),
        ("pngs", r"00001: 2 PNGs, but the episode has 4 frames"),
        ("pngsize", r"0.png: 16 x 16 pixels, the frames have 32 x 32"),
        ("color", r"0.png: mode RGB; masks need one channel"),
        ("render", r"distractor is no folder"),
    ],
)
def test_foreign_masks_that_do_not_fit_are_refused(tmp_path, data, spoil, message):
    given = foreign(data, tmp_path / "given", "uint8")
    folder = given / "cheetah-run/train/distractor"
    target = folder / "00001.npy"
    masks = np.load(target)
    if spoil == "remove":
        (folder / "00002.npy").unlink()
    elif spoil in ("extra", "name"):
        shutil.copy(target, folder / {"extra": "00004.npy", "name": "first.npy"}[spoil])
    elif spoil == "twice":
        (folder / "1").mkdir()
    elif spoil == "length":
        np.save(target, masks[:-1])
    elif spoil == "size":
        np.save(target, masks.repeat(2, 1).repeat(2, 2))
    elif spoil == "values":
        np.save(target, masks * 7)
    elif spoil == "garbage":
        target.write_bytes(b"abc")
    elif spoil == "render":
        shutil.rmtree(folder)
    else:
        target.unlink()
        (folder / "00001").mkdir()
        for frame in range(2 if spoil == "pngs" else 4):
            image = Image.fromarray(masks[frame] * 255)
            image = image.convert("RGB") if spoil == "color" else image
            image = image.resize((16, 16)) if spoil == "pngsize" else image
            image.save(folder / "00001" / f"{frame}.png")
    with pytest.raises(UserError, match=message):
        make_masks.main(make_masks.Args(data_dir=data, import_dir=given, name="mine"))
    written = hashes(data)
    assert not written if spoil != "values" else all("train/00000" in name for name in written)


def test_masklam_trains_on_foreign_masks_and_says_so(tmp_path):
    data = planted.write(tmp_path / "data")
    given = foreign(data, tmp_path / "given", "bool")
    make_masks.main(make_masks.Args(data_dir=data, import_dir=given, name="mine", render="distractor"))
    flags = "--env cheetah-run --quick --mask-source mine --batch-size 4 --lam-updates 2 --policy-updates 2"
    flags += " --decoder-updates 2 --num-labels 20 --eval-episodes 1 --eval-envs 1 --eval-steps 2 --device cpu"
    found = subprocess.run(
        [sys.executable, "masklam.py", *flags.split(), "--data-dir", str(data), "--runs-dir", str(tmp_path / "runs")],
        env=ENVIRONMENT, cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    result = json.loads(next((tmp_path / "runs").rglob("result.json")).read_text())
    summary = result["dataset"]["train"]
    assert summary["mask_source"] == "mine" and len(summary["mask_hash"]) == 64


def test_a_missing_source_names_the_command(data):
    with pytest.raises(
        UserError, match=r"no masks named 'sam'; there are: gt. Make them with: python make_masks.py --env"
    ):
        Dataset(data, "cheetah-run", "train", "distractor", "sam")
    with pytest.raises(UserError, match=r"no masks named 'mine'.*--import DIR --name mine"):
        Dataset(data, "cheetah-run", "train", "distractor", "mine")


# -------------------------------------------------------------------------------------------------------------- report


def test_scores_of_empty_and_perfect_masks():
    truth = np.zeros((5, 8), np.uint8)
    truth[:4] = 0b11110000
    masks = truth.copy()
    masks[1] = 0  # nothing found
    masks[2] = 0b11000000  # half of it
    masks[3] = 0b11111111  # twice as much
    starts = np.array([0, 2, 5])
    assert make_masks.mean_iou(masks, truth, starts).tolist() == [0.5, pytest.approx((0.5 + 0.5 + 1) / 3)]
    assert make_masks.empty_frames(masks, starts).tolist() == [1, 1]


def test_the_report_names_the_worst_episodes(tmp_path, data, capsys):
    given = foreign(data, tmp_path / "given", "bool")
    path = given / "cheetah-run/train/clean/00002.npy"
    masks = np.load(path)
    masks[2:] = False
    np.save(path, masks)
    make_masks.main(make_masks.Args(data_dir=data, import_dir=given, name="mine", split="train", render="clean"))
    output = capsys.readouterr()
    assert "worst episodes: 2 (" in output.out
    assert (
        "00001.h5, clean, episode 2 (number 0 of the shard): mIoU 0." in output.err
        and "4 of 6 masks empty" in output.err
    )
    assert "episode 1" not in output.err
    with Image.open(data / "cheetah-run/train.mine.png") as picture:
        assert picture.width > 500 and picture.height > 200
    report = json.loads((data / "cheetah-run/train.mine.json").read_text())
    found = report["renders"]["clean"]
    assert found["empty_share"] == pytest.approx(4 / 20) and len(found["episode_miou"]) == 4
    weights = np.array([6, 4, 6, 4])
    assert found["miou"] == pytest.approx((np.array(found["episode_miou"]) * weights).sum() / 20)


def test_show_boxes_draws_and_writes_no_masks(data, capsys):
    make_masks.main(make_masks.Args(data_dir=data, show_boxes=True, box=(0, 0, 16, 32)))
    output = capsys.readouterr().out
    truth = Dataset(data, "cheetah-run", "train", "clean")
    first = np.unpackbits(truth.masks(truth.episode_start[:-1]), axis=1).reshape(-1, 32, 32)
    share = (first[:, :, :16].sum((1, 2)) / first.sum((1, 2))).mean()
    assert f"{share:.1%} of its pixels are in the box" in output
    assert (data / "cheetah-run/boxes.png").exists() and not hashes(data)


@pytest.mark.parametrize("env", TASKS)
def test_boxes_hold_the_agent(env):
    """Over a few seeds of the simulator; `python -m benchmarks.boxes` measured them over 200."""
    task = TASKS[env]
    x0, y0, x1, y1 = task.box
    assert 0 <= x0 < x1 <= task.image_size and 0 <= y0 < y1 <= task.image_size
    simulator = make_env(env, quality="fast", distractors=DistractorConfig(backgrounds="synthetic", num_videos=1))
    covered = []
    for seed in range(4 if task.suite == "dcs" else 1):
        observation, _ = simulator.reset(seed=1000 + seed)
        for render in ("clean", "distractor"):
            mask = observation[f"{render}/mask"]
            covered.append(mask[y0:y1, x0:x1].sum() / mask.sum())
    simulator.close()
    assert np.mean(covered) > 0.9 and min(covered) > 0.5


def test_sidecars_of_other_kinds_are_verified_too(data):
    path = write_sidecar(data / "cheetah-run/train/00000.h5", "raft", {"flow": np.zeros((10, 2), np.float32)})
    dataset = Dataset(data, "cheetah-run", "train", "clean")
    dataset.verify()
    with h5py.File(path, "r+") as file:
        file["flow"][0, 0] = 1
    with pytest.raises(UserError, match=r"00000.raft.h5: does not match its hash"):
        dataset.verify()
