"""Alpha-beta filter: constant-velocity tracking with two gains of their own (paper, eqs. 31-33).

e_t    = g_t - (g~_{t-1} + r_{t-1})
g~_t   = g~_{t-1} + r_{t-1} + alpha e_t
r_t    = r_{t-1} + beta e_t
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from torch import Tensor

from fiberdp import _validate
from fiberdp.filters.filter import Filter, State
from fiberdp.linear import StateSpace


@dataclass(frozen=True, kw_only=True)
class AlphaBeta(Filter):
    """alpha: gain of the level.  beta: gain of the slope.  alpha = beta = omega is the innovation filter (Appendix B.3).

    Stable for 0 < alpha < 2 and 0 < beta < 4 - 2 alpha; a steady drift is followed without lag.  Starts at g~ = r = 0.
    """

    name: ClassVar[str] = "alpha_beta"
    state_names: ClassVar[tuple[str, ...]] = ("g_tilde", "r")
    alpha: float = 0.5
    beta: float = 1 / 6  # alpha^2 / (2 - alpha): the Kalman gains of a slope that drifts (see `Kalman`)

    def __post_init__(self) -> None:
        _validate.interval("alpha", self.alpha, 0, 2, open_low=True, open_high=True, why="Outside, the filter is unstable.")
        _validate.interval(
            "beta", self.beta, 0, 4 - 2 * self.alpha, open_low=True, open_high=True, why="The filter is stable for beta < 4 - 2 alpha."
        )

    @staticmethod
    def recursion(g: Tensor, state: State, alpha: float, beta: float) -> tuple[Tensor, State]:
        predicted = state["g_tilde"] + state["r"]
        e = g - predicted
        g_tilde = predicted + alpha * e
        return g_tilde, {"g_tilde": g_tilde, "r": state["r"] + beta * e}

    def gains(self, t: int | None) -> tuple[float, float]:
        return self.alpha, self.beta

    def noise_gain(self) -> float:
        """A = (2 alpha^2 + beta (2 - 3 alpha)) / (alpha (4 - 2 alpha - beta)), the textbook's noise reduction ratio."""
        alpha, beta = self.alpha, self.beta
        return (2 * alpha**2 + beta * (2 - 3 * alpha)) / (alpha * (4 - 2 * alpha - beta))

    def system(self, t: int | None) -> StateSpace:
        return level_and_slope(*self.gains(t))


def level_and_slope(alpha: float, beta: float) -> StateSpace:
    """State (g~, r) of one step with these gains."""
    return StateSpace(M=np.array([[1 - alpha, 1 - alpha], [-beta, 1 - beta]]), G=np.array([alpha, beta]), H=np.array([1.0, 0.0]))
