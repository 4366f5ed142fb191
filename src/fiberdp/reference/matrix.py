"""MF-DP-FTRL: DP-SGD whose noise is the solution of a linear system (METHODS.md section 5; Choquette-Choo et al. 2023)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from fiberdp.reference.one_point import dp_sgd


def mf_dp_ftrl(
    theta0: np.ndarray,
    gradient: Callable[[np.ndarray, int], np.ndarray],
    batches: Sequence[Iterable[int]],
    noises: Sequence[np.ndarray],
    *,
    c: Sequence[float],
    C: float,
    sigma: float,
    B: int,
    lr: Callable[[int], float],
    momentum: float = 0.9,
    weight_decay: float = 0.0,
) -> np.ndarray:
    """DP-SGD with the noise x = M^{-1} z times ||c||, M the lower-triangular Toeplitz matrix of c_0, c_1, …: the whole of it at once.

    >>> z = np.array([[1.0], [0.0]])
    >>> mf_dp_ftrl([0.0], lambda theta, i: theta, [[], []], z, c=[3.0, 4.0], C=1.0, sigma=1.0, B=1, lr=lambda t: 1.0, momentum=0.0).ravel()
    array([ 0.        , -1.66666667,  0.55555556])
    """
    T = len(noises)
    M = sum(c_j * np.eye(T, k=-j) for j, c_j in enumerate(c))
    x = np.linalg.solve(M, np.stack(list(noises))) * np.linalg.norm(c)
    return dp_sgd(theta0, gradient, batches, list(x), C=C, sigma=sigma, B=B, lr=lr, momentum=momentum, weight_decay=weight_decay)
