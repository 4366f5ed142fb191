"""No filter: g~_t = g_t."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from torch import Tensor

from fiberdp.filters.filter import Filter, State
from fiberdp.linear import StateSpace


@dataclass(frozen=True, kw_only=True)
class Identity(Filter):
    """A = 1."""

    name: ClassVar[str] = "identity"

    @staticmethod
    def recursion(g: Tensor, state: State) -> tuple[Tensor, State]:
        return g, state

    def gains(self, t: int | None) -> tuple[()]:
        return ()

    def noise_gain(self) -> float:
        return 1.0

    def system(self, t: int | None) -> StateSpace:
        return StateSpace(M=np.zeros((1, 1)), G=np.ones(1), H=np.ones(1))
