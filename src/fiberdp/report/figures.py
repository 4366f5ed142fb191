"""The figures of runs: learning curves, results with intervals, noise gain, clamp mass.  One panel a recipe and epsilon; a method keeps its
colour, dash and marker through the whole report."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from statistics import fmean
from typing import Any

from fiberdp.intervals import summary
from fiberdp.report.document import Cell, Figure, Key, Table, number, share, span
from fiberdp.report.gain import noise_gain
from fiberdp.report.reading import Found, Group, Run
from fiberdp.report.svg import CARD, DASHES, INK, MARKERS, MUTED, SERIES, dashes, drawn, few

PANELS = 24
"""Panels of one kind in a page; what is beyond stands in the tables."""


def keys(found: Found) -> dict[str, Key]:
    """How each label is drawn: neighbours differ in colour, dash and marker, so that none alone has to be seen."""
    labels = list(dict.fromkeys(group.label for group in found.groups))
    return {
        label: Key(label, i % len(SERIES), DASHES[(i + i // len(SERIES)) % len(DASHES)], MARKERS[(i + i // len(SERIES)) % len(MARKERS)])
        for i, label in enumerate(labels)
    }


@dataclass(frozen=True)
class Line:
    """One group's mean over runs, and the smallest and largest of them, at x."""

    key: Key
    x: list[float]
    mean: list[float]
    low: list[float]
    high: list[float]
    runs: int


def panels(found: Found) -> list[tuple[str, list[Group]]]:
    """("mnist-cnn, ε = 1", its groups) in order; the recipe is left out where there is one only."""
    several = len(found.recipes) > 1
    kept = []
    for (recipe, epsilon), groups in groupby(found.groups, key=lambda group: (group.recipe, group.epsilon)):
        kept.append((f"{recipe}, ε = {epsilon:g}" if several else f"ε = {epsilon:g}", list(groups)))
    return kept[:PANELS]


def learning_curves(found: Found, keyed: dict[str, Key]) -> list[Figure]:
    figures = []
    for i, (title, groups) in enumerate(panels(found)):
        metric = groups[0].metric
        lines = _lines(groups, keyed, lambda line, m=metric: _number(line.get("heldout"), m))
        if any(len(line.x) > 1 for line in lines):
            named = metric.replace("_", " ")
            figures.append(_curves(f"curve{i}", f"Held-out {named}, {title}", f"{named}, %", lines, scale=100.0))
    return figures


def spent(found: Found, keyed: dict[str, Key]) -> list[Figure]:
    """epsilon so far; what is spent alike, to 0.01, is one line."""
    named: dict[tuple[Any, ...], list[str]] = {}
    for group in found.groups:
        (line,) = _lines([group], {group.label: Key("", 0)}, _spent)
        name = f"{group.recipe}, ε = {group.epsilon:g}" if len(found.recipes) > 1 else f"ε = {group.epsilon:g}"
        curve = tuple(line.x), tuple(round(e, 2) for e in line.mean)
        if curve not in named and any(name in names for names in named.values()):
            name = f"{name} ({group.label})"  # charged otherwise than the first method of this recipe and epsilon
        same = named.setdefault(curve, [])
        same += [] if name in same else [name]
    lines = [
        Line(Key("; ".join(names), i, DASHES[i % len(DASHES)], MARKERS[i % len(MARKERS)]), list(x), list(mean), list(mean), list(mean), 1)
        for i, ((x, mean), names) in enumerate(list(named.items())[: len(SERIES)])
    ]
    if not any(len(line.x) > 1 for line in lines):
        return []
    figure = _curves("spent", "Privacy spent so far", "ε", lines, scale=1.0, zero=True)
    told = "What the steps so far cost, from the ledger. Stopping early would have cost this much and no more."
    return [replace(figure, caption=told)]


def clamp_mass(found: Found, keyed: dict[str, Key]) -> list[Figure]:
    figures = []
    for i, (title, groups) in enumerate(panels(found)):
        lines = [line for line in _lines(groups, keyed, lambda line: _number(line, "clamp_mass")) if line.x]
        if any(len(line.x) > 1 for line in lines):
            figure = _curves(f"clamp{i}", f"Clamp mass, {title}", "share of the first moment, %", lines, scale=100.0, limits=(-3, 103))
            figures.append(figure)
    return figures


def _spent(line: dict[str, Any]) -> float | None:
    return _number(line, "epsilon")


def _number(values: Any, name: str) -> float | None:
    value = values.get(name) if isinstance(values, dict) else None
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None


def _lines(groups: Sequence[Group], keyed: dict[str, Key], of: Callable[[dict[str, Any]], float | None]) -> list[Line]:
    lines = []
    for group in groups:
        at: dict[float, list[float]] = {}
        for run in group.runs:
            for line in run.metrics:
                value, x = of(line), _number(line, "epoch")
                if value is not None and x is not None:
                    at.setdefault(x, []).append(value)
        x = sorted(at)
        lines.append(
            Line(keyed[group.label], x, [fmean(at[e]) for e in x], [min(at[e]) for e in x], [max(at[e]) for e in x], len(group.runs))
        )
    return lines


def _curves(
    key: str, title: str, unit: str, lines: list[Line], *, scale: float, zero: bool = False, limits: tuple[float, float] | None = None
) -> Figure:
    lines = [line for line in lines if line.x]

    def draw(axes: Any) -> None:
        for line in lines:
            colour = SERIES[line.key.colour]
            mean, low, high = ([scale * value for value in values] for values in (line.mean, line.low, line.high))
            if line.runs > 1:
                axes.fill_between(line.x, low, high, color=colour, alpha=0.14, linewidth=0)
            axes.plot(
                line.x, mean, color=colour, linestyle=dashes(line.key.dash), marker=line.key.marker, markersize=5.5,
                markevery=list(few(len(line.x))), markeredgecolor=CARD, markeredgewidth=0.6,
            )  # fmt: skip
        axes.set_xlabel("epoch")
        axes.set_title(unit, loc="left", color=MUTED)
        axes.margins(x=0.02)
        if zero:
            axes.set_ylim(bottom=0)
        if limits:
            axes.set_ylim(*limits)

    rows = [
        (Cell(line.key.label), number(x), number(scale * mean), number(scale * low), number(scale * high), number(line.runs, "d"))
        for line in lines
        for x, mean, low, high in _thinned(line)
    ]
    several = any(line.runs > 1 for line in lines)
    caption = "Mean over runs; the band is from the smallest to the largest." if several else "One run each."
    alt = f"{title}. At the end: " + "; ".join(f"{line.key.label} {scale * line.mean[-1]:.4g}" for line in lines[:12]) + f" ({unit})."
    data = Table(title, ("method", "epoch", "mean", "smallest", "largest", "runs"), rows)
    return Figure(title, caption, alt, drawn(draw, key), tuple(line.key for line in lines), data)


def _thinned(line: Line) -> list[tuple[float, float, float, float]]:
    """About 24 points, the last among them."""
    points = list(zip(line.x, line.mean, line.low, line.high))
    return [points[i] for i in sorted({*few(len(points), 24), len(points) - 1})]


def gains(found: Found, keyed: dict[str, Key]) -> list[Figure]:
    """A_t over the steps, one line for all methods with the same filter, and what it settles to."""
    curves: dict[tuple[tuple[float, ...], float], list[str]] = {}
    first: dict[str, Run] = {}
    for group in found.groups:
        first.setdefault(group.label, group.runs[0])
    for label, run in first.items():
        gain = noise_gain(run)
        if gain is not None:
            curves.setdefault(gain, []).append(label)
    curves = _longest(curves)
    if not curves:
        return []
    shown = [(Key(", ".join(labels), *_look(keyed[labels[0]])), A_t, A) for (A_t, A), labels in curves.items()]

    def draw(axes: Any) -> None:
        for key, A_t, A in shown:
            steps = list(range(1, len(A_t) + 1))
            axes.axhline(A, color=SERIES[key.colour], linewidth=0.8, alpha=0.6)
            places = sorted({round(len(A_t) ** (k / 8)) - 1 for k in range(9)})
            axes.plot(
                steps, A_t, color=SERIES[key.colour], linestyle=dashes(key.dash), marker=key.marker, markersize=5.5, markevery=places,
                markeredgecolor=CARD, markeredgewidth=0.6,
            )  # fmt: skip
        axes.set_xscale("log")
        ticks = [t for t in (1, 2, 5, 10, 20, 50, 100, 200, 500) if t <= max(len(A_t) for _, A_t, _ in shown)]
        axes.set_xticks(ticks, [str(t) for t in ticks])
        axes.set_xlabel("step")
        axes.set_title("A", loc="left", color=MUTED)
        axes.set_ylim(0, 1.08 * max(max(*A_t, A) for _, A_t, A in shown))

    places = (0, 1, 2, 4, 9, 19, 49, 99, 199, 499)
    rows = [
        (Cell(key.label), number(t + 1, "d"), number(A_t[t], ".6f"), number(A, ".6f"))
        for key, A_t, A in shown
        for t in places
        if t < len(A_t)
    ]
    alt = "Noise gain over steps. It settles at: " + "; ".join(f"{key.label} {A:.4f}" for key, _, A in shown) + "."
    caption = "The thin line is what a curve settles to."
    data = Table("Noise gain", ("method", "step", "A at this step", "settles to"), rows)
    return [Figure("Noise gain of filter and mechanism", caption, alt, drawn(draw, "gain"), tuple(key for key, _, _ in shown), data)]


def _longest(curves: dict[tuple[tuple[float, ...], float], list[str]]) -> dict[tuple[tuple[float, ...], float], list[str]]:
    """Curves that are the beginning of another are the same filter, run for fewer steps: one of them is enough."""
    kept: dict[tuple[tuple[float, ...], float], list[str]] = {}
    for (A_t, A), labels in sorted(curves.items(), key=lambda item: -len(item[0][0])):
        same = next((longer for longer in kept if longer[1] == A and longer[0][: len(A_t)] == A_t), None)
        kept.setdefault(same or (A_t, A), []).extend(labels)
    return dict(list(kept.items())[: len(SERIES) * 2])


def _look(key: Key) -> tuple[int, str, str]:
    return key.colour, key.dash, key.marker


@dataclass(frozen=True)
class Dot:
    """A mean with its interval, and what else is marked beside it, in the unit of the axis."""

    label: str
    colour: int
    mean: float
    ends: tuple[float, float] | None
    single: tuple[float, ...] = ()
    paper: float | None = None


def dots(key: str, title: str, caption: str, unit: str, rows: list[Dot], data: Table | None, legend: tuple[Key, ...] = ()) -> Figure:
    """Labels down the side, a dot and its interval each: reads alike with three rows and with thirty."""

    def draw(axes: Any) -> None:
        for y, row in enumerate(rows):
            colour = SERIES[row.colour]
            if row.ends:
                axes.plot(row.ends, [y, y], color=colour, linewidth=2.2, solid_capstyle="butt")
            axes.plot(row.single, [y] * len(row.single), linestyle="", marker="|", markersize=8, color=MUTED, markeredgewidth=1.0)
            axes.plot([row.mean], [y], marker="o", markersize=6, color=colour, markeredgecolor=CARD, markeredgewidth=0.8)
            if row.paper is not None:
                axes.plot(
                    [row.paper],
                    [y],
                    marker="D",
                    markersize=6,
                    markerfacecolor="none",
                    markeredgecolor=INK,
                    markeredgewidth=1.2,
                    linestyle="",
                )
        axes.set_yticks(range(len(rows)), [plain(row.label) for row in rows], color=INK)
        axes.set_ylim(len(rows) - 0.4, -0.6)
        axes.set_xlabel(unit)
        axes.grid(axis="x")
        axes.grid(visible=False, axis="y")
        axes.margins(x=0.06)

    alt = f"{title}. " + "; ".join(f"{row.label} {row.mean:.4g}" for row in rows[:15]) + f" ({unit})."
    return Figure(title, caption, alt, drawn(draw, key, height=0.75 + 0.27 * max(len(rows), 2)), legend, data)


def results(found: Found, keyed: dict[str, Key]) -> list[Figure]:
    """Test results of a recipe with 95 % intervals, wherever there are two groups to compare."""
    figures = []
    for i, (title, groups) in enumerate(panels(found)):
        rows, lines = [], []
        for group in groups:
            values = group.results("test")
            if values:
                s = summary(values)
                ends = None if s["ci95"] is None else (100 * s["ci95"][0], 100 * s["ci95"][1])
                rows.append(
                    Dot(group.label, keyed[group.label].colour, 100 * s["mean"], ends, tuple(100 * v for v in values if len(values) > 1))
                )
                lines.append((Cell(group.label), number(s["n"], "d"), share(s["mean"]), share(s["std"]), span(s["ci95"])))
        if len(rows) > 1:
            named = groups[0].metric.replace("_", " ")
            intervals = any(row.ends for row in rows)
            caption = "Dot: mean; line: 95 % interval (Student's t); ticks: single runs." if intervals else "One run each: no interval."
            data = Table(f"Test {named}, {title}", ("method", "runs", "mean, %", "std", "95 % interval"), lines)
            figures.append(dots(f"result{i}", f"Test {named}, {title}", caption, f"{named}, %", rows, data))
    return figures


def cost(found: Found, keyed: dict[str, Key]) -> list[Figure]:
    """Seconds of a run, wherever there are two groups to compare."""
    figures = []
    for i, (title, groups) in enumerate(panels(found)):
        rows, lines = [], []
        for group in groups:
            seconds = [s for run in group.runs if (s := run.record["timing"]["seconds"]) is not None]
            if seconds:
                rows.append(Dot(group.label, keyed[group.label].colour, fmean(seconds), None, tuple(seconds if len(seconds) > 1 else ())))
                lines.append((Cell(group.label), number(fmean(seconds), ".1f"), number(min(seconds), ".1f"), number(max(seconds), ".1f")))
        if len(rows) > 1:
            data = Table(f"Seconds of a run, {title}", ("method", "mean, s", "smallest", "largest"), lines)
            caption = "Training alone, without evaluation. Dot: mean; ticks: single runs."
            figures.append(dots(f"cost{i}", f"Time, {title}", caption, "seconds", rows, data))
    return figures


def plain(label: str) -> str:
    """A label that matplotlib draws as it is, and has room for: a dollar sign would begin a formula.

    >>> plain("a$"), plain("a label of more than thirty-two letters")
    ('a\\\\$', 'a label of more than thirty-two…')
    """
    return re.sub(r"\$", r"\\$", label if len(label) <= 32 else f"{label[:31]}…")
