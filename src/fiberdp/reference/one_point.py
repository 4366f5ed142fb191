"""The unfiltered baselines, one gradient per example and step: DP-SGD with momentum, DP-AdamW, DP-AdamBC."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from fiberdp.reference.clipping import clip


def dp_sgd(
    theta0: np.ndarray,
    gradient: Callable[[np.ndarray, int], np.ndarray],
    batches: Sequence[Iterable[int]],
    noises: Sequence[np.ndarray],
    *,
    C: float,
    sigma: float,
    B: int,
    lr: Callable[[int], float],
    momentum: float = 0.9,
    weight_decay: float = 0.0,
) -> np.ndarray:
    """Algorithm 2 (the comments are its lines) with heavy-ball momentum and coupled weight decay; momentum 0 is the paper's.

    >>> dp_sgd([1.0], lambda theta, i: theta, [[0], [0]], np.zeros((2, 1)), C=9.0, sigma=0.0, B=1, lr=lambda t: 0.5).ravel()
    array([ 1. ,  0.5, -0.2])
    """
    # 1, 2: input; initialize
    theta = np.array(theta0, dtype=np.float64)
    sigma_w = sigma * C / B
    b = np.zeros_like(theta)
    trajectory = [theta]
    # 3, 4: for each step, its minibatch
    for t, (batch, z) in enumerate(zip(batches, noises, strict=True)):
        # 5: mean of the clipped gradients
        g_bar = sum(clip(gradient(theta, i), C) for i in batch) / B
        # 6: noise
        g = g_bar + sigma_w * z
        # 7: step
        b = momentum * b + g + weight_decay * theta
        theta = theta - lr(t) * b
        trajectory.append(theta)
    # 8, 9: end for; output
    return np.array(trajectory)


def dp_adamw(
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
) -> np.ndarray:
    """AdamW on privatized gradients (eqs. 8-10 with g~ = g and v- = v^)."""
    theta = np.array(theta0, dtype=np.float64)
    beta1, beta2 = betas
    sigma_w = sigma * C / B
    m = v = np.zeros_like(theta)
    trajectory = [theta]
    for t, (batch, z) in enumerate(zip(batches, noises, strict=True)):
        g = sum(clip(gradient(theta, i), C) for i in batch) / B + sigma_w * z
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * (g * g)
        m_hat = m / (1 - beta1 ** (t + 1))
        v_hat = v / (1 - beta2 ** (t + 1))
        theta = (1 - lr(t) * weight_decay) * theta - lr(t) * m_hat / (np.sqrt(v_hat) + eps)
        trajectory.append(theta)
    return np.array(trajectory)


def dp_adambc(
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
    eps_v: float = 1e-8,
) -> np.ndarray:
    """DP-AdamW with the noise's own variance taken out of the second moment (Tang et al. 2024).

        v-_t = max(v^_t - (sigma C / B)^2, eps_v)

    In decoupled form: as published it has no + eps in the denominator and couples its L2 decay.
    """
    theta = np.array(theta0, dtype=np.float64)
    beta1, beta2 = betas
    sigma_w = sigma * C / B
    m = v = np.zeros_like(theta)
    trajectory = [theta]
    for t, (batch, z) in enumerate(zip(batches, noises, strict=True)):
        g = sum(clip(gradient(theta, i), C) for i in batch) / B + sigma_w * z
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * (g * g)
        m_hat = m / (1 - beta1 ** (t + 1))
        v_hat = v / (1 - beta2 ** (t + 1))
        v_bar = np.maximum(v_hat - sigma_w**2, eps_v)
        theta = (1 - lr(t) * weight_decay) * theta - lr(t) * m_hat / (np.sqrt(v_bar) + eps)
        trajectory.append(theta)
    return np.array(trajectory)
