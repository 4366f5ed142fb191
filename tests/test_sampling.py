"""Claims of the samplers: who is in a batch, and that the charge is the charge of that sampler."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from dataclasses import FrozenInstanceError

import pytest
import torch

from fiberdp._random import Keys
from fiberdp.accounting import compose, epsilon
from fiberdp.sampling import SAMPLERS, Cyclic, FixedSize, Poisson, Shuffle, sampler

DATA = Keys.seeded(1).stream("data")


def inclusion(samples: torch.Tensor) -> tuple[float, float]:
    """Mean inclusion of one example and of a pair, from samples [draws, N] of booleans."""
    size = samples.sum(1).double()
    n = samples.shape[1]
    return float(size.mean() / n), float((size * (size - 1)).mean() / (n * (n - 1)))


def test_poisson_inclusion_of_one_and_of_a_pair_e25():
    """10**5 draws of 10 at q = .3, as one step of 10**6: mean .30 +- .005, pair .09 +- .003 (CASES E25)."""
    chosen = torch.zeros(10**6, dtype=torch.bool)
    chosen[Poisson(num_examples=10**6, batch_size=3 * 10**5).indices(DATA, 0)] = True
    one, pair = inclusion(chosen.view(10**5, 10))
    assert one == pytest.approx(0.30, abs=0.005)
    assert pair == pytest.approx(0.09, abs=0.003)


def batches(sampler, steps: int) -> torch.Tensor:
    chosen = torch.zeros(steps, sampler.num_examples, dtype=torch.bool)
    for step in range(steps):
        chosen[step, sampler.indices(DATA, step)] = True
    return chosen


def test_poisson_steps_are_fresh_draws():
    """4000 steps, N = 10, q = .3: inclusion within 5 standard errors, and none between one step and the next."""
    chosen = batches(Poisson(num_examples=10, batch_size=3), 4000)
    one, pair = inclusion(chosen)
    assert one == pytest.approx(0.30, abs=5 * (0.21 / 40_000) ** 0.5)
    assert pair == pytest.approx(0.09, abs=0.01)
    both = (chosen[1:] & chosen[:-1]).double().mean()
    assert float(both) == pytest.approx(0.09, abs=5 * (0.09 * 0.91 / 39_990) ** 0.5)


def test_the_pair_test_has_power_fixed_size_is_rejected():
    """Exactly 3 of 10 has the same mean, but pair inclusion 3 * 2 / (10 * 9) = .0667."""
    one, pair = inclusion(batches(FixedSize(num_examples=10, batch_size=3), 4000))
    assert one == pytest.approx(0.3, abs=1e-9)
    assert pair == pytest.approx(6 / 90, abs=1e-9)
    assert abs(pair - 0.09) > 0.003


def test_poisson_empty_batch_is_a_batch_e19():
    """N = 100, q = .03: P(empty) = .97^100 = .0476; 3000 steps, 5 standard errors."""
    sampler = Poisson(num_examples=100, batch_size=3)
    drawn = [sampler.indices(DATA, step) for step in range(3000)]
    empty = [indices for indices in drawn if len(indices) == 0]
    assert len(empty) / 3000 == pytest.approx(0.047553, abs=5 * (0.047553 * 0.952447 / 3000) ** 0.5)
    assert empty[0].dtype == torch.int64
    assert empty[0].shape == (0,)


@pytest.mark.parametrize("sampling", ["poisson", "fixed_size"])
def test_indices_are_ascending_int64_and_a_full_batch_is_everyone(sampling):
    indices = SAMPLERS[sampling](num_examples=1000, batch_size=300).indices(DATA, 5)
    assert indices.dtype == torch.int64
    assert bool((indices.diff() > 0).all())
    everyone = SAMPLERS[sampling](num_examples=50, batch_size=50).indices(DATA, 5)
    assert everyone.tolist() == list(range(50))


def test_fixed_size_draws_every_subset_equally_often():
    """10 subsets of 2 of 5 in 6000 steps: chi-square with 9 degrees of freedom below 39 (p = 1e-5)."""
    sampler = FixedSize(num_examples=5, batch_size=2)
    counts = dict.fromkeys(itertools.combinations(range(5), 2), 0)
    for step in range(6000):
        first, second = sampler.indices(DATA, step).tolist()
        counts[first, second] += 1
    assert sum((n - 600) ** 2 / 600 for n in counts.values()) < 39


def test_shuffle_pass_uses_every_row_once_and_passes_differ():
    sampler = Shuffle(num_examples=103, batch_size=10)
    passes = [torch.cat([sampler.indices(DATA, e * sampler.steps_per_epoch + b) for b in range(sampler.steps_per_epoch)]) for e in range(3)]
    for order in passes:
        assert order.dtype == torch.int64
        assert order.sort().values.tolist() == list(range(103))
    assert not torch.equal(passes[0], passes[1])
    assert len(sampler.indices(DATA, 10)) == 3  # the last batch is short; the divisor stays batch_size


def test_shuffle_memo_belongs_to_one_stream_and_one_pass_and_cannot_be_written_to():
    sampler, other = Shuffle(num_examples=20, batch_size=10), Keys.seeded(2).stream("data")
    first = sampler.indices(DATA, 0)
    assert not torch.equal(first, sampler.indices(other, 0))
    sampler.indices(DATA, 0).zero_()
    assert torch.equal(first, sampler.indices(DATA, 0))
    assert torch.equal(first.sort().values, torch.tensor(sorted(set(range(20)) - set(sampler.indices(DATA, 1).tolist()))))


@pytest.mark.parametrize("sampling", SAMPLERS)
def test_a_step_is_the_same_whenever_it_is_drawn(sampling):
    sampler = SAMPLERS[sampling](num_examples=60, batch_size=20)
    forwards = [sampler.indices(DATA, step).tolist() for step in range(7)]
    assert [sampler.indices(DATA, step).tolist() for step in reversed(range(7))] == forwards[::-1]
    assert len({json.dumps(batch) for batch in forwards}) > 1


@pytest.mark.parametrize("sampling", SAMPLERS)
@pytest.mark.parametrize("steps", [0, 6])
def test_charge_is_the_sum_of_its_steps(sampling, steps):
    sampler = SAMPLERS[sampling](num_examples=100, batch_size=20)
    accountant = sampler.accountant
    together = epsilon(sampler.charge(1.5, steps), 1e-5, relation=sampler.relation, accountant=accountant)
    one_by_one = compose(sampler.event(1.5, step) for step in range(steps))
    assert together == epsilon(one_by_one, 1e-5, relation=sampler.relation, accountant=accountant)


def test_cyclic_uses_of_an_example_lie_whole_rounds_apart():
    """N = 300, 5 groups, p = 1/2, 200 rounds: nobody leaves their group; inclusion within 5 standard errors; rounds are fresh draws."""
    cyclic = Cyclic(num_examples=300, batch_size=30, groups=5)
    assert (cyclic.sampling_probability, cyclic.separation, cyclic.steps_per_epoch) == (0.5, 5, 10)
    chosen = batches(cyclic, 1000).view(200, 5, 300)
    assert bool((chosen.any(0).sum(0) == 1).all())  # each example in one group, which all of them join in 200 rounds
    used = chosen.any(1).double()
    assert float(used.mean()) == pytest.approx(0.5, abs=5 * (0.25 / 60_000) ** 0.5)
    assert float((used[1:] * used[:-1]).mean()) == pytest.approx(0.25, abs=5 * (0.1875 / 59_700) ** 0.5)


def test_cyclic_groups_are_uniform_and_independent_and_belong_to_the_run():
    """N = 10**5 in 4 groups: chi-square with 3 degrees of freedom below 30; neighbours agree with probability 1/4."""
    sizes = {"num_examples": 10**5, "batch_size": 25_000, "groups": 4}
    group = torch.zeros(10**5, dtype=torch.int64)
    for step in range(4):
        group[Cyclic(**sizes).indices(DATA, step)] = step  # p = 1: the whole group
    counts = group.bincount(minlength=4).double()
    assert float((counts - 25_000).square().sum() / 25_000) < 30
    assert float((group[1:] == group[:-1]).double().mean()) == pytest.approx(0.25, abs=5 * (0.1875 / 1e5) ** 0.5)
    assert not torch.equal(Cyclic(**sizes).indices(Keys.seeded(2).stream("data"), 0), Cyclic(**sizes).indices(DATA, 0))


def test_cyclic_is_charged_a_round_at_its_first_step():
    cyclic = Cyclic(num_examples=100, batch_size=10, groups=4)
    kinds = [type(cyclic.event(1.0, step)).__name__ for step in range(6)]
    assert kinds == ["PoissonSampledDpEvent", *["NoOpDpEvent"] * 3, "PoissonSampledDpEvent", "NoOpDpEvent"]
    assert cyclic.event(1.0, 0).sampling_probability == 0.4
    for steps in (1, 4, 5, 9):
        assert compose(cyclic.event(1.5, step) for step in range(steps)).count == cyclic.charge(1.5, steps).count == -(-steps // 4)


def test_cyclic_with_one_group_is_priced_as_poisson():
    one, poisson = (make(num_examples=100, batch_size=10) for make in (Cyclic, Poisson))
    assert one.charge(1.5, 7) == poisson.charge(1.5, 7)


def test_groups_are_for_cyclic_sampling_and_as_many_as_the_data_allow():
    with pytest.raises(ValueError, match=r"^groups=11: .*Use at most 10 groups[^\n]*$"):
        Cyclic(num_examples=100, batch_size=10, groups=11)
    with pytest.raises(ValueError, match="groups=0"):
        Cyclic(num_examples=100, batch_size=10, groups=0)
    with pytest.raises(ValueError, match="only cyclic sampling has groups"):
        sampler("poisson", 100, 10, groups=2)
    with pytest.raises(ValueError, match="without groups"):
        sampler("cyclic", 100, 10)


def test_events_and_relations_name_the_sampler_that_draws():
    described = {
        name: (sampler.name, sampler.relation, type(sampler(num_examples=10, batch_size=2).event(1.0, 0)).__name__)
        for name, sampler in SAMPLERS.items()
    }
    assert described == {
        "poisson": ("poisson", "add_or_remove_one", "PoissonSampledDpEvent"),
        "fixed_size": ("fixed_size", "replace_one", "SampledWithoutReplacementDpEvent"),
        "shuffle": ("shuffle", "zero_out", "GaussianDpEvent"),
        "cyclic": ("cyclic", "add_or_remove_one", "PoissonSampledDpEvent"),
    }


@pytest.mark.parametrize("sampling", SAMPLERS)
@pytest.mark.parametrize(("n", "b"), [(10, 11), (0, 1), (10, 0), (10, 2.5), (10, True), (-5, -5)])
def test_impossible_sizes_are_refused_in_one_line(sampling, n, b):
    with pytest.raises(ValueError, match=r"^(num_examples|batch_size)=[^\n]*$"):
        SAMPLERS[sampling](num_examples=n, batch_size=b)


def test_samplers_are_frozen_and_keyword_only():
    sampler = Poisson(num_examples=10, batch_size=2)
    with pytest.raises(FrozenInstanceError):
        sampler.batch_size = 3  # type: ignore[misc]
    with pytest.raises(TypeError):
        Poisson(10, 2)  # type: ignore[misc]


def test_accounting_starts_without_torch():
    code = (
        "import sys; from fiberdp.statement import account; "
        "account(num_examples=10, batch_size=1, steps=1, delta=1e-3, noise_multiplier=1.0, sampling='shuffle'); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
