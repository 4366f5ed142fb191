"""EMA of the gradient, the filter of DiSK (paper, eq. 4).

g~_t = (1 - kappa) g~_{t-1} + kappa g_t
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from fiberdp import _validate
from fiberdp.filters.filter import Filter, State
from fiberdp.linear import StateSpace


@dataclass(frozen=True, kw_only=True)
class EMA(Filter):
    """kappa: gain in (0, 1]; 1 is no filter.

    init_at: "first" starts at g~_0 = g_0 (what DiSK's public code does, the paper being silent); "zero" at g~_{-1} = 0.

    >>> g_tilde, _ = EMA(kappa=0.25).update(torch.ones(2), {"g_tilde": torch.zeros(2)})
    >>> g_tilde
    tensor([0.2500, 0.2500])
    """

    name: ClassVar[str] = "ema"
    state_names: ClassVar[tuple[str, ...]] = ("g_tilde",)
    kappa: float = 0.7
    init_at: Literal["first", "zero"] = "first"

    def __post_init__(self) -> None:
        _validate.interval("kappa", self.kappa, 0, 1, open_low=True, why="It is the weight of the newest gradient; 1 is no filter.")
        _validate.choice("init_at", self.init_at, ("first", "zero"))

    @staticmethod
    def recursion(g: Tensor, state: State, kappa: float) -> tuple[Tensor, State]:
        g_tilde = torch.lerp(state["g_tilde"], g, kappa)
        return g_tilde, {"g_tilde": g_tilde}

    def gains(self, t: int | None) -> tuple[float]:
        return (1.0 if t == 0 and self.init_at == "first" else self.kappa,)

    def noise_gain(self) -> float:
        """A = Var[g~]/Var[g] for white noise, stationary (eq. 73).  In (0, 1]."""
        return self.kappa / (2 - self.kappa)

    def system(self, t: int | None) -> StateSpace:
        (kappa,) = self.gains(t)
        return StateSpace(M=np.array([[1 - kappa]]), G=np.array([kappa]), H=np.ones(1))
