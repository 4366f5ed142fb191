"""E07 (CLIP): causal-LM loss, B = 2, T = 4, labels [1, -100, -100, -100] and all -100: row 1 is divided by 1 token, row 2 is 0.

Right: row 1 equals the gradient of `cross_entropy(row 1 alone, ignore_index=-100)`; row 2 contributes exactly zero even where its loss
is 0/0.  Origin: CASES.md (opacus#792/#808, #722).  Wrong: row 1 four times too small (divided by T); NaN from row 2.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import fiberdp
from fiberdp.engines import ENGINES
from fiberdp.optim import Constant

IGNORED = -100
KEYS = fiberdp.Keys.seeded(7)
PLAIN = replace(fiberdp.method("dp-sgd", lr=1.0, momentum=0.0), schedule=Constant())  # theta_0 - theta_1 = g_0
ROW_1, ROW_2 = [1, IGNORED, IGNORED, IGNORED], [IGNORED] * 4


@pytest.fixture(autouse=True)
def _short_receipt(monkeypatch):
    """4 steps instead of 64: the receipt has its own tests, and on a model this small it would take all the time."""
    monkeypatch.setattr("fiberdp.trainer.receipt_steps", lambda numel: 4)


def token_losses(model, batch):
    """[b, T], 0 where ignored, and the number of valid tokens, [b]."""
    logits = model(batch["ids"])
    losses = cross_entropy(logits.transpose(1, 2), batch["labels"], ignore_index=IGNORED, reduction="none")
    return losses, (batch["labels"] != IGNORED).sum(1)


def zero_over_zero(model, batch):
    losses, valid = token_losses(model, batch)
    return losses.sum(1) / valid


def masked(model, batch):
    """The mask written out: the gradient of an ignored position is then 0 * inf, where torch's ignore_index gives 0."""
    logits, mask = model(batch["ids"]), (batch["labels"] != IGNORED).double()
    losses = cross_entropy(logits.transpose(1, 2), batch["labels"].clamp(min=0), reduction="none")
    return (losses * mask).sum(1) / mask.sum(1)


def clamped(model, batch):
    losses, valid = token_losses(model, batch)
    return losses.sum(1) / valid.clamp(min=1)


def summed(model, batch):
    return token_losses(model, batch)[0].sum(1)


def over_all_positions(model, batch):
    """The fault: a mean over T."""
    return token_losses(model, batch)[0].mean(1)


LOSSES = {"0/0": (zero_over_zero, "mean"), "masked 0/0": (masked, "mean"), "clamped": (clamped, "mean"), "sum": (summed, "sum")}


def language_model():
    torch.manual_seed(3)
    return nn.Sequential(nn.Embedding(5, 3), nn.Tanh(), nn.Linear(3, 5)).double()


def data(*labels):
    return {"ids": torch.tensor([[0, 1, 2, 3], [4, 3, 2, 1], [2, 2, 0, 4]])[: len(labels)], "labels": torch.tensor(labels)}


def private(loss_fn, rows, engine, *, method=PLAIN, sigma=0.0, steps=1):
    n = len(rows["labels"])
    plan = fiberdp.plan(method=method, num_examples=n, batch_size=n, steps=steps, noise_multiplier=sigma, delta=1e-5, clip_norm=100.0)
    return plan.private(language_model(), loss_fn, rows, keys=KEYS, engine=engine)


def released_sum(run):
    before = run.flat.theta.clone()
    run.step()
    return (before - run.flat.theta) * run.plan.batch_size


def alone(rows, i, reduction):
    """The gradient of torch's own cross entropy on row i, [d]."""
    model = language_model()
    cross_entropy(model(rows["ids"][i]), rows["labels"][i], ignore_index=IGNORED, reduction=reduction).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize("engine", ENGINES)
def test_the_row_with_one_valid_label_is_divided_by_one(engine, kind):
    loss_fn, reduction = LOSSES[kind]
    rows = data(ROW_1, ROW_2)
    right = alone(rows, 0, reduction)
    torch.testing.assert_close(released_sum(private(loss_fn, rows, engine)), right, rtol=1e-5, atol=1e-9)
    wrong = released_sum(private(over_all_positions, rows, engine))
    torch.testing.assert_close(wrong, right / 4, rtol=1e-5, atol=1e-9)  # what this case is there to reject


@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize("engine", ENGINES)
def test_mean_and_sum_differ_by_the_count_of_valid_labels(engine, kind):
    loss_fn, reduction = LOSSES[kind]
    rows = data([2, IGNORED, 4, 0], ROW_2, [IGNORED, 3, 3, IGNORED])
    right = alone(rows, 0, reduction) + alone(rows, 2, reduction)
    torch.testing.assert_close(released_sum(private(loss_fn, rows, engine)), right, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize("engine", ENGINES)
def test_rows_without_a_valid_label_contribute_exactly_zero(engine, kind):
    rows = data(ROW_2, ROW_2)
    loss_fn = LOSSES[kind][0]
    assert torch.equal(released_sum(private(loss_fn, rows, engine)), torch.zeros(35, dtype=torch.float64))
    run = private(loss_fn, rows, engine, sigma=1.0)
    z = KEYS.stream("noise").normal(0, 0, 35, dtype=torch.float64)
    torch.testing.assert_close(released_sum(run), 100.0 * z, rtol=1e-12, atol=1e-12)  # noise alone
    assert len(run.ledger) == 1


@pytest.mark.parametrize("engine", ENGINES)
def test_a_loss_of_zero_over_zero_is_silenced_at_both_points(engine):
    method = replace(fiberdp.method("fiber", lr=0.1), schedule=Constant())
    rows = data(ROW_1, ROW_2)
    assert masked(language_model(), rows)[1].isnan()
    runs = [private(loss_fn, rows, engine, method=method, sigma=0.01, steps=3) for loss_fn in (clamped, zero_over_zero, masked)]
    for run in runs:
        assert len(list(run)) == len(run.ledger) == 3
        torch.testing.assert_close(run.flat.theta, runs[0].flat.theta, rtol=1e-10, atol=1e-12)
    assert runs[0].flat.theta.isfinite().all()
