"""LAOM's random shifts, rotations and perspective distortions of stacks of frames (arXiv 2502.00379), on the device."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Augmentation(nn.Module):
    """Moves each stack of frames as a whole: not at all, shift, rotate, distort, or one of four pairs of them in turn.

    One projective map per stack, from output to input pixels, does it in one sampling; edges are replicated. Ranges are
    LAOM's: shifts of up to 7/32 of the image in whole pixels, angles of up to a quarter turn, and corners of the image
    with 30 pixels around it that move inwards by up to half of the way to its middle.
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
        x1, y1 = (self.corners * (1 - noise[:, 4:].view(-1, 4, 2) / 2)).unbind(2)  # (B, 4), where corners move to
        x0, y0 = (corner.expand_as(x1) for corner in self.corners.unbind(1))
        nil, unit = torch.zeros_like(x1), torch.ones_like(x1)
        rows = [torch.stack([x1, y1, unit, nil, nil, nil, -x0 * x1, -x0 * y1], dim=2)]
        rows += [torch.stack([nil, nil, nil, x1, y1, unit, -y0 * x1, -y0 * y1], dim=2)]
        back = torch.linalg.solve_ex(torch.cat(rows, dim=1), torch.cat([x0, y0], dim=1))[0]  # from there to the corners
        maps = [one, zero, zero, zero, one, zero, zero, zero], [one, zero, x, zero, one, y, zero, zero]
        maps = *maps, [cos, sin, zero, -sin, cos, zero, zero, zero], back.unbind(1)
        maps = torch.stack([torch.stack([*entries, one], dim=1).view(-1, 3, 3) for entries in maps], dim=1)
        first, second = self.pairs[(noise[:, 0] * 8).long()].unbind(1)
        index = torch.arange(len(noise), device=noise.device)
        to_input = (maps[index, first][:, :, :, None] * maps[index, second][:, None]).sum(2)  # of both, in float32
        m = to_input.view(-1, 9, 1, 1).unbind(1)
        w = m[6] * self.x + m[7] * self.y + m[8]
        grid = [(m[row] * self.x + m[row + 1] * self.y + m[row + 2]) / w for row in (0, 3)]
        return F.grid_sample(stacks, torch.stack(grid, dim=-1), padding_mode="border", align_corners=False)
