"""Correlated noise at the gate: it is C^{-1} z, however it is cut, and its memory cannot be confused."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from fiberdp._random import Keys
from fiberdp.mechanisms import Banded, Gaussian, GaussianOnGrid, White, WhiteOnGrid, correlated
from fiberdp.mechanisms.banded import READS
from fiberdp.mechanisms.on_grid import ALLOWANCE, grid_of
from fiberdp.types import ClippedSum, Noise

STREAM = Keys.seeded(3).stream("noise")
B, C, SIGMA, T = 4, 0.5, 2.0, 12
every_strategy = pytest.mark.parametrize("strategy", READS)


def gate(strategy, steps=T, separation=8, **options):
    return Banded(strategy=strategy, **options).gate(noise_multiplier=SIGMA, batch_size=B, steps=steps, separation=separation)


def released(mechanism, d=1000, steps=T, dtype=torch.float32, stream=STREAM):
    """[steps, d]: the releases of sums that are 0."""
    memory = mechanism.init(torch.zeros(d, dtype=dtype))
    return torch.stack(
        [mechanism.release(ClippedSum(torch.zeros(d, dtype=dtype), C), stream, t, memory).value for t in range(steps)]
    )  # fmt: skip


def white(d, steps=T):
    return torch.stack([STREAM.normal(t, 0, d, dtype=torch.float64) for t in range(steps)])


@every_strategy
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_released_noise_is_the_inverse_of_the_strategy_matrix_times_white_noise(strategy, dtype):
    mechanism = gate(strategy)
    inverse = torch.from_numpy(np.linalg.inv(mechanism.strategy.matrix()))
    expected = SIGMA * C * mechanism.matrix_sensitivity / B * inverse @ white(1000)
    tolerance = 1e-12 if dtype == torch.float64 else 3e-6
    torch.testing.assert_close(released(mechanism, dtype=dtype).double(), expected, rtol=tolerance, atol=tolerance)


@every_strategy
def test_covariance_of_the_releases_is_sigma_squared_c_inverse_c_inverse_transposed(strategy):
    """d = 40,000 samples of each entry: |S - V| <= 5 sqrt((V_ij^2 + V_ii V_jj) / d).  White noise of the same variances is rejected."""
    d, mechanism = 40_000, gate(strategy)
    x = released(mechanism, d).double().numpy()
    inverse = np.linalg.inv(mechanism.strategy.matrix())
    V = (SIGMA * C * mechanism.matrix_sensitivity / B) ** 2 * inverse @ inverse.T
    error = np.sqrt((V**2 + np.outer(np.diag(V), np.diag(V))) / d)
    assert (np.abs(x @ x.T / d - V) <= 5 * error).all()
    assert (np.abs(np.diag(np.diag(V)) - V) > 10 * error).any()
    assert (np.abs(1.05**2 * V - V) > 5 * error).any()


@every_strategy
def test_noise_is_the_same_however_it_is_cut_and_when_it_is_resumed(strategy, monkeypatch):
    """Blocks of 1,024 elements, and a memory copied away and back between steps 4 and 5: equal to the last bit."""
    mechanism, d = gate(strategy), 5000
    whole = released(mechanism, d)
    monkeypatch.setattr(correlated, "BLOCK", 1024)
    memory = mechanism.init(torch.zeros(d))
    for t in range(T):
        assert torch.equal(mechanism.release(ClippedSum(torch.zeros(d), C), STREAM, t, memory).value, whole[t])
        if t == 4:
            memory = {name: tensor.clone() for name, tensor in memory.items()}


def test_a_memory_that_is_lost_would_be_seen():
    mechanism = gate("bandmf")
    memory = mechanism.init(torch.zeros(100))
    mechanism.release(ClippedSum(torch.zeros(100), C), STREAM, 0, memory)
    memory["w"].zero_()
    again = mechanism.release(ClippedSum(torch.zeros(100), C), STREAM, 1, memory).value
    assert not torch.allclose(again, released(mechanism, 100, steps=2)[1], atol=1e-3)


def test_a_step_out_of_order_is_refused_and_so_is_a_memory_that_was_half_written():
    """A second release of a step would move the memory twice: other noise, for which nothing is charged."""
    mechanism = gate("bandmf")
    memory = mechanism.init(torch.zeros(10))
    total = ClippedSum(torch.zeros(10), C)
    mechanism.release(total, STREAM, 0, memory)
    for step in (0, 2):
        with pytest.raises(ValueError, match=rf"step={step}: the noise memory stands at 1[^\n]*$"):
            mechanism.release(total, STREAM, step, memory)

    class Broken:
        def add_normal_(self, *args, **kwargs):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        mechanism.release(total, Broken(), 1, memory)
    with pytest.raises(ValueError, match="stands at -1"):
        mechanism.release(total, STREAM, 1, memory)


def test_memory_is_one_vector_less_than_the_bands_or_one_a_buffer():
    sizes = {s: tuple(gate(s).init(torch.zeros(9))["w"].shape) for s in READS}
    assert sizes == {"bandmf": (7, 9), "bsr": (7, 9), "bisr": (7, 9), "lambda-cgd": (1, 9), "blt": (4, 9)}
    assert White().gate(noise_multiplier=1.0, batch_size=1, steps=5, separation=1).init(torch.zeros(9)) == {}


def test_one_band_is_white_noise():
    """To one more rounding to float32."""
    mechanism = gate("bandmf", bands=1)
    assert mechanism.noise(C) == Noise(SIGMA * C / B)
    memory = mechanism.init(torch.zeros(2000))
    for t in range(3):
        ours = mechanism.release(ClippedSum(torch.ones(2000), C), STREAM, t, memory)
        plain = Gaussian(noise_multiplier=SIGMA, batch_size=B).release(ClippedSum(torch.ones(2000), C), STREAM, t)
        torch.testing.assert_close(ours.value, plain.value, rtol=1e-6, atol=1e-6)


@every_strategy
def test_blt_and_filters_stay_exact_in_float32_over_a_long_run(strategy):
    """300 steps: float32 differs from float64 by less than 1e-5 of the noise's std."""
    mechanism = gate(strategy, steps=300, separation=60, **({"buffers": 8} if strategy == "blt" else {}))
    short, long = (released(mechanism, 50, 300, dtype).double() for dtype in (torch.float32, torch.float64))
    assert float((short - long).abs().max() / long.std()) < 1e-5


def test_without_noise_the_sum_is_only_divided_and_an_infinite_clip_norm_is_refused_with_noise():
    silent = replace(gate("bandmf"), noise_multiplier=0.0)
    assert torch.equal(silent.release(ClippedSum(torch.ones(3), math.inf), STREAM, 0, silent.init(torch.ones(3))).value, torch.ones(3) / B)
    assert silent.noise(math.inf).std == 0
    loud = gate("bandmf")
    with pytest.raises(ValueError, match="clip_norm=inf with noise"):
        loud.release(ClippedSum(torch.ones(3), math.inf), STREAM, 0, loud.init(torch.ones(3)))


@pytest.mark.parametrize("options", [{"noise_multiplier": -1.0}, {"batch_size": 0}, {"matrix_sensitivity": 0.0}], ids=str)
def test_impossible_gates_are_refused(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        replace(gate("bandmf"), **options)


def test_prefix_sums_of_banded_noise_are_quieter_than_of_white_noise():
    """What it is for: over 400 steps of 8 bands, the mean error of the prefix sums is about a sixth of white noise's (28.9 for 200.5)."""
    mechanism = gate("bandmf", steps=400)
    sums = released(mechanism, 2000, 400).double().cumsum(0) / (SIGMA * C / B)
    assert float(sums.square().mean()) == pytest.approx(mechanism.strategy.error(), rel=0.1)
    assert mechanism.strategy.error() < 200.5 / 6


# ---- exact arithmetic


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("d", [1, 3, 10_000])
def test_releases_on_the_grid_are_whole_numbers_of_it_around_the_rounded_sum(d, dtype):
    """And the noise is that of `Gaussian`, 2^-10 larger, rounded: within half of the grid."""
    mechanism, grid = GaussianOnGrid(noise_multiplier=SIGMA, batch_size=B), grid_of(C, d)
    assert ALLOWANCE * C / 4 < grid * math.sqrt(d) <= ALLOWANCE * C / 2
    total = torch.randn(d, dtype=dtype)
    value = mechanism.release(ClippedSum(total.clone(), C), STREAM, 5).value.double() * B
    if dtype == torch.float64:  # in float32, the whole numbers themselves are rounded to 24 bits
        assert torch.equal(value / grid, (value / grid).round())
    std = SIGMA * C * (1 + ALLOWANCE)
    noise = value - (total.double() / grid).round() * grid
    ulp = 0 if dtype == torch.float64 else 2**-23 * (4 + 6 * std)
    assert (noise - std * STREAM.normal(5, 0, d, dtype=torch.float64)).abs().max() <= grid / 2 + 2.0**-44 * std + ulp
    assert mechanism.noise(C).std == pytest.approx(std / B)


def test_rounding_to_the_grid_moves_neighbouring_sums_apart_by_less_than_the_allowance():
    """The sums that gain most are those next to the middle between two points of the grid, in every coordinate."""
    for d in (1, 7, 1000):
        grid = grid_of(C, d)
        direction = torch.ones(d, dtype=torch.float64) / math.sqrt(d)
        one = torch.full((d,), 0.5 * grid * (1 - 1e-9), dtype=torch.float64)
        other = one + C * direction
        other = torch.where((other / grid) % 1 < 0.5, ((other / grid).floor() + 0.5 + 1e-6) * grid, other)  # rounds up
        apart = grid * ((other / grid).round() - (one / grid).round())
        assert float((other - one).norm()) <= C + grid * math.sqrt(d)
        assert float(apart.norm()) <= float((other - one).norm()) + grid * math.sqrt(d) <= C * (1 + ALLOWANCE)


def tells(mechanism) -> float:
    """The share of releases of a sum of 0 of which one sees, in the last bits, that they are no release of a sum of 1.

    Around 0, float32 holds numbers much finer than 2^-24.  1 + noise never gives one: near noise = -1 all it can give are multiples of it.
    """
    y = torch.cat([mechanism.release(ClippedSum(torch.zeros(10_000), 1.0), STREAM, t).value for t in range(5)])
    one = torch.cat([mechanism.release(ClippedSum(torch.ones(10_000), 1.0), STREAM, t).value for t in range(5)])
    multiple = lambda y: y.double() * 2**25 % 1 == 0  # noqa: E731
    assert multiple(one[one.abs() < 0.5]).all()
    return float(((y.abs() < 0.5) & ~multiple(y)).float().mean())


def test_the_last_bits_of_a_float32_sum_tell_and_those_of_the_grid_do_not():
    """A sum of 0 or 1 in 10,000 coordinates: of plain float32 releases an eighth gives it away, of those on the grid none."""
    options = {"noise_multiplier": 1.0, "batch_size": 1}
    assert tells(Gaussian(**options)) > 0.12
    assert tells(GaussianOnGrid(**options)) == 0


def test_on_the_grid_without_noise_the_sum_is_only_divided_and_an_infinite_clip_norm_is_refused_with_noise():
    silent = WhiteOnGrid().gate(noise_multiplier=0.0, batch_size=B, steps=T, separation=1)
    assert torch.equal(silent.release(ClippedSum(torch.full((3,), 1 / 3), math.inf), STREAM, 0).value, torch.full((3,), 1 / 3) / B)
    with pytest.raises(ValueError, match="clip_norm=inf with noise"):
        replace(silent, noise_multiplier=1.0).release(ClippedSum(torch.ones(3), math.inf), STREAM, 0)
