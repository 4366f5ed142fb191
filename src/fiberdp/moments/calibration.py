"""What the noise adds to Adam's second moment, and its removal (paper, eqs. 11-12; METHODS.md section 3).

    v-_t = max(v^_t - phi_t, eps_v)

    | calibration | phi_t                                                                  | used by            |
    |-------------|------------------------------------------------------------------------|--------------------|
    | none        | nothing is subtracted and there is no floor                            | DP-AdamW, DiSK     |
    | raw         | sigma_w^2                                                              | DP-AdamBC          |
    | steady      | A sigma_w^2, A = the filter's stationary noise gain                    | FiBeR              |
    | exact       | P_t/(1 - beta2^{t+1}), P_t = beta2 P_{t-1} + (1 - beta2) Var[n_t]      | look-ahead FiBeR   |

n_t is the filtered noise.  `exact` is E[v^_t] under pure noise at every t, from the first step on, for any filter, noise schedule
and noise correlated over time.  The noise is read from each release, never from a configuration, and the filter says what linear
system it is.  Where gradients were scaled before the clip (`scaling/`), the noise differs between coordinates by known factors,
and phi_t is a vector.

Each has `correction(noise, system, settled, t, beta2, state, spread) -> (Correction | None, state)`: system and settled are the
filter's at step t and in the limit; spread is None, or Tensor[d], the factor of each coordinate's noise variance.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
from torch import Tensor

from fiberdp import _validate
from fiberdp.linear import NoiseVariance, StateSpace
from fiberdp.types import Noise

State = dict[str, Any]


class Correction(NamedTuple):
    """phi: what is subtracted from v^; floor: what v- may not fall below.  Gradient units squared; numbers, or Tensor[d]."""

    phi: Any
    floor: Any


@dataclass(frozen=True, kw_only=True)
class NoCorrection:
    """v-_t = v^_t."""

    name: ClassVar[str] = "none"
    state_names: ClassVar[tuple[str, ...]] = ()

    def correction(
        self, noise: Noise, system: StateSpace, settled: StateSpace, t: int, beta2: float, state: State, spread: Tensor | None = None
    ) -> tuple[None, State]:
        return None, state


@dataclass(frozen=True, kw_only=True)
class _Floored:
    """eps_v: floor of the corrected second moment, gradient units squared (paper: 1e-8), or "auto".

    Under pure white noise v^ scatters around phi with relative std sqrt(2 (1-beta2)/(1+beta2) (1+beta2^{t+1})/(1-beta2^{t+1})), so at
    honest noise a tiny fixed floor clamps a large share of the coordinates.  "auto" is eps_v_scale times that std, times phi_t.
    """

    state_names: ClassVar[tuple[str, ...]] = ()
    eps_v: float | Literal["auto"] = 1e-8
    eps_v_scale: float = 1.0

    def __post_init__(self) -> None:
        if self.eps_v != "auto":
            why = 'It floors v^ - phi, which noise can push below 0. The paper uses 1e-8; "auto" follows the noise.'
            _validate.interval("eps_v", self.eps_v, 0, math.inf, open_high=True, why=why)
            if self.eps_v_scale != 1.0:
                raise ValueError(
                    f'eps_v_scale={self.eps_v_scale} with eps_v={self.eps_v}: it may be given with eps_v="auto" only, because it '
                    "multiplies the automatic floor and nothing else would read it. Leave it out."
                )
        _validate.positive("eps_v_scale", self.eps_v_scale, why="It is the automatic floor in standard deviations of v^.")

    def correction(
        self, noise: Noise, system: StateSpace, settled: StateSpace, t: int, beta2: float, state: State, spread: Tensor | None = None
    ) -> tuple[Correction, State]:
        phi, state = self._phi(noise, system, settled, t, beta2, state, spread)
        if self.eps_v == "auto":
            return Correction(phi, phi * (self.eps_v_scale * relative_std(beta2, t))), state
        return Correction(phi, self.eps_v), state

    def _phi(
        self, noise: Noise, system: StateSpace, settled: StateSpace, t: int, beta2: float, state: State, spread: Tensor | None
    ) -> tuple[Any, State]:
        raise NotImplementedError


def relative_std(beta2: float, t: int) -> float:
    """std of v^_t over its mean, for white Gaussian noise: a weighted mean of t + 1 independent chi^2_1.

    >>> round(relative_std(0.999, 0), 6), round(relative_std(0.999, 100_000), 6)
    (1.414214, 0.031631)
    """
    fading = beta2 ** (t + 1)
    return math.sqrt(2 * (1 - beta2) / (1 + beta2) * (1 + fading) / (1 - fading))


@dataclass(frozen=True, kw_only=True)
class Raw(_Floored):
    """phi = sigma_w^2, the variance of the release: right without a filter, too much with one."""

    name: ClassVar[str] = "raw"

    def _phi(
        self, noise: Noise, system: StateSpace, settled: StateSpace, t: int, beta2: float, state: State, spread: Tensor | None
    ) -> tuple[Any, State]:
        return _spread(noise.std**2 * stationary_gain(_NO_FILTER, noise), spread), state


@dataclass(frozen=True, kw_only=True)
class Steady(_Floored):
    """phi = A sigma_w^2: right once the filter has settled, for noise of constant strength."""

    name: ClassVar[str] = "steady"

    def _phi(
        self, noise: Noise, system: StateSpace, settled: StateSpace, t: int, beta2: float, state: State, spread: Tensor | None
    ) -> tuple[Any, State]:
        return _spread(noise.std**2 * stationary_gain(settled, noise), spread), state


@dataclass(frozen=True, kw_only=True)
class Exact(_Floored):
    """phi = E[v^_t] under pure noise, at every t; right for any linear filter, noise schedule and correlated noise."""

    name: ClassVar[str] = "exact"
    state_names: ClassVar[tuple[str, ...]] = ("P", "covariance")

    def _phi(
        self, noise: Noise, system: StateSpace, settled: StateSpace, t: int, beta2: float, state: State, spread: Tensor | None
    ) -> tuple[Any, State]:
        variance = NoiseVariance(state.get("covariance"))
        now = _spread((1 - beta2) * variance.update(system, noise), spread)
        P = now if "P" not in state else beta2 * state["P"] + now
        return P / (1 - beta2 ** (t + 1)), {"P": np.float64(P) if spread is None else P, "covariance": variance.covariance}


def _spread(variance: float, spread: Tensor | None) -> Any:
    return variance if spread is None else variance * spread


def stationary_gain(system: StateSpace, noise: Noise) -> float:
    """A of this system for this noise's colour, solved once."""
    return _solved(system.M.tobytes(), system.G.tobytes(), system.H.tobytes(), noise.b, noise.a)


@lru_cache(maxsize=64)
def _solved(M: bytes, G: bytes, H: bytes, b: tuple[float, ...], a: tuple[float, ...]) -> float:
    g = np.frombuffer(G)
    return StateSpace(np.frombuffer(M).reshape(len(g), len(g)), g, np.frombuffer(H)).noise_gain(Noise(1.0, b, a))


_NO_FILTER = StateSpace(np.zeros((1, 1)), np.ones(1), np.ones(1))

CALIBRATIONS: dict[str, Any] = {cls.name: cls for cls in (NoCorrection, Raw, Steady, Exact)}
