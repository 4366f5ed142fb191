"""E05 (CLIP): Linear(2, 2), weight frozen, output summed, x = (3, 4): norm sqrt(2) for any x; unfreezing in mid-run is refused.

Origin: CASES.md (opacus#436, #542, #729).  Wrong: sqrt(52), the frozen weight counted; noise or state for it.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import fiberdp
from fiberdp.clipping import Flat
from fiberdp.engines import ENGINES, Loss
from fiberdp.flat import FlatParameters
from fiberdp.types import Probe


def loss_fn(model, x):
    return model(x).sum(1)


def norm(model, x, engine):
    norms = []
    ENGINES[engine](FlatParameters(model), Loss(model, loss_fn)).clipped_sum(
        [Probe(1.0, 0.0)], None, x, Flat(clip_norm=1.0), seed=0, tap=lambda losses, n: norms.append(n)
    )
    return float(norms[0][0])


@pytest.mark.parametrize("engine", ENGINES)
def test_norm_of_the_bias_alone_for_any_x_and_of_both_when_unfrozen(engine):
    model = nn.Linear(2, 2)
    model.weight.requires_grad_(False)
    for x in ([[3.0, 4.0]], [[0.0, 0.0]], [[-1e6, 1e6]]):
        assert norm(model, torch.tensor(x), engine) == pytest.approx(math.sqrt(2), rel=1e-6)
    model.weight.requires_grad_(True)
    assert norm(model, torch.tensor([[3.0, 4.0]]), engine) == pytest.approx(7.211103, rel=1e-6)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_frozen_weight_gets_no_noise_and_unfreezing_it_is_refused(engine, monkeypatch):
    monkeypatch.setattr("fiberdp.trainer.receipt_steps", lambda numel: 4)
    model = nn.Linear(2, 2)
    model.weight.requires_grad_(False)
    weight = model.weight.clone()
    plan = fiberdp.plan(
        method=fiberdp.method("fiber"), num_examples=2, batch_size=2, steps=3, noise_multiplier=1.0, delta=1e-5, clip_norm=1.0
    )
    run = plan.private(model, loss_fn, torch.tensor([[3.0, 4.0], [1.0, 0.0]]), keys=fiberdp.Keys.seeded(5), engine=engine)
    run.step()
    assert torch.equal(model.weight, weight)
    assert run.flat.numel == 2
    model.weight.requires_grad_(True)
    with pytest.raises(ValueError, match="set of trainable parameters changed in mid-run \\(weight\\)"):
        run.step()
