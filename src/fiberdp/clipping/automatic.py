"""Automatic clipping: normalise every observation to just under C (Bu et al. 2023)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fiberdp import _validate


@dataclass(frozen=True, kw_only=True)
class Automatic:
    """factor_i = C / (||u_i|| + s), so ||factor_i u_i|| < C.

    clip_norm: C.  stability: s > 0, which keeps small gradients small (s = 0 would turn rounding into a full-size vote).

    >>> import torch
    >>> Automatic(clip_norm=1.0).factors(torch.tensor([0.5, 5.0])) * torch.tensor([0.5, 5.0])
    tensor([0.9804, 0.9980])
    """

    name: ClassVar[str] = "automatic"
    clip_norm: float
    stability: float = 0.01

    def __post_init__(self) -> None:
        _validate.positive(
            "clip_norm", self.clip_norm, why="Every gradient is scaled to just under it. Use 1: with Adam its value hardly matters."
        )
        _validate.positive("stability", self.stability, why="At 0 a vanishing gradient would be blown up to norm C. Use 0.01.")

    @property
    def sensitivity(self) -> float:
        return self.clip_norm

    def groups(self, names: Sequence[str]) -> list[int]:
        """One norm for all parameters."""
        return [0] * len(names)

    def factors(self, norms: Tensor) -> Tensor:
        """norms: Tensor[1, b] >= 0, finite -> Tensor[1, b] > 0."""
        return self.clip_norm / (norms + self.stability)
