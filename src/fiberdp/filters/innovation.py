"""Innovation filter: smooth the residual, then integrate it (FiBeR, eqs. 5-7).

nu_t      = g_t - g~_{t-1}
r_t       = (1 - omega) r_{t-1} + omega nu_t
g~_t      = g~_{t-1} + r_t
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from fiberdp import _validate
from fiberdp.filters.filter import Filter, State
from fiberdp.linear import StateSpace


@dataclass(frozen=True, kw_only=True)
class Innovation(Filter):
    """omega: gain on the residual, in (0, 1]; 1 returns the gradient unchanged (up to rounding).

    A constant gradient is reached exactly and a steady drift is followed without lag (two poles of modulus
    sqrt(1 - omega)), which an EMA does not do.  Starts at g~ = r = 0.
    """

    name: ClassVar[str] = "innovation"
    state_names: ClassVar[tuple[str, ...]] = ("g_tilde", "r")
    omega: float = 0.9

    def __post_init__(self) -> None:
        _validate.interval("omega", self.omega, 0, 1, open_low=True, why="It is the gain on the residual: 0 never moves, 1 is no filter.")

    @staticmethod
    def recursion(g: Tensor, state: State, omega: float) -> tuple[Tensor, State]:
        nu = g - state["g_tilde"]
        r = torch.lerp(state["r"], nu, omega)
        g_tilde = state["g_tilde"] + r
        return g_tilde, {"g_tilde": g_tilde, "r": r}

    def gains(self, t: int | None) -> tuple[float]:
        return (self.omega,)

    def noise_gain(self) -> float:
        """A = Var[g~]/Var[g] for white noise, stationary (eq. 11).  In (1/2, 1]."""
        return (2 - self.omega) / (4 - 3 * self.omega)

    def system(self, t: int | None) -> StateSpace:
        """State (g~, r), eqs. 56-58."""
        rho, omega = 1 - self.omega, self.omega
        return StateSpace(M=np.array([[rho, rho], [-omega, rho]]), G=np.array([omega, omega]), H=np.array([1.0, 0.0]))
