"""Scale by the root of a running second moment of what was released.

v_t     = decay v_{t-1} + (1 - decay) g_t^2,                    g_t in gradient units, v_{-1} = 0
s_{t+1} = (1 + offset) m / (sqrt(v_t) + offset m),              m = sqrt(mean v_t)

that is 1/(sqrt(v) + s) up to a factor which keeps a coordinate of average size at scale 1, so that C keeps its meaning.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fiberdp import _validate

State = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class NoScaling:
    """s = 1."""

    name: ClassVar[str] = "none"

    def init(self, theta: Tensor) -> State:
        return {}

    def update(self, g: Tensor, state: State) -> None: ...

    def scale(self, state: State) -> Tensor | None:
        return None


@dataclass(frozen=True, kw_only=True)
class SecondMoment:
    """offset: s in units of the root mean square of the gradient; large is no scaling.  decay: memory of v, in [0, 1).

    Guarantee: s is a function of releases alone.  All scales lie in (0, 1 + 1/offset].
    At honest noise v is mostly sigma_w^2, the same everywhere, and s close to 1: that is not a fault, there is little to know.

    >>> scaling, theta = SecondMoment(offset=1.0, decay=0.0), torch.zeros(2)
    >>> state = scaling.init(theta)
    >>> scaling.scale(state) is None  # nothing was released yet
    True
    >>> scaling.update(torch.tensor([1.0, 7.0]), state)  # m = 5
    >>> scaling.scale(state)
    tensor([1.6667, 0.8333])
    """

    name: ClassVar[str] = "second_moment"
    offset: float = 1.0
    decay: float = 0.99

    def __post_init__(self) -> None:
        _validate.positive("offset", self.offset, why="It keeps a coordinate without gradient from being blown up.")
        _validate.interval("decay", self.decay, 0, 1, open_high=True, why="It is the share of the second moment that a step keeps.")

    def init(self, theta: Tensor) -> State:
        return {"v_s": torch.zeros_like(theta)}

    def update(self, g: Tensor, state: State) -> None:
        """Take in a release, in gradient units, in place; any slice with the same slice of the state."""
        state["v_s"].mul_(self.decay).addcmul_(g, g, value=1 - self.decay)

    def scale(self, state: State) -> Tensor | None:
        """s of the next step, Tensor[d]; None before the first release, or if all were exactly 0: no scaling."""
        m = state["v_s"].double().mean().sqrt().to(state["v_s"].dtype)
        if not m > 0:
            return None
        return ((1 + self.offset) * m) / state["v_s"].sqrt().add_(self.offset * m)
