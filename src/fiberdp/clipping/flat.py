"""Flat clipping: scale an observation whose norm exceeds C down to norm C (Abadi et al. 2016; paper, eq. 77)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fiberdp import _validate


@dataclass(frozen=True, kw_only=True)
class Flat:
    """factor_i = min(1, C / ||u_i||).

    clip_norm: C, gradient units; infinity turns clipping off (then no noise level makes the sum private).

    >>> import torch
    >>> Flat(clip_norm=1.0).factors(torch.tensor([0.0, 0.5, 5.0]))
    tensor([1.0000, 1.0000, 0.2000])
    """

    name: ClassVar[str] = "flat"
    clip_norm: float

    def __post_init__(self) -> None:
        if self.clip_norm != float("inf"):
            _validate.positive(
                "clip_norm", self.clip_norm, why="It bounds one example's contribution. Use a typical gradient norm, such as 1."
            )

    @property
    def sensitivity(self) -> float:
        return self.clip_norm

    def groups(self, names: Sequence[str]) -> list[int]:
        """One norm for all parameters."""
        return [0] * len(names)

    def factors(self, norms: Tensor) -> Tensor:
        """norms: Tensor[1, b] >= 0, finite -> Tensor[1, b] in (0, 1].  A zero norm has factor 1 (0/0 never happens)."""
        return (self.clip_norm / norms.clamp_min(self.clip_norm)) if self.clip_norm != float("inf") else norms.new_ones(norms.shape)
