"""LAOM's augmentation in one sampling, against a loop over images that transforms coordinates one map after another."""

import itertools
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy import ndimage
from torchvision.transforms import functional as TF

from common.augmentation import Augmentation

CHOICES = ("", "shift", "rotate", "distort", "shift rotate", "rotate shift", "rotate distort", "distort rotate")


def one_map(name: str, noise: np.ndarray, size: int, x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where in its input a transformation finds the points x, y of its output, in pixels."""
    middle = (size - 1) / 2
    if name == "shift":
        reach = {32: 7, 64: 14, 128: 28}[size]
        right, down = np.floor(noise[1:3] * (2 * reach + 1)) - reach
        return x + right, y + down
    if name == "rotate":
        angle = math.radians(180 * noise[3] - 90)
        dx, dy = x - middle, y - middle
        cos, sin = math.cos(angle), math.sin(angle)
        return middle + cos * dx + sin * dy, middle - sin * dx + cos * dy
    low, high = -30, size - 1 + 30
    corners = np.array([(low, low), (high, low), (high, high), (low, high)])
    moved = corners + noise[4:].reshape(4, 2) / 2 * (middle - corners)
    a, b, c, d, e, f, g, h = TF._get_perspective_coeffs(corners.tolist(), moved.tolist())  # torchvision's own solver
    w = g * x + h * y + 1
    return (a * x + b * y + c) / w, (d * x + e * y + f) / w


@pytest.mark.parametrize("size", [32, 64, 128])
@pytest.mark.parametrize("choice", range(8))
def test_against_a_loop_over_images(choice: int, size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    images = F.interpolate(torch.rand(3, 9, size // 4, size // 4, generator=generator), size=(size, size)) - 0.5
    noise = torch.rand(3, 12, generator=generator)
    noise[:, 0] = (choice + noise[:, 0]) / 8  # all choices are as likely
    found = Augmentation(size)(images, noise).numpy()
    for number in range(3):
        y, x = np.mgrid[:size, :size].astype(np.float64)
        for name in reversed(CHOICES[choice].split()):  # the last one made the output, so its input is found first
            x, y = one_map(name, noise[number].double().numpy(), size, x, y)
        place = np.clip(y, 0, size - 1), np.clip(x, 0, size - 1)
        for channel in (0, 8):  # all frames of a stack move together
            expected = ndimage.map_coordinates(images[number, channel].double().numpy(), place, order=1)
            assert np.abs(found[number, channel] - expected).max() < 2e-3
    assert choice == 0 or np.abs(found - images.numpy()).max() > 0.1


@pytest.mark.parametrize("size", [32, 64, 128])
def test_the_strongest_distortions_stay_in_front_of_the_camera(size: int) -> None:
    """Every combination of corners that move fully or not at all: the picture stays finite and is not folded over."""
    corners = torch.tensor(list(itertools.product((0.0, 1 - 2**-24), repeat=8)))
    ramp = torch.linspace(-0.5, 0.5, size).expand(1, 1, size, size)  # grows to the right
    for choice in (3, 6, 7):
        noise = torch.full((len(corners), 12), 0.5)  # no turn, no shift
        noise[:, 0], noise[:, 4:] = (choice + 0.5) / 8, corners
        found = Augmentation(size)(ramp.expand(len(corners), -1, -1, -1), noise)
        assert found.isfinite().all() and found.abs().max() <= 0.5 + 1e-6
        assert (found.diff(dim=-1) > -1e-5).all()
