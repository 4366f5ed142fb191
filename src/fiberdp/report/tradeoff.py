"""The limit of every test as a curve: what epsilon and delta mean, drawn."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from fiberdp.report.document import Figure, Key, Table, number
from fiberdp.report.svg import CARD, DASHES, MARKERS, MUTED, SERIES, dashes, drawn


def detection(epsilon: float, delta: float, false_positives: float) -> float:
    """The largest rate at which a test of this false-positive rate finds that an example was there.

        TPR <= min(e^epsilon FPR + delta,  1 - e^-epsilon (1 - delta - FPR)),        at most 1

    (Wasserman and Zhou 2010; Kairouz, Oh and Viswanath 2015).  Holds for every test, whatever else it knows.

    >>> round(detection(1.0, 0.0, 0.05), 4), round(detection(0.0, 0.0, 0.05), 4)
    (0.1359, 0.05)
    """
    growing = math.exp(min(epsilon, 700.0)) * false_positives + delta
    return min(1.0, growing, 1 - math.exp(-epsilon) * (1 - delta - false_positives))


def tradeoff(stated: Sequence[tuple[float, float]]) -> Figure:
    """stated: (epsilon, delta), of which at most four are drawn, the smallest and the largest among them."""
    shown = sorted(stated)
    shown = [shown[i] for i in sorted({round(k * (len(shown) - 1) / 3) for k in range(4)})]
    rates = [i / 400 for i in range(101)]
    looks = [Key(f"limit at ε = {epsilon:.3g}", i, DASHES[i], MARKERS[i]) for i, (epsilon, _) in enumerate(shown)]

    def draw(axes: Any) -> None:
        axes.plot([0, 25], [0, 25], color=MUTED, linewidth=1.0, linestyle=dashes("2 2"))
        for key, (epsilon, delta) in zip(looks, shown):
            reached = [100 * detection(epsilon, delta, rate) for rate in rates]
            axes.plot(
                [100 * rate for rate in rates], reached, color=SERIES[key.colour], linestyle=dashes(key.dash), marker=key.marker,
                markevery=[4, 20, 40, 60, 80, 100], markersize=5.5, markeredgecolor=CARD, markeredgewidth=0.6,
            )  # fmt: skip
        axes.set_xlim(0, 25.5)
        axes.set_ylim(0, 102)
        axes.set_xlabel("false alarms accepted, %")
        axes.set_title("people found, %", loc="left", color=MUTED)

    rows = [
        (number(epsilon), number(delta, ".3g"), number(100 * rate, "g"), number(100 * detection(epsilon, delta, rate), ".3g"))
        for epsilon, delta in shown
        for rate in (0.001, 0.01, 0.05, 0.1, 0.25)
    ]
    data = Table("What a test can reach", ("ε", "δ", "false alarms, %", "found at most, %"), [tuple(row) for row in rows])
    told = "; ".join(f"at ε = {e:.3g}, {100 * detection(e, d, 0.05):.3g} %" for e, d in shown)
    legend = (*looks, Key("a blind guess", -2, "2 2", ""))
    return Figure(
        "What a test can reach",
        "No test lies above its line.",
        f"Most that a test of 5 % false alarms finds: {told}.",
        drawn(draw, "test"),
        legend,
        data,
    )
