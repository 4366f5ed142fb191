"""Every registered filter is the linear system it says it is, with the noise gain it declares; then each one's own claims.

A new filter is tested by being registered; SETTINGS adds parameter values to its defaults.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from fiberdp.filters import EMA, FILTERS, Identity, Innovation
from fiberdp.linear import NoiseVariance, StateSpace
from fiberdp.types import Noise

SETTINGS = {
    "ema": [{"kappa": kappa, "init_at": at} for kappa in (0.05, 0.3, 0.7, 1.0) for at in ("first", "zero")],
    "innovation": [{"omega": omega} for omega in (0.05, 0.3, 0.5, 0.9, 1.0)],
}
CASES = list(dict.fromkeys(cls(**settings) for name, cls in FILTERS.items() for settings in [{}, *SETTINGS.get(name, [])]))
every_filter = pytest.mark.parametrize("filter", CASES, ids=repr)
OMEGAS = (0.01, 0.1, 0.3, 0.5, 0.9, 0.99)

WHITE = Noise(1.0)
SAMPLES, LIMIT = 60_000, 5.0  # coordinates, standard errors


def stationary(filter):
    """What a filter is after its first step, for good: the steady calibration takes it at t = 1 too."""
    return filter.system(1)


def run(filter, inputs):
    """[T, d] -> [T, d] through init and update."""
    state, outputs = filter.init(inputs[0]), []
    for g in inputs:
        g_tilde, state = filter.update(g, state)
        outputs.append(g_tilde.clone())
    return torch.stack(outputs)


def simulate(filter, inputs):
    """The same through system(t): z_t = M z_{t-1} + G g_t, g~_t = H z_t from z_{-1} = 0."""
    z, outputs = 0.0, []
    for t, g in enumerate(inputs.numpy()):
        system = filter.system(t)
        z = (system.M @ z if t else 0.0) + np.outer(system.G, g)
        outputs.append(system.H @ z)
    return torch.from_numpy(np.array(outputs))


def variances(filter, steps, noise=WHITE):
    """A_0, A_1, …: Var[n_t] for t < steps, as the exact calibration gets it."""
    variance = NoiseVariance()
    return np.array([variance.update(filter.system(t), noise) for t in range(steps)])


def memory(filter):
    """Steps after which what is forgotten of the variance is below 1e-9."""
    radius = stationary(filter).spectral_radius
    return 2 if radius < 1e-6 else 2 + math.ceil(math.log(1e-9) / (2 * math.log(radius)))


def standard_errors(filter, A):
    """How many standard errors the variance of update()'s output on white noise lies from A.

    SAMPLES independent Gaussian coordinates after the filter has warmed up: the SE of the mean square is A sqrt(2/SAMPLES), 0.6 %.
    Size at LIMIT = 5 SE: 6e-7.  Power against an A off by 10 %: that lies 16 SE away, so it is missed with probability 1e-26.
    """
    generator = torch.Generator().manual_seed(17)
    inputs = (torch.randn(SAMPLES, generator=generator) for _ in range(memory(filter)))
    state = None
    for g in inputs:
        state = filter.init(g) if state is None else state
        g_tilde, state = filter.update(g, state)
    return (float(g_tilde.double().square().mean()) - A) / (A * math.sqrt(2 / SAMPLES))


# What is claimed of every filter


@every_filter
def test_declared_noise_gain_is_the_lyapunov_one_corollary_4_4_and_the_sum_of_squares_proposition_4_3(filter):
    A, system = filter.noise_gain(), stationary(filter)
    assert system.noise_gain() == pytest.approx(A, rel=1e-10)
    assert (system.impulse_response(memory(filter)) ** 2).sum() == pytest.approx(A, rel=1e-7)
    assert variances(filter, memory(filter))[-1] == pytest.approx(A, rel=1e-7)


@every_filter
def test_declared_noise_gain_is_what_update_does_to_white_noise_eq_14(filter):
    assert abs(standard_errors(filter, filter.noise_gain())) < LIMIT


@pytest.mark.parametrize("filter", [Innovation(), EMA(), Identity()], ids=repr)
@pytest.mark.parametrize("wrong", [0.9, 1.1])
def test_a_noise_gain_off_by_ten_percent_is_rejected(filter, wrong):
    assert abs(standard_errors(filter, wrong * filter.noise_gain())) > 2 * LIMIT


def test_a_filter_with_another_gain_than_declared_is_rejected(monkeypatch):
    """omega 0.85 instead of 0.9 moves A by 6 %, which is 11 SE."""
    honest = Innovation.update
    monkeypatch.setattr(Innovation, "update", lambda self, g, state: honest(Innovation(omega=0.85), g, state))
    assert abs(standard_errors(Innovation(omega=0.9), Innovation(omega=0.9).noise_gain())) > LIMIT


@every_filter
def test_update_is_the_linear_system_that_system_says_first_step_included(filter):
    inputs = torch.randn(40, 7, dtype=torch.float64)
    torch.testing.assert_close(run(filter, inputs), simulate(filter, inputs), rtol=1e-12, atol=1e-13)


def test_a_wrong_first_step_is_seen_by_that_comparison(monkeypatch):
    monkeypatch.setattr(EMA, "system", lambda self, t: StateSpace(M=np.array([[1 - self.kappa]]), G=np.array([self.kappa]), H=np.ones(1)))
    inputs = torch.randn(40, 7, dtype=torch.float64)
    assert (run(EMA(), inputs) - simulate(EMA(), inputs)).abs().max() > 0.01


@every_filter
def test_update_is_pure(filter):
    g = torch.randn(9)
    state = filter.init(g)
    for _ in range(3):
        kept, kept_g = {name: value.clone() for name, value in state.items()}, g.clone()
        _, new = filter.update(g, state)
        assert new.keys() == state.keys()
        assert torch.equal(g, kept_g)
        assert all(torch.equal(state[name], kept[name]) for name in kept)
        again = filter.update(g, state)[1]
        assert all(torch.equal(again[name], new[name]) for name in new)
        g, state = torch.randn(9), new


@every_filter
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_update_on_slices_is_the_slice_of_the_update_bit_for_bit(filter, dtype):
    inputs = torch.randn(6, 101, dtype=dtype)
    whole = run(filter, inputs)
    parts = [run(filter, inputs[:, start : start + 13]) for start in range(0, 101, 13)]
    assert whole.dtype == dtype
    assert torch.equal(torch.cat(parts, dim=1), whole)


@every_filter
def test_a_constant_gradient_comes_through_unchanged_dc_gain_1(filter):
    assert stationary(filter).dc_gain() == pytest.approx(1, rel=1e-10)
    assert run(filter, torch.ones(memory(filter), 1, dtype=torch.float64))[-1].item() == pytest.approx(1, abs=1e-3)


@every_filter
def test_a_filter_is_stable_and_stays_what_it_is_at_step_1(filter):
    assert stationary(filter).spectral_radius < 1
    for t in (2, 1000):
        for part in ("M", "G", "H"):
            np.testing.assert_array_equal(getattr(filter.system(t), part), getattr(stationary(filter), part))


# Finite time


@pytest.mark.parametrize(
    ("filter", "expected"),
    [
        (Innovation(omega=0.9), {0: 0.81, 1: 0.8424, 2: 0.845316, 3: 0.846145, 100: 11 / 13}),
        (Innovation(omega=0.3), {0: 0.09, 1: 0.2664, 2: 0.409284, 20: 0.548147, 200: 17 / 31}),
        (EMA(kappa=0.3, init_at="zero"), {0: 0.09, 1: 0.1341, 2: 0.155709, 100: 0.176471}),  # case E40b
        (EMA(kappa=0.3, init_at="first"), {0: 1.0, 1: 0.49 + 0.09, 100: 0.176471}),
        (Identity(), {0: 1.0, 1: 1.0, 50: 1.0}),
    ],
    ids=repr,
)
def test_noise_variance_at_finite_time_is_as_in_methods_section_2(filter, expected):
    A = variances(filter, 201)
    for t, value in expected.items():
        assert A[t] == pytest.approx(value, abs=1e-6), t


@pytest.mark.parametrize("omega", OMEGAS)
def test_innovation_noise_variance_rises_to_A_geometrically_lemma_c_2(omega):
    """0 <= A - A_t <= c (1-omega)^{t+1}: M is similar to sqrt(1-omega) times a rotation, with condition number sqrt(c / |Sigma|)."""
    A, A_t = Innovation(omega=omega).noise_gain(), variances(Innovation(omega=omega), 60)
    gap, rate = A - A_t, (1 - omega) ** np.arange(1, 61)
    Sigma = np.array([[2 - omega, omega], [omega, 2 * omega]]) / (4 - 3 * omega)  # eqs. 64-65
    bound = max(omega / (1 - omega), (1 - omega) / omega) * np.linalg.norm(Sigma, 2)
    rounding = 1e-14
    assert (gap >= -rounding).all()
    assert (np.diff(A_t) >= -rounding).all()
    assert (gap <= bound * rate + rounding).all()
    seen = rate > 1e-10
    assert (gap / rate)[seen].max() > 0.01  # and no faster: the rate is the spectral radius squared


def test_first_output_of_an_ema_started_at_the_first_gradient_is_that_gradient_case_e40b():
    assert run(EMA(kappa=0.3), torch.ones(3, 1)).squeeze().tolist() == [1, 1, 1]
    assert run(EMA(kappa=0.3, init_at="zero"), torch.ones(1, 1)).item() == pytest.approx(0.3)


@pytest.mark.parametrize(("filter", "A"), [(Identity(), 1.98362), (Innovation(omega=0.9), 1.50479), (EMA(kappa=0.7), 0.82616)], ids=repr)
def test_noise_gain_for_correlated_noise_is_as_in_methods_section_2(filter, A):
    """The noising filter inverts c = [1, .5, .375, .3125]/||c||; 80 taps leave 1e-13 out."""
    c = np.array([1, 0.5, 0.375, 0.3125])
    c /= np.linalg.norm(c)
    k = np.zeros(80)
    for t in range(80):
        k[t] = ((t == 0) - sum(c[j] * k[t - j] for j in range(1, 4) if j <= t)) / c[0]
    system = stationary(filter)
    gain = system.noise_gain(Noise(1.0, tuple(k)))
    assert gain == pytest.approx(A, abs=6e-6)
    assert (np.convolve(system.impulse_response(80), k) ** 2).sum() == pytest.approx(A, abs=6e-6)
    assert variances(filter, 120, Noise(1.0, tuple(k)))[-1] == pytest.approx(A, abs=6e-6)
    recursive = Noise(1.0, a=tuple(c))  # the same noise, said as x = C^{-1} z
    assert recursive.impulse_response(80) == pytest.approx(k)
    assert system.noise_gain(recursive) == pytest.approx(gain, rel=1e-10)
    assert variances(filter, 120, recursive) == pytest.approx(variances(filter, 120, Noise(1.0, tuple(k))), rel=1e-10)
    assert abs(gain / system.noise_gain() - 1) > 0.5  # the white-noise gain would be far off


# What each filter is for


@pytest.mark.parametrize("omega", OMEGAS)
def test_innovation_spectral_radius_is_sqrt_1_minus_omega_appendix_c_1(omega):
    assert stationary(Innovation(omega=omega)).spectral_radius == pytest.approx(math.sqrt(1 - omega), rel=1e-12)


@pytest.mark.parametrize("omega", [*OMEGAS, 1.0])
def test_innovation_noise_gain_lies_between_one_half_and_one_proposition_4_6(omega):
    assert 0.5 < Innovation(omega=omega).noise_gain() <= 1
    assert Innovation(omega=omega).noise_gain() == pytest.approx((2 - omega) / (4 - 3 * omega))


def test_attenuation_grows_with_the_gain_so_that_1_is_no_filter():
    gains = [Innovation(omega=omega).noise_gain() for omega in (*OMEGAS, 1.0)]
    assert gains == sorted(gains)
    assert gains[-1] == 1 == EMA(kappa=1.0).noise_gain()


@pytest.mark.parametrize("filter", [Innovation(omega=1.0), EMA(kappa=1.0), EMA(kappa=1.0, init_at="zero"), Identity()], ids=repr)
def test_gain_one_is_no_filter(filter):
    inputs = torch.randn(30, 5, dtype=torch.float64)
    torch.testing.assert_close(run(filter, inputs), inputs, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("omega", [0.1, 0.3, 0.9])
def test_innovation_follows_a_steady_drift_without_lag(omega):
    drift = 3.0 + 0.25 * torch.arange(600, dtype=torch.float64)[:, None]
    assert abs(float((drift - run(Innovation(omega=omega), drift))[-1])) < 1e-9


@pytest.mark.parametrize("init_at", ["first", "zero"])
@pytest.mark.parametrize("kappa", [0.1, 0.3, 0.7])
def test_ema_lags_a_steady_drift_by_1_minus_kappa_over_kappa_steps(kappa, init_at):
    drift = 3.0 + 0.25 * torch.arange(600, dtype=torch.float64)[:, None]
    lag = float((drift - run(EMA(kappa=kappa, init_at=init_at), drift))[-1])
    assert lag == pytest.approx(0.25 * (1 - kappa) / kappa, rel=1e-9)


@pytest.mark.parametrize(
    ("make", "name", "value"),
    [(Innovation, "omega", v) for v in (0, -0.1, 1.1, float("nan"), "0.9", None)] + [(EMA, "kappa", v) for v in (0, 1.5, float("nan"))],
)
def test_a_gain_outside_0_to_1_is_refused(make, name, value):
    with pytest.raises(ValueError, match=rf"{name}=.*must lie in \(0, 1\]"):
        make(**{name: value})


def test_an_unknown_start_of_the_ema_is_refused():
    with pytest.raises(ValueError, match="init_at='last': must be one of first, zero"):
        EMA(init_at="last")
