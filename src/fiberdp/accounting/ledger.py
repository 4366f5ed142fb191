"""The ledger of a run: one line a step, on disk before the step's gradient is released.

    {"terms": {"delta": 1e-05, "relation": "add_or_remove_one", "accountant": "pld"}, "chain": "…"}
    {"step": 0, "event": {"type": "poisson_sampled", "sampling_probability": 0.1, "event": {...}}, "chain": "…"}
    {"step": 1, "event": ..., "chain": "…"}
    {"steps": 2, "chain": "…"}

    order in every step:  ledger.spend(t, event)  ->  release g_t  ->  update
    a crash anywhere      the ledger holds every release that was made, and at most MOST_AHEAD steps more

    chain_k = SHA-256( chain_{k-1} | line k without its chain ),   chain_0 = SHA-256("fiberdp ledger")

so a line that was edited, moved or left out does not continue the one before it, and the last chain stands for the whole file.  The
first line says how epsilon is computed, the last how many steps there are: a file that was cut off at a line has no last one.

The file is only appended to.  A line counts once it ends in a newline and fsync has returned.  Where fsync takes long, steps that follow
for certain are charged together with the next one, as many as bring its cost to AIM seconds a step: a crash then counts too much, never
too little, and a resumed run takes the steps that are charged.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import math
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fiberdp._disk import lock, sync_folder, writing
from fiberdp._validate import count
from fiberdp.accounting.accountant import ACCOUNTANTS, RELATIONS
from fiberdp.accounting.events import compose, from_json, mechanisms, to_json

if TYPE_CHECKING:
    from types import TracebackType

    from dp_accounting import DpEvent

_START = hashlib.sha256(b"fiberdp ledger").hexdigest()
MOST_AHEAD, AIM = 256, 5e-4
_CHAIN = len(', "chain": ""}') + 64  # characters at the end of every line


@dataclass
class LedgerFile:
    """What a ledger says.  terms: delta, relation, accountant, None if the file does not name them.  events: that of step t is events[t].

    finished: its last line says that no step follows.  chain: of its last line.  chained: False for files of before there were chains,
    in which an edited line cannot be told from another.
    """

    terms: dict[str, Any] | None = None
    events: list[DpEvent] = field(default_factory=list)
    finished: bool = False
    chain: str = _START
    chained: bool = True
    lines: int = 0

    def event(self, steps: int | None = None) -> DpEvent:
        """What the first `steps` were charged (None: everything), composed: what an accountant prices."""
        return compose(self.events[:steps])


class Ledger:
    """Append-only record of what each step was charged; opening an existing file goes on where it ends.

    path: the file, in a folder that exists, locked until the ledger is closed (see `fiberdp._disk.lock`); None keeps the charges in
    memory, for a run that leaves nothing behind.  terms: delta, relation and accountant, written first, so that epsilon follows from the
    file alone.

    Guarantee: with a path, when `spend` returns, the charge survives a crash of the process or the machine.
    Edge cases: a last line without a newline is cut off on opening: the write did not complete, so `spend` did
    not return and nothing was released.  A failed write is cut off, and the ledger closed; opening it again reads
    what the disk really holds.
    Raises ValueError, with the line number, if any complete line is not what was written there, or does not continue the one before it;
    for other terms than those of the file; and for a file that another ledger holds.  OSError, in one line, if the disk refuses.

    >>> import tempfile
    >>> from dp_accounting import GaussianDpEvent
    >>> with tempfile.TemporaryDirectory() as folder, Ledger(f"{folder}/ledger.jsonl") as ledger:
    ...     for step in (0, 1, 1):
    ...         ledger.spend(step, GaussianDpEvent(2.0))
    ...     ledger.event()
    SelfComposedDpEvent(event=GaussianDpEvent(noise_multiplier=2.0), count=2)
    """

    def __init__(self, path: str | os.PathLike[str] | None, terms: dict[str, Any] | None = None) -> None:
        self._fd: int | None = None
        self._path = None if path is None else Path(path)
        self._file = LedgerFile()
        self._together = 1  # steps charged at a time
        if self._path is None:
            self._begin(terms)
            return
        try:
            with writing(self._path):
                self._open(self._path)
            if self._file.lines == 0:
                self._begin(terms)
            elif terms is not None and self._file.terms != terms:
                raise ValueError(
                    f"{self._path}: its terms are {self._file.terms}, the run's {terms}: epsilon of one ledger has one meaning. Resume "
                    "with the configuration the run was started with."
                )
        except BaseException:
            self.close()
            raise

    def _open(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        if not lock(self._fd):
            raise ValueError(
                f"{path}: another ledger writes to it, in this process or another: one may at a time, because a step that both release "
                "would be charged once. Close the other, or wait for its run to end."
            )
        data = path.read_bytes()
        self._file, tail = _parse(data, path)
        if not self._file.chained:
            raise ValueError(
                f"{path}: line 1 has no chain: it was written before lines were chained, and is not continued, because an "
                "edited line of it could not be told. Start the run in a new folder."
            )
        if tail:  # cut off, not counted: its fsync never returned, so its step was never released
            os.ftruncate(self._fd, len(data) - len(tail))
        # Also without a tail: a killed process may have left its last line, or the file itself, unsynced.
        os.fsync(self._fd)
        sync_folder(path.parent)

    def _begin(self, terms: dict[str, Any] | None) -> None:
        if terms is not None:
            self._append([{"terms": terms}])
            self._file.terms = terms

    def __len__(self) -> int:
        """Number of steps charged."""
        return len(self._file.events)

    def spend(self, step: int, event: DpEvent, following: Iterable[DpEvent] = ()) -> None:
        """Charge `step` with `event`, durably, before anything of that step is released.

        following: the events of the next steps, in order, if it is known that they will be taken; some may be charged at once.

        A step charged before with an equal event is a resumed run repeating it: the same keys draw the same batch
        and noise, the release is the identical one, and nothing is written.
        Raises ValueError for a different event at a charged step, a step that is not the next one, a step after the end, an event no
        accountant can price, or a closed ledger; OSError if the disk refuses.
        """
        count("step", step, low=0, why="Steps count from 0.")
        mechanisms(event)
        events = self._file.events
        if step < len(events):
            charged = events[step]
            if to_json(charged) != to_json(event):
                raise ValueError(
                    f"step={step}: charged with {charged}, now {event}. A step is charged once; another mechanism "
                    "would be a second release. Resume with the configuration the run was started with."
                )
            return
        if step > len(events):
            raise ValueError(
                f"step={step}: the next step to charge is {len(events)}. A gap would be steps that were never "
                f"charged. Resume from a checkpoint at step {len(events)} or before."
            )
        if self._file.finished:
            raise ValueError(
                f"step={step}: the ledger ended after step {len(events) - 1}. What was published says that no release follows. "
                "Start a new run."
            )
        together = [event, *itertools.islice(following, self._together - 1)]
        self._append([{"step": step + i, "event": to_json(each)} for i, each in enumerate(together)])
        events += together

    def finish(self) -> str:
        """Say that no step follows; returns the last chain, which stands for the whole file.  Once: a second call changes nothing."""
        if not self._file.finished:
            self._append([{"steps": len(self)}])
            self._file.finished = True
        return self._file.chain

    def _append(self, records: Sequence[dict[str, Any]]) -> None:
        if self._path is not None and self._fd is None:
            raise ValueError(f"{self._path}: the ledger is closed. A release may only follow a charge. Open it again.")
        chain, lines = self._file.chain, b""
        for record in records:
            body = json.dumps(record).encode()
            chain = _next(chain, body)
            lines += body[:-1] + f', "chain": "{chain}"}}\n'.encode()
        if self._path is not None:
            self._write(self._path, lines)
        self._file.chain, self._file.lines = chain, self._file.lines + len(records)

    def _write(self, path: Path, lines: bytes) -> None:
        assert self._fd is not None
        began, before = time.perf_counter(), os.fstat(self._fd).st_size
        try:
            with writing(path):
                if (written := os.write(self._fd, lines)) != len(lines):
                    raise OSError(f"only {written} of {len(lines)} bytes")
                os.fsync(self._fd)
        except BaseException:
            # Nothing is released.  What a failed fsync leaves in memory no later one need write, so it may not stay to be read as a charge.
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, before)
            self.close()
            raise
        self._together = max(1, min(MOST_AHEAD, math.ceil((time.perf_counter() - began) / AIM)))

    def event(self, steps: int | None = None) -> DpEvent:
        """What the first `steps` were charged (None: everything), composed: what an accountant prices."""
        return self._file.event(steps)

    def close(self) -> None:
        """Give the file back; `event` and `len` go on working, `spend` to a file does not."""
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)

    def __del__(self) -> None:
        self.close()

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def read_ledger(path: str | os.PathLike[str]) -> LedgerFile:
    """What the file says, without touching it.

    A last line without a newline is counted if it can be read: whoever cannot cut it off must assume it was spent.
    Raises ValueError, with the line number, for a line that is not what `Ledger` writes, or does not continue the one before it.
    """
    found, tail = _parse(Path(path).read_bytes(), Path(path))
    if tail:
        with contextlib.suppress(ValueError):  # torn in the middle: fsync never returned, so nothing was released
            _take(found, tail)
    return found


def _parse(data: bytes, path: Path) -> tuple[LedgerFile, bytes]:
    """What the complete lines say, and what stands behind the last newline."""
    *lines, tail = data.split(b"\n")
    found = LedgerFile()
    for line in lines:
        try:
            _take(found, line)
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"{path}: line {found.lines + 1} is not what a run writes there ({' '.join(str(error).split())}). A ledger that was "
                "changed proves no epsilon. Restore the file as the run wrote it."
            ) from None
    return found, tail


def _take(found: LedgerFile, line: bytes) -> None:
    """Add one line to what is found; ValueError, and nothing added, if it cannot stand there."""
    record: Any = json.loads(line)
    if not isinstance(record, dict):
        raise ValueError("it must be a JSON object")
    chain = record.pop("chain", None)
    if found.lines == 0:
        found.chained = chain is not None
    if found.chained:
        body = line[:-_CHAIN] + b"}"
        expected = _next(found.chain, body)
        if chain != expected or line != body[:-1] + f', "chain": "{expected}"}}'.encode():
            raise ValueError("its chain does not continue that of the line before it: one of them was edited, moved or left out")
    elif chain is not None:
        raise ValueError("it has a chain, the lines before it have none")
    if found.finished:
        raise ValueError("the line before it says that no step follows")
    if set(record) == {"terms"} and found.lines == 0:
        found.terms = _terms(record["terms"])
    elif set(record) == {"steps"} and record["steps"] == len(found.events) and type(record["steps"]) is int:
        found.finished = True
    elif set(record) == {"step", "event"} and type(record["step"]) is int and record["step"] == len(found.events):
        event = from_json(record["event"])
        mechanisms(event)
        found.events.append(event)
    else:
        raise ValueError(f"it must be the charge of step {len(found.events)}, or the end")
    if found.chained:
        found.chain = str(chain)
    found.lines += 1


def _terms(terms: Any) -> dict[str, Any]:
    given = terms if isinstance(terms, dict) else {}
    delta = given.get("delta")
    if set(given) != {"delta", "relation", "accountant"} or not isinstance(delta, float) or not 0 < delta < 1:
        raise ValueError("terms must be delta in (0, 1), relation and accountant")
    if given["relation"] not in RELATIONS or given["accountant"] not in ACCOUNTANTS:
        raise ValueError(f"relation must be one of {', '.join(RELATIONS)}, accountant one of {', '.join(ACCOUNTANTS)}")
    return given


def _next(chain: str, body: bytes) -> str:
    return hashlib.sha256(chain.encode() + body).hexdigest()
