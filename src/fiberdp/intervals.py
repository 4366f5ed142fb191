"""Means of a few runs, with what they can say: sample standard deviations and Student-t intervals (paper, appendix F.8)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, stdev
from typing import Any

CONFIDENCE = 0.95


def summary(values: Sequence[float]) -> dict[str, Any]:
    """n, mean, std (sample, n - 1) and ci95 of the mean, [mean - h, mean + h] with h = t_{0.975, n-1} std / sqrt(n).

    The interval holds for values that are drawn independently and nearly normal; one value has neither std nor interval (None).

    >>> found = summary([1.0, 2.0, 3.0])
    >>> found["mean"], found["std"], [round(end, 4) for end in found["ci95"]]
    (2.0, 1.0, [-0.4841, 4.4841])
    """
    n, mean = len(values), fmean(values)
    if n == 1:
        return {"n": 1, "mean": mean, "std": None, "ci95": None}
    from scipy.stats import t

    std = stdev(values)
    half = float(t.ppf((1 + CONFIDENCE) / 2, n - 1)) * std / math.sqrt(n)
    return {"n": n, "mean": mean, "std": std, "ci95": [mean - half, mean + half]}


def paired(values: Sequence[float], others: Sequence[float]) -> dict[str, Any]:
    """The summary of values[i] - others[i], two runs with the same seed: what they share (initial weights, batches) cancels.

    >>> paired([0.91, 0.93, 0.92], [0.90, 0.92, 0.91])["mean"].__round__(6)
    0.01
    """
    return summary([value - other for value, other in zip(values, others, strict=True)])


def percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.2f}"


def percents(ci95: Sequence[float] | None) -> str:
    """An interval of shares, in percent; empty without one."""
    return "" if ci95 is None else f"[{percent(ci95[0])}, {percent(ci95[1])}]"
