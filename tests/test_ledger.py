"""Claims of the ledger: charged before released, once, in order, and never lost."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import signal
import time

import pytest
from dp_accounting import (
    ComposedDpEvent,
    GaussianDpEvent,
    LaplaceDpEvent,
    NoOpDpEvent,
    PoissonSampledDpEvent,
    SampledWithoutReplacementDpEvent,
    SelfComposedDpEvent,
)

from fiberdp.accounting import Ledger, LedgerFile, compose, epsilon, from_json, read_ledger, to_json
from fiberdp.statement import account_ledger

STEP = PoissonSampledDpEvent(0.01, GaussianDpEvent(1.0))
OTHER = PoissonSampledDpEvent(0.01, GaussianDpEvent(0.5))


@pytest.fixture
def path(tmp_path):
    return tmp_path / "ledger.jsonl"


def spent(path, steps: int) -> None:
    with Ledger(path) as ledger:
        for step in range(steps):
            ledger.spend(step, STEP)


def chained(chain: str, record: dict) -> bytes:
    """A line as a forger would write it who knows how lines are chained."""
    body = json.dumps(record).encode()
    return body[:-1] + f', "chain": "{hashlib.sha256(chain.encode() + body).hexdigest()}"}}'.encode()


TERMS = {"delta": 1e-5, "relation": "add_or_remove_one", "accountant": "pld"}


def finished(path, steps: int) -> str:
    with Ledger(path, TERMS) as ledger:
        for step in range(steps):
            ledger.spend(step, STEP)
        return ledger.finish()


def test_one_line_a_step_and_the_composed_event(path):
    with Ledger(path) as ledger:
        assert len(ledger) == 0
        assert epsilon(ledger.event(), 1e-5, relation="add_or_remove_one") == 0
        for step in range(3):
            ledger.spend(step, STEP)
        assert len(ledger) == 3
        assert ledger.event() == SelfComposedDpEvent(STEP, 3)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    chains = [line.pop("chain") for line in lines]
    assert lines == [{"step": t, "event": to_json(STEP)} for t in range(3)]
    assert read_ledger(path) == LedgerFile(events=[STEP] * 3, chain=chains[-1], lines=3)


def test_a_resumed_step_with_the_same_event_is_the_same_release_and_costs_nothing(path):
    spent(path, 3)
    before = path.read_bytes()
    with Ledger(path) as ledger:
        for step in (1, 2):
            ledger.spend(step, PoissonSampledDpEvent(0.01, GaussianDpEvent(1.0)))
        assert path.read_bytes() == before
        ledger.spend(3, STEP)
        assert len(ledger) == 4


def test_e32_history_survives_a_resume(path):
    """CASES E32: sigma 1, q .01, 600 + 400 steps: 1.82824, not the 1.20365 of a ledger that forgot.  Origin: CASES.md."""
    with Ledger(path) as ledger:
        for step in range(600):
            ledger.spend(step, STEP, [STEP] * (599 - step))
    with Ledger(path) as ledger:
        assert len(ledger) == 600
        for step in range(600, 1000):
            ledger.spend(step, STEP, [STEP] * (999 - step))
        assert epsilon(ledger.event(), 1e-5, relation="add_or_remove_one") == pytest.approx(1.82824, abs=1e-5)


def test_a_charged_step_with_another_event_is_refused(path):
    spent(path, 2)
    with Ledger(path) as ledger, pytest.raises(ValueError, match=r"^step=1: charged with [^\n]*$"):
        ledger.spend(1, OTHER)


@pytest.mark.parametrize("step", [3, 7, -1, True, 1.0])
def test_a_gap_is_refused(path, step):
    spent(path, 2)
    with Ledger(path) as ledger, pytest.raises(ValueError, match=r"^step="):
        ledger.spend(step, STEP)
    assert len(read_ledger(path).events) == 2


@pytest.mark.parametrize("event", [LaplaceDpEvent(1.0), GaussianDpEvent(float("nan")), PoissonSampledDpEvent(1.5, GaussianDpEvent(1.0))])
def test_an_event_nobody_can_price_is_refused_before_it_is_written(path, event):
    with Ledger(path) as ledger, pytest.raises(ValueError):
        ledger.spend(0, event)
    assert path.read_bytes() == b""


@pytest.mark.parametrize("cut", range(1, 60, 7))
def test_a_torn_last_line_was_never_released_and_is_cut_off(path, cut):
    spent(path, 3)
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])
    assert len(read_ledger(path).events) == (3 if cut == 1 else 2)  # only the newline missing: it parses, so it counts
    with Ledger(path) as ledger:
        assert len(ledger) == 2
        ledger.spend(2, STEP)
    assert path.read_bytes() == whole


def test_zeros_behind_the_last_line_are_a_torn_line(path):
    spent(path, 2)
    path.write_bytes(path.read_bytes() + bytes(100))
    assert len(read_ledger(path).events) == 2
    spent(path, 3)
    assert len(read_ledger(path).events) == 3


@pytest.mark.parametrize(
    "bad",
    [
        b"garbage",
        b"",
        {"step": 2, "event": {"type": "no_op"}},
        {"step": 1, "event": {"type": "no_op"}, "x": 1},
        {"step": 1},
        b"[1]",
        {"step": True, "event": {"type": "no_op"}},
        {"step": 1, "event": {"type": "laplace", "noise_multiplier": 1.0}},
        {"step": 1, "event": {"type": "gaussian", "noise_multiplier": "1"}},
        {"step": 1, "event": {"type": "gaussian", "noise_multiplier": -1}},
    ],
)
@pytest.mark.parametrize("last", [False, True])
def test_a_corrupt_line_is_named_and_nothing_is_changed(path, bad, last):
    spent(path, 3)
    lines = path.read_bytes().splitlines()
    lines[1] = bad if isinstance(bad, bytes) else chained(json.loads(lines[0])["chain"], bad)
    data = b"\n".join(lines[: 2 if last else 3]) + b"\n"
    path.write_bytes(data)
    for read in (Ledger, read_ledger):
        with pytest.raises(ValueError, match=r"ledger\.jsonl: line 2 is not what a run writes there [^\n]*$"):
            read(path)
    assert path.read_bytes() == data


@pytest.mark.parametrize("death", [lambda: os.kill(os.getpid(), signal.SIGKILL), lambda: os._exit(1)], ids=["SIGKILL", "_exit"])
def test_a_process_that_dies_before_the_release_has_paid_for_it(path, death):
    released = path.with_name("released")
    child = os.fork()
    if child == 0:
        try:
            ledger = Ledger(path)
            ledger.spend(0, STEP)
            death()
            released.touch()
        finally:
            os._exit(0)
    assert os.waitpid(child, 0)[1] != 0
    assert not released.exists()
    assert read_ledger(path).events == [STEP]
    with Ledger(path) as ledger:
        assert ledger.event() == SelfComposedDpEvent(STEP, 1)


def test_spend_returns_only_after_fsync_of_the_whole_line(path, monkeypatch):
    """And opening syncs too: a killed process may have left a line, or the file's entry in its folder, unsynced."""
    seen: list[tuple[bool, int]] = []  # (is a folder, bytes in the ledger at that moment)
    fsync = os.fsync

    def spy(fd: int) -> None:
        seen.append((os.path.isdir(f"/proc/self/fd/{fd}"), path.stat().st_size))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", spy)
    with Ledger(path) as ledger:
        assert (True, 0) in seen
        assert (False, 0) in seen
        seen.clear()
        ledger.spend(0, STEP)
    assert seen == [(False, path.stat().st_size)]
    seen.clear()
    Ledger(path).close()
    assert (False, path.stat().st_size) in seen


def test_after_a_failed_write_nothing_is_charged_or_released_until_the_file_is_read_again(path, monkeypatch):
    spent(path, 1)
    ledger = Ledger(path)
    write = os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda fd, data: write(fd, data[:20]))  # a full disk
        with pytest.raises(OSError, match="only 20 of"):
            ledger.spend(1, STEP)
    with pytest.raises(ValueError, match="closed"):
        ledger.spend(1, STEP)
    assert len(ledger) == 1
    spent(path, 2)
    assert read_ledger(path).events == [STEP, STEP]


def test_a_failed_fsync_is_not_a_charge(path, monkeypatch):
    ledger = Ledger(path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda fd: (_ for _ in ()).throw(OSError("disk on fire")))
        with pytest.raises(OSError, match="disk on fire"):
            ledger.spend(0, STEP)
    assert len(ledger) == 0
    with pytest.raises(ValueError, match="closed"):
        ledger.spend(0, STEP)


def test_in_memory_ledger_keeps_the_same_rules():
    ledger = Ledger(None)
    ledger.spend(0, STEP)
    ledger.spend(0, STEP)
    with pytest.raises(ValueError, match="step=0"):
        ledger.spend(0, OTHER)
    with pytest.raises(ValueError, match="step=2"):
        ledger.spend(2, STEP)
    assert ledger.event() == SelfComposedDpEvent(STEP, 1)


EVENTS = [
    GaussianDpEvent(0.1 + 0.2),
    PoissonSampledDpEvent(1 / 3, GaussianDpEvent(1e-300)),
    SampledWithoutReplacementDpEvent(50_000, 5_000, GaussianDpEvent(2.0)),
    NoOpDpEvent(),
    SelfComposedDpEvent(GaussianDpEvent(2.0), 7),
    ComposedDpEvent([GaussianDpEvent(2.0), SelfComposedDpEvent(ComposedDpEvent([NoOpDpEvent()]), 2)]),
]


@pytest.mark.parametrize("event", EVENTS, ids=lambda e: type(e).__name__)
def test_json_keeps_every_bit_of_an_event(event):
    assert from_json(json.loads(json.dumps(to_json(event)))) == event


@pytest.mark.parametrize("data", [{"type": "laplace"}, {}, None, 3, {"type": ["gaussian"]}, {"type": "gaussian"},
                                  {"type": "composed", "events": None},
                                  {"type": "gaussian", "noise_multiplier": 1.0, "clip": 2.0}])  # fmt: skip
def test_unknown_json_is_refused(data):
    with pytest.raises(ValueError, match=r"^event [^\n]*$"):
        from_json(data)


def test_a_subclass_of_an_event_may_mean_something_else_and_is_refused():
    class Biased(GaussianDpEvent):
        pass

    with pytest.raises(ValueError, match="must be one of"):
        to_json(Biased(1.0))


def test_compose_counts_equal_events_in_any_order():
    a, b = GaussianDpEvent(1.0), GaussianDpEvent(2.0)
    composed = compose([a, b, NoOpDpEvent(), a, b, a])
    assert composed == compose([b, b, a, a, a]) == ComposedDpEvent([SelfComposedDpEvent(a, 3), SelfComposedDpEvent(b, 2)])
    assert compose([]) == compose([NoOpDpEvent()]) == NoOpDpEvent()


def test_epsilon_follows_from_the_file_alone(path):
    chain = finished(path, 5)
    stated = account_ledger(str(path))
    assert stated["epsilon"] == epsilon(SelfComposedDpEvent(STEP, 5), 1e-5, relation="add_or_remove_one")
    assert stated | TERMS == stated
    assert (stated["steps"], stated["finished"], stated["chain"]) == (5, True, chain)


def test_an_edited_moved_or_missing_line_is_named(path):
    """Every line of the file, in each of four ways; line k + 1 is the first that does not continue the one before it."""

    def edited(line: bytes) -> bytes:
        return line.replace(b"0.01", b"0.02").replace(b"1e-05", b"1e-04").replace(b'"steps": 4', b'"steps": 3')

    finished(path, 4)
    lines = path.read_bytes().splitlines(keepends=True)
    for k, line in enumerate(lines):
        changed = {
            "edited": [*lines[:k], edited(line), *lines[k + 1 :]],
            "left out": [*lines[:k], *lines[k + 1 :]],
            "doubled": [*lines[:k], line, line, *lines[k + 1 :]],
            "moved": [*lines[:k], *lines[k + 1 : k + 2], line, *lines[k + 2 :]],
        }
        for way, data in changed.items():
            path.write_bytes(b"".join(data))
            if data == lines or (way == "left out" and k == 5):
                continue
            at = k + 2 if way == "doubled" else k + 1
            with pytest.raises(ValueError, match=rf"line {at} is not what a run writes there"):
                account_ledger(str(path))


def test_a_cut_ledger_is_refused_at_the_line_that_is_missing_unless_it_is_asked_for(path):
    finished(path, 4)
    lines = path.read_bytes().splitlines(keepends=True)
    for kept in range(1, 6):
        path.write_bytes(b"".join(lines[:kept]))
        with pytest.raises(ValueError, match=rf"line {kept + 1} is missing"):
            account_ledger(str(path))
        stated = account_ledger(str(path), unfinished=True)
        assert (stated["steps"], stated["finished"]) == (kept - 1, False)


def test_nothing_follows_the_end(path):
    chain = finished(path, 2)
    with Ledger(path, TERMS) as ledger:
        ledger.spend(1, STEP)  # a resumed run repeats its last step
        assert ledger.finish() == chain
        with pytest.raises(ValueError, match="ended after step 1"):
            ledger.spend(2, STEP)
    data = path.read_bytes()
    path.write_bytes(data + chained(chain, {"step": 2, "event": to_json(STEP)}) + b"\n")
    with pytest.raises(ValueError, match=r"line 5 .*says that no step follows"):
        read_ledger(path)


def test_other_terms_are_refused(path):
    finished(path, 2)
    with pytest.raises(ValueError, match="one ledger has one meaning"):
        Ledger(path, TERMS | {"delta": 1e-3})


@pytest.mark.parametrize(
    "terms", [{}, None, TERMS | {"delta": 0}, TERMS | {"delta": 1.0}, TERMS | {"relation": "x"}, TERMS | {"accountant": 1}]
)
def test_terms_that_mean_nothing_are_refused(path, terms):
    path.write_bytes(chained(hashlib.sha256(b"fiberdp ledger").hexdigest(), {"terms": terms}) + b"\n")
    with pytest.raises(ValueError, match="line 1 is not what a run writes there"):
        read_ledger(path)


def test_a_ledger_without_chains_is_read_but_neither_continued_nor_vouched_for(path):
    path.write_bytes(b"".join(json.dumps({"step": t, "event": to_json(STEP)}).encode() + b"\n" for t in range(3)))
    assert read_ledger(path).events == [STEP] * 3
    with pytest.raises(ValueError, match="before lines were chained"):
        Ledger(path)
    with pytest.raises(ValueError, match="line 1 does not name delta"):
        account_ledger(str(path))


def test_where_the_disk_is_slow_steps_that_follow_are_charged_together_and_always_before(path, monkeypatch):
    """5 ms an fsync: ten steps at a time, so that a step pays 0.5 ms; the file is the same as one written a line at a time."""
    fsync, calls = os.fsync, []

    def slow(fd: int) -> None:
        calls.append(len(read_ledger(path).events))
        time.sleep(0.005)
        fsync(fd)

    monkeypatch.setattr(os, "fsync", slow)
    with Ledger(path, TERMS) as ledger:
        for step in range(200):
            ledger.spend(step, STEP, [STEP] * (199 - step))
            assert read_ledger(path).events[: step + 1] == [STEP] * (step + 1)
        ledger.finish()
    assert len(calls) < 3 + 200 / 9
    whole = path.read_bytes()
    path.unlink()
    monkeypatch.undo()
    finished(path, 200)
    assert path.read_bytes() == whole


def test_steps_charged_ahead_are_not_charged_twice_and_stop_with_the_plan(path):
    with Ledger(path) as ledger:
        ledger._together = 5
        ledger.spend(0, STEP, [STEP] * 3)
        assert len(ledger) == 4
        size = path.stat().st_size
        for step in (1, 2, 3):
            ledger.spend(step, STEP)
        assert path.stat().st_size == size
        assert ledger.event(2) == SelfComposedDpEvent(STEP, 2)
        with pytest.raises(ValueError, match="step=2: charged with"):
            ledger.spend(2, OTHER)


def test_a_ledger_has_one_writer(path):
    """A second one on the same file is refused, a reader is not; closed, or given up, it is free."""
    with Ledger(path) as first:
        first.spend(0, STEP)
        before = path.read_bytes()
        with pytest.raises(ValueError, match=r"another ledger writes to it[^\n]*$"):
            Ledger(path)
        assert read_ledger(path).events == [STEP]
        assert path.read_bytes() == before
        first.spend(1, STEP)
    second = Ledger(path)
    assert len(second) == 2
    del second
    spent(path, 3)
    assert len(read_ledger(path).events) == 3


def test_a_line_whose_fsync_failed_does_not_stay_to_be_taken_for_a_charge(path, monkeypatch):
    """An fsync that failed may have given up what it was to write, and the next one succeeds without writing it."""
    spent(path, 1)
    before = path.read_bytes()
    ledger = Ledger(path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda fd: (_ for _ in ()).throw(OSError(errno.EIO, "Input/output error")))
        with pytest.raises(OSError, match=r"ledger\.jsonl could not be written \(Input/output error\)") as error:
            ledger.spend(1, STEP)
    assert error.value.errno == errno.EIO
    assert path.read_bytes() == before
