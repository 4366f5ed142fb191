"""What the noise adds to Adam's second moment, and its removal (paper, eqs. 11-12; METHODS.md section 3).

    v-_t = max(v^_t - phi_t, eps_v)

    | calibration | phi_t                                                                  | used by            |
    |-------------|------------------------------------------------------------------------|--------------------|
    | none        | nothing is subtracted and there is no floor                            | DP-AdamW, DiSK     |
    | raw         | sigma_w^2                                                              | DP-AdamBC          |
    | steady      | A sigma_w^2, A = the filter's stationary noise gain                    | FiBeR              |
    | exact       | P_t/(1 - beta2^{t+1}), P_t = beta2 P_{t-1} + (1 - beta2) Var[n_t]      | look-ahead FiBeR   |

n_t is the filtered noise.  `exact` is E[v^_t] under pure noise at every t, from the first step on.  The noise is read from
each release, never from a configuration, and the filter says what linear system it is.

Each has `phi(noise, filter, t, beta2, state) -> (phi_t, state)`: phi_t in gradient units squared, None for no subtraction
and no floor.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, Protocol

import numpy as np

from fiberdp import _validate
from fiberdp.linear import NoiseVariance, StateSpace
from fiberdp.types import Noise


class Filter(Protocol):
    def system(self, t: int) -> StateSpace: ...


State = dict[str, np.ndarray]


@dataclass(frozen=True, kw_only=True)
class NoCorrection:
    """v-_t = v^_t."""

    name: ClassVar[str] = "none"
    state_names: ClassVar[tuple[str, ...]] = ()
    eps_v: ClassVar[float] = 0.0

    def phi(self, noise: Noise, filter: Filter, t: int, beta2: float, state: State) -> tuple[None, State]:
        return None, state


@dataclass(frozen=True, kw_only=True)
class _Floored:
    """eps_v: floor of the corrected second moment, gradient units squared (paper: 1e-8)."""

    state_names: ClassVar[tuple[str, ...]] = ()
    eps_v: float = 1e-8

    def __post_init__(self) -> None:
        _validate.interval(
            "eps_v",
            self.eps_v,
            0,
            float("inf"),
            open_high=True,
            why="It floors v^ - phi, which noise can push below 0. The paper uses 1e-8.",
        )


@dataclass(frozen=True, kw_only=True)
class Raw(_Floored):
    """phi = sigma_w^2: right without a filter, too much with one."""

    name: ClassVar[str] = "raw"

    def phi(self, noise: Noise, filter: Filter, t: int, beta2: float, state: State) -> tuple[float, State]:
        return noise.std**2 * _stationary_gain(_NO_FILTER, noise), state


@dataclass(frozen=True, kw_only=True)
class Steady(_Floored):
    """phi = A sigma_w^2: right once the filter has warmed up, for noise of constant strength."""

    name: ClassVar[str] = "steady"

    def phi(self, noise: Noise, filter: Filter, t: int, beta2: float, state: State) -> tuple[float, State]:
        return noise.std**2 * _stationary_gain(filter.system(1), noise), state


def _stationary_gain(system: StateSpace, noise: Noise) -> float:
    """A of this system for this noise's colour, solved once."""
    return _solved(system.M.tobytes(), system.G.tobytes(), system.H.tobytes(), noise.b, noise.a)


@lru_cache(maxsize=64)
def _solved(M: bytes, G: bytes, H: bytes, b: tuple[float, ...], a: tuple[float, ...]) -> float:
    g = np.frombuffer(G)
    return StateSpace(np.frombuffer(M).reshape(len(g), len(g)), g, np.frombuffer(H)).noise_gain(Noise(1.0, b, a))


_NO_FILTER = StateSpace(np.zeros((1, 1)), np.ones(1), np.ones(1))


@dataclass(frozen=True, kw_only=True)
class Exact(_Floored):
    """phi = E[v^_t] under pure noise, at every t; right for any linear filter, noise schedule and coloured noise."""

    name: ClassVar[str] = "exact"
    state_names: ClassVar[tuple[str, ...]] = ("P", "covariance")

    def phi(self, noise: Noise, filter: Filter, t: int, beta2: float, state: State) -> tuple[float, State]:
        variance = NoiseVariance(state.get("covariance"))
        now = variance.update(filter.system(t), noise)
        p = beta2 * float(state["P"]) + (1 - beta2) * now if state else (1 - beta2) * now
        assert variance.covariance is not None
        return p / (1 - beta2 ** (t + 1)), {"P": np.float64(p), "covariance": variance.covariance}  # pyright: ignore


CALIBRATIONS: dict[str, Any] = {cls.name: cls for cls in (NoCorrection, Raw, Steady, Exact)}
