"""Learning-rate schedules: pure functions of the step, so a resumed run needs no state.

All rise linearly over the first ceil(warmup T) steps, to the full rate in the last of them: no step is charged for at rate 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from fiberdp import _validate


@dataclass(frozen=True, kw_only=True)
class _Warmup:
    """warmup: share of the steps over which the rate rises linearly."""

    warmup: float = 0.05

    def __post_init__(self) -> None:
        _validate.interval("warmup", self.warmup, 0, 1, open_high=True, why="It is the share of steps spent warming up.")

    def factor(self, t: int, steps: int) -> float:
        """What the learning rate is multiplied by at step t of `steps`, t from 0."""
        rising = math.ceil(self.warmup * steps)
        return (t + 1) / rising if t < rising else self.after(t - rising, max(1, steps - rising))

    def after(self, done: int, left: int) -> float:
        """The same `done` steps after the warm-up, which left `left` of them."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class WarmupCosine(_Warmup):
    """Linear warm-up over the first `warmup` share of the steps, then a cosine to 0 (paper, E.1: 1/20).

    >>> schedule = WarmupCosine(warmup=0.1)
    >>> [round(schedule.factor(t, 20), 3) for t in (0, 1, 2, 11, 19)]
    [0.5, 1.0, 1.0, 0.5, 0.008]
    """

    name: ClassVar[str] = "warmup_cosine"

    def after(self, done: int, left: int) -> float:
        return 0.5 * (1 + math.cos(math.pi * done / left))


@dataclass(frozen=True, kw_only=True)
class WarmupLinear(_Warmup):
    """Linear warm-up over the first `warmup` share of the steps, then a line to 0, which the step after the last would reach.

    >>> schedule = WarmupLinear(warmup=0.1)
    >>> [round(schedule.factor(t, 20), 3) for t in (0, 1, 2, 11, 19)]
    [0.5, 1.0, 1.0, 0.5, 0.056]
    """

    name: ClassVar[str] = "warmup_linear"

    def after(self, done: int, left: int) -> float:
        return (left - done) / left


@dataclass(frozen=True, kw_only=True)
class WarmupConstant(_Warmup):
    """Linear warm-up over the first `warmup` share of the steps, then the learning rate as it is.

    >>> [WarmupConstant(warmup=0.1).factor(t, 20) for t in (0, 1, 2, 19)]
    [0.5, 1.0, 1.0, 1.0]
    """

    name: ClassVar[str] = "warmup_constant"

    def after(self, done: int, left: int) -> float:
        return 1.0


@dataclass(frozen=True, kw_only=True)
class Constant:
    """The learning rate as it is."""

    name: ClassVar[str] = "constant"

    def factor(self, t: int, steps: int) -> float:
        return 1.0


SCHEDULES = {cls.name: cls for cls in (WarmupCosine, WarmupLinear, WarmupConstant, Constant)}
