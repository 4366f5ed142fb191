"""BLT: buffered linear Toeplitz noise, a long memory in a few buffers (Dvijotham et al. 2024, arXiv 2404.16706; McMahan et al. 2024).

    c_0 = 1,   c_j = Sum_i omega_i theta_i^{j-1}         c(q) = 1 + Sum_i omega_i q / (1 - theta_i q) = a(q) / b(q)

    x_t = z_t - Sum_i omega_i s_{i,t},     s_{i,t+1} = theta_i s_{i,t} + x_t,     s_{i,0} = 0

so the noising filter b/a costs the number of buffers, whatever the horizon.  omega and theta minimise the prefix sums' mean error times
the squared sensitivity of the participation pattern, with 0 < theta < 1 and omega > 0.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from fiberdp.mechanisms.strategies import Array, Strategy, remaining


@lru_cache(maxsize=64)
def blt(steps: int, buffers: int, separation: int, uses: int) -> Strategy:
    """L-BFGS over logit theta and log omega, with the exact gradient, from decay times spread evenly (in the log) up to n.

    >>> len(blt(50, 2, 10, 5).a)
    3
    """
    from scipy.optimize import minimize

    fade = float(steps) ** -((np.arange(buffers) + 0.5) / buffers)  # 1 - theta
    start = np.concatenate([np.log((1 - fade) / fade), np.log(0.5 * fade**0.5 / (fade**0.5).sum())])
    found = minimize(
        _loss, start, args=(steps, separation, min(uses, -(-steps // separation))), jac=True, method="L-BFGS-B",
        bounds=[(-12.0, 16.0)] * buffers + [(-30.0, 0.0)] * buffers, options={"maxiter": 500, "maxcor": 20, "ftol": 1e-11, "gtol": 1e-7},
    )  # fmt: skip
    theta, omega = _parameters(found.x)
    a, b = _fraction(theta, omega)
    return Strategy(steps=steps, a=tuple(a.tolist()), b=tuple(b.tolist()), buffers=tuple(zip(theta.tolist(), omega.tolist(), strict=True)))


def _parameters(x: Array) -> tuple[Array, Array]:
    logit, log_omega = np.split(x, 2)
    return 1 / (1 + np.exp(-logit)), np.exp(log_omega)


def _fraction(theta: Array, omega: Array) -> tuple[Array, Array]:
    """a(q) and b(q), in rising powers of q."""
    b = np.ones(1)
    for t in theta:
        b = np.convolve(b, [1.0, -t])
    a = b.copy()
    for i, w in enumerate(omega):
        others = np.ones(1)
        for t in np.delete(theta, i):
            others = np.convolve(others, [1.0, -t])
        a[1:] += w * others
    return a, b


def _inverse(theta: Array, omega: Array, steps: int) -> Array:
    """The noising filter's impulse response, 1/c, by the buffers themselves: b/a as polynomials loses digits where roots are close."""
    k, s = np.empty(steps), np.zeros(len(theta))
    for t in range(steps):
        k[t] = (t == 0) - omega @ s
        s = theta * s + k[t]
    return k


def _loss(x: Array, steps: int, separation: int, uses: int) -> tuple[float, Array]:
    """log(error * squared sensitivity) and its gradient, for the pattern 0, separation, 2 separation, …"""
    from scipy.signal import fftconvolve

    theta, omega = _parameters(x)
    powers = theta[:, None] ** np.arange(steps - 1)  # theta_i^{j-1} for j = 1, 2, …
    c = np.concatenate([[1.0], omega @ powers])
    with np.errstate(over="ignore", invalid="ignore"):
        inverse = _inverse(theta, omega, steps)
    if not np.abs(inverse).max() < 1e6:  # a line search went where 1/c explodes: far too high, so it comes back
        return 1e3, np.zeros_like(x)
    S, weight = np.cumsum(inverse), remaining(steps)
    error = float(weight @ S**2)
    used = np.zeros(steps)
    for k in range(uses):
        used[k * separation :] += c[: steps - k * separation]
    square = float(used @ used)
    P = fftconvolve(S, inverse)[:steps]  # dS_s/dc_k = -P_{s-k}
    slope = -2 / error * fftconvolve(weight * S, P[::-1])[steps - 1 :]
    for k in range(uses):
        slope[: steps - k * separation] += 2 / square * used[k * separation :]
    by_omega = powers @ slope[1:]
    by_theta = omega * (np.arange(1, steps - 1) * powers[:, : steps - 2] @ slope[2:])
    return np.log(error * square), np.concatenate([by_theta * theta * (1 - theta), by_omega * omega])
