"""The keyed streams: the cipher, the map from words to numbers, their distribution, and that slices are slices."""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import math
import os
import random
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext

import mpmath
import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from scipy import stats
from scipy.special import ndtr

from fiberdp import _native, _normals
from fiberdp._random import STREAMS, Keys
from fiberdp._threads import one_thread

N = 20_000_000  # normals in the tests of their distribution
ALPHA = 1e-6  # two-sided level of the counts; 4.5 standard errors elsewhere are 7e-6


@pytest.fixture(scope="module")
def normals() -> np.ndarray:
    return Keys.seeded(20).stream("noise").normal(0, 0, N).numpy()


@pytest.fixture
def threads():
    """Set torch's thread count for one test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def library_words(key: bytes, high: int, first: int, blocks: int) -> bytes:
    out = bytearray(16 * blocks + 16)
    _normals.encrypt(key, high, first, memoryview(out))
    return bytes(out[:-16])


def compiled_words(key: bytes, high: int, first: int, blocks: int) -> bytes:
    cipher, out = _normals.compiled_keystream(), torch.full((2 * blocks + 2,), -1)
    if cipher is None:
        pytest.skip("no C compiler, or no AES instructions, here")
    cipher(key, high, first, blocks, out.data_ptr())
    assert torch.equal(out[2 * blocks :], torch.full((2,), -1))
    return out.numpy().tobytes()[:-16]


@pytest.mark.parametrize("words", [library_words, compiled_words])
def test_keystream_is_aes_256_ctr_of_nist_sp_800_38a(words):
    """Origin: NIST SP 800-38A (2001), F.5.5 CTR-AES256.Encrypt, plaintext xor ciphertext of its four blocks."""
    key = bytes.fromhex("603deb1015ca71be2b73aef0857d77811f352c073b6108d72d9810a30914dff4")
    counter = bytes.fromhex("f0f1f2f3f4f5f6f7f8f9fafbfcfdfeff")
    plain = bytes.fromhex(
        "6bc1bee22e409f96e93d7e117393172aae2d8a571e03ac9c9eb76fac45af8e5130c81c46a35ce411e5fbc1191a0a52eff69f2445df4f9b17ad2b417be66c3710"
    )
    cipher = bytes.fromhex(
        "601ec313775789a5b7a7f504bbf3d228f443e3ca4d62b59aca84e990cacaf5c52b0930daa23de94ce87017ba2d84988ddfc9c58db67aada613c2dd08457941a6"
    )
    found = words(key, int.from_bytes(counter[:8], "big"), int.from_bytes(counter[8:], "big"), 4)
    assert found == bytes(p ^ c for p, c in zip(plain, cipher, strict=True))


@pytest.mark.parametrize("first", [0, 2**32 - 7, 2**61])
@pytest.mark.parametrize("blocks", [1, 2, 15, 16, 17, 31, 33, 1000])
def test_the_compiled_cipher_is_the_librarys(first, blocks):
    """Every remainder of a group of blocks, and a counter that carries into its upper word."""
    key, high = bytes(range(100, 132)), 0x0002_FFEE_DDCC_BBAA
    assert compiled_words(key, high, first, blocks) == library_words(key, high, first, blocks)


def test_a_cipher_that_disagrees_is_refused(monkeypatch):
    """Rejected: a processor or compiler whose AES is wrong in one bit."""

    function = lambda key, high, first, blocks, out: ctypes.memset(out, 0, 16 * blocks)  # noqa: E731
    monkeypatch.setattr(_normals, "_function", lambda name, *argtypes: function)
    with pytest.raises(RuntimeError, match="AES: the compiled cipher"):
        _normals.compiled_keystream.__wrapped__()


def oracle_words(key: bytes, stream: int, step: int, n: int) -> np.ndarray:
    """Words [0, n), every counter block written out and enciphered by itself (ECB), no counter mode."""
    head = stream.to_bytes(2, "big") + step.to_bytes(6, "big")
    blocks = b"".join(head + j.to_bytes(8, "big") for j in range((n + 1) // 2))
    stream_bytes = Cipher(algorithms.AES(key), modes.ECB()).encryptor().update(blocks)
    return np.frombuffer(stream_bytes, dtype="<i8")[:n]


def oracle_normals(key: bytes, stream: int, step: int, n: int) -> np.ndarray:
    size = -(-n // 1024) * 1024
    words = oracle_words(key, stream, step, size).reshape(-1, 2, 512)
    u = np.abs((words[:, 0] | 1).astype(np.float64)) / 2.0**63
    pair = np.sqrt(-2 * np.log(u)) * np.exp(1j * np.pi * (words[:, 1] / 2.0**63))
    return np.stack([pair.real, pair.imag], axis=1).reshape(-1)[:n]


@pytest.mark.parametrize(("name", "step", "n"), [("data", 0, 1), ("noise", 1, 3000), ("receipt", 2**48 - 1, 1025)])
def test_words_uniforms_and_normals_equal_the_numpy_oracle(name, step, n):
    """The oracle starts from the integer seed, so equality also means that another process draws the same."""
    keys = Keys.seeded(7)
    stream = keys.stream(name)
    words = oracle_words(keys.key, STREAMS[name], step, n)
    assert np.array_equal(stream.bits(step, 0, n).numpy(), words)
    assert np.array_equal(stream.uniform(step, 0, n).numpy(), (words.view(np.uint64) >> 11) / 2.0**53)
    z = oracle_normals(keys.key, STREAMS[name], step, n)
    np.testing.assert_allclose(stream.normal(step, 0, n, dtype=torch.float64).numpy(), z, rtol=0, atol=1e-12)
    assert stream.seed(step) == int(words[0]) & (2**63 - 1)


def test_seeded_keys_are_those_of_another_process():
    """The other process knows the recipe of the docstring only, and imports nothing of ours."""
    code = "import hashlib; print(hashlib.sha256(b'fiberdp seeded keys 1:' + b'123').hexdigest())"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert Keys.seeded(123).to_json() == {"kind": "seeded", "key": other.strip()}


def test_normals_begin_at_the_word_of_their_segment_far_into_a_step():
    """Segment 2**40 of a step, addressed directly: block 2**40 * 512."""
    keys, segment = Keys.seeded(3), 2**40
    head = (2).to_bytes(2, "big") + (5).to_bytes(6, "big")
    blocks = b"".join(head + (segment * 512 + j).to_bytes(8, "big") for j in range(512))
    words = np.frombuffer(Cipher(algorithms.AES(keys.key), modes.ECB()).encryptor().update(blocks), dtype="<i8")
    noise = keys.stream("noise")
    assert np.array_equal(noise.bits(5, segment * 1024 + 1, segment * 1024 + 1000).numpy(), words[1:1000])
    u, phi = abs(int(words[3]) | 1) / 2**63, math.pi * int(words[512 + 3]) / 2**63
    z = noise.normal(5, segment * 1024 + 3, segment * 1024 + 4, dtype=torch.float64)
    assert z.item() == pytest.approx(math.sqrt(-2 * math.log(u)) * math.cos(phi), abs=1e-12)


def pairs_of(radii: list[int], angles: list[int], way: str) -> np.ndarray:
    """The normals [2, 512] of one segment, by the C file or by torch."""
    pairs = torch.zeros(1, 2, 512, dtype=torch.int64)
    pairs[0, 0, : len(radii)] = torch.tensor(radii)
    pairs[0, 1, : len(angles)] = torch.tensor(angles)
    cos_sin = torch.empty(2, 1, 512, dtype=torch.float64)
    if way == "torch":
        _normals.box_muller(pairs, 1.0, torch.empty(1, 512, dtype=torch.float64), *cos_sin)
    else:
        function = _normals.compiled_normals(torch.float64)
        if function is None:
            pytest.skip("no C compiler here")
        function(pairs.data_ptr(), 1, 1.0, cos_sin.data_ptr())
    return cos_sin[:, 0].numpy()


@pytest.fixture(params=["torch", "compiled"])
def radius(request):
    """The radius that each word is given: its z at angle 0."""
    return lambda words: pairs_of(words, [], request.param)[0].tolist()


def follows_the_tail(radius_of) -> bool:
    """Is radius(word) = sqrt(-2 log u) to 1e-14 for words whose radius is 1.2, 3, 5.8, 7, 8, 9 and the largest?"""
    words = [0, 1, -1, -2, 45, -(2**10) - 1, 2**17, -(2**28), 2**28 + 1, 2**38, 2**56 + 12345, -(2**62), 2**62]
    exact = [math.sqrt(-2 * math.log(abs(w | 1) / 2**63)) for w in words]
    return bool(np.allclose(radius_of(words)[: len(words)], exact, rtol=1e-14, atol=0))


def test_radius_is_exact_out_to_9_standard_deviations_and_24_bits_are_rejected(radius):
    assert follows_the_tail(radius)
    assert max(radius([0])) == pytest.approx(9.3454, abs=1e-4)

    def radius_24_bits(words):
        return [math.sqrt(-2 * math.log(((w % 2**63 >> 39) + 0.5) / 2**24)) for w in words]

    assert not follows_the_tail(radius_24_bits)


def test_every_word_gives_a_finite_radius(radius):
    ends = [0, 1, -1, 2**63 - 1, -(2**63), -(2**63) + 1, 2**62]
    assert all(0 <= r < 9.35 for r in radius(ends))
    assert max(radius([2**63 - 1] * 512)) < 1e-7


@pytest.mark.parametrize("way", ["torch", "compiled"])
def test_every_quadrant_and_its_borders_give_the_angle_of_the_word(way):
    """Against 40 digits, at radius sqrt(2 log 2): the eight octants, their borders, and one word to either side of each."""
    borders = [k * 2**60 + step for k in range(-8, 8) for step in (-1, 0, 1) if -(2**63) <= k * 2**60 + step < 2**63]
    with mpmath.workdps(40):
        angles = [mpmath.pi * b / 2**63 for b in borders]
        exact = np.array([[mpmath.sqrt(2 * mpmath.log(2)) * f(x) for x in angles] for f in (mpmath.cos, mpmath.sin)], float)
    assert np.abs(pairs_of([2**62] * 512, borders, way)[:, : len(borders)] - exact).max() < 4e-16 * 8


def test_compiled_normals_are_those_of_torch_and_of_any_slice():
    """Each of 2e6 to 4e-15; an error in one coefficient of the C file shows (its smallest terms are 1e-13 at pi / 4)."""
    if _native.library("_random") is None:
        pytest.skip("no C compiler here")
    noise = Keys.seeded(21).stream("noise")
    compiled = noise.normal(3, 0, 2_000_000, dtype=torch.float64)
    short = noise.normal(3, 0, 2_000_000)
    added = noise.add_normal_(torch.ones(2_000_000), step=3, scale=0.7)
    with without_compiler():
        by_torch = noise.normal(3, 0, 2_000_000, dtype=torch.float64)
        assert (noise.add_normal_(torch.ones(2_000_000), step=3, scale=0.7) - added).abs().max() < 1e-6
    assert (compiled - by_torch).abs().max() < 4e-15
    assert not torch.equal(compiled, by_torch)  # these are two ways
    assert torch.equal(short, compiled.float())
    with without_aes():
        assert torch.equal(short, noise.normal(3, 0, 2_000_000))
    assert (added - 1 - 0.7 * short).abs().max() < 1e-6


@contextmanager
def without_compiler():
    cached = (_normals.compiled_noise, _normals.compiled_normals, _normals.compiled_keystream, _normals.compiled_rounding)
    found = _normals._function
    _normals._function = lambda name, *argtypes: None
    for function in cached:
        function.cache_clear()
    try:
        yield
    finally:
        _normals._function = found
        for function in cached:
            function.cache_clear()


@contextmanager
def without_aes():
    """A processor without AES instructions, or a compiler without OpenMP: words from the library, normals in C."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_normals, "compiled_noise", lambda dtype: None)
        patch.setattr(_normals, "compiled_keystream", lambda: None)
        yield


def counts_agree(z: np.ndarray, std: float = 1.0) -> bool:
    """Do the counts beyond 3, 4, 5, 5.5 and 6 standard deviations fit n * 2 Phi(-t), two-sided level ALPHA each?"""
    for t in (3, 4, 5, 5.5, 6):
        count, mean = int((np.abs(z) > t / std).sum()), 2 * len(z) * ndtr(-t)
        if min(stats.poisson.cdf(count, mean), stats.poisson.sf(count - 1, mean)) < ALPHA / 2:
            return False
    return True


def test_counts_in_the_tails_are_those_of_a_gaussian(normals):
    """2e7 draws expect 53 996, 1 267, 11.5, 0.76 and 0.04.

    Power: a std off by 3 % moves the first by 6 000, 26 standard errors; it is rejected, on either side.
    """
    assert counts_agree(normals)
    assert not counts_agree(normals, std=1.03)
    assert not counts_agree(normals, std=0.97)


def moment_errors(z: np.ndarray) -> np.ndarray:
    """Mean, variance, skewness and excess kurtosis, in standard errors of n draws from N(0, 1)."""
    sums = np.zeros(4)
    for part in np.array_split(z, 40):
        x = part.astype(np.float64)
        sums += [x.sum(), (x * x).sum(), (x * x * x).sum(), (x * x * x * x).sum()]
    m1, m2, m3, m4 = sums / len(z)
    return np.array([m1, (m2 - 1) / 2**0.5, (m3 - 3 * m1) / 6**0.5, (m4 - 6 * m2 + 3) / 24**0.5]) * len(z) ** 0.5


def test_first_four_moments_are_those_of_a_gaussian(normals):
    """2e7 draws, 4.5 standard errors: 1.0e-3 of the std, 1.4e-3 of the variance, 5e-3 of the kurtosis.

    The third and fourth are Hermite moments, so that the four are uncorrelated.  Rejected: a std off by 1 %
    (63 standard errors) and 160 000 sums of 12 uniforms (excess kurtosis -0.1, 8 standard errors at that n).
    """
    assert np.abs(moment_errors(normals)).max() < 4.5
    assert np.abs(moment_errors(normals * np.float32(1.01))).max() > 10
    uniforms = Keys.seeded(20).stream("audit").uniform(0, 0, 12 * 160_000).numpy().reshape(-1, 12).sum(1) - 6
    assert np.abs(moment_errors(uniforms)[3]) > 4.5


def ks(z: np.ndarray) -> float:
    """Kolmogorov-Smirnov distance to N(0, 1), times sqrt(n)."""
    cdf, n = ndtr(np.sort(z)), len(z)
    grid = np.arange(n + 1) / n
    return max((grid[1:] - cdf).max(), (cdf - grid[:-1]).max()) * n**0.5


def test_kolmogorov_smirnov_against_the_gaussian(normals):
    """4e6 draws; 2.69 is the critical value at level 1e-6.

    Power: a std off by 1 % has distance 0.00242, 4.8 after scaling, and is rejected.
    """
    z = normals[:4_000_000].astype(np.float64)
    assert ks(z) < 2.69
    assert ks(z * 1.01) > 2.69


def test_the_two_halves_of_a_pair_and_their_squares_are_uncorrelated(normals):
    """1e7 pairs that share a radius; 4.5 standard errors are 1.4e-3.

    Rejected: an angle confined to a quarter turn (both signs +), and two normals with a common radius that are
    not at right angles (here 89 degrees, correlation 0.017, 55 standard errors).
    """
    cos, sin = normals[: N // 1024 * 1024].reshape(-1, 2, 512).transpose(1, 0, 2).reshape(2, -1).astype(np.float64)
    bound = 4.5 / len(cos) ** 0.5
    assert abs((cos * sin).mean()) < bound
    assert abs(((cos**2 - 1) * (sin**2 - 1)).mean()) / 2 < bound
    assert abs((np.abs(cos) * np.abs(sin)).mean()) > bound
    skew = math.radians(1)
    assert abs((cos * (sin * math.cos(skew) + cos * math.sin(skew))).mean()) > bound


def test_each_bit_of_a_word_is_fair_and_independent_of_its_neighbours():
    """1e6 words, 64 bits, each also against the next word's; 5 standard errors = 2.5e-3.

    Rejected: a bit that is set 50.8 % of the time (16 standard errors).
    """
    words = Keys.seeded(1).stream("data").bits(0, 0, 1_000_000).numpy()
    error = 0.5 / len(words) ** 0.5
    for shift in range(64):
        bit = (words >> shift) & 1
        assert abs(bit.mean() - 0.5) < 5 * error
        assert abs((bit ^ (np.roll(words, 1) >> shift) & 1).mean() - 0.5) < 5 * error
    stuck = ((words >> 40) & 1) | (words & 63 == 0)  # sets 1/64 of the words' bits, half of them anew
    assert abs(stuck.mean() - 0.5) > 5 * error


def test_uniforms_fill_the_half_open_unit_interval():
    """2e6 draws: chi-square over 1000 cells below its 1 - 1e-6 quantile, 1 226.

    Rejected: u**1.02, whose density is off by 2 % (chi-square about 1 800).
    """
    u = Keys.seeded(2).stream("data").uniform(3, 0, 2_000_000).numpy()
    assert u.min() >= 0
    assert u.max() < 1
    assert np.array_equal(u * 2**53, np.floor(u * 2**53))

    def chi_square(x):
        return ((np.histogram(x, 1000, (0, 1))[0] - len(x) / 1000) ** 2).sum() / (len(x) / 1000)

    limit = stats.chi2.isf(1e-6, 999)
    assert chi_square(u) < limit
    assert chi_square(u**1.02) > limit


def test_streams_steps_keys_and_lags_are_uncorrelated():
    """1e6 normals a vector; 5 standard errors = 5e-3 for each of 45 pairs and 7 lags.

    Rejected: a vector that shares 1 % of its variance with another (100 standard errors).
    """
    n = 1_000_000
    vectors = [Keys.seeded(0).stream(name).normal(1, 0, n, dtype=torch.float64) for name in STREAMS]
    vectors += [Keys.seeded(0).stream("noise").normal(step, 0, n, dtype=torch.float64) for step in (0, 2, 2**47)]
    vectors += [Keys.seeded(1).stream("noise").normal(1, 0, n, dtype=torch.float64)]
    z = torch.stack(vectors)
    correlation = (z @ z.T / n - torch.eye(len(z))).abs()
    off_diagonal = correlation[~torch.eye(len(z), dtype=torch.bool)]
    assert off_diagonal.max() < 5 / n**0.5
    for lag in (1, 2, 511, 512, 513, 1024, 262_144):
        assert abs(float((z[1, lag:] * z[1, :-lag]).mean())) < 5 / (n - lag) ** 0.5
    shared = 0.1 * z[0] + 0.995 * z[1]
    assert abs(float((shared * z[0]).mean())) > 5 / n**0.5


def test_stream_numbers_never_change():
    assert STREAMS == {"data": 1, "noise": 2, "model": 3, "audit": 4, "receipt": 5, "augmentation": 6}


def test_secret_keys_differ_and_no_repr_shows_them():
    a, b = Keys.secret(), Keys.secret()
    assert a != b
    assert a.kind == "secret"
    for shown in (repr(a), str(a), repr(a.stream("noise"))):
        assert a.key.hex() not in shown
        assert str(a.key) not in shown
    assert Keys.from_json(a.to_json()) == a


def test_malformed_keys_are_refused_without_being_quoted():
    good = Keys.seeded(0).to_json()
    for bad in ({}, {"key": good["key"]}, good | {"key": good["key"][:-1] + "x"}, good | {"key": good["key"][2:]}):
        with pytest.raises(ValueError) as error:
            Keys.from_json(bad)
        assert good["key"][2:30] not in str(error.value)
    with pytest.raises(ValueError, match="secret, seeded"):
        Keys.from_json(good | {"kind": "public"})
    with pytest.raises(ValueError, match="data, noise, model, audit, receipt"):
        Keys.seeded(0).stream("noises")
    with pytest.raises(ValueError, match="seed"):
        Keys.seeded(-1)


def cuts(n: int, rng: random.Random, pieces: int) -> list[tuple[int, int]]:
    at = sorted({0, n, *(rng.randrange(n) for _ in range(pieces))})
    return list(itertools.pairwise(at))


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("way", [nullcontext, without_compiler, without_aes])
def test_any_slicing_and_thread_count_gives_the_same_bits(dtype, count, threads, way):
    """700 000 elements, so that whole, halves and crumbs cross the 131 072 of one chunk differently, with helpers and without."""
    with way():
        slices_agree(dtype, count, threads)


def slices_agree(dtype, count, threads):
    n, rng, noise = 700_000, random.Random(count), Keys.seeded(5).stream("noise")
    threads(1)
    whole = noise.normal(9, 0, n, dtype=dtype)
    start = torch.linspace(-3, 3, n, dtype=dtype)
    added = noise.add_normal_(start.clone(), step=9, scale=0.3)
    threads(count)
    assert torch.equal(whole, noise.normal(9, 0, n, dtype=dtype))
    for pieces in (2, 60):
        chunks = cuts(n, rng, pieces)
        rng.shuffle(chunks)
        out = start.clone()
        for i, j in chunks:
            assert torch.equal(whole[i:j], noise.normal(9, i, j, dtype=dtype))
            noise.add_normal_(out[i:j], step=9, scale=0.3, start=i)
        assert torch.equal(out, added)
    for i, j in cuts(3000, rng, 40):
        assert torch.equal(noise.bits(9, 0, 3000)[i:j], noise.bits(9, i, j))
        assert torch.equal(noise.uniform(9, 0, 3000)[i:j], noise.uniform(9, i, j))


def test_float32_is_float64_rounded_once_and_scale_is_a_factor():
    noise = Keys.seeded(6).stream("noise")
    z = noise.normal(0, 100, 5000, dtype=torch.float64)
    assert torch.equal(noise.normal(0, 100, 5000), z.float())
    out = noise.add_normal_(torch.full((4900,), 2.0), step=0, scale=1e-3, start=100)
    torch.testing.assert_close(out, 2 + (1e-3 * z).float(), rtol=0, atol=2.4e-7)
    wide = noise.add_normal_(torch.zeros(4900, dtype=torch.float64), step=0, scale=1e-3, start=100)
    torch.testing.assert_close(wide, 1e-3 * z, rtol=1e-15, atol=0)


def test_empty_slices_and_zero_scale_change_nothing():
    noise = Keys.seeded(6).stream("noise")
    assert noise.bits(0, 5, 5).shape == noise.uniform(0, 5, 5).shape == noise.normal(0, 5, 5).shape == (0,)
    out = torch.ones(10)
    assert noise.add_normal_(out, step=0, scale=0.0) is out
    assert torch.equal(out, torch.ones(10))
    assert noise.add_normal_(torch.empty(0), step=0, scale=1.0).shape == (0,)


def test_threads_may_share_a_stream():
    noise = Keys.seeded(8).stream("noise")
    whole = noise.normal(0, 0, 80_000)
    with ThreadPoolExecutor(4) as pool:
        parts = list(pool.map(lambda i: noise.normal(0, i, i + 2000), range(0, 80_000, 2000)))
    assert torch.equal(torch.cat(parts), whole)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_forked_child_draws_what_its_parent_draws(threads):
    """Also when the parent computes with threads, which a child does not inherit: it must not wait for them."""
    threads(2)
    torch.ones(1_000_000).log_()
    noise, n = Keys.seeded(8).stream("noise"), 1_000_000  # enough for helpers, in the parent and in the child
    expected = noise.normal(0, 0, n)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            signal.alarm(20)  # a child that hangs dies, and the comparison fails
            os.write(write, hashlib.sha256(noise.normal(0, 0, n).numpy().tobytes()).digest())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        received = pipe.read()
    os.waitpid(child, 0)
    assert received == hashlib.sha256(expected.numpy().tobytes()).digest()


def test_torch_has_its_threads_back_after_a_draw_or_an_error(threads):
    threads(2)
    noise = Keys.seeded(8).stream("noise")
    noise.normal(0, 0, 10)
    assert torch.get_num_threads() == 2
    with pytest.raises(RuntimeError):
        noise.add_normal_(torch.zeros(10, requires_grad=True), step=0, scale=1.0)
    assert torch.get_num_threads() == 2


def test_a_first_use_in_inference_mode_does_not_spoil_the_scratch():
    """Scratch belongs to a thread, so a new thread has a first use of its own."""
    noise, drawn = Keys.seeded(8).stream("noise"), []

    def use():
        with torch.inference_mode():
            drawn.append(noise.normal(0, 0, 2000).clone())
        drawn.append(noise.add_normal_(torch.zeros(2000), step=0, scale=1.0))

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert len(drawn) == 2
    assert torch.equal(drawn[0], drawn[1])


@pytest.mark.parametrize(
    "call",
    [
        lambda s: s.bits(-1, 0, 1),
        lambda s: s.bits(2**48, 0, 1),
        lambda s: s.bits(0, -1, 1),
        lambda s: s.uniform(0, 2, 1),
        lambda s: s.normal(0.0, 0, 1),
        lambda s: s.normal(0, 2**62, 2**62 + 1),
        lambda s: s.normal(0, 0, 1, dtype=torch.bfloat16),
        lambda s: s.seed(-1),
        lambda s: s.add_normal_(torch.zeros(2), step=0, scale=-1.0),
        lambda s: s.add_normal_(torch.zeros(2), step=0, scale=math.nan),
        lambda s: s.add_normal_(torch.zeros(2), step=0, scale=math.inf),
        lambda s: s.add_normal_(torch.zeros(2), step=0, scale=1.0, start=-1),
        lambda s: s.add_normal_(torch.zeros(2, dtype=torch.float16), step=0, scale=1.0),
        lambda s: s.add_normal_(torch.zeros(2, 2), step=0, scale=1.0),
        lambda s: s.add_normal_(torch.zeros(4)[::2], step=0, scale=1.0),
    ],
)
def test_what_lies_outside_the_contract_is_refused(call):
    with pytest.raises(ValueError):
        call(Keys.seeded(0).stream("noise"))


# ---- rounded exactly


def exactly(words: tuple[int, int], tail: list[tuple[int, int]], scale: float, sine: bool) -> mpmath.mpf:
    """scale z in 500 bits for the middle of what is left of the cell of u and phi after `tail`."""
    with mpmath.workprec(500):
        a, b = words
        u, phi, bits = mpmath.mpf(abs(a | 1) >> 1), mpmath.mpf(b), 62
        for further_u, further_phi in tail:
            u, phi, bits = u * 2**64 + further_u, phi * 2**64 + further_phi, bits + 64
        u, phi = (u + 0.5) / mpmath.mpf(2) ** bits, (phi + 0.5) * mpmath.pi / mpmath.mpf(2) ** (bits + 1)
        return scale * mpmath.sqrt(-2 * mpmath.log(u)) * (mpmath.sin(phi) if sine else mpmath.cos(phi))


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("scale", [0.3, 1000.0, 2.0**20, 2.0**44])
def test_rounded_normals_are_the_exact_ones_rounded(compiled, scale):
    """600 of each scale against 500 bits; at 2**44 most are decided by later bits."""
    noise = Keys.seeded(5).stream("noise")
    with nullcontext() if compiled else without_compiler():
        found = noise.add_rounded_normal_(torch.zeros(600, dtype=torch.float64), step=3, scale=scale, grid=1.0, start=200)
    words, undecided = noise.bits(3, 0, 1024), 0
    for at, n in enumerate(found.tolist(), 200):
        pair = int(words[at % 512]), int(words[512 + at % 512])
        right = exactly(pair, later_bits(noise.key, 2, 3, at % 512, 5), scale, at >= 512)
        assert n == mpmath.nint(right)
        undecided += _normals.ERROR * scale > abs(0.5 - float(right % 1))
    assert (undecided > 300) == (scale == 2.0**44)


def later_bits(key: bytes, stream: int, step: int, pair: int, levels: int) -> list[tuple[int, int]]:
    """As documented: counter 16 pair + level of stream 2**15 + stream, each counter block enciphered by itself."""
    head = (2**15 + stream).to_bytes(2, "big") + step.to_bytes(6, "big")
    cipher = Cipher(algorithms.AES(key), modes.ECB())
    blocks = [cipher.encryptor().update(head + (16 * pair + level).to_bytes(8, "big")) for level in range(levels)]
    return [(int.from_bytes(block[:8], "little"), int.from_bytes(block[8:], "little")) for block in blocks]


def test_later_bits_decide_alike_from_any_float_error(monkeypatch):
    """If float64 decided nothing, intervals would decide the same: in both, for 0.4 to 2**30, and with u in the lowest and highest cell."""
    noise = Keys.seeded(6).stream("receipt")
    for scale in (0.4, 3.0, 2.0**30):
        fast = noise.add_rounded_normal_(torch.zeros(600), step=1, scale=scale, grid=1.0, start=700)
        with monkeypatch.context() as patch:
            patch.setattr(_normals, "ERROR", 1.0)
            assert torch.equal(noise.add_rounded_normal_(torch.zeros(600), step=1, scale=scale, grid=1.0, start=700), fast)
    words = noise.bits(1, 0, 1024)
    for at in range(500, 520):  # at 2**100, a hundred later bits decide
        pair = int(words[at % 512]), int(words[512 + at % 512])
        right = exactly(pair, later_bits(noise.key, 5, 1, at % 512, 5), 2.0**100, at >= 512)
        with mpmath.workprec(500):
            assert noise._rounded(1, at, 2.0**100) == mpmath.nint(right)
    more = lambda level: (2**62, 2**61)  # noqa: E731
    for a in (0, 1, -1, 2**63 - 1, -(2**63)):
        for sine in (False, True):
            right = exactly((a, 12345), [more(level) for level in range(5)], 2.0**100, sine)
            with mpmath.workprec(500):
                assert _normals.decided(2.0**100, a, 12345, sine, more) == mpmath.nint(right)


def test_a_float64_that_could_be_wrong_is_left_open():
    """Words are chosen so that z stands next to the middle between two integers: neither way decides it, and a near miss is decided."""
    angle = 0  # cos 0 = 1
    for compiled in (True, False):
        with nullcontext() if compiled else without_compiler():
            scratch = _normals.Scratch(1)
            scratch.words.zero_()
            scratch.words[:, 0] = 2**62 + 1
            z = math.sqrt(2 * math.log(2))
            for miss, open_ in ((1e-15, True), (-1e-15, True), (1e-13, False), (-1e-13, False)):
                scratch.words[:, 0], scratch.words[:, 1] = 2**62 + 1, angle
                found = scratch.rounded(1, 1000.5 / z * (1 + miss / z))[0]
                assert bool(found.isnan()) == open_, (compiled, miss)
                assert open_ or found == (1001 if miss > 0 else 1000)
            scratch.words[:, 0], scratch.words[:, 1] = 3, angle  # a cell as wide as half of u: z within 0.11 of 9.27
            z = math.sqrt(-2 * math.log(3 * 2.0**-63))
            assert scratch.rounded(1, 9.45 / z)[0].isnan()
            scratch.words[:, 0], scratch.words[:, 1] = 3, angle
            assert scratch.rounded(1, 9.35 / z)[0] == 9
            scratch.words[:, 0] = 1  # the lowest cell reaches to 0, where z is infinite
            assert scratch.rounded(1, 1.0)[:512].isnan().all()


def test_rounded_noise_is_a_rounded_gaussian():
    """Chi-square of 400,000 integers at std 0.7: a std 2 % off moves the share of zeros by 11 standard errors, and is rejected."""
    n = Keys.seeded(7).stream("noise").add_rounded_normal_(torch.zeros(400_000), step=0, scale=0.7, grid=1.0).numpy()
    edges = np.array([-np.inf, -2.5, -1.5, -0.5, 0.5, 1.5, 2.5, np.inf])
    counts = np.histogram(n, np.clip(edges, -99, 99))[0]
    agree = lambda std: stats.chisquare(counts, np.diff(ndtr(edges / std)) * n.size).pvalue  # noqa: E731
    assert agree(0.7) > 1e-6 > max(agree(0.714), agree(0.686))


def test_rounded_noise_on_a_grid():
    """Values and noise are whole numbers of the grid; any slice, dtype and number of threads gives the same."""
    noise, grid = Keys.seeded(8).stream("noise"), 2.0**-18
    out = torch.randn(5000, dtype=torch.float64)
    whole = noise.add_rounded_normal_(out.clone(), step=2, scale=0.5, grid=grid)
    n = whole / grid
    assert torch.equal(n, n.round())
    z = (n - (out / grid).round()) * grid
    assert (z - 0.5 * noise.normal(2, 0, 5000, dtype=torch.float64)).abs().max() <= grid / 2 + 2.0**-44
    parts = [
        noise.add_rounded_normal_(out[i:j].clone(), step=2, scale=0.5, grid=grid, start=i) for i, j in ((0, 1), (1, 1500), (1500, 5000))
    ]
    assert torch.equal(torch.cat(parts), whole)
    with one_thread(), without_compiler():
        assert torch.equal(noise.add_rounded_normal_(out.clone(), step=2, scale=0.5, grid=grid), whole)
    single = noise.add_rounded_normal_(out.float(), step=2, scale=0.5, grid=grid)
    assert torch.equal(single, ((out.float().double() / grid).round() * grid + z).float())
    assert torch.equal(noise.add_rounded_normal_(out.clone(), step=2, scale=0.0, grid=grid), out)


@pytest.mark.parametrize("grid", [0.0, -1.0, 0.3, math.inf, math.nan, 2.0**-60])
def test_a_grid_that_is_not_exact_is_refused(grid):
    with pytest.raises(ValueError, match="grid") as error:
        Keys.seeded(0).stream("noise").add_rounded_normal_(torch.zeros(3), step=0, scale=1.0, grid=grid)
    assert "\n" not in str(error.value)
