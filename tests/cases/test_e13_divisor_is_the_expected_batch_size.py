"""E13 (SAMP): 16 examples expected, 14 and then 17 realised: the update is (clipped sum + noise)/16 both times.

Origin: CASES.md (opacus#420).  Wrong: /14 or /17, which also releases how many examples there were.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import fiberdp
from fiberdp.diagnostics import ReceiptError
from fiberdp.engines import ENGINES
from fiberdp.mechanisms import Gaussian
from fiberdp.optim import Constant
from fiberdp.sampling import Poisson
from fiberdp.types import ClippedSum

KEYS = fiberdp.Keys.seeded(13)
PLAIN = replace(fiberdp.method("dp-sgd", lr=1.0, momentum=0.0), schedule=Constant())  # theta_t - theta_{t+1} = g_t
N, B, SIGMA, C, D = 40, 16, 1.0, 0.8, 12_500  # D: as many coordinates as make the receipt short
REALISED = (14, 17)
X = torch.randn(N, D, generator=torch.Generator().manual_seed(13)) / 100  # norms of about 1.1: all are clipped
X[::3] /= 10  # a third is not


class Forced(Poisson):
    """Poisson sampling as it is charged, with the batch sizes of this case: the first 14, then the last 17."""

    def indices(self, stream, step):
        return torch.arange(14) if step % 2 == 0 else torch.arange(N - 17, N)


class Vector(nn.Module):
    """f(w; x) = w.x, whose gradient is x."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(D))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.w * x).sum(1)


def private(engine):
    plan = fiberdp.plan(method=PLAIN, num_examples=N, batch_size=B, steps=2, noise_multiplier=SIGMA, delta=1e-5, clip_norm=C)
    plan = replace(plan, sampler=Forced(num_examples=N, batch_size=B))
    return plan.private(Vector(), lambda m, batch: m(batch), X, keys=KEYS, engine=engine)


def expected(step):
    """The clipped sum and the noise on it."""
    rows = X[:14] if step == 0 else X[-17:]
    assert len(rows) == REALISED[step]
    return (rows * (C / rows.norm(dim=1, keepdim=True)).clamp(max=1)).sum(0), SIGMA * C * KEYS.stream("noise").normal(step, 0, D)


def updates(run):
    for step in (0, 1):
        before = run.flat.theta.clone()
        run.step()
        yield step, before - run.flat.theta


@pytest.mark.parametrize("engine", ENGINES)
def test_both_updates_are_divided_by_sixteen(engine):
    run = private(engine)
    for step, g in updates(run):
        clipped, noise = expected(step)
        torch.testing.assert_close(g, (clipped + noise) / 16, rtol=1e-5, atol=1e-6)
        wrong = (clipped + noise) / REALISED[step]
        assert float((g - wrong).norm()) > 0.05 * float(g.norm())
    assert len(run.ledger) == 2
    assert run.prove().std_charged == SIGMA * C / 16


@pytest.mark.parametrize("engine", ENGINES)
def test_a_sum_averaged_over_the_realised_batch_is_caught(monkeypatch, engine):
    """Planted before the gate, where the receipt, which sees noise alone, cannot see it: the update above is what catches it."""
    run = private(engine)
    right = run.pipeline._clipped_sum

    def averaged(take, indices, *args, **kwargs):
        clipped = right(take, indices, *args, **kwargs)
        return ClippedSum(clipped.total * (B / len(indices)), clipped.sensitivity)

    monkeypatch.setattr(run.pipeline, "_clipped_sum", averaged)
    for step, g in updates(run):
        clipped, noise = expected(step)
        torch.testing.assert_close(g, clipped / REALISED[step] + noise / 16, rtol=1e-5, atol=1e-6)
        assert not torch.allclose(g, (clipped + noise) / 16, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("realised", REALISED)
def test_noise_divided_by_the_realised_batch_is_refused(realised):
    run = private("vmap")
    run.pipeline.mechanism = Gaussian(noise_multiplier=SIGMA, batch_size=realised)
    with pytest.raises(ReceiptError):
        run.step()
    assert run.receipt.std_ratio == pytest.approx(16 / realised, rel=0.02)
    assert len(run.ledger) == 0
