"""Background clips, the download of DAVIS, and the walks of camera and colours."""

import zipfile
from pathlib import Path

import imageio.v3 as iio
import numpy as np
import pytest
import web

from common import distractors
from common.cli import UserError
from common.distractors import (
    BackgroundPlayer,
    CameraWalk,
    Clip,
    ColorWalk,
    DistractorConfig,
    load_clips,
    synthetic_clip,
)
from common.tasks import get_task

DCS, DMW = get_task("cheetah-run"), get_task("reach")


def names(config: DistractorConfig, task=DMW, split: str = "train") -> list[str]:
    return [clip.name for clip in load_clips(config, task, split, 64)]


def write_clip(folder: Path, colors: list[int]) -> None:
    """A folder of frames of one gray level each."""
    folder.mkdir(parents=True)
    for index, color in enumerate(colors):
        iio.imwrite(folder / f"{index:05d}.png", np.full((40, 60, 3), color, np.uint8))


def write_davis(folder: Path, train: list[str], val: list[str], listed_only: tuple[str, ...] = ()) -> None:
    (folder / "ImageSets" / "2017").mkdir(parents=True)
    (folder / "ImageSets" / "2017" / "train.txt").write_text("\n".join([*train, *listed_only]))
    (folder / "ImageSets" / "2017" / "val.txt").write_text("\n".join(val))
    write_davis_clips(folder, train + val)


def write_davis_clips(folder: Path, names: list[str]) -> None:
    for name in names:
        write_clip(folder / "JPEGImages" / "480p" / name, [10, 20])


def test_davis_clips_are_those_of_the_split_in_sorted_order(tmp_path):
    write_davis(tmp_path / "DAVIS", ["f", "b", "a", "d", "c", "e"], ["v2", "v1"])
    config = DistractorConfig(davis_dir=tmp_path / "DAVIS")
    assert names(config, DCS) == ["a", "b", "c", "d"]  # DCS easy: the first four
    assert names(config) == ["a", "b", "c", "d", "e", "f"]
    assert names(config, split="test") == ["v1", "v2"]
    assert names(DistractorConfig(davis_dir=tmp_path / "DAVIS", num_videos=2)) == ["a", "b"]
    with pytest.raises(UserError, match=r"has 6 clips in the train split, fewer than 9 \(--num-videos"):
        names(DistractorConfig(davis_dir=tmp_path / "DAVIS", num_videos=9))
    assert load_clips(config, DCS, "train", 64)[0] is load_clips(config, DCS, "train", 64)[0]  # decoded once


def test_davis_clips_that_are_listed_but_absent_are_refused_if_they_are_needed(tmp_path):
    write_davis(tmp_path / "DAVIS", ["a", "b", "c", "d", "f"], ["v"], listed_only=("e", "g"))
    (tmp_path / "DAVIS/JPEGImages/480p/g").mkdir()
    config = DistractorConfig(davis_dir=tmp_path / "DAVIS")
    assert names(config, DCS) == ["a", "b", "c", "d"]
    for task_clips, absent in ((None, "e, g"), (6, "e")):
        with pytest.raises(UserError, match=rf"no images of .* for the train split: {absent}; put them there, or"):
            names(DistractorConfig(davis_dir=tmp_path / "DAVIS", num_videos=task_clips))


@pytest.mark.parametrize("layout", ["windows", "2016", "bare"])
def test_other_layouts_of_davis_are_read(tmp_path, layout):
    clips = {"train": ["bear", "bmx-bumps", "boat", "boxing-fisheye"]}
    clips["val"] = ["bike-packing", "blackswan", "bmx-trees", "breakdance"]
    write_davis_clips(tmp_path, clips["train"] + clips["val"])
    (tmp_path / "JPEGImages" / ".DS_Store").touch()
    lists = tmp_path / "ImageSets" / ("480p" if layout == "2016" else "2017")
    for split, names_of in clips.items() if layout != "bare" else ():
        lists.mkdir(parents=True, exist_ok=True)
        text = "\ufeff" + "\r\n".join(names_of)
        if layout == "2016":
            frame = "/JPEGImages/480p/{0}/{1:05d}.jpg /Annotations/480p/{0}/{1:05d}.png"
            text = "\n".join(frame.format(name, number) for name in names_of for number in range(2))
        (lists / f"{split}.txt").write_bytes(text.encode())
    config = DistractorConfig(davis_dir=tmp_path)
    assert names(config, DCS) == clips["train"] and names(config, DCS, "test") == clips["val"]


@pytest.mark.parametrize(
    ("paths", "found"),
    [
        ([], "nothing"),
        (["DAVIS/JPEGImages/480p"], "DAVIS, DAVIS/JPEGImages"),
        (["JPEGImages/480p/bear", "ImageSets/2019"], "ImageSets, JPEGImages, ImageSets/2019, JPEGImages/480p"),
    ],
)
def test_what_is_not_davis_is_told_and_never_to_be_removed(tmp_path, paths, found):
    for path in paths:
        (tmp_path / path).mkdir(parents=True)
    with pytest.raises(UserError, match=rf"is not DAVIS at 480p, .*2017/train.txt.*; found: {found}\.") as caught:
        names(DistractorConfig(davis_dir=tmp_path))
    assert "remove" not in str(caught.value)


def test_a_list_of_clips_that_is_not_utf8_is_one_line(tmp_path):
    write_davis(tmp_path, ["bear"], [])
    (tmp_path / "ImageSets/2017/train.txt").write_bytes(b"caf\xe9")
    with pytest.raises(UserError, match=r"train\.txt: cannot be read as a list of clips"):
        names(DistractorConfig(davis_dir=tmp_path))


def test_frames_are_centre_cropped_and_mirrored_for_the_skybox(tmp_path):
    picture = np.zeros((40, 80, 3), np.uint8)
    picture[:, :20], picture[:, 60:] = 255, 255  # outside the centre square
    picture[:, 20:40, 0] = 200  # its left half is red
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        iio.imwrite(tmp_path / name / "0.png", picture)
    config = DistractorConfig(backgrounds=str(tmp_path))
    plain, face = (load_clips(config, task, "train", 64)[0].frames for task in (DMW, DCS))
    assert plain.shape == (1, 64, 64, 3) and face.shape == (1, 160, 160, 3)
    assert plain[0, 32, 10].tolist() == [200, 0, 0] and plain[0, 32, 50].tolist() == [0, 0, 0]
    assert face[0, 80, 120].tolist() == [200, 0, 0] and face[0, 80, 20].tolist() == [0, 0, 0]


def test_folder_of_clips_takes_images_and_videos(tmp_path):
    """Those whose names come last are for testing."""
    for name, colors in (("clip2", [60]), ("clip10", [60]), ("numbers", [1, 9, 10]), ("empty", [])):
        write_clip(tmp_path / name, colors)
    iio.imwrite(tmp_path / "movie.MP4", np.full((5, 64, 64, 3), 99, np.uint8), fps=10, extension=".mp4")
    (tmp_path / "notes.txt").touch()
    config = DistractorConfig(backgrounds=str(tmp_path))
    assert names(config) == ["clip2", "clip10", "movie.MP4"] and names(config, split="test") == ["numbers"]
    movie = load_clips(config, DMW, "train", 64)[-1].frames
    assert movie.shape == (5, 64, 64, 3) and abs(movie.astype(int) - 99).max() < 5
    assert load_clips(config, DMW, "test", 64)[0].frames[:, 0, 0, 0].tolist() == [1, 9, 10]


def test_errors_name_the_folder(tmp_path):
    with pytest.raises(UserError, match=r"nowhere.*neither 'davis' nor 'synthetic'"):
        names(DistractorConfig(backgrounds=str(tmp_path / "nowhere")))
    config = DistractorConfig(backgrounds=str(tmp_path / "own"))
    write_clip(tmp_path / "own" / "only", [1])
    (tmp_path / "own" / "other.m4v").touch()
    with pytest.raises(UserError, match=r"own needs a clip for .*\.png.*\.avi.*found: only, other\.m4v"):
        names(config)
    write_clip(tmp_path / "own" / "second", [1])
    with pytest.raises(UserError, match=r"has 1 clips in the test split, fewer than 2 \(--num-videos.*first 80%"):
        names(DistractorConfig(backgrounds=str(tmp_path / "own"), num_videos=2), split="test")
    (tmp_path / "own" / "only" / "00000.png").write_bytes(b"not a picture")
    with pytest.raises(UserError, match=r"only.00000\.png"):
        _ = load_clips(config, DCS, "train", 64)[0].frames


def test_synthetic_clips_differ_within_and_between_splits():
    clips = [synthetic_clip(split, index, 48, 12) for split in ("train", "test") for index in range(3)]
    for i, one in enumerate(clips):
        assert one.shape == (12, 48, 48, 3) and one.dtype == np.uint8
        assert one.std() > 15  # not a plain colour
        assert abs(one[1:].astype(int) - one[:-1]).mean() > 2  # it moves
        for other in clips[i + 1 :]:
            assert abs(one.astype(int) - other).mean() > 20
    assert np.array_equal(clips[0], synthetic_clip("train", 0, 48, 12))
    config = DistractorConfig(backgrounds="synthetic")
    assert not {*names(config)} & {*names(config, split="test")}


def test_davis_is_downloaded_whole_or_not_at_all(tmp_path, monkeypatch):
    write_davis(tmp_path / "source" / "DAVIS", ["a"], ["v"])
    archive = tmp_path / "davis.zip"
    with zipfile.ZipFile(archive, "w") as file:
        for path in sorted((tmp_path / "source").rglob("*.*")):
            file.write(path, path.relative_to(tmp_path / "source"))
    davis = tmp_path / "data" / "DAVIS"
    config, way_out = DistractorConfig(davis_dir=davis), f"{davis} is missing.*--backgrounds synthetic"

    monkeypatch.setattr(distractors, "DAVIS_URL", "http://127.0.0.1:9/davis.zip")
    with pytest.raises(UserError, match=way_out):  # without a network
        names(config)
    with web.serve(tmp_path) as url:
        monkeypatch.setattr(distractors, "DAVIS_URL", f"{url}davis.zip")
        monkeypatch.setattr(web.Handler, "cut", 10)
        with pytest.raises(UserError, match=way_out):
            names(config)
        monkeypatch.setattr(web.Handler, "cut", 0)
        intact = archive.read_bytes()
        damaged = bytearray(intact)
        damaged[intact.index(b"IDAT") + 6] ^= 1
        archive.write_bytes(damaged)
        with pytest.raises(UserError, match=way_out):
            names(config)
        assert not list(davis.parent.iterdir())

        archive.write_bytes(intact)
        (davis.parent / ".DAVIS.part" / "DAVIS" / "JPEGImages").mkdir(parents=True)  # what a killed process left
        assert names(config) == ["a"]
    assert list(davis.parent.iterdir()) == [davis]


@pytest.mark.parametrize("length", [1, 2, 5])
def test_player_turns_around_at_the_ends(length):
    clip = Clip("c", lambda: np.zeros((length, 1, 1, 3), np.uint8))
    seen = set()
    for seed in range(40):
        player = BackgroundPlayer([clip], np.random.default_rng(seed))
        seen.add((player.index, player.direction))
        cycle = [*range(length), *range(length - 2, 0, -1)]
        position = player.index if player.direction > 0 or player.index == 0 else len(cycle) - player.index
        for step in range(1, 3 * length):
            player.step()
            assert player.index == cycle[(position + step) % len(cycle)]
    assert len(seen) == 2 * length  # every start, both directions


SIDE, BACK = np.array([0.1, -3.0, 0.2]), np.array([-3.0, 0.0, 1.0])


@pytest.mark.parametrize("offset", [SIDE, BACK], ids=["side", "back"])
def test_camera_walk_stays_in_its_range_and_looks_at_the_agent(offset):
    scale, radius = 0.1, np.linalg.norm(offset)
    heading = np.arctan2(offset[1], offset[0])
    headings, distances, rolls, starts = [], [], [], []
    for seed in range(3):
        walk = CameraWalk(np.random.default_rng(seed), scale, offset, np.array([0.0, 0.0, 0.1]))
        starts.append(walk.spherical)
        previous = walk.pose()[0]
        for _ in range(600):
            walk.step()
            position, rotation = walk.pose()
            assert np.linalg.norm(position - previous) <= 0.4 * scale * radius / 4 * 1.0001 + 1e-9
            previous = position
            assert np.allclose(rotation @ rotation.T, np.eye(3)) and np.linalg.det(rotation) > 0
            to_target = np.array([0.0, 0.0, 0.1]) - position
            assert np.allclose(rotation[:, 2], -to_target / np.linalg.norm(to_target))
            assert position[2] >= -1e-9  # not below the agent
            turned = np.arctan2(position[1], position[0]) - heading
            headings.append((turned + np.pi) % (2 * np.pi) - np.pi)
            distances.append(np.linalg.norm(position) / radius)
            rolls.append(walk.roll)
    span = np.pi / 2 * scale
    assert max(map(abs, headings)) <= span + 1e-9 and min(headings) < -0.8 * span and max(headings) > 0.8 * span
    assert 1 - 0.5 * scale - 1e-9 <= min(distances) < 0.97 and 1.1 < max(distances) <= 1 + 1.5 * scale + 1e-9
    assert 0.5 * span < max(map(abs, rolls)) <= span
    assert np.std(starts, axis=0).min() > 0


def test_camera_walk_velocity_changes_by_the_stated_deviation():
    scale, changes, roll_changes = 0.1, [], []
    for seed in range(3000):
        walk = CameraWalk(np.random.default_rng(seed), scale, np.array([0.0, -4.0, 1.0]), np.zeros(3))
        before, roll_before = walk.velocity.copy(), walk.roll_velocity
        walk.step()
        slow = np.linalg.norm(before) < 0.4 * walk.max_velocity  # far from the cut
        inside = np.all((walk.spherical > walk.low) & (walk.spherical < walk.high))
        if slow and inside:
            changes.append(walk.velocity - before)
        if abs(roll_before) < 0.4 * walk.max_roll_velocity and abs(walk.roll) < walk.max_roll:
            roll_changes.append(walk.roll_velocity - roll_before)
    radius = np.sqrt(17)
    assert np.std(changes) == pytest.approx(0.1 * scale * radius / 4, rel=0.05)
    assert np.std(roll_changes) == pytest.approx(np.pi / 300 * scale, rel=0.1)


def test_a_vanishing_camera_walk_is_the_task_camera():
    walk = CameraWalk(np.random.default_rng(0), 1e-9, SIDE, np.array([0.1, 0.0, 0.2]))
    walk.step()
    position, rotation = walk.pose()
    assert np.allclose(position, SIDE, atol=1e-6)
    assert np.allclose(rotation, [[1, 0, 0], [0, 0, -1], [0, 1, 0]], atol=1e-6)  # right, up, backward


def test_color_walk_is_clipped_and_has_the_stated_step():
    original = np.array([[0.5, 0.05, 0.98], [0.7, 0.5, 0.3]])
    walk = ColorWalk(np.random.default_rng(0), 0.1, original)
    low, high = np.clip(original - 0.1, 0, 1), np.clip(original + 0.1, 0, 1)
    steps = []
    for _ in range(3000):
        assert np.all(walk.rgb >= low) and np.all(walk.rgb <= high)
        before = walk.rgb
        walk.step()
        inside = np.all([walk.rgb > low, walk.rgb < high, before > low, before < high], axis=0)
        steps.extend((walk.rgb - before)[inside])
    assert np.std(steps) == pytest.approx(0.03 * 0.1, rel=0.05)
    assert np.any(walk.rgb != original)
