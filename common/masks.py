"""Masks on the device: unpacked from bits, grown or shrunk, and hidden behind a rectangle."""

import hashlib
import sys

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from common.cli import UserError
from common.dataset import Batch, Dataset


def unpack_masks(packed: Tensor, height: int, width: int) -> Tensor:
    """Bit-packed uint8 (..., H*W/8) -> float32 (..., 1, H, W) of zeros and ones."""
    shift = torch.arange(7, -1, -1, dtype=torch.uint8, device=packed.device)
    bits = (packed.unsqueeze(-1) >> shift) & 1
    return bits.view(*packed.shape[:-1], 1, height, width).float()


def next_masks(batch: Batch) -> Tensor | None:
    """The masks of o_{t+1} in a batch, (B, 1, H, W), for outlines in pictures; None if it has no masks."""
    return None if batch.masks is None else unpack_masks(batch.masks[:, 3], *batch.frames.shape[2:4])


def check_masks(dataset: Dataset, dilation: int = 0) -> None:
    """Raises UserError if a set has no masks, or only empty ones, with which a masked loss learns nothing.

    Warns if most are empty. Looks at some thousand masks, evenly spaced, grown by `dilation` pixels.
    """
    some = torch.from_numpy(dataset.masks(np.arange(0, dataset.num_frames, -(-dataset.num_frames // 4096))))
    masks = unpack_masks(some[None], dataset.image_size, dataset.image_size)
    empty = ~(dilate(masks, dilation) if dilation else masks)[0].bool().flatten(1).any(dim=1).numpy()
    which = f"{dataset.folder}: masks '{dataset.mask_source}' of the {dataset.render} render"
    which += f", with --mask-dilation {dilation}," if dilation else ""
    if empty.all():
        raise UserError(f"{which} are all empty, so there is nothing to learn from; look at them, or take others")
    if empty.mean() > 0.5:
        print(f"warning: {which}: {empty.mean():.0%} are empty", file=sys.stderr, flush=True)


def attach_mask_blocks(dataset: Dataset, name: str, first: int, last: int) -> None:
    """Attaches the union of the masks from t + first to t + last, inside the episode, bit-packed like the masks."""
    parts, digest = [], hashlib.sha256()
    for shard in dataset.shards:
        masks = dataset.rows("masks", np.arange(shard.frames) + sum(map(len, parts)))
        union = np.zeros_like(masks)
        episode = np.repeat(np.arange(shard.num_episodes), np.diff(shard.episode_start))
        frames = np.arange(shard.frames)
        for offset in range(first, last + 1):
            beside = np.clip(frames + offset, shard.episode_start[episode], shard.episode_start[episode + 1] - 1)
            union |= masks[beside]
        parts.append(union)
        digest.update(union.data)
    dataset.attach(name, parts, digest.hexdigest(), {"first": first, "last": last})


def dilate(masks: Tensor, pixels: int) -> Tensor:
    """Grows masks (B, F, 1, H, W) by that many pixels with a square element; a negative number shrinks them."""
    width = abs(pixels)
    sign = 1 if pixels > 0 else -1  # eroding the agent is dilating the rest
    size = (1, 2 * width + 1, 2 * width + 1)
    return sign * F.max_pool3d(sign * masks, size, stride=1, padding=(0, width, width))


def occlusion(masks: Tensor, fraction: float, noise: Tensor) -> Tensor:
    """The pixels (B, 1, 1, H, W) under one random rectangle per window, over the agent (the paper's procedure).

    Args:
        masks: (B, 1, H, W) of zeros and ones; the rectangle lies in the bounding box.
        fraction: area of the rectangle as a share of that box.
        noise: (B, 3) uniform in [0, 1): aspect ratio exp(U(-1/2, 1/2)), top, left.
    """
    union = masks[:, 0] > 0.5  # (B, H, W)

    def extent(hit: Tensor) -> tuple[Tensor, Tensor]:  # (B, N) to the first true index and the length up to the last
        first, behind = hit.float().argmax(1), hit.flip(1).float().argmax(1)
        return first.float(), torch.where(hit.any(1), hit.shape[1] - behind - first, 0).float()

    (top, box_height), (left, box_width) = extent(union.any(2)), extent(union.any(1))
    area = fraction * box_height * box_width
    height = torch.minimum((area * torch.exp(noise[:, 0] - 0.5)).sqrt(), box_height)
    width = torch.minimum(area / height.clamp(min=1e-6), box_width)
    height, width = height.round(), width.round()
    top = top + (noise[:, 1] * (box_height - height + 1)).floor()
    left = left + (noise[:, 2] * (box_width - width + 1)).floor()
    rows, columns = (torch.arange(n, device=masks.device)[None] for n in masks.shape[-2:])
    inside_rows = (rows >= top[:, None]) & (rows < (top + height)[:, None])
    inside_columns = (columns >= left[:, None]) & (columns < (left + width)[:, None])
    return (inside_rows[:, :, None] & inside_columns[:, None, :])[:, None, None]
