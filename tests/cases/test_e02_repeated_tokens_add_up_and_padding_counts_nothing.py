"""E02 (CLIP): Embedding(4, 2, padding_idx=0), ids [2, 2, 0] and [1, 3, 0], gradients (1, 0), (1, 2), (5, 5): norms sqrt(8), sqrt(6).

Origin: CASES.md (L1; idea from opacus#694).  Wrong: 7.615773, 7.483315 (padding counted); 2.449490 for the first (repeats not merged).
The padding row does not stay as it was: noise is added to every coordinate (see engines/layers/embedding.py).
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import fiberdp
from fiberdp.clipping import Flat
from fiberdp.engines import ENGINES, Loss
from fiberdp.flat import FlatParameters
from fiberdp.optim import Constant
from fiberdp.types import Probe

IDS = torch.tensor([[2, 2, 0], [1, 3, 0]])
UPSTREAM = torch.tensor([[1.0, 0.0], [1.0, 2.0], [5.0, 5.0]])


def loss_fn(model, ids):
    return (model(ids) * UPSTREAM).sum((1, 2))


@pytest.mark.parametrize("engine", ENGINES)
def test_norms_of_the_two_examples(engine):
    model, norms = nn.Embedding(4, 2, padding_idx=0), []
    flat = FlatParameters(model)
    total = ENGINES[engine](flat, Loss(model, loss_fn)).clipped_sum(
        [Probe(1.0, 0.0)], None, IDS, Flat(clip_norm=100.0), seed=0, tap=lambda losses, n: norms.append(n)
    )
    torch.testing.assert_close(torch.cat(norms), torch.tensor([8.0, 6.0], dtype=torch.float64).sqrt(), rtol=1e-6, atol=0)
    right = torch.tensor([[0.0, 0.0], [1.0, 0.0], [2.0, 2.0], [1.0, 2.0]])
    torch.testing.assert_close(total.total.view(4, 2), right, rtol=1e-6, atol=0)


@pytest.mark.parametrize("engine", ENGINES)
def test_the_padding_row_moves_by_noise_alone(engine, monkeypatch):
    monkeypatch.setattr("fiberdp.trainer.receipt_steps", lambda numel: 4)
    keys = fiberdp.Keys.seeded(2)
    method = replace(fiberdp.method("dp-sgd", lr=1.0, momentum=0.0), schedule=Constant())
    for sigma in (0.0, 1.0):
        plan = fiberdp.plan(method=method, num_examples=2, batch_size=2, steps=1, noise_multiplier=sigma, delta=1e-5, clip_norm=1.0)
        run = plan.private(nn.Embedding(4, 2, padding_idx=0), loss_fn, IDS, keys=keys, engine=engine)
        before = run.flat.theta[:2].clone()
        run.step()
        z = keys.stream("noise").normal(0, 0, 8)[:2]
        torch.testing.assert_close(before - run.flat.theta[:2], sigma * z / 2, rtol=1e-5, atol=1e-6)
        assert sigma or torch.equal(before, run.flat.theta[:2])
