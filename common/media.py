"""Pictures, videos and masks that a user brings: what a folder holds, and what is in its files.

Whatever is wrong with a file is a `UserError` of one line that names it.
"""

import contextlib
import errno
import io
import itertools
import os
import re
import signal
import subprocess
import tempfile
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Set
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps, ImageSequence

from common.cli import Stopped, UserError
from common.store import system_error

IMAGE_SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".webp"})
VIDEO_SUFFIXES = frozenset({".mp4", ".avi", ".mov", ".mkv", ".webm", ".gif"})
TABLES = (".npy", ".csv", ".parquet")
MP4_BOXES = {b"ftyp", b"styp", b"moov", b"sidx", b"moof", b"mdat", b"mfra", b"free", b"wide", b"uuid"}


# --- folders ---


def listing(folder: Path) -> list[Path]:
    """What a folder holds, without names that begin with a dot, in natural order: frame2 before frame10.

    Raises `UserError` for names that are equal as numbers (frame_2, frame_02) and names that are not UTF-8.
    """
    return in_order((path for path in folder.iterdir() if not path.name.startswith(".")), lambda path: path.name)


def walk(folder: Path, suffixes: Set[str]) -> list[Path]:
    """The files with these suffixes in a folder and below it, sorted, without names that begin with a dot."""
    paths, seen = [], set()
    for place, folders, names in os.walk(folder, followlinks=True):
        if (there := os.path.realpath(place)) in seen:  # links may lead back
            folders.clear()
            continue
        seen.add(there)
        folders[:] = [name for name in folders if not name.startswith(".")]
        paths += [Path(place, name) for name in names if not name.startswith(".")]
    paths = sorted(path for path in paths if path.suffix.lower() in suffixes and path.is_file())
    for path in paths:
        _check_name(path)
    return paths


def _check_name(path: Path) -> None:
    try:
        os.fsencode(path).decode("utf-8")
    except UnicodeDecodeError:
        raise UserError(f"{os.fsencode(path)}: its name is not UTF-8; rename it") from None


def image_files(folder: Path) -> list[Path]:
    """The images in a folder, in natural order. Raises `UserError` as `listing` does, also for 1.png beside 1.jpg.

    And for names such as 1.9 and 1.10, which as times stand in another order than as numbers, unless they just count.
    """
    paths = [path for path in listing(folder) if path.suffix.lower() in IMAGE_SUFFIXES]
    paths = in_order(paths, lambda path: path.stem)
    times = [re.fullmatch(r"(.*?)(-?)(\d+)(?:\.(\d+))?(\D*)", path.stem) for path in paths]
    if not all(times) or len({(time[1], time[5]) for time in times}) > 1 or not any(time[4] for time in times):
        return paths
    values = [(int(time[3]), time[4] or "") for time in times]  # digits after the point compare like words
    counts = [int(digits or -1) for _, digits in values]
    if len({whole for whole, _ in values}) == 1 and counts == list(range(counts[0], counts[0] + len(counts))):
        return paths
    pairs = zip(itertools.pairwise(paths), itertools.pairwise(values))
    unclear = [names for names, (one, other) in pairs if one > other]
    if len({time[2] for time in times}) > 1:
        unclear.append(paths[:2])
    if unclear:
        names = " and ".join(path.name for path in unclear[0])
        raise UserError(f"{folder}: the order of {names} is not clear; give all as many decimals, and no minus")
    return paths


def in_order(paths: Iterable[Path], name: Callable[[Path], str]) -> list[Path]:
    """Paths by what `name` gives for them, in natural order. Raises `UserError` as `listing` does."""
    numbered: dict[tuple[str | int, ...], Path] = {}
    for path in paths:
        _check_name(path)
        parts = re.split(r"(\d+)", name(path))  # texts and numbers in turn
        key = tuple(int(part) if part.isdecimal() else part for part in parts)
        if key in numbered:
            names = " and ".join(sorted((numbered[key].name, path.name)))
            raise UserError(f"{path.parent}: {names} have the same number, so their order is not clear; keep one")
        numbered[key] = path
    return [numbered[key] for key in sorted(numbered)]


def kind_of(path: Path) -> str:
    """The suffix in small letters, a slash for a folder."""
    return "/" if path.is_dir() else path.suffix.lower()


def episode_name(path: Path) -> str:
    """The name of a recording and of what belongs to it. Some systems write accents apart from their letters.

    Of a path that is not there, what looks like a file's name is one.
    """
    is_file = path.suffix.lower() in VIDEO_SUFFIXES | {*TABLES} and not path.is_dir()
    return unicodedata.normalize("NFC", path.stem if is_file else path.name)


# --- pictures ---


@contextlib.contextmanager
def readable(path: Path, kind: str) -> Iterator[None]:
    """Turns what a library raises while it reads `path` into a `UserError` of one line.

    Errors of the system (no permission, a failing disk, no memory) stay: they say nothing about the content.
    """
    try:
        yield
    except (UserError, Stopped, MemoryError):
        raise
    except Exception as error:  # for damaged files Pillow raises OSError, ValueError, SyntaxError, zlib.error and more
        system = system_error(error, path)
        if system is not None and system.errno != errno.ENOENT:
            raise system from error
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"{path}: cannot be read as {kind} ({reason})") from error


def read_image(path: Path) -> np.ndarray:
    """uint8 (H, W, 3): palette, gray and CMYK converted, alpha dropped, 16 bits cut to 8, upright as EXIF says."""
    with readable(path, "an image"), Image.open(path) as file:
        if getattr(file, "is_animated", False) and file.format != "MPO":  # cameras put a preview into MPO
            raise UserError(f"{path}: an animation where one image is expected; take its images apart")
        image = ImageOps.exif_transpose(file)
        if _has_16_bits(file):
            return np.stack([(np.asarray(image) >> 8).astype(np.uint8)] * 3, axis=-1)  # as Pillow does with 3 channels
        if image.mode in ("I", "F"):
            raise UserError(f"{path}: has 32 bits per value; save it with 8 or 16")
        return np.asarray(image.convert("RGB"))


def read_mask(path: Path) -> np.ndarray:
    """bool (H, W), from a gray image of 0 and 1, 255 or 65535, or a palette image in which black is not the agent."""
    with readable(path, "a mask"), Image.open(path) as file:
        image = ImageOps.exif_transpose(file)
        if image.mode == "P":
            image = image.convert("RGB")
            colors = {color for _, color in image.getcolors(maxcolors=256)} | {(0, 0, 0)}
            if len(colors) > 2:
                raise UserError(f"{path}: has the colours {sorted(colors)[:4]}; a mask has black and one for the agent")
            return np.asarray(image).any(axis=2)
        if image.mode not in ("1", "L") and not _has_16_bits(file):
            raise UserError(f"{path}: a picture of mode {image.mode}; a mask has one channel (gray or a palette)")
        values = np.asarray(image)
        if values.max() not in (0, 1, 255, 65535) or not np.isin(values, (0, values.max())).all():
            raise UserError(f"{path}: from {values.min()} to {values.max()}; a mask holds 0 and 1, or 0 and 255")
        return values > 0


def _has_16_bits(image: Image.Image) -> bool:
    return image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PNG")  # I before Pillow 11


def stored_picture(value: Any, path: Path, is_mask: bool) -> np.ndarray:
    """A picture in a table: a struct of bytes and path, or lists of numbers, HWC or CHW."""
    if isinstance(value, dict):
        try:
            image = read_image(io.BytesIO(value["bytes"]) if value["bytes"] else path.parent / value["path"])
        except UserError as error:
            raise UserError(f"{path}: a picture in it {str(error).partition(': ')[2]}") from error
    else:
        image = np.array(value, np.uint8)
        if image.ndim == 3 and image.shape[0] in (1, 3) and image.shape[2] > 3:
            image = image.transpose(1, 2, 0)
    if is_mask:
        return image.any(axis=2) if image.ndim == 3 else image > 0
    return image


def open_masks(path: Path) -> tuple[int, Callable[[int], np.ndarray]]:
    """How many masks a folder of images or a .npy holds, and a function from a frame's number to its mask (H, W)."""
    if path.is_dir():
        images = image_files(path)
        if not images:
            raise UserError(f"{path}: holds no images")
        return len(images), lambda number: read_mask(images[number])
    with readable(path, "masks"):
        masks = np.load(path, mmap_mode="r", allow_pickle=False)
        holds = "masks hold booleans, 0 and 1, 0 and 255, or floats from 0 to 1 (at least 0.5 is the agent)"
        if masks.dtype.kind not in "biuf":
            raise UserError(f"{path}: {masks.dtype}; {holds}")
        least, top = masks.min(), masks.max()
        fraction = masks.dtype.kind == "f" and least >= 0 and top <= 1
        if not fraction and not (top in (0, 1, 255) and np.isin(masks, (0, top)).all()):
            raise UserError(f"{path}: {masks.dtype} from {least} to {top}; {holds}")
        return len(masks), lambda number: masks[number] >= (0.5 if top <= 1 else 127.5)


def as_square(picture: np.ndarray, size: int, how: str | None, file: Path) -> np.ndarray:
    """A frame, uint8 (H, W, 3), or a mask, bool (H, W), as a square; how: crop or pad, None if it must be one."""
    if picture.shape[:2] == (size, size):
        return picture
    if how is None:
        raise UserError(f"{file}: pictures of {picture.shape[1]} x {picture.shape[0]} pixels, expected {size} x {size}")
    image = Image.fromarray(picture * np.uint8(255) if picture.dtype == bool else picture)
    image = (ImageOps.fit if how == "crop" else ImageOps.pad)(image, (size, size), Image.Resampling.BICUBIC)
    return np.asarray(image) > 127 if picture.dtype == bool else np.asarray(image)


# --- clips ---


def frames(source: Path) -> Iterator[np.ndarray]:
    """The frames of `timed_frames` without their times."""
    return (frame for _, frame in timed_frames(source))


def timed_frames(source: Path) -> Iterator[tuple[float | None, np.ndarray]]:
    """Every frame of a folder of images, a video or a gif as it is stored, uint8 (H, W, 3), all of one size.

    With each its time in seconds since the start, None in a folder. Frames come while the file is decoded, upright if
    its metadata say how; that a file is cut off or damaged may show after the last good frame.
    """
    if source.is_dir():
        pictures = ((path, None, read_image(path)) for path in image_files(source))
    else:
        read = _gif_frames if source.suffix.lower() == ".gif" else _video_frames
        pictures = ((source, seconds, frame) for seconds, frame in read(source))
    shape = None
    for path, seconds, frame in pictures:
        shape = shape or frame.shape
        if frame.shape != shape:
            sizes = " to ".join(f"{width} x {height}" for height, width, _ in (shape, frame.shape))
            raise UserError(f"{path}: the size changes from {sizes}; a clip has frames of one size")
        yield seconds, frame
    if shape is None:
        raise UserError(f"{source}: holds no images ({', '.join(sorted(IMAGE_SUFFIXES))})")


def _video_frames(path: Path) -> Iterator[tuple[float, np.ndarray]]:
    _check_length(path)
    with readable(path, "a video"):
        import imageio_ffmpeg  # only here: a machine that trains may lack it

        ffmpeg = imageio_ffmpeg.get_ffmpeg_exe()
    times, times_out = os.pipe()
    command = [ffmpeg, "-nostdin", "-v", "error", "-xerror", "-i", f"file:{path}"]
    every = ["-map", "0:V:0", "-noautoscale", "-fps_mode", "passthrough", "-enc_time_base", "demux"]
    every += ["-flush_packets", "1"]  # else the times come too late
    command += [*every, "-c:v", "ppm", "-pix_fmt", "rgb24", "-f", "image2pipe", "pipe:1"]
    # Line by line beside the pictures, their times. Two frames may have the same: -f tee would take that for an error.
    command += [*every, "-c:v", "wrapped_avframe", "-f", "framecrc", f"pipe:{times_out}"]
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as messages, open(times) as lines:
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=messages,
            pass_fds=[times_out],
            start_new_session=True,  # Ctrl-C is for the caller, and a video that it ends would seem damaged
        )
        os.close(times_out)
        count = 0
        try:
            while process.stdout.readline():  # P6; then width and height, the largest value, and the pixels
                width, height = map(int, process.stdout.readline().split())
                process.stdout.readline()
                pixels = process.stdout.read(3 * width * height)
                while (line := lines.readline()).startswith("#"):
                    if line.startswith("#tb"):
                        numerator, denominator = map(int, line.split(":")[1].split("/"))
                if not line:
                    break  # ffmpeg has died
                timestamp = int(line.split(",")[2])
                yield timestamp * numerator / denominator, np.frombuffer(pixels, np.uint8).reshape(height, width, 3)
                count += 1
            status = process.wait()
        finally:
            process.kill()  # if the caller wants no more frames
            process.wait()
            process.stdout.close()
        messages.seek(0)
        text = "".join(line for line in messages if "monotonic" not in line and "Last message repeated" not in line)
    if "matches no streams" in text:
        raise UserError(f"{path}: holds no video")
    # Not every message is an error, but some ends that come too early are only messages.
    if status or not count or re.search("ended prematurely|partial file", text):
        with path.open("rb") as file:  # a failing disk is an OSError
            while file.read(1 << 20):
                pass
        if status == -signal.SIGKILL:
            raise MemoryError(f"{path}: ffmpeg was killed")
        reason = re.sub(r"^\[.*?\] ", "", text.partition("\n")[0]) or f"ffmpeg's status is {status}"
        after = f"after {count} frames " if count else ""
        raise UserError(f"{path}: cannot be read as a video {after}({reason}); copy it again, or encode it again")


def _check_length(path: Path) -> None:
    """Raises `UserError` for an mp4, mov or avi that is shorter than its parts say; ffmpeg does not tell of each."""
    length, end = path.stat().st_size, 0
    if not length:
        raise UserError(f"{path}: is empty")
    with path.open("rb") as file:
        while end < length:
            file.seek(end)
            head = file.read(16)
            if head[:4] == b"RIFF":
                size = int.from_bytes(head[4:8], "little")  # without these 8 bytes, which some programs count too
                size %= 2**32 - 1  # what a program writes that does not know it yet, and cannot come back
            elif head[4:8] in MP4_BOXES:
                size = int.from_bytes(head[8:16] if head[:4] == b"\0\0\0\1" else head[:4], "big")
            else:
                size = 8 if end and len(head) < 8 and any(head) else 0  # cut off in what says how long a part is
            if size < 8:  # something else, or a part that goes on to the end of the file
                return
            end += size
    if end > length:
        raise UserError(f"{path}: is cut off, {length:,} of at least {end:,} bytes; copy it again, or encode it again")


def _gif_frames(path: Path) -> Iterator[tuple[float, np.ndarray]]:
    """By Pillow, since ffmpeg does not tell of damaged pixels."""
    seconds = 0.0
    with readable(path, "a gif"), Image.open(path, formats=["GIF"]) as image:
        if not path.read_bytes().rstrip(b"\0").endswith(b";"):
            raise UserError(f"{path}: is cut off; copy it again")
        for picture in ImageSequence.Iterator(image):
            yield seconds, np.asarray(picture.convert("RGB"))
            seconds += (picture.info.get("duration") or 100) / 1000  # as browsers take one that has none
