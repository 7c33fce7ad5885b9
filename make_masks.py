"""Make masks of the agent with SAM 2.1, or import masks that another tool made.

    python make_masks.py --env cheetah-run
    python make_masks.py --env cheetah-run --import DIR --name mine

Writes 00000.sam.h5 beside every shard 00000.h5 of data/<env>/train and /test; masklam.py --mask-source sam reads them.
SAM's video predictor gets one box per task in an episode's first frame and follows the agent to the end. Rerun the same
command to resume. Several GPUs share the work: run it once on each.

--import reads DIR/<env>/<split>/<render>/00000.npy, (frames, height, width), or a folder 00000/ of one-channel PNGs in
the order of their numbers: one per episode, numbered through the split, with a mask for each frame, the last one too.
Rerun it after masks in DIR have changed.
"""

import hashlib
import itertools
import re
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import tyro

from common import media, pictures, runs, sam, store
from common.cli import Count, Name, Progress, Range, Stopped, UserError, cli, stop_requested
from common.dataset import Dataset
from common.shards import DERIVED, Shard, derived_path, read_derived, write_derived
from common.tasks import TASKS, get_task

RESERVED = ("gt", *DERIVED)  # the simulator's masks, and other files beside the shards
LOW = 0.5  # mean IoU below which an episode gets a warning
SHOWN = 5  # worst episodes and warnings that are printed; the report has all
COLUMNS = 10  # frames of an episode on the contact sheet

Pixel = Annotated[int, Range(0)]


@dataclass
class Args:
    env: Literal[(*TASKS, "all")] = "cheetah-run"
    """task; all: every task that has a dataset"""
    split: Literal["both", "train", "test"] = "both"
    """which splits"""
    render: Literal["both", "clean", "distractor"] = "both"
    """which renders; both: those that the dataset has"""
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
    import_dir: Annotated[Path | None, tyro.conf.arg(name="import")] = None
    """import the masks in this folder instead of running SAM; needs --name"""
    show_boxes: bool = False
    """make no masks: compare the box with the agent's, and draw it in first frames, data/<env>/<split>_boxes.png"""
    data_dir: Path = Path("data")
    """folder of the datasets that make_dataset.py wrote"""
    batch_episodes: Count | None = None
    """episodes that run side by side; None: 8 on a GPU, 1 on a CPU"""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """where SAM runs; auto takes the GPU if there is one"""
    compile: bool | None = None
    """torch.compile SAM's networks; None: on a GPU"""


@dataclass
class Job:
    """One split whose shards are to have masks."""

    dataset: Dataset
    renders: tuple[str, ...]
    box: tuple[float, float, float, float]
    name: str  # of the masks
    settings: dict[str, Any]  # how the masks come about
    paths: dict[tuple[Path, str], list[Path]] = field(default_factory=dict)  # (shard, render) -> episodes in --import
    hashes: dict[tuple[Path, str], bytes] = field(default_factory=dict)  # (shard, array) -> of the masks in --import


class Frames(Progress):
    """Counts frames; ends the work at a signal."""

    def update(self, count: int = 1) -> None:
        super().update(count)
        if stop_requested():
            raise Stopped("the complete mask files stay")


# Masks of a shard in a render: bit-packed uint8 (T, H W / 8).
Segment = Callable[[Job, Shard, str, Frames], np.ndarray]


def open_jobs(args: Args) -> list[Job]:
    """The datasets to work on. UserError if one is missing, incomplete or lacks the render, or the box is not in it."""
    envs = [args.env] if args.env != "all" else [env for env in TASKS if (args.data_dir / env).is_dir()]
    if not envs:
        raise UserError(f"{args.data_dir}: no datasets here; make them with: python make_dataset.py --env all")
    jobs = []
    for env, split in itertools.product(envs, ("train", "test") if args.split == "both" else (args.split,)):
        try:
            dataset = Dataset(args.data_dir, env, split, "clean" if args.render == "clean" else "distractor")
        except UserError:
            if args.render != "both":
                raise
            dataset = Dataset(args.data_dir, env, split, "clean")  # the same error, or a set of clean frames only
        renders = [render for render in dataset.plan["renders"] if args.render in ("both", render)]
        size = dataset.image_size
        x0, y0, x1, y1 = box = get_task(env).scaled_box(size) if args.box is None else tuple(map(float, args.box))
        if not (0 <= x0 < x1 <= size and 0 <= y0 < y1 <= size):
            shown = " ".join(f"{value:g}" for value in box)
            raise UserError(f"--box {shown} does not lie in the frames of {env}: x0 < x1 and y0 < y1, from 0 to {size}")
        settings: dict[str, Any] = {"method": "import"}
        if args.import_dir is None:
            settings = {"method": "sam2.1", "model": args.model, "image_size": args.image_size, "box": list(box)}
        jobs.append(Job(dataset, tuple(renders), box, args.name, settings))
    return jobs


# ---------------------------------------------------------------------------------------------------------------- files


def scores(masks: np.ndarray, truth: np.ndarray, episode_start: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """By episode: mean intersection over union, float64 (N,), and frames without a mask, int64 (N,).

    masks, truth: bit-packed uint8 (T, H W / 8), equal where both are empty. episode_start: int64 (N + 1,).
    """
    shared = np.bitwise_count(masks & truth).sum(1, dtype=np.int64)
    either = np.bitwise_count(masks | truth).sum(1, dtype=np.int64)
    iou = np.where(either > 0, shared / np.maximum(either, 1), 1.0)
    empty = (~masks.any(1)).astype(np.int64)
    starts, lengths = episode_start[:-1], np.diff(episode_start)
    return np.add.reduceat(iou, starts) / lengths, np.add.reduceat(empty, starts)


def finished(job: Job, shard: Shard, announce: bool = False) -> dict[str, np.ndarray]:
    """What stays of a shard's mask file: no masks that differ from those in --import, nothing of a damaged file.

    UserError if it was made with other settings. `announce` prints what is wrong with a damaged one.
    """
    path = derived_path(shard.path, job.name)
    try:
        stored = read_derived(shard, job.name)
    except store.Damaged as error:
        if announce and path.exists():
            print(f"{error}; making it again")
        return {}
    settings = {key: value for key, value in stored.attributes["settings"].items() if key in job.settings}
    if lines := store.differences(settings, job.settings):
        raise UserError(
            f"{path}: made with other settings ({', '.join(lines)}); give these masks another --name, or remove the "
            f"old ones: rm {shlex.quote(str(path.parent))}/*.{job.name}.h5"
        )
    hashes = {name: stored.hashes[name].tobytes() for name in stored.arrays}
    return {name: stored.arrays[name] for name in hashes if job.hashes.get((shard.path, name)) in (None, hashes[name])}


def missing_frames(job: Job, shard: Shard) -> int:
    """The number of masks that a shard lacks."""
    return shard.frames * len({f"{render}/mask" for render in job.renders} - finished(job, shard).keys())


def command(args: Args, env: str) -> str:
    """The command that makes the same masks, for the messages of readers, without folders of this machine."""
    words = ["python", "make_masks.py", "--env", env]
    words += ["--import", "DIR"] if args.import_dir else []
    for name in ("name", "model", "image_size"):
        if getattr(args, name) != getattr(Args, name):
            words += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
    words += ["--checkpoint", "FILE"] if args.checkpoint else []
    words += ["--box", *map(str, args.box)] if args.box else []
    return " ".join(words)


def make(args: Args, places: dict[Path, tuple[Job, Shard]], segment: Segment | None) -> None:
    """Writes every mask file that is missing, together with other processes that do the same."""

    def make_file(path: Path) -> None:
        job, shard = places[path]
        arrays = finished(job, shard, announce=True)
        for render in job.renders:
            if f"{render}/mask" not in arrays:  # one that is complete stays, so that trainings that use it can resume
                masks = segment(job, shard, render, progress)
                iou, empty = scores(masks, shard.arrays[f"{render}/mask"], shard.episode_start)
                arrays |= {f"{render}/mask": masks, f"{render}/iou": iou, f"{render}/empty": empty}
        write_derived(shard, args.name, arrays, job.settings, command(args, job.dataset.env))

    total = sum(missing_frames(*place) for place in places.values())
    if not total:
        print(f"masks '{args.name}' are complete")
        return
    with Frames(f"masks '{args.name}'", total, "frames") as progress:
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

    def segment(job: Job, shard: Shard, render: str, progress: Frames) -> np.ndarray:
        episodes = np.split(shard.arrays[f"{render}/observation"], shard.episode_start[1:-1])
        batch = args.batch_episodes or (8 if device.type == "cuda" else 1)
        return np.concatenate(sam.segment_episodes(predictor, episodes, job.box, batch, progress.update))

    return segment


# -------------------------------------------------------------------------------------------------------------- import


def episode_name(path: Path) -> str:
    """The number of an episode whose masks are a file 00000.npy or a folder 00000."""
    return path.stem if path.suffix.lower() == ".npy" else path.name


def episode_paths(folder: Path, episodes: int) -> list[Path]:
    """The episodes' files (.npy) or folders in order. UserError if some are missing, double or too many."""
    paths = media.in_order(media.listing(folder) if folder.is_dir() else [], episode_name)
    present, expected = {episode_name(path).zfill(5) for path in paths}, {f"{number:05d}" for number in range(episodes)}
    if present != expected:
        missing, extra = sorted(expected - present), sorted(present - expected)
        raise UserError(
            f"--import: {folder} needs 00000.npy or a folder 00000 of PNGs for each of {episodes} episodes; "
            f"{len(missing)} missing: {missing[:3]}, {len(extra)} too many: {extra[:3]}"
        )
    return paths


def read_episode(path: Path, frames: int, size: int) -> np.ndarray:
    """An episode's masks, bit-packed uint8 (frames, size * size / 8). UserError if number, size or values do not fit.

    In an array true is: True; 1 where the largest value is 1; 255 where it is 255; at least 0.5 of floats from 0 to 1.
    """
    holds = "a mask holds booleans, 0 and 1, 0 and 255, or floats from 0 to 1 (at least 0.5 is the agent)"
    with media.readable(path, "masks"):
        if path.is_dir():
            if not (images := media.image_files(path, {".png"})):
                raise UserError(f"{path}: holds no .png")
            values = np.stack([media.read_mask(image) for image in images])
        else:
            values = np.load(path, allow_pickle=False)
        if values.dtype.kind not in "biuf":
            raise UserError(f"{path}: {values.dtype}; {holds}")
    if values.shape != (frames, size, size):
        wanted = f"(frames, the last one too, height, width) = {(frames, size, size)}"
        raise UserError(f"{path}: shape {values.shape}, expected {wanted}")
    top = 255 if values.max() > 1 else 1
    soft = values.dtype.kind == "f" and ((values >= 0) & (values <= 1)).all()
    if not soft and not np.isin(values, (0, top)).all():
        raise UserError(f"{path}: {values.dtype} from {values.min()} to {values.max()}; {holds}")
    return np.packbits((values >= top / 2).reshape(frames, -1), axis=1)


def read_import(job: Job, shard: Shard, render: str, progress: Frames) -> np.ndarray:
    """The masks of a shard from --import."""
    masks = []
    for path, frames in zip(job.paths[shard.path, render], np.diff(shard.episode_start).tolist()):
        masks.append(read_episode(path, frames, job.dataset.image_size))
        progress.update(frames)
    return np.concatenate(masks)


def check_import(args: Args, jobs: list[Job]) -> Segment:
    """Reads all masks in --import once, so that what is wrong shows before any is written; hashes tell which differ."""
    with Frames("checking", sum(job.dataset.num_frames * len(job.renders) for job in jobs), "frames") as progress:
        for job, render in [(each, render) for each in jobs for render in each.renders]:
            folder = args.import_dir / job.dataset.env / job.dataset.split / render
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
    """Frames among `index` (N,): the simulator's masks outlined in green, `masks`, bool (N, H, W), in magenta."""
    some = np.linspace(0, len(index) - 1, min(COLUMNS, len(index))).round().astype(int)
    zoom = max(1, round(192 / dataset.image_size))
    truth = unpack(dataset.masks(index[some]), dataset.image_size)
    images = pictures.outline(dataset.frames(index[some]), truth, zoom, pictures.TRUTH)
    return pictures.outline(images, masks[some].repeat(zoom, 1).repeat(zoom, 2), 1)


def report(job: Job) -> None:
    """Prints how the masks of a split compare with the simulator's, and writes it as JSON and as a contact sheet."""
    dataset = job.dataset
    files = [read_derived(shard, job.name) for shard in dataset.shards]
    lengths = np.diff(dataset.episode_start)
    rows: dict[str, np.ndarray] = {}
    settings = files[0].attributes["settings"]
    summary: dict[str, Any] = {"name": job.name, "settings": settings, "dataset": dataset.hash, "renders": {}}
    for render in job.renders:
        iou = np.concatenate([file.arrays[f"{render}/iou"] for file in files])
        empty = np.concatenate([file.arrays[f"{render}/empty"] for file in files])
        order = np.argsort(iou, kind="stable")
        mean = float(np.average(iou, weights=lengths))
        empty_share = float(empty.sum() / lengths.sum())
        suspicious = [episode for episode in order if iou[episode] < LOW or empty[episode]]
        print(
            f"{dataset.folder}, {render}: mIoU {mean:.3f} over {lengths.sum():,} frames, episodes from {iou.min():.3f} "
            f"to {iou.max():.3f} (median {np.median(iou):.3f}); empty masks {empty_share:.2%}; "
            f"{len(suspicious)} episodes below {LOW} or with empty masks"
        )
        print(f"  worst episodes: {', '.join(f'{episode} ({iou[episode]:.3f})' for episode in order[:SHOWN])}")
        if empty_share > 0.5:
            print(f"warning: {dataset.folder}, {render}: most masks are empty", file=sys.stderr)
        for episode in suspicious[:SHOWN]:
            print(
                f"warning: {dataset.folder}, {render}, episode {episode}: mIoU {iou[episode]:.3f}, {empty[episode]} of "
                f"{lengths[episode]} masks empty",
                file=sys.stderr,
            )
        summary["renders"][render] = {
            "miou": mean,
            "empty_share": empty_share,
            "episode_miou": iou.tolist(),
            "episode_empty": empty.tolist(),
        }
        simulator, ours = (
            Dataset(dataset.data_dir, dataset.env, dataset.split, render, source) for source in ("gt", job.name)
        )
        for what, episode in (("worst", order[0]), ("median", order[(len(order) - 1) // 2])):
            index = np.arange(*dataset.episode_start[episode : episode + 2])
            label = f"{render}, {what}\nepisode {episode}\nmIoU {iou[episode]:.3f}"
            rows[label] = picture_row(simulator, index, unpack(ours.masks(index), dataset.image_size))
    base = dataset.folder.parent / f"{dataset.split}.{job.name}"
    store.write_json(Path(f"{base}.json"), summary)
    title = f"{dataset.env}, {dataset.split}: masks '{job.name}' (magenta) and the simulator's (green)"
    print(f"  {base}.json, {pictures.rows(Path(f'{base}.png'), rows, title=title)}")


def show_boxes(job: Job) -> None:
    """Prints how the box fits the agent in first frames, and draws it in some of them."""
    rows: dict[str, np.ndarray] = {}
    for render in job.renders:
        dataset = Dataset(job.dataset.data_dir, job.dataset.env, job.dataset.split, render)
        starts, size = dataset.episode_start[:-1], dataset.image_size
        x0, y0, x1, y1 = (round(value) for value in job.box)
        inside = np.zeros((len(starts), size, size), bool)
        inside[:, y0:y1, x0:x1] = True
        agent = unpack(dataset.masks(starts), size)
        pixels = [np.nonzero(mask) for mask in agent if mask.any()]
        boxes = np.array([(x.min(), y.min(), x.max() + 1, y.max() + 1) for y, x in pixels])
        covered = (agent & inside).sum((1, 2)) / np.maximum(agent.sum((1, 2)), 1)
        print(
            f"{dataset.folder}, {render}, {len(starts)} episodes: box {job.box}; the agent's is "
            f"{np.median(boxes, 0).tolist()} (median); {covered.mean():.1%} of its pixels are in the box, "
            f"at least {covered.min():.1%}"
        )
        rows[render] = picture_row(dataset, starts, inside)
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
