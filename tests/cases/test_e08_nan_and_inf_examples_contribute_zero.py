"""E08 (PREC): per-example gradients (3, 4), (nan, 1), (inf, 0), C = 1, sigma = 0: the sum is (0.6, 0.8); the step is taken and charged.

Origin: CASES.md (jax_privacy fb60609; L7).  Wrong: all NaN (0 * nan is nan, so a factor of zero is not enough), an exception, or a
skipped step, which tells that there was a NaN.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

import fiberdp
from fiberdp.engines import ENGINES
from fiberdp.engines.sums import squared_norms
from fiberdp.optim import Constant

KEYS = fiberdp.Keys.seeded(8)
PLAIN = replace(fiberdp.method("dp-sgd", lr=1.0, momentum=0.0), schedule=Constant())  # theta_1 = -g_0 from theta_0 = 0
X = torch.tensor([[3.0, 4.0], [math.nan, 1.0], [math.inf, 0.0]])
RIGHT = torch.tensor([0.6, 0.8])


@pytest.fixture(autouse=True)
def _short_receipt(monkeypatch):
    """4 steps instead of 64: the receipt has its own tests, and on a model this small it would take all the time."""
    monkeypatch.setattr("fiberdp.trainer.receipt_steps", lambda numel: 4)


class OneTensor(nn.Module):
    """f(w; x) = w.x, whose gradient is x."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.w * x).sum(1)


class TwoTensors(nn.Module):
    """The same function: the NaN is in one tensor's gradient only, and the whole example must go."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.zeros(())), nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a * x[:, 0] + self.b[0] * x[:, 1]


MODELS = {"one tensor": OneTensor, "two tensors": TwoTensors}


def private(model, x, engine, *, sigma=0.0, steps=1, method=PLAIN, micro_batch_size=None):
    n = len(x)
    plan = fiberdp.plan(method=method, num_examples=n, batch_size=n, steps=steps, noise_multiplier=sigma, delta=1e-5, clip_norm=1.0)
    return plan.private(model, lambda m, batch: m(batch), x, keys=KEYS, engine=engine, micro_batch_size=micro_batch_size)


@pytest.mark.parametrize("micro_batch_size", [1, 2, None])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("engine", ENGINES)
def test_only_the_finite_example_is_in_the_sum(engine, model, micro_batch_size):
    run = private(MODELS[model](), X, engine, micro_batch_size=micro_batch_size)
    run.step()
    torch.testing.assert_close(-3 * run.flat.theta, RIGHT, rtol=1e-5, atol=0)
    assert run.optimizer.t == len(run.ledger) == 1


@pytest.mark.parametrize("engine", ENGINES)
def test_the_step_is_noised_and_charged_as_with_clean_data(engine):
    run, clean = private(OneTensor(), X, engine, sigma=1.0), private(OneTensor(), torch.ones(3, 2), engine, sigma=1.0)
    run.step()
    clean.step()
    z = KEYS.stream("noise").normal(0, 0, 2)
    torch.testing.assert_close(-3 * run.flat.theta, RIGHT + z, rtol=1e-5, atol=1e-6)
    assert len(run.ledger) == 1
    assert run.ledger.event() == clean.ledger.event()


@pytest.mark.parametrize("engine", ENGINES)
def test_a_batch_of_nothing_else_is_a_step_of_noise(engine):
    run = private(OneTensor(), X[1:], engine, sigma=1.0)
    run.step()
    torch.testing.assert_close(run.flat.theta, -KEYS.stream("noise").normal(0, 0, 2) / 2, rtol=1e-6, atol=0)
    assert run.optimizer.t == len(run.ledger) == 1


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("method", ["dp-sgd", "disk", "fiber", "fiber-lookahead"])
def test_a_method_takes_all_its_steps_and_stays_finite(method, engine):
    run = private(TwoTensors(), X, engine, steps=3, method=fiberdp.method(method))
    assert len(list(run)) == len(run.ledger) == run.optimizer.t == 3
    assert run.flat.theta.isfinite().all()
    assert (run.flat.theta < 0).all()  # towards the finite example


def test_a_factor_of_zero_is_not_enough(monkeypatch):
    """The fault, planted: rows that are not finite are multiplied by 0 instead of overwritten."""

    def multiplied(leaves, clip, out):
        leaves = list(leaves)
        norms = torch.stack([squared_norms(u) for _, u in leaves]).sum(0).sqrt()
        factors = torch.where(norms.isfinite(), clip.factors(norms), 0.0).float()
        for slot, u in leaves:
            out[slot.start : slot.stop].add_(factors @ u.reshape(len(u), -1))
        return norms

    monkeypatch.setattr("fiberdp.engines.vmap.clipped_total", multiplied)
    run = private(OneTensor(), X, "vmap")
    run.step()
    assert run.flat.theta.isnan().any()
