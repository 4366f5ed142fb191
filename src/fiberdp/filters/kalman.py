"""Kalman filter of a gradient that drifts: time-varying gains from the Riccati recursion (paper, Appendices B.2 and B.4).

predict    p- = p + 2c + q + sigma_s^2,    c- = c + q,    q- = q + sigma_r^2                        (eqs. 44-46)
gains      alpha = p- / (p- + R),          beta = c- / (p- + R),          R = sigma_w^2             (eq. 47)
correct    p = (1 - alpha) p-,             c = (1 - alpha) c-,            q = q- - beta c-          (eqs. 48-50)

and the recursion of the alpha-beta filter with these gains.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np

from fiberdp import _validate
from fiberdp.filters.alpha_beta import AlphaBeta, level_and_slope
from fiberdp.filters.filter import Filter
from fiberdp.linear import StateSpace


@dataclass(frozen=True, kw_only=True)
class Kalman(Filter):
    """sigma_s, sigma_r: std of the steps that level and slope make, in units of sigma_w, the std of the noise on one coordinate.

    Since only the ratios Q / R matter, the gains follow from them at any noise level.  sigma_r = 0 is the random-walk model, an EMA
    whose gain falls from 1 (Appendix B.5); otherwise the constant-velocity model.  The start is exactly diffuse: nothing is known of
    level and slope before the first gradients, so alpha_0 = 1, and with a slope alpha_1 = beta_1 = 1.

    Steady state, in closed form: with lambda = sigma_s, Lambda = sigma_r (in units of sigma_w),
    u = (y - sqrt(y^2 - 4))/2, y = (Lambda + sqrt(Lambda^2 + 16 + 4 lambda^2))/2:  alpha = 1 - u^2, beta = Lambda u.
    It meets beta^2/(1 - alpha) = Lambda^2 (the tracking index) and alpha^2 = beta (2 - alpha) + lambda^2 (1 - alpha).
    """

    name: ClassVar[str] = "kalman"
    state_names: ClassVar[tuple[str, ...]] = ("g_tilde", "r")
    sigma_s: float = 0.1
    sigma_r: float = 0.01
    recursion = staticmethod(AlphaBeta.recursion)

    def __post_init__(self) -> None:
        for key in ("sigma_s", "sigma_r"):
            _validate.interval(
                key, getattr(self, key), 0, float("inf"), open_high=True, why="It is a std over sigma_w; 0 is a level or slope that stays."
            )
        if self.sigma_s == self.sigma_r == 0:
            raise ValueError(
                "sigma_s=0, sigma_r=0: at least one must be above 0, because a gradient that never moves makes the gains fall to 0 and the "
                "filter deaf. Give a small sigma_s such as 0.01."
            )

    def gains(self, t: int | None) -> tuple[float, float]:
        if t is None:
            return self.steady()
        sequence = self._sequence
        while len(sequence) <= t and not sequence[-1][-1]:
            sequence.append(self._next(sequence[-1]))
        alpha, beta = sequence[min(t, len(sequence) - 1)][:2]
        return alpha, beta

    def steady(self) -> tuple[float, float]:
        """(alpha, beta) as t grows."""
        y = (self.sigma_r + math.sqrt(self.sigma_r**2 + 16 + 4 * self.sigma_s**2)) / 2
        u = 2 / (y + math.sqrt(y * y - 4))  # the same as (y - sqrt(y^2 - 4))/2, without cancellation
        return 1 - u * u, self.sigma_r * u

    def system(self, t: int | None) -> StateSpace:
        """State (g~, r); without slope, r stays 0 and g~ is alone."""
        alpha, beta = self.gains(t)
        if self.sigma_r == 0:
            return StateSpace(np.array([[1 - alpha]]), np.array([alpha]), np.ones(1))
        return level_and_slope(alpha, beta)

    @cached_property
    def _sequence(self) -> list[tuple[float, float, float, float, float, bool]]:
        """[(alpha_t, beta_t, p_t, c_t, q_t, settled)], R = 1, grown as far as it was asked for; from the diffuse start."""
        if self.sigma_r == 0:
            return [(1.0, 0.0, 1.0, 0.0, 0.0, False)]
        second = 2 + self.sigma_s**2 + self.sigma_r**2  # slope g_1 - g_0: two noises and the steps between
        return [(1.0, 0.0, 1.0, 0.0, math.inf, False), (1.0, 1.0, 1.0, 1.0, second, False)]

    def _next(self, last: tuple[float, float, float, float, float, bool]) -> tuple[float, float, float, float, float, bool]:
        before, after, p, c, q, _ = last
        p, c, q = p + 2 * c + q + self.sigma_s**2, c + q, q + self.sigma_r**2
        alpha, beta = p / (p + 1), c / (p + 1)
        settled = abs(alpha - before) < 1e-15 and abs(beta - after) < 1e-15
        return alpha, beta, (1 - alpha) * p, (1 - alpha) * c, q - beta * c, settled
