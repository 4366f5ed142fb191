"""Update rules and optimizer: the limits are torch's own, d is the whole step, blocks and resuming change nothing."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fiberdp._random import Keys
from fiberdp._threads import one_thread
from fiberdp.filters import EMA, Identity, Innovation, Kalman, KalmanAuto
from fiberdp.methods import METHODS, Method, method
from fiberdp.moments import CALIBRATIONS, Exact, NoCorrection, Raw, Steady
from fiberdp.optim import SGD, AdamW, Constant, EMAWeights, Optimizer, WarmupCosine, fused, onepass
from fiberdp.reference import dp_adambc
from fiberdp.scaling import SecondMoment
from fiberdp.types import Noise, Release

D, T = 37, 100
SIGMA_W = 0.3


def gradients(steps=T, d=D, seed=0):
    return torch.randn(steps, d, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def start(d=D):
    return torch.linspace(-1, 1, d, dtype=torch.float64)


def make(update, *, filter=Identity(), calibration=NoCorrection(), schedule=Constant(), theta=None, steps=T):  # noqa: B008
    theta = start() if theta is None else theta
    return Optimizer(theta, filter=filter, calibration=calibration, update=update, schedule=schedule, steps=steps)


def make_method(name, theta=None):
    m = method(name, weight_decay=0.1)
    return Optimizer(
        start() if theta is None else theta, filter=m.filter, calibration=m.calibration, update=m.update, schedule=m.schedule, steps=T
    )


def trajectory(optimizer, gs, std=0.0):
    thetas = []
    for g in gs:
        optimizer.step(Release(g, Noise(std)))
        thetas.append(optimizer.theta.clone())
    return torch.stack(thetas)


def torch_trajectory(cls, gs, schedule, **options):
    theta = start()
    optimizer, thetas = cls([theta], **options), []
    for t, g in enumerate(gs):
        optimizer.param_groups[0]["lr"] = options["lr"] * schedule.factor(t, T)
        theta.grad = g
        optimizer.step()
        thetas.append(theta.clone())
    return torch.stack(thetas)


# Limits


@pytest.mark.parametrize("schedule", [Constant(), WarmupCosine()], ids=repr)
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_identity_without_calibration_is_torch_adamw_eqs_8_to_10(weight_decay, schedule):
    options = {"lr": 0.03, "betas": (0.8, 0.99), "eps": 1e-6, "weight_decay": weight_decay}
    ours = trajectory(make(AdamW(**options), schedule=schedule), gradients(), SIGMA_W)
    torch.testing.assert_close(ours, torch_trajectory(torch.optim.AdamW, gradients(), schedule, **options), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("schedule", [Constant(), WarmupCosine()], ids=repr)
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_identity_with_sgd_is_torch_sgd(momentum, weight_decay, schedule):
    options = {"lr": 0.03, "momentum": momentum, "weight_decay": weight_decay}
    ours = trajectory(make(SGD(**options), schedule=schedule), gradients(), SIGMA_W)
    torch.testing.assert_close(ours, torch_trajectory(torch.optim.SGD, gradients(), schedule, **options), rtol=1e-12, atol=1e-12)


def test_default_adamw_has_torch_defaults_but_no_weight_decay():
    ours, torchs = AdamW(lr=1e-3), torch.optim.AdamW([torch.zeros(1)]).defaults
    assert (ours.betas, ours.eps, ours.lr) == (torchs["betas"], torchs["eps"], torchs["lr"])
    assert ours.weight_decay == 0


def test_identity_with_raw_is_the_dp_adambc_reference():
    """Empty batches, so that g_t = sigma_w z_t exactly."""
    z = gradients()
    ours = trajectory(make(AdamW(lr=0.03, weight_decay=0.1), calibration=Raw(eps_v=1e-4)), SIGMA_W * z, SIGMA_W)
    expected = dp_adambc(
        start().numpy(), lambda theta, i: theta, [[]] * T, z.numpy(),
        C=SIGMA_W, sigma=1.0, B=1, lr=lambda t: 0.03, weight_decay=0.1, eps_v=1e-4,
    )  # fmt: skip
    np.testing.assert_allclose(ours.numpy(), expected[1:], rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("filter", [Innovation(omega=1.0), EMA(kappa=1.0)], ids=repr)
@pytest.mark.parametrize("name", CALIBRATIONS)
def test_a_filter_of_gain_one_is_no_filter(filter, name):
    """omega = 1 at one point is DP-AdamBC, whatever the calibration (A = 1 at every t)."""
    options = {} if name == "none" else {"eps_v": 1e-4}
    with_filter, without = (
        trajectory(make(AdamW(lr=0.03), filter=f, calibration=CALIBRATIONS[name](**options)), gradients(), SIGMA_W)
        for f in (filter, Identity())
    )
    torch.testing.assert_close(with_filter, without, rtol=1e-10, atol=1e-12)


# d


@pytest.mark.parametrize("name", METHODS)
def test_d_is_the_whole_step_weight_decay_included(name):
    optimizer = make_method(name)
    assert optimizer.d is None
    for g in gradients(5):
        before = optimizer.theta.clone()
        d = optimizer.step(Release(g, Noise(SIGMA_W)))
        assert torch.equal(d, optimizer.theta - before)
        assert torch.equal(d, optimizer.d)


def test_d_of_a_step_with_zero_gradient_is_the_decay_alone():
    optimizer = make(AdamW(lr=0.5, weight_decay=0.1))
    d = optimizer.step(Release(torch.zeros(D, dtype=torch.float64), Noise(0.0)))
    torch.testing.assert_close(d, -0.05 * start())


# One pass over memory, in blocks


@pytest.mark.parametrize("block", [1, 7, 36, 37, 64])
@pytest.mark.parametrize("name", METHODS)
def test_block_wise_update_is_the_update_of_one_block_bit_for_bit(name, block, monkeypatch):
    whole = trajectory(make_method(name), gradients(8), SIGMA_W)
    monkeypatch.setattr(onepass, "BLOCK", block)
    assert torch.equal(trajectory(make_method(name), gradients(8), SIGMA_W), whole)


@pytest.mark.parametrize("name", METHODS)
def test_a_step_changes_theta_in_place_and_leaves_the_release_alone(name):
    optimizer = make_method(name)
    theta, g = optimizer.theta, gradients(1)[0]
    kept, address = g.clone(), theta.data_ptr()
    optimizer.step(Release(g, Noise(SIGMA_W)))
    optimizer.step(Release(g, Noise(SIGMA_W)))
    assert torch.equal(g, kept)
    assert optimizer.theta is theta
    assert theta.data_ptr() == address
    assert not torch.equal(theta, start())


class Largest(TorchDispatchMode):
    """The largest new memory, in elements, that an operation of this thread asks for; memory in `known` is not new."""

    def __init__(self, *known):
        super().__init__()
        self.known, self.size = {t.untyped_storage().data_ptr() for t in known}, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for t in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(t, torch.Tensor) and t.untyped_storage().data_ptr() not in self.known:
                self.size = max(self.size, t.untyped_storage().nbytes() // t.element_size())
        return result


@pytest.mark.parametrize("name", ["fiber", "dp-adamw", "disk-corr", "dp-sgd"])
def test_a_step_with_its_noise_needs_no_vector_beside_the_state_not_even_for_a_while(name):
    """The vectors are those of the paper, and no temporary is longer than a block or a chunk; one of size d is seen."""
    d = 3 * onepass.BLOCK + 5
    expected = {
        "fiber": {"theta", "d", "g_tilde", "r", "m", "v"}, "dp-adamw": {"theta", "d", "m", "v"},
        "disk-corr": {"theta", "d", "g_tilde", "m", "v"}, "dp-sgd": {"theta", "d", "m"},
    }[name]  # fmt: skip
    m = method(name)
    optimizer = Optimizer(
        torch.zeros(d), filter=m.filter, calibration=m.calibration, update=m.update, schedule=m.schedule, steps=9, compiled=False
    )
    g, noise = torch.ones(d), Keys.seeded(0).stream("noise")
    optimizer.step(Release(g, Noise(SIGMA_W)))  # the state is made here
    state = optimizer.state_dict()
    assert {key for key, value in state.items() if value.numel() == d} == expected
    with one_thread(), Largest(g, *state.values()) as largest:
        noise.add_normal_(g, step=0, scale=SIGMA_W)
        optimizer.step(Release(g, Noise(SIGMA_W)))
        assert 0 < largest.size <= 3 * onepass.BLOCK  # the scratch of the noise holds three halves
        torch.add(g, 1)
        assert largest.size == d


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_share_the_update_without_changing_a_bit(threads):
    """d of 6 blocks and a crumb, so that helpers take part; an averaging, scaling and two groups that learn go along."""
    d, ends, before = 6 * onepass.BLOCK + 11, [], torch.get_num_threads()
    g = SIGMA_W * gradients(3, d).float()
    for count in (1, threads):
        torch.set_num_threads(count)
        try:
            optimizer = Optimizer(
                start(d).float(), filter=KalmanAuto(), calibration=Exact(), update=AdamW(lr=0.03), schedule=Constant(), steps=3,
                groups=[slice(0, 7), slice(7, d)], averaging=EMAWeights(decay=0.9), scaling=SecondMoment(), compiled=False,
            )  # fmt: skip
            for row in g:
                scale = optimizer.scale
                optimizer.step(Release(row if scale is None else row * scale, Noise(SIGMA_W), scale))
        finally:
            torch.set_num_threads(before)
        ends.append(optimizer.state_dict())
    assert all(torch.equal(ends[0][key], ends[1][key]) for key in ends[0])


# Resuming


@pytest.mark.parametrize("at", [0, 1, 6])
@pytest.mark.parametrize("name", METHODS)
def test_a_resumed_run_continues_bit_for_bit(name, at):
    gs = gradients(12)
    straight, stopped = make_method(name), make_method(name)
    expected = trajectory(straight, gs, SIGMA_W)
    for g in gs[:at]:
        stopped.step(Release(g, Noise(SIGMA_W)))
    saved = {key: value.clone() for key, value in stopped.state_dict().items()}
    resumed = make_method(name, theta=torch.full((D,), 9.0, dtype=torch.float64))
    resumed.load_state_dict(saved, at)
    assert (resumed.d is None) if at == 0 else torch.equal(resumed.d, stopped.d)  # the next probes need it
    assert torch.equal(trajectory(resumed, gs[at:], SIGMA_W), expected[at:])
    ends = straight.state_dict(), resumed.state_dict()
    assert ends[0].keys() == ends[1].keys()
    assert all(torch.equal(ends[0][key], ends[1][key]) for key in ends[0])
    assert straight.t == resumed.t == 12


@pytest.mark.parametrize("name", METHODS)
def test_each_vector_of_the_state_is_needed_to_resume(name):
    optimizer = make_method(name)
    trajectory(optimizer, gradients(3), SIGMA_W)
    saved = optimizer.state_dict()
    for key in saved:
        if not key.startswith("calibration."):
            with pytest.raises(ValueError, match=key):
                make_method(name).load_state_dict({k: v for k, v in saved.items() if k != key}, 3)


def test_a_loaded_optimizer_leaves_the_dict_it_was_loaded_from_alone():
    stopped, resumed = make_method("fiber"), make_method("fiber")
    trajectory(stopped, gradients(3), SIGMA_W)
    saved = stopped.state_dict()
    kept = {key: value.clone() for key, value in saved.items()}
    resumed.load_state_dict(saved, 3)
    trajectory(resumed, gradients(1), SIGMA_W)
    assert all(torch.equal(saved[key], kept[key]) for key in kept)


def test_the_state_of_the_calibration_is_needed_to_resume():
    optimizer = make_method("fiber-lookahead")
    trajectory(optimizer, gradients(3), SIGMA_W)
    saved = {key: value for key, value in optimizer.state_dict().items() if not key.startswith("calibration.")}
    with pytest.raises(ValueError, match=r"calibration\.P"):
        make_method("fiber-lookahead").load_state_dict(saved, 3)
    with pytest.raises(ValueError, match="same method"):
        make_method("fiber").load_state_dict(optimizer.state_dict(), 3)


def test_state_is_named_by_the_papers_symbols():
    optimizer = make_method("fiber-lookahead")
    trajectory(optimizer, gradients(2), SIGMA_W)
    assert set(optimizer.state_dict()) == {"theta", "d", "g_tilde", "r", "m", "v", "calibration.P", "calibration.covariance"}


# Schedules


def test_warmup_cosine_rises_over_a_twentieth_and_falls_to_zero_paper_e_1():
    factors = [WarmupCosine().factor(t, 200) for t in range(200)]
    assert factors[:10] == pytest.approx([(t + 1) / 10 for t in range(10)])
    assert factors[10] == 1
    assert factors[105] == pytest.approx(0.5)  # half way down
    assert factors[10:] == pytest.approx([math.cos(math.pi * (t - 10) / 190 / 2) ** 2 for t in range(10, 200)])
    assert 0 < factors[-1] < 1e-3
    assert WarmupCosine().factor(200, 200) == pytest.approx(0)


@pytest.mark.parametrize("steps", [1, 2, 3, 19, 20, 21, 800, 4000])
@pytest.mark.parametrize("warmup", [0.0, 0.05, 0.5])
def test_warmup_cosine_never_stands_still_and_never_exceeds_one(warmup, steps):
    factors = [WarmupCosine(warmup=warmup).factor(t, steps) for t in range(steps)]
    assert all(0 < f <= 1 for f in factors)
    assert max(factors) == 1
    peak = factors.index(1)
    assert factors[: peak + 1] == sorted(factors[: peak + 1])
    assert factors[peak:] == sorted(factors[peak:], reverse=True)


def test_warmup_is_a_twentieth_of_the_steps_rounded_up_for_every_horizon():
    for steps in range(1, 2000):
        rising = -(-steps // 20)
        assert WarmupCosine().factor(rising - 1, steps) == 1
        assert rising == 1 or WarmupCosine().factor(rising - 2, steps) < 1


def test_the_optimizers_learning_rate_is_the_rules_times_the_schedules():
    optimizer = make(AdamW(lr=0.2), schedule=WarmupCosine(warmup=0.1), steps=20)
    seen = []
    for g in gradients(20):
        seen.append(optimizer.lr)
        optimizer.step(Release(g, Noise(0.0)))
    assert seen == [0.2 * WarmupCosine(warmup=0.1).factor(t, 20) for t in range(20)]
    assert seen[:2] == [0.1, 0.2]
    assert Constant().factor(3, 20) == 1


# Refusals


@pytest.mark.parametrize("name", [name for name in CALIBRATIONS if name != "none"])
def test_sgd_refuses_a_calibration(name):
    with pytest.raises(ValueError, match=f"calibration='{name}' with update='sgd'") as refusal:
        Method(update=SGD(lr=0.1), calibration=CALIBRATIONS[name]())
    assert "\n" not in str(refusal.value)


def test_sgd_with_a_calibration_past_that_refusal_fails_rather_than_ignores_it():
    with pytest.raises(AssertionError, match="SGD has no second moment"):
        trajectory(make(SGD(lr=0.1), calibration=Steady()), gradients(1), SIGMA_W)


@pytest.mark.parametrize(
    ("rule", "name", "value"),
    [(cls, "lr", v) for cls in (AdamW, SGD) for v in (0, -1.0, float("nan"), float("inf"), "0.1")]
    + [(cls, "weight_decay", v) for cls in (AdamW, SGD) for v in (-0.1, float("nan"), float("inf"))]
    + [(SGD, "momentum", v) for v in (-0.1, 1.0, float("nan"))]
    + [(AdamW, "betas", v) for v in ((1.0, 0.9), (0.9, 1.0), (-0.1, 0.9), (0.9, float("nan")))]
    + [(AdamW, "eps", v) for v in (-1e-9, float("nan"))],
)
def test_options_out_of_range_are_refused_by_name(rule, name, value):
    with pytest.raises(ValueError, match=name) as refusal:
        rule(**{"lr": 0.1, name: value})
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("warmup", [-0.1, 1.0, float("nan")])
def test_a_warm_up_longer_than_the_run_is_refused(warmup):
    with pytest.raises(ValueError, match=r"warmup=.*must lie in \[0, 1\)"):
        WarmupCosine(warmup=warmup)


# A filter that learns, and the generated function


def learning(groups=(slice(0, 20), slice(20, D)), **options):
    return Optimizer(
        start(), filter=KalmanAuto(), calibration=Exact(), update=AdamW(lr=0.03), schedule=WarmupCosine(), steps=T, groups=groups, **options
    )


def test_what_a_filter_learned_is_resumed_bit_for_bit_for_every_group():
    gs = SIGMA_W * gradients(30)
    straight, stopped, resumed = learning(), learning(), learning()
    trajectory(straight, gs, SIGMA_W)
    trajectory(stopped, gs[:17], SIGMA_W)
    saved = {key: value.clone() for key, value in stopped.state_dict().items()}
    assert {"filter.level", "filter.level.1", "filter.tuned.1", "calibration.P.1"} <= saved.keys()
    resumed.load_state_dict(saved, 17)
    trajectory(resumed, gs[17:], SIGMA_W)
    ends = straight.state_dict(), resumed.state_dict()
    assert all(torch.equal(ends[0][key], ends[1][key]) for key in ends[0])
    with pytest.raises(ValueError, match=r"filter\.tuned"):
        learning().load_state_dict({key: value for key, value in saved.items() if key != "filter.tuned"}, 17)


def test_groups_learn_apart():
    gs = SIGMA_W * gradients(40)
    gs[:, 20:] += torch.arange(40)[:, None] * 2.0
    optimizer = learning()
    trajectory(optimizer, gs, SIGMA_W)
    still, moving = (optimizer.filter.tuned(known) for known in optimizer.learned)
    assert still.K < 0.2
    assert still.w > 0.9 > 0.1 > moving.w


@pytest.mark.skipif(not fused.available(), reason="no C++ compiler is installed")
@pytest.mark.parametrize(
    ("filter", "calibration", "options"),
    [
        (Innovation(omega=0.9), Steady(), {}),
        (Kalman(), Exact(eps_v="auto"), {"averaging": EMAWeights(decay=0.9)}),
        (KalmanAuto(), Exact(), {"groups": [slice(0, 3000), slice(3000, 8193)], "scaling": SecondMoment()}),
    ],
    ids=["fiber", "kalman, averaging", "kalman_auto, scaling"],
)
def test_the_generated_function_does_what_the_lines_say(filter, calibration, options):
    """float64, so that only the order of operations may show; 12 steps, numbers that change at each, one compilation."""
    d = 8193
    g, ends = SIGMA_W * gradients(12, d), []
    for compiled in (False, True):
        optimizer = Optimizer(
            start(d), filter=filter, calibration=calibration, update=AdamW(lr=0.03, weight_decay=0.1), schedule=WarmupCosine(), steps=12,
            compiled=compiled, **options,
        )  # fmt: skip
        for row in g:
            scale = optimizer.scale
            optimizer.step(Release(row if scale is None else row * scale, Noise(SIGMA_W), scale))
        ends.append(optimizer.state_dict())
    assert ends[0].keys() == ends[1].keys()
    for key, value in ends[0].items():
        torch.testing.assert_close(ends[1][key], value, rtol=1e-9, atol=1e-12, msg=lambda text, key=key: f"{key}: {text}")


def test_a_large_model_is_compiled_and_a_small_one_is_not(monkeypatch):
    asked = []
    monkeypatch.setattr(onepass, "fused", lambda function: asked.append(function))
    make(AdamW(lr=1e-3), theta=torch.zeros(onepass.COMPILE_FROM))
    make(AdamW(lr=1e-3))
    assert len(asked) == 1


def test_where_the_compiler_fails_the_update_runs_as_it_is(monkeypatch):
    def broken(function, **options):
        def call(*arguments):
            raise torch._dynamo.exc.TorchDynamoException("no compiler today")

        return call

    monkeypatch.setattr(fused, "available", lambda: True)
    monkeypatch.setattr(torch, "compile", broken)
    plain, fallen = (
        Optimizer(start(), filter=Innovation(), calibration=Steady(), update=AdamW(lr=0.03), schedule=Constant(), steps=T, compiled=c)
        for c in (False, True)
    )
    expected = trajectory(plain, gradients(3), SIGMA_W)
    with pytest.warns(UserWarning, match="could not be compiled \\(no compiler today\\): it runs uncompiled"):
        found = trajectory(fallen, gradients(3), SIGMA_W)
    assert torch.equal(found, expected)
