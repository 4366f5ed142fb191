"""Interleaved timing: every variant once a round, so that a slow minute of a shared machine is slow for all of them alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

WARM = 2  # rounds that are not counted: the first compiles, the second warms the memory


@dataclass(frozen=True)
class Timing:
    """seconds: the median.  ratio: the median of the ratios to the baseline of the same round.  spread: half their interquartile range."""

    seconds: float
    ratio: float
    spread: float


def interleaved(functions: Mapping[str, Callable[[], Any]], rounds: int, progress: Callable[[str], None]) -> dict[str, Timing]:
    """Time each function once a round, in their order; the first is the baseline.

    >>> found = interleaved({"short": lambda: time.sleep(0.001), "long": lambda: time.sleep(0.01)}, 3, lambda line: None)
    >>> found["short"].ratio, found["long"].ratio > 2
    (1.0, True)
    """
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for round in range(-WARM, rounds):
        progress(f"round {round + 1} of {rounds}" if round >= 0 else "warming up")
        for name, run in functions.items():
            started = time.perf_counter()
            run()
            if round >= 0:
                seconds[name].append(time.perf_counter() - started)
    baseline = next(iter(seconds.values()))
    return {name: _timing(times, baseline) for name, times in seconds.items()}


def _timing(times: list[float], baseline: list[float]) -> Timing:
    ratios = [a / b for a, b in zip(times, baseline, strict=True)]
    low, _, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else (ratios[0],) * 3
    return Timing(statistics.median(times), statistics.median(ratios), (high - low) / 2)
