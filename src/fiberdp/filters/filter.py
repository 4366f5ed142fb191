"""What every filter is: a linear system, the same for every coordinate, whose gains may change from step to step.

A filter is a frozen value with

    init(g)                         its memory before step 0: vectors by their symbols, all zero
    gains(t)                        the numbers its recursion uses at step t; t=None: what they settle to
    recursion(g, state, *gains)     -> (g_tilde, state); pure, on any slice of the vector; the lines of the paper
    system(t)                       the same recursion as M, G, H, from which every noise figure comes (linear.py)

`recursion` may be given numbers or 0-dimensional tensors, so that one compiled function serves every step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from fiberdp.linear import WHITE, NoiseVariance, StateSpace
from fiberdp.types import Noise

State = dict[str, Tensor]


class Filter:
    """The parts that follow from the others."""

    name: ClassVar[str]
    state_names: ClassVar[tuple[str, ...]] = ()
    learns: ClassVar[bool] = False  # whether gains follow what was released (`KalmanAuto`)
    recursion: ClassVar[Callable[..., tuple[Tensor, State]]]

    def names(self) -> tuple[str, ...]:
        """The vectors of the filter's memory."""
        return self.state_names

    def init(self, g: Tensor) -> State:
        """Memory before step 0, for vectors like `g`: zeros."""
        return {name: torch.zeros_like(g) for name in self.names()}

    def gains(self, t: int | None) -> tuple[Any, ...]:
        raise NotImplementedError

    def system(self, t: int | None) -> StateSpace:
        raise NotImplementedError

    def update(self, g: Tensor, state: State, t: int | None = None) -> tuple[Tensor, State]:
        """Filter one release.  t: its step, from 0; None for a filter that has settled (all the same where gains are constant)."""
        return type(self).recursion(g, state, *self.gains(t))

    def noise_gain(self) -> float:
        """A = Var[g~]/Var[g] for white noise once the filter has settled (eq. 14)."""
        return self.system(None).noise_gain()

    def noise_gains(self, steps: int, noise: Noise = WHITE) -> np.ndarray:
        """A_t = Var[n_t]/std^2 for t < steps, from the first step on (Lemma C.2), for noise of this colour."""
        variance, unit = NoiseVariance(), Noise(1.0, noise.b, noise.a)
        return np.array([variance.update(self.system(t), unit) for t in range(steps)])

    def impulse_response(self, length: int) -> np.ndarray:
        """h_j, j < length, once the filter has settled: Sum h_j^2 = A (Proposition 4.3)."""
        return self.system(None).impulse_response(length)
