"""No filter: g~_t = g_t."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from torch import Tensor

from fiberdp.linear import StateSpace


@dataclass(frozen=True, kw_only=True)
class Identity:
    """A = 1."""

    name: ClassVar[str] = "identity"

    def init(self, g: Tensor) -> dict[str, Tensor]:
        return {}

    def update(self, g: Tensor, state: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        return g, state

    def noise_gain(self) -> float:
        return 1.0

    def system(self, t: int) -> StateSpace:
        return StateSpace(M=np.zeros((1, 1)), G=np.ones(1), H=np.ones(1))
