"""Every registered filter is the linear system it says it is, with the noise gain it declares; then each one's own claims.

A new filter is tested by being registered; SETTINGS adds parameter values to its defaults.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import linalg, signal

from fiberdp.filters import EMA, LTI, AlphaBeta, Identity, Innovation, Kalman, KalmanAuto, LowPass
from fiberdp.filters.kalman_auto import Tuned, _variances
from fiberdp.linear import StateSpace
from fiberdp.types import Noise
from grid import CASES, LEARNING, TRACKING, memory, run

every_filter = pytest.mark.parametrize("filter", CASES, ids=repr)
OMEGAS = (0.01, 0.1, 0.3, 0.5, 0.9, 0.99)

SAMPLES, LIMIT = 60_000, 5.0  # coordinates, standard errors


def simulate(filter, inputs):
    """The same through system(t): z_t = M z_{t-1} + G g_t, g~_t = H z_t from z_{-1} = 0."""
    z, outputs = 0.0, []
    for t, g in enumerate(inputs.numpy()):
        system = filter.system(t)
        z = (system.M @ z if t else 0.0) + np.outer(system.G, g)
        outputs.append(system.H @ z)
    return torch.from_numpy(np.array(outputs))


def standard_errors(filter, A):
    """How many standard errors the variance of update()'s output on white noise lies from A.

    SAMPLES independent Gaussian coordinates after the filter has warmed up: the SE of the mean square is A sqrt(2/SAMPLES), 0.6 %.
    Size at LIMIT = 5 SE: 6e-7.  Power against an A off by 10 %: that lies 16 SE away, so it is missed with probability 1e-26.
    """
    generator = torch.Generator().manual_seed(17)
    inputs = (torch.randn(SAMPLES, generator=generator) for _ in range(min(memory(filter), 1500)))
    state, g_tilde = filter.init(torch.empty(SAMPLES)), torch.empty(0)
    for t, g in enumerate(inputs):
        g_tilde, state = filter.update(g, state, t)
    return (float(g_tilde.double().square().mean()) - A) / (A * math.sqrt(2 / SAMPLES))


# What is claimed of every filter


@every_filter
def test_declared_noise_gain_is_the_lyapunov_one_corollary_4_4_and_the_sum_of_squares_proposition_4_3(filter):
    A, system = filter.noise_gain(), filter.system(None)
    assert system.noise_gain() == pytest.approx(A, rel=1e-10)
    assert (filter.impulse_response(memory(filter)) ** 2).sum() == pytest.approx(A, rel=1e-7)
    assert filter.noise_gains(memory(filter))[-1] == pytest.approx(A, rel=1e-7)


@every_filter
def test_declared_noise_gain_is_what_update_does_to_white_noise_eq_14(filter):
    assert abs(standard_errors(filter, filter.noise_gain())) < LIMIT


@pytest.mark.parametrize("filter", [Innovation(), EMA(), Identity()], ids=repr)
@pytest.mark.parametrize("wrong", [0.9, 1.1])
def test_a_noise_gain_off_by_ten_percent_is_rejected(filter, wrong):
    assert abs(standard_errors(filter, wrong * filter.noise_gain())) > 2 * LIMIT


def test_a_filter_with_another_gain_than_declared_is_rejected(monkeypatch):
    """omega 0.85 instead of 0.9 moves A by 6 %, which is 11 SE."""
    monkeypatch.setattr(Innovation, "gains", lambda self, t: (0.85,))
    assert abs(standard_errors(Innovation(omega=0.9), Innovation(omega=0.9).noise_gain())) > LIMIT


@every_filter
def test_update_is_the_linear_system_that_system_says_first_step_included(filter):
    inputs = torch.randn(40, 7, dtype=torch.float64)
    torch.testing.assert_close(run(filter, inputs), simulate(filter, inputs), rtol=1e-12, atol=1e-13)


def test_a_wrong_first_step_is_seen_by_that_comparison(monkeypatch):
    always = StateSpace(M=np.array([[0.3]]), G=np.array([0.7]), H=np.ones(1))
    monkeypatch.setattr(EMA, "system", lambda self, t: always)
    inputs = torch.randn(40, 7, dtype=torch.float64)
    assert (run(EMA(), inputs) - simulate(EMA(), inputs)).abs().max() > 0.01


@every_filter
def test_update_is_pure(filter):
    g = torch.randn(9)
    state = filter.init(g)
    for _ in range(3):
        kept, kept_g = {name: value.clone() for name, value in state.items()}, g.clone()
        _, new = filter.update(g, state, 3)
        assert new.keys() == state.keys()
        assert torch.equal(g, kept_g)
        assert all(torch.equal(state[name], kept[name]) for name in kept)
        again = filter.update(g, state, 3)[1]
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


@pytest.mark.parametrize("filter", TRACKING, ids=repr)
def test_a_constant_gradient_comes_through_unchanged_dc_gain_1(filter):
    assert filter.system(None).dc_gain() == pytest.approx(1, rel=1e-10)
    assert run(filter, torch.ones(memory(filter), 1, dtype=torch.float64))[-1].item() == pytest.approx(1, abs=1e-3)


@every_filter
def test_a_filter_is_stable_and_settles(filter):
    limit = filter.system(None)
    assert limit.spectral_radius < 1
    late = memory(filter) + 1000
    for part in ("M", "G", "H"):
        np.testing.assert_allclose(getattr(filter.system(late), part), getattr(limit, part), rtol=1e-6, atol=1e-9)


@every_filter
def test_mean_lag_is_that_of_the_impulse_response(filter):
    system = filter.system(None)
    h = system.impulse_response(2 * memory(filter) + 10)
    assert system.mean_lag() == pytest.approx((np.arange(len(h)) * h).sum() / h.sum(), rel=1e-6, abs=1e-6)


@every_filter
def test_gains_may_be_tensors_so_that_one_generated_function_serves_every_step(filter):
    inputs = torch.randn(5, 7, dtype=torch.float64)
    state, tensors = filter.init(inputs[0]), filter.init(inputs[0])
    for t, g in enumerate(inputs):
        as_tensors = torch.utils._pytree.tree_map(lambda x: torch.tensor(x, dtype=torch.float64), filter.gains(t))
        one, state = filter.update(g, state, t)
        other, tensors = type(filter).recursion(g, tensors, *as_tensors)
        torch.testing.assert_close(other, one, rtol=1e-14, atol=1e-14)


@every_filter
def test_filtering_is_linear_so_signal_and_noise_pass_apart_proposition_c_3(filter):
    """H(s + w) = H(s) + H(w), and with it the decomposition of the second moment, cross term included (eq. 75)."""
    generator = torch.Generator().manual_seed(8)
    signal = torch.randn(1, 300, generator=generator, dtype=torch.float64) + 0.05 * torch.arange(40)[:, None]
    noise = torch.randn(40, 300, generator=generator, dtype=torch.float64)
    both, s, n = run(filter, signal + noise), run(filter, signal), run(filter, noise)
    torch.testing.assert_close(both, s + n, rtol=1e-10, atol=1e-11)
    second, parts = (both**2).mean(1), (s**2).mean(1) + (n**2).mean(1) + 2 * (s * n).mean(1)
    torch.testing.assert_close(second, parts, rtol=1e-10, atol=1e-11)


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
    A = filter.noise_gains(201)
    for t, value in expected.items():
        assert A[t] == pytest.approx(value, abs=1e-6), t


@pytest.mark.parametrize("omega", OMEGAS)
def test_innovation_noise_variance_rises_to_A_geometrically_lemma_c_2(omega):
    """0 <= A - A_t <= c (1-omega)^{t+1}: M is similar to sqrt(1-omega) times a rotation, with condition number sqrt(c / |Sigma|)."""
    A, A_t = Innovation(omega=omega).noise_gain(), Innovation(omega=omega).noise_gains(60)
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
    system = filter.system(None)
    gain = system.noise_gain(Noise(1.0, tuple(k)))
    assert gain == pytest.approx(A, abs=6e-6)
    assert (np.convolve(system.impulse_response(80), k) ** 2).sum() == pytest.approx(A, abs=6e-6)
    assert filter.noise_gains(120, Noise(1.0, tuple(k)))[-1] == pytest.approx(A, abs=6e-6)
    recursive = Noise(1.0, a=tuple(c))  # the same noise, said as x = C^{-1} z
    assert recursive.impulse_response(80) == pytest.approx(k)
    assert system.noise_gain(recursive) == pytest.approx(gain, rel=1e-10)
    assert filter.noise_gains(120, recursive) == pytest.approx(filter.noise_gains(120, Noise(1.0, tuple(k))), rel=1e-10)
    assert abs(gain / system.noise_gain() - 1) > 0.5  # the white-noise gain would be far off


# What each filter is for


@pytest.mark.parametrize("omega", OMEGAS)
def test_innovation_spectral_radius_is_sqrt_1_minus_omega_appendix_c_1(omega):
    assert Innovation(omega=omega).system(None).spectral_radius == pytest.approx(math.sqrt(1 - omega), rel=1e-12)


@pytest.mark.parametrize("omega", OMEGAS)
def test_innovation_stationary_covariance_is_that_of_eqs_64_and_65(omega):
    system = Innovation(omega=omega).system(None)
    Sigma = linalg.solve_discrete_lyapunov(system.M, np.outer(system.G, system.G))  # eqs. 59-63
    np.testing.assert_allclose(Sigma, np.array([[2 - omega, omega], [omega, 2 * omega]]) / (4 - 3 * omega), rtol=1e-10)


@pytest.mark.parametrize("omega", [0.3, 0.9])
def test_innovation_in_second_order_form_eq_42(omega):
    g = torch.randn(30, 4, dtype=torch.float64)
    out = run(Innovation(omega=omega), g)
    expected = (2 - 2 * omega) * out[1:-1] - (1 - omega) * out[:-2] + omega * g[2:]
    torch.testing.assert_close(out[2:], expected, rtol=1e-12, atol=1e-12)


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


# alpha-beta


@pytest.mark.parametrize("omega", OMEGAS)
def test_alpha_beta_with_tied_gains_is_the_innovation_filter_appendix_b_3(omega):
    inputs = torch.randn(60, 5, dtype=torch.float64)
    tied = AlphaBeta(alpha=omega, beta=omega)
    torch.testing.assert_close(run(tied, inputs), run(Innovation(omega=omega), inputs), rtol=1e-11, atol=1e-12)
    assert tied.noise_gain() == pytest.approx(Innovation(omega=omega).noise_gain(), rel=1e-12)


@pytest.mark.parametrize(("alpha", "beta"), [(0, 0.1), (2, 0.1), (0.5, 0), (0.5, 3.0), (float("nan"), 0.1), (0.5, "x")])
def test_an_unstable_alpha_beta_filter_is_refused(alpha, beta):
    with pytest.raises(ValueError, match=r"(alpha|beta)=.*must lie in \("):
        AlphaBeta(alpha=alpha, beta=beta)


# Low-pass


@pytest.mark.parametrize(("filter", "A"), [(LowPass(), 0.0712), (LowPass(b=(0.1,), a=(1, -0.9)), 0.0526)], ids=["chebyshev", "first order"])
def test_the_noise_gain_of_dopplers_filters_methods_section_2(filter, A):
    assert filter.noise_gain() == pytest.approx(A, abs=5e-5)


@pytest.mark.parametrize(
    "filter", [LowPass(), LowPass(b=(0.1,), a=(1, -0.9)), LowPass(b=(0.2, 0.3, 0.1), a=(1, -0.5)), LowPass(b=(0.5, 0.5), a=(1,))], ids=repr
)
def test_lowpass_is_scipys_lfilter_over_its_step_response(filter):
    g = np.random.default_rng(3).standard_normal((50, 4))
    expected = signal.lfilter(filter.b, filter.a, g, axis=0) / signal.lfilter(filter.b, filter.a, np.ones((50, 1)), axis=0)
    np.testing.assert_allclose(run(filter, torch.from_numpy(g)).numpy(), expected, rtol=1e-9, atol=1e-10)


def test_the_chebyshev_coefficients_are_the_ones_of_the_design():
    b, a = signal.cheby1(2, 10, 0.02)
    assert LowPass().b == pytest.approx(b, rel=2e-4)
    assert LowPass().a == pytest.approx(a, rel=1e-7)


@pytest.mark.parametrize("filter", [LowPass(), LowPass(b=(0.1,), a=(1, -0.9))], ids=repr)
def test_a_constant_comes_out_of_a_lowpass_as_it_is_from_the_first_step(filter):
    assert run(filter, torch.full((30, 1), 3.0, dtype=torch.float64)).squeeze().tolist() == pytest.approx([3.0] * 30)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"b": ()}, "must be a sequence of numbers"),
        ({"a": (2.0, 1.0)}, r"a\[0\] must be 1"),
        ({"b": (1.0,), "a": (1.0, -1.0)}, "spectral radius of its recursion is 1, it must be below 1"),
        ({"b": (1.0, -1.0), "a": (1.0,)}, "must let a constant through"),
        ({"b": (0.0, 1.0), "a": (1.0,)}, "must let a constant through"),
    ],
)
def test_a_lowpass_that_cannot_be_one_is_refused(options, words):
    with pytest.raises(ValueError, match=words):
        LowPass(**options)


# Any linear system


def test_lti_is_scipys_dlti():
    A, B, C, D = [[0.5, 0.2], [-0.3, 0.4]], [[1.0], [0.5]], [[0.7, -0.2]], [[0.1]]
    g = np.random.default_rng(4).standard_normal((60, 3))
    expected = np.stack([signal.dlsim((A, B, C, D, 1), column)[1][:, 0] for column in g.T], axis=1)
    filter = LTI.from_scipy(A, B, C, D)
    np.testing.assert_allclose(run(filter, torch.from_numpy(g)).numpy(), expected, rtol=1e-12, atol=1e-12)
    response = signal.dimpulse((A, B, C, D, 1), n=200)[1][0][:, 0]
    assert filter.noise_gain() == pytest.approx((response**2).sum(), rel=1e-12)
    assert filter.system(None).dc_gain() == pytest.approx(
        signal.StateSpace(A, B, C, D, dt=1).to_tf().num.sum() / signal.StateSpace(A, B, C, D, dt=1).to_tf().den.sum()
    )


@pytest.mark.parametrize("radius", [1.0, 1.25])
def test_an_unstable_lti_is_refused_with_its_spectral_radius(radius):
    with pytest.raises(ValueError, match=f"lti: the spectral radius of its recursion is {radius:g}, it must be below 1"):
        LTI(M=((radius,),), G=(1.0,), H=(1.0,))


@pytest.mark.parametrize(
    "matrices",
    [{"M": ((0.5,),), "G": (1.0, 2.0), "H": (1.0,)}, {"M": "x", "G": (1.0,), "H": (1.0,)}, {"M": ((math.nan,),), "G": (1.0,), "H": (1.0,)}],
)
def test_matrices_that_are_no_system_are_refused(matrices):
    with pytest.raises(ValueError, match=r"lti: .*must be"):
        LTI(**matrices)


# Kalman


def riccati(sigma_s, sigma_r, steps, prior=1e12):
    """Gains by the matrix recursion of Appendix B.2 (eqs. 26-30), from a very wide prior."""
    A, H, Q, P = np.array([[1.0, 1.0], [0.0, 1.0]]), np.array([1.0, 0.0]), np.diag([sigma_s**2, sigma_r**2]), np.diag([prior, prior])
    gains = []
    for t in range(steps):
        P = A @ P @ A.T + Q if t else P
        K = P @ H / (H @ P @ H + 1)
        P = (np.eye(2) - np.outer(K, H)) @ P
        gains.append(K)
    return np.array(gains)


@pytest.mark.parametrize(("sigma_s", "sigma_r"), [(0.1, 0.01), (0.0, 0.1), (0.5, 1.0), (3.0, 0.2)])
def test_kalman_gains_are_those_of_the_riccati_recursion_appendix_b_4(sigma_s, sigma_r):
    filter = Kalman(sigma_s=sigma_s, sigma_r=sigma_r)
    np.testing.assert_allclose([filter.gains(t) for t in range(60)], riccati(sigma_s, sigma_r, 60), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(("sigma_s", "sigma_r"), [(0.1, 0.01), (0.0, 0.1), (0.5, 1.0), (3.0, 0.2), (0.4, 0.0), (0.0, 1e-4)])
def test_kalman_steady_state_meets_the_alpha_beta_relations_of_the_tracking_index(sigma_s, sigma_r):
    filter = Kalman(sigma_s=sigma_s, sigma_r=sigma_r)
    alpha, beta = filter.steady()
    assert beta**2 / (1 - alpha) == pytest.approx(sigma_r**2, rel=1e-9, abs=1e-15)
    assert alpha**2 == pytest.approx(beta * (2 - alpha) + sigma_s**2 * (1 - alpha), rel=1e-9)
    assert filter.gains(20_000) == pytest.approx((alpha, beta), rel=1e-6, abs=1e-9)


def test_kalman_gains_settle_within_a_few_tens_of_steps_figure_8():
    """ "Empirically, this convergence is fast (a few tens of steps)": within 1 % after 40 steps, for drifts of a tenth of the noise."""
    filter = Kalman(sigma_s=0.1, sigma_r=0.1)
    alpha, beta = filter.steady()
    gains = np.array([filter.gains(t) for t in range(100)])
    settled = np.abs(gains / (alpha, beta) - 1).max(1) < 0.01
    assert settled[40:].all()
    assert not settled[:5].any()


def test_a_slope_that_stays_makes_kalman_an_ema_whose_gain_falls_appendix_b_5():
    filter = Kalman(sigma_s=0.4, sigma_r=0.0)
    kappa = (-(0.4**2) + math.sqrt(0.4**4 + 4 * 0.4**2)) / 2
    assert filter.gains(None) == pytest.approx((kappa, 0.0))
    assert filter.noise_gain() == pytest.approx(EMA(kappa=kappa).noise_gain())
    gains = [filter.gains(t)[0] for t in range(30)]
    assert gains[0] == 1
    assert gains == sorted(gains, reverse=True)


def test_kalman_is_the_best_of_its_kind_on_its_own_model():
    """One model, many filters: no alpha-beta filter has a lower error.  60 000 coordinates: the error is known to 0.6 %."""
    sigma_s, sigma_r, T, d = 0.1, 0.03, 200, 60_000
    generator = torch.Generator().manual_seed(5)
    r = (sigma_r * torch.randn(T, d // 20, generator=generator)).cumsum(0)
    s = (torch.cat([torch.zeros(1, d // 20), r[:-1]]) + sigma_s * torch.randn(T, d // 20, generator=generator)).cumsum(0)
    g = s + torch.randn(T, d // 20, generator=generator)

    def error(filter):
        return float((run(filter, g) - s)[100:].square().mean())

    alpha, beta = Kalman(sigma_s=sigma_s, sigma_r=sigma_r).steady()
    best = error(Kalman(sigma_s=sigma_s, sigma_r=sigma_r))
    assert best == pytest.approx(alpha, rel=0.05)  # the posterior variance p = alpha R
    others = [AlphaBeta(alpha=a, beta=b) for a in (alpha / 2, alpha, 1.5 * alpha) for b in (beta / 2, beta, 2 * beta)]
    assert all(error(other) > 0.995 * best for other in [*others, Innovation(), EMA()])


@pytest.mark.parametrize("options", [{"sigma_s": -1.0}, {"sigma_r": float("inf")}, {"sigma_s": 0.0, "sigma_r": 0.0}])
def test_process_noises_that_make_no_filter_are_refused(options):
    with pytest.raises(ValueError, match="sigma_"):
        Kalman(**options)


# Kalman that fits itself


def learn(filter, inputs, noise, until=None):
    """Drive begin, tuned, update, learn; the outputs, the linear filters that made them, and what was learned."""
    state, known, outputs, used = filter.init(inputs[0]), filter.begin(inputs.shape[1]), [], []
    for t, g in enumerate(inputs):
        used.append(filter.tuned(known))
        g_tilde, state = used[-1].update(g, state, t)
        outputs.append(g_tilde)
        known = filter.learn(known, g, noise, t)
    return torch.stack(outputs), used, known


def signal_and_noise(kind, T=300, d=400, seed=11, level=0.3, slope=0.02):
    generator = torch.Generator().manual_seed(seed)
    steps = torch.randn(T, d, generator=generator)
    s = (
        (level * steps).cumsum(0)
        if kind == "walk"
        else (slope * torch.randn(1, d, generator=generator) * 5 + slope * 0.05 * steps.cumsum(0)).cumsum(0)
    )
    return s, s + torch.randn(T, d, generator=generator)


def test_what_learns_is_listed():
    assert LEARNING == ["kalman_auto"]


@pytest.mark.parametrize(("kind", "model"), [("walk", Kalman(sigma_s=0.3, sigma_r=0.0)), ("velocity", Kalman(sigma_s=0.0, sigma_r=0.001))])
def test_kalman_auto_finds_gains_as_good_as_those_of_the_true_model(kind, model):
    s, g = signal_and_noise(kind)
    found, used, _ = learn(KalmanAuto(), g, Noise(1.0))
    ours, truth = ((out - s)[50:].square().mean() for out in (found, run(model, g)))
    assert ours < 1.1 * truth
    assert (used[-1].w > 0.99) == (kind == "walk")


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e3])
def test_kalman_auto_does_not_depend_on_the_unit_of_the_gradient(scale):
    _, g = signal_and_noise("walk", T=80)
    plain, used, _ = learn(KalmanAuto(), g, Noise(1.0))
    scaled, again, _ = learn(KalmanAuto(), scale * g, Noise(scale))
    torch.testing.assert_close(scaled / scale, plain, rtol=1e-3, atol=1e-3)
    assert [a.gains(0) for a in again] == [pytest.approx(u.gains(0), rel=1e-3, abs=1e-4) for u in used]


def test_the_gains_of_a_step_follow_from_earlier_releases_alone():
    _, g = signal_and_noise("walk", T=40)
    other = g.clone()
    other[30] += 100
    _, used, _ = learn(KalmanAuto(), g, Noise(1.0))
    _, changed, _ = learn(KalmanAuto(), other, Noise(1.0))
    assert used[:31] == changed[:31]
    assert used[31:] != changed[31:]


def test_without_noise_kalman_auto_lets_the_gradient_through():
    _, g = signal_and_noise("walk", T=20)
    assert torch.equal(learn(KalmanAuto(), g, Noise(0.0))[0], g)


def test_kalman_auto_asked_for_gains_of_its_own_says_how_to_get_them():
    with pytest.raises(ValueError, match=r"follow from what was released. Use tuned\(memory\)"):
        KalmanAuto().gains(0)


def test_few_coordinates_are_all_looked_at():
    assert KalmanAuto().begin(7)["level"].shape[1] == 7
    assert KalmanAuto(samples=64).begin(1000)["level"].shape[1] == 64
    assert isinstance(KalmanAuto().tuned(KalmanAuto().begin(7)), Tuned)


@pytest.mark.parametrize("noise", [Noise(0.1, a=(1.0, -0.5, 0.2)), Noise(0.1, b=(2.0, 1.0, 0.3), a=(2.0, -0.4)), Noise(0.1)])
def test_running_variance_of_correlated_noise_is_the_sum_over_the_impulse_response(noise):
    """Asked in any order, as by a run that is resumed."""
    for t in (5, 0, 40, 39):
        assert _variances(noise.b, noise.a)(t) == pytest.approx(sum(k * k for k in noise.impulse_response(t + 1)), rel=1e-15)
