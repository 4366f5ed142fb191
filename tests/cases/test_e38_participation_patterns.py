"""E38 (FILT): the sensitivity of a matrix mechanism counts every use of an example that its pattern allows.

Toeplitz (1, .5), n = 8, separation 2, at most 4 uses: squared sensitivity 5.0 (columns 0, 2, 4, 6); wrong 1.25 (n taken as 2).  With
noise std 5, C = 1, delta = 1e-5: true epsilon 1.7601, claimed .8197.  Overlapping bands (1, .5, .25), n = 6, separation 2, 3 uses: 4.875,
not 3 * 1.3125 = 3.9375.  Identity, 4 uses: 4.  Origin: CASES.md.
"""

from __future__ import annotations

import math

import pytest
from dp_accounting import GaussianDpEvent, get_epsilon_gaussian

import fiberdp
from fiberdp.accounting import compose, epsilon
from fiberdp.mechanisms import Banded
from fiberdp.mechanisms.strategies import Strategy

STD, DELTA = 5.0, 1e-5


@pytest.mark.parametrize(
    ("a", "n", "uses", "squared"), [((1.0, 0.5), 8, 4, 5.0), ((1.0, 0.5, 0.25), 6, 3, 4.875), ((1.0,), 8, 4, 4.0), ((1.0, 0.5), 8, 1, 1.25)]
)
def test_squared_sensitivity_of_the_pattern(a, n, uses, squared):
    assert Strategy(steps=n, a=a).sensitivity_squared(2, uses) == pytest.approx(squared, rel=1e-12)


def test_overlapping_bands_are_not_the_sum_of_their_columns():
    strategy = Strategy(steps=6, a=(1.0, 0.5, 0.25))
    assert strategy.sensitivity_squared(2, 3) > 3 * strategy.sensitivity_squared(6, 1) == pytest.approx(3.9375)


def test_epsilon_of_all_four_uses_and_of_what_one_use_would_claim():
    def price(squared):
        return epsilon(GaussianDpEvent(STD / math.sqrt(squared)), DELTA, relation="add_or_remove_one")

    strategy = Strategy(steps=8, a=(1.0, 0.5))
    assert price(strategy.sensitivity_squared(2, 4)) == pytest.approx(1.7601, abs=1e-4)
    assert price(strategy.sensitivity_squared(8, 1)) == pytest.approx(0.8197, abs=1e-4)


def test_a_plan_charges_every_use_of_its_cyclic_sampler():
    """T = 8, 2 groups, lambda-CGD: 4 uses.  What is added to the sum is sigma C times the whole pattern's sensitivity."""
    method = fiberdp.Method(mechanism=Banded(strategy="lambda-cgd", decay=0.5), update=fiberdp.optim.SGD(lr=0.1))
    plan = fiberdp.plan(method=method, num_examples=40, batch_size=20, steps=8, noise_multiplier=STD, delta=DELTA, clip_norm=1.0)
    columns = plan.mechanism.strategy.matrix()[:, ::2].sum(1)
    assert plan.sampler.groups == 2
    assert plan.mechanism.noise(1.0, 7).std * 20 == pytest.approx(STD * math.sqrt(float(columns @ columns)))
    assert plan.mechanism.matrix_sensitivity > 2  # four unit columns that overlap
    assert plan.epsilon == pytest.approx(get_epsilon_gaussian(STD, DELTA), rel=1e-9)
    assert plan.price(compose(plan.event(t) for t in range(8))) == plan.epsilon
