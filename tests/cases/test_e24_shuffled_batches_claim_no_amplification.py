"""E24 (ACC): shuffled batches, N = 1000, B = 100, 3 epochs, sigma = 1, delta = 1e-5: epsilon 8.3854 under zero-out.

Each row is used 3 times: mu = sqrt(3).  Origin: CASES.md.  Wrong: the Poisson figure, 4.178 (PLD) or 4.848 (RDP).
"""

from __future__ import annotations

import math

import pytest
from dp_accounting import get_epsilon_gaussian

from fiberdp.accounting import compose, epsilon
from fiberdp.sampling import Shuffle
from fiberdp.statement import account

SIZES = {"num_examples": 1_000, "batch_size": 100}


def test_three_passes_cost_three_full_releases():
    stated = account(**SIZES, steps=30, delta=1e-5, noise_multiplier=1.0, sampling="shuffle")
    assert stated["relation"] == "zero_out"
    assert stated["epsilon"] == pytest.approx(8.3854, rel=1e-5)
    assert stated["epsilon"] == pytest.approx(get_epsilon_gaussian(1 / math.sqrt(3), 1e-5), rel=1e-9)
    poisson = account(**SIZES, steps=30, delta=1e-5, noise_multiplier=1.0)
    assert poisson["epsilon"] == pytest.approx(4.178, abs=1e-3)
    assert poisson["alternatives"]["rdp_improved"]["epsilon"] == pytest.approx(4.848, abs=1e-3)


def test_step_by_step_charges_compose_to_the_same_and_a_begun_pass_is_paid_in_full():
    sampler = Shuffle(**SIZES)
    spent = [epsilon(compose(sampler.event(1.0, t) for t in range(steps)), 1e-5, relation=sampler.relation) for steps in (0, 1, 10, 11, 30)]
    assert spent[0] == 0
    assert spent[1] == spent[2] == pytest.approx(get_epsilon_gaussian(1.0, 1e-5), rel=1e-9)
    assert spent[3] == pytest.approx(get_epsilon_gaussian(math.sqrt(0.5), 1e-5), rel=1e-9)
    assert spent[4] == pytest.approx(8.3854, rel=1e-5)
