"""Renyi divergences of the Poisson-sampled Gaussian, without cancellation and without overflow.

    A(alpha) = Sum_k binom(alpha, k) (1 - q)^(alpha - k) q^k exp( k (k - 1) / (2 sigma^2) ),     RDP(alpha) = log A(alpha) / (alpha - 1)

at whole alpha (Mironov, Talwar and Zhang 2019, section 3.3).  The weights add up to 1 and the terms k = 0, 1 have exponent 0, so

    A(alpha) - 1 = Sum_{k >= 2} binom(alpha, k) (1 - q)^(alpha - k) q^k expm1( k (k - 1) / (2 sigma^2) )

is a sum of positive numbers: for a tiny q nothing is lost to the 1, and logarithms keep large orders in range.  Between whole orders
log A is convex in alpha, so its chord is an upper bound.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from scipy.special import gammaln


def poisson_gaussian(orders: Sequence[float], q: float, sigma: float) -> np.ndarray:
    """RDP at each order > 1, exact to 1e-12 relative at whole orders and an upper bound between; q in [0, 1], sigma > 0.

    >>> abs(float(poisson_gaussian([2], 1e-6, 4.0)[0]) / math.log1p(1e-12 * math.expm1(1 / 16)) - 1) < 1e-12
    True
    """
    if q == 1:
        return np.array([order / (2 * sigma**2) for order in orders])
    if q == 0:
        return np.zeros(len(orders))
    found = []
    for order in orders:
        low, high = math.floor(order), math.ceil(order)
        log_moment = _log_moment(high, q, sigma)
        if low != high:
            share = order - low
            log_moment = share * log_moment + (1 - share) * _log_moment(low, q, sigma)
        found.append(log_moment / (order - 1))
    return np.array(found)


def _log_moment(alpha: int, q: float, sigma: float) -> float:
    """log A(alpha)."""
    if alpha == 1:
        return 0.0
    k = np.arange(2, alpha + 1, dtype=float)
    weights = gammaln(alpha + 1) - gammaln(k + 1) - gammaln(alpha - k + 1) + k * math.log(q) + (alpha - k) * math.log1p(-q)
    exponent = k * (k - 1) / (2 * sigma**2)
    # log expm1(x): x itself where the 1 is below rounding
    excess = np.where(exponent > 40, exponent, np.log(np.expm1(np.minimum(exponent, 40))))
    terms = weights + excess
    largest = float(terms.max())
    log_rest = largest + math.log(float(np.exp(terms - largest).sum()))
    return log_rest if log_rest > 40 else math.log1p(math.exp(log_rest))
