"""E23 (SAMP, CAL): N = 14732, 3 epochs, 4 x 256 accumulated, epsilon 4, delta 2e-5: T = 42, sigma .9011 PLD, .9739 RDP.

Origin: CASES.md (jax_privacy#234, #288, #372).  Wrong: q or T of the micro-batch, giving sigma 7.683 / 8.247 or .439.
"""

from __future__ import annotations

import pytest

from fiberdp.sampling import Poisson
from fiberdp.statement import account

MICRO_BATCH, ACCUMULATED = 4, 256


def test_sigma_of_1024_examples_a_step_for_42_steps():
    sampler = Poisson(num_examples=14_732, batch_size=MICRO_BATCH * ACCUMULATED)
    assert sampler.sampling_probability == 1024 / 14_732
    assert 3 * sampler.steps_per_epoch == 42
    stated = account(num_examples=14_732, batch_size=1024, steps=42, delta=2e-5, epsilon=4)
    # the case gives four digits; the round trip is what holds exactly
    assert stated["noise_multiplier"] == pytest.approx(0.9011, abs=1.5e-4)
    assert stated["alternatives"]["rdp_improved"]["noise_multiplier"] == pytest.approx(0.9739, abs=1.5e-4)
    assert 0.99 * 4 <= stated["epsilon"] <= 4
