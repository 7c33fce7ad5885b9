"""Slots of frames: a GRU cell; batches of one slot; which slot tells most about actions, and which has the agent."""

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common import pictures
from common.dataset import Dataset, unpack_masks
from common.errors import UserError


class GRUCell(nn.Module):
    """Input (..., D) and state (..., D) to the new state (Cho et al., arXiv 1406.1078), with `nn.GRUCell`'s weights.

    The fused kernel of that one breaks the compiled graph on CUDA.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.from_input, self.from_state = nn.Linear(dim, 3 * dim), nn.Linear(dim, 3 * dim)

    def forward(self, x: Tensor, state: Tensor) -> Tensor:
        x_reset, x_update, x_new = self.from_input(x).chunk(3, dim=-1)
        state_reset, state_update, state_new = self.from_state(state).chunk(3, dim=-1)
        update = torch.sigmoid(x_update + state_update)
        new = torch.tanh(x_new + torch.sigmoid(x_reset + state_reset) * state_new)
        return (1 - update) * new + update * state


def attach_slot(dataset: Dataset, slots: Tensor, selected: int, offset: int) -> None:
    """Makes a split's windows of transitions carry a slot instead of frames: float16 (B, 2, D).

    It is the slot at t and at t + offset, or the last frame of the episode.

    slots: the selected one of every frame, (frames, D). selected: its number, from 1.
    """
    table = slots.half().contiguous().numpy()
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
    the mean variance of these actions): mean and each fold's.
    """
    from sklearn.decomposition import PCA
    from sklearn.linear_model import LinearRegression
    from sklearn.model_selection import GroupKFold, cross_val_predict
    from sklearn.pipeline import make_pipeline

    actions = np.clip(dataset.action[labelled].astype(np.float64), -1, 1)
    episode = dataset.episode_of_frame[labelled]
    split = GroupKFold(min(folds, len(np.unique(episode))))
    parts = [test for _, test in split.split(actions, groups=episode)]
    smallest = len(actions) - max(map(len, parts))
    table = []
    for slot in range(1, slots.shape[1] + 1):
        values = slots[:, slot - 1].double().numpy()
        pca = PCA(min(components, values.shape[1], smallest), svd_solver="covariance_eigh")  # no random numbers
        predicted = cross_val_predict(make_pipeline(pca, LinearRegression()), values, actions, groups=episode, cv=split)
        error = (predicted - actions) ** 2 / actions.var(0).mean()
        each = [float(error[part].mean()) for part in parts]
        table.append({"slot": slot, "nmse": float(error.mean()), "nmse_per_fold": each})
    return table


def enlarge(attention: Tensor, size: int) -> Tensor:
    """Attention over patches (..., N) as pictures (..., size, size)."""
    side = math.isqrt(attention.shape[-1])
    grid = attention.reshape(-1, 1, side, side)
    return F.interpolate(grid, size=(size, size), mode="bilinear").view(*attention.shape[:-1], size, size)


def draw_slots(path: Path, frames: Tensor, masks: Tensor, attention: Tensor, selected: int, title: str) -> Path:
    """Draws frames (B, 3, H, W) in [-1/2, 1/2], and where each slot attends to in them: black elsewhere.

    masks: of the agent, outlined, (B, 1, H, W). attention: (B, K, N). selected: the slot with a star, from 1.
    """
    rows = {"o(t)": frames}
    for slot, light in enumerate(enlarge(attention, frames.shape[-1]).unbind(1), 1):
        rows[f"slot {slot}{'*' * (slot == selected)}"] = (frames + 0.5) * light[:, None] - 0.5
    return pictures.rows(path, rows, masks, f"{title}: held-out frames, and what each slot attends to (* selected)")


def agent_report(attention: Tensor, dataset: Dataset, index: np.ndarray) -> dict[str, Any]:
    """Which slot has the agent: every pixel belongs to the slot that attends to it most, compared with the mask.

    Args:
        attention: (frames, K, N) at global indices `index` (frames,), consecutive in each episode.

    Returns, over the frames with a mask: `iou` of each slot, mean; `share` of frames in which each slot has the highest
    IoU; `best_iou`, the mean of that highest; `changes`, the share of pairs of consecutive frames between which it
    moves to another slot; `frames`.
    """
    size, slots, overlaps, visible = dataset.image_size, attention.shape[1], [], []
    for part, rows in zip(attention.split(256), np.split(index, range(256, len(index), 256))):
        mask = unpack_masks(torch.from_numpy(dataset.masks(rows)), size, size).bool()  # (B, 1, H, W)
        belongs = enlarge(part, size).argmax(dim=1)[:, None] == torch.arange(slots)[:, None, None]  # (B, K, H, W)
        overlap = (belongs & mask).sum((2, 3)) / (belongs | mask).sum((2, 3)).clamp(min=1)
        overlaps.append(overlap.double().numpy())
        visible.append(mask.any((1, 2, 3)).numpy())
    visible = np.concatenate(visible)
    iou, index = np.concatenate(overlaps)[visible], index[visible]
    if not len(index):
        return {"frames": 0, "iou": None, "share": None, "best_iou": None, "changes": None}
    best = iou.argmax(1)
    pairs = (np.diff(index) == 1) & (np.diff(dataset.episode_of_frame[index]) == 0)
    changed = (np.diff(best) != 0)[pairs]
    return {
        "frames": len(index),
        "iou": iou.mean(0).tolist(),
        "share": (np.bincount(best, minlength=slots) / len(best)).tolist(),
        "best_iou": float(iou.max(1).mean()),
        "changes": float(changed.mean()) if len(changed) else None,
    }
