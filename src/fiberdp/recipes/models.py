"""The models of the image recipes: plain sequences of torch layers, with tanh, or ReLU in the residual network.

    function            input               parameters   recipe
    mlp_digits          [B, 1, 8, 8]             3,610   digits
    tramer_boneh_cnn    [B, 1, 28, 28]          26,010   MNIST
    cnn5                [B, 3, 32, 32]         619,876   CIFAR-10, with 100 outputs
    wide_resnet_…       [B, 3, 32, 32]       2,772,020   CIFAR-100

Each takes uint8 images (0..255) or floating ones (0..1) and scales them to [-1, 1] itself, (x - 0.5) / 0.5.
These constants come from the pixel format, not from the training set, so they cost no privacy; a data set's
own mean and standard deviation would be statistics of private examples.

Every layer treats an example on its own (GroupNorm, never BatchNorm), so per-example gradients exist.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fiberdp import _validate


class ImageClassifier(nn.Sequential):
    """Layers behind a fixed scaling of the pixels: images `[B, C, H, W]` to logits `[B, num_outputs]`."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(scale_pixels(input, next(self.parameters()).dtype))


def scale_pixels(image: Tensor, dtype: torch.dtype) -> Tensor:
    """Return (x - 0.5) / 0.5 with x in [0, 1]: a uint8 image over 255, a floating one as it is.

    >>> scale_pixels(torch.tensor([0, 255], dtype=torch.uint8), torch.float32)
    tensor([-1.,  1.])
    >>> scale_pixels(torch.tensor([0.0, 0.75]), torch.float32)
    tensor([-1.0000,  0.5000])
    """
    if image.dtype == torch.uint8:
        return image.to(dtype) / 127.5 - 1
    if not image.is_floating_point():
        raise ValueError(
            f"images are {image.dtype}: must be uint8 (0..255) or floating point (0..1), because the type "
            "tells the range of the pixels. Convert them with .to(torch.uint8), or divide by their range."
        )
    return image.to(dtype) * 2 - 1


def mlp_digits(num_outputs: int = 10) -> ImageClassifier:
    """64 -> 48 -> num_outputs with tanh, for 8x8 digits.  3,610 parameters at 10 outputs."""
    _check(num_outputs)
    return ImageClassifier(nn.Flatten(), nn.Linear(64, 48), nn.Tanh(), nn.Linear(48, num_outputs))


def tramer_boneh_cnn(num_outputs: int = 10) -> ImageClassifier:
    """The small tanh CNN for MNIST (Papernot et al. 2021; Tramèr and Boneh 2021).  26,010 parameters.

    layer                             output
    input                             [1, 28, 28]
    conv 8x8, stride 2, padding 3     [16, 14, 14]
    tanh, max-pool 2, stride 1        [16, 13, 13]
    conv 4x4, stride 2                [32, 5, 5]
    tanh, max-pool 2, stride 1        [32, 4, 4], flat [512]
    linear, tanh                      [32]
    linear                            [num_outputs]
    """
    _check(num_outputs)
    return ImageClassifier(
        nn.Conv2d(1, 16, kernel_size=8, stride=2, padding=3),
        nn.Tanh(),
        nn.MaxPool2d(2, stride=1),
        nn.Conv2d(16, 32, kernel_size=4, stride=2),
        nn.Tanh(),
        nn.MaxPool2d(2, stride=1),
        nn.Flatten(),
        nn.Linear(512, 32),
        nn.Tanh(),
        nn.Linear(32, num_outputs),
    )


def cnn5(num_outputs: int = 100) -> ImageClassifier:
    """Five 3x3 convolutions, 3 -> 32 -> 64 -> 128 -> 256 -> num_outputs, with tanh and GroupNorm(16).

    The first three halve the image (32, 16, 8, 4) and the fifth is averaged over its 4x4 positions.
    619,876 parameters at 100 outputs, the width of the public DiSK script, which CIFAR-10 runs keep: labels
    10..99 never occur there, so their logits only learn to be low.  412,426 at 10 outputs.
    """
    _check(num_outputs)
    layers: list[nn.Module] = []
    for wide, wider in ((3, 32), (32, 64), (64, 128)):
        conv = nn.Conv2d(wide, wider, kernel_size=3, padding=1)
        layers += [conv, nn.Tanh(), nn.MaxPool2d(2), nn.GroupNorm(16, wider)]
    layers += [nn.Conv2d(128, 256, kernel_size=3, padding=1), nn.Tanh(), nn.GroupNorm(16, 256)]
    layers += [nn.Conv2d(256, num_outputs, kernel_size=3, padding=1), nn.AvgPool2d(4), nn.Flatten()]
    return ImageClassifier(*layers)


class _Residual(nn.Module):
    """x + f(x) behind a norm and ReLU; where the shape changes, both branches start from the activated x."""

    def __init__(self, wide: int, wider: int, stride: int, groups: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(groups, wide), nn.Conv2d(wide, wider, 3, stride, padding=1, bias=False)
        self.norm2, self.conv2 = nn.GroupNorm(groups, wider), nn.Conv2d(wider, wider, 3, padding=1, bias=False)
        self.shortcut = nn.Conv2d(wide, wider, 1, stride, bias=False) if wide != wider or stride > 1 else None

    def forward(self, x: Tensor) -> Tensor:
        active = F.relu(self.norm1(x))
        kept = x if self.shortcut is None else self.shortcut(active)
        return kept + self.conv2(F.relu(self.norm2(self.conv1(active))))


def wide_resnet(depth: int = 16, factor: int = 4, groups: int = 16, num_outputs: int = 10) -> nn.Sequential:
    """WRN-depth-factor: three stages of (depth - 4) / 6 blocks, with GroupNorm where the original has BatchNorm; of scaled images."""
    widths = (16, 16 * factor, 32 * factor, 64 * factor)
    blocks: list[nn.Module] = [nn.Conv2d(3, 16, 3, padding=1, bias=False)]
    for stage, (wide, wider) in enumerate(pairwise(widths)):
        for block in range((depth - 4) // 6):
            blocks.append(_Residual(wide if block == 0 else wider, wider, 2 if stage and block == 0 else 1, groups))
    tail = [nn.GroupNorm(groups, widths[-1]), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], num_outputs)]
    return nn.Sequential(*blocks, *tail)


def wide_resnet_classifier(num_outputs: int = 100) -> ImageClassifier:
    """WRN-16-4 with GroupNorm(16).  2,772,020 parameters at 100 outputs."""
    _check(num_outputs)
    return ImageClassifier(*wide_resnet(num_outputs=num_outputs))


def _check(num_outputs: int) -> None:
    _validate.count("num_outputs", num_outputs, why="It is the number of logits, one for each class.")
