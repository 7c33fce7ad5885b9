"""Distractors: background clips and their player, the camera walk and the colour walk.

The walks follow the Distracting Control Suite (Stone et al., 2021), dynamic setting, without two of its faults: every
random number comes from the generator that the caller passes, and the camera is not confined to the front quadrant.
"""

import functools
import hashlib
import os
import shutil
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from common import media
from common.cli import UserError
from common.store import fill
from common.tasks import Task

DAVIS_URL = "https://data.vision.ee.ethz.ch/csergi/share/davis/DAVIS-2017-trainval-480p.zip"
DAVIS_NAMES = {  # DAVIS 2017's lists, for copies without them
    "train": "bear bmx-bumps boat boxing-fisheye breakdance-flare bus car-turn cat-girl classic-car color-run crossing "
    "dance-jump dancing disc-jockey dog-agility dog-gooses dogs-scale drift-turn drone elephant flamingo hike hockey "
    "horsejump-low kid-football kite-walk koala lady-running lindy-hop longboard lucia mallard-fly mallard-water "
    "miami-surf motocross-bumps motorbike night-race paragliding planes-water rallye rhino rollerblade schoolgirls "
    "scooter-board scooter-gray sheep skate-park snowboard soccerball stroller stunt surf swing tennis tractor-sand "
    "train tuk-tuk upside-down varanus-cage walking",
    "val": "bike-packing blackswan bmx-trees breakdance camel car-roundabout car-shadow cows dance-twirl dog dogs-jump "
    "drift-chicane drift-straight goat gold-fish horsejump-high india judo kite-surf lab-coat libby loading "
    "mbike-trick motocross-jump paragliding-launch parkour pigs scooter-black shooting soapbox",
}
DCS_NUM_VIDEOS = 4  # the "easy" setting
SYNTHETIC_CLIPS = 16  # per split
SYNTHETIC_FRAMES = 64
FACE_SCALE = 2.5  # the camera (45 degrees) sees 0.41 of a skybox face's width, so this many texels per image pixel


@dataclass(frozen=True)
class DistractorConfig:
    """What moves besides the agent. Camera and colour distractors exist on DCS only."""

    backgrounds: str = "davis"
    """`davis`, `synthetic`, or a folder of clips (folders of images, or video files)."""
    davis_dir: Path = Path("data/DAVIS")
    """Official folder layout; downloaded if it is missing."""
    num_videos: int | None = None
    """Number of clips, the first ones of the split in sorted order. Default: 4 on DCS, all on DMW."""
    camera_scale: float = 0.1
    """Difficulty of the camera walk, 0 switches it off."""
    color_scale: float = 0.1
    """Difficulty of the colour walk, 0 switches it off."""


@dataclass(frozen=True)
class Clip:
    """A background clip, decoded at first use."""

    name: str
    load: Callable[[], np.ndarray]
    mirror: bool = False

    @functools.cached_property
    def frames(self) -> np.ndarray:
        """uint8 (T, size, size, 3), contiguous; left and right exchanged if `mirror`."""
        frames = self.load()
        return np.ascontiguousarray(frames[:, :, ::-1]) if self.mirror else frames


@functools.cache
def load_clips(config: DistractorConfig, task: Task, split: str, image_size: int) -> list[Clip]:
    """The clips of a split, in sorted order, square and at the size that is rendered; cached per process.

    On DCS a frame covers one skybox face (`FACE_SCALE` times the image size) and is mirrored, because the face is seen
    from the inside; on DMW it covers the image. A user's clips are split by 80% for training and the rest for testing.
    Raises `UserError` if there are no clips or fewer than `config.num_videos`, or one that DAVIS lists is absent.
    """
    on_skybox = task.suite == "dcs"
    size = round(FACE_SCALE * image_size) if on_skybox else image_size
    wanted = config.num_videos or (DCS_NUM_VIDEOS if on_skybox else None)
    if config.backgrounds == "synthetic":
        numbers = range(SYNTHETIC_CLIPS)
        loads = {f"synthetic-{split}-{n:02d}": functools.partial(synthetic_clip, split, n, size) for n in numbers}
    else:
        folder = config.davis_dir if config.backgrounds == "davis" else Path(config.backgrounds)
        sources = (_davis_clips if config.backgrounds == "davis" else _own_clips)(folder, split)[:wanted]
        if absent := [source.name for source in sources if not _is_clip(source)]:  # of those in DAVIS's list
            raise UserError(
                f"{sources[0].parent} has no images of {len(absent)} of the first {len(sources)} clips in the list for "
                f"the {split} split: {_enumerate(absent)}; put them there, or take fewer (--num-videos)"
            )
        loads = {source.name: functools.partial(_read_clip, source, size) for source in sources}
    clips = [Clip(name, load, mirror=on_skybox) for name, load in loads.items()]
    if len(clips) < (needed := config.num_videos or 1):
        raise UserError(
            f"--backgrounds {config.backgrounds} has {len(clips)} clips in the {split} split, fewer than {needed} "
            "(--num-videos); of a folder's clips the first 80% are for training, the rest for testing"
        )
    return clips[:wanted]


def clips_digest(config: DistractorConfig, task: Task, split: str, image_size: int) -> dict[str, str]:
    """Clip name -> SHA-256 of its frames as rendered, so that reduced and full-size copies of DAVIS do not mix."""
    clips = load_clips(config, task, split, image_size)
    return {clip.name: hashlib.sha256(clip.frames.data).hexdigest() for clip in clips}


def _own_clips(folder: Path, split: str) -> list[Path]:
    """A user's clips of a split: folders of images, or video files."""
    if not folder.is_dir():
        raise UserError(f"--backgrounds is {str(folder)!r}: neither 'davis' nor 'synthetic' nor a folder of clips")
    entries = media.listing(folder)
    clips = [path for path in entries if _is_clip(path)]
    if len(clips) < 2:
        images, videos = (" ".join(sorted(suffixes)) for suffixes in (media.IMAGE_SUFFIXES, media.VIDEO_SUFFIXES))
        raise UserError(
            f"--backgrounds {folder} needs a clip for training and one for testing: folders of images ({images}) or "
            f"videos ({videos}); found: {_enumerate([path.name for path in entries])}"
        )
    num_train = int(0.8 * len(clips))
    return clips[:num_train] if split == "train" else clips[num_train:]


def _davis_clips(davis_dir: Path, split: str) -> list[Path]:
    """Where the clips that DAVIS 2017 or 2016 lists for a split belong, in sorted order."""
    fill(lambda: [davis_dir], lambda path: not path.exists(), download_davis)
    name = "train" if split == "train" else "val"
    clips_dir, lists_dir = davis_dir / "JPEGImages" / "480p", davis_dir / "ImageSets"
    files = [path for year in ("2017", "480p") if (path := lists_dir / year / f"{name}.txt").is_file()]
    if not clips_dir.is_dir() or (lists_dir.exists() and not files):
        found = [str(path.relative_to(davis_dir)) for depth in ("*", "*/*") for path in sorted(davis_dir.glob(depth))]
        raise UserError(
            f"{davis_dir} is not DAVIS at 480p, which has clips in JPEGImages/480p and lists in "
            f"ImageSets/2017/train.txt and val.txt (2016: ImageSets/480p); found: {_enumerate(found)}. Give the right "
            "--davis-dir (one that does not exist is downloaded)"
        )
    if not files:
        return [clips_dir / clip for clip in DAVIS_NAMES[name].split()]
    with media.readable(files[0], "a list of clips"):
        lines = files[0].read_text(encoding="utf-8-sig").splitlines()
    entries = [Path(line.split()[0]) for line in lines if line.strip()]
    # DAVIS 2016 lists frames: /JPEGImages/480p/bear/00000.jpg /Annotations/480p/bear/00000.png
    return [clips_dir / clip for clip in sorted({entry.parent.name or entry.name for entry in entries})]


def _enumerate(names: list[str], most: int = 8) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return (", ".join(names[:most]) or "nothing") + more


def _is_clip(path: Path) -> bool:
    return bool(media.image_files(path)) if path.is_dir() else path.suffix.lower() in media.VIDEO_SUFFIXES


def _read_clip(source: Path, size: int) -> np.ndarray:
    """uint8 (T, size, size, 3), from a folder of images or a video file: the square in the middle."""
    return np.stack([media.as_square(frame, size, "crop", source) for frame in media.frames(source)])


# --- DAVIS download ---


def download_davis(davis_dir: Path) -> None:
    """Download DAVIS 2017 (480p, train and val) to `davis_dir`, complete or not at all.

    The site publishes no checksum, so the length that the server announces and the archive's own CRC of every file are
    checked. Raises `UserError` without a network.
    """
    import pooch

    partial = davis_dir.with_name(f".{davis_dir.name}.part")
    shutil.rmtree(partial, ignore_errors=True)  # what a killed process left
    partial.mkdir()
    try:
        print(f"Downloading {DAVIS_URL} (0.8 GB)")
        pooch.HTTPDownloader(progressbar=True, chunk_size=1 << 20)(DAVIS_URL, partial / "davis.zip", None)
        with zipfile.ZipFile(partial / "davis.zip") as archive:
            archive.extractall(partial)  # reading a file checks its CRC
        os.replace(partial / "DAVIS", davis_dir)
    except (OSError, zipfile.BadZipFile, zlib.error) as error:
        raise UserError(
            f"{davis_dir} is missing and downloading it failed ({error}): try again, put the folder DAVIS of "
            f"{DAVIS_URL} at {davis_dir} (--davis-dir), or use --backgrounds synthetic"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


# --- synthetic clips ---


def synthetic_clip(split: str, index: int, size: int, num_frames: int = SYNTHETIC_FRAMES) -> np.ndarray:
    """A seeded clip with 1/f statistics: a drifting, warping texture and moving objects. uint8 (T, size, size, 3)."""
    rng = np.random.default_rng(np.random.SeedSequence([2021, {"train": 0, "test": 1}[split], index]))
    period = 2 * size  # the textures are periodic, so that they can drift for ever
    scenery = _pink_texture(rng, period, exponent=1.2, grayness=16)
    y, x = np.mgrid[:size, :size].astype(np.float32)
    drift = rng.uniform(-1.0, 1.0, 2) * size / 48
    wave = rng.uniform(0.5, 1.5, 2) * 2 * np.pi / size
    rate = rng.uniform(0.05, 0.15, 2) * rng.choice([-1, 1], 2)
    phase = rng.uniform(0, 2 * np.pi, 2)
    amplitude = rng.uniform(0.02, 0.05, 2) * size

    objects = []
    for _ in range(int(rng.integers(8, 13))):
        skin = _pink_texture(rng, size, exponent=1.4, grayness=5)
        axes = rng.uniform(0.03, 0.10, 2) * size
        centre, velocity = rng.uniform(0, size, 2), rng.normal(0, size / 60, 2)
        objects.append((skin, axes, centre, velocity, rng.uniform(0, np.pi), rng.normal(0, 0.05), rng.random() < 0.5))

    frames = np.empty((num_frames, size, size, 3), np.uint8)
    for t in range(num_frames):
        warped_y = y + drift[0] * t + amplitude[0] * np.sin(wave[0] * x + rate[0] * t + phase[0])
        warped_x = x + drift[1] * t + amplitude[1] * np.sin(wave[1] * y + rate[1] * t + phase[1])
        frame = _sample(scenery, warped_y, warped_x)
        for skin, axes, centre, velocity, angle, spin, is_box in objects:
            cy, cx = size - abs((centre + velocity * t) % (2 * size) - size)  # as a ball between two walls
            cos, sin = np.cos(angle + spin * t), np.sin(angle + spin * t)
            reach = int(np.ceil(1.5 * axes.max()))
            rows = slice(max(int(cy) - reach, 0), int(cy) + reach + 1)
            columns = slice(max(int(cx) - reach, 0), int(cx) + reach + 1)
            dy, dx = y[rows, columns] - cy, x[rows, columns] - cx
            u, v = (cos * dx + sin * dy) / axes[0], (cos * dy - sin * dx) / axes[1]
            distance = np.maximum(abs(u), abs(v)) if is_box else np.hypot(u, v)
            cover = np.clip((1 - distance) * axes.min() + 0.5, 0, 1)[..., None]  # one pixel of soft edge
            patch = skin[(dy.astype(int)) % size, (dx.astype(int)) % size]
            frame[rows, columns] += cover * (patch - frame[rows, columns])
        frames[t] = np.clip(frame, 0, 255)
    return frames


def _pink_texture(rng: np.random.Generator, size: int, exponent: float, grayness: float) -> np.ndarray:
    """Periodic colour noise of amplitude 1 / frequency ** exponent. float32 (size, size, 3), 0 to 255."""
    fy, fx = np.fft.fftfreq(size)[:, None], np.fft.rfftfreq(size)[None]
    radius = np.hypot(fy, fx)
    radius[0, 0] = np.inf
    spectrum = np.fft.rfft2(rng.standard_normal((3, size, size))) * radius**-exponent
    noise = np.fft.irfft2(spectrum, s=(size, size))
    light, hue, other = noise / noise.std(axis=(1, 2), keepdims=True)
    # As in photographs, most of the contrast is common to the three channels.
    tint = rng.dirichlet([grayness] * 3) * 3 * rng.uniform(90, 150)
    direction, second = rng.standard_normal((2, 3))
    color = tint + light[..., None] * tint * 0.35 + hue[..., None] * direction * 14 + other[..., None] * second * 7
    return np.clip(color, 0, 255).astype(np.float32)


def _sample(texture: np.ndarray, y: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Bilinear look-up in a periodic texture (P, P, 3) at coordinates (h, w): float32 (h, w, 3)."""
    period = len(texture)
    y0, x0 = np.floor(y).astype(np.int32), np.floor(x).astype(np.int32)
    fy, fx = (y - y0)[..., None].astype(np.float32), (x - x0)[..., None].astype(np.float32)
    row0, row1 = y0 % period * period, (y0 + 1) % period * period
    column0, column1 = x0 % period, (x0 + 1) % period
    texels = texture.reshape(-1, 3)
    left = texels.take(row0 + column0, axis=0) * (1 - fy) + texels.take(row1 + column0, axis=0) * fy
    right = texels.take(row0 + column1, axis=0) * (1 - fy) + texels.take(row1 + column1, axis=0) * fy
    return left * (1 - fx) + right * fx


# --- what changes at every step ---


class BackgroundPlayer:
    """Plays a random clip from a random frame in a random direction, and turns around at its ends."""

    def __init__(self, clips: list[Clip], rng: np.random.Generator):
        self.clip = clips[rng.integers(len(clips))]
        self.index = int(rng.integers(len(self.clip.frames)))
        self.direction = 1 if rng.random() < 0.5 else -1

    @property
    def frame(self) -> np.ndarray:
        """The current frame, uint8 (size, size, 3)."""
        return self.clip.frames[self.index]

    def step(self) -> None:
        last = len(self.clip.frames) - 1
        if not 0 <= self.index + self.direction <= last:
            self.direction = -self.direction
        self.index = min(max(self.index + self.direction, 0), last)


class CameraWalk:
    """Random walk of a camera on a spherical shell around the agent, which it keeps looking at.

    Per step the velocity changes by a Gaussian of std 0.1 s in each Cartesian direction and is cut to norm 0.4 s, both
    for a camera 4 m away; they scale with the distance. Angles stay within (pi / 2) s of the task's camera, the
    distance between 1 - 0.5 s and 1 + 1.5 s times the task's, the roll within (pi / 2) s (its velocity: std
    (pi / 300) s, at most (pi / 50) s). The camera never sinks below the agent, or below the task's own camera where
    that one is lower.
    """

    def __init__(self, rng: np.random.Generator, scale: float, offset: np.ndarray, target: np.ndarray):
        """`offset` (3,) in m: the task's camera relative to the agent; `target` (3,): the point that it looks at."""
        self._rng, self._target = rng, target
        radius, self._heading, polar = _to_spherical(offset)
        # Angles are kept relative to the task's heading, so that no range crosses the jump of atan2 at pi.
        self.low = np.array([radius * (1 - 0.5 * scale), -np.pi / 2 * scale, max(polar - np.pi / 2 * scale, 0.0)])
        self.high = np.array([radius * (1 + 1.5 * scale), np.pi / 2 * scale, polar + np.pi / 2 * scale])
        self.high[2] = min(self.high[2], max(polar, np.pi / 2))
        self.max_roll = np.pi / 2 * scale
        self.velocity_std, self.max_velocity = 0.1 * scale * radius / 4, 0.4 * scale * radius / 4
        self.roll_velocity_std, self.max_roll_velocity = np.pi / 300 * scale, np.pi / 50 * scale

        self.spherical = rng.uniform(self.low, self.high)  # distance, heading, angle from the vertical
        self.roll = float(rng.uniform(-self.max_roll, self.max_roll))
        direction = rng.standard_normal(3)
        self.velocity = direction / np.linalg.norm(direction) * rng.uniform(0, self.max_velocity)
        self.roll_velocity = float(rng.uniform(-self.max_roll_velocity, self.max_roll_velocity))

    def step(self) -> None:
        self.velocity += self.velocity_std * self._rng.standard_normal(3)
        speed = np.linalg.norm(self.velocity)
        if speed > self.max_velocity:
            self.velocity *= self.max_velocity / speed
        before = _to_cartesian(self.spherical)
        self.spherical = np.clip(_to_spherical(before + self.velocity), self.low, self.high)
        self.velocity = _to_cartesian(self.spherical) - before  # a wall stops the motion into it

        velocity = self.roll_velocity + self.roll_velocity_std * self._rng.standard_normal()
        velocity = np.clip(velocity, -self.max_roll_velocity, self.max_roll_velocity)
        roll = float(np.clip(self.roll + velocity, -self.max_roll, self.max_roll))
        self.roll_velocity, self.roll = roll - self.roll, roll

    def pose(self) -> tuple[np.ndarray, np.ndarray]:
        """Position relative to the agent (3,) in m, and rotation (3, 3) whose columns point right, up and backward."""
        radius, heading, polar = self.spherical
        position = _to_cartesian(np.array([radius, heading + self._heading, polar]))
        x, y, z = (position - self._target) / np.linalg.norm(position - self._target)
        level = np.hypot(x, y)
        backward = np.array([x, y, z])
        right = np.array([-y, x, 0]) / level
        up = np.array([-x * z, -y * z, level**2]) / level
        cos, sin = np.cos(self.roll), np.sin(self.roll)
        return position, np.stack([cos * right + sin * up, cos * up - sin * right, backward], axis=1)


def _to_spherical(point: np.ndarray) -> np.ndarray:
    x, y, z = point
    return np.array([np.linalg.norm(point), np.arctan2(y, x), np.arctan2(np.hypot(x, y), z)])


def _to_cartesian(spherical: np.ndarray) -> np.ndarray:
    radius, heading, polar = spherical
    return radius * np.array([np.sin(polar) * np.cos(heading), np.sin(polar) * np.sin(heading), np.cos(polar)])


class ColorWalk:
    """Random walk of material colours: a uniform start within `scale` of the original, steps of std 0.03 `scale`.

    Colours stay within `scale` of the original and in [0, 1]. Opacity stays: an agent must not become transparent.
    """

    def __init__(self, rng: np.random.Generator, scale: float, original: np.ndarray):
        """`original`: float (num_materials, 3), RGB in [0, 1]."""
        self._rng, self.step_std = rng, 0.03 * scale
        self.low, self.high = np.clip(original - scale, 0, 1), np.clip(original + scale, 0, 1)
        self.rgb = rng.uniform(self.low, self.high)

    def step(self) -> None:
        self.rgb = np.clip(self.rgb + self.step_std * self._rng.standard_normal(self.rgb.shape), self.low, self.high)
