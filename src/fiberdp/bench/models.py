"""The models whose steps are timed: plain torch modules without dropout, on random inputs, from fixed seeds.

    | model        | input                   | parameters | batch |
    |--------------|-------------------------|------------|-------|
    | cnn5         | 3x32x32 image           |    131,466 |   256 |
    | wrn-16-4     | 3x32x32 image           |  2,748,890 |    32 |
    | mlp          | 3,072 numbers           |  4,206,602 |   256 |
    | vit-tiny     | 3x32x32 image           |  5,362,762 |    64 |
    | roberta-like | 128 of 50,265 tokens    | 67,646,978 |     8 |
    | gpt2-like    | 128 of 50,257 tokens    | 67,048,704 |     4 |

Everything is a layer that Opacus knows too, so no variant is slowed down by a layer of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fiberdp.bench.transformers import gpt2_like, roberta_like, vit
from fiberdp.recipes.models import wide_resnet

Batch = tuple[Tensor, ...]


@dataclass(frozen=True)
class Model:
    """build: a new model.  rows: that many random examples.  loss_fn(model, batch): Tensor[b].  batch_size: B of a step."""

    name: str
    batch_size: int
    build: Callable[[], nn.Module]
    rows: Callable[[int], Batch]
    loss_fn: Callable[[nn.Module, Batch], Tensor]

    def new(self) -> nn.Module:
        """The model, with the same weights at every call; the caller's random state is left as it was."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return self.build()

    def data(self, batch_size: int) -> Batch:
        """Four batches of examples, the same at every call."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            return self.rows(4 * batch_size)

    def batch(self, batch_size: int) -> Batch:
        """The first of them."""
        return tuple(leaf[:batch_size].clone() for leaf in self.data(batch_size))


def classification(model: nn.Module, batch: Batch) -> Tensor:
    inputs, labels = batch
    return F.cross_entropy(model(inputs), labels, reduction="none")


def next_token(model: nn.Module, batch: Batch) -> Tensor:
    """The mean over the tokens of an example, so that its length is not its weight."""
    (tokens,) = batch
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none").view(logits.shape[:2]).mean(1)


def images(count: int) -> Batch:
    return torch.randn(count, 3, 32, 32), torch.randint(10, (count,))


def cnn5(widths: tuple[int, int, int, int] = (32, 64, 64, 128)) -> nn.Module:
    """Four 3x3 convolutions with ReLU, the first three halving the image, and a linear layer on the average."""
    layers: list[nn.Module] = []
    for wide, wider in pairwise((3, *widths)):
        layers += [nn.Conv2d(wide, wider, 3, padding=1), nn.ReLU(), nn.AvgPool2d(2)]
    layers[-1] = nn.AdaptiveAvgPool2d(1)
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(widths[-1], 10))


def mlp(width: int = 1024) -> nn.Module:
    return nn.Sequential(nn.Linear(3072, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))


def text(count: int, vocabulary: int = 50265, length: int = 128) -> Batch:
    return torch.randint(vocabulary, (count, length)), torch.randint(2, (count,))


def tokens(count: int, vocabulary: int = 50257, length: int = 128) -> Batch:
    """One token more than the model reads: the last one is only predicted."""
    return (torch.randint(vocabulary, (count, length + 1)),)


MODELS = {
    model.name: model
    for model in (
        Model("cnn5", 256, cnn5, images, classification),
        Model("wrn-16-4", 32, wide_resnet, images, classification),
        Model("mlp", 256, mlp, lambda count: (torch.randn(count, 3072), torch.randint(10, (count,))), classification),
        Model("vit-tiny", 64, vit, images, classification),
        Model("roberta-like", 8, roberta_like, text, classification),
        Model("gpt2-like", 4, gpt2_like, tokens, next_token),
    )
}
