"""DiSK on AdamW: the two-point observation behind an EMA that shares its kappa (FiBeR paper, eqs. 2-4; 74 for DiSK-Corr)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from fiberdp.reference.clipping import clip


def disk(
    theta0: np.ndarray,
    gradient: Callable[[np.ndarray, int], np.ndarray],
    batches: Sequence[Iterable[int]],
    noises: Sequence[np.ndarray],
    *,
    C: float,
    sigma: float,
    B: int,
    lr: Callable[[int], float],
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    kappa: float = 0.7,
    gamma: float = 0.5,
    eps_v: float = 1e-8,
    calibration: str = "none",
) -> np.ndarray:
    """The trajectory theta_0, …, theta_T, [T + 1, d]; the arguments are described in the package.

    calibration: "none" is DiSK; "steady" is DiSK-Corr, which subtracts A sigma_w^2 with A = kappa/(2 - kappa).
    The filter starts at g~_0 = g_0, as the public code does, the paper being silent.

    One step from 0 on f(theta) = -2 theta without noise: g~ = g = -2, m^ = -2, v^ = 4, so theta = lr.

    >>> disk([0.0], lambda theta, i: np.array([-2.0]), [[0]], np.zeros((1, 1)), C=9.0, sigma=0.0, B=1, lr=lambda t: 0.1)
    array([[0. ],
           [0.1]])
    """
    theta = np.array(theta0, dtype=np.float64)
    beta1, beta2 = betas
    a = (1 - kappa) / (kappa * gamma)
    m = v = d = np.zeros_like(theta)
    g_tilde = None
    sigma_w = sigma * C / B
    A = kappa / (2 - kappa)  # eq. 73
    trajectory = [theta]
    for t, (batch, z) in enumerate(zip(batches, noises, strict=True)):
        u = [a * gradient(theta + gamma * d, i) + (1 - a) * gradient(theta, i) for i in batch]  # eq. 2
        g = sum(clip(u_i, C) for u_i in u) / B + sigma_w * z  # eq. 3
        g_tilde = g if g_tilde is None else (1 - kappa) * g_tilde + kappa * g  # eq. 4
        m = beta1 * m + (1 - beta1) * g_tilde  # eq. 8
        v = beta2 * v + (1 - beta2) * (g_tilde * g_tilde)  # eq. 9
        m_hat = m / (1 - beta1 ** (t + 1))
        v_hat = v / (1 - beta2 ** (t + 1))
        if calibration == "none":
            v_bar = v_hat
        elif calibration == "steady":
            v_bar = np.maximum(v_hat - A * sigma_w**2, eps_v)  # eq. 74
        else:
            raise ValueError(f"calibration={calibration!r}: must be one of none, steady.")
        theta_next = (1 - lr(t) * weight_decay) * theta - lr(t) * m_hat / (np.sqrt(v_bar) + eps)  # eq. 10
        d = theta_next - theta
        theta = theta_next
        trajectory.append(theta)
    return np.array(trajectory)
