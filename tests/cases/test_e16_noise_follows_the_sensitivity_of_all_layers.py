"""E16 (NOISE): 4 layers, threshold 1 each: the L2 sensitivity is 2, so sigma = 1 is noise of std 2.

Origin: CASES.md (opacus#201).  Wrong: std 1, which is sigma = 0.5: at q = .01, T = 1000, delta = 1e-5 epsilon is 13.361, not 1.828.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import fiberdp
from fiberdp.accounting import epsilon
from fiberdp.clipping import PerLayer
from fiberdp.diagnostics import ReceiptError
from fiberdp.engines import ENGINES
from fiberdp.mechanisms import Gaussian
from fiberdp.optim import Constant
from fiberdp.types import Noise

KEYS = fiberdp.Keys.seeded(16)
PLAIN = replace(fiberdp.method("dp-sgd", lr=1.0, momentum=0.0), schedule=Constant())  # theta_0 - theta_1 = g_0
SIGMA, THRESHOLD, LAYERS, B, D = 1.0, 1.0, 4, 2, 100_000
CLIP = PerLayer(clip_norm=THRESHOLD * LAYERS**0.5)


class FourLayers(nn.Module):
    """f(x) = Sum_l w_l . x_l, whose gradient in layer l is x_l."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(size, 1, bias=False) for _ in range(LAYERS))
        for layer in self.layers:
            nn.init.zeros_(layer.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum(layer(part).squeeze(1) for layer, part in zip(self.layers, x.unbind(1)))


def private(x, engine, sigma=SIGMA):
    plan = fiberdp.plan(
        method=PLAIN, num_examples=len(x), batch_size=len(x), steps=1, noise_multiplier=sigma, delta=1e-5, clip_norm=CLIP.clip_norm,
        clip="per_layer",
    )  # fmt: skip
    return plan.private(FourLayers(x.shape[2]), lambda m, batch: m(batch), x, keys=KEYS, engine=engine)


def agrees(noise, std):
    """100,000 samples: the standard error of a std is 0.22 %, and 4.5 of them are 1 %."""
    return abs(float(noise.double().square().mean().sqrt()) / std - 1) < 4.5 * (2 * noise.numel()) ** -0.5


@pytest.mark.parametrize("engine", ENGINES)
def test_one_example_moves_every_layer_by_one_and_the_sum_by_two(engine):
    generator = torch.Generator().manual_seed(16)
    x = torch.randn(3, LAYERS, 5, generator=generator) * torch.tensor([1e3, 1.0, 50.0, 1e6])[None, :, None] + 3
    run = private(x, engine, sigma=0.0)
    assert run.plan.clip.sensitivity == 2.0
    sums = [run.pipeline.engine.clipped_sum(run.plan.method.observation.probes(), None, rows, run.plan.clip, seed=0) for rows in (x, x[1:])]
    moved = (sums[0].total - sums[1].total).view(LAYERS, -1)
    torch.testing.assert_close(moved.norm(dim=1), torch.ones(LAYERS), rtol=1e-5, atol=0)
    assert float(moved.norm()) == pytest.approx(2.0, rel=1e-5)
    assert sums[0].sensitivity == 2.0
    assert float(moved.norm()) > 1.9 * THRESHOLD  # a sensitivity of one threshold would be declared too small by half


@pytest.mark.parametrize("engine", ENGINES)
def test_noise_of_sigma_one_has_std_two_on_the_sum(engine):
    run = private(torch.zeros(B, LAYERS, D // LAYERS), engine)
    assert run.pipeline.release(0, None).noise == Noise(2.0 / B)
    run.step()
    noise = -B * run.flat.theta  # the examples have zero gradients: noise alone
    assert noise.numel() == D
    assert agrees(noise, 2.0)
    assert not agrees(noise, 1.0)
    assert not agrees(noise * 1.1, 2.0)  # a sigma off by a tenth is seen
    assert not agrees(noise * 0.9, 2.0)
    assert run.prove().std_charged == 2.0 / B


class OneThreshold(Gaussian):
    """A fault: std sigma times the threshold of one layer."""

    def release(self, clipped, stream, step):
        return super().release(replace(clipped, sensitivity=clipped.sensitivity / LAYERS**0.5), stream, step)


def test_noise_of_one_threshold_is_refused():
    run = private(torch.zeros(B, LAYERS, D // LAYERS), "ghost")
    run.pipeline.mechanism = OneThreshold(noise_multiplier=SIGMA, batch_size=B)
    assert agrees(B * run.pipeline.release(0, None).value, 1.0)
    with pytest.raises(ReceiptError):
        run.step()
    assert run.receipt.std_ratio == pytest.approx(0.5, rel=0.02)
    assert len(run.ledger) == 0


def test_epsilon_of_the_right_and_of_half_the_noise():
    def claimed(sigma):
        plan = fiberdp.plan(
            method="dp-sgd", num_examples=10_000, batch_size=100, steps=1000, noise_multiplier=sigma, delta=1e-5, clip_norm=2.0,
            clip="per_layer",
        )  # fmt: skip
        assert epsilon(plan.charge(sigma), 1e-5, relation="add_or_remove_one") == plan.epsilon
        return plan.epsilon

    assert claimed(1.0) == pytest.approx(1.828, abs=1e-3)
    assert claimed(0.5) == pytest.approx(13.361, abs=1e-3)
