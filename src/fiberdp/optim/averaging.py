"""Averages of the weights along a run: functions of the releases alone, so they cost no privacy.

    theta_bar_t = S_t / (1 - decay^{t+1}),      S_t = decay S_{t-1} + (1 - decay) theta_{t+1},      S_{-1} = 0

which is, with nothing to divide and theta_bar itself as the state,

    theta_bar_t = theta_bar_{t-1} + c_t (theta_{t+1} - theta_bar_{t-1}),      c_t = (1 - decay) / (1 - decay^{t+1})

c_0 = 1: after the first step the average is theta exactly, and the initial weights never enter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fiberdp import _validate

State = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class NoAveraging:
    """The last weights are the result."""

    name: ClassVar[str] = "none"

    def init(self, theta: Tensor) -> State:
        return {}

    def weight(self, t: int) -> float:
        return 0.0

    def update(self, theta: Tensor, state: State, weight: float) -> None: ...

    def average(self, state: State) -> Tensor | None:
        return None


@dataclass(frozen=True, kw_only=True)
class EMAWeights:
    """decay in [0, 1): the average remembers about 1/(1 - decay) steps; keep that well below the run's T.

    While t < 1/(1 - decay) it is close to the plain mean of all weights so far.

    >>> import torch
    >>> ema, theta = EMAWeights(decay=0.5), torch.tensor([4.0])
    >>> state = ema.init(theta)
    >>> for t, value in enumerate((1.0, 4.0)):
    ...     ema.update(torch.tensor([value]), state, ema.weight(t))
    >>> ema.average(state)  # (0.25 * 1 + 0.5 * 4) / 0.75
    tensor([3.])
    """

    name: ClassVar[str] = "ema"
    decay: float = 0.999

    def __post_init__(self) -> None:
        _validate.interval("decay", self.decay, 0, 1, open_high=True, why="It is the share of the average that a step keeps.")

    def init(self, theta: Tensor) -> State:
        """theta_bar, Tensor[d]: before the first step the weights as they are."""
        return {"theta_bar": theta.detach().clone()}

    def weight(self, t: int) -> float:
        """c_t."""
        return (1 - self.decay) / (1 - self.decay ** (t + 1))

    def update(self, theta: Tensor, state: State, weight: float) -> None:
        """Take in theta_{t+1}, the weights after step t, in place; any slice of theta with the same slice of the state.  weight: c_t."""
        state["theta_bar"].lerp_(theta, weight)

    def average(self, state: State) -> Tensor | None:
        return state["theta_bar"]


AVERAGINGS = {cls.name: cls for cls in (NoAveraging, EMAWeights)}
