"""The average of the weights: its closed form, free of the initial weights; kept through a crash, evaluated and released beside them."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import fiberdp
from fiberdp.accounting import read_ledger
from fiberdp.evaluation import evaluate
from fiberdp.flat import FlatParameters
from fiberdp.methods import METHODS, Method, method
from fiberdp.optim import AVERAGINGS, EMAWeights, NoAveraging, Optimizer, onepass
from fiberdp.recipes.recipe import classification
from fiberdp.types import Noise, Release
from test_run_directory import Crash, CrashAfter, contents, recipe, refused, rows


def optimizer(averaging, d: int = 50, name: str = "fiber", dtype=torch.float64) -> Optimizer:
    m, theta = METHODS[name], torch.linspace(-1, 1, d, dtype=dtype)
    return Optimizer(
        theta, filter=m.filter, calibration=m.calibration, update=m.update, schedule=m.schedule, steps=40, averaging=averaging
    )  # fmt: skip


def drive(made: Optimizer, steps: int) -> list[np.ndarray]:
    generator, seen = torch.Generator().manual_seed(0), []
    for _ in range(steps):
        g = torch.randn(len(made.theta), generator=generator, dtype=torch.float64).to(made.theta.dtype)
        made.step(Release(g, Noise(0.1)))
        seen.append(made.theta.numpy().copy())
    return seen


@pytest.mark.parametrize("decay", [0.0, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("name", ["dp-sgd", "fiber"])
def test_average_is_the_normalised_exponential_sum(decay, name):
    """theta_bar_t = Sum_j decay^{t-j} theta_{j+1} / Sum_j decay^{t-j}, at every t, with no weight on theta_0."""
    made = optimizer(EMAWeights(decay=decay), name=name)
    seen: list[np.ndarray] = []
    for t in range(30):
        seen += drive(made, 1)
        weights = decay ** np.arange(t, -1, -1.0)
        np.testing.assert_allclose(made.theta_bar, weights @ np.array(seen) / weights.sum(), rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_after_the_first_step_the_average_is_theta_exactly(dtype):
    made = optimizer(EMAWeights(decay=0.9999), dtype=dtype)
    assert torch.equal(made.theta_bar, made.theta)
    drive(made, 1)
    assert torch.equal(made.theta_bar, made.theta)
    drive(made, 1)
    assert not torch.equal(made.theta_bar, made.theta)
    before = made.theta - made.d
    torch.testing.assert_close(made.theta_bar, (0.9999 * before + made.theta) / 1.9999)  # nearly the plain mean of the two


def test_averaging_changes_neither_theta_nor_d():
    with_it, without = optimizer(EMAWeights(decay=0.9)), optimizer(NoAveraging())
    drive(with_it, 5)
    drive(without, 5)
    assert torch.equal(with_it.theta, without.theta)
    assert torch.equal(with_it.d, without.d)
    assert without.theta_bar is None
    assert with_it.state_dict().keys() - without.state_dict().keys() == {"theta_bar"}


def test_blocks_change_no_average(monkeypatch):
    whole = optimizer(EMAWeights(decay=0.9))
    drive(whole, 4)
    monkeypatch.setattr(onepass, "BLOCK", 7)
    cut = optimizer(EMAWeights(decay=0.9))
    drive(cut, 4)
    assert torch.equal(cut.theta_bar, whole.theta_bar)


def test_state_of_another_averaging_is_refused():
    made = optimizer(EMAWeights(decay=0.9))
    drive(made, 3)
    with pytest.raises(ValueError, match="theta_bar"):
        optimizer(NoAveraging()).load_state_dict(made.state_dict(), 3)
    again = optimizer(EMAWeights(decay=0.9))
    again.load_state_dict({name: tensor.clone() for name, tensor in made.state_dict().items()}, 3)
    assert torch.equal(again.theta_bar, made.theta_bar)


@pytest.mark.parametrize("decay", [-0.1, 1.0, float("nan"), "0.9"])
def test_decay_outside_0_to_1_is_refused(decay):
    with pytest.raises(ValueError, match=r"decay=.*\[0, 1\)"):
        EMAWeights(decay=decay)


def test_method_round_trips_with_averaging_and_the_table_has_none():
    assert list(AVERAGINGS) == ["none", "ema"]
    assert all(m.averaging == NoAveraging() for m in METHODS.values())
    chosen = replace(method("fiber"), averaging=EMAWeights(decay=0.99))
    assert chosen.to_json()["averaging"] == {"type": "ema", "decay": 0.99}
    assert Method.from_json(json.loads(json.dumps(chosen.to_json()))) == chosen
    with pytest.raises(ValueError, match=r"method fiber has no option decay.*averaging=EMAWeights\(decay=…\)"):
        method("fiber", decay=0.9)


def test_a_state_dict_with_another_vector_leaves_the_module_alone_and_knows_tied_weights():
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3), nn.BatchNorm1d(3))
    model[1].weight = model[0].weight
    model[1].bias.requires_grad_(False)
    flat = FlatParameters(model)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    other = flat.state_dict(torch.arange(float(flat.numel)))
    assert other.keys() == before.keys()
    assert torch.equal(other["0.weight"], torch.arange(9.0).view(3, 3))
    assert torch.equal(other["1.weight"], other["0.weight"])
    assert torch.equal(other["1.bias"], before["1.bias"])
    assert torch.equal(other["2.running_mean"], before["2.running_mean"])
    for now in (model.state_dict(), flat.state_dict(flat.theta)):
        assert all(torch.equal(now[name], before[name]) for name in before)


def test_evaluation_with_other_parameters_leaves_the_model_alone_even_if_it_fails():
    torch.manual_seed(0)
    model, other = (nn.Sequential(nn.Linear(6, 4), nn.Dropout(0.5), nn.Linear(4, 2)) for _ in range(2))
    flat = FlatParameters(model)
    theta = flat.theta.clone()
    expected = evaluate(classification, other, rows(50, 2))
    assert (
        evaluate(classification, model, rows(50, 2), parameters=dict(other.named_parameters()))
        == expected
        != evaluate(classification, model, rows(50, 2))
    )
    wrong = {"image": torch.zeros(3, 5), "label": torch.zeros(3).long()}
    with pytest.raises(RuntimeError):
        evaluate(classification, model, wrong, parameters=flat.views(theta + 1))
    assert torch.equal(flat.theta, theta)
    flat.check()


# ---- the run ----


@pytest.mark.parametrize("name", ["dp-sgd", "fiber"])
def test_resumed_run_with_averaging_is_bit_equal_to_the_uninterrupted_one(tmp_path, name):
    whole = fiberdp.fit(recipe(), method=name, averaging=0.9, seed=7, out=tmp_path / "whole")
    for step in (1, 9, 24):
        broken = tmp_path / f"broken{step}"
        with pytest.raises(Crash):
            fiberdp.fit(recipe(), method=name, averaging=0.9, seed=7, out=broken, reporter=CrashAfter(step))
        resumed = fiberdp.fit(recipe(), method=name, averaging=0.9, seed=7, out=broken, resume=True)
        assert contents(broken) == contents(tmp_path / "whole")
        ours, theirs = ((folder / "release" / "averaged.safetensors").read_bytes() for folder in (broken, tmp_path / "whole"))
        assert ours == theirs
        assert resumed["result"] == whole["result"]


def test_record_metrics_and_release_hold_the_average_beside_the_weights(tmp_path):
    record = fiberdp.fit(recipe(), averaging=0.9, seed=7, out=tmp_path / "a")
    plain = fiberdp.fit(recipe(), seed=7, out=tmp_path / "b")
    assert contents(tmp_path / "a")["release/model.safetensors"] == contents(tmp_path / "b")["release/model.safetensors"]
    assert read_ledger(tmp_path / "a" / "ledger.jsonl").events == read_ledger(tmp_path / "b" / "ledger.jsonl").events
    assert record["privacy"] == plain["privacy"]
    assert {**record["result"], "averaged": None} == plain["result"]
    assert not (tmp_path / "b" / "release" / "averaged.safetensors").exists()

    averaged = recipe().build()
    averaged.load_state_dict(load_file(tmp_path / "a" / "release" / "averaged.safetensors"))
    reached = {name: evaluate(classification, averaged, rows(50, seed)) for name, seed in (("heldout", 2), ("test", 3))}
    assert record["result"]["averaged"] == {name: found["accuracy"] for name, found in reached.items()}
    assert record["config"]["plan"]["method"]["averaging"] == {"type": "ema", "decay": 0.9}
    lines = [json.loads(line) for line in (tmp_path / "a" / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 4
    assert lines[-1]["heldout_averaged"] == reached["heldout"]
    assert [json.loads(line)["heldout_averaged"] for line in (tmp_path / "b" / "metrics.jsonl").read_text().splitlines()] == [None] * 4


def test_a_run_without_test_rows_reports_the_averages_heldout_alone():
    result = fiberdp.fit(recipe(), averaging=0.9, test=False)["result"]
    assert result["averaged"]["test"] is None
    assert 0 <= result["averaged"]["heldout"] <= 1


def test_resume_with_another_decay_is_refused(tmp_path):
    with pytest.raises(Crash):
        fiberdp.fit(recipe(), seed=7, averaging=0.9, out=tmp_path / "a", reporter=CrashAfter(9))
    refused("resume with plan.method.averaging.decay=0.99", seed=7, averaging=0.99, out=tmp_path / "a", resume=True)
    refused("decay=1.5", averaging=1.5, out=tmp_path / "b")
