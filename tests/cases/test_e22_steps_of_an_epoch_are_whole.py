"""E22 (SAMP): E epochs of L batches are E L steps: (1, 93) -> 93, (1, 99) -> 99, (3, 75) -> 225.  Origin: CASES.md.

Wrong: int(E / (1 / L)), which gives 92, 98, 224.
"""

from __future__ import annotations

import pytest

from fiberdp.sampling import SAMPLERS


@pytest.mark.parametrize("sampling", SAMPLERS)
@pytest.mark.parametrize(("epochs", "batches", "steps"), [(1, 93, 93), (1, 99, 99), (3, 75, 225)])
def test_epochs_times_batches(sampling, epochs, batches, steps):
    sampler = SAMPLERS[sampling](num_examples=32 * batches, batch_size=32)
    assert epochs * sampler.steps_per_epoch == steps


@pytest.mark.parametrize(("sampling", "batches"), [("poisson", 9), ("fixed_size", 9), ("shuffle", 10)])
def test_an_incomplete_batch_ends_a_pass_only_where_a_pass_must_use_every_row(sampling, batches):
    assert SAMPLERS[sampling](num_examples=99, batch_size=10).steps_per_epoch == batches


def test_cifar10_of_the_paper_is_800_steps():
    assert 80 * SAMPLERS["poisson"](num_examples=50_000, batch_size=5_000).steps_per_epoch == 800
