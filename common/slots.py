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
from common.cli import UserError
from common.dataset import Dataset, normalise
from common.masks import unpack_masks


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
    """Attaches a slot to a split as `slots`: at frame t, that of t and of t + offset, float16 (2, D).

    Beyond the last frame of an episode it is that of the last frame.

    slots: the selected one of every frame, (frames, D). selected: its number, from 1.
    """
    now = slots.half().numpy()
    last = dataset.episode_start[dataset.episode_of_frame + 1] - 1
    later = now[np.minimum(np.arange(dataset.num_frames) + offset, last)]
    pairs = np.stack([now, later], axis=1)
    cuts = np.cumsum([shard.frames for shard in dataset.shards])[:-1]
    dataset.attach("slots", np.split(pairs, cuts), hashlib.sha256(pairs.data).hexdigest(), {"slot": selected})


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


def draw_slots(path: Path, dataset: Dataset, attention: Tensor, selected: int, count: int = 8) -> Path:
    """Draws some of a split's first frames with the agent's outline, and where each slot attends to: black elsewhere.

    attention: (frames, K, N) of the frames from the first one on. selected: the slot with a star, from 1.
    """
    index, size = np.linspace(0, len(attention) - 1, count).astype(int), dataset.image_size
    frames = normalise(torch.from_numpy(dataset.frames(index)))
    masks = unpack_masks(torch.from_numpy(dataset.masks(index)), size, size) if dataset.has_masks else None
    rows = {"o(t)": frames}
    for slot, light in enumerate(enlarge(attention[index], size).unbind(1), 1):
        rows[f"slot {slot}{'*' * (slot == selected)}"] = (frames + 0.5) * light[:, None] - 0.5
    title = f"{dataset.env}: held-out frames, and what each slot attends to (* selected)"
    return pictures.rows(path, rows, masks, title)


def agent_report(attention: Tensor, dataset: Dataset, index: np.ndarray) -> dict[str, Any]:
    """Which slot has the agent: every pixel belongs to the slot that attends to it most, compared with the mask.

    Args:
        attention: (frames, K, N) at global indices `index` (frames,), consecutive in each episode.

    Returns, over the frames with a mask: `iou` of each slot, mean; `share` of frames in which each slot has the highest
    IoU; `best_iou`, the mean of that highest; `changes`, the share of pairs of consecutive frames between which it
    moves to another slot; `frames`.
    """
    nothing = {"frames": 0, "iou": None, "share": None, "best_iou": None, "changes": None}
    if not dataset.has_masks:
        return nothing
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
        return nothing
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
