"""Pieces shared between threads: each done once, whatever the threads are; errors, modes and torch's own threads survive."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter

import pytest
import torch

from fiberdp import _normals, _random, _threads
from fiberdp._random import Keys
from fiberdp._threads import one_thread, share


@pytest.fixture(autouse=True)
def threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("count", [1, 2, 3, 8])
@pytest.mark.parametrize("n", [0, 1, 3, 4, 5, 1000])
def test_every_piece_is_done_once(count, n, threads):
    threads(count)
    done: list[int] = []
    share(done.append, range(7, 7 + 3 * n, 3))
    assert Counter(done) == Counter(range(7, 7 + 3 * n, 3))


def test_long_vectors_have_helpers_and_short_ones_and_nested_calls_have_none():
    def who(n: int) -> set[str]:
        seen = set()

        def work(_: int) -> None:
            seen.add(threading.current_thread().name)
            assert torch.get_num_threads() == 1
            time.sleep(0.01)

        share(work, range(n))
        return seen

    assert len(who(30)) == 3
    assert len(who(3)) == 1
    with one_thread():
        assert len(who(30)) == 1
    assert torch.get_num_threads() == 3
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("fiberdp")]


@pytest.mark.parametrize("where", [0, 17])
def test_an_error_in_any_thread_reaches_the_caller(where):
    def work(piece: int) -> None:
        time.sleep(0.001)
        if piece == where:
            raise KeyError(piece)

    with pytest.raises(KeyError):
        share(work, range(40))
    assert torch.get_num_threads() == 3


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_helpers_compute_in_the_callers_mode(mode):
    seen = set()

    def work(_: int) -> None:
        seen.add((torch.is_grad_enabled(), torch.is_inference_mode_enabled()))
        time.sleep(0.005)

    with mode():
        expected = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        share(work, range(20))
    assert seen == {expected}


def test_noise_of_a_long_vector_is_drawn_by_several_threads_and_no_chunk_twice(monkeypatch):
    """3e6 elements in 23 chunks.  Rejected below: one chunk given to two threads, or drawn backwards."""
    n, noise, by = 3_000_000, Keys.seeded(4).stream("noise"), set()
    fill = _normals.fill

    def watched(*arguments):
        by.add(threading.get_ident())
        return fill(*arguments)

    monkeypatch.setattr(_normals, "fill", watched)
    monkeypatch.setattr(_normals, "compiled_noise", lambda dtype: None)
    shared = [noise.add_normal_(torch.zeros(n), step=1, scale=1.0) for _ in range(8)]  # scratch used too early shows in a third of calls
    assert len(by) >= 3
    with one_thread():
        alone = noise.normal(1, 0, n)
    assert all(torch.equal(one, alone) for one in shared)
    size = 2 * _normals.S * _random._CHUNK
    chunks = alone[: n // size * size].view(-1, size)
    sums = {tuple(chunk[:4].tolist()) for chunk in chunks}
    assert len(sums) == len(chunks)


def test_scratch_is_bounded_by_the_number_of_threads_not_by_the_vector(monkeypatch):
    """A vector of 64 MiB is given its noise with at most 3 pieces of scratch, 2.6 MiB each, kept for the next call."""
    monkeypatch.setattr(_normals, "compiled_noise", lambda dtype: None)
    _normals.idle.clear()
    noise, out = Keys.seeded(4).stream("noise"), torch.zeros(2**24)
    for _ in range(2):
        noise.add_normal_(out, step=0, scale=1.0)
    assert 1 <= len(_normals.idle) <= 3
    held = sum(len(s.buffer) + s.pairs.nbytes for s in _normals.idle)
    assert held <= 3 * (40 * _normals.S * _random._CHUNK + 16) < 0.13 * out.nbytes


@pytest.mark.skipif(_threads._pause is None, reason="this torch's OpenMP cannot end its threads")
def test_threads_that_torch_keeps_waiting_can_be_ended():
    """They keep a core busy for milliseconds."""
    torch.ones(1_000_000).log_()  # begins two
    before, waited = len(os.listdir("/proc/self/task")), 0.0
    _threads._end_waiting_threads()
    while len(os.listdir("/proc/self/task")) > before - 2 and waited < 5:
        time.sleep(0.01)
        waited += 0.01
    assert waited < 5


def test_they_are_ended_before_helpers_begin_and_only_then(monkeypatch):
    ended: list[int] = []
    monkeypatch.setattr(_threads, "_pause", ended.append)
    share(lambda _: None, range(2))
    assert not ended
    share(lambda _: None, range(64))
    assert ended == [1]
