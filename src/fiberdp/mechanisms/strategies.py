"""Strategy matrices of correlated noise, and how far one example can move what they hide.

    x = C^{-1} z,        C = T(c) diag(1/d),        c(q) = a(q) / b(q)   as power series

T(c) is lower-triangular Toeplitz with coefficients c.  So x_t = d_t y_t with Sum_j a_j y_{t-j} = Sum_j b_j z_{t-j}: the noising filter
(a, b) has a few coefficients, and d_t is a scale per step.

    | strategy   | a                                  | b                                | d_t                                          | C banded |
    |------------|------------------------------------|----------------------------------|----------------------------------------------|----------|
    | bandmf     | optimum of `bands` coefficients    | 1                                | 1                                            | yes      |
    | bsr        | r_0 … r_{bands-1}, normalised      | 1                                | 1                                            | yes      |
    | bisr       | 1                                  | -r_k/(2k-1): 1, -1/2, -1/8, …    | 1                                            | no       |
    | lambda-cgd | 1                                  | 1, -lambda                       | sqrt((1-lambda^{2(n-t)})/(1-lambda^2))       | no       |
    | blt        | numerator of the generating fn     | its denominator                  | 1                                            | no       |

r_k = C(2k, k)/4^k are the coefficients of (1-q)^{-1/2}.  The optimised ones are in `bandmf.py` and `blt.py`.
Sources: Choquette-Choo et al. 2023 (arXiv 2306.08153, BandMF); Kalinin and Lampert 2024 (arXiv 2405.13763, BSR); Kalinin, McMahan,
Upadhyay and Lampert 2025 (arXiv 2505.12128, BISR).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from fiberdp import _validate

Array = np.ndarray


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """steps: n, the horizon.  a, b: the noising filter.  scale: d_t, t < n; None is 1 at every step.

    buffers: (theta, omega) of a BLT, a form of the same filter that is exact in float32 where its polynomials are not.
    """

    steps: int
    a: tuple[float, ...] = (1.0,)
    b: tuple[float, ...] = (1.0,)
    scale: tuple[float, ...] | None = None
    buffers: tuple[tuple[float, float], ...] = ()

    @property
    def order(self) -> int:
        """How many past vectors the noising filter reads."""
        return max(len(self.a), len(self.b)) - 1

    def coefficients(self) -> Array:
        """c_0 … c_{n-1}, the first column of T(c); without its trailing zeros if C is banded."""
        if len(self.b) == 1:
            return np.array(self.a[: self.steps]) / self.b[0]
        return divided(np.array(self.a), np.array(self.b), self.steps)

    def matrix(self) -> Array:
        """C, [n, n], for tests and small n."""
        c = np.concatenate([self.coefficients(), np.zeros(self.steps)])
        i = np.arange(self.steps)
        return np.where(i[:, None] >= i, c[i[:, None] - i], 0.0) / (1.0 if self.scale is None else np.array(self.scale))

    def error(self) -> float:
        """Mean over t < n of the variance of the noise in the t-th prefix sum, for unit z: mean_t Sum_{s<=t} S_s^2, S = cumsum(1/c).

        >>> round(Strategy(steps=800).error(), 1)
        400.5
        """
        assert self.scale is None
        prefix = divided(np.array(self.b), np.convolve(self.a, [1.0, -1.0]), self.steps)
        return float(prefix**2 @ remaining(self.steps))

    def sensitivity_squared(self, separation: int, uses: int) -> float:
        """The most by which one example moves C G, squared, in units of the clip norm: max over patterns of ||Sum_i C[:, i]||^2.

        A pattern is at most `uses` steps, any two at least `separation` apart.  With G_{ij} = <C[:, i], C[:, j]> the maximum is

            Sum_{k, l < uses} G[k separation, l separation]      if G >= 0 falls along every row and every diagonal
            uses g_0 + 2 Sum_{m>0} (uses - m) g_{m separation}   otherwise: an upper bound, with g_h = max over h' >= h of |G_{i,i+h'}|

        In the first case moving a pattern's steps to 0, separation, 2 separation, … only increases every term, so it is exact.
        Guarantee: never less than the true value, whatever the sign of C.

        >>> [Strategy(steps=8, a=(1.0, 0.5)).sensitivity_squared(2, 4), Strategy(steps=6, a=(1.0, 0.5, 0.25)).sensitivity_squared(2, 3)]
        [5.0, 4.875]
        """
        _validate.count("separation", separation, why="It is how many steps lie between two uses of one example, at least.")
        _validate.count("uses", uses, why="It is how often one example is used, at most.")
        n, uses = self.steps, min(uses, -(-self.steps // separation))
        c = self.coefficients()
        column = np.concatenate([c, np.zeros(n - len(c))])
        d = np.ones(n) if self.scale is None else np.array(self.scale)
        falling, exact, largest, above = True, 0.0, np.zeros(n), None
        for h in range(len(c)):  # beyond the bands G is 0
            diagonal = np.cumsum(column[: n - h] * column[h:])[::-1] / (d[: n - h] * d[h:])  # G[i, i + h] for i = 0, 1, …
            tiny = 1e-13 * largest[0]
            falling = falling and bool(diagonal.min() >= -tiny and np.diff(diagonal).max(initial=0) <= tiny)
            falling = falling and (above is None or bool((diagonal <= above[: n - h] + tiny).all()))
            largest[h], above = np.abs(diagonal).max(), diagonal
            if h % separation == 0 and h < uses * separation:
                exact += (2 if h else 1) * float(diagonal[::separation][: uses - h // separation].sum())
        if falling:
            return exact
        g = np.maximum.accumulate(largest[::-1])[::-1][::separation][:uses]
        return float(uses * g[0] + 2 * sum((uses - m) * g[m] for m in range(1, len(g))))


def divided(numerator: Array, denominator: Array, length: int) -> Array:
    """The first coefficients of numerator(q) / denominator(q)."""
    from scipy.signal import lfilter  # imported late: scipy.signal takes a third of a second

    return np.asarray(lfilter(numerator, denominator, np.eye(1, length)[0]))


def remaining(steps: int) -> Array:
    """(n - s)/n: in what share of the prefix sums the s-th coefficient stands."""
    return 1 - np.arange(steps) / steps


def square_root(count: int) -> Array:
    """r_k = C(2k, k)/4^k, k < count.

    >>> square_root(4).tolist()
    [1.0, 0.5, 0.375, 0.3125]
    """
    k = np.arange(1, count)
    return np.concatenate([[1.0], np.cumprod((2 * k - 1) / (2 * k))])


def normalised(c: Array, steps: int) -> Strategy:
    """The banded strategy with coefficients c / ||c||: every column of C has norm 1, the last ones less."""
    return Strategy(steps=steps, a=tuple((c / math.sqrt(c @ c)).tolist()))


def bsr(steps: int, bands: int) -> Strategy:
    """Banded square root: c = r_0 … r_{bands-1}."""
    return normalised(square_root(min(bands, steps)), steps)


def bisr(steps: int, bands: int) -> Strategy:
    """Banded inverse square root: the noising filter is cut to `bands` coefficients instead of C.

    >>> bisr(10, 4).b
    (1.0, -0.5, -0.125, -0.0625)
    """
    r = square_root(min(bands, steps))
    return Strategy(steps=steps, b=tuple((-r / (2 * np.arange(len(r)) - 1)).tolist()))


def lambda_cgd(steps: int, decay: float) -> Strategy:
    """x_t = d_t (z_t - lambda z_{t-1}), scaled so that every column of C has norm 1."""
    left = steps - np.arange(steps)
    return Strategy(steps=steps, b=(1.0, -decay), scale=tuple(np.sqrt((1 - decay ** (2 * left)) / (1 - decay**2)).tolist()))
