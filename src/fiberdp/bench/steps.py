"""The rows of one model: its variants timed together, as many at a time as memory holds."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from fiberdp.bench.clock import Timing, interleaved
from fiberdp.bench.models import Model
from fiberdp.bench.variants import BASELINE, VARIANTS, Ready, Unavailable

HELD = 8  # vectors of d floats that a variant keeps between steps, about: theta, its gradient, two moments, d, filter and scratch
BUDGET = 2**31  # floats


def step_rows(
    model: Model, variants: Sequence[str], *, rounds: int, batch_size: int | None = None, progress: Callable[[str], None]
) -> list[dict[str, Any]]:
    """One row a variant, the baseline first, whether it was asked for or not: all ratios are to it.

    Where all variants do not fit in memory together they are timed in groups, each interleaved with a baseline of its own.
    """
    size = model.batch_size if batch_size is None else batch_size
    others = [name for name in variants if name != BASELINE]
    together = max(1, BUDGET // (HELD * sum(p.numel() for p in model.new().parameters())))
    groups = max(1, -(-len(others) // together))
    plain: list[Timing] = []
    rows: dict[str, dict[str, Any]] = {}
    for group in range(groups):
        ready = {BASELINE: VARIANTS[BASELINE](model, size)}
        for name in others[group::groups]:  # strided, so that neighbours in the table meet different minutes of the machine
            progress(f"{model.name}: {name}")
            try:
                ready[name] = VARIANTS[name](model, size)
            except Unavailable as reason:
                rows[name] = row(model.name, name, size, skipped=str(reason))
        timings = interleaved(_functions(ready), rounds, lambda line: progress(f"{model.name}: {line}"))
        plain.append(timings[BASELINE])
        for name in ready:
            if name != BASELINE:
                rows[name] = row(model.name, name, size, timings[name], timings.get(f"{name} kernel"))
        del ready, timings
        gc.collect()  # Opacus's hooks and its modules hold each other
    seconds = statistics.median(timing.seconds for timing in plain)
    return [row(model.name, BASELINE, size, Timing(seconds, 1.0, 0.0)), *(rows[name] for name in others)]


def _functions(ready: dict[str, Ready]) -> dict[str, Callable[[], Any]]:
    found: dict[str, Callable[[], Any]] = {}
    for name, variant in ready.items():
        found[name] = variant.step
        if variant.kernel is not None:
            found[f"{name} kernel"] = variant.kernel
    return found


def row(
    model: str, variant: str, batch_size: int | None, timing: Timing | None = None, kernel: Timing | None = None, skipped: str | None = None
) -> dict[str, Any]:
    """One row of the JSON contract; what was not measured is None, and `skipped` says why."""
    return {
        "model": model,
        "variant": variant,
        "batch_size": batch_size,
        "seconds": timing and timing.seconds,
        "ratio": timing and timing.ratio,
        "spread": timing and timing.spread,
        "peak_mib": None,
        "kernel_seconds": kernel and kernel.seconds,
        "kernel_ratio": kernel and kernel.ratio,
        "skipped": skipped,
    }
