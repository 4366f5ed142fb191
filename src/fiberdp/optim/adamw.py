"""AdamW with the noise taken out of its second moment (paper, eqs. 8-12; Algorithm 3, lines 7-9).

m_t     = beta1 m_{t-1} + (1 - beta1) g~_t             m^_t = m_t / (1 - beta1^{t+1})
v_t     = beta2 v_{t-1} + (1 - beta2) g~_t^2           v^_t = v_t / (1 - beta2^{t+1})
v-_t    = max(v^_t - phi_t, eps_v)                     phi_t from the calibration
theta   <- (1 - eta lambda) theta - eta m^_t / (sqrt(v-_t) + eps)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from fiberdp import _validate


@dataclass(frozen=True, kw_only=True)
class AdamW:
    """lr: eta.  betas: of the moments.  eps: added to the root.  weight_decay: lambda, decoupled.

    Without calibration this is torch.optim.AdamW.  With `raw` it is DP-AdamBC in decoupled form: as published that method
    has no + eps in the denominator and couples its L2 decay.
    """

    name: ClassVar[str] = "adamw"
    state_names: ClassVar[tuple[str, ...]] = ("m", "v")
    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        _validate.positive("lr", self.lr, why="It is the step size.")
        if not isinstance(self.betas, (tuple, list)) or len(self.betas) != 2:
            raise ValueError(f"betas={self.betas!r}: must be a pair, the memories of the first and second moment. (0.9, 0.999) is usual.")
        object.__setattr__(self, "betas", tuple(self.betas))  # JSON gives a list
        for i, beta in enumerate(self.betas):
            _validate.interval(f"betas[{i}]", beta, 0, 1, open_high=True, why="It is the memory of a moment; (0.9, 0.999) is usual.")
        _validate.interval("eps", self.eps, 0, float("inf"), open_high=True, why="It is added to the root of the second moment.")
        _validate.interval("weight_decay", self.weight_decay, 0, float("inf"), open_high=True, why="It shrinks theta.")

    def coefficients(self, t: int, lr: float) -> tuple[float, float, float]:
        """What depends on the step: 1 - eta lambda, 1 - beta2^{t+1} (by which v is divided), eta/(1 - beta1^{t+1})."""
        beta1, beta2 = self.betas
        return 1 - lr * self.weight_decay, 1 - beta2 ** (t + 1), lr / (1 - beta1 ** (t + 1))

    def update(
        self, theta: Tensor, g_tilde: Tensor, state: dict[str, Tensor], decay: float, v_weight: float, step: float, correction: Any
    ) -> None:
        """One step on any slice of the vector: theta and state (m, v) change in place.  correction None: no subtraction, no floor."""
        m, v = state["m"], state["v"]
        beta1, beta2 = self.betas
        m.lerp_(g_tilde, 1 - beta1)
        v.mul_(beta2).addcmul_(g_tilde, g_tilde, value=1 - beta2)
        v_bar = v / v_weight
        if correction is not None:
            phi, floor = correction
            v_bar.sub_(phi).clamp_(min=floor)
        if self.weight_decay:
            theta.mul_(decay)
        theta.sub_(torch.sqrt_(v_bar).add_(self.eps).reciprocal_().mul_(m).mul_(step))

    def clamped(self, state: dict[str, Tensor], v_weight: float, correction: Any) -> tuple[float, float]:
        """(Sum of |m_i| over the coordinates that the floor holds, Sum of |m_i|): the two parts of the clamp mass (paper, E.6)."""
        phi, floor = correction
        mass = state["m"].abs()
        return float(mass[state["v"] / v_weight - phi <= floor].sum()), float(mass.sum())
