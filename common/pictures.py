"""Pictures: frames in rows with mask outlines, training curves, and what every figure is made with."""

from __future__ import annotations

import textwrap
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

from common.store import atomic_path

OUTLINE = (255, 0, 255)
TRUTH = (0, 255, 0)


def panels(count: int, columns: int, width: float, height: float) -> tuple[Any, list[Any]]:
    """A figure with `count` panels of width x height inches in rows of `columns`, and their axes."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["text.parse_math"] = False  # names of files may have dollar signs
    from matplotlib import pyplot as plt

    columns = min(columns, count)
    lines = -(-count // columns)
    size = (width * columns, height * lines + 0.3)
    figure, axes = plt.subplots(lines, columns, figsize=size, squeeze=False, layout="constrained")
    for axis in axes.flat[count:]:
        axis.set_visible(False)
    return figure, list(axes.flat[:count])


def log_scale(axis: Any) -> None:
    """Makes the vertical axis logarithmic, with plain numbers also between the powers of ten."""
    from matplotlib import ticker

    axis.set_yscale("log")
    axis.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
    axis.yaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_minor_locator(ticker.NullLocator())
    axis.tick_params(axis="y", labelsize=8)


def label(name: str) -> str:
    """A name in lines of at most 28 letters, as those of runs with many flags are long."""
    return "\n".join(part for line in name.splitlines() for part in textwrap.wrap(line.replace("_", " "), 28))


def save(figure: Any, path: Path) -> Path:
    """Writes a figure as PNG and forgets it."""
    from matplotlib import pyplot as plt

    with atomic_path(path) as temporary:
        figure.savefig(temporary, dpi=120, bbox_inches="tight")
    plt.close(figure)
    return path


def outline(images: np.ndarray, masks: np.ndarray, zoom: int, color: tuple[int, int, int] = OUTLINE) -> np.ndarray:
    """uint8 (N, H, W, 3) enlarged by whole pixels, with the border of masks (N, H, W) drawn one pixel wide."""
    images = images.repeat(zoom, axis=1).repeat(zoom, axis=2)
    inside = masks.astype(bool).repeat(zoom, axis=1).repeat(zoom, axis=2)
    padded = np.pad(inside, ((0, 0), (1, 1), (1, 1)), mode="edge")
    kept = padded[:, :-2, 1:-1] & padded[:, 2:, 1:-1] & padded[:, 1:-1, :-2] & padded[:, 1:-1, 2:]
    images[inside & ~kept] = color
    return images


def to_array(images: Any) -> np.ndarray:
    """Arrays as they are; tensors (N, C, H, W) as float arrays (N, H, W, C)."""
    return images if isinstance(images, np.ndarray) else images.float().movedim(1, -1).cpu().numpy()


def rows(path: Path, named: dict[str, Any], masks: Any = None, title: str = "") -> Path:
    """Writes rows of frames as PNG, with the same masks outlined in each, below a title.

    Args:
        named: row label to images: arrays (N, H, W, 3), uint8 or float in [-1/2, 1/2]; or tensors (N, 3, H, W) in
            [-1/2, 1/2]. Without masks rows may differ in size and number.
        masks: tensor (N, 1, H, W) of zeros and ones, or None.
    """
    figure, axes = panels(len(named), 1, 1.5 * max(map(len, named.values())) + 1, 1.55)
    for axis, (name, images) in zip(axes, named.items()):
        images = to_array(images)
        if images.dtype != np.uint8:
            images = ((images + 0.5).clip(0, 1) * 255).round().astype(np.uint8)
        zoom = max(1, round(192 / images.shape[1]))
        inside = np.zeros(images.shape[:3], bool) if masks is None else to_array(masks)[..., 0]
        images = outline(images, inside, zoom)
        images = np.pad(images, ((0, 0), (2, 2), (2, 2), (0, 0)), constant_values=255)
        axis.imshow(np.concatenate(list(images), axis=1), interpolation="nearest")
        axis.set_ylabel(label(name), rotation=0, ha="right", va="center")
        axis.set(xticks=[], yticks=[])
        axis.spines[:].set_visible(False)
    figure.suptitle(title)
    return save(figure, path)


def curves(path: Path, metrics: list[dict[str, Any]]) -> Path:
    """Draws every logged number of every stage over its updates, from the lines of ``metrics.jsonl``."""
    series: Any = defaultdict(list)  # name -> (update, value) pairs
    for line in metrics:
        for name, value in line.items():
            if name.startswith(f"{line['stage']}/"):
                series[name].append((line["step"], value))
    series = {name: points for name, points in series.items() if len(points) > 1} or series
    figure, axes = panels(max(1, len(series)), 4, 3.6, 2.6)
    axes[0].set_visible(bool(series))
    for axis, (name, points) in zip(axes, series.items()):
        x, y = np.array(points).T
        axis.plot(x, y, marker="o" if len(points) == 1 else None)
        axis.set(title=name, xlabel="update")
        if (y > 0).all():
            log_scale(axis)
        axis.grid(alpha=0.3)
    return save(figure, path)
