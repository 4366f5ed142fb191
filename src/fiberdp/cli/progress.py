"""How a run is shown: a bar on a terminal, plain lines otherwise; on stderr, so that stdout stays for results."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from fiberdp.run_directory import Reporter, Silent


@contextmanager
def progress(*, quiet: bool) -> Iterator[Reporter]:
    """The reporter that fits where stderr goes."""
    if sys.stderr.isatty():
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
