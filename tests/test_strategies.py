"""Strategy matrices: published optima, closed forms, and sensitivities that no pattern exceeds."""

from __future__ import annotations

import itertools
import math
import time

import numpy as np
import pytest

from fiberdp.mechanisms import Banded
from fiberdp.mechanisms.banded import READS
from fiberdp.mechanisms.bandmf import _loss as bandmf_loss
from fiberdp.mechanisms.bandmf import bandmf
from fiberdp.mechanisms.blt import _loss as blt_loss
from fiberdp.mechanisms.blt import blt
from fiberdp.mechanisms.strategies import Strategy, bisr, bsr, lambda_cgd, remaining, square_root
from fiberdp.types import Noise

STRATEGIES = {
    "bandmf": lambda n: bandmf(n, 3),
    "bsr": lambda n: bsr(n, 4),
    "bisr": lambda n: bisr(n, 3),
    "lambda-cgd": lambda n: lambda_cgd(n, 0.7),
    "blt": lambda n: blt(n, 2, 2, 3),
}
every_strategy = pytest.mark.parametrize("name", STRATEGIES)


def test_every_strategy_is_checked():
    assert set(STRATEGIES) == set(READS)


# ---- the optimum of BandMF ----


@pytest.mark.parametrize(("n", "b", "loss"), [(800, 4, 105.289), (800, 8, 56.742), (800, 16, 32.575), (200, 4, 28.4715)])
def test_bandmf_reaches_the_reference_loss(n, b, loss):
    """METHODS.md section 5."""
    found = bandmf(n, b)
    assert found.error() == pytest.approx(loss, abs=6e-4)
    assert len(found.a) == b
    assert np.dot(found.a, found.a) == pytest.approx(1, rel=1e-12)


def test_bandmf_coefficients_and_what_they_gain_over_the_square_root_and_white_noise():
    assert bandmf(800, 4).a == pytest.approx([0.59386, 0.50271, 0.464903, 0.422466], abs=2e-6)
    assert bsr(800, 4).error() == pytest.approx(125.685, abs=1e-3)
    assert Strategy(steps=800).error() == pytest.approx(400.5)


def test_bandmf_is_a_minimum():
    """Any coefficient moved by 1 %, renormalised, is worse."""
    best = bandmf(100, 4)
    for k, factor in itertools.product(range(4), (0.99, 1.01)):
        c = np.array(best.a)
        c[k] *= factor
        assert Strategy(steps=100, a=tuple(c / np.linalg.norm(c))).error() > best.error()


def test_bandmf_takes_less_than_five_seconds_for_800_steps_and_16_bands():
    bandmf.cache_clear()
    started = time.process_time()
    bandmf(800, 16)
    assert time.process_time() - started < 5
    assert bandmf(800, 16) is bandmf(800, 16)  # and is solved once


@pytest.mark.parametrize(("n", "b"), [(1, 1), (1, 8), (5, 1), (5, 8)])
def test_more_bands_than_steps_are_the_steps(n, b):
    for found in (bandmf(n, b), bsr(n, b)):
        assert len(found.a) == min(n, b)


def test_loss_of_a_strategy_is_that_of_its_matrix():
    """mean_t ||(A C^{-1})_t||^2 with A the prefix sums."""
    for strategy in (bandmf(30, 4), bisr(30, 4), blt(30, 3, 6, 5), Strategy(steps=30)):
        rows = np.tril(np.ones((30, 30))) @ np.linalg.inv(strategy.matrix())
        assert strategy.error() == pytest.approx((rows**2).sum(1).mean(), rel=1e-9)


@pytest.mark.parametrize(
    ("loss", "x"),
    [
        (lambda x: bandmf_loss(x, remaining(40)), np.array([0.6, 0.3, 0.2])),
        (lambda x: blt_loss(x, 40, 10, 4), np.array([0.5, 2.0, -1.0, -2.5, -3.0, -1.5])),
        (lambda x: blt_loss(x, 40, 40, 1), np.array([3.0, 0.1, -2.0, -1.5])),
    ],
)
def test_gradients_of_the_losses_equal_central_differences(loss, x):
    h = 1e-6
    numeric = [(loss(x + h * e)[0] - loss(x - h * e)[0]) / (2 * h) for e in np.eye(len(x))]
    np.testing.assert_allclose(loss(x)[1], numeric, rtol=1e-6, atol=1e-8)


# ---- closed forms ----


def test_bsr_coefficients_are_central_binomials_normalised():
    r = np.array([math.comb(2 * k, k) / 4**k for k in range(6)])
    np.testing.assert_allclose(square_root(6), r)
    np.testing.assert_allclose(bsr(20, 6).a, r / np.linalg.norm(r))


def test_bisr_noising_coefficients_and_matrix():
    strategy = bisr(6, 4)
    assert strategy.b == (1.0, -0.5, -0.125, -0.0625)
    inverse = sum(b * np.eye(6, k=-j) for j, b in enumerate(strategy.b))
    np.testing.assert_allclose(strategy.matrix() @ inverse, np.eye(6), atol=1e-14)


def test_lambda_cgd_is_d_times_a_difference_and_its_columns_have_norm_1():
    strategy = lambda_cgd(7, 0.6)
    inverse = np.linalg.inv(strategy.matrix())
    d = [math.sqrt((1 - 0.6 ** (2 * (7 - t))) / (1 - 0.36)) for t in range(7)]
    np.testing.assert_allclose(inverse, np.diag(d) @ (np.eye(7) - 0.6 * np.eye(7, k=-1)), atol=1e-14)
    np.testing.assert_allclose(np.linalg.norm(strategy.matrix(), axis=0), 1)


def test_blt_is_what_its_buffers_generate_and_its_filter_is_their_arma():
    strategy = blt(60, 3, 12, 5)
    c = [1.0] + [sum(omega * theta**j for theta, omega in strategy.buffers) for j in range(59)]
    np.testing.assert_allclose(strategy.coefficients(), c, rtol=1e-9)
    assert all(0 < theta < 1 and omega > 0 for theta, omega in strategy.buffers)
    assert (len(strategy.a), len(strategy.b), strategy.order) == (4, 4, 3)


def test_blt_beats_its_single_buffer_the_square_root_and_bisr_for_several_uses():
    """error times squared sensitivity, n = 400, 8 uses 50 apart."""

    def loss(strategy):
        return strategy.error() * strategy.sensitivity_squared(50, 8)

    found = [loss(blt(400, buffers, 50, 8)) for buffers in (1, 2, 4, 6)]
    assert found == pytest.approx(sorted(found, reverse=True), rel=1e-6)
    assert found[2] < found[0]
    assert found[2] < min(loss(Strategy(steps=400, a=tuple(square_root(400)))), loss(bisr(400, 8)), loss(Strategy(steps=400)))


# ---- sensitivity ----


def brute_force(C, separation, uses):
    """max over every pattern of at most `uses` steps at least `separation` apart, and every sign of their contributions."""
    n, best = len(C), 0.0
    for size in range(1, uses + 1):
        for pattern in itertools.combinations(range(n), size):
            if all(b - a >= separation for a, b in itertools.pairwise(pattern)):
                for signs in itertools.product((1, -1), repeat=size - 1):
                    best = max(best, float(((C[:, pattern] @ np.array((1, *signs))) ** 2).sum()))
    return best


@pytest.mark.parametrize("separation", [1, 2, 3, 5])
@pytest.mark.parametrize("uses", [1, 2, 4])
@every_strategy
def test_sensitivity_is_the_maximum_over_all_patterns(name, separation, uses):
    strategy = STRATEGIES[name](9)
    assert strategy.sensitivity_squared(separation, uses) == pytest.approx(brute_force(strategy.matrix(), separation, uses), rel=1e-9)


@pytest.mark.parametrize("a", [(1.0, -0.8, 0.3), (0.2, 1.0, 0.1, 0.7), (1.0, 0.1, 0.9), (1.0, 0.0, 0.0, -2.0)], ids=str)
@pytest.mark.parametrize(("separation", "uses"), [(1, 3), (2, 2), (2, 4), (3, 3), (4, 2), (8, 1)])
def test_sensitivity_of_any_sign_and_shape_is_never_too_low(a, separation, uses):
    strategy = Strategy(steps=8, a=a)
    true = brute_force(strategy.matrix(), separation, uses)
    assert true * (1 - 1e-12) <= strategy.sensitivity_squared(separation, uses) <= 4 * true


def test_sensitivity_beyond_the_bands_is_uses_times_the_norm():
    c = np.array(bandmf(100, 4).a)
    assert Strategy(steps=100, a=tuple(3 * c)).sensitivity_squared(10, 7) == pytest.approx(7 * 9)


def test_uses_that_do_not_fit_the_horizon_do_not_count():
    assert Strategy(steps=8).sensitivity_squared(3, 100) == Strategy(steps=8).sensitivity_squared(3, 3) == 3


# ---- the choice by name ----


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"strategy": "dct"}, "strategy='dct'"),
        ({"strategy": "bandmf", "decay": 0.5}, "decay=0.5"),
        ({"strategy": "lambda-cgd", "bands": 3}, "bands=3"),
        ({"strategy": "blt", "bands": 3}, "bands=3"),
        ({"strategy": "bsr", "buffers": 3}, "buffers=3"),
        ({"bands": 0}, "bands=0"),
        ({"bands": 2.5}, "bands=2.5"),
        ({"strategy": "lambda-cgd", "decay": 1.0}, "decay=1.0"),
        ({"strategy": "lambda-cgd", "decay": 0.0}, "decay=0.0"),
        ({"strategy": "blt", "buffers": 0}, "buffers=0"),
    ],
    ids=str,
)
def test_options_out_of_range_or_not_read_are_refused_in_one_line(options, named):
    with pytest.raises(ValueError, match=named) as error:
        Banded(**options)
    assert "\n" not in str(error.value)


@every_strategy
def test_the_noise_that_a_gate_declares_is_the_inverse_of_its_matrix(name):
    gate = Banded(strategy=name).gate(noise_multiplier=2.0, batch_size=4, steps=12, separation=8)
    inverse = np.linalg.inv(gate.strategy.matrix())
    for t in (0, 5, 11):
        noise = gate.noise(3.0, t)
        assert isinstance(noise, Noise)
        np.testing.assert_allclose(
            noise.std * np.array(noise.impulse_response(t + 1))[::-1],
            2.0 * 3.0 * gate.matrix_sensitivity / 4 * inverse[t, : t + 1], rtol=1e-8, atol=1e-12,
        )  # fmt: skip
