"""E11 (SUP): BatchNorm in training mode is refused before step 1; frozen it is exact; nothing is replaced behind the user's back.

Origin: CASES.md (opacus#567, #315, #472).  Wrong: statistics shared by the batch; GroupNorm(4, 4) in its place, which gives 0 on [B, 4].
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fiberdp
from fiberdp.clipping import Flat
from fiberdp.engines import ENGINES, Loss
from fiberdp.flat import FlatParameters
from fiberdp.types import Probe


def model():
    torch.manual_seed(11)
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1))
    net(torch.randn(64, 3))  # moves the running statistics
    return net


def loss_fn(m, x):
    return m(x).squeeze(1)


@pytest.mark.parametrize("engine", ENGINES)
def test_training_mode_is_refused_before_the_first_step(engine, monkeypatch):
    monkeypatch.setattr("fiberdp.trainer.receipt_steps", lambda numel: 4)
    plan = fiberdp.plan(
        method=fiberdp.method("dp-sgd"), num_examples=4, batch_size=4, steps=1, noise_multiplier=1.0, delta=1e-5, clip_norm=1.0
    )
    net = model()
    with pytest.raises(ValueError, match="layer 1 is BatchNorm1d in training mode"):
        plan.private(net, loss_fn, torch.randn(4, 3), keys=fiberdp.Keys.seeded(1), engine=engine)
    kinds = [type(layer) for layer in net]
    run = plan.private(net.eval(), loss_fn, torch.randn(4, 3), keys=fiberdp.Keys.seeded(1), engine=engine)
    statistics = net[1].running_mean.clone()
    run.step()
    assert [type(layer) for layer in net] == kinds
    assert torch.equal(net[1].running_mean, statistics)


@pytest.mark.parametrize("engine", ENGINES)
def test_with_frozen_statistics_the_sum_is_that_of_examples_alone(engine):
    net = model().eval().double()
    flat, x = FlatParameters(net), torch.randn(5, 3, dtype=torch.float64)
    right = torch.zeros_like(flat.theta)
    for i in range(5):
        net.zero_grad()
        loss_fn(net, x[i : i + 1]).sum().backward()
        g = torch.cat([p.grad.flatten() for p in net.parameters()])
        right += g / max(1.0, float(g.norm()) / 0.5)
    ours = ENGINES[engine](flat, Loss(net, loss_fn)).clipped_sum([Probe(1.0, 0.0)], None, x, Flat(clip_norm=0.5), seed=0).total
    assert float((ours - right).abs().max()) < 1e-6
