"""Scaling before the clip: sensitivity and noise stay what they are, and every calibration knows where the noise went."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import fiberdp
from by_hand import clipped_by_hand
from fiberdp._random import Keys
from fiberdp.clipping import CLIPS, Flat
from fiberdp.engines import ENGINES, Loss
from fiberdp.filters import EMA, Identity, Innovation, KalmanAuto
from fiberdp.flat import FlatParameters
from fiberdp.methods import METHODS, Method
from fiberdp.moments import Exact, NoCorrection, Raw, Steady
from fiberdp.optim import SGD, AdamW, Constant, Optimizer
from fiberdp.scaling import NoScaling, SecondMoment
from fiberdp.types import Noise, Probe, Release

ONE = (Probe(1.0, 0.0),)


def worker(engine, dtype=torch.float64):
    torch.manual_seed(1)
    model = nn.Linear(5, 3).to(dtype)
    flat = FlatParameters(model)
    loss = Loss(model, lambda module, batch: nn.functional.cross_entropy(module(batch["x"]), batch["y"], reduction="none"))
    return flat, ENGINES[engine](flat, loss)


def batch_of(n, dtype=torch.float64, size=3.0):
    return {"x": size * torch.randn(n, 5, dtype=dtype), "y": torch.arange(n) % 3}


# The clip


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("engine", ENGINES)
def test_each_example_is_scaled_and_then_clipped(engine, clip):
    flat, ours = worker(engine)
    scale, batch, rule = torch.linspace(0.2, 3.0, flat.numel, dtype=torch.float64), batch_of(6), CLIPS[clip](clip_norm=0.7)
    expected = torch.zeros_like(flat.theta)
    for i in range(6):
        flat.module.zero_grad()
        nn.functional.cross_entropy(flat.module(batch["x"][i : i + 1]), batch["y"][i : i + 1]).backward()
        u = scale * torch.cat([p.grad.flatten() for p in flat.module.parameters()])
        expected += clipped_by_hand(rule, u, flat.slots)
    found = ours.clipped_sum(ONE, None, batch, rule, seed=0, scale=scale)
    torch.testing.assert_close(found.total, expected, rtol=1e-9, atol=1e-12)
    assert found.sensitivity == 0.7


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("size", [1e-3, 1.0, 1e6, math.inf, math.nan])
def test_sensitivity_is_C_whatever_the_scale_and_the_example(engine, size):
    flat, ours = worker(engine, torch.float32)
    scale = torch.logspace(-3, 3, flat.numel)
    batch = batch_of(4, torch.float32)
    without = ours.clipped_sum(ONE, None, {k: v[:3] for k, v in batch.items()}, Flat(clip_norm=1.0), seed=0, scale=scale).total.double()
    batch["x"][3] *= size
    moved = (ours.clipped_sum(ONE, None, batch, Flat(clip_norm=1.0), seed=0, scale=scale).total.double() - without).norm()
    assert moved <= 1.0 + 1e-6


def test_scaling_after_the_clip_would_break_that_sensitivity():
    flat, ours = worker("loop")
    scale = torch.logspace(0, 3, flat.numel, dtype=torch.float64)
    assert (scale * ours.clipped_sum(ONE, None, batch_of(1), Flat(clip_norm=1.0), seed=0).total).norm() > 2


# The statistic


def test_scale_is_a_function_of_releases_as_written():
    g = np.abs(np.random.default_rng(2).standard_normal((5, 8))) + 0.1
    scaling = SecondMoment(offset=0.5, decay=0.9)
    state, v = scaling.init(torch.zeros(8, dtype=torch.float64)), np.zeros(8)
    for row in g:
        scaling.update(torch.from_numpy(row), state)
        v = 0.9 * v + 0.1 * row**2
        m = math.sqrt(v.mean())
        np.testing.assert_allclose(scaling.scale(state).numpy(), 1.5 * m / (np.sqrt(v) + 0.5 * m), rtol=1e-12)


def test_a_coordinate_of_average_size_is_not_scaled_and_none_is_blown_up():
    scaling = SecondMoment(offset=0.25)
    state = scaling.init(torch.zeros(3, dtype=torch.float64))
    scaling.update(torch.tensor([0.0, math.sqrt(0.5), math.sqrt(1.0)], dtype=torch.float64), state)  # mean square 1/2
    scale = scaling.scale(state)
    assert scale[1] == pytest.approx(1)
    assert scale[0] == pytest.approx(1 + 1 / 0.25)
    assert 0 < scale[2] < 1


@pytest.mark.parametrize("options", [{"offset": 0.0}, {"offset": -1.0}, {"decay": 1.0}, {"decay": -0.1}])
def test_settings_that_scale_nothing_sensibly_are_refused(options):
    with pytest.raises(ValueError, match=r"(offset|decay)="):
        SecondMoment(**options)


# Behind the gate


def drive(calibration, filter, steps, d=40_000, scaled=True, beta2=0.99):
    """Pure noise under scales that differ between coordinates and change over time; (v^_t, phi_t) at the last step."""
    generator = torch.Generator().manual_seed(3)
    optimizer = Optimizer(
        torch.zeros(d), filter=filter, calibration=calibration, update=AdamW(lr=1e-3, betas=(0.9, beta2)), schedule=Constant(),
        scaling=SecondMoment(), steps=steps,
    )  # fmt: skip
    spread = torch.linspace(0.3, 3.0, d)
    for t in range(steps):
        scale = None if t == 0 or not scaled else spread ** (1 + 0.5 * math.sin(t))
        optimizer.step(Release(0.5 * torch.randn(d, generator=generator), Noise(0.5), scale))
    return optimizer.moments["v"].double() / (1 - beta2**steps), optimizer._corrections[0].phi


@pytest.mark.parametrize("steps", [2, 6, 51])
@pytest.mark.parametrize("filter", [Identity(), Innovation(omega=0.9), EMA(kappa=0.3), KalmanAuto()], ids=repr)
def test_exact_is_the_mean_of_v_hat_in_every_coordinate(filter, steps):
    """v^_i / phi_i has mean 1 for every i: 4 SE over 40 000 coordinates; and over each quarter of them, where the scales differ."""
    v_hat, phi = drive(Exact(), filter, steps)
    ratio = v_hat / phi.double()
    for part in (ratio, *ratio.chunk(4)):
        assert abs(float((part.mean() - 1) / (part.std() / math.sqrt(len(part))))) < 4


def test_a_phi_that_forgot_the_scales_is_rejected_by_that():
    v_hat, phi = drive(Exact(), Innovation(omega=0.9), 51)
    quarter = (v_hat / phi.double().mean()).chunk(4)[0]
    assert abs(float((quarter.mean() - 1) / (quarter.std() / math.sqrt(len(quarter))))) > 20


@pytest.mark.parametrize("calibration", [Raw(), Steady(), Exact(eps_v="auto")], ids=repr)
def test_every_calibration_divides_by_the_square_of_the_scale(calibration):
    _, phi = drive(calibration, Identity(), 2, d=10)
    if not isinstance(calibration, Exact):
        torch.testing.assert_close(phi, 0.25 * torch.linspace(0.3, 3.0, 10) ** (-2 * (1 + 0.5 * math.sin(1))), rtol=1e-5, atol=0)
    assert phi.shape == (10,)


def test_the_scaling_is_undone_so_that_a_gradient_arrives_as_it_is():
    g = torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64)
    theta = torch.zeros(3, dtype=torch.float64)
    optimizer = Optimizer(
        theta,
        filter=Identity(),
        calibration=NoCorrection(),
        update=SGD(lr=1.0, momentum=0.0),
        schedule=Constant(),
        scaling=SecondMoment(),
        steps=3,
    )
    for _ in range(3):
        scale = optimizer.scale
        optimizer.step(Release(g if scale is None else g * scale, Noise(0.0), scale))
    torch.testing.assert_close(theta, -3 * g)


# Whole runs


def run(method, steps=6, seed=4):
    generator = torch.Generator().manual_seed(9)
    data = {"x": torch.randn(60, 5, generator=generator), "y": torch.randint(0, 3, (60,), generator=generator)}
    torch.manual_seed(2)
    plan = fiberdp.plan(method=method, num_examples=60, batch_size=20, steps=steps, noise_multiplier=0.5, delta=1e-3, clip_norm=1.0)
    return plan.private(
        nn.Linear(5, 3), lambda m, b: nn.functional.cross_entropy(m(b["x"]), b["y"], reduction="none"), data, keys=Keys.seeded(seed)
    )


@pytest.mark.parametrize("name", [name for name in METHODS if METHODS[name].mechanism.name == "gaussian"])
def test_scaling_is_an_option_of_any_method_and_costs_no_epsilon(name):
    scaled = run(replace(METHODS[name], scaling=SecondMoment()))
    for _ in scaled:
        pass
    assert scaled.receipt.passed
    plain = run(METHODS[name])
    for _ in plain:
        pass
    assert scaled.epsilon == plain.epsilon
    assert not torch.equal(scaled.flat.theta, plain.flat.theta)


def test_a_huge_offset_is_no_scaling():
    trajectories = []
    for scaling in (NoScaling(), SecondMoment(offset=1e6)):
        one = run(replace(METHODS["fiber"], scaling=scaling))
        for _ in one:
            pass
        trajectories.append(one.flat.theta)
    torch.testing.assert_close(*trajectories, rtol=1e-3, atol=1e-4)


def test_a_resumed_scaled_run_is_bit_equal():
    method = replace(METHODS["fiber-lookahead"], scaling=SecondMoment())
    straight, stopped, resumed = run(method), run(method), run(method)
    for _ in straight:
        pass
    for _ in range(3):
        stopped.step()
    resumed.optimizer.load_state_dict({k: v.clone() for k, v in stopped.optimizer.state_dict().items()}, 3)
    resumed.ledger = stopped.ledger
    for _ in resumed:
        pass
    assert torch.equal(straight.flat.theta, resumed.flat.theta)


def test_scaling_stands_in_a_methods_json():
    method = Method(scaling=SecondMoment(offset=2.0), update=AdamW(lr=1e-3))
    assert method.to_json()["scaling"] == {"type": "second_moment", "offset": 2.0, "decay": 0.99}
    assert Method.from_json(method.to_json()) == method
