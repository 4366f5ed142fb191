"""Any filter behind any mechanism with any calibration: `exact` subtracts what the noise really adds to v^_t, and every composition trains.

The noise comes out of the mechanism itself (a sum of zeros goes in), so its strategy, its sensitivity, its memory, what it declares, the
filter's system and the calibration all have to agree.
"""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from torch import nn

import fiberdp
from fiberdp._random import Keys
from fiberdp.filters import KalmanAuto
from fiberdp.mechanisms import Banded, CorrelatedGaussian, White, WhiteOnGrid
from fiberdp.methods import Method
from fiberdp.moments import CALIBRATIONS, Exact, Steady
from fiberdp.optim import AdamW, Constant, Optimizer
from fiberdp.types import ClippedSum
from grid import FEW

MECHANISMS = [
    White(),
    WhiteOnGrid(),
    Banded(bands=8),
    Banded(strategy="bsr", bands=4),
    Banded(strategy="bisr"),
    Banded(strategy="lambda-cgd"),
    Banded(strategy="blt"),
]
FILTERS = [*FEW, KalmanAuto()]
d, T, STEPS, BETA2, LIMIT = 10_000, 501, (1, 5, 50, 500), 0.999, 4.0


def schedule(name, t):
    """Sensitivity of the sum at step t: constant, or as if the clip norm changed along the run."""
    return 1.0 if name == "constant" else 1.0 + math.sin(t / 7) ** 2 + 2 * (20 <= t < 25)


def deviations(mechanism, changing, calibrations, filters=FILTERS):
    """{(filter, calibration, t): standard errors between the mean of v^_t over d coordinates of pure noise and phi_t}.

    One stream of noise for all.  Size: 4 SE, 6e-5 a comparison, fixed seed.  Power: one v^_t has relative std sqrt(2) at most, so the SE
    is at most 1.4 % of phi and an error of 10 % lies 7 SE away.
    """
    gate = mechanism.gate(noise_multiplier=2.0, batch_size=8, steps=T, separation=25)
    stream, memory = Keys.seeded(41).stream("noise"), gate.init(torch.zeros(d))
    runs = {
        (filter, calibration): Optimizer(
            torch.zeros(d), filter=filter, calibration=calibration, update=AdamW(lr=1e-3, betas=(0.9, BETA2)), schedule=Constant(), steps=T
        )
        for filter, calibration in product(filters, calibrations)
    }
    found = {}
    for t in range(T):
        release = gate.release(ClippedSum(torch.zeros(d), schedule(changing, t)), stream, t, *([memory] if memory else []))
        for (filter, calibration), optimizer in runs.items():
            optimizer.step(release)
            if t in STEPS:
                v_hat = optimizer.moments["v"].double() / (1 - BETA2 ** (t + 1))
                phi = optimizer._corrections[0].phi
                found[filter, calibration, t] = float((v_hat.mean() - phi) / (v_hat.std() / math.sqrt(d)))
    return found


@pytest.mark.parametrize("changing", ["constant", "changing"])
@pytest.mark.parametrize("mechanism", MECHANISMS, ids=lambda m: getattr(m, "strategy", m.name))
def test_exact_is_the_mean_of_v_hat_for_every_filter_behind_every_mechanism(mechanism, changing):
    for (filter, _, t), deviation in deviations(mechanism, changing, [Exact()]).items():
        assert abs(deviation) < LIMIT, (filter, t, deviation)


def test_what_takes_correlated_noise_for_white_is_rejected(monkeypatch):
    """The filter's white-noise gain on BandMF's noise: off by half or more, at every filter that is not trivial."""
    honest = CorrelatedGaussian.noise
    monkeypatch.setattr(CorrelatedGaussian, "noise", lambda self, *args: type(honest(self, *args))(honest(self, *args).std))
    found = deviations(
        Banded(bands=8), "constant", [Exact()], filters=[filter for filter in FEW if filter.name in ("innovation", "ema", "identity")]
    )
    assert all(abs(deviation) > 2 * LIMIT for (_, _, t), deviation in found.items() if t >= 5)


def test_a_stationary_phi_is_rejected_under_a_changing_clip_norm():
    found = deviations(White(), "changing", [Steady()], filters=[filter for filter in FEW if filter.name == "innovation"])
    assert any(abs(deviation) > 2 * LIMIT for deviation in found.values())


# Every composition runs


@pytest.mark.parametrize("calibration", CALIBRATIONS)
@pytest.mark.parametrize("mechanism", MECHANISMS, ids=lambda m: getattr(m, "strategy", m.name))
@pytest.mark.parametrize("filter", [f for f in FILTERS if f.name in fiberdp.filters.FILTERS], ids=lambda f: f.name)
def test_any_composition_proves_its_noise_and_trains(filter, mechanism, calibration):
    method = Method(filter=filter, mechanism=mechanism, calibration=CALIBRATIONS[calibration](), update=AdamW(lr=0.01))
    assert Method.from_json(method.to_json()) == method
    generator = torch.Generator().manual_seed(9)
    data = {"x": torch.randn(96, 5, generator=generator), "y": torch.randint(0, 3, (96,), generator=generator)}
    plan = fiberdp.plan(method=method, num_examples=96, batch_size=8, steps=4, noise_multiplier=1.0, delta=1e-3, clip_norm=1.0)
    torch.manual_seed(2)
    run = plan.private(
        nn.Linear(5, 3), lambda m, b: nn.functional.cross_entropy(m(b["x"]), b["y"], reduction="none"), data, keys=Keys.seeded(1)
    )
    assert [step.step for step in run] == [0, 1, 2, 3]
    assert run.receipt.passed
    assert run.flat.theta.isfinite().all()
