"""Pictures of a run: frames in rows with mask outlines, and training curves."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

from common.runs import atomic_path

OUTLINE = (255, 0, 255)
TRUTH = (0, 255, 0)


def outline(images: np.ndarray, masks: np.ndarray, zoom: int, color: tuple[int, int, int] = OUTLINE) -> np.ndarray:
    """Enlarges images and draws the border of the masks one output pixel wide.

    Args:
        images: uint8 (N, H, W, 3).
        masks: bool (N, H, W).
        zoom: enlargement by whole pixels.
        color: of the border.

    Returns uint8 (N, H zoom, W zoom, 3).
    """
    images = images.repeat(zoom, axis=1).repeat(zoom, axis=2)
    inside = masks.astype(bool).repeat(zoom, axis=1).repeat(zoom, axis=2)
    padded = np.pad(inside, ((0, 0), (1, 1), (1, 1)), mode="edge")
    kept = padded[:, :-2, 1:-1] & padded[:, 2:, 1:-1] & padded[:, 1:-1, :-2] & padded[:, 1:-1, 2:]
    images[inside & ~kept] = color
    return images


def _array(images: Any) -> np.ndarray:
    """Arrays as they are; tensors (N, C, H, W) as float arrays (N, H, W, C)."""
    return images if isinstance(images, np.ndarray) else images.float().movedim(1, -1).cpu().numpy()


def rows(path: Path, named: dict[str, Any], masks: Any = None, title: str = "") -> Path:
    """Writes rows of frames, one row per entry, with the same mask outlined in each.

    Args:
        path: the PNG.
        named: row label to images: arrays (N, H, W, 3), uint8 or float in [-1/2, 1/2]; or tensors (N, 3, H, W) in
            [-1/2, 1/2].
        masks: bool array (N, H, W), tensor (N, 1, H, W) of zeros and ones, or None.
        title: written above.
    """
    named = {label: _array(images) for label, images in named.items()}
    masks = None if masks is None else _array(masks).reshape(len(masks), *masks.shape[-2:]).astype(bool)
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    count, height = next(iter(named.values())).shape[:2]
    zoom = max(1, round(192 / height))
    figure, axes = plt.subplots(
        len(named), 1, figsize=(1.5 * count + 1, 1.55 * len(named) + 0.4), squeeze=False, layout="constrained"
    )
    for axis, (label, images) in zip(axes[:, 0], named.items()):
        if images.dtype != np.uint8:
            images = ((images + 0.5).clip(0, 1) * 255).round().astype(np.uint8)
        images = outline(images, masks if masks is not None else np.zeros(images.shape[:3], bool), zoom)
        images = np.pad(images, ((0, 0), (2, 2), (2, 2), (0, 0)), constant_values=255)
        axis.imshow(np.concatenate(list(images), axis=1), interpolation="nearest")
        axis.set_ylabel(label, rotation=0, ha="right", va="center")
        axis.set(xticks=[], yticks=[])
        axis.spines[:].set_visible(False)
    if title:
        figure.suptitle(title)
    with atomic_path(path) as temporary:
        figure.savefig(temporary, dpi=120, bbox_inches="tight")
    plt.close(figure)
    return path


def curves(path: Path, metrics: list[dict[str, Any]]) -> Path:
    """Draws every logged number of every stage over its updates, from the lines of ``metrics.jsonl``."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    series: Any = defaultdict(list)  # name -> (update, value) pairs
    for line in metrics:
        for name, value in line.items():
            if name.startswith(f"{line['stage']}/"):
                series[name].append((line["step"], value))
    series = {name: points for name, points in series.items() if len(points) > 1}
    columns = min(4, max(1, len(series)))
    lines = -(-max(1, len(series)) // columns)
    figure, axes = plt.subplots(
        lines, columns, figsize=(3.6 * columns, 2.6 * lines), squeeze=False, layout="constrained"
    )
    for axis in axes.flat[len(series) :]:
        axis.set_visible(False)
    for axis, (name, points) in zip(axes.flat, series.items()):
        x, y = np.array(points).T
        axis.plot(x, y)
        axis.set(title=name, xlabel="update")
        if (y > 0).all():
            axis.set_yscale("log")
        axis.grid(alpha=0.3)
    with atomic_path(path) as temporary:
        figure.savefig(temporary, dpi=120)
    plt.close(figure)
    return path
