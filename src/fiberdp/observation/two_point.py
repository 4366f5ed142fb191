"""The two-point observation of DiSK and FiBeR (paper, eq. 2).

    a         = (1 - kappa) / (kappa gamma)
    u_t(xi)   = a grad f(theta_t + gamma d_{t-1}; xi) + (1 - a) grad f(theta_t; xi),     d_{t-1} = theta_t - theta_{t-1}

The two gradients of one example are combined first and clipped once, so the sensitivity is C for every a.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from fiberdp import _validate
from fiberdp.types import Probe


@dataclass(frozen=True, kw_only=True)
class TwoPoint:
    """kappa in (0, 1): the geometry's gain.  gamma > 0: how far ahead, in units of the last update d_{t-1}.

    0 <= a <= 1, that is gamma >= (1 - kappa)/kappa, is the convex region (paper, E.5).  Beyond it the weight of
    theta_t is negative: that leaks nothing (the mixture is clipped) but biases, so it needs allow_extrapolation.

    At a = 1 the second weight is 0 and one evaluation is enough: `TwoPoint.look_ahead()`.

    >>> [(round(probe.weight, 4), probe.lookahead) for probe in TwoPoint(kappa=0.7, gamma=0.5).probes()]
    [(0.1429, 0.0), (0.8571, 0.5)]
    >>> TwoPoint.look_ahead(kappa=0.6).probes()
    (Probe(weight=1.0, lookahead=0.6666666666666667),)
    """

    name: ClassVar[str] = "two_point"
    kappa: float = 0.6
    gamma: float = 0.7
    allow_extrapolation: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.allow_extrapolation, bool):
            raise ValueError(f"allow_extrapolation={self.allow_extrapolation!r}: must be True or False. Use True to accept a > 1.")
        _validate.interval(
            "kappa", self.kappa, 0, 1, open_low=True, open_high=True,
            why="The weight (1-kappa)/(kappa*gamma) is 0 or infinite at the ends. Use one_point for one gradient at theta.",
        )  # fmt: skip
        if self.gamma == 0:
            raise ValueError(
                "two_point: gamma=0 makes the weight (1-kappa)/(kappa*gamma) infinite. Use one_point, or "
                f"gamma=(1-kappa)/kappa={(1 - self.kappa) / self.kappa:.4g} for one look-ahead gradient."
            )
        _validate.positive("gamma", self.gamma, why="It is how far ahead along the last update the second point lies.")
        if self.a > 1 and not self.allow_extrapolation:
            raise ValueError(
                f"two_point: kappa={self.kappa:g}, gamma={self.gamma:g} give a={self.a:.4g}: a must lie in [0, 1], because beyond it the "
                "gradient at theta gets a negative weight, which biases. Use "
                f"gamma>={(1 - self.kappa) / self.kappa:.4g}, or allow_extrapolation=True."
            )

    @classmethod
    def look_ahead(cls, *, kappa: float = 0.6) -> TwoPoint:
        """gamma = (1 - kappa)/kappa, so a = 1: one evaluation, at theta + gamma d."""
        _validate.interval("kappa", kappa, 0, 1, open_low=True, open_high=True, why="gamma = (1-kappa)/kappa.")
        return cls(kappa=kappa, gamma=(1 - kappa) / kappa)

    @property
    def a(self) -> float:
        """Weight of the look-ahead gradient."""
        a = (1 - self.kappa) / (self.kappa * self.gamma)
        return 1.0 if math.isclose(a, 1.0, rel_tol=1e-12) else a

    def probes(self) -> tuple[Probe, ...]:
        """Weights sum to 1; a zero weight is left out."""
        both = (Probe(1 - self.a, 0.0), Probe(self.a, self.gamma))
        return tuple(probe for probe in both if probe.weight != 0)
