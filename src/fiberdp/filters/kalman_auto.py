"""Adaptive Kalman filter: process noises fitted online from what was released, at no privacy cost (extends paper, Appendix B).

The noise on a release is known exactly, R = sigma_w^2, and every coordinate of a group sees the same gains.  So the innovations e_t
of some hundred coordinates say almost without error how well a model of the drift explains the gradients:

    log-likelihood of a model    L_t = memory L_{t-1} - 1/2 Sum_i ( log S_t + e_{t,i}^2 / S_t ),      S_t = p-_t + R_t

A bank of Kalman filters runs on up to `samples` coordinates of each group: random walks over a grid of sigma_s (level), constant
velocities over a grid of sigma_r (slope) and sigma_s.  Weighted by their likelihood they give the process noises of two Kalman filters
that run on the whole vector, each with a Riccati recursion of its own, and the weight w with which these are mixed:

    random walk         s^rw_t = (1 - K_t) carry_t s^rw_{t-1} + K_t g_t               carry_t = 1 but at t = 1
    constant velocity   e_t = g_t - (s^cv_{t-1} + r_{t-1}),   s^cv_t = s^cv_{t-1} + r_{t-1} + alpha_t e_t,   r_t = r_{t-1} + beta_t e_t
    output              g~_t = w_t s^rw_t + (1 - w_t) s^cv_t

The start: g_0 shows how large the level is at all, p_0 = mean g_0^2 - R, so at t = 1 what was taken over from g_0 is shrunk by
carry_1 = p_0/(p_0 + R).  Nothing is known of the slope; until the models can be told apart (t < 3), the random walk is followed where
nothing is seen to move, and the constant velocity, which then follows whatever comes, where something is.

Gains and weight of step t follow from releases before t only, so at step t the filter is a linear system that is known before its
input (`tuned`), and the exact calibration holds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, islice
from threading import Lock
from typing import Any, ClassVar, NoReturn

import numpy as np
import torch
from torch import Tensor

from fiberdp import _validate
from fiberdp.filters.filter import Filter, State
from fiberdp.linear import StateSpace
from fiberdp.types import Noise

Memory = dict[str, Any]


@dataclass(frozen=True)
class Tuned(Filter):
    """One step of the adaptive filter: a linear filter with these gains.  State (s_rw, s_cv, r)."""

    name: ClassVar[str] = "kalman_auto at one step"
    state_names: ClassVar[tuple[str, ...]] = ("s_rw", "s_cv", "r")
    K: float
    alpha: float
    beta: float
    w: float
    carry: float = 1.0

    @staticmethod
    def recursion(g: Tensor, state: State, K: float, alpha: float, beta: float, w: float, carry: float) -> tuple[Tensor, State]:
        s_rw = torch.lerp(carry * state["s_rw"], g, K)
        predicted = state["s_cv"] + state["r"]
        e = g - predicted
        s_cv = predicted + alpha * e
        return torch.lerp(s_cv, s_rw, w), {"s_rw": s_rw, "s_cv": s_cv, "r": state["r"] + beta * e}

    def gains(self, t: int | None) -> tuple[float, float, float, float, float]:
        return self.K, self.alpha, self.beta, self.w, self.carry

    def system(self, t: int | None) -> StateSpace:
        K, alpha, beta, w, carry = self.gains(t)
        if t is None and beta == 0:  # for good without slope: it stays 0
            return StateSpace(np.diag([(1 - K) * carry, 1 - alpha]), np.array([K, alpha]), np.array([w, 1 - w]))
        M = np.array([[(1 - K) * carry, 0, 0], [0, 1 - alpha, 1 - alpha], [0, -beta, 1 - beta]])
        return StateSpace(M, np.array([K, alpha, beta]), np.array([w, 1 - w, 0.0]))


@dataclass(frozen=True, kw_only=True)
class KalmanAuto(Filter):
    """memory: how fast old evidence fades, per step, in (0, 1].  samples: coordinates of each group that the bank looks at.

    Per group of parameters; a group's gains are the same for its coordinates.  `samples` coordinates at equal distances stand for
    the group; all of them if it is smaller.  What the bank learns is a function of releases, and may be published with them.
    Edge cases: without noise (sigma_w = 0) the gradient comes out as it is.
    """

    name: ClassVar[str] = "kalman_auto"
    state_names: ClassVar[tuple[str, ...]] = ("s_rw", "s_cv", "r")
    learns: ClassVar[bool] = True
    recursion = staticmethod(Tuned.recursion)
    memory: float = 0.99
    samples: int = 1024

    def __post_init__(self) -> None:
        _validate.interval("memory", self.memory, 0, 1, open_low=True, why="It is what a step leaves of the evidence before it.")
        _validate.count("samples", self.samples, why="It is how many coordinates the bank of filters looks at.")

    def gains(self, t: int | None) -> NoReturn:
        raise ValueError(
            "kalman_auto has no gains of its own: they follow from what was released. Use tuned(memory), memory from begin and learn."
        )

    def system(self, t: int | None) -> NoReturn:
        self.gains(t)

    @cached_property
    def models(self) -> tuple[np.ndarray, int]:
        """[n, 2] of (sigma_s^2, sigma_r^2) in units of R, and how many of them, the first, are random walks."""
        walks = [(q, 0.0) for q in np.logspace(-6, 4, 11)]
        slopes = [(level, slope) for level in (0.0, 1e-3, 1.0) for slope in np.logspace(-9, 3, 13)]
        return np.array(walks + slopes), len(walks)

    def begin(self, size: int) -> Memory:
        """What is known of a group of `size` coordinates before step 0."""
        models, _ = self.models
        n, m = len(models), min(size, self.samples)
        return {
            "level": np.zeros((n, m), np.float32), "slope": np.zeros((n, m), np.float32),
            "p": np.zeros(n), "c": np.zeros(n), "q": np.zeros(n), "L": np.zeros(n), "Q": np.zeros(()), "full": np.zeros(4),
            "tuned": np.array([1.0, 1.0, 0.0, 1.0, 1.0]),
        }  # fmt: skip

    def tuned(self, memory: Memory) -> Tuned:
        """The linear filter of the next step."""
        return Tuned(*(float(x) for x in memory["tuned"]))

    def learn(self, memory: Memory, g: Tensor, noise: Noise, t: int) -> Memory:
        """What is known after release t of the group, Tensor[size], which carried `noise`."""
        R = noise.std**2 if noise.white else noise.std**2 * _variances(noise.b, noise.a)(t)
        if R == 0:
            return memory
        models, walks = self.models
        m = memory["level"].shape[1]
        y = g[torch.arange(m, device=g.device) * len(g) // m].cpu().numpy().astype(np.float32)
        level, slope, p, c, q, L = (memory[key] for key in ("level", "slope", "p", "c", "q", "L"))
        Q = float(memory["Q"]) or R  # the grid is in units of the first R
        moving = np.arange(len(models)) >= walks
        still, carry = False, 1.0
        if t == 0:  # the level is what is seen, shrunk where it has a size to be shrunk to; the slope is unknown
            p_0 = max(float(np.mean(np.square(y, dtype=np.float64))) - R, 0.0)
            carry, still = p_0 / (p_0 + R), p_0 < _seen(R, m)
            level = np.where(moving, 1.0, carry)[:, None].astype(np.float32) * y
            p = np.where(moving, R, carry * R)
        elif t == 1:  # two points make a slope
            e = y - level
            S = p + Q * models[:, 0] + R
            squares = np.einsum("nm,nm->n", e, e, dtype=np.float64)
            still = squares[0] / m - (p[0] + R) < _seen(p[0] + R, m)
            L = -0.5 * (m * np.log(S) + squares / S)
            L = np.where(moving, L[:walks].max(), L)  # no prediction without a slope: no evidence for or against
            K = np.where(moving, 1.0, 1 - R / S)
            level, slope = level + K[:, None].astype(np.float32) * e, np.where(moving[:, None], e, 0).astype(np.float32)
            p, c = K * R, np.where(moving, R, 0.0)
            q = np.where(moving, 2 * R + Q * models.sum(1), 0.0)
        else:
            p, c, q = p + 2 * c + q + Q * models[:, 0], c + q, q + Q * models[:, 1]
            S = p + R
            e = y - (level + slope)
            L = self.memory * L - 0.5 * (m * np.log(S) + np.einsum("nm,nm->n", e, e, dtype=np.float64) / S)
            alpha, beta = p / S, c / S
            level, slope = level + slope + alpha[:, None].astype(np.float32) * e, slope + beta[:, None].astype(np.float32) * e
            p, c, q = (1 - alpha) * p, (1 - alpha) * c, q - beta * c
        after = {"level": level, "slope": slope, "p": p, "c": c, "q": q, "L": L, "Q": np.float64(Q)}
        tuned, full = self._next(memory["full"] if t else np.array([carry * R, 0.0, 0.0, 0.0]), L, Q, R, t)
        if t < 2:
            tuned[3] = float(still)
        return after | {"tuned": np.array([*tuned, carry]), "full": full}

    def _next(self, full: np.ndarray, L: np.ndarray, Q: float, R: float, t: int) -> tuple[list[float], np.ndarray]:
        """([K, alpha, beta, w] of step t + 1, (p of the walk, p, c, q of the velocity) after it) for the filters on the whole vector."""
        models, walks = self.models
        rw, cv = slice(None, walks), slice(walks, None)
        weight = np.exp(L - L.max())
        within_rw, within_cv = (np.exp(L[part] - L[part].max()) for part in (rw, cv))
        # a grid of powers of ten is averaged in the logarithm: the largest would outweigh what is likely
        q_walk, q_slope = (
            Q * np.exp(np.average(np.log(x), weights=w)) for x, w in ((models[rw, 0], within_rw), (models[cv, 1], within_cv))
        )
        q_level = Q * np.average(models[cv, 0], weights=within_cv)
        p_walk, p, c, q = full
        p_walk = p_walk + q_walk
        K = p_walk / (p_walk + R)
        if t == 0:
            alpha, beta, p, c, q = 1.0, 1.0, R, R, 2 * R + q_level + q_slope
        else:
            p, c, q = p + 2 * c + q + q_level, c + q, q + q_slope
            alpha, beta = p / (p + R), c / (p + R)
            p, c, q = (1 - alpha) * p, (1 - alpha) * c, q - beta * c
        return [float(K), float(alpha), float(beta), float(weight[rw].sum() / weight.sum())], np.array([K * R, p, c, q])


@lru_cache(maxsize=8)
def _variances(b: tuple[float, ...], a: tuple[float, ...]) -> Callable[[int], float]:
    """t -> Sum_{j <= t} k_j^2, the variance of x_t for unit z (`Noise`); the next step costs one coefficient, not t of them."""
    found, rest, asking = [], accumulate(k * k for k in Noise(1.0, b, a).coefficients()), Lock()

    def variance(t: int) -> float:
        with asking:
            found.extend(islice(rest, max(0, t + 1 - len(found))))
        return found[t]

    return variance


def _seen(variance: float, samples: int) -> float:
    """By how much a mean square over `samples` coordinates must exceed this variance to be more than chance (3 standard errors)."""
    return 3 * variance * (2 / samples) ** 0.5
