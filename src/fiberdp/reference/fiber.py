"""FiBeR: DP-AdamW with innovation filtering and filter-aware bias correction (Algorithm 3; the comments are its lines)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from fiberdp.reference.clipping import clip


def fiber(
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
    omega: float = 0.9,
    kappa: float = 0.6,
    gamma: float = 0.7,
    eps_v: float | str = 1e-8,
    eps_v_scale: float = 1.0,
    calibration: str = "steady",
) -> np.ndarray:
    """The trajectory theta_0, …, theta_T, [T + 1, d]; the arguments are described in the package.

    calibration: "steady" is line 8 as printed.  "none" leaves the second moment alone and has no floor (FiBeR-NoCorr), "raw"
    subtracts sigma_w^2 (FiBeR-BCCorr), "exact" subtracts E[v^_t] under pure noise:

        A_t = Sum_{j<=t} h_j^2,    P_t = beta2 P_{t-1} + (1 - beta2) A_t sigma_w^2,    phi_t = P_t / (1 - beta2^{t+1})

    with h the filter's impulse response.  Look-ahead FiBeR is gamma = (1 - kappa)/kappa, so a = 1, with "exact".

    eps_v = "auto" floors at eps_v_scale standard deviations of v^_t under white noise of mean phi_t: v^_t is a weighted mean of t + 1
    independent chi^2_1, with weights (1 - beta2) beta2^{t-k} / (1 - beta2^{t+1}), and the variance of chi^2_1 is 2.

    One step from 0 on f(theta) = -2 theta without noise: g = 2, g~ = r = .5 * 2 = 1, m^ = 1, v^ = 1, so theta = lr.

    >>> fiber([0.0], lambda theta, i: np.array([-2.0]), [[0]], np.zeros((1, 1)), C=9.0, sigma=0.0, B=1, lr=lambda t: 0.1, omega=0.5)
    array([[0. ],
           [0.1]])
    """
    # 1: input
    theta = np.array(theta0, dtype=np.float64)
    beta1, beta2 = betas
    a = (1 - kappa) / (kappa * gamma)
    # 2: init
    g_tilde = r = m = v = d = np.zeros_like(theta)
    sigma_w = sigma * C / B
    A = (2 - omega) / (4 - 3 * omega)
    h = h_r = A_t = P = 0.0  # for "exact": the filter of line 6 on the impulse 1, 0, 0, …
    trajectory = [theta]
    # 3, 4: for each step, its minibatch
    for t, (batch, z) in enumerate(zip(batches, noises, strict=True)):
        # 5: privatized gradient observation
        u = [a * gradient(theta + gamma * d, i) + (1 - a) * gradient(theta, i) for i in batch]
        g = sum(clip(u_i, C) for u_i in u) / B + sigma_w * z
        # 6: innovation filter
        nu = g - g_tilde
        r = (1 - omega) * r + omega * nu
        g_tilde = g_tilde + r
        # 7: Adam moments
        m = beta1 * m + (1 - beta1) * g_tilde
        v = beta2 * v + (1 - beta2) * (g_tilde * g_tilde)
        # 8: bias + filter-aware correction
        m_hat = m / (1 - beta1 ** (t + 1))
        v_hat = v / (1 - beta2 ** (t + 1))
        if calibration == "none":
            v_bar = v_hat
        elif calibration == "raw":
            v_bar = np.maximum(v_hat - sigma_w**2, float(eps_v))
        elif calibration == "steady":
            v_bar = np.maximum(v_hat - A * sigma_w**2, float(eps_v))
        elif calibration == "exact":
            h_r = (1 - omega) * h_r + omega * ((t == 0) - h)
            h = h + h_r
            A_t = A_t + h**2
            P = beta2 * P + (1 - beta2) * A_t * sigma_w**2
            phi = P / (1 - beta2 ** (t + 1))
            weights = (1 - beta2) * beta2 ** np.arange(t + 1) / (1 - beta2 ** (t + 1))
            floor = eps_v_scale * phi * np.sqrt(2 * (weights**2).sum()) if eps_v == "auto" else float(eps_v)
            v_bar = np.maximum(v_hat - phi, floor)
        else:
            raise ValueError(f"calibration={calibration!r}: must be one of none, raw, steady, exact.")
        # 9: update
        theta_next = (1 - lr(t) * weight_decay) * theta - lr(t) * m_hat / (np.sqrt(v_bar) + eps)
        d = theta_next - theta
        theta = theta_next
        trajectory.append(theta)
    # 10, 11: end for; output
    return np.array(trajectory)
