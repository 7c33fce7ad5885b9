"""import_data.py: real files of every kind it reads, and what is wrong with them."""

import contextlib
import fnmatch
import io
import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import imageio_ffmpeg
import numpy as np
import planted
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import tyro
from methods import ROOT, contents, finish, python, wait_until
from PIL import Image

import import_data
from common import lerobot, media, recordings, shards, store
from common.cli import UserError
from common.dataset import Dataset, Sampler
from common.tasks import TASKS


def test_a_recorded_set_may_lack_anything_but_frames(tmp_path):
    """States, rewards, actions and masks; whoever needs masks is told how to make them."""
    planted.write_recorded(tmp_path, actions=False, masks=False)
    dataset = Dataset(tmp_path, "own", "train", "distractor")
    dataset.verify()
    assert dataset.render == "video" and dataset.mask_hash == "none"
    assert dataset.action.shape == dataset.state.shape == (dataset.num_frames, 0)
    assert dataset.reward is None and dataset.episode_return is None and len(dataset.labelled(2, seed=0)) == 0
    summary = dataset.summary()
    assert all(summary[name] is None for name in ("mean_return", "return_std", "action_variance"))
    command = r"make_masks\.py --env own --box X0 Y0 X1 Y1 --data-dir"
    with pytest.raises(UserError, match=f"the set has no masks; make them .* --mask-source: python {command}"):
        dataset.masks(np.arange(2))
    options = {"max_offset": 2, "seed": 0, "device": torch.device("cpu")}
    with contextlib.closing(Sampler(dataset, 2, **options)) as sampler:
        assert sampler.next().action.shape == (2, 0)
    with contextlib.closing(Sampler(dataset, 2, **options, fields=("frames", "masks"))) as sampler:
        with pytest.raises(UserError, match="the set has no masks"):
            sampler.next()
    with pytest.raises(UserError, match=r"no masks named 'sam'; there are: none\. Make them"):
        Dataset(tmp_path, "own", "train", mask_source="sam")


# ---------------------------------------------------------------------------------------------- files of every kind


def ffmpeg(*words: Any, data: bytes | None = None) -> None:
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-v", "error", "-y", *map(str, words)]
    subprocess.run(command, input=data, check=True)


def picture(number: int, height: int = 24, width: int = 32) -> np.ndarray:
    """A picture that shows its number, as its brightness, and which side is up: a white line is on top of it."""
    pixels = np.full((height, width, 3), 4 * number, np.uint8)
    pixels[:2] = 255
    return pixels


def write_video(path: Path, count: int, rate: float = 10, first: int = 0, size=(24, 32), output: tuple = ()) -> None:
    write_pictures(path, [picture(first + number, *size) for number in range(count)], rate, output)


def write_pictures(path: Path, pictures: list[np.ndarray], rate: float = 10, output: tuple = ()) -> None:
    height, width = pictures[0].shape[:2]
    raw = ("-f", "rawvideo", "-pix_fmt", "rgb24", "-s", f"{width}x{height}", "-r", rate)
    codec = ("-c:v", "libx264", "-preset", "ultrafast", "-qp", 0, "-pix_fmt", "yuv444p")
    path.parent.mkdir(parents=True, exist_ok=True)
    ffmpeg(*raw, "-i", "-", *codec, *output, path, data=b"".join(picture.tobytes() for picture in pictures))


def write_images(folder: Path, count: int) -> None:
    folder.mkdir(parents=True)
    for number in range(count):
        Image.fromarray(picture(number)).save(folder / f"{number}.png")


def run(data_dir: Path, kind: str, source: Any, *words: Any) -> None:
    """import_data.py; what is not the authors' becomes the dataset `own` at 16 pixels, unless words say otherwise."""
    usual = () if kind == "authors" else ("--name", "own", "--size", 16)
    argv = [*map(str, (kind, source, *usual, *words)), "--data-dir", str(data_dir)]
    import_data.main(tyro.cli(import_data.Import, args=argv, default=import_data.default_args(argv)))


def opened(data_dir: Path, name: str = "own") -> dict[tuple[str, float], dict[str, Any]]:
    """What both splits hold: (source, start in seconds) -> numbers shown by the frames, split, arrays."""
    found = {}
    for split in ("train", "test"):
        dataset = Dataset(data_dir, name, split)
        dataset.verify()
        for shard in dataset.shards:
            for episode, key in enumerate(zip(shard.episodes["source"], shard.episodes["start_seconds"])):
                rows = slice(*shard.episode_start[episode : episode + 2])
                arrays = {array: values[rows] for array, values in shard.arrays.items() if len(values) == shard.frames}
                frames = arrays[f"{dataset.render}/observation"]
                middle = frames[:, frames.shape[1] // 2, frames.shape[2] // 2, 0]
                found[key] = arrays | {"shown": np.round(middle / 4).astype(int).tolist(), "split": split}
    return found


def plan_of(data_dir: Path, name: str = "own") -> dict[str, Any]:
    return Dataset(data_dir, name, "train").plan


CLIPS = {"clip9": 8, "clip10": 9, "clip11": 10}  # names and frames of `clips`


@pytest.fixture(scope="module")
def clips(tmp_path_factory) -> Path:
    """Three videos of one kind. No test changes it."""
    folder = tmp_path_factory.mktemp("clips")
    for name, frames in CLIPS.items():
        write_video(folder / f"{name}.mp4", frames)
    return folder


# ------------------------------------------------------------------------------------------------------------ videos


def test_videos_of_many_kinds(tmp_path):
    """Every frame as it is stored, episodes in natural order, sizes that differ between files, hidden files ignored."""
    source = tmp_path / "source"
    write_video(source / "clip10.mp4", 12)
    write_video(source / "clip9.MKV", 7, size=(40, 24))
    write_images(source / "folder11", 5)
    pictures = [Image.fromarray(picture(number)) for number in range(3)]
    pictures[0].save(source / "clip12.gif", save_all=True, append_images=pictures[1:], duration=100)
    ffmpeg("-display_rotation", 90, "-i", source / "clip10.mp4", "-c", "copy", source / "turned13.mp4")
    (source / "deep14").mkdir()
    for number in range(3):  # 16 bits per value
        Image.fromarray(np.full((16, 16), 40 * number * 257, np.uint16)).save(source / f"deep14/{number}.png")
    for name in (".DS_Store", "._clip10.mp4", "notes.txt"):
        (source / name).write_text("not a video", encoding="utf-8")
    run(tmp_path, "videos", source)
    found = opened(tmp_path)
    expected = {
        "clip9.MKV": list(range(7)),
        "clip10.mp4": list(range(12)),
        "clip12.gif": list(range(3)),
        "deep14": [0, 10, 20],
        "folder11": list(range(5)),
        "turned13.mp4": list(range(12)),
    }
    assert {source: one["shown"] for (source, _), one in found.items()} == expected
    turned = found["turned13.mp4", 0.0]["video/observation"][1, :, :, 0]
    assert turned[:, 0].min() > 200 and turned[0, 8] < 50  # what was on top is at the left
    train = [source for (source, _), one in found.items() if one["split"] == "train"]
    assert len(train) == 5 and train == [name for name in expected if name in train]
    plan = plan_of(tmp_path)
    assert plan["renders"] == ["video"] and plan["image_size"] == 16 and not plan["masks"] and not plan["reward"]
    assert (plan["action_dim"], plan["state_dim"], plan["action_scale"], plan["fps"]) == (0, 0, None, None)
    assert plan["source"]["kind"] == "videos" and str(tmp_path) not in str(plan)


@pytest.mark.parametrize(("fit", "size"), [("crop", 24), ("pad", 32)])
def test_frames_become_square(tmp_path, clips, fit, size):
    run(tmp_path, "videos", clips, "--size", size, "--fit", fit)
    frames = opened(tmp_path)["clip9.mp4", 0.0]["video/observation"][5]
    expected = picture(5)[:, 4:28] if fit == "crop" else np.pad(picture(5), ((4, 4), (0, 0), (0, 0)))
    assert np.abs(frames.astype(int) - expected).max() <= 2


VARIABLE = ("-vf", "settb=1/1000,setpts='if(lt(N,10),100*N,1000+300*(N-10))'", "-fps_mode", "passthrough")


@pytest.mark.parametrize(
    ("name", "rate", "output", "fps", "shown"),
    [
        ("a.mp4", 30, (), 10, range(0, 30, 3)),
        ("a.mkv", 30, (), 10, range(0, 30, 3)),  # whose times are rounded to milliseconds
        ("a.mp4", 30, (), 12, [0, 2, 5, 7, 10, 12, 15, 17, 20, 22, 25, 27]),
        ("a.mp4", 29.97, (), 30, range(30)),
        ("a.mp4", 10, VARIABLE, None, range(30)),
        ("a.mp4", 10, VARIABLE, 5, [0, 2, 4, 6, 8, 10, 10, 11, 12, 12, 13, 14, 14, 15, 16, 16, 17, 18, 18, 19, 20, 20]),
    ],
)
def test_a_rate_takes_the_frames_that_are_shown(tmp_path, name, rate, output, fps, shown):
    """A variable rate is neither filled up nor thinned out, unless a rate is asked for."""
    for number in range(2):
        write_video(tmp_path / f"source/{number}{name}", 30, rate, output=output)
    run(tmp_path, "videos", tmp_path / "source", *(("--fps", fps) if fps else ()))
    found = opened(tmp_path)[f"0{name}", 0.0]["shown"]
    assert found[: len(shown)] == list(shown) and len(found) in (len(shown), 30, 34)
    assert plan_of(tmp_path)["fps"] == fps


def test_clips_of_a_long_video(tmp_path):
    """The test part is the end of it, and whole episodes; a remainder of one frame is dropped and counted."""
    write_video(tmp_path / "source/long.mp4", 61)
    run(tmp_path, "videos", tmp_path / "source", "--clip-seconds", 1, "--test", 0.3)
    found = opened(tmp_path)
    assert {start: one["shown"] for (_, start), one in found.items()} == {
        float(second): list(range(10 * second, 10 * second + 10)) for second in range(6)
    }
    assert [one["split"] for one in found.values()] == ["train"] * 4 + ["test"] * 2
    plan = store.read(tmp_path / "own/plan.h5")
    assert plan.attributes["source"]["skipped"] == ["1 episodes of fewer than two frames"]


def test_folders_named_train_and_test_are_the_splits(tmp_path, capsys):
    """What belongs to one name in both lies in folders train and test too, or cannot be told."""
    for number, split in enumerate(("train", "test")):
        write_video(tmp_path / f"source/{split}/1.mp4", 4 + number)
        for folder in ("actions", f"mirrored/{split}", f"masks/{split}"):
            (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        for path in (f"actions/{1 + number}.npy", f"mirrored/{split}/1.npy"):
            np.save(tmp_path / path, np.arange(4.0 + number)[:, None])
        np.save(tmp_path / f"masks/{split}/1.npy", np.full((4 + number, 24, 32), number))
    words = ("videos", tmp_path / "source", "--actions")
    with pytest.raises(UserError, match="actions: train and test both have 1, so folders train and test are needed"):
        run(tmp_path, *words, tmp_path / "actions")
    run(tmp_path, *words, tmp_path / "mirrored", "--masks", tmp_path / "masks")
    (tmp_path / "source/test/1.mp4").rename(tmp_path / "source/test/2.mp4")
    for name in ("val/3.mp4", "4.mp4"):
        write_video(tmp_path / f"source/{name}", 4)
    capsys.readouterr()
    run(tmp_path / "flat", *words, tmp_path / "actions")
    assert "not taken: 4.mp4, val; videos end in .avi" in capsys.readouterr().out
    for number, split in enumerate(("train", "test")):
        dataset = Dataset(tmp_path, "own", split)
        assert dataset.num_frames == Dataset(tmp_path / "flat", "own", split).num_frames == 4 + number
        assert (dataset.masks(np.arange(dataset.num_frames)) == 255 * number).all()


def test_a_split_of_which_all_is_bad(tmp_path):
    """Videos of the other one do not take its place."""
    for name in ("train/a", "train/b", "test/c"):
        write_video(tmp_path / f"source/{name}.mp4", 4)
    (tmp_path / "source/test/c.mp4").write_bytes(b"")
    with pytest.raises(UserError, match=r"2 episodes .* for training, 0 for testing; one is needed for each"):
        run(tmp_path, "videos", tmp_path / "source", "--skip-bad")


def test_names_of_what_is_beside(tmp_path, capsys):
    """Suffixes in capitals, accents that are letters of their own, an empty folder; what is not taken is said."""
    decomposed, composed = "cafe\u0301", "caf\u00e9"
    for name in (decomposed, "b"):
        write_video(tmp_path / f"source/{name}.mp4", 4)
    write_video(tmp_path / "source/c.m4v", 4, output=("-f", "mp4"))
    for folder in ("masks", "actions"):
        (tmp_path / folder / "b").mkdir(parents=True)
        for name in (composed, "b"):
            shape = (4, 24, 32) if folder == "masks" else (4, 1)
            with (tmp_path / folder / f"{name}.NPY").open("wb") as file:
                np.save(file, np.ones(shape))
    words = [word for folder in ("masks", "actions") for word in (f"--{folder}", tmp_path / folder)]
    run(tmp_path, "videos", tmp_path / "source", "--size", 24, *words)
    assert "not taken: c.m4v; videos end in .avi" in capsys.readouterr().out
    plan = plan_of(tmp_path)
    assert plan["masks"] and plan["action_dim"] == 1 and len(opened(tmp_path)) == 2


def test_errors_of_the_system_leave_nothing_out(tmp_path, clips):
    """With --skip-bad too: they would drop an episode for good."""
    write_beside_clips(tmp_path / "actions", np.zeros)
    path = tmp_path / "actions/clip9.npy"
    path.unlink()
    path.symlink_to("/proc/self/mem")  # reading it is an input/output error
    with pytest.raises(OSError, match=r"Input/output error: '.*clip9\.npy'"):
        run(tmp_path / "data", "videos", clips, "--actions", tmp_path / "actions", "--skip-bad")
    assert not list((tmp_path / "data").rglob("*.h5"))


def test_an_episode_larger_than_a_shard_is_refused(tmp_path, clips, monkeypatch):
    monkeypatch.setattr(shards, "SHARD_BYTES", 9 * 16 * 16 * 3)
    with pytest.raises(UserError, match=r"an episode of 10 frames takes .* a shard has at most .* --clip-seconds"):
        run(tmp_path, "videos", clips)


# ----------------------------------------------------------------------------------------------- actions and masks


def write_actions(path: Path, actions: np.ndarray) -> None:
    path.parent.mkdir(exist_ok=True)
    if path.suffix == ".npy":
        np.save(path, actions)
    elif path.suffix == ".csv":
        lines = [",".join(map(repr, row.tolist())) for row in actions]
        header = ["left,right"] if path.stem == "clip9" else []  # both kinds are common
        path.write_text("\n".join([*header, *lines]) + "\n", encoding="utf-8")
    else:
        pq.write_table(pa.table({"left": actions[:, 0], "right": actions[:, 1]}), path)


def write_beside_clips(folder: Path, make: Callable[[int], np.ndarray], suffix: str = ".npy") -> None:
    """Writes beside `clips` what `make` gives for the number of frames of each."""
    for name, frames in CLIPS.items():
        write_actions(folder / f"{name}{suffix}", make(frames))


@pytest.mark.parametrize("suffix", [".npy", ".csv", ".parquet"])
@pytest.mark.parametrize("short", [0, 1])
def test_actions_beside_videos(tmp_path, clips, suffix, short):
    """T or T-1 rows; normalised by the percentiles of the train split, and undone again; NaN at the end."""
    rng, actions = np.random.default_rng(1), {}
    for name, frames in CLIPS.items():
        rows = rng.normal(40, 30, (frames, 2))
        rows[-1] = np.nan  # what the last row holds is never looked at
        actions[f"{name}.mp4"] = rows
        write_actions(tmp_path / f"actions/{name}{suffix}", rows[: frames - short])
    run(tmp_path, "videos", clips, "--actions", tmp_path / "actions")
    found, plan = opened(tmp_path), plan_of(tmp_path)
    train = np.concatenate([actions[source][:-1] for (source, _), one in found.items() if one["split"] == "train"])
    low, high = np.percentile(train, (0.1, 99.9), axis=0)
    assert np.allclose(plan["action_scale"]["low"], low) and np.allclose(plan["action_scale"]["high"], high)
    for (source, _), one in found.items():
        expected = 2 * (actions[source] - low) / (high - low) - 1
        assert np.isnan(one["action"][-1]).all()
        assert np.allclose(one["action"][:-1], expected[:-1], atol=1e-5)
    dataset = Dataset(tmp_path, "own", "train")
    assert np.allclose(dataset.original_action(dataset.action[dataset.transitions]), train, atol=1e-3)


@pytest.mark.parametrize("reduce", ["last", "sum", "mean"])
def test_actions_between_two_kept_frames_become_one(tmp_path, clips, reduce):
    write_beside_clips(tmp_path / "actions", lambda frames: np.arange(float(frames))[:, None] ** 2)
    run(tmp_path, "videos", clips, "--fps", 10 / 3, "--reduce", reduce, "--actions", tmp_path / "actions")
    found = opened(tmp_path)["clip11.mp4", 0.0]
    rows = np.arange(9.0).reshape(3, 3) ** 2
    expected = {"last": rows[:, -1], "sum": rows.sum(1), "mean": rows.mean(1)}[reduce]
    assert found["shown"] == [0, 3, 6, 9]
    dataset = Dataset(tmp_path, "own", found["split"])
    assert np.allclose(dataset.original_action(found["action"][:-1])[:, 0], expected, atol=1e-3)


@pytest.mark.parametrize(
    ("first", "rows", "found"),
    [
        ("left,right\n", 10, 10),
        ('\ufeff"left","right"\n', 9, 9),
        ("# left, right\n", 9, 9),
        ("0,1\n", 10, 10),  # pandas, columns without names
        ("\ufeff0.5,1.5\n", 8, 9),  # a byte order mark and no header
        ('"0.5","1.5"\n', 9, 10),
        ("+0.5,1e3\n", 9, 10),
        ("NA,1\n", 9, 10),
        (",0.5\n", 9, 10),
        ("True,False\n", 0, 1),
    ],
)
def test_what_is_a_header(tmp_path, first, rows, found):
    """Whatever holds a number, nothing, true or false is a row, and no row is lost: with T-1 all would shift by one."""
    path = tmp_path / "a.csv"
    path.write_text(first + "0.25,0.75\n" * rows, encoding="utf-8")
    columns, names = recordings.read_table(path, 10)
    assert [len(column) for column in columns] == [found] * 2 and (names is None) == (found > rows)


def test_empty_lines_and_the_numbers_of_rows(tmp_path):
    """An empty line may be a row whose action is missing; what pandas keeps beside the columns is no action."""
    path = tmp_path / "a.csv"
    path.write_text("speed\n" + "0.5\n" * 4 + "\n" + "0.5\n" * 5)
    assert len(recordings.read_table(path, 9)[0][0]) == 9
    with pytest.raises(UserError, match="has empty lines, and 9 rows for 10 frames: are these"):
        recordings.read_table(path, 10)
    for text, rows in (("speed\n\n" + "0.5\n" * 9, 9), ("0.5\r\n\r\n" * 9, 9), ("0.5,1.5\n\n0.5,1.5\n" * 4, 8)):
        path.write_text(text)  # below a header, behind each row, between rows of several columns: no row
        assert len(recordings.read_table(path, rows + 1)[0][0]) == rows
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"x": [0.5, 1.5], "__index_level_0__": [100, 101]}), path)
    columns, names = recordings.read_table(path, 2)
    assert names == ["x"] and columns[0].tolist() == [[0.5], [1.5]]
    pq.write_table(pa.table({"__index_level_0__": [100, 101]}), path)
    with pytest.raises(UserError, match="holds nothing but numbers of rows"):
        recordings.read_table(path, 2)


def test_columns_in_another_order(tmp_path, clips):
    """They are put into the order of the first file, by their names."""
    for name, frames in CLIPS.items():
        columns = {"left": np.arange(float(frames)), "right": -10.0 * np.arange(frames)}
        table = pa.table(dict(reversed(columns.items())) if name == "clip10" else columns)
        write_table(tmp_path / f"actions/{name}.parquet", table)
    run(tmp_path, "videos", clips, "--actions", tmp_path / "actions")
    assert plan_of(tmp_path)["action_scale"]["names"] == ["left", "right"]
    dataset = Dataset(tmp_path, "own", "train")
    for one in opened(tmp_path).values():
        steps = np.arange(len(one["action"]) - 1.0)
        actions = dataset.original_action(one["action"][:-1])
        assert np.allclose(actions, np.stack([steps, -10 * steps], axis=1), atol=1e-3)


@pytest.mark.parametrize("how", ["last", "sum", "mean"])
def test_actions_of_a_frame_that_is_shown_twice(how):
    """A sum keeps the total; last and mean repeat."""
    seconds = np.array([0, 0.1, 0.2, 0.3, 0.4, 0.7, 0.8, 0.9, 1.0])
    action = 10.0 ** np.arange(9)[:, None]
    recording = recordings.Recording("a", np.zeros((9, 2)), seconds, {"action": action})
    assert recording.kept_frames(10, None).tolist() == [0, 1, 2, 3, 4, 4, 4, 5, 6, 7, 8]
    found = recording.at_rate(10, None, how).tables["action"][:-1, 0]
    repeated = [0, 0] if how == "sum" else [1e4, 1e4]
    assert np.allclose(found, [1, 10, 100, 1000, *repeated, 1e4, 1e5, 1e6, 1e7])
    clips = recording.at_rate(10, None, how).clips(0.2)  # a pause is as long as it lasts
    assert [len(clip.place) for clip in clips] == [2, 2, 2, 2, 2, 1]
    assert np.allclose([clip.seconds[0] for clip in clips], np.arange(6) / 5)


@pytest.mark.parametrize(
    ("last", "kinds", "names", "said"),
    [
        (2.0, "iif", ["0", "1", "2"], "3 categories"),  # one file has floats, and all are whole
        (np.nan, "fff", ["0", "1", "2"], "3 categories"),  # no last value, which makes a csv's integers floats
        (2.0, "fff", None, "numbers, normalised"),
        (0.5, "iif", None, "numbers, normalised"),
    ],
)
def test_what_is_a_category(tmp_path, clips, capsys, last, kinds, names, said):
    """It becomes a vector of zeros and a one."""
    for (name, frames), kind in zip(CLIPS.items(), kinds):
        rows = (np.arange(frames) % 3).astype(float)
        rows[-2:] = (0, last) if np.isnan(last) else last if kind == "f" else 0
        write_actions(tmp_path / f"actions/{name}.npy", rows.astype({"i": int, "f": float}[kind]))
    words = ("videos", clips, "--actions", tmp_path / "actions")
    run(tmp_path, *words)
    assert plan_of(tmp_path)["action_scale"]["names"] == names and f"actions: {said}" in capsys.readouterr().out
    if names:
        actions = opened(tmp_path)["clip9.mp4", 0.0]["action"]
        assert (actions[:6] == np.eye(3)[[0, 1, 2, 0, 1, 2]]).all() and np.isnan(actions[-1]).all()
        with pytest.raises(UserError, match=r"3 different integers, taken as categories, .* with --reduce last"):
            run(tmp_path / "other", *words, "--reduce", "sum")


def test_constant_and_rare_dimensions(tmp_path, clips, capsys):
    """A constant dimension is zero, which is said; one that moves in less than 0.1% of the steps keeps its range."""

    def actions(frames: int) -> np.ndarray:
        return np.stack([np.full(frames, 5.0), np.linspace(-90, 90, frames), np.zeros(frames)], axis=1)

    write_beside_clips(tmp_path / "actions", actions)
    run(tmp_path, "videos", clips, "--actions", tmp_path / "actions")
    assert "actions: constant, stored as zero: 0, 2" in capsys.readouterr().out
    dataset = Dataset(tmp_path, "own", "train")
    action = dataset.action[dataset.transitions]
    assert (action[:, [0, 2]] == 0).all() and action[:, 1].min() < -0.99
    assert (dataset.original_action(action)[:, 0] == 5).all()
    rare = np.zeros((2000, 1))
    rare[7] = 1
    episode = recordings.Recording("rare", np.zeros((2000, 2)), None, {"action": rare})
    scale = recordings.normalise_actions([episode], [], ["gripper"], False)
    assert scale == {"low": [0], "high": [1], "names": ["gripper"]}


def test_masks_beside_videos(tmp_path, clips):
    """Arrays or folders of images, of every frame; they become square as the frames do."""
    (tmp_path / "masks/clip9").mkdir(parents=True)
    for name, frames in CLIPS.items():
        masks = np.zeros((frames, 24, 32), np.uint8)
        for frame, mask in enumerate(masks):
            mask[4:12, 8 + frame : 16 + frame] = 1 if name == "clip10" else 255
            if name == "clip9":
                Image.fromarray(mask).save(tmp_path / f"masks/clip9/{frame}.png")
        if name != "clip9":
            np.save(tmp_path / f"masks/{name}.npy", masks)
    run(tmp_path, "videos", clips, "--size", 24, "--masks", tmp_path / "masks", "--fps", 5)
    assert plan_of(tmp_path)["masks"]
    for one in opened(tmp_path).values():
        masks = np.unpackbits(one["video/mask"], axis=1).reshape(-1, 24, 24)
        for frame, mask in zip(one["shown"], masks):
            assert mask.sum() == 64 and mask[4:12, 4 + frame : 12 + frame].all()


# ------------------------------------------------------------------------------------- what is wrong with a video


def truncated_video(path: Path) -> None:
    """Cut off near its end, where a player shows 19 of 60 frames and says nothing."""
    write_video(path, 60, output=("-movflags", "+faststart"))
    os.truncate(path, path.stat().st_size * 2 // 3)


def images_of_two_sizes(folder: Path) -> None:
    write_images(folder, 3)
    Image.fromarray(picture(3, 16, 16)).save(folder / "3.png")


def masks_of_two_sizes(folder: Path) -> None:
    """A single mask of another size, which would be scaled by itself."""
    folder.mkdir()
    for number in range(10):
        mask = np.zeros((24, 32) if number != 2 else (16, 16), bool)
        Image.fromarray(mask).save(folder / f"{number}.png")


def put(path: Path, content: Any) -> None:
    """Writes a file: an array, a text, bytes, or what a function of the path writes."""
    if callable(content):
        content(path)
    elif isinstance(content, np.ndarray):
        np.save(path, content)
    else:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())


TEN = np.zeros((10, 2))
# A bad episode beside good ones, or what belongs to its ten frames; and what is said of it.
BAD_VIDEOS: list[tuple[str, Any, str]] = [
    ("source/odd.mp4", truncated_video, "odd.mp4: is cut off"),
    ("source/odd.mp4", b"", "odd.mp4: is empty"),
    ("source/odd", Path.mkdir, "odd: holds no images"),
    ("source/odd", images_of_two_sizes, r"odd/3\.png: the size changes"),
    ("source/odd.mp4", partial(write_video, count=10, rate=2), "odd.mp4: has 2 frames per second, fewer than --fps 5"),
    ("actions/odd.npy", TEN[:8], r"odd\.npy: 8 rows for 10 frames"),
    ("actions/odd.npy", np.where(np.arange(10) == 6, np.nan, TEN.T).T, r"odd\.npy: row 6: .* not finite, in odd\.mp4"),
    ("actions/x.npy", TEN, r"actions: of odd\.npy, odd\.csv and odd\.parquet one is needed, 0 are there"),
    ("actions/odd.csv", "left\nquickly\n", r"odd\.csv: a column of string where numbers are expected"),
    ("actions/odd.csv", "up,down\n" + "0.5,1.5\n" * 10, "row 0: the columns differ .*: left, right and up, down"),
    ("actions/odd.npy", np.zeros(10, "M8[s]"), r"datetime64\[s\] of shape \(10,\) where numbers are expected"),
    ("actions/odd.npy", np.zeros((10, 3, 2)), r"odd\.npy: has the shape \(10, 3, 2\); a table has a row of numbers"),
    ("actions/odd.npy", TEN[:, :0], r"odd\.npy: float64 of shape \(10, 0\) where numbers are expected"),
    # As pandas writes columns without names, and T-1 rows.
    ("actions/odd.csv", "0,1\n" + "0.5,1.5\n" * 9, r"odd\.csv: is 0,1 above it a header\? Name the columns"),
    ("masks/odd.npy", np.zeros((9, 24, 32), bool), r"odd\.npy: 9 masks for 10 frames"),
    ("masks/odd.npy", np.full((10, 24, 32), 7, np.uint8), r"odd\.npy: uint8 from 7 to 7; masks hold booleans"),
    ("masks/odd.npy", np.zeros((10, 32, 24)), r"odd\.npy: mask 0 has the shape \(32, 24\), its frame \(24, 32\)"),
    ("masks/odd", masks_of_two_sizes, r"masks/odd: mask 2 has the shape \(16, 16\), its frame \(24, 32\)"),
]


@pytest.mark.parametrize(("file", "content", "message"), BAD_VIDEOS)
def test_a_bad_video_is_an_error_or_left_out(tmp_path, clips, capsys, file, content, message):
    """One line that names the file. With --skip-bad the others are the dataset, and what was left out is listed."""
    words, folder = ["videos", shutil.copytree(clips, tmp_path / "source"), "--fps", 5], file.split("/")[0]
    if folder != "source":
        write_video(tmp_path / "source/odd.mp4", 10)
        words += [f"--{folder}", tmp_path / folder]
        (tmp_path / folder).mkdir()
    if folder == "masks":
        write_beside_clips(tmp_path / folder, lambda frames: np.zeros((frames, 24, 32)))
    elif folder == "actions":
        write_beside_clips(tmp_path / folder, lambda frames: np.random.default_rng(0).random((frames, 2)), ".csv")
    put(tmp_path / file, content)
    with pytest.raises(UserError, match=message) as caught:
        run(tmp_path / "data", *words)
    assert str(caught.value).isprintable() and "--skip-bad" in str(caught.value)
    assert not list((tmp_path / "data").iterdir())
    run(tmp_path / "data", *words, "--skip-bad")
    assert {source for source, _ in opened(tmp_path / "data")} == {f"{name}.mp4" for name in CLIPS}
    assert re.search(f"left out: .*{message}", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--name", "cheetah-run"), "--name 'cheetah-run': take letters"),
        (("--name", "a b"), "--name 'a b': take letters"),
        (("--name", "DAVIS"), "--name 'DAVIS': take letters"),
        (("--size", 20), "--size is 20, must be a multiple of 8"),
        (("--masks", "nowhere"), "nowhere: no such folder"),
    ],
)
def test_impossible_options(tmp_path, clips, words, message):
    with pytest.raises(UserError, match=message):
        run(tmp_path, "videos", clips, *words)
    assert not contents(tmp_path)


def test_a_folder_without_videos(tmp_path):
    write_images(tmp_path / "source", 2)
    with pytest.raises(UserError, match="source: holds no video files and no folders of images"):
        run(tmp_path, "videos", tmp_path / "source")
    (tmp_path / "one").mkdir()
    write_images(tmp_path / "one/episode", 2)
    with pytest.raises(UserError, match="1 episodes of two frames and more for training, 0 for testing; one is needed"):
        run(tmp_path, "videos", tmp_path / "one")


# ----------------------------------------------------------------------------------------------------------- LeRobot

LENGTHS = (12, 7, 15, 9, 11)
FRONT, WRIST, THUMB = "observation.images.front", "observation.images.wrist", "observation.thumb"


def write_lerobot(root: Path, version: str, cameras=(FRONT, WRIST, THUMB)) -> None:
    """A dataset as lerobot 0.3.3 (v2.1) and 0.4.4 (v3.0) write it: two videos, pictures in the tables, state, action.

    What the real packages wrote was imported too: a script of twenty lines in an environment with that version calls
    `LeRobotDataset.create`, `add_frame`, `save_episode` (and `finalize`) with these features; see docs/videos.md.
    """
    old, fps, videos = version == "v2.1", 10, [camera for camera in (FRONT, WRIST) if camera in cameras]
    features = {
        FRONT: {"dtype": "video", "shape": [24, 32, 3], "names": ["height", "width", "channels"]},
        WRIST: {"dtype": "video", "shape": [3, 24, 32], "names": ["channels", "height", "width"]},
        THUMB: {"dtype": "image", "shape": [24, 32, 3], "names": ["height", "width", "channels"]},
    }
    features = {name: feature for name, feature in features.items() if name in cameras}
    features |= {"observation.state": {"dtype": "float32", "shape": [3], "names": {"motors": ["x", "y", "z"]}}}
    features |= {"action": {"dtype": "float32", "shape": [2], "names": [["pan", "tilt"]]}}
    about = {"codebase_version": version, "fps": fps, "chunks_size": 1000, "features": features}
    if old:
        about["data_path"] = "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet"
        about["video_path"] = "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4"
    else:
        about["data_path"] = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
        about["video_path"] = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
    (root / "meta").mkdir(parents=True)
    (root / "meta/info.json").write_text(json.dumps(about), encoding="utf-8")
    tables, listed, start = [], [], 0
    for episode, length in enumerate(LENGTHS):
        frame = np.arange(length)
        action = np.stack([90 * np.sin(frame + episode), frame], axis=1)
        columns: dict[str, Any] = {
            "observation.state": pa.FixedSizeListArray.from_arrays(pa.array(np.repeat(frame, 3), pa.float32()), 3),
            "action": pa.FixedSizeListArray.from_arrays(pa.array(action.ravel(), pa.float32()), 2),
            "timestamp": pa.array(frame / fps, pa.float32()),
            "frame_index": frame,
            "episode_index": np.full(length, episode),
            "index": frame + start,
        }
        if THUMB in cameras:
            columns[THUMB] = [as_image(picture(number + episode)) for number in range(length)]
        tables.append(pa.table(columns))
        about = {"episode_index": episode, "length": length, "tasks": ["move"], "dataset_from_index": start}
        # v3.0 puts several episodes into a file: here the first three, and the last two.
        file, before = (0, sum(LENGTHS[:episode])) if episode < 3 else (1, sum(LENGTHS[3:episode]))
        for camera in videos:
            about |= {f"videos/{camera}/chunk_index": 0, f"videos/{camera}/file_index": file}
            about |= {f"videos/{camera}/from_timestamp": before / fps}
            about |= {f"videos/{camera}/to_timestamp": (before + length) / fps}
        listed.append(about | {"data/chunk_index": 0, "data/file_index": file})
        start += length
    if old:
        lines = [json.dumps({key: about[key] for key in ("episode_index", "tasks", "length")}) for about in listed]
        (root / "meta/episodes.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    else:
        write_table(root / "meta/episodes/chunk-000/file-000.parquet", pa.Table.from_pylist(listed))
    for file, part in enumerate([range(one, one + 1) for one in range(5)] if old else [range(3), range(3, 5)]):
        name = f"episode_{file:06d}" if old else f"file-{file:03d}"
        write_table(root / f"data/chunk-000/{name}.parquet", pa.concat_tables([tables[one] for one in part]))
        for camera in videos:
            first = 20 * (camera == WRIST)
            shown = [picture(first + episode + n) for episode in part for n in range(LENGTHS[episode])]
            folder = f"chunk-000/{camera}" if old else f"{camera}/chunk-000"
            write_pictures(root / f"videos/{folder}/{name}.mp4", shown)


def write_table(path: Path, table: pa.Table) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path, row_group_size=10)


@pytest.fixture(scope="module")
def robots(tmp_path_factory) -> dict[str, Path]:
    """A dataset with one camera in each format. No test changes them."""
    folder = tmp_path_factory.mktemp("robots")
    for version in ("v2.1", "v3.0"):
        write_lerobot(folder / version, version, cameras=(FRONT,))
    return {version: folder / version for version in ("v2.1", "v3.0")}


@pytest.mark.parametrize("version", ["v2.1", "v3.0"])
def test_lerobot(tmp_path, version):
    """Cameras by their type, pictures in tables too; frames, states and actions are those of their episode."""
    write_lerobot(tmp_path / "robot", version)
    message = f"3 cameras; choose with --camera one of: {FRONT}, {WRIST}, {THUMB}"
    with pytest.raises(UserError, match=re.escape(message)):
        run(tmp_path, "lerobot", tmp_path / "robot")
    for first, camera in ((0, FRONT), (20, WRIST), (0, THUMB)):
        name = camera.split(".")[-1]
        run(tmp_path, "lerobot", tmp_path / "robot", "--name", name, "--camera", camera, "--size", 16)
        found, dataset = opened(tmp_path, name), Dataset(tmp_path, name, "train")
        assert len(found) == len(LENGTHS)
        for episode, length in enumerate(LENGTHS):
            one, frame = found[f"episode {episode}", 0.0], np.arange(length)
            assert one["shown"] == (first + episode + frame).tolist()
            assert (one["state"] == frame[:, None]).all()
            actions = dataset.original_action(one["action"])[:-1]
            assert np.allclose(actions, np.stack([90 * np.sin(frame + episode), frame], 1)[:-1], atol=1e-3)
        assert dataset.plan["action_scale"]["names"] == ["pan", "tilt"] and dataset.plan["fps"] == 10


@pytest.mark.parametrize("version", ["v2.1", "v3.0"])
@pytest.mark.parametrize("words", [("--stride", 3), ("--fps", 10 / 3)])
def test_lerobot_thinned_out(tmp_path, robots, version, words):
    run(tmp_path, "lerobot", robots[version], "--episodes", "1:4", "--reduce", "sum", *words)
    found = opened(tmp_path)
    assert {source: one["shown"] for (source, _), one in found.items()} == {
        f"episode {episode}": list(range(episode, episode + LENGTHS[episode], 3)) for episode in (1, 2, 3)
    }
    dataset = Dataset(tmp_path, "own", "train")
    assert dataset.original_action(found["episode 2", 0.0]["action"])[:-1, 1] == pytest.approx(
        [3, 12, 21, 30], abs=1e-3
    )
    assert dataset.plan["fps"] == pytest.approx(10 / 3, abs=1e-3)


def edit_episodes(root: Path, edit: Callable[[list[dict[str, Any]]], None]) -> None:
    path = root / "meta/episodes/chunk-000/file-000.parquet"
    rows = pq.read_table(path).to_pylist()
    edit(rows)
    pq.write_table(pa.Table.from_pylist(rows), path)


def test_wrong_files_of_tables_in_the_list_do_no_harm(tmp_path, robots):
    shutil.copytree(robots["v3.0"], tmp_path / "robot")
    edit_episodes(tmp_path / "robot", lambda rows: [row.update({"data/file_index": 7}) for row in rows])
    for name, root in (("own", tmp_path / "robot"), ("right", robots["v3.0"])):
        run(tmp_path, "lerobot", root, "--name", name, "--size", 16)
    ours, theirs = opened(tmp_path), opened(tmp_path, "right")
    assert all((ours[key]["action"][:-1] == theirs[key]["action"][:-1]).all() for key in theirs)


@pytest.mark.parametrize("version", ["v2.1", "v3.0"])
def test_episodes_without_an_entry_matter_where_they_are_wanted(tmp_path, robots, version):
    root = shutil.copytree(robots[version], tmp_path / "robot")
    if version == "v2.1":
        put(root / LIST, replaced('{"episode_index": 4, "tasks": ["move"], "length": 11}\n', ""))
    else:
        edit_episodes(root, lambda rows: rows.pop())
    run(tmp_path, "lerobot", root, "--episodes", "0:3")
    assert len(opened(tmp_path)) == 3
    with pytest.raises(UserError, match="the tables have 1 episodes that it does not list: 4"):
        run(tmp_path / "all", "lerobot", root, "--episodes", "0:5")


def test_a_video_of_several_episodes_is_counted_once(tmp_path, robots, monkeypatch):
    decoded = []
    monkeypatch.setattr(lerobot, "decode_all", lambda path: decoded.append(path.name) or recordings.decode_all(path))
    run(tmp_path, "lerobot", robots["v3.0"])
    assert sorted(decoded) == ["file-000.mp4", "file-001.mp4"]


def test_a_folder_called_video_and_linked_folders(tmp_path, robots):
    shutil.copytree(robots["v2.1"], tmp_path / "robot")
    (tmp_path / "robot/videos").rename(tmp_path / "robot/video")
    for name in ("data", "video"):
        (tmp_path / "robot" / name).rename(tmp_path / name)
        (tmp_path / "robot" / name).symlink_to(tmp_path / name)
    (tmp_path / "robot/back").symlink_to(tmp_path / "robot")
    (tmp_path / "video/back").symlink_to(tmp_path / "robot")
    run(tmp_path, "lerobot", tmp_path / "robot")
    assert opened(tmp_path)["episode 4", 0.0]["shown"] == list(range(4, 15))


# ------------------------------------------------------------------------------------- what is wrong with a robot's


def set_column(path: Path, name: str, values: list) -> None:
    table = pq.read_table(path)
    pq.write_table(table.set_column(table.column_names.index(name), name, pa.array(values)), path)


def replaced(old: str, new: str) -> Callable[[Path], None]:
    """Edits a text."""

    def edit(path: Path) -> None:
        text = path.read_text(encoding="utf-8")
        assert old in text
        path.write_text(text.replace(old, new), encoding="utf-8")

    return edit


VIDEO = f"videos/chunk-000/{FRONT}/episode_000001.mp4"
TABLE, LIST = "data/chunk-000/episode_000001.parquet", "meta/episodes.jsonl"
NO_LIST = r"meta/episodes\.jsonl: cannot be read as a list of episodes, at "
ONE_NAN = [[0.0, 0.0]] * 3 + [[0.0, np.nan]] + [[0.0, 0.0]] * 3
# What is wrong with the second episode in v2.1, which has seven frames, and what is said of it.
BAD_EPISODES: list[tuple[str, Any, str]] = [
    (VIDEO, Path.unlink, r"episode_000001\.mp4: no such video, but it is listed"),
    (VIDEO, truncated_video, r"episode_000001\.mp4: is cut off"),
    (VIDEO, partial(write_video, count=6), r"episode_000001\.mp4: has 6 frames, its episodes have 7"),
    (VIDEO, partial(write_video, count=9), r"episode_000001\.mp4: has 9 frames, its episodes have 7"),
    (LIST, replaced('{"episode_index": 1, "tasks": ["move"], "length": 7}', ""), "meta: the tables have 1 .* list: 1"),
    (LIST, replaced('1, "tasks": ["move"], "length": 7}', "1"), f"{NO_LIST}.*episode_index"),
    (LIST, replaced('"length": 7', '"length": null'), f"{NO_LIST}.*NoneType"),
    (TABLE, partial(set_column, name="action", values=ONE_NAN), "row 3: action is not finite, in episode 1"),
    (TABLE, lambda path: pq.write_table(pq.read_table(path).slice(1), path), "data: 6 rows for the 7 frames of"),
    (TABLE, partial(os.truncate, length=100), r"episode_000001\.parquet: cannot be read as a table"),
]


@pytest.mark.parametrize(("file", "content", "message"), BAD_EPISODES)
def test_a_bad_episode_is_an_error_or_left_out(tmp_path, robots, capsys, file, content, message):
    words = ("lerobot", shutil.copytree(robots["v2.1"], tmp_path / "robot"))
    put(tmp_path / "robot" / file, content)
    with pytest.raises(UserError, match=message) as caught:
        run(tmp_path / "data", *words)
    assert str(caught.value).isprintable() and "--skip-bad" in str(caught.value)
    shutil.rmtree(tmp_path / "data")
    run(tmp_path / "data", *words, "--skip-bad")
    assert {source for source, _ in opened(tmp_path / "data")} == {f"episode {episode}" for episode in (0, 2, 3, 4)}
    assert re.search(f"left out: .*{message}", capsys.readouterr().out)
    if "episode_index" not in message:  # whose number is not known
        run(tmp_path / "others", *words, "--episodes", "2:5")
        assert {source for source, _ in opened(tmp_path / "others")} == {f"episode {episode}" for episode in (2, 3, 4)}


def test_a_bad_picture_in_a_table(tmp_path, capsys):
    write_lerobot(tmp_path / "robot", "v3.0", cameras=(THUMB,))
    path = tmp_path / "robot/data/chunk-000/file-001.parquet"
    pictures = pq.read_table(path)[THUMB].to_pylist()
    pictures[2]["bytes"] = pictures[2]["bytes"][:40]
    set_column(path, THUMB, pictures)
    words = ("lerobot", tmp_path / "robot")
    with pytest.raises(UserError, match=r"file-001\.parquet: a picture in it cannot be read .* --skip-bad"):
        run(tmp_path / "data", *words)
    assert not list((tmp_path / "data").rglob("*.h5"))
    run(tmp_path, *words, "--skip-bad")
    found = opened(tmp_path)
    assert {source for source, _ in found} == {f"episode {episode}" for episode in (0, 1, 2, 4)}
    assert found["episode 4", 0.0]["shown"] == list(range(4, 15))
    assert "left out: " in capsys.readouterr().out


@pytest.mark.parametrize(("version", "files"), [("v2.1", (1, 2)), ("v3.0", (0,))])
def test_what_is_fetched_from_the_hub(tmp_path, robots, monkeypatch, version, files):
    """The list first, then what belongs to the episodes that are wanted. Here the hub is a folder."""
    fetched = tmp_path / "hub"

    def fetch(repository: str, patterns: list[str]) -> Path:
        for path in robots[version].rglob("*"):
            name = str(path.relative_to(robots[version]))
            if path.is_file() and any(fnmatch.fnmatch(name, pattern) for pattern in patterns):
                (fetched / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, fetched / name)
        return fetched

    monkeypatch.setattr(lerobot, "fetch", fetch)
    run(tmp_path, "lerobot", "someone/robot", "--episodes", "1:3")
    assert {source for source, _ in opened(tmp_path)} == {"episode 1", "episode 2"}
    videos = sorted(path.name for path in fetched.rglob("*.mp4"))
    assert videos == [f"episode_{n:06d}.mp4" if version == "v2.1" else f"file-{n:03d}.mp4" for n in files]
    assert len(list(fetched.glob("data/**/*.parquet"))) == 2


def listed(row: int, **changes: Any) -> Callable[[Path], None]:
    """Edits what the list says of the video of an episode."""
    changes = {f"videos/{FRONT}/{name}": value for name, value in changes.items()}
    return lambda path: edit_episodes(path.parents[3], lambda rows: rows[row].update(changes))


INFO, EPISODES = "meta/info.json", "meta/episodes/chunk-000/file-000.parquet"
NO_INFO = r"meta/info\.json: cannot be read as the description of a LeRobot dataset"
BEYOND = listed(2, file_index=1, from_timestamp=2.0, to_timestamp=3.5)
BAD_DESCRIPTIONS: list[tuple[str, Any, str]] = [
    ("meta", shutil.rmtree, rf"{NO_INFO} \(.*No such file"),
    (INFO, b"", NO_INFO),
    (INFO, b"{}", r"meta/info\.json: codebase_version is None, fps is None, features is None; the formats"),
    (INFO, replaced('"features": {', '"features": [], "no": {'), r"meta/info\.json: features is \[\]; the formats"),
    (INFO, replaced('"fps": 10', '"fps": "10"'), r"meta/info\.json: fps is 10; the formats"),
    (INFO, replaced('"v3.0"', '"v1.6"'), r"codebase_version is v1\.6; the formats v2\.1 and v3\.0 can be read"),
    ("meta/episodes", shutil.rmtree, "meta: lists 0 episodes"),
    (EPISODES, b"", r"meta/episodes/chunk-000/file-000\.parquet: cannot be read as a list of episodes"),
    (EPISODES, listed(1, file_index=5), r"file-005\.mp4: no such video"),
    (EPISODES, listed(1, file_index=1), r"meta: [14] and [14] claim the same frames of videos/.*/file-001\.mp4"),
    (EPISODES, BEYOND, r"file-00[01]\.mp4: has (34|20) frames, its episodes have (19|35)"),
    (EPISODES, listed(2, to_timestamp=3.0), "episode 2 has 15 frames, but 11 by its times"),
    # Which of the tables is bad cannot be told.
    ("data/chunk-000/file-001.parquet", partial(set_column, name="action", values=[[0.0] * 3] * 20), "of one kind"),
]


@pytest.mark.parametrize(("file", "content", "message"), BAD_DESCRIPTIONS)
def test_faults_of_the_description(tmp_path, robots, file, content, message):
    shutil.copytree(robots["v3.0"], tmp_path / "robot")
    put(tmp_path / "robot" / file, content)
    with pytest.raises(UserError, match=message) as caught:
        run(tmp_path / "data", "lerobot", tmp_path / "robot")
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--camera", "eye"), f"no camera eye; choose with --camera one of: {FRONT}"),
        (("--action", "torque"), "--action torque: .* has no such feature; it has .*action"),
        (("--episodes", "3"), "--episodes 3: write the first one"),
        (("--episodes", "4:2"), "meta: lists 5 episodes, 0 to 4, none of them in --episodes 4:2"),
        (("--episodes", "7:9"), "meta: lists 5 episodes, 0 to 4, none of them in --episodes 7:9"),
        (("--fps", 5, "--stride", 2), "--fps and --stride both say"),
    ],
)
def test_impossible_options_for_lerobot(tmp_path, robots, words, message):
    with pytest.raises(UserError, match=message):
        run(tmp_path, "lerobot", robots["v2.1"], *words)
    assert not contents(tmp_path)


def test_a_dataset_on_the_hub_without_a_network(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=r"someone/robot: cannot be had from the hub .* or give a folder"):
        run(tmp_path, "lerobot", "someone/robot")


def test_a_real_robot(tmp_path):
    """Three episodes of a Unitree G1, AV1, 26 joint actions."""
    source = ROOT.parent / "shared/lerobot/g1-three"
    if not source.is_dir():
        pytest.skip(f"{source} is not there")
    run(tmp_path, "lerobot", source, "--size", 32, "--fps", 10)
    dataset, found = Dataset(tmp_path, "own", "train"), opened(tmp_path)
    assert (dataset.action_dim, dataset.state_dim, dataset.plan["fps"]) == (26, 26, 10)
    assert dataset.plan["action_scale"]["names"][0] == "kLeftShoulderPitch"
    lengths = {name: len(one["action"]) for (name, _), one in found.items()}
    assert lengths == {"episode 28": 93, "episode 29": 74, "episode 30": 93}
    rows = np.array(pq.read_table(source / "data/chunk-000/episode_000028.parquet")["action"].to_pylist())
    actions = dataset.original_action(found["episode 28", 0.0]["action"])
    assert np.allclose(actions[:-1], rows[2::3][: len(actions) - 1], atol=1e-4)
    frames = found["episode 28", 0.0]["video/observation"].astype(int)
    assert 1 < np.abs(np.diff(frames, axis=0)).mean() < 20  # it moves, and is no noise


# ------------------------------------------------------------------------------------------------------- the authors


def write_authors(root: Path, task: str, folder: str, lengths: tuple[int, ...], size: int, meta_world: bool) -> None:
    """Rows as the authors' generators write them; the last episode does not end."""
    for split in ("train", "test"):
        rows = []
        for episode, length in enumerate(lengths):
            for frame in range(length):
                last = frame == length - 1 and episode < len(lengths) - 1
                mask = np.zeros((size, size), np.uint8)
                mask[frame : frame + 4, :8] = 255
                row = {
                    "observation": as_image(picture(frame, size, size)),
                    "mask": as_image(mask),
                    "pred_mask": as_image(mask.T),
                    "state": np.full(TASKS[task].state_dim, frame, np.float32).tolist(),
                    "action": np.full(TASKS[task].action_dim, 1.5 * (episode + 1), np.float32).tolist(),
                    "reward": float(frame),
                    "terminated": last and meta_world and episode == 0,
                    "truncated": last and not (meta_world and episode == 0),
                }
                if meta_world:
                    row["observation_distracted"] = as_image(255 - picture(frame, size, size))
                rows.append(row)
        half = len(rows) // 2  # an episode goes on in the next file
        for number, part in enumerate((rows[:half], rows[half:])):
            write_table(root / f"{folder}/{split}-0000{number}-of-00002.parquet", pa.Table.from_pylist(part))


def as_image(pixels: np.ndarray) -> dict[str, Any]:
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "png")
    return {"bytes": stream.getvalue(), "path": None}


@pytest.mark.parametrize(
    ("task", "folder", "distractor", "renders"),
    [
        ("walker-run", "walker_run", "none", ["clean"]),
        ("walker-run", "walker_run_distractor_low", "low", ["distractor"]),
        ("hopper-hop", "hopper_hop_distractor_hard", "hard", ["distractor"]),
        ("push", "push-v3", "low", ["clean", "distractor"]),
        ("push", "push-v3", "none", ["clean"]),
    ],
)
def test_authors(tmp_path, task, folder, distractor, renders):
    """Whole episodes under the task's name, actions as they are, and their predicted masks beside the shards."""
    meta_world = task == "push"
    size = TASKS[task].image_size
    write_authors(tmp_path / "hub", task, folder, (6, 4, 7, 5), size, meta_world)
    run(tmp_path, "authors", task, "--distractor", distractor, "--from", tmp_path / "hub")
    for split in ("train", "test"):
        dataset = Dataset(tmp_path, task, split, renders[-1], "sam")
        assert dataset.plan["renders"] == renders and "action_scale" not in dataset.plan
        assert dataset.plan["episode_length"] == TASKS[task].max_steps
        assert dataset.plan["source"]["kind"] == "authors" and dataset.episode_start.tolist() == [0, 6, 10, 17]
        assert (dataset.action[:5] == 1.5).all() and np.isnan(dataset.action[[5, 9, 16]]).all()
        # On Meta-World the reward of a row was got on the way to it.
        assert dataset.reward[:6].tolist() == ([1, 2, 3, 4, 5, 0] if meta_world else [0, 1, 2, 3, 4, 0])
        assert dataset.episode_success is None or dataset.episode_success.tolist() == [True, False, False]
        assert not meta_world or np.flatnonzero(dataset._whole("success")).tolist() == [4]
        for render in renders:
            frames = Dataset(tmp_path, task, split, render).frames(np.arange(6))[:, size // 2, 0, 0]
            inverted = meta_world and render == "distractor"
            assert frames.tolist() == [255 - 4 * n if inverted else 4 * n for n in range(6)]
        masks = np.unpackbits(dataset.masks(np.array([3])), axis=1).reshape(size, size)
        truth = Dataset(tmp_path, task, split, renders[-1])
        assert masks.sum() == 32 and masks[:8, 3:7].all()
        assert np.unpackbits(truth.masks(np.array([3]))).reshape(size, size)[3:7, :8].all()
    assert truth.command.startswith(f"python import_data.py authors {task} --from COPY")
    before = contents(tmp_path / task)
    (tmp_path / task / "train/00001.sam.h5").unlink()
    run(tmp_path, "authors", task, "--distractor", distractor, "--from", tmp_path / "hub")
    assert contents(tmp_path / task) == before


def test_authors_stop_early(tmp_path):
    """Files that are not needed are not opened."""
    write_authors(tmp_path / "hub", "walker-run", "walker_run", (6, 4, 7, 5), 64, False)
    for split in ("train", "test"):
        (tmp_path / f"hub/walker_run/{split}-00001-of-00002.parquet").write_bytes(b"not read")
    run(tmp_path, "authors", "walker-run", "--distractor", "none", "--from", tmp_path / "hub", "--max-transitions", 6)
    assert [Dataset(tmp_path, "walker-run", split, "clean").num_episodes for split in ("train", "test")] == [2, 1]
    with pytest.raises(UserError, match=r"cheetah_run_distractor_low: no train-\*\.parquet with a whole episode"):
        run(tmp_path, "authors", "cheetah-run", "--from", tmp_path / "hub")


# ----------------------------------------------------------------------------------------- several runs, and damage


def start(data_dir: Path, source: Path) -> subprocess.Popen:
    """import_data.py in a process that cannot import a simulator."""
    argv = ["import_data.py", "videos", source, "--name", "own", "--size", 64, "--data-dir", data_dir]
    code = f"""
import sys
sys.modules |= dict.fromkeys(("dm_control", "mujoco", "metaworld", "OpenGL", "glfw"))
sys.argv = {list(map(str, argv))}
import import_data
import_data.cli(import_data.main, import_data.default_args)
"""
    return python("-c", code)


def test_killed_stopped_and_shared(tmp_path):
    """A killed import goes on; two at a time share the work; all give the same bytes as one alone."""
    source, shared = tmp_path / "source", tmp_path / "shared"
    for number in range(24):
        write_video(source / f"{number}.mp4", 40)
    killed = start(shared, source)
    wait_until(lambda: list(shared.glob("own/train/0*.h5")), killed)
    killed.kill()
    killed.wait()
    assert len(list(shared.glob("own/train/0*.h5"))) < 8
    made = [finish(process) for process in [start(shared, source) for _ in range(2)]]
    assert [one.returncode for one in made] == [0, 0], made
    run(tmp_path / "alone", "videos", source, "--size", 64)
    assert contents(shared) == contents(tmp_path / "alone")


def test_resumed_repaired_and_verified(tmp_path, clips, capsys):
    words = ("videos", clips)
    run(tmp_path, *words)
    before, path = contents(tmp_path), tmp_path / "own/train/00001.h5"
    times = {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*.h5")}
    run(tmp_path, *words, "--verify")
    run(tmp_path, *words)
    assert times == {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*.h5")}
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"00001\.h5: .* does not match its hash; repair with: rm .* --name own"):
        run(tmp_path, *words, "--verify")
    path.unlink()
    os.truncate(tmp_path / "own/plan.h5", 500)
    run(tmp_path, *words)
    assert contents(tmp_path) == before and "plan.h5: truncated; making it again" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"plan\.h5: made with other settings .*\(seed: 0 -> 1\)"):
        run(tmp_path, *words, "--seed", 1)


def test_a_later_run_finds_other_files(tmp_path, clips):
    """They are told by their place; files that are not read do no harm."""
    shutil.copytree(clips, tmp_path / "source")
    write_images(tmp_path / "source/images", 4)
    words = ("videos", tmp_path / "source")
    run(tmp_path, *words)
    for name in (".DS_Store", "images/._0.png", "notes.txt", "images/Thumbs.db"):
        (tmp_path / "source" / name).write_bytes(b"nothing")
    run(tmp_path, *words)
    (tmp_path / "source/clip9.mp4").rename(tmp_path / "source/clip8.mp4")
    changes = r"\(files\.folder/clip8\.mp4: None -> \d+; files\.folder/clip9\.mp4: \d+ -> None\)"
    with pytest.raises(
        UserError, match=rf"other settings {changes}; use those, and the same files, .* remove .*own to import"
    ):
        run(tmp_path, *words)


def test_robots_files_are_noticed(tmp_path, robots):
    """A video that was missing and is there again; hidden files do no harm."""
    shutil.copytree(robots["v2.1"], tmp_path / "robot")
    video = next((tmp_path / "robot").rglob("episode_000001.mp4"))
    content = video.read_bytes()
    video.unlink()
    for name in ("data/chunk-000/._episode_000000.parquet", "meta/.DS_Store"):
        (tmp_path / "robot" / name).write_bytes(b"nothing")
    words = ("lerobot", tmp_path / "robot", "--skip-bad")
    run(tmp_path, *words)
    run(tmp_path, *words)
    video.write_bytes(content)
    with pytest.raises(UserError, match=r"files\.videos/.*episode_000001\.mp4: None -> \d+"):
        run(tmp_path, *words)


def test_a_long_video_is_decoded_once_for_all_shards(tmp_path, monkeypatch):
    write_video(tmp_path / "source/long.mp4", 60)
    decoded, frames = [], media.timed_frames
    monkeypatch.setattr(media, "timed_frames", lambda path: (decoded.append(1) or frame for frame in frames(path)))
    run(tmp_path, "videos", tmp_path / "source", "--clip-seconds", 0.5)
    assert len(Dataset(tmp_path, "own", "train").shards) > 4 and len(decoded) <= 120
