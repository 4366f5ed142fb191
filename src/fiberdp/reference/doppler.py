"""DOPPLER: DP-AdamW on gradients behind a low-pass filter with a bias-free start (Zhang et al. 2024b)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from fiberdp.reference.clipping import clip


def doppler(
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
    b: Sequence[float] = (1.6332e-4, 3.2665e-4, 1.6332e-4),
    a: Sequence[float] = (1.0, -1.98342955, 0.98549544),
) -> np.ndarray:
    """The filter is written as the sum it is, over all the past it needs:

    y_t = Sum_tau b_tau g_{t-tau} - Sum_{tau>=1} a_tau y_{t-tau},    c_t the same on the constant 1,    g~_t = y_t / c_t
    """
    theta = np.array(theta0, dtype=np.float64)
    beta1, beta2 = betas
    m = v = np.zeros_like(theta)
    gs: list[np.ndarray] = []
    ys: list[np.ndarray] = []
    cs: list[float] = []
    trajectory = [theta]
    for t, (batch, z) in enumerate(zip(batches, noises, strict=True)):
        gs.append(sum(clip(gradient(theta, i), C) for i in batch) / B + sigma * C / B * z)
        ys.append(
            sum(b[tau] * gs[t - tau] for tau in range(len(b)) if tau <= t)
            - sum((a[tau] * ys[t - tau] for tau in range(1, len(a)) if tau <= t), np.zeros_like(theta))
        )
        cs.append(sum(b[tau] for tau in range(len(b)) if tau <= t) - sum(a[tau] * cs[t - tau] for tau in range(1, len(a)) if tau <= t))
        g_tilde = ys[t] / cs[t]
        m = beta1 * m + (1 - beta1) * g_tilde
        v = beta2 * v + (1 - beta2) * (g_tilde * g_tilde)
        m_hat = m / (1 - beta1 ** (t + 1))
        v_hat = v / (1 - beta2 ** (t + 1))
        theta = (1 - lr(t) * weight_decay) * theta - lr(t) * m_hat / (np.sqrt(v_hat) + eps)
        trajectory.append(theta)
    return np.array(trajectory)
