"""Low-pass filter with a bias-free start (DOPPLER, Zhang et al. 2024b).

m_t  = Sum_{j>=0} b_j g_{t-j} - Sum_{j>=1} a_j m_{t-j}          c_t the same recursion on the constant 1
g~_t = m_t / c_t
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np
from torch import Tensor

from fiberdp.filters.filter import Filter, State
from fiberdp.linear import StateSpace, refuse_unstable


@dataclass(frozen=True, kw_only=True)
class LowPass(Filter):
    """b: moving-average coefficients.  a: recursive ones, a[0] = 1.  Both as scipy.signal writes them.

    The default is DOPPLER's second-order Chebyshev-I filter (10 dB ripple, cut-off 0.02; A = 0.0712); b=(0.1,), a=(1, -0.9) is its
    first-order one (A = 0.0526).  Dividing by c_t makes a constant gradient come out as it is from the first step on.

    The memory is the transposed direct form, max(len(a), len(b)) - 1 vectors s_1, s_2, …:
    m = b_0 g + s_1,  s_i <- b_i g - a_i m + s_{i+1}.

    Raises ValueError for coefficients that are not numbers, a[0] != 1, an unstable filter, or one that lets no constant through.
    """

    name: ClassVar[str] = "lowpass"
    b: tuple[float, ...] = (1.6332e-4, 3.2665e-4, 1.6332e-4)
    a: tuple[float, ...] = (1.0, -1.98342955, 0.98549544)

    def __post_init__(self) -> None:
        for key in ("b", "a"):
            values = getattr(self, key)
            if not isinstance(values, (tuple, list)) or not values or not all(isinstance(x, (int, float)) and abs(x) < 1e6 for x in values):
                raise ValueError(
                    f"{key}={values!r}: must be a sequence of numbers below a million, the filter's coefficients. Give e.g. b=(0.1,), "
                    "a=(1, -0.9)."
                )
            object.__setattr__(self, key, tuple(float(x) for x in values))  # JSON gives a list
        if self.a[0] != 1:
            raise ValueError(f"a={self.a}: a[0] must be 1, because it multiplies the output itself. Divide both a and b by it.")
        refuse_unstable("lowpass", self._unscaled.spectral_radius)
        if not np.all(np.abs(self._step_response(1)) > 0) or abs(self._unscaled.dc_gain()) < 1e-12:
            raise ValueError(
                f"b={self.b}: must let a constant through from the first step on (b[0] != 0, sum(b) != 0), because the output is divided "
                "by what a constant 1 gives. Choose a low-pass filter."
            )

    def names(self) -> tuple[str, ...]:
        return tuple(f"s_{i}" for i in range(1, max(len(self.a), len(self.b))))

    @staticmethod
    def recursion(g: Tensor, state: State, b: tuple[float, ...], a: tuple[float, ...], inverse_c: float) -> tuple[Tensor, State]:
        m = b[0] * g + state["s_1"] if state else b[0] * g
        new = {}
        for i in range(1, len(a)):
            s = b[i] * g - a[i] * m
            new[f"s_{i}"] = s + state[f"s_{i + 1}"] if i + 1 < len(a) else s
        return m * inverse_c, new

    def gains(self, t: int | None) -> tuple[tuple[float, ...], tuple[float, ...], float]:
        b, a = self._padded
        return b, a, 1 / self._c(t)

    def system(self, t: int | None) -> StateSpace:
        """State (m, s_1, s_2, …)."""
        plain = self._unscaled
        return StateSpace(plain.M, plain.G, plain.H / self._c(t))

    @cached_property
    def _padded(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        order = max(len(self.a), len(self.b))
        return self.b + (0.0,) * (order - len(self.b)), self.a + (0.0,) * (order - len(self.a))

    @cached_property
    def _unscaled(self) -> StateSpace:
        b, a = (np.array(x) for x in self._padded)
        n = len(b)
        M, G, H = np.zeros((n, n)), np.concatenate([b[:1], b[1:] - a[1:] * b[0]]), np.eye(1, n)[0]
        if n > 1:
            M[0, 1] = 1.0
            M[1:, 1] = -a[1:]
            M[1:-1, 2:] += np.eye(n - 2)
        return StateSpace(M, G, H)

    def _c(self, t: int | None) -> float:
        """c_t, the response to a constant 1; c at t=None is the DC gain."""
        return self._unscaled.dc_gain() if t is None else float(self._step_response(t + 1)[t])

    def _step_response(self, length: int) -> np.ndarray:
        known = self._responses[0]
        if len(known) < length:
            known = self._responses[0] = self._unscaled.impulse_response(max(length, 2 * len(known))).cumsum()
        return known

    @cached_property
    def _responses(self) -> list[np.ndarray]:
        return [self._unscaled.impulse_response(64).cumsum()]
