"""CASES E30: RDP of the Poisson-sampled Gaussian at a tiny q, where digits are lost to 1 + tiny, and at large orders.

The case's two values of RDP(3) are 2e-5 and 4e-4 too small, as 60 digits show; the right ones stand here.
"""

from __future__ import annotations

import mpmath
import pytest
from dp_accounting import GaussianDpEvent, NeighboringRelation, PoissonSampledDpEvent
from dp_accounting.rdp import RdpAccountant

from fiberdp.accounting.renyi import poisson_gaussian

E30 = [  # alpha, sigma, q, RDP
    (2, 1.0, 1e-6, 1.71828182846e-12),
    (2, 4.0, 1e-6, 6.44944589179e-14),
    (2, 1.0, 0.01, 1.71813422075e-4),
    (3, 1.0, 1e-6, 2.57742970803e-12),
    (3, 4.0, 1e-6, 9.67416947502e-14),
    (256, 0.2, 0.01, 3195.37677032),
    (64, 0.1, 0.01, 3195.32173187),
    (1024, 0.05, 1e-4, 204790.780656),
]


def exact(alpha: int, sigma: float, q: float) -> float:
    """Sixty digits, the sum as it is defined."""
    with mpmath.workdps(60):
        p = mpmath.mpf(q)
        terms = (
            mpmath.binomial(alpha, k) * (1 - p) ** (alpha - k) * p**k * mpmath.exp(mpmath.mpf(k * (k - 1)) / (2 * mpmath.mpf(sigma) ** 2))
            for k in range(alpha + 1)
        )
        return float(mpmath.log(sum(terms)) / (alpha - 1))


@pytest.mark.parametrize(("alpha", "sigma", "q", "right"), E30)
def test_divergence_is_exact(alpha, sigma, q, right):
    assert exact(alpha, sigma, q) == pytest.approx(right, rel=1e-11)
    assert float(poisson_gaussian([alpha], q, sigma)[0]) == pytest.approx(right, rel=1e-10)


@pytest.mark.parametrize("sigma", [0.3, 1.0, 30.0])
@pytest.mark.parametrize("q", [1e-9, 1e-4, 0.1, 0.999])
def test_divergence_is_that_of_sixty_digits(sigma, q):
    orders = [2, 3, 7, 63, 256]
    found = poisson_gaussian(orders, q, sigma)
    assert found == pytest.approx([exact(alpha, sigma, q) for alpha in orders], rel=1e-11)


def test_the_library_loses_digits_for_a_tiny_sample():
    """dp_accounting subtracts from 1: at q = 1e-8 six digits are left, in either direction."""
    accountant = RdpAccountant([10.0], NeighboringRelation.ADD_OR_REMOVE_ONE)
    accountant.compose(PoissonSampledDpEvent(1e-8, GaussianDpEvent(30.0)))
    assert abs(accountant.rdp[0] / exact(10, 30.0, 1e-8) - 1) > 1e-7


def test_between_whole_orders_the_chord_is_above():
    """log A is convex: against the integral that defines A, at 40 digits."""
    sigma, q = 1.5, 0.05
    orders = [1.1, 1.5, 2.5, 5.3]
    for order, bound in zip(orders, poisson_gaussian(orders, q, sigma)):
        with mpmath.workdps(40):

            def integrand(x, order=order):
                ratio = 1 - q + q * mpmath.exp((2 * x - 1) / (2 * sigma**2))
                return mpmath.npdf(x, 0, sigma) * ratio**order

            true = float(mpmath.log(mpmath.quad(integrand, [-30, -5, 0, 5, 10, 40])) / (order - 1))
        assert true <= bound * (1 + 1e-12)
        assert bound < 2 * true


def test_ends():
    assert poisson_gaussian([2, 3.5], 0.0, 1.0).tolist() == [0, 0]
    assert poisson_gaussian([2, 3.5], 1.0, 2.0) == pytest.approx([0.25, 3.5 / 8])
