"""What users bring: names in folders, images, masks and videos, with files as other programs write and damage them."""

import contextlib
import os
import struct
import subprocess
import zlib
from pathlib import Path

import imageio_ffmpeg
import numpy as np
import pytest
from PIL import Image

import make_masks
from common import media
from common.cli import UserError
from common.distractors import DistractorConfig, load_clips
from common.tasks import get_task

GRAY = np.arange(0, 256, 4, dtype=np.uint8).reshape(8, 8)
MASK = np.eye(8, dtype=bool)
PAGE = b"<!DOCTYPE html>\n<title>Not found</title>"


def ffmpeg(*words: str | Path) -> None:
    subprocess.run([imageio_ffmpeg.get_ffmpeg_exe(), "-v", "fatal", "-y", *words], check=True, capture_output=True)


def assert_refused(call, path: Path, message: str = ".") -> None:
    with pytest.raises(UserError, match=message) as caught:
        call(path)
    text = str(caught.value)
    assert text.isprintable() and path.name in text and "ffmpeg version" not in text


def clip_names(folder: Path) -> list[str]:
    config = DistractorConfig(backgrounds=str(folder))
    return [clip.name for split in ("train", "test") for clip in load_clips(config, get_task("reach"), split, 64)]


def masks_read(folder: Path) -> list[int]:
    """Which pixel is the agent, by frame, in a folder of PNGs."""
    packed = make_masks.read_episode(folder, 3, 8)
    return np.unpackbits(packed, axis=1).argmax(1).tolist()


def episode_names(folder: Path) -> list[str]:
    return [path.name for path in make_masks.episode_paths(folder, 3)]


def write_masks(folder: Path, names: list[str]) -> None:
    for pixel, name in enumerate(names):
        Image.fromarray(np.eye(1, 64, pixel, dtype=np.uint8).reshape(8, 8) * 255).save(folder / name, format="PNG")


def write_clips(folder: Path, names: list[str]) -> None:
    for name in names:
        (folder / name).mkdir()
        Image.fromarray(GRAY).save(folder / name / "0.png")


# place -> (the names it holds in order, what writes them, what reads them and gives the order)
PLACES = {
    "clips": (["clip2", "clip9", "clip10"], write_clips, clip_names),
    "images": (
        ["f2.png", "f9.PNG", "f10.Png"],
        write_masks,
        lambda folder: [p.name for p in media.image_files(folder)],
    ),
    "masks": (["f2.png", "f9.PNG", "f10.Png"], write_masks, masks_read),
    "episodes": (["0", "00001", "2"], write_clips, episode_names),
}


@pytest.mark.parametrize("place", PLACES)
def test_names_are_in_natural_order_and_hidden_ones_are_ignored(tmp_path, place):
    names, write, read = PLACES[place]
    write(tmp_path, names)
    (tmp_path / ".ipynb_checkpoints").mkdir()
    (tmp_path / ".ipynb_checkpoints" / "0.png").write_bytes(b"a copy")
    for hidden in (".DS_Store", "._f2.png", "._2.npy", "._clip.mp4"):
        (tmp_path / hidden).write_bytes(b"what macOS leaves")
    assert read(tmp_path) == ([0, 1, 2] if place == "masks" else names)


def test_images_that_are_named_by_their_times(tmp_path):
    """With as many decimals they are in order; otherwise the digits behind the point are no number of their own."""
    for name in ("same", "other"):
        (tmp_path / name).mkdir()
    for number in range(4):
        write_masks(tmp_path / "same", [f"t{99.9 + number / 20:.2f}.png"])
        write_masks(tmp_path / "other", [f"t{round(99.9 + number / 20, 2)}.png"])
    names = [path.name for path in media.image_files(tmp_path / "same")]
    assert names == ["t99.90.png", "t99.95.png", "t100.00.png", "t100.05.png"]
    assert [path.stem for path in media.image_files(tmp_path / "other")] == ["t99.9", "t99.95", "t100.0", "t100.05"]
    write_masks(tmp_path / "other", ["t100.1.png"])
    assert_refused(media.image_files, tmp_path / "other", r"order of t100\.1\.png and t100\.05\.png is not clear")
    for number, names in enumerate((["0", "0.5", "0.25"], ["0.5s", "0.25s"], ["1.0", "-1.0"])):
        (tmp_path / f"{number}").mkdir()
        write_masks(tmp_path / f"{number}", [f"{name}.png" for name in names])
        assert_refused(media.image_files, tmp_path / f"{number}", r"is not clear; give all as many decimals")
    (tmp_path / "counted").mkdir()
    write_masks(tmp_path / "counted", [f"cam0.{number}.png" for number in range(1, 12)])
    assert [path.stem for path in media.image_files(tmp_path / "counted")][8:] == ["cam0.9", "cam0.10", "cam0.11"]


@pytest.mark.parametrize("place", PLACES)
def test_names_with_the_same_number_or_not_in_utf8_are_refused(tmp_path, place):
    names, write, read = PLACES[place]
    write(tmp_path, names)
    copy = {"clips": "clip02", "episodes": "02"}.get(place, "f02.png")
    write(tmp_path, [copy])
    double = names[-1] if place == "episodes" else names[0]
    assert_refused(read, tmp_path, f"({copy} and {double}|{double} and {copy}) have the same number")
    os.rename(tmp_path / copy, os.fsencode(tmp_path) + b"/caf\xe9" + os.fsencode(Path(copy).suffix))
    assert_refused(read, tmp_path, r"caf\\xe9.*': its name is not UTF-8")


@pytest.mark.parametrize(
    ("suffix", "mode"),
    [(".png", mode) for mode in ("1", "L", "LA", "P", "RGB", "RGBA")]
    + [(".jpg", "L"), (".jpg", "RGB"), (".bmp", "P"), (".webp", "RGBA")],
)
def test_images_of_8_bits_are_read_as_they_are_stored(tmp_path, suffix, mode):
    colors = np.random.default_rng(0).integers(0, 256, (8, 10, 4), np.uint8)
    image = Image.fromarray(colors).convert("RGB" if mode == "P" else mode)
    image = image.quantize(9) if mode == "P" else image
    image.save(tmp_path / f"0{suffix}")
    stored = Image.open(tmp_path / f"0{suffix}")
    assert np.array_equal(media.read_image(tmp_path / f"0{suffix}"), np.asarray(stored.convert("RGB")))


def test_other_images_keep_their_meaning_or_are_refused(tmp_path):
    path = tmp_path / "0.png"
    rgb = np.stack([GRAY] * 3, axis=-1)
    Image.fromarray(GRAY.astype(np.uint16) * 257).save(path)
    assert np.array_equal(media.read_image(path), rgb)
    orientation = Image.Exif()
    orientation[0x0112] = 6  # the camera was turned: rotate by 90 degrees to the right
    Image.fromarray(GRAY).save(path, exif=orientation)
    assert np.array_equal(media.read_image(path), np.rot90(rgb, -1))
    Image.fromarray(GRAY > 100).save(path, exif=orientation)
    assert np.array_equal(media.read_mask(path), np.rot90(GRAY > 100, -1))
    Image.fromarray(rgb).convert("CMYK").save(tmp_path / "0.jpg", quality=100)
    assert abs(media.read_image(tmp_path / "0.jpg").astype(int) - rgb).max() < 8
    Image.fromarray(GRAY.astype(np.float32)).save(path, format="TIFF")
    assert_refused(media.read_image, path, "32 bits per value")
    Image.fromarray(rgb).save(path, save_all=True, append_images=[Image.fromarray(255 - rgb)])
    assert_refused(media.read_image, path, "an animation")
    write_masks(tmp_path, ["1.png"])
    Image.fromarray(np.zeros((9, 8), np.uint8)).save(tmp_path / "2.png")
    (path.unlink(), (tmp_path / "0.jpg").unlink())
    assert_refused(lambda path: list(media.frames(path.parent)), tmp_path / "2.png", "from 8 x 8 to 8 x 9")


def with_palette(colors: list[int], index: np.ndarray = MASK) -> Image.Image:
    image = Image.fromarray(index.astype(np.uint8))
    image.putpalette(colors)
    return image


@pytest.mark.parametrize(
    "image",
    [
        Image.fromarray(MASK),
        *(Image.fromarray(MASK * value) for value in (np.uint8(1), np.uint8(255), np.uint16(65535))),
        with_palette([0, 0, 0, 128, 0, 0]),
        with_palette([255, 255, 255, 0, 0, 0], ~MASK),
    ],
)
def test_masks_mean_what_a_viewer_shows(tmp_path, image):
    image.save(tmp_path / "0.png")
    assert np.array_equal(media.read_mask(tmp_path / "0.png"), MASK)


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (Image.fromarray(GRAY), "from 0 to 252; a mask holds 0 and 1, or 0 and 255"),
        (with_palette([255, 255, 255, 255, 0, 0]), "has the colours .* a mask has black and one for the agent"),
        (Image.fromarray(np.stack([MASK * np.uint8(255)] * 3, axis=-1)), "mode RGB; a mask has one channel"),
    ],
)
def test_pictures_that_are_no_masks_are_refused(tmp_path, image, message):
    image.save(tmp_path / "0.png")
    assert_refused(media.read_mask, tmp_path / "0.png", message)


def damaged(kind: str, path: Path) -> bytes:
    if kind in ("empty", "page"):
        return b"" if kind == "empty" else PAGE
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64), np.uint8)).save(path)
    data = bytearray(path.read_bytes())
    if kind == "cut":
        del data[-200:]
    elif kind == "chunk":
        data[data.index(b"IDAT") : data.index(b"IDAT") + 4] = b"\0\1\2\3"
    elif kind == "bits":
        data[len(data) // 2] ^= 1
    else:
        header = b"IHDR" + struct.pack(">II", 60000, 60000) + data[24:29]
        data[12:33] = header + struct.pack(">I", zlib.crc32(header))
    return bytes(data)


@pytest.mark.parametrize("kind", ["empty", "page", "cut", "chunk", "bits", "bomb"])
@pytest.mark.parametrize("read", [media.read_image, media.read_mask, lambda path: list(media.frames(path.parent))])
def test_a_damaged_image_is_one_line(tmp_path, kind, read):
    path = tmp_path / "0.png"
    path.write_bytes(damaged(kind, path))
    assert_refused(read, path, "cannot be read as")


LEVELS = [16, 60, 100, 140, 180, 220]  # of the frames' left half, repeated
NAMES = "h264.mp4 front.MP4 fragments.mp4 av1.mp4 h264.mov h264.mkv vp9.webm mpeg4.avi some.gif".split()


@pytest.fixture(scope="module")
def videos(tmp_path_factory) -> Path:
    """28 frames of 64 x 48 pixels at 10 frames/s, in each container; `variable.mp4` has gaps and is lossless."""
    folder = tmp_path_factory.mktemp("videos")
    pixels = np.zeros((28, 48, 64, 3), np.uint8)
    pixels[:, :, :32] = np.resize(LEVELS, 28)[:, None, None, None]
    (folder / "pixels").write_bytes(pixels.tobytes())
    raw = ["-f", "rawvideo", "-pix_fmt", "rgb24", "-s", "64x48", "-r", "10", "-i", folder / "pixels"]
    h264 = ["-c:v", "libx264", "-g", "6", "-pix_fmt", "yuv420p"]
    options = {name: h264 for name in NAMES if name.startswith(("h264", "fr"))} | {
        "av1.mp4": ["-c:v", "libsvtav1", "-preset", "10", "-crf", "10"],
        "vp9.webm": ["-c:v", "libvpx-vp9"],
        "mpeg4.avi": ["-c:v", "mpeg4", "-q:v", "2"],
        "some.gif": ["-vf", "split[a][b];[a]palettegen[p];[b][p]paletteuse"],
    }
    options["front.MP4"] = [*h264, "-movflags", "+faststart", "-f", "mp4"]
    options["fragments.mp4"] = [*h264, "-movflags", "+frag_keyframe+empty_moov"]
    gaps = "settb=1/90000,setpts='90000*(N*0.1+0.75*gte(N,9)+0.013*mod(N,2))'"
    lossless = ["-c:v", "libx264rgb", "-qp", "0", "-enc_time_base", "1/90000", "-video_track_timescale", "90000"]
    options["variable.mp4"] = ["-vf", gaps, "-fps_mode", "passthrough", *lossless]
    for name, words in options.items():
        ffmpeg(*raw, *words, folder / name)
    ffmpeg("-display_rotation", "90", "-i", folder / "h264.mp4", "-c", "copy", folder / "rotated.mp4")
    ffmpeg("-f", "lavfi", "-i", "sine", "-t", "1", "-c:a", "aac", folder / "sound.mp4")
    return folder


@pytest.mark.parametrize("name", NAMES)
def test_every_frame_of_a_video_is_read(videos, name):
    frames = np.stack(list(media.frames(videos / name)))
    assert frames.shape == (28, 48, 64, 3) and frames.dtype == np.uint8
    assert abs(frames[:, 24, 16].astype(int) - np.resize(LEVELS, 28)[:, None]).max() < 12
    assert frames[:, 24, 48].max() < 12
    times = [seconds for seconds, _ in media.timed_frames(videos / name)]
    assert np.allclose(times, np.arange(28) / 10, atol=1e-3)


def test_frames_at_a_variable_rate_and_turned_frames_are_read_as_stored(videos):
    times, frames = zip(*media.timed_frames(videos / "variable.mp4"))
    number = np.arange(28)
    assert np.allclose(times, number / 10 + 0.75 * (number >= 9) + 0.013 * (number % 2), atol=1e-4)
    assert np.array_equal(np.stack(frames).tobytes(), (videos / "pixels").read_bytes())
    upright, turned = (next(media.frames(videos / name)) for name in ("h264.mp4", "rotated.mp4"))
    assert np.array_equal(turned, np.rot90(upright))


def test_frames_of_equal_times_are_all_read(videos, tmp_path):
    """As Matroska stores them that were less than a millisecond apart."""
    raw = ["-f", "rawvideo", "-pix_fmt", "rgb24", "-s", "64x48", "-r", "3000", "-i", videos / "pixels"]
    ffmpeg(*raw, "-fps_mode", "passthrough", "-c:v", "libx264rgb", "-qp", "0", "-bf", "0", tmp_path / "fast.mkv")
    times, frames = zip(*media.timed_frames(tmp_path / "fast.mkv"))
    assert np.stack(frames).tobytes() == (videos / "pixels").read_bytes()
    assert (np.diff(times) >= 0).all() and (np.diff(times) == 0).any()


@pytest.mark.parametrize("name", NAMES)
def test_a_video_that_is_cut_off_is_one_line(videos, tmp_path, name):
    data = (videos / name).read_bytes()
    for share in (0.3, 0.6, 0.9):
        (tmp_path / name).write_bytes(data[: int(share * len(data))])
        assert_refused(lambda path: list(media.frames(path)), tmp_path / name)


@pytest.mark.parametrize("more", [1, 7, 20])
def test_zeros_behind_a_video_and_a_length_that_was_not_known(videos, tmp_path, more):
    """As copies by blocks and AVIs written to a pipe have them; nothing is cut off."""
    content = bytearray((videos / "h264.mp4").read_bytes()) + bytes(more)
    (tmp_path / "zeros.mp4").write_bytes(content)
    content = bytearray((videos / "mpeg4.avi").read_bytes())
    content[4:8] = b"\xff" * 4
    (tmp_path / "mpeg4.avi").write_bytes(content)
    for path in tmp_path.iterdir():
        assert len(list(media.frames(path))) == 28


@pytest.mark.parametrize("suffix", sorted(media.VIDEO_SUFFIXES))
def test_what_is_no_video_is_one_line(videos, tmp_path, suffix):
    path = tmp_path / f"clip{suffix}"
    for content in (b"", PAGE, (videos / "sound.mp4").read_bytes(), np.random.default_rng(0).bytes(5000)):
        path.write_bytes(content)
        assert_refused(lambda path: list(media.frames(path)), path)


def test_a_caller_may_stop_early(videos):
    frames = media.timed_frames(videos / "h264.mp4")
    next(frames)
    frames.close()
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    if not children.exists():
        pytest.skip("no /proc with the children of a process")
    for pid in children.read_text().split():
        with contextlib.suppress(FileNotFoundError):  # one that has ended meanwhile
            assert "ffmpeg" not in os.readlink(f"/proc/{pid}/exe")
