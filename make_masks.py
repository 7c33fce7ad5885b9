"""Make masks of the agent with SAM 2.1, or take in masks that another tool made.

    python make_masks.py --env cheetah-run
    python make_masks.py --env cheetah-run --import DIR --name mine

Writes 00000.sam.h5 beside every shard 00000.h5 of data/<env>/train and /test; masklam.py --mask-source sam reads them.
SAM's video predictor gets one box per task in an episode's first frame and follows the agent to the end. The same
command again goes on where the last one stopped. Several GPUs share the work: run it once on each.

--import reads DIR/<env>/<split>/<render>/00000.npy, (frames, height, width), or a folder 00000/ of one-channel PNGs in
the order of their names: one per episode, numbered through the split, with a mask for each frame, the last one too.
"""

import hashlib
import itertools
import json
import re
import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
import tyro

from common import pictures, runs, sam
from common.dataset import Dataset
from common.errors import UserError
from common.shards import (
    DERIVED,
    RENDERS,
    DamagedShard,
    MaskFile,
    Shard,
    ShardTaken,
    SidecarWriter,
    plan_differences,
    read_mask_file,
    remove_stale_parts,
    sidecar_path,
)
from common.tasks import TASKS, get_task

EnvName = Literal[(*TASKS, "all")]
RESERVED = ("gt", *DERIVED)  # the simulator's masks, and other files beside the shards
LOW = 0.5  # mean IoU below which an episode gets a warning
SHOWN = 5  # worst episodes and warnings that are printed; the report has all
COLUMNS = 10  # frames of an episode on the contact sheet


@dataclass
class Args:
    env: EnvName = "cheetah-run"
    """task; all: every task that has a dataset"""
    data_dir: Path = Path("data")
    """folder of the datasets that make_dataset.py wrote"""
    split: Literal["both", "train", "test"] = "both"
    """which splits"""
    render: Literal["both", "clean", "distractor"] = "both"
    """which renders; both: those that the dataset has"""
    name: str = "sam"
    """name of the masks: <shard>.<name>.h5, and --mask-source <name> in masklam.py"""
    model: Literal["tiny", "small", "base-plus", "large"] = "tiny"
    """size of SAM 2.1's image encoder (hiera)"""
    checkpoint: Path | None = None
    """file with the weights; None: from the Hugging Face hub"""
    image_size: Literal[1024, 512] = 1024
    """height and width at which SAM sees a frame; 512 is faster, 1024 is what it was trained on"""
    box: tuple[int, int, int, int] | None = None
    """x0 y0 x1 y1 of the agent in an episode's first frame, in pixels; None: the task's, see --show-boxes"""
    batch_episodes: int | None = None
    """episodes that run side by side; None: 8 on a GPU, 1 on a CPU"""
    import_dir: Annotated[Path | None, tyro.conf.arg(name="import")] = None
    """take in the masks in this folder instead of running SAM; needs --name"""
    show_boxes: bool = False
    """make no masks: write data/<env>/boxes.png, first frames with the task's box, and compare it with the agent's"""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """where SAM runs; auto takes the GPU if there is one"""
    compile: bool | None = None
    """torch.compile SAM's networks; None: on a GPU"""


@dataclass
class Job:
    """One split with the renders that are to have masks."""

    dataset: Dataset
    renders: tuple[str, ...]
    box: tuple[float, float, float, float]

    @property
    def frames(self) -> int:
        return self.dataset.num_frames * len(self.renders)


# Masks of a shard's render, bit-packed uint8 (T, H W / 8). The int is the shard's first episode, counted in the split.
Segment = Callable[[Job, Shard, str, int], np.ndarray]


def open_jobs(args: Args) -> list[Job]:
    """The datasets to work on. UserError if one is missing, incomplete or lacks the render, or the box is not in it."""
    envs = [args.env] if args.env != "all" else [env for env in TASKS if (args.data_dir / env).is_dir()]
    if not envs:
        raise UserError(f"{args.data_dir}: no datasets here; make them with: python make_dataset.py --env all")
    jobs = []
    for env in envs:
        for split in ("train", "test") if args.split == "both" else (args.split,):
            try:
                dataset = Dataset(args.data_dir, env, split, "clean" if args.render == "clean" else "distractor")
            except UserError:
                if args.render != "both":
                    raise
                dataset = Dataset(args.data_dir, env, split, "clean")  # the same error, or a set of clean frames only
            has = dataset.plan["renders"]
            renders = tuple(render for render in RENDERS if render in has and args.render in ("both", render))
            size = dataset.image_size
            box = get_task(env).scaled_box(size) if args.box is None else tuple(float(value) for value in args.box)
            x0, y0, x1, y1 = box
            if not (0 <= x0 < x1 <= size and 0 <= y0 < y1 <= size):
                raise UserError(
                    f"--box {' '.join(map(str, args.box or box))} does not lie in the frames of {env}: x0 < x1 and "
                    f"y0 < y1, from 0 to {size}"
                )
            jobs.append(Job(dataset, renders, box))
    return jobs


# ---------------------------------------------------------------------------------------------------------------- files


def mean_iou(masks: np.ndarray, truth: np.ndarray, episode_start: np.ndarray) -> np.ndarray:
    """Mean over the frames of each episode of intersection over union; 1 where both masks are empty.

    Args:
        masks, truth: bit-packed uint8 (T, H W / 8).
        episode_start: int64 (N + 1,).

    Returns float64 (N,).
    """
    shared = np.bitwise_count(masks & truth).sum(1, dtype=np.int64)
    either = np.bitwise_count(masks | truth).sum(1, dtype=np.int64)
    iou = np.where(either > 0, shared / np.maximum(either, 1), 1.0)
    return np.add.reduceat(iou, episode_start[:-1]) / np.diff(episode_start)


def empty_frames(masks: np.ndarray, episode_start: np.ndarray) -> np.ndarray:
    """Frames without a mask in each episode, int64 (N,)."""
    return np.add.reduceat((~masks.any(1)).astype(np.int64), episode_start[:-1])


def existing(path: Path, shard: Shard, settings: dict[str, Any], announce: bool = False) -> MaskFile | None:
    """The mask file of a shard; None if there is none, or none of this shard as it is now (`announce` prints why).

    Raises UserError if it was made with other settings.
    """
    if not path.exists():
        return None
    try:
        found = read_mask_file(path, shard)
    except DamagedShard as error:
        if announce:
            print(f"{error}; making it again")
        return None
    known = {key: value for key, value in found.settings.items() if key in settings or key == "method"}
    if lines := plan_differences(known, settings):
        raise UserError(
            f"{path}: made with other settings ({', '.join(lines)}); give these masks another --name, or remove the "
            f"old ones: rm {shlex.quote(str(path.parent))}/*.{path.name.split('.')[1]}.h5"
        )
    return found


def write_masks(
    job: Job, number: int, name: str, segment: Segment, settings: dict[str, Any], command: str, keep: bool
) -> int:
    """Write the mask file of a shard. Returns the masks made, 0 if another process had made them already.

    keep: renders that the file has already are kept, else those of the job are made again.

    Raises ShardTaken if another process is at it.
    """
    path = job.dataset.shards[number].path
    first = sum(shard.num_episodes for shard in job.dataset.shards[:number])
    with SidecarWriter(path, name) as writer:
        shard = writer.shard
        if shard.content_hash != job.dataset.shards[number].content_hash:
            raise UserError(f"{path}: was replaced while this command ran; run it again")
        old = existing(writer.path, shard, settings)
        if keep and old is not None and set(job.renders) <= set(old.renders):
            return 0
        arrays: dict[str, np.ndarray] = {}
        made = 0
        for render in RENDERS:
            if old is not None and render in old.renders and (keep or render not in job.renders):
                masks = old.masks[render].copy()
            elif render in job.renders:
                masks = segment(job, shard, render, first)
                made += len(masks)
            else:
                continue
            arrays[f"{render}/mask"] = masks
            arrays[f"{render}/iou"] = mean_iou(masks, shard.array(f"{render}/mask"), shard.episode_start)
            arrays[f"{render}/empty"] = empty_frames(masks, shard.episode_start)
        hashes = {
            f"{render}_hash": hashlib.sha256(arrays[f"{render}/mask"]).hexdigest()
            for render in RENDERS
            if f"{render}/mask" in arrays
        }
        writer.write(arrays, **hashes, settings=json.dumps(settings, sort_keys=True), command=command)
    return made


# ----------------------------------------------------------------------------------------------------------------- SAM


class Segmenter:
    """SAM 2.1, loaded when the first shard needs it."""

    def __init__(self, args: Args, checkpoint: Path, weights: dict[str, torch.Tensor], frames: int, done: int) -> None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
        device = torch.device(name if args.device == "auto" else args.device)
        self.batch = args.batch_episodes or (8 if device.type == "cuda" else 1)
        self.predictor = sam.load_predictor(
            args.model, weights, args.image_size, device, name=f"--checkpoint {checkpoint}"
        )
        if device.type == "cuda" if args.compile is None else args.compile:
            sam.compile_predictor(self.predictor)
        self.progress = runs.Progress(f"SAM 2.1 {args.model}", frames, "frames", done)

    def __call__(self, job: Job, shard: Shard, render: str, first: int) -> np.ndarray:
        frames = shard.array(f"{render}/observation")
        episodes = [frames[start:stop] for start, stop in zip(shard.episode_start[:-1], shard.episode_start[1:])]
        return np.concatenate(
            sam.segment_episodes(self.predictor, episodes, job.box, self.batch, self._tick), dtype=np.uint8
        )

    def _tick(self, frames: int) -> None:
        self.progress.update(frames)
        if runs.stop_requested():
            raise runs.Stopped("the mask files that are complete stay; the same command goes on with the next one")


def sam_settings(args: Args, job: Job) -> dict[str, Any]:
    return {"method": "sam2.1", "model": args.model, "image_size": args.image_size, "box": list(job.box)}


def sam_command(args: Args, env: str) -> str:
    """The command that makes the same masks, for the messages of readers, without folders of this machine."""
    words = ["python make_masks.py", f"--env {env}"]
    for option, value in (("name", args.name), ("model", args.model), ("image-size", args.image_size)):
        if value != getattr(Args, option.replace("-", "_")):
            words.append(f"--{option} {value}")
    if args.checkpoint is not None:
        words.append("--checkpoint FILE")
    if args.box is not None:
        words.append(f"--box {' '.join(map(str, args.box))}")
    return " ".join(words)


def make(args: Args, jobs: list[Job]) -> None:
    """Run SAM over every shard that has no masks of these settings yet."""
    todo, done, digest = [], 0, {}
    if args.checkpoint is not None:
        sam.check_file(args.checkpoint)
        digest = {"checkpoint_sha256": sam.file_sha256(args.checkpoint)}
    for job in jobs:
        for number, shard in enumerate(job.dataset.shards):
            found = existing(
                sidecar_path(shard.path, args.name), shard, sam_settings(args, job) | digest, announce=True
            )
            missing = [render for render in job.renders if found is None or render not in found.renders]
            done += shard.frames * (len(job.renders) - len(missing))
            if missing:
                todo.append((job, number))
    if not todo:
        print(f"masks '{args.name}' are complete")
        return
    if args.device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: torch finds no GPU here; use --device cpu")
    checkpoint = args.checkpoint or sam.find_checkpoint(args.model)
    weights = sam.read_checkpoint(checkpoint)
    digest = {"checkpoint_sha256": sam.file_sha256(checkpoint)}
    for job in jobs:  # masks of one set come from one checkpoint
        for shard in job.dataset.shards:
            existing(sidecar_path(shard.path, args.name), shard, sam_settings(args, job) | digest)
    segmenter = Segmenter(args, checkpoint, weights, sum(job.frames for job in jobs), done)
    start, made = time.monotonic(), 0
    while todo:
        taken = []
        for job, number in todo:
            command, settings = sam_command(args, job.dataset.env), sam_settings(args, job) | digest
            try:
                made += write_masks(job, number, args.name, segmenter, settings, command, keep=True)
            except ShardTaken:
                taken.append((job, number))
            if runs.stop_requested():
                raise runs.Stopped("the mask files that are complete stay; the same command goes on with the next one")
        todo = taken
        if todo:  # another process is at them; it may be killed
            time.sleep(2)
    segmenter.progress.close()
    seconds = time.monotonic() - start
    print(f"{made:,} masks in {seconds:.0f} s, {made / seconds:.1f} frames/s")


# -------------------------------------------------------------------------------------------------------------- import


def numbered(folder: Path, episodes: int) -> list[Path]:
    """The episodes' files (.npy) or folders in order. UserError if some are missing, double or too many."""
    found: dict[int, Path] = {}
    if not folder.is_dir():
        raise UserError(
            f"--import: {folder} is no folder; masks are read from DIR/<env>/<split>/<render>/00000.npy or 00000/*.png"
        )
    for path in sorted(folder.iterdir()):
        if not re.fullmatch(r"\d+", path.stem if path.suffix == ".npy" else path.name):
            raise UserError(f"{path}: not the number of an episode, as in 00000.npy or the folder 00000")
        number = int(path.stem if path.suffix == ".npy" else path.name)
        if number in found:
            raise UserError(f"{path}: a second one of episode {number}, beside {found[number].name}")
        found[number] = path
    if missing := [number for number in range(episodes) if number not in found]:
        names = ", ".join(f"{number:05d}" for number in missing[:3]) + (", ..." if len(missing) > 3 else "")
        raise UserError(f"{folder}: {len(missing)} of {episodes} episodes are missing ({names})")
    if extra := [path.name for number, path in sorted(found.items()) if number >= episodes]:
        raise UserError(f"{folder}: {extra[0]} is too many, the dataset has {episodes} episodes, from 00000 on")
    return [found[number] for number in range(episodes)]


def pngs(folder: Path) -> list[Path]:
    """The PNGs of an episode in the order of their names, numbers in them by value: frame_2 comes before frame_10."""

    def key(path: Path) -> list[str | int]:  # text and numbers take turns, so that only like is compared with like
        return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", path.stem)]

    found = sorted(folder.glob("*.png"), key=key)
    for first, second in itertools.pairwise(found):
        if key(first) == key(second):
            raise UserError(f"{second}: the same number as {first.name}; one mask for each frame is needed")
    return found


def check_episode(path: Path, frames: int, size: int) -> None:
    """UserError if an episode's masks do not have the frames' number and size. Reads headers only."""
    from PIL import Image, UnidentifiedImageError

    if path.suffix == ".npy":
        try:
            array = np.load(path, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            raise UserError(f"{path}: not a readable .npy array ({error})") from error
        if array.shape != (frames, size, size):
            raise UserError(f"{path}: shape {array.shape}, expected (frames, height, width) = {(frames, size, size)}")
        return
    images = pngs(path)
    if len(images) != frames:
        raise UserError(f"{path}: {len(images)} PNGs, but the episode has {frames} frames, its last one included")
    for image in images:
        try:
            with Image.open(image) as opened:
                shape, mode = opened.size, opened.mode
        except (OSError, UnidentifiedImageError) as error:
            raise UserError(f"{image}: not a readable PNG") from error
        if shape != (size, size):
            raise UserError(f"{image}: {shape[0]} x {shape[1]} pixels, the frames have {size} x {size}")
        if mode not in ("1", "L", "P", "I", "I;16"):
            raise UserError(f"{image}: mode {mode}; masks need one channel (black and white, gray, or palette)")


def read_episode(path: Path) -> np.ndarray:
    """An episode's masks, bit-packed uint8 (L + 1, H W / 8).

    True is: True; 1 where the largest value is 1; 255 where it is 255; at least 0.5 for floats from 0 to 1.
    """
    from PIL import Image

    try:
        if path.suffix == ".npy":
            values = np.load(path, allow_pickle=False)
        else:
            values = np.stack([np.asarray(Image.open(image)) for image in pngs(path)])
    except (OSError, ValueError, EOFError) as error:
        raise UserError(f"{path}: cannot be read ({error})") from error
    if values.dtype == bool:
        masks = values
    elif values.dtype.kind == "f" and np.isfinite(values).all() and values.min() >= 0 and values.max() <= 1:
        masks = values >= 0.5
    elif values.dtype.kind in "iu" and (
        ((values == 0) | (values == 1)).all() or ((values == 0) | (values == 255)).all()
    ):
        masks = values > 0
    else:
        raise UserError(
            f"{path}: {values.dtype} from {values.min()} to {values.max()}; a mask holds booleans, 0 and 1, 0 and 255, "
            "or floats from 0 to 1 (at least 0.5 is the agent)"
        )
    return np.packbits(masks.reshape(len(masks), -1), axis=1)


def take_in(args: Args, jobs: list[Job]) -> None:
    """Write the mask files from the masks in --import. Numbers and sizes are checked before the first is written."""
    settings = {"method": "import"}
    places: dict[tuple[int, str], list[Path]] = {}
    for number, job in enumerate(jobs):
        dataset = job.dataset
        for render in job.renders:
            folder = args.import_dir / dataset.env / dataset.split / render
            places[number, render] = numbered(folder, dataset.num_episodes)
            for path, frames in zip(places[number, render], np.diff(dataset.episode_start)):
                check_episode(path, int(frames), dataset.image_size)
        for shard in dataset.shards:
            existing(sidecar_path(shard.path, args.name), shard, settings, announce=True)
    progress = runs.Progress(f"masks '{args.name}'", sum(job.frames for job in jobs), "frames")

    for number, job in enumerate(jobs):

        def segment(job: Job, shard: Shard, render: str, first: int, number: int = number) -> np.ndarray:
            paths = places[number, render][first : first + shard.num_episodes]
            masks = np.concatenate([read_episode(path) for path in paths])
            progress.update(len(masks))
            return masks

        command = f"python make_masks.py --env {job.dataset.env} --import DIR --name {args.name}"
        for shard in range(len(job.dataset.shards)):
            if runs.stop_requested():
                raise runs.Stopped("the mask files that are complete stay; repeat the command to write the others")
            try:
                write_masks(job, shard, args.name, segment, settings, command, keep=False)
            except ShardTaken as error:
                raise UserError(f"another process is writing masks '{args.name}'; wait for it") from error
    progress.close()


# -------------------------------------------------------------------------------------------------------------- report


def unpack(packed: np.ndarray, size: int) -> np.ndarray:
    """Bit-packed masks (N, H W / 8) to bool (N, H, W)."""
    return np.unpackbits(packed, axis=-1).reshape(len(packed), size, size).astype(bool)


def report(args: Args, job: Job) -> None:
    """Print how the masks of a split compare with the simulator's, and write it as JSON and as a contact sheet."""
    dataset, size = job.dataset, job.dataset.image_size
    files = [read_mask_file(sidecar_path(shard.path, args.name), shard) for shard in dataset.shards]
    lengths = np.diff(dataset.episode_start)
    first = np.cumsum([0] + [shard.num_episodes for shard in dataset.shards])
    places = [(shard.path.name, episode) for shard in dataset.shards for episode in range(shard.num_episodes)]
    rows: dict[str, np.ndarray] = {}
    summary: dict[str, Any] = {"name": args.name, "settings": files[0].settings, "dataset": dataset.hash, "renders": {}}
    for render in job.renders:
        iou = np.concatenate([file.iou[render] for file in files])
        empty = np.concatenate([file.empty[render] for file in files])
        order = np.argsort(iou, kind="stable")
        mean = float((iou * lengths).sum() / lengths.sum())
        print(
            f"{dataset.folder}, {render}: mIoU {mean:.3f} over {lengths.sum():,} frames, episodes from {iou.min():.3f} "
            f"to {iou.max():.3f} (median {np.median(iou):.3f}); empty masks {empty.sum() / lengths.sum():.2%}"
        )
        worst = ", ".join(f"{episode} ({iou[episode]:.3f})" for episode in order[:SHOWN])
        print(f"  worst episodes: {worst}")
        suspicious = [episode for episode in order if iou[episode] < LOW or empty[episode]]
        for episode in suspicious[:SHOWN]:
            shard, within = places[episode]
            print(
                f"warning: {dataset.folder}/{shard}, {render}, episode {episode} (number {within} of the shard): mIoU "
                f"{iou[episode]:.3f}, {empty[episode]} of {lengths[episode]} masks empty",
                file=sys.stderr,
            )
        if len(suspicious) > SHOWN:
            print(f"warning: and {len(suspicious) - SHOWN} more such episodes", file=sys.stderr)
        summary["renders"][render] = {
            "miou": mean,
            "empty_share": float(empty.sum() / lengths.sum()),
            "episode_miou": iou.tolist(),
            "episode_empty": empty.tolist(),
        }
        for what, episode in (("worst", order[0]), ("median", order[(len(order) - 1) // 2])):
            number = int(np.searchsorted(first, episode, "right")) - 1
            shard, start = dataset.shards[number], dataset.shards[number].episode_start[episode - first[number]]
            index = start + np.linspace(0, lengths[episode] - 1, min(COLUMNS, lengths[episode])).round().astype(int)
            zoom = max(1, round(192 / size))
            images = pictures.outline(
                shard.array(f"{render}/observation")[index],
                unpack(shard.array(f"{render}/mask")[index], size),
                zoom,
                pictures.TRUTH,
            )
            masks = unpack(files[number].masks[render][index], size).repeat(zoom, 1).repeat(zoom, 2)
            label = f"{render}, {what}\nepisode {episode}\nmIoU {iou[episode]:.3f}"
            rows[label] = pictures.outline(images, masks, 1)
    base = dataset.folder.parent / f"{dataset.split}.{args.name}"
    runs.write_json(base.with_name(base.name + ".json"), summary)
    picture = pictures.rows(
        base.with_name(base.name + ".png"), rows,
        title=f"{dataset.env}, {dataset.split}: masks '{args.name}' (magenta) and the simulator's (green)",
    )  # fmt: skip
    print(f"  {base}.json, {picture}")


def show_boxes(jobs: list[Job]) -> None:
    """Print how the box fits the agent in first frames, and draw it in some of them."""
    for env in dict.fromkeys(job.dataset.env for job in jobs):
        rows: dict[str, np.ndarray] = {}
        for job in (job for job in jobs if job.dataset.env == env):
            for render in job.renders:
                dataset = Dataset(job.dataset.data_dir, env, job.dataset.split, render)
                starts, size = dataset.episode_start[:-1], dataset.image_size
                inside = box_mask(job.box, size)
                truth = unpack(dataset.masks(starts), size)
                hit = [np.nonzero(mask) for mask in truth if mask.any()]
                boxes = np.array([(x.min(), y.min(), x.max() + 1, y.max() + 1) for y, x in hit])
                covered = (truth & inside).sum((1, 2)) / np.maximum(truth.sum((1, 2)), 1)
                print(
                    f"{dataset.folder}, {render}, {len(starts)} episodes: box {job.box}; the agent's is "
                    f"{np.median(boxes, 0).tolist()} (median), "
                    f"{[*boxes[:, :2].min(0).tolist(), *boxes[:, 2:].max(0).tolist()]} (union); "
                    f"{covered.mean():.1%} of its pixels are in the box, at least {covered.min():.1%}"
                )
                shown = np.unique(np.linspace(0, len(starts) - 1, min(COLUMNS, len(starts))).round().astype(int))
                zoom = max(1, round(192 / size))
                images = pictures.outline(dataset.frames(starts[shown]), truth[shown], zoom, pictures.TRUTH)
                inside = inside.repeat(zoom, 0).repeat(zoom, 1)
                rows[f"{dataset.split}, {render}"] = pictures.outline(images, np.stack([inside] * len(shown)), 1)
        picture = pictures.rows(
            jobs[0].dataset.data_dir / env / "boxes.png", rows,
            title=f"{env}: first frames with the box for SAM (magenta) and the agent's outline (green)",
        )  # fmt: skip
        print(picture)


def box_mask(box: tuple[float, float, float, float], size: int) -> np.ndarray:
    """bool (size, size), true inside the box."""
    x0, y0, x1, y1 = (round(value) for value in box)
    mask = np.zeros((size, size), bool)
    mask[y0:y1, x0:x1] = True
    return mask


def main(args: Args) -> None:
    runs.check_at_least(args, 1, "batch_episodes")
    if not re.fullmatch(r"[A-Za-z0-9_-]+", args.name) or args.name in RESERVED:
        raise UserError(f"--name {args.name!r}: take letters, digits, - and _, and none of {', '.join(RESERVED)}")
    if args.import_dir is not None and args.name == "sam":
        raise UserError("--import needs a --name for the masks, such as --name mine; sam is SAM 2.1's")
    if args.import_dir is not None and not args.import_dir.is_dir():
        raise UserError(f"--import {args.import_dir}: no such folder")
    jobs = open_jobs(args)
    if args.show_boxes:
        show_boxes(jobs)
        return
    for job in jobs:
        for part in remove_stale_parts(job.dataset.folder):
            print(f"removed {part}, left by a run that was killed")
    if args.import_dir is not None:
        take_in(args, jobs)
    else:
        make(args, jobs)
    for job in jobs:
        report(args, job)


if __name__ == "__main__":
    runs.cli(main, Args())
