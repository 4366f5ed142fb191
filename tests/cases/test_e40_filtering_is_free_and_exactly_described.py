"""E40 (FILT): (a) filtering costs no epsilon; (b) an EMA's noise variances; (c) DP-AdamBC's phi and floor; (d) mixtures are clipped once.

Origin: CASES.md (DiSK, DOPPLER, DP-AdamBC; opacus#706, tfp#100).  Wrong: (a) another epsilon for a filtered method; (c) phi of the sum,
sigma^2 C^2 = 1, subtracted from moments of the mean, or the root of a negative; (d) the two gradients of an example clipped apart, which
moves the sum by (|a| + |1 - a|) C.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import fiberdp
from fiberdp import reference
from fiberdp.accounting import compose
from fiberdp.engines import ENGINES
from fiberdp.filters import EMA, Identity
from fiberdp.linear import NoiseVariance
from fiberdp.methods import Method
from fiberdp.moments import Raw
from fiberdp.observation import TwoPoint
from fiberdp.optim import SGD, AdamW, Constant
from fiberdp.sampling import Poisson
from fiberdp.types import ClippedSum, Noise, Probe

KEYS = fiberdp.Keys.seeded(40)


class Vector(nn.Module):
    def __init__(self, d, start=0.0, dtype=torch.float32) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.full((d,), start, dtype=dtype))


def linear(m, x):
    """f(w; x) = w.x, whose gradient is x."""
    return (m.w * x).sum(1)


def steep(m, x):
    """f(w; x) = 500 x w^2, whose gradient at x = 1 is 1000 w: beyond C on both sides of 0."""
    return (500 * x * m.w.square()).sum(1)


def private(method, model, loss_fn, x, engine, *, sigma, steps, clip_norm=1.0):
    n = len(x)
    plan = fiberdp.plan(method=method, num_examples=n, batch_size=n, steps=steps, noise_multiplier=sigma, delta=1e-5, clip_norm=clip_norm)
    return plan.private(model, loss_fn, x, keys=KEYS, engine=engine)


@pytest.fixture
def _short_receipt(monkeypatch):
    """4 steps instead of 64: the receipt has its own tests, and on a model this small it would take all the time."""
    monkeypatch.setattr("fiberdp.trainer.receipt_steps", lambda numel: 4)


# ---- (a) ----


def test_a_filter_costs_no_epsilon():
    plans = [
        fiberdp.plan(method=method, num_examples=10_000, batch_size=100, steps=1000, noise_multiplier=1.0, delta=1e-5, clip_norm=1.0)
        for method in fiberdp.METHODS
        if method != "mf-dp-ftrl"  # its noise, and so its sampling, is another
    ]
    assert plans[0].epsilon == pytest.approx(1.82824, abs=1e-5)  # E26: sigma = 1, q = .01, T = 1000, PLD
    assert len({repr(plan.sampler.charge(plan.noise_multiplier, plan.steps)) for plan in plans}) == 1
    assert len({(plan.relation, plan.accountant) for plan in plans}) == 1
    assert {plan.epsilon for plan in plans if plan.method.name in ("disk", "fiber")} == {plans[0].epsilon}


def test_a_filter_needs_no_other_sigma():
    sigmas = {
        fiberdp.plan(
            method=method, num_examples=1_000, batch_size=100, steps=20, epsilon=2.0, delta=1e-4, clip_norm=1.0, accountant="rdp"
        ).noise_multiplier
        for method in ("dp-sgd", "fiber")
    }  # fmt: skip
    assert len(sigmas) == 1


@pytest.mark.usefixtures("_short_receipt")
def test_runs_of_filtered_and_unfiltered_methods_are_charged_alike():
    events = []
    for method in ("dp-sgd", "disk", "fiber"):
        run = private(method, Vector(2), linear, torch.ones(4, 2), "vmap", sigma=1.0, steps=3)
        assert len(list(run)) == len(run.ledger) == 3
        events.append(run.ledger.event())
    assert events[0] == events[1] == events[2] == compose(run.plan.event(t) for t in range(3))


# ---- (b) ----

KAPPA, VARIANCES, STATIONARY = 0.3, (0.09, 0.1341, 0.155709), 0.3 / 1.7

NO_FILTER = Identity().system(None)


def smoothed(init_at):
    """theta_t - theta_{t+1} = g~_t."""
    return Method(filter=EMA(kappa=KAPPA, init_at=init_at), update=SGD(lr=1.0, momentum=0.0), schedule=Constant())


def test_ema_variances_from_its_linear_system():
    ema, variance = EMA(kappa=KAPPA, init_at="zero"), NoiseVariance()
    found = [variance.update(ema.system(t), Noise(1.0)) for t in range(60)]
    assert found[:3] == pytest.approx(VARIANCES, rel=1e-12)
    assert found[-1] == pytest.approx(STATIONARY, rel=1e-9)
    assert ema.noise_gain() == pytest.approx(STATIONARY, rel=1e-12) == ema.system(1).noise_gain()
    assert ema.noise_gain() == pytest.approx(0.176471, rel=1e-5)
    first = NoiseVariance()
    assert [first.update(EMA(kappa=KAPPA).system(t), Noise(1.0)) for t in range(2)] == pytest.approx([1.0, 0.49 + 0.09], rel=1e-12)


@pytest.mark.parametrize("engine", ENGINES)
def test_ema_variances_of_the_noise_that_trains(engine):
    """100,000 coordinates of unit noise: the standard error of a variance is 0.45 %, and 4.5 of them are 2 %."""
    d, steps = 100_000, 16  # at t = 16 the variance is within 1e-4 of its limit
    run = private(smoothed("zero"), Vector(d), linear, torch.zeros(1, d), engine, sigma=1.0, steps=steps)
    measured = []
    for _ in range(steps):
        before = run.flat.theta.clone()
        run.step()
        measured.append(float((before - run.flat.theta).double().square().mean()))
    bound = 4.5 * (2 / d) ** 0.5
    right = [*VARIANCES, STATIONARY]
    for var, known in zip([*measured[:3], measured[-1]], right):
        assert abs(var / known - 1) < bound
        # as at the next t, with std for variance, or unfiltered: each would be seen
        assert all(abs(var / other - 1) > bound for other in (*(r for r in right if r != known), known**0.5, 1.0))


@pytest.mark.usefixtures("_short_receipt")
@pytest.mark.parametrize(("init_at", "outputs"), [("first", (1.0, 1.0)), ("zero", (0.3, 0.51))])
@pytest.mark.parametrize("engine", ENGINES)
def test_first_outputs_on_a_constant_gradient_of_one(engine, init_at, outputs):
    """The library corrects an EMA's start by starting at the first gradient, which is DiSK's filter."""
    assert fiberdp.METHODS["disk"].filter.init_at == "first"
    run = private(smoothed(init_at), Vector(1), linear, torch.ones(1, 1), engine, sigma=0.0, steps=2, clip_norm=2.0)
    for right in outputs:
        before = float(run.flat.theta)
        run.step()
        assert before - float(run.flat.theta) == pytest.approx(right, rel=1e-5)


# ---- (c) ----

PHI = 1.52587890625e-5  # (sigma C / B)^2 at sigma = C = 1, B = 256


class TwoOf(Poisson):
    """The same two examples every time: since all gradients are zero, it cannot matter who is drawn."""

    def indices(self, stream, step):
        return torch.arange(2)


def adambc(engine, steps, d=20_000):
    """DP-AdamBC on examples whose gradients are zero, N = B = 256, float64."""
    plan = fiberdp.plan(
        method=replace(fiberdp.method("dp-adambc", lr=0.01), schedule=Constant()),
        num_examples=256, batch_size=256, steps=steps, noise_multiplier=1.0, delta=1e-5, clip_norm=1.0,
    )  # fmt: skip
    plan = replace(plan, sampler=TwoOf(num_examples=256, batch_size=256))
    x = torch.zeros(256, 1, dtype=torch.float64).expand(256, d)
    return plan.private(Vector(d, dtype=torch.float64), linear, x, keys=KEYS, engine=engine)


def test_phi_is_the_noise_variance_of_the_mean():
    noise = adambc("vmap", 1, d=8).pipeline.release(0, None).noise
    assert noise.std**2 == Raw().correction(noise, NO_FILTER, NO_FILTER, 0, 0.999, {})[0].phi == PHI
    of_the_sum = private("dp-adambc", Vector(1), linear, torch.zeros(1, 1), "vmap", sigma=1.0, steps=1).pipeline.release(0, None).noise
    assert Raw().correction(of_the_sum, NO_FILTER, NO_FILTER, 0, 0.999, {})[0].phi == 1.0  # B = 1: the sum is the mean


@pytest.mark.parametrize("engine", ENGINES)
def test_v_hat_averages_phi_and_is_floored(engine):
    """3 steps of 20,000 coordinates: the mean of v^ has a standard error of 0.58 %."""
    steps, d = 3, 20_000
    run = adambc(engine, steps)
    assert len(list(run)) == steps
    v_hat = run.optimizer.moments["v"] / (1 - 0.999**steps)
    assert abs(float(v_hat.mean()) / PHI - 1) < 4.5 * (2 / (steps * d)) ** 0.5
    assert float((v_hat < PHI).double().mean()) > 0.5  # of a chi^2 with 3 degrees of freedom 0.61 lies below its mean
    trajectory = reference.dp_adambc(
        np.zeros(d), lambda theta, i: theta, [[]] * steps,
        [KEYS.stream("noise").normal(t, 0, d, dtype=torch.float64).numpy() for t in range(steps)],
        C=1.0, sigma=1.0, B=256, lr=lambda t: 0.01,
    )  # fmt: skip
    assert run.flat.theta.isfinite().all()
    torch.testing.assert_close(run.flat.theta, torch.from_numpy(trajectory[-1]), rtol=1e-7, atol=1e-10)


def test_a_root_without_the_floor_is_caught(monkeypatch):
    right = AdamW.update
    monkeypatch.setattr(AdamW, "update", lambda self, *args: right(self, *args[:-1], (args[-1][0], -math.inf)))
    run = adambc("vmap", 1)
    run.step()
    assert float(run.flat.theta.isnan().double().mean()) > 0.5


# ---- (d) ----

APART = {(0.3, 0.5): 25 / 3, (0.7, 0.5): 1.0}  # (kappa, gamma): |a| + |1 - a|


class ClippedApart:
    """A fault: each of the two gradients of an example is clipped, and then they are mixed."""

    def __init__(self, right) -> None:
        self.right = right

    def clipped_sum(self, probes, d, batch, clip, *, out, **kwargs):
        parts = [(p.weight, self.right.clipped_sum([Probe(1.0, p.lookahead)], d, batch, clip, **kwargs).total) for p in probes]
        return ClippedSum((0 if out is None else out) + sum(weight * total for weight, total in parts), clip.sensitivity)


def observation(kappa, gamma):
    return TwoPoint(kappa=kappa, gamma=gamma, allow_extrapolation=True)


def second_release(kappa, gamma, engine, *, lr, fault=None):
    """g_1 with C = 2: after theta_0 = 1 and theta_1 = 1 - 2 lr, so d = -2 lr, the two gradients are at theta_1 and theta_1 + gamma d."""
    method = Method(observation=observation(kappa, gamma), update=SGD(lr=lr, momentum=0.0), schedule=Constant())
    run = private(method, Vector(1, start=1.0), steep, torch.ones(1, 1), engine, sigma=0.0, steps=2, clip_norm=2.0)
    run.prove()
    if fault:
        run.pipeline.engine = fault(run.pipeline.engine)
    run.step()
    assert float(run.flat.theta) == pytest.approx(1 - 2 * lr, rel=1e-5)
    before = float(run.flat.theta)
    run.step()
    return (before - float(run.flat.theta)) / lr


@pytest.mark.parametrize(("kappa", "gamma"), APART)
def test_weights_of_the_mixture(kappa, gamma):
    a = observation(kappa, gamma).a
    assert a == pytest.approx((1 - kappa) / (kappa * gamma), rel=1e-12)
    assert abs(a) + abs(1 - a) == pytest.approx(APART[kappa, gamma], rel=1e-12)
    assert observation(kappa, gamma).probes() == (Probe(1 - a, 0.0), Probe(a, gamma))


def test_extrapolation_must_be_asked_for():
    with pytest.raises(ValueError, match=r"kappa=0.3, gamma=0.5 give a=4.667"):
        fiberdp.method("disk", kappa=0.3, gamma=0.5)
    assert fiberdp.method("disk", kappa=0.3, gamma=0.5, allow_extrapolation=True).observation == observation(0.3, 0.5)
    assert fiberdp.method("disk", kappa=0.7, gamma=0.5).observation.a < 1


@pytest.mark.usefixtures("_short_receipt")
@pytest.mark.parametrize(("kappa", "gamma"), APART)
@pytest.mark.parametrize("engine", ENGINES)
def test_the_mixture_is_clipped_once(engine, kappa, gamma):
    """lr = .4: theta_1 = .2 and .2 - .4 = -.2, so the gradients point apart; lr = .1: .8 and .7, so they agree."""
    a = observation(kappa, gamma).a
    for lr, at_theta, ahead in ((0.4, 0.2, -0.2), (0.1, 0.8, 0.7)):
        u = 1000 * ((1 - a) * at_theta + a * ahead)
        assert abs(u) > 2
        right = second_release(kappa, gamma, engine, lr=lr)
        assert right == pytest.approx(math.copysign(2.0, u), rel=1e-5)
        assert abs(right) <= 2 * (1 + 1e-6)
        wrong = second_release(kappa, gamma, engine, lr=lr, fault=ClippedApart)
        assert wrong == pytest.approx(2 * ((1 - a) + a * math.copysign(1.0, ahead)), rel=1e-5)
    # what the case says of clipping apart: at its worst (|a| + |1 - a|) C, which for a convex mixture is C and does no harm
    worst = max(abs(second_release(kappa, gamma, engine, lr=lr, fault=ClippedApart)) for lr in (0.4, 0.1))
    assert worst == pytest.approx(2 * APART[kappa, gamma], rel=1e-5)
