"""Privacy loss distributions: the (nearly) exact price of a composition of sampled Gaussians.

One step with mu = sensitivity / std and sampling probability q compares P = N(mu, 1) on the sample with Q = N(0, 1):

    remove  H((1-q)Q + qP || Q)     add  H(Q || (1-q)Q + qP)     H_eps(A || B) = integral of (A - e^eps B)+

    Poisson              both directions, each composed on its own; epsilon is the larger (add or remove one)
    without replacement  one curve, `remove` at eps >= 0 and `add` below: the trade-off function
                         min(f_q, f_q^-1)** of a uniform subset under replace-one, with mu = 2C / std
    no sampling          exact: n Gaussians are one with mu = sqrt(sum mu_i^2)

Guarantee: pessimistic.  The curve is kept at the points of a grid and replaced by its chords between them, which
can only raise delta; the rounding of the Fourier transform is subtracted from delta before epsilon is read.
Source: Doroshenko et al. 2022 (connect the dots, arXiv 2207.04380); Dong, Roth, Su 2019 (arXiv 1905.02383, theorem
4.2, for the uniform subset); Balle, Wang 2018 (arXiv 1805.06530, for the exact Gaussian).
"""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np

from fiberdp.accounting.events import Mechanism

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[np.float64]

_GRID = 1e-4  # of the privacy loss; METHODS.md's and most published figures use it
_MAX_POINTS = 2**17  # one step's grid: beyond, the loss is so wide that a coarser grid changes no digit shown
_TAIL = 8.5  # standard deviations kept of each Gaussian; the rest, 1e-17, goes to infinite loss
_ROUNDING = 2.0**-52  # what the Fourier transform may lose of delta, a composed step


def epsilon(charges: Counter[Mechanism], sensitivity: float, delta: float) -> float:
    """Smallest epsilon at which the composition is (epsilon, delta)-DP, up to the grid.

    charges: how often each mechanism ran, noise multipliers > 0.  sensitivity: what one example can move the
    clipped sum by, in units of C.  0 < delta < 1.
    Raises ValueError if delta is too small for double precision.
    """
    sampled = {m: n for m, n in charges.items() if m.sampling != "none"}
    mu = _one_gaussian({m: n for m, n in charges.items() if m.sampling == "none"}, sensitivity)
    if not sampled:
        return _exact(mu, delta)
    steps = sum(sampled.values())
    if delta < 100 * _ROUNDING * (steps + 1):
        raise ValueError(
            f"delta={delta}: must be at least {100 * _ROUNDING * (steps + 1):.1e} for the pld accountant over {steps} "
            'steps. Below, rounding could hide a privacy loss. Use a larger delta or accountant="rdp".'
        )
    losses = [(m.probability, sensitivity / m.noise_multiplier, m.sampling, n) for m, n in sampled.items()]
    if mu:
        losses.append((1.0, mu, "none", 1))
    grid = _grid([(q, mu) for q, mu, _, _ in losses])
    if grid > 100:  # hardly any noise: e^grid would overflow, and leaving the sampling out is a valid bound
        return _exact(_one_gaussian(charges, sensitivity), delta)
    composed = None
    # a moment may overflow in dp_accounting's tail bounds, which then leaves that bound out
    with np.errstate(over="ignore"):
        for q, mu_step, sampling, n in losses:
            part = _distribution(q, mu_step, sampling, grid).self_compose(n)
            composed = part if composed is None else composed.compose(part)
    assert composed is not None
    return float(composed.get_epsilon_for_delta(delta - _ROUNDING * (steps + 1)))


def _one_gaussian(charges: dict[Mechanism, int], sensitivity: float) -> float:
    """mu of the one Gaussian that stands for all of these, their sampling left out."""
    return sensitivity * math.sqrt(sum(n / m.noise_multiplier**2 for m, n in charges.items()))


def _exact(mu: float, delta: float) -> float:
    from dp_accounting import get_epsilon_gaussian

    # it evaluates log(1 - 1) = -inf, rightly, where the divergence is below double precision
    with np.errstate(divide="ignore"):
        eps = float(get_epsilon_gaussian(1 / mu, delta, tol=1e-12))
    return eps + 1e-12 if eps > 0 else 0.0  # its root may be 1e-12 too low


def _grid(losses: list[tuple[float, float]]) -> float:
    """Spacing of the grid: 1e-4, but within 0.5 % and 10 % of the standard deviation of a step's loss.

    Chords add at most grid^2 / 4 to the variance of every step, at least q^2 mu^2: a finer grid changes epsilon by less
    than 1e-5 of itself, a coarser one can double it.  10 % adds less than 0.1 %.
    """
    deviation = min(q * mu for q, mu in losses)
    wanted = max(0.005 * deviation, min(_GRID, 0.1 * deviation))
    return max(wanted, max(2 * _loss_bound(q, mu) for q, mu in losses) / _MAX_POINTS)


def _loss_bound(q: float, mu: float) -> float:
    """log(1 - q + q P/Q), `_TAIL` standard deviations beyond the mean of P: the largest loss that is kept."""
    top = math.log(q) + mu * (_TAIL + mu / 2)
    return float(np.logaddexp(math.log1p(-q), top)) if q < 1 else top


def _distribution(q: float, mu: float, sampling: str, grid: float) -> Any:
    """The privacy loss distribution of one step, on the grid."""
    from dp_accounting.pld.pld_pmf import create_pmf_pessimistic_connect_dots_fixed_gap as connect_dots
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

    reach = math.ceil(_loss_bound(q, mu) / grid)
    eps = np.arange(-reach, reach + 1, dtype=np.float64) * grid
    if sampling == "poisson":
        # neither direction loses more than -log(1 - q) on its short side; the grid need not go further
        short = min(reach, math.ceil(-math.log1p(-q) / grid))
        long_left, long_right = eps[: reach + short + 1], eps[reach - short :]
        return PrivacyLossDistribution(
            connect_dots(grid, -short, reach, _remove(long_right, q, mu)),
            connect_dots(grid, -reach, short, _add(long_left, q, mu)),
        )
    curve = np.concatenate([_add(eps[:reach], q, mu), _remove(eps[reach:], q, mu)])
    return PrivacyLossDistribution(connect_dots(grid, -reach, reach, curve))


def _remove(eps: Array, q: float, mu: float) -> Array:
    """H_eps((1-q)Q + qP || Q) = q H_l(P || Q), e^l = (e^eps - (1-q)) / q;  1 - e^eps where that is not positive."""
    inside = eps > math.log1p(-q) if q < 1 else np.full(eps.shape, True)
    delta, e = np.empty_like(eps), eps[inside]
    delta[~inside] = -np.expm1(eps[~inside])
    # e^eps overflows at large losses, so the logarithm is taken of what is left after dividing by it
    log_alpha = e + np.log(-np.expm1(-e) + q * np.exp(-e)) - math.log(q)
    delta[inside] = q * _gaussian(log_alpha, mu)
    return np.clip(delta, 0, 1)


def _add(eps: Array, q: float, mu: float) -> Array:
    """H_eps(Q || (1-q)Q + qP) = c H_l(Q || P), c = 1 - (1-q)e^eps, e^l = q e^eps / c;  0 where c is not positive."""
    delta = np.zeros_like(eps)
    inside = eps < -math.log1p(-q) if q < 1 else np.full(eps.shape, True)
    e = eps[inside]
    log_c = np.log(-np.expm1(e + math.log1p(-q))) if q < 1 else np.zeros_like(e)
    delta[inside] = np.exp(log_c) * _gaussian(math.log(q) + e - log_c, mu)
    return np.clip(delta, 0, 1)


def _gaussian(l: Array, mu: float) -> Array:
    """H_l(N(mu, 1) || N(0, 1)) = Phi(mu/2 - l/mu) - e^l Phi(-mu/2 - l/mu); by symmetry also H_l(Q || P)."""
    from scipy.special import log_ndtr, ndtr

    return ndtr(mu / 2 - l / mu) - np.exp(l + log_ndtr(-mu / 2 - l / mu))
