"""SGD with momentum: b <- mu b + (g~ + lambda theta),  theta <- theta - eta b  (torch.optim.SGD's form)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from fiberdp import _validate


@dataclass(frozen=True, kw_only=True)
class SGD:
    """lr: eta.  momentum: mu.  weight_decay: lambda, coupled (added to the gradient)."""

    name: ClassVar[str] = "sgd"
    state_names: ClassVar[tuple[str, ...]] = ("m",)
    lr: float
    momentum: float = 0.9
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        _validate.positive("lr", self.lr, why="It is the step size.")
        _validate.interval("momentum", self.momentum, 0, 1, open_high=True, why="It is the memory of the velocity.")
        _validate.interval("weight_decay", self.weight_decay, 0, float("inf"), open_high=True, why="It shrinks theta.")

    def coefficients(self, t: int, lr: float) -> tuple[float]:
        return (lr,)

    def update(self, theta: Tensor, g_tilde: Tensor, state: dict[str, Tensor], lr: float, correction: Any) -> None:
        """One step on any slice of the vector: theta and the velocity m change in place."""
        assert correction is None, "SGD has no second moment to correct; the method refuses a calibration"
        if self.weight_decay:
            g_tilde = g_tilde.add(theta, alpha=self.weight_decay)
        theta.sub_(state["m"].mul_(self.momentum).add_(g_tilde) * lr)
