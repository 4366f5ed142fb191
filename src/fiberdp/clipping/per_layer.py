"""Per-layer clipping: every layer's part of an observation has a bound of its own (McMahan et al. 2018, section 3.2).

No layer can crowd out another: under one norm for all, the layers with the largest gradients decide how much of the others is kept.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fiberdp import _validate


@dataclass(frozen=True, kw_only=True)
class PerLayer:
    """factor_{i,l} = min(1, C_l / ||u_{i,l}||) with C_l = C / sqrt(L) for each of L layers, so that Sum_l C_l^2 = C^2.

    clip_norm: C, the bound on the whole observation.  A layer is a module with parameters of its own: its weight and bias are one.

    >>> import torch
    >>> rule = PerLayer(clip_norm=5.0)
    >>> rule.groups(["a.weight", "a.bias", "b.weight"])
    [0, 0, 1]
    >>> rule.factors(torch.tensor([[1.0, 10.0], [20.0, 2.0]])) * 2**0.5
    tensor([[1.4142, 0.5000],
            [0.2500, 1.4142]])
    """

    name: ClassVar[str] = "per_layer"
    clip_norm: float

    def __post_init__(self) -> None:
        _validate.positive("clip_norm", self.clip_norm, why="It bounds one example's contribution. Use a typical gradient norm, such as 1.")

    @property
    def sensitivity(self) -> float:
        return self.clip_norm

    def groups(self, names: Sequence[str]) -> list[int]:
        """The layer of each parameter, counted from 0."""
        layers: dict[str, int] = {}
        return [layers.setdefault(name.rpartition(".")[0], len(layers)) for name in names]

    def factors(self, norms: Tensor) -> Tensor:
        """norms: Tensor[L, b] >= 0, finite -> Tensor[L, b] in (0, 1].  A zero norm has factor 1."""
        bound = self.clip_norm / math.sqrt(len(norms))
        return bound / norms.clamp_min(bound)
