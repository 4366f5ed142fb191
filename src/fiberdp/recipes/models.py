"""The models of the image recipes: plain sequences of torch layers, with tanh throughout.

    function            input               parameters   recipe
    mlp_digits          [B, 1, 8, 8]             3,610   digits
    tramer_boneh_cnn    [B, 1, 28, 28]          26,010   MNIST
    cnn5                [B, 3, 32, 32]         619,876   CIFAR-10, with 100 outputs

Each takes uint8 images (0..255) or floating ones (0..1) and scales them to [-1, 1] itself, (x - 0.5) / 0.5.
These constants come from the pixel format, not from the training set, so they cost no privacy; a data set's
own mean and standard deviation would be statistics of private examples.

Every layer treats an example on its own (GroupNorm, never BatchNorm), so per-example gradients exist.
"""

from __future__ import annotations

import torch
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


def _check(num_outputs: int) -> None:
    _validate.count("num_outputs", num_outputs, why="It is the number of logits, one for each class.")
