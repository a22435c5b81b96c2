"""TransMIL's position encoding: patches laid on a square in reading order and convolved (PPEG)."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d, pad


def square_side(n: int) -> int:
    return math.isqrt(n - 1) + 1


def pad_to_square(tokens: Tensor) -> Tensor:
    """Append the first s²−N tokens to [N, D], s = ⌈√N⌉."""
    return torch.cat([tokens, tokens[: square_side(len(tokens)) ** 2 - len(tokens)]])


class PPEG(nn.Module):
    """Identity plus depthwise 7×7, 5×5 and 3×3 convolutions over tokens [N, D] on a square; padding is cropped.

    `least_side` 7 fills smaller squares up with zeros, in reading order: MHIM-MIL does, TransMIL does not.
    """

    def __init__(self, dim: int, least_side: int = 1) -> None:
        super().__init__()
        self.least_side = least_side
        self.conv7, self.conv5, self.conv3 = (nn.Conv2d(dim, dim, size, groups=dim) for size in (7, 5, 3))

    def forward(self, tokens: Tensor) -> Tensor:
        n, dim = tokens.shape
        square = pad_to_square(tokens)
        side = max(square_side(n), self.least_side)
        grid = pad(square, (0, 0, 0, side**2 - len(square))).T.reshape(1, dim, side, side)
        # convolution is linear in its kernel: one pass with the sum of all four
        identity = tokens.new_zeros((dim, 1, 7, 7))
        identity[:, :, 3, 3] = 1.0
        kernel = identity + self.conv7.weight + pad(self.conv5.weight, (1,) * 4) + pad(self.conv3.weight, (2,) * 4)
        biases = [conv.bias for conv in (self.conv7, self.conv5, self.conv3) if conv.bias is not None]
        return conv2d(grid, kernel, torch.stack(biases).sum(0), padding=3, groups=dim)[0].flatten(1).T[:n]
