"""How a run is shown: a bar on a terminal, plain lines otherwise; on stderr, so that stdout stays for results."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from fiberdp.run_directory import Reporter, Silent
from fiberdp.workers import Observer, Unheard


@contextmanager
def progress(*, quiet: bool, mute: bool = False) -> Iterator[Reporter]:
    """The reporter that fits where stderr goes.  quiet: no lines; mute: no bar either."""
    if mute:
        yield Silent()
    elif sys.stderr.isatty():
        with _bar() as bar:
            yield _Bar(bar)
    elif quiet:
        yield Silent()
    else:
        yield _Lines()


def _proof(plan: Any, receipt: Any) -> str:
    return (
        f"noise proved: std {receipt.std_ratio:.4f} +- {receipt.standard_error:.4f} of the {receipt.std_charged:.4g} charged "
        f"({receipt.samples:,} samples); {plan.steps} steps, noise multiplier {plan.noise_multiplier:.4g}"
    )


class _Lines:
    def __init__(self) -> None:
        self.started, self.first = time.monotonic(), None

    def proved(self, plan: Any, receipt: Any) -> None:
        print(_proof(plan, receipt), file=sys.stderr, flush=True)
        self.started = time.monotonic()

    def stepped(self, step: int, steps: int) -> None:
        self.first = step - 1 if self.first is None else self.first

    def evaluated(self, line: dict[str, Any], steps: int) -> None:
        elapsed, done = time.monotonic() - self.started, line["step"] - (self.first or 0)
        left = elapsed / max(1, done) * (steps - line["step"])
        print(
            f"step {line['step']}/{steps}  epsilon {line['epsilon']:.3f}  held-out accuracy {line['heldout']['accuracy']:.4f}  "
            f"{elapsed:.0f} s, {left:.0f} s left",
            file=sys.stderr, flush=True,
        )  # fmt: skip


def _bar() -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    return Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[so_far]}"),
        TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(), console=Console(stderr=True),
    )  # fmt: skip


class _Bar:
    def __init__(self, bar: Any) -> None:
        self.bar, self.task = bar, bar.add_task("reading data", total=None, so_far="")

    def proved(self, plan: Any, receipt: Any) -> None:
        self.bar.console.print(_proof(plan, receipt))
        self.bar.update(self.task, description="training", total=plan.steps)

    def stepped(self, step: int, steps: int) -> None:
        self.bar.update(self.task, completed=step)

    def evaluated(self, line: dict[str, Any], steps: int) -> None:
        self.bar.update(self.task, so_far=f"epsilon {line['epsilon']:.3f}  held-out {line['heldout']['accuracy']:.4f}")


@contextmanager
def counter(what: str) -> Iterator[Callable[[int, int], None]]:
    """A bar for work that is told as (done, of how many), on a terminal; nothing otherwise."""
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    with _bar() as bar:
        task = bar.add_task(what, total=None, so_far="")
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextmanager
def runs(*, quiet: bool) -> Iterator[Observer]:
    """Who watches many runs: a bar for all and one for each that is going on, on a terminal; else a line for each that ended."""
    if sys.stderr.isatty():
        with _bar() as bar:
            yield _Bars(bar)
    elif quiet:
        yield Unheard()
    else:
        yield _Ends()


class _Ends:
    def planned(self, done: int, total: int) -> None:
        self.done, self.total, self.started = done, total, time.monotonic()
        self.new = 0
        if done:
            print(f"{done} of {total} runs are there", file=sys.stderr, flush=True)

    def began(self, name: str, steps: int) -> None: ...
    def stepped(self, name: str, step: int) -> None: ...

    def ended(self, name: str, record: dict[str, Any]) -> None:
        self.done, self.new = self.done + 1, self.new + 1
        left = (time.monotonic() - self.started) / self.new * (self.total - self.done)
        print(f"{self.done}/{self.total}  {name}  {_outcome(record)}, {left:.0f} s left", file=sys.stderr, flush=True)


class _Bars:
    def __init__(self, bar: Any) -> None:
        self.bar, self.tasks = bar, {}

    def planned(self, done: int, total: int) -> None:
        self.all = self.bar.add_task("runs", total=total, completed=done, so_far="")

    def began(self, name: str, steps: int) -> None:
        self.tasks[name] = self.bar.add_task(name, total=steps, so_far="")

    def stepped(self, name: str, step: int) -> None:
        self.bar.update(self.tasks[name], completed=step)

    def ended(self, name: str, record: dict[str, Any]) -> None:
        self.bar.console.print(f"{name}  {_outcome(record)}")
        self.bar.advance(self.all)
        if name in self.tasks:
            self.bar.remove_task(self.tasks.pop(name))


def _outcome(record: dict[str, Any]) -> str:
    result, test = record["result"], record["result"]["test"]
    told = "" if test is None else f"test {test:.4f}, "
    return f"{told}held-out {result['heldout']:.4f}, epsilon {record['privacy']['epsilon']:.3f}, {record['timing']['seconds']:.0f} s"
