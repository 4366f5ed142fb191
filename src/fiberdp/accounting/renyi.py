"""Renyi accounting with the paper's orders: looser than pld, and the language of most published figures.

With r = e^((x - 1/2)/s^2) the likelihood ratio of N(1, s^2) to N(0, s^2), s = std / sensitivity, x ~ N(0, s^2):

    no sampling          (alpha - 1) RDP = alpha (alpha - 1) / 2 s^2
    Poisson              (alpha - 1) RDP = log E[(1 - q + q r)^alpha]
    without replacement  (alpha - 1) RDP = log(1 + sum_{j=2..alpha} C(alpha, j) q^j
                             min(4 sqrt(X_{j-} X_{j+}), 2 e^{j(j-1)/2s^2}))        X_l = E[(r - 1)^l], l even
                         j-, j+ = j rounded to even, down and up; linear between whole orders

    improved   eps = min_alpha  RDP + log(1 - 1/alpha) - log(alpha delta)/(alpha - 1)
    classic    eps = min_alpha  RDP + log(1/delta)/(alpha - 1)

The expectations are trapezoid sums over windows of `_TAIL` standard deviations at both modes of the integrand.  It
is entire, or analytic within pi s^2 of the real line, so the sums are right to rounding.
Source: Mironov, Talwar, Zhang 2019 (arXiv 1908.10530); Wang, Balle, Kasiviswanathan 2019 (arXiv 1808.00087, theorem
27, corollary 10); Canonne, Kamath, Steinke 2020 (arXiv 2004.00010, proposition 12); orders and classic conversion
from the FiBeR paper, appendix E.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from fiberdp.accounting.events import Mechanism

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[np.float64]

ORDERS: tuple[float, ...] = (*(k / 10 for k in range(11, 101)), *range(12, 64))
"""The paper's: 1.1, 1.2, ..., 10.0, 12, 13, ..., 63."""

_TAIL, _STEP = 12, 1 / 16  # in units of s


def epsilon(charges: Counter[Mechanism], sensitivity: float, delta: float, *, conversion: str) -> float:
    """Smallest epsilon the orders show.  conversion: "improved" or "classic"; 0 < delta < 1; noise multipliers > 0.

    sensitivity: what one example can move the clipped sum by, in units of C.
    """
    from dp_accounting.rdp import compute_epsilon

    curves = {"none": gaussian, "poisson": poisson, "without_replacement": without_replacement}
    rdp = np.zeros(len(ORDERS))
    for m, n in charges.items():
        rdp += n * curves[m.sampling](m.probability, m.noise_multiplier / sensitivity, ORDERS)
    improved = float(compute_epsilon(ORDERS, rdp.tolist(), delta)[0])
    if conversion == "improved" or improved == 0:  # 0 only if total variation alone shows (0, delta)
        return improved
    return float(np.min(rdp - math.log(delta) / (np.array(ORDERS) - 1)))


def gaussian(q: float, s: float, orders: Sequence[float]) -> Array:
    """RDP of one Gaussian release at each order, no sampling (q is 1).

    >>> gaussian(1.0, 2.0, [2, 4])
    array([0.25, 0.5 ])
    """
    return np.array(orders, dtype=float) / (2 * s**2)


def poisson(q: float, s: float, orders: Sequence[float]) -> Array:
    """RDP of one Poisson-sampled Gaussian release at each order, 0 < q < 1.

    >>> poisson(0.01, 1.0, [2]) - math.log1p(0.01**2 * math.expm1(1.0)) < 1e-15
    array([ True])
    """

    def excess(x: Array, a: float) -> Array:
        """log((r_q)^a - 1 - a (r_q - 1)): the part of r_q^a whose mean is not 1, never negative."""
        log_r = np.logaddexp(math.log1p(-q), math.log(q) + (x - 0.5) / s**2)
        small, big = np.minimum(a * log_r, 30), np.maximum(a * log_r, 30)
        near = np.expm1(small) - a * np.expm1(small / a)
        far = big + np.log1p(-np.exp(-big) - a * (np.exp(big / a - big) - np.exp(-big)))
        return np.where(a * log_r < 30, _log(near), far)

    logs = [np.logaddexp(0, _log_mean(lambda x, a=a: excess(x, a), s, a)) for a in orders]
    return np.array(logs) / (np.array(orders) - 1)


def without_replacement(q: float, s: float, orders: Sequence[float]) -> Array:
    """Bound on the RDP of one Gaussian release on a uniform subset at each order, replace-one, 0 < q < 1."""
    top = math.ceil(max(orders))

    def power(x: Array, l: int) -> Array:
        """log((r - 1)^l), l even."""
        y = (x - 0.5) / s**2
        return l * (np.maximum(y, 0) + _log(-np.expm1(-np.abs(y))))

    moments = {l: _log_mean(lambda x, l=l: power(x, l), s, l) for l in range(2, top + 2, 2)}
    j = np.arange(2, top + 1)
    middle = np.array([(moments[2 * (i // 2)] + moments[2 * (-(-i // 2))]) / 2 for i in range(2, top + 1)])
    terms = np.minimum(math.log(4) + middle, math.log(2) + j * (j - 1) / (2 * s**2)) + j * math.log(q)

    def whole(a: int) -> float:
        """(a - 1) RDP at a whole order."""
        if a == 1:
            return 0.0
        choose = [math.lgamma(a + 1) - math.lgamma(i + 1) - math.lgamma(a - i + 1) for i in range(2, a + 1)]
        return float(np.logaddexp(0, np.logaddexp.reduce(np.array(choose) + terms[: a - 1])))

    at = {a: whole(a) for a in range(1, top + 1)}
    chords = [at[math.floor(a)] + (a % 1) * (at[math.ceil(a)] - at[math.floor(a)]) for a in orders]
    return np.array(chords) / (np.array(orders) - 1)


def _log_mean(log_f: Callable[[Array], Array], s: float, far: float) -> float:
    """log E[f(x)], x ~ N(0, s^2), for an f whose integrand has its modes near 0 and near `far`."""
    gap = far / s
    if gap < 2 * _TAIL:
        x = s * np.arange(-_TAIL, gap + _TAIL, _STEP)
    else:
        window = s * np.arange(-_TAIL, _TAIL, _STEP)
        x = np.concatenate([window, far + window])
    return float(np.logaddexp.reduce(log_f(x) - x**2 / (2 * s**2))) + math.log(_STEP / math.sqrt(2 * math.pi))


def _log(x: Array) -> Array:
    # log 0 = -inf is the right value: the point adds nothing; rounding may leave -1e-33 instead of 0
    with np.errstate(divide="ignore"):
        return np.log(np.maximum(x, 0))
