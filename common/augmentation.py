"""LAOM's random shifts, rotations and perspective distortions of stacks of frames (arXiv 2502.00379), on the device."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Augmentation(nn.Module):
    """Moves each stack of frames as a whole: not at all, shift, rotate, distort, or one of four pairs of them in turn.

    One projective map per stack, from output to input pixels, does it in one sampling; edges are replicated. Choices
    and ranges are LAOM's: shifts of up to 7/32 of the image in whole pixels, angles of up to a quarter turn, corners of
    the image with 30 pixels around it that move inwards by up to half of the way to its middle. Unlike there, every
    stack has an angle and corners of its own, and what the first of a pair moves out of the picture is not cut off
    before the second.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        pairs = [[0, 0], [1, 0], [2, 0], [3, 0], [1, 2], [2, 1], [2, 3], [3, 2]]  # first, second: of the maps below
        corners = torch.tensor([[-1.0, -1.0], [1.0, -1.0], [1.0, 1.0], [-1.0, 1.0]]) * (size + 59) / size
        y, x = torch.meshgrid(*[(2 * torch.arange(size) + 1) / size - 1] * 2, indexing="ij")  # grid_sample's units
        for name, value in {"pairs": torch.tensor(pairs), "corners": corners, "x": x, "y": y}.items():
            self.register_buffer(name, value, persistent=False)

    def forward(self, stacks: Tensor, noise: Tensor) -> Tensor:
        """stacks (B, C, size, size); noise (B, 12) uniform in [0, 1): choice, shift (2), angle, corners (4 x 2)."""
        zero, one = torch.zeros_like(noise[:, 0]), torch.ones_like(noise[:, 0])
        reach = self.size * 7 // 32
        x, y = (((noise[:, 1:3] * (2 * reach + 1)).floor() - reach) * 2 / self.size).unbind(1)
        cos, sin = (angle := (noise[:, 3] - 0.5) * math.pi).cos(), angle.sin()
        corners = self.corners * (1 - noise[:, 4:].view(-1, 4, 2) / 2)  # (B, 4, 2), where they move to
        distort = _square_of(corners, self.corners[2, 0])
        maps = [one, zero, zero, zero, one, zero, zero, zero], [one, zero, x, zero, one, y, zero, zero]
        maps = *maps, [cos, sin, zero, -sin, cos, zero, zero, zero]
        maps = [torch.stack([*entries, one], dim=1).view(-1, 3, 3) for entries in maps]
        maps = torch.stack([*maps, distort], dim=1)
        first, second = self.pairs[(noise[:, 0] * 8).long()].unbind(1)
        index = torch.arange(len(noise), device=noise.device)
        to_input = (maps[index, first][:, :, :, None] * maps[index, second][:, None]).sum(2)  # of both, in float32
        m = to_input.view(-1, 9, 1, 1).unbind(1)
        w = m[6] * self.x + m[7] * self.y + m[8]
        grid = [(m[row] * self.x + m[row + 1] * self.y + m[row + 2]) / w for row in (0, 3)]
        return F.grid_sample(stacks, torch.stack(grid, dim=-1), padding_mode="border", align_corners=False)


def _square_of(corners: Tensor, half: Tensor) -> Tensor:
    """The projective map (B, 3, 3), up to scale, from a quadrilateral to the square [-half, half]^2.

    corners: (B, 4, 2) in the order (-, -), (+, -), (+, +), (-, +). It is the inverse, here the adjugate, of the map
    from the unit square to four points (Heckbert, Fundamentals of Texture Mapping and Image Warping, 1989).
    """
    (x0, y0), (x1, y1), (x2, y2), (x3, y3) = (corner.unbind(1) for corner in corners.unbind(1))
    dx1, dx2, sx = x1 - x2, x3 - x2, x0 - x1 + x2 - x3
    dy1, dy2, sy = y1 - y2, y3 - y2, y0 - y1 + y2 - y3
    scale = dx1 * dy2 - dx2 * dy1
    g, h = (sx * dy2 - dx2 * sy) / scale, (dx1 * sy - sx * dy1) / scale
    a, b, c = x1 - x0 + g * x1, x3 - x0 + h * x3, x0
    d, e, f = y1 - y0 + g * y1, y3 - y0 + h * y3, y0
    u = torch.stack([e - f * h, c * h - b, b * f - c * e], dim=1)
    v = torch.stack([f * g - d, a - c * g, c * d - a * f], dim=1)
    w = torch.stack([d * h - e * g, b * g - a * h, a * e - b * d], dim=1)
    return torch.stack([half * (2 * u - w), half * (2 * v - w), w], dim=1)
