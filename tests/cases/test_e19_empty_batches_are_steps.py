"""E19 (SAMP): N = 100, q = .03: a batch is empty with probability .97^100 = .047553, and an empty batch is a step like any other.

SGD with lr = .1, B = 3, sigma = 1, C = 1: the weights move by -0.1 z/3, the optimizer's and the filter's state advance, one step is
charged.  Origin: CASES.md (opacus#161, #522, #530; FL4Health#114).  Wrong: an exception, a skipped step, NaN from the mean of nothing.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import fiberdp
from fiberdp import reference
from fiberdp.accounting import compose
from fiberdp.engines import ENGINES
from fiberdp.optim import Constant
from fiberdp.sampling import Poisson

KEYS = fiberdp.Keys.seeded(19)
N, B, D = 100, 3, 6
X = torch.randn(N, D, generator=torch.Generator().manual_seed(19), dtype=torch.float64)


@pytest.fixture(autouse=True)
def _short_receipt(monkeypatch):
    """4 steps instead of 64: the receipt has its own tests, and on a model this small it would take all the time."""
    monkeypatch.setattr("fiberdp.trainer.receipt_steps", lambda numel: 4)


class EmptyAt(Poisson):
    """Batches 0 and 2 are empty, the others are as drawn."""

    def indices(self, stream, step):
        drawn = super().indices(stream, step)
        return drawn[:0] if step in (0, 2) else drawn


class Square(nn.Module):
    """f(w; x) = |w - x|^2/2, whose gradient is w - x."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(D, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.w - x).square().sum(1) / 2


def private(method, engine, steps=1):
    plan = fiberdp.plan(method=method, num_examples=N, batch_size=B, steps=steps, noise_multiplier=1.0, delta=1e-3, clip_norm=1.0)
    plan = replace(plan, method=replace(plan.method, schedule=Constant()), sampler=EmptyAt(num_examples=N, batch_size=B))
    return plan.private(Square(), lambda m, x: m(x), X, keys=KEYS, engine=engine)


def z(step):
    return KEYS.stream("noise").normal(step, 0, D, dtype=torch.float64)


def test_a_batch_is_empty_with_probability_0_0476():
    """10,000 steps: the standard error is .0021, and 4.5 of them .0096."""
    plan = fiberdp.plan(method="dp-sgd", num_examples=N, batch_size=B, steps=1, noise_multiplier=1.0, delta=1e-3, clip_norm=1.0)
    stream, n, p = KEYS.stream("data"), 10_000, 0.97**100
    assert p == pytest.approx(0.047553, abs=5e-7)
    empty = sum(len(plan.sampler.indices(stream, step)) == 0 for step in range(n)) / n
    bound = 4.5 * (p * (1 - p) / n) ** 0.5
    assert abs(empty - p) < bound
    assert abs(0.967**100 - p) > bound  # a rate a tenth too high would be seen
    assert p > bound  # and so would a sampler that draws again until there is an example


@pytest.mark.parametrize("engine", ENGINES)
def test_sgd_moves_by_the_noise_alone(engine):
    run = private(fiberdp.method("dp-sgd", lr=0.1, momentum=0.0), engine)
    assert len(run.plan.sampler.indices(KEYS.stream("data"), 0)) == 0
    run.step()
    torch.testing.assert_close(run.flat.theta, 1 - 0.1 * z(0) / 3, rtol=1e-12, atol=0)
    torch.testing.assert_close(run.optimizer.moments["m"], z(0) / 3, rtol=1e-12, atol=0)
    torch.testing.assert_close(run.optimizer.d, -0.1 * z(0) / 3, rtol=1e-12, atol=1e-15)
    assert run.optimizer.t == len(run.ledger) == 1
    assert run.ledger.event() == compose([Poisson(num_examples=N, batch_size=B).event(1.0, 0)])


@pytest.mark.parametrize("engine", ENGINES)
def test_filter_and_moments_advance_on_every_empty_batch(engine):
    """FiBeR in step with its reference through the batches: empty, drawn, empty, drawn."""
    steps, lr = 4, 0.05
    run = private(fiberdp.method("fiber", lr=lr), engine, steps)
    batches = [run.plan.sampler.indices(KEYS.stream("data"), t).tolist() for t in range(steps)]
    assert [len(batch) > 0 for batch in batches] == [False, True, False, True]
    trajectory = reference.fiber(
        np.ones(D), lambda theta, i: theta - X[i].numpy(), batches, [z(t).numpy() for t in range(steps)], C=1.0, sigma=1.0, B=B,
        lr=lambda t: lr, omega=0.9, kappa=0.6, gamma=0.7,
    )  # fmt: skip
    for t in range(steps):
        before = {name: value.clone() for name, value in run.optimizer.state_dict().items()}
        run.step()
        torch.testing.assert_close(run.flat.theta, torch.from_numpy(trajectory[t + 1]), rtol=1e-9, atol=1e-12)
        after = run.optimizer.state_dict()
        assert {"theta", "g_tilde", "r", "m", "v", "d"} <= after.keys()
        assert all(not torch.equal(after[name], value) for name, value in before.items())
        assert run.optimizer.t == len(run.ledger) == t + 1
    first = private(fiberdp.method("fiber", lr=lr), engine, steps)
    first.step()
    for name in ("g_tilde", "r"):  # g~_0 = r_0 = omega g_0 from rest
        torch.testing.assert_close(first.optimizer.filter_state[name], 0.9 * z(0) / 3, rtol=1e-12, atol=0)


@pytest.mark.parametrize("engine", ENGINES)
def test_the_mean_of_nothing_is_caught(monkeypatch, engine):
    """Planted: the sum is divided by the realised batch size before the gate."""
    run = private(fiberdp.method("dp-sgd", lr=0.1, momentum=0.0), engine)
    right = run.pipeline._clipped_sum

    def mean(take, indices, *args, **kwargs):
        clipped = right(take, indices, *args, **kwargs)
        return replace(clipped, total=clipped.total * B / torch.tensor(len(indices)))

    run.prove()
    monkeypatch.setattr(run.pipeline, "_clipped_sum", mean)
    run.step()
    assert run.flat.theta.isnan().all()
