"""Make masks of the agent with SAM 2.1, or import masks that another tool made.

    python make_masks.py --env cheetah-run
    python make_masks.py --env cheetah-run --import DIR --name mine

Writes 00000.sam.h5 beside every shard 00000.h5 of data/<env>/train and /test; masklam.py --mask-source sam reads them.
SAM's video predictor gets one box per task in an episode's first frame and follows the agent to the end. Rerun the same
command to resume. Several GPUs share the work: run it once on each.

--import reads DIR/<env>/<split>/<render>/00000.npy, (frames, height, width), or a folder 00000/ of one-channel PNGs in
the order of their numbers: one per episode, numbered through the split, with a mask for each frame, the last one too.
<render> is clean, distractor or, of videos, video. Rerun it after masks in DIR have changed.

Datasets of import_data.py need --box, or --boxes FILE with one for each episode; --show-boxes draws them first. Their
masks in --import may also lie in DIR itself, under the names of the videos: DIR/<name>.npy or DIR/<name>/.
"""

import contextlib
import hashlib
import itertools
import json
import re
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import tyro

from common import media, pictures, recordings, runs, sam, store
from common.cli import Count, Name, Range, UserError, cli
from common.dataset import Dataset
from common.shards import (
    DERIVED,
    Shard,
    derived_path,
    describe_command,
    read_derived,
    read_finished,
    write_derived,
)
from common.store import StoppableProgress
from common.tasks import TASKS, get_task

RESERVED = ("gt", *DERIVED)  # the simulator's masks, and other files beside the shards
LOW = 0.5  # mean IoU below which an episode gets a warning
SHOWN = 5  # worst episodes and warnings that are printed; the report has all
COLUMNS = 10  # frames of an episode on the contact sheet

Pixel = Annotated[int, Range(0)]


@dataclass
class Args:
    env: Name = "cheetah-run"
    """task, or name of an imported dataset; all: every task that has a dataset"""
    split: Literal["both", "train", "test"] = "both"
    """which splits"""
    render: Literal["both", "clean", "distractor"] = "both"
    """which renders; both: those that the dataset has (one, of imported videos)"""
    name: Name = "sam"
    """name of the masks: <shard>.<name>.h5, and --mask-source <name> in masklam.py"""
    model: Literal[sam.MODELS] = "tiny"
    """size of SAM 2.1's image encoder (hiera)"""
    checkpoint: Path | None = None
    """file with the weights; None: from the Hugging Face hub"""
    image_size: Literal[1024, 512] = 1024
    """height and width at which SAM sees a frame; 512 is faster, 1024 is what it was trained on"""
    box: tuple[Pixel, Pixel, Pixel, Pixel] | None = None
    """x0 y0 x1 y1 of the agent in an episode's first frame, in pixels; None: the task's, see --show-boxes"""
    boxes: Path | None = None
    """JSON file with a box for each episode: {"train": [[x0, y0, x1, y1], ...], "test": [...]}"""
    import_dir: Annotated[Path | None, tyro.conf.arg(name="import")] = None
    """import the masks in this folder instead of running SAM; needs --name"""
    show_boxes: bool = False
    """make no masks: compare the box with the agent's, and draw it in first frames, data/<env>/<split>_boxes.png"""
    data_dir: Path = Path("data")
    """folder of the datasets"""
    batch_episodes: Count | None = None
    """episodes that run side by side; None: 8 on a GPU, 1 on a CPU"""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """where SAM runs; auto takes the GPU if there is one"""
    compile: bool | None = None
    """torch.compile SAM's networks; None: on a GPU"""


# What `command` says itself, or what does not change the masks.
HIDDEN_FIELDS = set("env split render import_dir show_boxes data_dir batch_episodes device compile".split())


@dataclass
class Job:
    """One split whose shards are to have masks."""

    dataset: Dataset
    renders: list[str]
    boxes: np.ndarray  # (episodes, 4)
    name: str  # of the masks
    settings: dict[str, Any]  # how the masks come about
    paths: dict[tuple[Path, str], list[Path]] = field(default_factory=dict)  # (shard, render) -> episodes in --import
    hashes: dict[tuple[Path, str], bytes] = field(default_factory=dict)  # (shard, array) -> of the masks in --import


# Masks of a shard in a render: bit-packed uint8 (T, H W / 8).
Segment = Callable[[Job, Shard, str, StoppableProgress], np.ndarray]


def open_jobs(args: Args) -> list[Job]:
    """The datasets to work on. UserError if one is missing, incomplete or lacks the render, or the box is not in it."""
    envs = [args.env] if args.env != "all" else [env for env in TASKS if (args.data_dir / env).is_dir()]
    if args.box and args.boxes:
        raise UserError("--box and --boxes both say where the agent is; give one of them")
    if args.import_dir and (args.box or args.boxes or args.checkpoint):
        raise UserError("--import takes masks as they are; leave out --box, --boxes and --checkpoint")
    if not envs:
        raise UserError(f"{args.data_dir}: no datasets here; make them with: python make_dataset.py --env all")
    jobs = []
    for env, split in itertools.product(envs, ("train", "test") if args.split == "both" else (args.split,)):
        dataset = Dataset(args.data_dir, env, split, None if args.render == "both" else args.render)
        renders = dataset.plan["renders"] if args.render == "both" else [dataset.render]
        boxes = read_boxes(args, dataset)
        settings: dict[str, Any] = {"method": "import"}
        if args.import_dir is None:
            settings = {"method": "sam2.1", "model": args.model, "image_size": args.image_size}
            settings["box"] = boxes.tolist() if args.boxes else boxes[0].tolist()
        jobs.append(Job(dataset, renders, boxes, args.name, settings))
    return jobs


def read_boxes(args: Args, dataset: Dataset) -> np.ndarray:
    """The agent's box in each episode's first frame, float64 (episodes, 4). UserError if one does not lie in it."""
    size, values, name = dataset.image_size, args.box, "--box"
    if args.boxes is not None:
        name = f"--boxes {args.boxes}"
        try:
            values = json.loads(args.boxes.read_text(encoding="utf-8"))[dataset.split]
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(
                f'{name}: expected {{"train": [[x0, y0, x1, y1], ...], "test": [...]}} ({error!r})'
            ) from error
    elif values is None and args.import_dir is not None:
        values = (0, 0, size, size)  # not used
    elif values is None and dataset.is_recorded:
        raise UserError(
            f"{dataset.folder}: where is the agent? Give --box X0 Y0 X1 Y1, or --boxes FILE; see --show-boxes"
        )
    elif values is None:
        values = get_task(dataset.env).scaled_box(size)
    try:
        boxes = np.array(values, np.float64)
        if args.boxes is None:
            boxes = np.tile(boxes, (dataset.num_episodes, 1))
        boxes = boxes.reshape(dataset.num_episodes, 4)
    except (ValueError, TypeError) as error:
        wanted = f"a box of four numbers for each of the {dataset.num_episodes} episodes of the {dataset.split} split"
        raise UserError(f"{name}: expected {wanted} ({error})") from error
    x0, y0, x1, y1 = boxes.T
    inside = (x0 >= 0) & (x0 < x1) & (x1 <= size) & (y0 >= 0) & (y0 < y1) & (y1 <= size)
    if not inside.all():
        shown = " ".join(f"{value:g}" for value in boxes[~inside][0])
        where = f"the frames of {dataset.env}: x0 < x1 and y0 < y1, from 0 to {size}"
        raise UserError(f"{name} {shown} does not lie in {where}")
    return boxes


# ---------------------------------------------------------------------------------------------------------------- files


def scores(masks: np.ndarray, truth: np.ndarray | None, episode_start: np.ndarray) -> dict[str, np.ndarray]:
    """By episode: `empty`, frames without a mask, int64 (N,), and with a truth `iou`, its mean, float64 (N,).

    masks, truth: bit-packed uint8 (T, H W / 8), equal where both are empty. episode_start: int64 (N + 1,).
    """
    starts, lengths = episode_start[:-1], np.diff(episode_start)
    found = {"empty": np.add.reduceat((~masks.any(1)).astype(np.int64), starts)}
    if truth is None:
        return found
    shared = np.bitwise_count(masks & truth).sum(1, dtype=np.int64)
    either = np.bitwise_count(masks | truth).sum(1, dtype=np.int64)
    iou = np.where(either > 0, shared / np.maximum(either, 1), 1.0)
    return found | {"iou": np.add.reduceat(iou, starts) / lengths}


def finished(job: Job, shard: Shard, announce: bool = False) -> dict[str, np.ndarray]:
    """What stays of a shard's mask file: no masks that differ from those in --import, nothing of a damaged file.

    UserError if it was made with other settings. `announce` prints what is wrong with a damaged one.
    """
    advice = "give these masks another --name, or remove the old ones: "
    advice += f"rm {shlex.quote(str(shard.path.parent))}/*.{job.name}.h5"
    stored = read_finished(shard, job.name, job.settings, advice, announce)
    if stored is None:
        return {}
    hashes = {name: stored.hashes[name].tobytes() for name in stored.arrays}
    return {name: stored.arrays[name] for name in hashes if job.hashes.get((shard.path, name)) in (None, hashes[name])}


def missing_frames(job: Job, shard: Shard) -> int:
    """The number of masks that a shard lacks."""
    return shard.frames * len({f"{render}/mask" for render in job.renders} - finished(job, shard).keys())


def command(args: Args, env: str) -> str:
    """The command that makes the same masks, for the messages of readers, without folders of this machine."""
    start = f"python make_masks.py --env {env}" + (" --import DIR" if args.import_dir else "")
    return describe_command(start, args, Args, HIDDEN_FIELDS)


def make(args: Args, places: dict[Path, tuple[Job, Shard]], segment: Segment | None) -> None:
    """Writes every mask file that is missing, together with other processes that do the same."""

    def make_file(path: Path) -> None:
        job, shard = places[path]
        arrays = finished(job, shard, announce=True)
        for render in job.renders:
            if f"{render}/mask" not in arrays:  # one that is complete stays, so that trainings that use it can resume
                masks = segment(job, shard, render, progress)
                found = scores(masks, shard.arrays.get(f"{render}/mask"), shard.episode_start)
                arrays |= {f"{render}/{name}": value for name, value in ({"mask": masks} | found).items()}
        write_derived(shard, args.name, arrays, job.settings, command(args, job.dataset.env))

    total = sum(missing_frames(*place) for place in places.values())
    if not total:
        print(f"masks '{args.name}' are complete")
        return
    with StoppableProgress(f"masks '{args.name}'", total, "frames") as progress:
        store.fill(paths=lambda: places, is_missing=lambda path: missing_frames(*places[path]) > 0, make=make_file)


# ----------------------------------------------------------------------------------------------------------------- SAM


def load_sam(args: Args, jobs: list[Job]) -> Segment:
    """SAM 2.1's tracker. Adds the hash of its weights to the settings of the jobs."""
    device = runs.choose_device(args.device)
    weights, digest = sam.read_checkpoint(args.checkpoint or sam.download_checkpoint(args.model))
    predictor = sam.load_predictor(args.model, weights, args.image_size, device)
    if device.type == "cuda" if args.compile is None else args.compile:
        sam.compile_predictor(predictor)
    for job in jobs:
        job.settings["checkpoint_sha256"] = digest

    def segment(job: Job, shard: Shard, render: str, progress: StoppableProgress) -> np.ndarray:
        episodes = np.split(shard.arrays[f"{render}/observation"], shard.episode_start[1:-1])
        batch = args.batch_episodes or (8 if device.type == "cuda" else 1)
        before = sum(earlier.num_episodes for earlier in job.dataset.shards[: job.dataset.shards.index(shard)])
        boxes = job.boxes[before : before + len(episodes)]
        return np.concatenate(sam.segment_episodes(predictor, episodes, boxes, batch, progress.update))

    return segment


# -------------------------------------------------------------------------------------------------------------- import


def episode_paths(folder: Path, episodes: int) -> list[Path]:
    """The episodes' files (.npy) or folders in order. UserError if some are missing, double or too many."""
    paths = media.in_order(media.listing(folder) if folder.is_dir() else [], media.episode_name)
    present = {media.episode_name(path).zfill(5) for path in paths}
    expected = {f"{number:05d}" for number in range(episodes)}
    if present != expected:
        missing, extra = sorted(expected - present), sorted(present - expected)
        raise UserError(
            f"--import: {folder} needs 00000.npy or a folder 00000 of PNGs for each of {episodes} episodes; "
            f"{len(missing)} missing: {missing[:3]}, {len(extra)} too many: {extra[:3]}"
        )
    return paths


def named_paths(folder: Path, dataset: Dataset) -> list[Path]:
    """The files (.npy) or folders of masks that are named like the videos of a split. UserError if one is missing."""
    videos = []
    for split in recordings.SPLITS:
        with contextlib.suppress(UserError):  # of the other one, which need not be there
            each = dataset if split == dataset.split else Dataset(dataset.data_dir, dataset.env, split, None)
            videos += [Path(split, name) for name in each.episode_values("source")]
    if dataset.plan["source"].get("clip_seconds") and len({video.name for video in videos}) < len(videos):
        raise UserError(
            "--import: the videos were cut into several episodes each, so masks are numbered by episode: "
            f"DIR/{dataset.env}/{dataset.split}/{dataset.plan['renders'][0]}/00000.npy and so on"
        )
    find = recordings.beside(folder, recordings.MASKS, videos)
    return [find(video) for video in videos if video.parent.name == dataset.split]


def read_episode(path: Path, frames: int, size: int) -> np.ndarray:
    """An episode's masks, bit-packed uint8 (frames, size * size / 8). UserError if number, size or values are wrong."""
    count, read = media.open_masks(path)
    masks = [read(number) for number in range(count)]
    wrong = next((mask.shape for mask in masks if mask.shape != (size, size)), (size, size))
    if count != frames or wrong != (size, size):
        wanted = f"(frames, the last one too, height, width) = {(frames, size, size)}"
        raise UserError(f"{path}: shape {(count, *wrong)}, expected {wanted}")
    return np.packbits(np.stack(masks).reshape(frames, -1), axis=1)


def read_import(job: Job, shard: Shard, render: str, progress: StoppableProgress) -> np.ndarray:
    """The masks of a shard from --import."""
    masks = []
    for path, frames in zip(job.paths[shard.path, render], np.diff(shard.episode_start).tolist()):
        masks.append(read_episode(path, frames, job.dataset.image_size))
        progress.update(frames)
    return np.concatenate(masks)


def check_import(args: Args, jobs: list[Job]) -> Segment:
    """Reads all masks in --import once, so that what is wrong shows before any is written; hashes tell which differ."""
    with StoppableProgress(
        "checking", sum(job.dataset.num_frames * len(job.renders) for job in jobs), "frames"
    ) as progress:
        for job, render in [(each, render) for each in jobs for render in each.renders]:
            folder = args.import_dir / job.dataset.env / job.dataset.split / render
            if job.dataset.is_recorded and not folder.is_dir():
                paths = iter(named_paths(args.import_dir, job.dataset))
            else:
                paths = iter(episode_paths(folder, job.dataset.num_episodes))
            agent_seen = False
            for shard in job.dataset.shards:
                job.paths[shard.path, render] = list(itertools.islice(paths, shard.num_episodes))
                masks = read_import(job, shard, render, progress)
                agent_seen = agent_seen or masks.any()
                job.hashes[shard.path, f"{render}/mask"] = hashlib.sha256(masks).digest()
            if not agent_seen:
                raise UserError(f"--import: all masks in {folder} are empty")
    return read_import


# -------------------------------------------------------------------------------------------------------------- report


def unpack(packed: np.ndarray, size: int) -> np.ndarray:
    """Bit-packed masks (N, H W / 8) to bool (N, H, W)."""
    return np.unpackbits(packed, axis=-1).reshape(len(packed), size, size).astype(bool)


def picture_row(dataset: Dataset, index: np.ndarray, masks: np.ndarray) -> np.ndarray:
    """Frames among `index` (N,): the set's own masks outlined in green, `masks`, bool (N, H, W), in magenta."""
    some = np.linspace(0, len(index) - 1, min(COLUMNS, len(index))).round().astype(int)
    zoom = max(1, round(192 / dataset.image_size))
    images = dataset.frames(index[some]).repeat(zoom, 1).repeat(zoom, 2)
    for each, color in ((truth_of(dataset, index[some]), pictures.TRUTH), (masks[some], pictures.OUTLINE)):
        images = pictures.outline(images, each.repeat(zoom, 1).repeat(zoom, 2), 1, color)
    return images


def truth_of(dataset: Dataset, index: np.ndarray) -> np.ndarray:
    """The set's own masks at frames `index` (N,), bool (N, H, W); empty where it has none."""
    size = dataset.image_size
    return unpack(dataset.masks(index), size) if dataset.has_masks else np.zeros((len(index), size, size), bool)


def report(job: Job) -> None:
    """Prints how the masks of a split are, also beside its own if it has any; writes that as JSON and a contact sheet.

    Worst are the episodes that agree least with the set's own masks, or that have the most frames without a mask.
    """
    dataset = job.dataset
    files = [read_derived(shard, job.name) for shard in dataset.shards]
    lengths = np.diff(dataset.episode_start)
    rows: dict[str, np.ndarray] = {}
    settings = files[0].attributes["settings"]
    summary: dict[str, Any] = {"name": job.name, "settings": settings, "dataset": dataset.hash, "renders": {}}
    for render in job.renders:
        empty = np.concatenate([file.arrays[f"{render}/empty"] for file in files])
        empty_share = float(empty.sum() / lengths.sum())
        quality, what_it_is, agreement = 1 - empty / lengths, "frames with a mask", {}
        line = f"{dataset.folder}, {render}: empty masks {empty_share:.2%} of {lengths.sum():,} frames"
        if dataset.has_masks:
            quality = np.concatenate([file.arrays[f"{render}/iou"] for file in files])
            what_it_is, mean = "mIoU", float(np.average(quality, weights=lengths))
            agreement = {"miou": mean, "episode_miou": quality.tolist()}
            line += (
                f"; mIoU {mean:.3f}, episodes from {quality.min():.3f} to {quality.max():.3f} "
                f"(median {np.median(quality):.3f})"
            )
        order = np.argsort(quality, kind="stable")
        suspicious = [episode for episode in order if quality[episode] < LOW or empty[episode]]
        print(f"{line}; {len(suspicious)} episodes below {LOW} or with empty masks")
        print(f"  worst episodes: {', '.join(f'{episode} ({quality[episode]:.3f})' for episode in order[:SHOWN])}")
        if empty_share > 0.5:
            print(f"warning: {dataset.folder}, {render}: most masks are empty", file=sys.stderr)
        for episode in suspicious[:SHOWN]:
            print(
                f"warning: {dataset.folder}, {render}, episode {episode}: {what_it_is} {quality[episode]:.3f}, "
                f"{empty[episode]} of {lengths[episode]} masks empty",
                file=sys.stderr,
            )
        summary["renders"][render] = agreement | {"empty_share": empty_share, "episode_empty": empty.tolist()}
        own, ours = (Dataset(dataset.data_dir, dataset.env, dataset.split, render, name) for name in ("gt", job.name))
        for what, episode in (("worst", order[0]), ("median", order[(len(order) - 1) // 2])):
            index = np.arange(*dataset.episode_start[episode : episode + 2])
            label = f"{render}, {what}\nepisode {episode}\n{what_it_is} {quality[episode]:.3f}"
            rows[label] = picture_row(own, index, unpack(ours.masks(index), dataset.image_size))
    base = dataset.folder.parent / f"{dataset.split}.{job.name}"
    store.write_json(Path(f"{base}.json"), summary)
    title = f"{dataset.env}, {dataset.split}: masks '{job.name}' (magenta)"
    title += " and the set's own (green)" if dataset.has_masks else ""
    print(f"  {base}.json, {pictures.rows(Path(f'{base}.png'), rows, title=title)}")


def show_boxes(job: Job) -> None:
    """Draws the boxes in some first frames, and prints how they fit the agent where the set has masks."""
    rows: dict[str, np.ndarray] = {}
    for render in job.renders:
        dataset = Dataset(job.dataset.data_dir, job.dataset.env, job.dataset.split, render)
        starts, size = dataset.episode_start[:-1], dataset.image_size
        inside = np.zeros((len(starts), size, size), bool)
        for episode, (x0, y0, x1, y1) in zip(inside, job.boxes.round().astype(int)):
            episode[y0:y1, x0:x1] = True
        rows[render] = picture_row(dataset, starts, inside)
        agent = truth_of(dataset, starts)
        pixels = [np.nonzero(mask) for mask in agent if mask.any()]
        if not pixels:
            continue
        boxes = np.array([(x.min(), y.min(), x.max() + 1, y.max() + 1) for y, x in pixels])
        covered = (agent & inside).sum((1, 2)) / np.maximum(agent.sum((1, 2)), 1)
        print(
            f"{dataset.folder}, {render}, {len(starts)} episodes: box {tuple(np.median(job.boxes, 0).tolist())}; the "
            f"agent's is {np.median(boxes, 0).tolist()} (median); {covered.mean():.1%} of its pixels are in the box, "
            f"at least {covered.min():.1%}"
        )
    title = f"{dataset.env}, {dataset.split}: first frames with the box for SAM (magenta) and the agent (green)"
    print(pictures.rows(dataset.folder.parent / f"{dataset.split}_boxes.png", rows, title=title))


def main(args: Args) -> None:
    if not re.fullmatch(r"[A-Za-z0-9_-]+", args.name) or args.name in RESERVED:
        raise UserError(f"--name {args.name!r}: take letters, digits, - and _, and none of {', '.join(RESERVED)}")
    if args.import_dir is not None and args.name == "sam":
        raise UserError("--import needs a --name for the masks, such as --name mine; sam is SAM 2.1's")
    jobs = open_jobs(args)
    if args.show_boxes:
        for job in jobs:
            show_boxes(job)
        return
    for job in jobs:
        store.remove_leftovers(job.dataset.folder)
    places = {derived_path(shard.path, args.name): (job, shard) for job in jobs for shard in job.dataset.shards}
    segment = None
    if args.import_dir is not None:
        segment = check_import(args, jobs)
    elif args.checkpoint is not None or any(missing_frames(*place) for place in places.values()):
        segment = load_sam(args, jobs)
    make(args, places, segment)
    for job in jobs:
        report(job)


if __name__ == "__main__":
    cli(main, Args())
