"""E09 (CLIP): gradients (0, 0), (0.3, 0.4), (3, 4), C = 1.  Flat: the sum is (0.9, 1.2).  Automatic: the table below.

Origin: CASES.md (opacus#42 and its family).  Wrong: NaN from 0/0; the small gradient scaled up (a sum of (1.2, 1.6)).
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import fiberdp
from fiberdp.clipping import Flat
from fiberdp.diagnostics import ReceiptError
from fiberdp.engines import ENGINES
from fiberdp.optim import Constant

PLAIN = replace(fiberdp.method("dp-sgd", lr=1.0, momentum=0.0), schedule=Constant())  # theta_1 = -g_0 from theta_0 = 0
X = torch.tensor([[0.0, 0.0], [0.3, 0.4], [3.0, 4.0]])
RIGHT = {
    "flat": torch.tensor([[0.0, 0.0], [0.3, 0.4], [0.6, 0.8]]),
    "automatic": torch.tensor([[0.0, 0.0], [0.588235, 0.784314], [0.598802, 0.798403]]),  # C g / (|g| + 0.01)
}


@pytest.fixture(autouse=True)
def _short_receipt(monkeypatch):
    """4 steps instead of 64: the receipt has its own tests, and on a model this small it would take all the time."""
    monkeypatch.setattr("fiberdp.trainer.receipt_steps", lambda numel: 4)


class Vector(nn.Module):
    """f(w; x) = w.x, whose gradient is x."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.w * x).sum(1)


def clipped_sum(x, clip, engine):
    n = len(x)
    plan = fiberdp.plan(
        method=PLAIN, num_examples=n, batch_size=n, steps=1, noise_multiplier=0.0, delta=1e-5, clip_norm=1.0, clip=clip
    )  # fmt: skip
    run = plan.private(Vector(), lambda m, batch: m(batch), x, keys=fiberdp.Keys.seeded(9), engine=engine)
    run.step()
    return -n * run.flat.theta


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("clip", RIGHT)
def test_the_sum_of_the_three(clip, engine):
    torch.testing.assert_close(clipped_sum(X, clip, engine), RIGHT[clip].sum(0), rtol=1e-5, atol=0)
    if clip == "flat":
        torch.testing.assert_close(clipped_sum(X, clip, engine), torch.tensor([0.9, 1.2]), rtol=1e-5, atol=0)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("clip", RIGHT)
def test_each_alone(clip, engine):
    for x, right in zip(X, RIGHT[clip]):
        torch.testing.assert_close(clipped_sum(x[None], clip, engine), right, rtol=1e-5, atol=0)
    assert torch.equal(clipped_sum(X[:1], clip, engine), torch.zeros(2))
    if clip == "flat":  # untouched, to the last bit
        assert torch.equal(clipped_sum(X[1:2], clip, engine), X[1])


@pytest.mark.parametrize("engine", ENGINES)
def test_dividing_by_the_bare_norm_is_caught(monkeypatch, engine):
    """Planted: C/|g| for every norm.  The small one is scaled up to C; in the loop, whose norms may be 0, zero gradients become 0/0, which
    the receipt sees."""
    monkeypatch.setattr(Flat, "factors", lambda self, norms: self.clip_norm / norms)
    if engine == "loop":
        with pytest.raises(ReceiptError, match="std is nan"):
            clipped_sum(X, "flat", engine)
        monkeypatch.setattr("fiberdp.trainer.Run.prove", lambda self: None)
        assert clipped_sum(X, "flat", engine).isnan().all()
    else:
        assert torch.equal(clipped_sum(X[:1], "flat", engine), torch.zeros(2))
    torch.testing.assert_close(clipped_sum(X[1:], "flat", engine), torch.tensor([1.2, 1.6]), rtol=1e-5, atol=0)
