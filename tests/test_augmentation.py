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


def stacks(count: int, size: int, seed: int = 0) -> torch.Tensor:
    """Random stacks (B, 9, size, size) of coarse squares."""
    generator = torch.Generator().manual_seed(seed)
    return F.interpolate(torch.rand(count, 9, size // 4, size // 4, generator=generator), size=(size, size)) - 0.5


def noise_for(choice: int, count: int, seed: int = 1) -> torch.Tensor:
    noise = torch.rand(count, 12, generator=torch.Generator().manual_seed(seed))
    noise[:, 0] = (choice + 0.5) / 8
    return noise


def one_map(name: str, noise: np.ndarray, size: int, x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where in its input a transformation finds the points x, y of its output, in pixels."""
    middle = (size - 1) / 2
    if name == "shift":
        reach = {64: 14, 128: 28, 32: 7}[size]
        right, down = np.floor(noise[1:3] * (2 * reach + 1)) - reach
        return x + right, y + down
    if name == "rotate":
        angle = math.radians(180 * noise[3] - 90)
        dx, dy = x - middle, y - middle
        return middle + math.cos(angle) * dx + math.sin(angle) * dy, middle - math.sin(angle) * dx + math.cos(
            angle
        ) * dy
    pad = 30
    low, high = -pad, size - 1 + pad
    corners = [(low, low), (high, low), (high, high), (low, high)]
    moved = []
    for number, (cx, cy) in enumerate(corners):
        share = noise[4 + 2 * number : 6 + 2 * number] / 2
        moved.append((cx + share[0] * (middle - cx), cy + share[1] * (middle - cy)))
    a, b, c, d, e, f, g, h = TF._get_perspective_coeffs(corners, moved)  # torchvision's own solver
    w = g * x + h * y + 1
    return (a * x + b * y + c) / w, (d * x + e * y + f) / w


@pytest.mark.parametrize("size", [32, 64, 128])
@pytest.mark.parametrize("choice", range(8))
def test_against_a_loop_over_images(choice: int, size: int) -> None:
    images, noise = stacks(3, size), noise_for(choice, 3)
    found = Augmentation(size)(images, noise).numpy()
    for number in range(3):
        y, x = np.mgrid[:size, :size].astype(np.float64)
        for name in reversed(CHOICES[choice].split()):  # the last one made the output, so its input is found first
            x, y = one_map(name, noise[number].double().numpy(), size, x, y)
        place = np.clip(y, 0, size - 1), np.clip(x, 0, size - 1)
        for channel in (0, 8):
            expected = ndimage.map_coordinates(images[number, channel].double().numpy(), place, order=1)
            assert np.abs(found[number, channel] - expected).max() < 2e-3
    assert choice == 0 or np.abs(found - images.numpy()).max() > 0.1


def test_nothing_changes_nothing() -> None:
    images = stacks(4, 64)
    torch.testing.assert_close(Augmentation(64)(images, noise_for(0, 4)), images, rtol=0, atol=1e-5)


def test_a_shift_is_a_crop_of_the_padded_image() -> None:
    images, noise = stacks(6, 64), noise_for(1, 6)
    found = Augmentation(64)(images, noise)
    padded = F.pad(images, (14, 14, 14, 14), mode="replicate")
    for number, (right, down) in enumerate((noise[:, 1:3] * 29).floor().int().tolist()):
        expected = padded[number, :, down : down + 64, right : right + 64]
        torch.testing.assert_close(found[number], expected, rtol=0, atol=1e-5)


def test_a_rotation_is_torchvisions() -> None:
    images, noise = stacks(4, 64), noise_for(2, 4)
    found = Augmentation(64)(images, noise)
    padded = F.pad(images, (17, 17, 17, 17), mode="replicate")
    for number in range(4):
        degrees = 90 - 180 * noise[number, 3].item()  # torchvision turns the other way
        turned = TF.rotate(padded[number], degrees, TF.InterpolationMode.BILINEAR)
        expected = TF.center_crop(turned, [64, 64])
        inside = (slice(None), slice(8, 56), slice(8, 56))
        torch.testing.assert_close(found[number][inside], expected[inside], rtol=0, atol=2e-3)


def test_every_choice_is_as_likely() -> None:
    """Told apart by what they do: nothing, a shift (whole pixels keep the values), or one of the others."""
    images = torch.rand(1, 3, 32, 32).expand(4000, -1, -1, -1)
    found = Augmentation(32)(images, torch.rand(4000, 12, generator=torch.Generator().manual_seed(0)))
    still = (found - images).abs().amax((1, 2, 3)) < 1e-4
    values = images[0].flatten()
    nearest = torch.cdist(found[:, :, 8::16, 8::16].reshape(-1, 1), values[:, None]).amin(1).view(4000, -1)
    moved = (nearest.amax(1) < 1e-5) & ~still
    assert still.float().mean() == pytest.approx(1 / 8, abs=0.02)
    assert moved.float().mean() == pytest.approx(1 / 8, abs=0.02)


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


def test_all_frames_of_a_stack_move_together() -> None:
    images = stacks(8, 32)[:, :3].repeat(1, 3, 1, 1)
    noise = noise_for(7, 8)
    found = Augmentation(32)(images, noise).unflatten(1, (3, 3))
    assert torch.equal(found[:, 0], found[:, 1]) and torch.equal(found[:, 0], found[:, 2])
