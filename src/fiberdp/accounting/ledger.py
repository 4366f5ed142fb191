"""The ledger of a run: one line a step, on disk before the step's gradient is released.

    {"step": 0, "event": {"type": "poisson_sampled", "sampling_probability": 0.1, "event": {...}}}
    {"step": 1, "event": ...}

    order in every step:  ledger.spend(t, event)  ->  release g_t  ->  update
    a crash anywhere      the ledger holds every release that was made, and at most one step more

The file is only appended to.  A line counts once it ends in a newline and fsync has returned.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fiberdp._validate import count
from fiberdp.accounting.events import compose, from_json, mechanisms, to_json

if TYPE_CHECKING:
    from types import TracebackType

    from dp_accounting import DpEvent


class Ledger:
    """Append-only record of what each step was charged; opening an existing file goes on where it ends.

    path: the file, in a folder that exists, with one writer at a time; None keeps the charges in memory, for a run
    that leaves nothing behind.

    Guarantee: with a path, when `spend` returns, the charge survives a crash of the process or the machine.
    Edge cases: a last line without a newline is cut off on opening: the write did not complete, so `spend` did
    not return and nothing was released.  After a failed write the ledger is closed, and opening it again reads
    what the disk really holds.
    Raises ValueError, with the line number, if any complete line is not what `spend` writes.

    >>> import tempfile
    >>> from dp_accounting import GaussianDpEvent
    >>> with tempfile.TemporaryDirectory() as folder, Ledger(f"{folder}/ledger.jsonl") as ledger:
    ...     for step in (0, 1, 1):
    ...         ledger.spend(step, GaussianDpEvent(2.0))
    ...     ledger.event()
    SelfComposedDpEvent(event=GaussianDpEvent(noise_multiplier=2.0), count=2)
    """

    def __init__(self, path: str | os.PathLike[str] | None) -> None:
        self._path = None if path is None else Path(path)
        self._fd: int | None = None
        self._events: list[DpEvent] = []
        if self._path is None:
            return
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            data = self._path.read_bytes()
            self._events, tail = _parse(data, self._path)
            if tail:  # cut off, not counted: its fsync never returned, so its step was never released
                os.ftruncate(self._fd, len(data) - len(tail))
            # Also without a tail: a killed process may have left its last line, or the file itself, unsynced.
            os.fsync(self._fd)
            _sync_folder(self._path.parent)
        except BaseException:
            self.close()
            raise

    def __len__(self) -> int:
        """Number of steps charged."""
        return len(self._events)

    def spend(self, step: int, event: DpEvent) -> None:
        """Charge `step` with `event`, durably, before anything of that step is released.

        A step charged before with an equal event is a resumed run repeating it: the same keys draw the same batch
        and noise, the release is the identical one, and nothing is written.
        Raises ValueError for a different event at a charged step, a step that is not the next one, an event no
        accountant can price, or a closed ledger; OSError if the disk refuses.
        """
        count("step", step, low=0, why="Steps count from 0.")
        mechanisms(event)
        if step < len(self._events):
            charged = self._events[step]
            if to_json(charged) != to_json(event):
                raise ValueError(
                    f"step={step}: charged with {charged}, now {event}. A step is charged once; another mechanism "
                    "would be a second release. Resume with the configuration the run was started with."
                )
            return
        if step > len(self._events):
            raise ValueError(
                f"step={step}: the next step to charge is {len(self._events)}. A gap would be steps that were never "
                f"charged. Resume from a checkpoint at step {len(self._events)} or before."
            )
        if self._path is not None:
            self._append(json.dumps({"step": step, "event": to_json(event)}).encode() + b"\n")
        self._events.append(event)

    def _append(self, line: bytes) -> None:
        if self._fd is None:
            raise ValueError(f"{self._path}: the ledger is closed. A release may only follow a charge. Open it again.")
        try:
            written = os.write(self._fd, line)
            if written != len(line):
                raise OSError(f"{self._path}: only {written} of {len(line)} bytes could be written. Free some space.")
            os.fsync(self._fd)
        except BaseException:
            self.close()  # what is on disk is unknown now
            raise

    def event(self) -> DpEvent:
        """Everything charged, composed: what an accountant prices."""
        return compose(self._events)

    def close(self) -> None:
        """Give the file back; `event` and `len` go on working, `spend` to a file does not."""
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def read_ledger(path: str | os.PathLike[str]) -> list[tuple[int, DpEvent]]:
    """(step, event) of every line, without touching the file.

    A last line without a newline is counted if it can be read: whoever cannot cut it off must assume it was spent.
    Raises ValueError, with the line number, for a line that is not what `Ledger.spend` writes.
    """
    events, tail = _parse(Path(path).read_bytes(), Path(path))
    if tail:
        with contextlib.suppress(ValueError):  # torn in the middle: fsync never returned, so nothing was released
            events.append(_parse_line(tail, len(events)))
    return list(enumerate(events))


def _parse(data: bytes, path: Path) -> tuple[list[DpEvent], bytes]:
    """The events of the complete lines, and what stands behind the last newline."""
    *lines, tail = data.split(b"\n")
    events: list[DpEvent] = []
    for line in lines:
        try:
            events.append(_parse_line(line, len(events)))
        except ValueError as error:
            raise ValueError(
                f"{path}: line {len(events) + 1} is not the charge of step {len(events)} ({error}). A ledger that was "
                "changed proves no epsilon. Restore the file as the run wrote it."
            ) from None
    return events, tail


def _parse_line(line: bytes, step: int) -> DpEvent:
    record: Any = json.loads(line)
    if not isinstance(record, dict) or set(record) != {"step", "event"} or type(record["step"]) is not int or record["step"] != step:
        raise ValueError(f"it must hold step {step} and its event")
    event = from_json(record["event"])
    mechanisms(event)
    return event


def _sync_folder(folder: Path) -> None:
    """Make the entry of a new file durable: fsync of the file alone does not."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
