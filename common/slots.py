"""Slots of whole episodes: computing and attaching them; which tells most about actions, which has the agent."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from common import runs
from common.cache import cached_parts
from common.dataset import Dataset, unpack_masks
from common.dino import Features
from common.errors import UserError

# From features (B, T, N, F) and a state, or None at an episode's start, to slots (B, T, K, D), attention (B, T, K, N)
# and the state that the next frames go on from.
Follow = Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor, Tensor]]
CHUNK = 16  # frames of each episode per step
AT_ONCE = {"cuda": 64, "cpu": 4}  # episodes side by side


def _follow(follow: Follow, features: Features, dataset: Dataset, episodes: range) -> tuple[Tensor, Tensor]:
    """Slots float16 (frames, K, D) and attention float16 (frames, K, N) of consecutive episodes, side by side.

    Each is followed from its first frame to its last. Raises Stopped at a signal.
    """
    starts, device = dataset.episode_start[episodes.start : episodes.stop + 1], features.device
    lengths, state = np.diff(starts), None
    slots, attention = [], []
    for first in range(0, int(lengths.max()), CHUNK):
        times = np.arange(first, min(first + CHUNK, int(lengths.max())))
        index = starts[:-1, None] + np.minimum(times, lengths[:, None] - 1)  # a shorter one repeats its last frame
        inputs = features.of(dataset, index)[..., : features.dim].float()
        with torch.inference_mode(), torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            *found, state = follow(inputs, state)
        slots.append(found[0].half().cpu())
        attention.append(found[1].half().cpu())
        if runs.stop_requested():
            raise runs.Stopped("the slots of these episodes start over when the same command is repeated")

    def in_order(parts: list[Tensor]) -> Tensor:
        whole = torch.cat(parts, dim=1)
        return torch.cat([episode[:length] for episode, length in zip(whole, lengths)])

    return in_order(slots), in_order(attention)


def follow_split(
    run: runs.Run, name: str, follow: Follow, features: Features, dataset: Dataset
) -> tuple[Tensor, float]:
    """The slots of every frame of a split, computed once: float16 (frames, K, D), mapped from a file, and the seconds.

    A killed computation goes on with the episodes that were not saved.
    """
    at_once = AT_ONCE[features.device.type]

    def parts(start: int) -> Iterator[Tensor]:
        for first in range(start * at_once, dataset.num_episodes, at_once):
            yield _follow(follow, features, dataset, range(first, min(first + at_once, dataset.num_episodes)))[0]

    count = -(-dataset.num_episodes // at_once)
    return cached_parts(run, name, dataset.num_frames, count, parts, unit="frames", dtype=np.float16)


def watch(follow: Follow, features: Features, dataset: Dataset, episodes: int) -> tuple[np.ndarray, Tensor]:
    """Global indices (frames,) and attention (frames, K, N) of a split's first episodes, at most that many."""
    count = min(episodes, dataset.num_episodes)
    _, attention = _follow(follow, features, dataset, range(count))
    return np.arange(dataset.episode_start[count]), attention.float()


def attach_slot(dataset: Dataset, slots: Tensor, selected: int, offset: int) -> None:
    """Makes a split's windows of transitions carry one slot instead of frames: float16 (B, 2, D).

    It is the slot at t and at t + offset, or the last frame of the episode.

    slots: of every frame, (frames, K, D). selected: counted from 1.
    """
    table = np.ascontiguousarray(slots[:, selected - 1].numpy())
    cuts = np.cumsum([shard.frames for shard in dataset.shards])[:-1]
    digest = hashlib.sha256(table.data).hexdigest()
    dataset.attach("slots", np.split(table, cuts), digest, {"slot": selected}, offsets=(0, offset))
    dataset.carried = "slots"


def check_labelled(dataset: Dataset, labelled: np.ndarray) -> None:
    """Raises UserError if the labelled transitions are too few for slot probing, which holds out whole episodes."""
    if len(np.unique(dataset.episode_of_frame[labelled])) < 2:
        raise UserError(
            f"{len(labelled):,} labelled transitions are of one episode, and slot probing compares at least two; raise "
            "--num-labels"
        )


def probe_slots(
    slots: Tensor, dataset: Dataset, labelled: np.ndarray, components: int, folds: int
) -> list[dict[str, Any]]:
    """How well the action can be read from each slot alone: PCA and linear regression, cross-validated over episodes.

    Args:
        slots: (L, K, D) of the labelled transitions.
        labelled: their global indices (L,).
        components: principal components, at most.
        folds: parts of the labelled episodes, at most as many as there are; each is predicted from the others.

    Returns for each slot its number from 1 and the NMSE (mean squared error over samples and dimensions, relative to
    the mean variance of these actions): mean and each fold's. Raises UserError if a single episode is labelled.
    """
    from sklearn.decomposition import PCA
    from sklearn.linear_model import LinearRegression
    from sklearn.model_selection import GroupKFold, cross_val_predict
    from sklearn.pipeline import make_pipeline

    check_labelled(dataset, labelled)
    actions = np.clip(dataset.action[labelled].astype(np.float64), -1, 1)
    episode = dataset.episode_of_frame[labelled]
    groups = len(np.unique(episode))
    split = GroupKFold(min(folds, groups))
    parts = [test for _, test in split.split(actions, groups=episode)]
    smallest = len(actions) - max(map(len, parts))
    variance, table = actions.var(0).mean(), []
    for slot in range(1, slots.shape[1] + 1):
        values = slots[:, slot - 1].double().numpy()
        pca = PCA(min(components, values.shape[1], smallest), svd_solver="covariance_eigh")  # no random numbers
        probe = make_pipeline(pca, LinearRegression())
        error = (cross_val_predict(probe, values, actions, groups=episode, cv=split) - actions) ** 2 / variance
        each = [float(error[part].mean()) for part in parts]
        table.append({"slot": slot, "nmse": float(error.mean()), "nmse_per_fold": each})
    return table


def enlarge(attention: Tensor, size: int) -> Tensor:
    """Attention over patches (..., N) as pictures (..., size, size)."""
    side = math.isqrt(attention.shape[-1])
    grid = attention.reshape(-1, 1, side, side)
    return F.interpolate(grid, size=(size, size), mode="bilinear").view(*attention.shape[:-1], size, size)


def masked(frames: Tensor, attention: Tensor) -> Tensor:
    """Frames (B, 3, H, W) in [-1/2, 1/2] times a slot's attention (B, N): black where it does not look."""
    return (frames + 0.5) * enlarge(attention, frames.shape[-1])[:, None].to(frames) - 0.5


def agent_report(attention: Tensor, dataset: Dataset, index: np.ndarray) -> dict[str, Any]:
    """Which slot has the agent: every pixel belongs to the slot that attends to it most, compared with the mask.

    Args:
        attention: (frames, K, N) at global indices `index` (frames,), consecutive in each episode.

    Returns, over the frames with a mask: `iou` of each slot, mean; `share` of frames in which each slot has the highest
    IoU of all (none if no slot meets the mask); `best_iou`, the mean of that highest; `changes`, the share of pairs of
    consecutive frames between which it moves to another slot; `frames`.
    """
    size, overlaps = dataset.image_size, []
    for part, rows in zip(attention.split(256), np.split(index, range(256, len(index), 256))):
        mask = unpack_masks(torch.from_numpy(dataset.masks(rows)), size, size)[:, 0].bool()
        owner = enlarge(part, size).argmax(dim=1)
        belongs = owner[:, None] == torch.arange(attention.shape[1])[:, None, None]  # (B, K, H, W)
        both, either = (belongs & mask[:, None]).sum((2, 3)), (belongs | mask[:, None]).sum((2, 3))
        overlaps.append(torch.where(mask.any((1, 2))[:, None], both / either.clamp(min=1), torch.nan))
    iou = torch.cat(overlaps).double().numpy()
    seen = ~np.isnan(iou[:, 0])
    if not seen.any():
        return {"frames": 0, "iou": None, "share": None, "best_iou": None, "changes": None}
    best = np.where(seen & (iou.max(1, initial=0, where=~np.isnan(iou)) > 0), np.nan_to_num(iou).argmax(1), -1)
    follows = (np.diff(dataset.episode_of_frame[index]) == 0) & (best[1:] >= 0) & (best[:-1] >= 0)
    changed = (best[1:] != best[:-1])[follows]
    return {
        "frames": int(seen.sum()),
        "iou": iou[seen].mean(0).tolist(),
        "share": [float((best[seen] == slot).mean()) for slot in range(iou.shape[1])],
        "best_iou": float(iou[seen].max(1).mean()),
        "changes": float(changed.mean()) if len(changed) else None,
    }
