"""Ours beside the paper's: the difference of our mean from the published figure, with the interval that our runs give it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fiberdp.intervals import summary
from fiberdp.recipes import RECIPES
from fiberdp.report.document import Block, Cell, Figure, Key, Section, Table, Text, number, span
from fiberdp.report.figures import Dot, dots
from fiberdp.report.reading import Found, Group

WHAT = (
    "Published figures are context, not a pass mark: data splits, seeds and settings differ, and ours stand at noise that each run proved. "
    "The interval is Student's t at 95 % over our runs and takes the published figure as exact; one run has no interval."
)


def difference(ours: Sequence[float], theirs: float) -> dict[str, Any]:
    """Our mean minus theirs and its ci95, all in one unit.

    >>> found = difference([95.0, 97.0], 93.0)
    >>> found["mean"], [round(end, 2) for end in found["ci95"]]
    (3.0, [-9.71, 15.71])
    >>> difference([95.0], 93.0)["ci95"] is None
    True
    """
    return summary([value - theirs for value in ours])


def ours(group: Group, metric: str) -> list[float]:
    """Our figures in the unit of the published one: per cent of the metric that runs are compared by, else what `details` has."""
    if metric == group.metric:
        return [100 * value for value in group.results("test")]
    details = [run.record["result"].get("details") for run in group.runs]
    found = [each.get(metric) for each in details if isinstance(each, dict)]
    return [float(value) for value in found if isinstance(value, (int, float))]


def published(group: Group) -> list[Any]:
    """What the recipe knows to be published for this method at this epsilon: values with method, epsilon, value, place, std."""
    make = RECIPES.get(group.recipe)
    known = getattr(make(), "published", ()) if make else ()
    return [p for p in known if p.method == group.method and abs(p.epsilon - group.epsilon) <= 5e-3 * p.epsilon]


def beside(found: Found, keyed: dict[str, Key]) -> list[Section]:
    rows, shown = [], []
    several = len(found.recipes) > 1
    for group in found.groups:
        for p in published(group):
            metric = getattr(p, "metric", group.metric)
            values = ours(group, metric)
            if not values:
                continue
            d, s = difference(values, p.value), summary(values)
            rows.append(
                (
                    Cell(group.recipe), Cell(group.label), number(group.epsilon, "g"), Cell(metric.replace("_", " ")), number(s["n"], "d"),
                    number(s["mean"], ".2f"), number(s["std"], ".2f"), Cell(_published(p), p.value), number(d["mean"], "+.2f"),
                    span(d["ci95"], 1.0) if d["ci95"] else Cell("one run: none"), Cell(p.place),
                )
            )  # fmt: skip
            if metric == group.metric:
                label = f"{group.recipe}, {group.label}, ε = {group.epsilon:g}" if several else f"{group.label}, ε = {group.epsilon:g}"
                shown.append(Dot(label, keyed[group.label].colour, s["mean"], s["ci95"], (), p.value))
    if not rows:
        return _places(found)
    columns = ("recipe", "method", "ε", "metric", "runs", "ours", "std", "published", "difference", "95 % interval", "place")
    table = Table("Ours beside the paper's", columns, rows, "Shares in per cent. Difference: ours minus the published figure.")
    legend = (Key("ours, mean and 95 % interval", 0, "", "o"), Key("published", -1, "none", "D"))
    blocks: list[Block] = [Text(WHAT), table]
    if len(shown) > 1:
        blocks.insert(1, _figure(shown, legend))
    return [Section("paper", "Beside the paper", tuple(blocks))]


def _figure(shown: list[Dot], legend: tuple[Key, ...]) -> Figure:
    return dots("paper", "Ours and the published figure", "Line: 95 % interval of our mean.", "test, %", shown[:40], None, legend)


def _published(p: Any) -> str:
    return f"{p.value:.2f}" if p.std is None else f"{p.value:.2f} ± {p.std:.2f}"


def _places(found: Found) -> list[Section]:
    """Where the paper's figures stand, if their values are not known here."""
    known = {recipe: RECIPES[recipe]().paper for recipe in found.recipes if recipe in RECIPES}
    told = "; ".join(f"{recipe}, {place}" for recipe, place in known.items() if place not in ("", "-", "none"))
    if not told:
        return []
    text = f"No figure is known here for exactly these methods at these ε. Where the paper's figures for the task stand: {told}."
    return [Section("paper", "Beside the paper", (Text(text),))]
