"""BandMF: the best Toeplitz strategy with a given number of bands (Choquette-Choo et al. 2023, arXiv 2306.08153).

    minimise over c_0 … c_{b-1}     ||c||^2 mean_t Sum_{s<=t} S_s^2,       S(q) = 1 / ((1 - q) c(q))

The mean is over t < n; the loss does not change when c is scaled, so c_0 = 1 and ||c|| = 1 is made at the end.  With P = S/c,

    dS_s/dc_k = -P_{s-k}
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from fiberdp.mechanisms.strategies import Array, Strategy, divided, normalised, remaining, square_root


@lru_cache(maxsize=64)
def bandmf(steps: int, bands: int) -> Strategy:
    """L-BFGS from the square root's coefficients, with the exact gradient.  steps: n.

    >>> [round(c, 4) for c in bandmf(200, 4).a], round(bandmf(200, 4).error(), 4)
    ([0.648, 0.4925, 0.4359, 0.3841], 28.4715)
    """
    from scipy.optimize import minimize

    start = square_root(min(bands, steps))
    if len(start) == 1:
        return normalised(start, steps)
    found = minimize(
        _loss, start[1:], args=(remaining(steps),), jac=True, method="L-BFGS-B",
        options={"maxiter": 5000, "maxfun": 10_000, "maxcor": 30, "ftol": 1e-15, "gtol": 1e-9},
    )  # fmt: skip
    return normalised(np.concatenate([[1.0], found.x]), steps)


def _loss(tail: Array, weight: Array) -> tuple[float, Array]:
    """log of the loss and its gradient in c_1 … c_{b-1}; the log keeps L-BFGS well scaled for every n and b."""
    c = np.concatenate([[1.0], tail])
    n = len(weight)
    S = divided(np.ones(1), np.convolve(c, [1.0, -1.0]), n)
    P = divided(np.ones(1), np.convolve(np.convolve(c, c), [1.0, -1.0]), n)
    error, square = float(weight @ S**2), float(c @ c)
    slope = -2 * np.array([(weight * S)[k:] @ P[: n - k] for k in range(1, len(c))])
    return np.log(error * square), slope / error + 2 * tail / square
