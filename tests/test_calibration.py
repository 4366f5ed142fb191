"""Every calibration subtracts what it says; `exact` subtracts what filtered noise really adds to v^_t, at every t."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from fiberdp._random import Keys
from fiberdp.filters import EMA, Identity, Innovation, KalmanAuto
from fiberdp.mechanisms import Gaussian
from fiberdp.moments import CALIBRATIONS, Exact, NoCorrection, Raw, Steady
from fiberdp.moments.calibration import relative_std
from fiberdp.optim import AdamW, Constant, Optimizer
from fiberdp.types import ClippedSum, Noise, Release
from grid import CASES, FEW, memory, run

every_filter = pytest.mark.parametrize("filter", CASES, ids=repr)
one_of_each = pytest.mark.parametrize("filter", FEW, ids=repr)

SIGMA_W = 0.25
WHITE = (1.0,)
COLOURED = (1.0, -0.5, -0.125, -0.0625)
SAMPLES, STEPS, LIMIT = 20_000, (1, 5, 50, 500), 4.0


def phis(calibration, filter, noises, beta2):
    """phi_0, phi_1, … for releases that carry these noises."""
    state, values = {}, []
    for t, noise in enumerate(noises):
        correction, state = calibration.correction(noise, filter.system(t), filter.system(None), t, beta2, state)
        values.append(None if correction is None else correction.phi)
    return np.array(values)


def second_moments_of_noise(filter, noises, beta2):
    """E[v^_t] under pure noise, by summing over every pair (step, innovation) that contributes; nothing of linear.py is used.

    n_t = Sum_s R_ts w_s with R read off update() on unit impulses, w_s = std_s Sum_j k_j z_{s-j}, and Lemma C.1:
    E[v^_t] = (1 - beta2)/(1 - beta2^{t+1}) Sum_s beta2^{t-s} E[n_s^2].
    """
    T = len(noises)
    response = run(filter, torch.eye(T, dtype=torch.float64))
    W = np.zeros((T, T))
    for s, noise in enumerate(noises):
        for j, k in enumerate(noise.impulse_response(s + 1)):
            W[s, s - j] = noise.std * k
    variances = ((response.numpy() @ W) ** 2).sum(1)
    return np.array([sum((1 - beta2) * beta2 ** (t - s) * variances[s] for s in range(t + 1)) / (1 - beta2 ** (t + 1)) for t in range(T)])


def deviations(filter, calibration, steps=STEPS, beta2=0.999):
    """How many standard errors the mean of v^_t over SAMPLES coordinates of pure noise lies from phi_t, at each of `steps`.

    Size: 4 SE, so 6e-5 a comparison, with a fixed seed.  Power: one v^_t has relative std sqrt(2) at most, so the SE is at most 1 %
    of phi and an error of 10 % lies 10 SE away or more.
    """
    generator = torch.Generator().manual_seed(23)
    optimizer = Optimizer(
        torch.zeros(SAMPLES), filter=filter, calibration=NoCorrection(), update=AdamW(lr=1e-3, betas=(0.9, beta2)),
        schedule=Constant(), steps=1,
    )  # fmt: skip
    noise = Noise(SIGMA_W)
    phi = phis(calibration, filter, [noise] * (max(steps) + 1), beta2)
    found = {}
    for t in range(max(steps) + 1):
        optimizer.step(Release(SIGMA_W * torch.randn(SAMPLES, generator=generator), noise))
        if t in steps:
            v_hat = optimizer.moments["v"].double() / (1 - beta2 ** (t + 1))
            found[t] = float((v_hat.mean() - phi[t]) / (v_hat.std() / math.sqrt(SAMPLES)))
    return found


# What each subtracts


def test_the_table_of_calibrations():
    assert list(CALIBRATIONS) == ["none", "raw", "steady", "exact"]
    assert all(cls.name == name for name, cls in CALIBRATIONS.items())


@every_filter
def test_none_subtracts_nothing_and_has_no_floor(filter):
    assert phis(NoCorrection(), filter, [Noise(SIGMA_W)] * 3, 0.999).tolist() == [None] * 3


@every_filter
@pytest.mark.parametrize("k", [WHITE, COLOURED])
def test_raw_subtracts_the_variance_of_the_release_whatever_the_filter(filter, k):
    expected = SIGMA_W**2 * sum(x * x for x in k)
    np.testing.assert_allclose(phis(Raw(), filter, [Noise(SIGMA_W, k)] * 3, 0.999), expected, rtol=1e-14)


@every_filter
def test_steady_subtracts_A_sigma_w_squared_eq_11(filter):
    np.testing.assert_allclose(phis(Steady(), filter, [Noise(SIGMA_W)] * 3, 0.999), filter.noise_gain() * SIGMA_W**2, rtol=1e-10)


def test_steady_of_fiber_is_11_13ths_of_sigma_w_squared_and_of_disk_7_13ths():
    noise = [Noise(SIGMA_W)]
    assert phis(Steady(), Innovation(omega=0.9), noise, 0.999)[0] == pytest.approx(11 / 13 * SIGMA_W**2, rel=1e-12)
    assert phis(Steady(), EMA(kappa=0.7), noise, 0.999)[0] == pytest.approx(7 / 13 * SIGMA_W**2, rel=1e-12)


@pytest.mark.parametrize("name", CALIBRATIONS)
@every_filter
def test_no_noise_means_nothing_to_subtract(name, filter):
    values = phis(CALIBRATIONS[name](), filter, [Noise(0.0)] * 3, 0.999)
    assert all(phi in (None, 0.0) for phi in values)


# exact is E[v^_t] under pure noise


@every_filter
@pytest.mark.parametrize("beta2", [0.0, 0.9, 0.999])
@pytest.mark.parametrize("k", [WHITE, COLOURED], ids=["white", "coloured"])
@pytest.mark.parametrize("schedule", ["constant", "changing"])
def test_exact_is_the_double_sum_of_lemma_c_1_for_any_filter_schedule_and_colour(filter, beta2, k, schedule):
    T = 60
    stds = np.full(T, SIGMA_W) if schedule == "constant" else SIGMA_W * (1 + np.sin(np.arange(T)) ** 2 + 3 * (np.arange(T) == 20))
    noises = [Noise(float(std), k) for std in stds]
    expected = second_moments_of_noise(filter, noises, beta2)
    np.testing.assert_allclose(phis(Exact(), filter, noises, beta2), expected, rtol=1e-11)  # the narrow low-pass filter loses two digits


@every_filter
def test_exact_is_the_mean_of_v_hat_on_simulated_noise(filter):
    for t, deviation in deviations(filter, Exact()).items():
        assert abs(deviation) < LIMIT, t


@pytest.mark.parametrize(
    ("filter", "calibration", "t"),
    [
        (Innovation(omega=0.9), Raw(), 500),  # the missing A(omega), 15 % of phi
        (Innovation(omega=0.9), Raw(), 50),
        (Innovation(omega=0.3), Steady(), 1),  # stationary before its time
        (EMA(kappa=0.7), Raw(), 500),
        (EMA(kappa=0.3, init_at="zero"), Steady(), 1),
        (EMA(kappa=0.3, init_at="first"), Steady(), 5),
    ],
    ids=repr,
)
def test_what_is_not_exact_is_rejected_by_that_simulation(filter, calibration, t):
    assert abs(deviations(filter, calibration, (t,))[t]) > 2 * LIMIT


def test_an_exact_phi_off_by_ten_percent_is_rejected_at_every_t(monkeypatch):
    honest = Exact._phi
    monkeypatch.setattr(Exact, "_phi", lambda self, noise, *rest: honest(self, Noise(noise.std * math.sqrt(1.1)), *rest))
    assert all(abs(deviation) > LIMIT for deviation in deviations(Innovation(omega=0.9), Exact()).values())


@pytest.mark.parametrize("filter", [filter for filter in CASES if memory(filter) < 1000], ids=repr)
def test_steady_tends_to_exact_as_t_grows(filter):
    noises = [Noise(SIGMA_W)] * 601
    gap = np.abs(phis(Exact(), filter, noises, 0.95) / phis(Steady(), filter, noises[:1], 0.95)[0] - 1)
    assert gap[600] < 1e-10
    assert gap[200] <= gap[50] + 1e-12
    assert gap[50] <= gap[10] + 1e-12


@pytest.mark.parametrize("omega", [0.1, 0.3, 0.9])
def test_steady_never_subtracts_less_than_exact_behind_the_innovation_filter_lemma_c_2(omega):
    filter, noises = Innovation(omega=omega), [Noise(SIGMA_W)] * 200
    assert (phis(Exact(), filter, noises, 0.999) <= phis(Steady(), filter, noises[:1], 0.999) * (1 + 1e-12)).all()


def test_white_noise_gain_on_correlated_noise_would_be_wrong():
    filter = Innovation(omega=0.9)
    coloured, white = (phis(Steady(), filter, [Noise(1.0, k)], 0.999)[0] for k in (COLOURED, WHITE))
    direct = (np.convolve(filter.system(None).impulse_response(60), COLOURED) ** 2).sum()
    assert coloured == pytest.approx(direct, rel=1e-10)
    assert abs(coloured / white - 1) > 0.1


# The floor


def test_raw_of_the_mean_is_sigma_C_over_B_squared_case_e40c():
    noise = Gaussian(noise_multiplier=1.0, batch_size=256).noise(sensitivity=1.0)
    assert phis(Raw(), Identity(), [noise], 0.999)[0] == 1.52587890625e-5


def test_release_carries_the_noise_it_declares_sigma_C_over_B_case_e12():
    """SE of a std over 200 000 samples is 0.16 %; noise on the mean where the sum was meant is 4 times off."""
    clipped = ClippedSum(torch.zeros(200_000, dtype=torch.float64), sensitivity=0.5)
    release = Gaussian(noise_multiplier=2.0, batch_size=4).release(clipped, Keys.seeded(2).stream("noise"), 0)
    assert release.noise == Noise(0.25)
    assert float(release.value.std()) == pytest.approx(0.25, rel=4 * 0.0016)


@pytest.mark.parametrize("eps_v", [0.0, 1e-8])
@pytest.mark.parametrize("name", ["raw", "steady", "exact"])
def test_all_zero_gradients_leave_v_hat_at_phi_and_floored_case_e40c(name, eps_v):
    d, sigma, C, B, t = 20_000, 1.0, 1.0, 256, 9
    optimizer = Optimizer(
        torch.zeros(d, dtype=torch.float64), filter=Identity(), calibration=CALIBRATIONS[name](eps_v=eps_v), update=AdamW(lr=1e-3),
        schedule=Constant(), steps=t + 1,
    )  # fmt: skip
    mechanism, stream = Gaussian(noise_multiplier=sigma, batch_size=B), Keys.seeded(1).stream("noise")
    for step in range(t + 1):
        optimizer.step(mechanism.release(ClippedSum(torch.zeros(d, dtype=torch.float64), C), stream, step))
    v_hat = optimizer.moments["v"] / (1 - 0.999 ** (t + 1))
    phi = (sigma * C / B) ** 2
    assert abs(float(v_hat.mean()) - phi) < LIMIT * float(v_hat.std()) / math.sqrt(d)
    assert 0.4 < float((v_hat < phi).double().mean()) < 0.7  # so many roots of negatives there would have been
    assert optimizer.theta.isfinite().all()
    assert optimizer.d.abs().max() > 0


class Recorder:
    """An update rule that writes down what it is given."""

    lr, betas, state_names = 1.0, (0.9, 0.5), ()

    def __init__(self):
        self.given = []

    def coefficients(self, t, lr):
        return ()

    def update(self, theta, g_tilde, state, correction):
        self.given.append(tuple(correction))


def test_phi_is_computed_from_the_noise_that_each_release_carries():
    recorder, stds = Recorder(), (1.0, 3.0, 0.0)
    optimizer = Optimizer(torch.zeros(2), filter=Identity(), calibration=Exact(eps_v=0.125), update=recorder, schedule=Constant(), steps=3)
    for std in stds:
        optimizer.step(Release(torch.zeros(2), Noise(std)))
    P = (0.5, 0.25 + 4.5, 0.125 + 2.25)  # P_t = P_{t-1}/2 + std_t^2/2
    assert recorder.given == [(pytest.approx(p / (1 - 0.5 ** (t + 1))), 0.125) for t, p in enumerate(P)]


@pytest.mark.parametrize("name", ["raw", "steady", "exact"])
@pytest.mark.parametrize("eps_v", [-1e-9, float("inf"), float("nan"), "small"])
def test_a_floor_that_is_negative_or_infinite_is_refused(name, eps_v):
    with pytest.raises(ValueError, match=r"eps_v=.*must lie in \[0, inf\)"):
        CALIBRATIONS[name](eps_v=eps_v)


# A floor that follows the noise


@pytest.mark.parametrize("beta2", [0.9, 0.999])
def test_the_automatic_floor_is_the_spread_of_v_hat_under_white_noise_methods_section_3(beta2):
    """20 000 coordinates: the std of a (nearly) chi^2-like mean is known to better than 2 %, and 4 SE of it are 8 % at t = 0."""
    generator = torch.Generator().manual_seed(31)
    optimizer = Optimizer(
        torch.zeros(SAMPLES), filter=Identity(), calibration=NoCorrection(), update=AdamW(lr=1e-3, betas=(0.9, beta2)),
        schedule=Constant(), steps=1,
    )  # fmt: skip
    for t in range(201):
        optimizer.step(Release(SIGMA_W * torch.randn(SAMPLES, generator=generator), Noise(SIGMA_W)))
        if t in (0, 1, 10, 200):
            v_hat = optimizer.moments["v"].double() / (1 - beta2 ** (t + 1))
            assert float(v_hat.std() / v_hat.mean()) == pytest.approx(relative_std(beta2, t), rel=0.08), t


@pytest.mark.parametrize("name", ["raw", "steady", "exact"])
def test_auto_is_so_many_standard_deviations_of_phi(name):
    system = Innovation().system(None)
    one, three = (
        CALIBRATIONS[name](eps_v="auto", eps_v_scale=k).correction(Noise(SIGMA_W), system, system, 7, 0.99, {})[0] for k in (1.0, 3.0)
    )
    assert one.floor == pytest.approx(one.phi * relative_std(0.99, 7))
    assert three == pytest.approx((one.phi, 3 * one.floor))


def test_a_scale_without_an_automatic_floor_is_refused():
    with pytest.raises(ValueError, match=r"eps_v_scale=2.0 with eps_v=1e-08: it may be given with eps_v=\"auto\" only"):
        Exact(eps_v_scale=2.0)


# A filter that learns


def test_exact_follows_the_gains_that_kalman_auto_really_used():
    """phi_t against the mean of v^_t over 20 000 coordinates of pure noise, 4 SE, at t = 1, 5, 50, 500; A is far from constant."""
    generator, beta2, d = torch.Generator().manual_seed(37), 0.999, SAMPLES
    optimizer = Optimizer(
        torch.zeros(d), filter=KalmanAuto(), calibration=Exact(), update=AdamW(lr=1e-3, betas=(0.9, beta2)), schedule=Constant(), steps=501,
        groups=[slice(0, d // 2), slice(d // 2, d)],
    )  # fmt: skip
    for t in range(501):
        optimizer.step(Release(SIGMA_W * torch.randn(d, generator=generator), Noise(SIGMA_W)))
        if t in STEPS:
            for group, correction in zip(optimizer.groups, optimizer._corrections):
                v_hat = optimizer.moments["v"][group].double() / (1 - beta2 ** (t + 1))
                assert abs(float((v_hat.mean() - correction.phi) / (v_hat.std() / math.sqrt(d // 2)))) < LIMIT, t
    assert optimizer._corrections[0].phi < 0.2 * SIGMA_W**2  # so it smooths, where there is nothing but noise


# Clamp mass (paper, E.6)


def test_clamp_mass_is_the_share_of_the_first_moment_on_floored_coordinates():
    optimizer = Optimizer(
        torch.zeros(4), filter=Identity(), calibration=Raw(eps_v=1e-4), update=AdamW(lr=1e-3), schedule=Constant(), steps=2
    )
    assert optimizer.clamp_mass() is None
    optimizer.step(Release(torch.tensor([0.1, -0.2, 3.0, 4.0]), Noise(1.0)))  # v^ - phi = g^2 - 1
    assert optimizer.clamp_mass() == pytest.approx(0.3 / 7.3)


def test_there_is_no_clamp_mass_without_correction():
    optimizer = Optimizer(
        torch.zeros(4), filter=Identity(), calibration=NoCorrection(), update=AdamW(lr=1e-3), schedule=Constant(), steps=2
    )
    optimizer.step(Release(torch.ones(4), Noise(1.0)))
    assert optimizer.clamp_mass() is None
