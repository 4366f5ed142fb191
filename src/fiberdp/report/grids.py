"""Searches and ablations: a heat map where two options were varied, a chart with intervals where one was, beside the paper's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from fiberdp.intervals import summary
from fiberdp.methods import METHODS
from fiberdp.report.document import Block, Cell, Figure, Key, Notice, Section, Table, Text, number, share, span, without_empty
from fiberdp.report.figures import Dot, dots, plain
from fiberdp.report.reading import Found, Json
from fiberdp.report.svg import CARD, MUTED, ON, RAMP, SERIES, drawn

GREEK = {"kappa": "κ", "gamma": "γ", "omega": "ω", "eps_v": "ε_v", "lr": "learning rate", "beta": "β", "alpha": "α"}


def searches(found: Found) -> list[Section]:
    if not found.sweeps:
        return []
    blocks: list[Block] = []
    for i, (name, sweep) in enumerate(found.sweeps):
        blocks += _search(f"sweep{i}", name, sweep)
    return [Section("searches", "Tuning", tuple(blocks))]


def ablations(found: Found) -> list[Section]:
    if not found.ablations:
        return []
    blocks: list[Block] = []
    for i, (_, ablation) in enumerate(found.ablations):
        blocks += _ablation(f"ablation{i}", ablation)
    return [Section("ablations", "Ablations", tuple(blocks))]


def _search(key: str, name: str, sweep: Json) -> list[Block]:
    trials = [trial | {"tried": _with_defaults(sweep["method"], trial["options"])} for trial in sweep["trials"]]
    title = f"{sweep['recipe']}: {sweep['method']} at ε = {sweep['epsilon']:g}"
    best = sweep["best"]["options"]
    blocks: list[Block] = [Text(f"**{title}**, {len(trials)} trials ({name}). Best on held-out rows: {_options(best)}.")]
    mapped: set[str] = set()
    for axes in (("kappa", "gamma"), ("kappa", "omega"), ("lr", "bands")):
        cells = _best_of(trials, axes)
        if len({x for x, _ in cells}) > 1 and len({y for _, y in cells}) > 1:
            mapped |= {*axes}
            told = f"Best held-out result of the trials in each cell, %. {title}; empty: not tried."
            blocks.append(heat_map(f"{key}{axes[1]}", f"{_name(axes[0])} and {_name(axes[1])}, {title}", told, axes, cells))
    for option in ("lr", "omega", "kappa", "gamma", "bands", "eps_v"):
        figure = None if option in mapped else _along(f"{key}{option}", title, option, trials)
        blocks += [figure] if figure else []
    rows = [
        (
            number(t.get("number", i), "d"), Cell(str(t.get("stage", "–"))), Cell(_options(t["options"])), share(t["heldout"]),
            number(t.get("std_ratio"), ".4f"), number(t.get("seconds"), ".0f"),
        )
        for i, t in enumerate(sorted(trials, key=lambda t: -t["heldout"]))
    ]  # fmt: skip
    blocks.append(
        Table(
            f"Trials, {title}", ("trial", "stage", "options", "held-out, %", "noise / charged", "seconds"), rows, str(sweep.get("note", ""))
        )
    )
    return blocks


def _with_defaults(method: str, options: Json) -> Json:
    """A trial's options, and those of observation and filter that it left as the method has them."""
    known = METHODS.get(method)
    parts = () if known is None else (known.filter, known.observation)
    return {f.name: getattr(part, f.name) for part in parts for f in fields(part) if f.name in ("kappa", "gamma", "omega")} | options


def _best_of(trials: Sequence[Json], axes: Sequence[str]) -> dict[tuple[Any, Any], float]:
    cells: dict[tuple[Any, Any], float] = {}
    for trial in trials:
        if all(_is_number(trial["tried"].get(axis)) for axis in axes):
            at = (trial["tried"][axes[0]], trial["tried"][axes[1]])
            cells[at] = max(cells.get(at, 0.0), trial["heldout"])
    return cells


def _along(key: str, title: str, option: str, trials: Sequence[Json]) -> Figure | None:
    """Held-out result of each trial along one option that took three values or more."""
    points = sorted((t["tried"][option], 100 * t["heldout"]) for t in trials if _is_number(t["tried"].get(option)))
    if len({x for x, _ in points}) < 3:
        return None

    def draw(axes: Any) -> None:
        axes.plot(*zip(*points), linestyle="", marker="o", markersize=6, color=SERIES[0], alpha=0.75, markeredgecolor=CARD)
        if option == "lr":
            axes.set_xscale("log")
            axes.minorticks_off()
            axes.set_xticks(*_ticks(points[0][0], points[-1][0]))
        axes.set_xlabel(_name(option))
        axes.set_title("held-out, %", loc="left", color=MUTED)

    data = Table(f"Trials along {_name(option)}", (_name(option), "held-out, %"), [(number(x), number(y, ".2f")) for x, y in points])
    best = max(points, key=lambda point: point[1])
    alt = f"Held-out result along {_name(option)}: best {best[1]:.2f} % at {best[0]:.4g}."
    return Figure(f"Along {_name(option)}, {title}", "One dot a trial.", alt, drawn(draw, key), (), data)


def _ticks(low: float, high: float) -> tuple[list[float], list[str]]:
    """1, 2, 5, 10, … between these ends, or the powers of ten if those are many; matplotlib's own labels lie on each other."""
    every = [float(f"{step}e{k}") for k in range(-9, 3) for step in (1, 2, 5)]
    inside = [tick for tick in every if 0.999 * low <= tick <= 1.001 * high]
    shown = inside if len(inside) <= 6 else [tick for tick in inside if f"{tick:e}".startswith("1.")]
    return shown, [f"{tick:g}" for tick in shown]


def _ablation(key: str, found: Json) -> list[Block]:
    axes, cells = [str(axis) for axis in found["axes"]], found["cells"]
    epsilon = f" at ε = {found['epsilon']:g}" if _is_number(found.get("epsilon")) else ""
    title = f"{found['recipe']}: {found['name'].replace('_', ' ')}{epsilon}"
    paper = {_at(axes, p): float(p["value"]) for p in found.get("paper") or [] if _is_number(p.get("value"))}
    blocks: list[Block] = []
    if found.get("note"):
        blocks.append(Text(f"**{title}.** {found['note']}"))
    if len(axes) == 2 and all(_is_number(at) for cell in cells for at in _at(axes, cell)):
        ours = {_at(axes, cell): cell["mean"] for cell in cells}
        several = max(cell["n"] for cell in cells)
        told = f"Test result, %, mean of {several} runs a cell." if several > 1 else "Test result, %, one run a cell."
        blocks.append(heat_map(key, title, told, (axes[0], axes[1]), {(x, y): mean for (x, y), mean in ours.items()}))
        if len(paper) > 1:
            theirs = {(x, y): value / 100 for (x, y), value in paper.items()}
            told = f"The figures published for these cells, %: {_places(found)}. Context, not a pass mark."
            blocks.append(heat_map(f"{key}paper", f"{title}, as published", told, (axes[0], axes[1]), theirs))
    else:
        rows = [
            Dot(
                ", ".join(_value(at) for at in _at(axes, cell)), 0, 100 * cell["mean"], _ends(cell),
                tuple(100 * a for a in cell.get("accuracies") or () if cell["n"] > 1), paper.get(_at(axes, cell)),
            )
            for cell in cells
        ]  # fmt: skip
        legend = (Key("ours, mean and 95 % interval", 0, "", "o"), *((Key("published", -1, "none", "D"),) if paper else ()))
        named = " and ".join(_name(axis) for axis in axes)
        told = "Dot: mean; line: 95 % interval where there are several runs; ticks: single runs."
        blocks.append(dots(key, f"{title}, by {named}", told, "test, %", rows, None, legend))
    blocks.append(_cells(title, axes, cells, paper, found))
    if not any(cell["n"] > 1 for cell in cells):
        blocks.append(Notice("warning", "One run a cell", "Differences between cells may be chance: there is no interval."))
    return blocks


def _cells(title: str, axes: list[str], cells: list[Json], paper: dict[Any, float], found: Json) -> Table:
    rows = []
    for cell in cells:
        theirs, at = paper.get(_at(axes, cell)), _at(axes, cell)
        minus = _minus(cell, theirs)
        rows.append(
            (
                *(Cell(_value(x), float(x) if _is_number(x) else None) for x in at), number(cell["n"], "d"), share(cell["mean"]),
                share(cell.get("std")), span(cell.get("ci95")), number(theirs, ".2f"), *minus,
            )
        )  # fmt: skip
    columns = (*(_name(axis) for axis in axes), "runs", "test, %", "std", "95 % interval", "paper, %", "ours − paper", "its interval")
    rows, columns = without_empty(rows, columns)
    return Table(f"Cells, {title}", columns, rows, f"Published: {_places(found)}." if paper else "")


def _minus(cell: Json, theirs: float | None) -> tuple[Cell, Cell]:
    if theirs is None:
        return Cell("–"), Cell("–")
    values = cell.get("accuracies") or [cell["mean"]]
    s = summary([100 * float(value) - theirs for value in values])
    return number(s["mean"], "+.2f"), span(s["ci95"], 1.0)


def _places(found: Json) -> str:
    return ", ".join(dict.fromkeys(str(p.get("place", "the paper")) for p in found.get("paper") or [])) or "nothing"


def _at(axes: Sequence[str], cell: Json) -> tuple[Any, ...]:
    """Where a cell stands: its method is an option like the others."""
    options = cell.get("options") if isinstance(cell.get("options"), dict) else {}
    return tuple((options or {}).get(axis, cell.get(axis)) for axis in axes)


def _ends(cell: Json) -> tuple[float, float] | None:
    return (100 * cell["ci95"][0], 100 * cell["ci95"][1]) if cell.get("ci95") else None


def heat_map(key: str, title: str, caption: str, axes: tuple[str, str], cells: dict[tuple[Any, Any], float]) -> Figure:
    """Shares over two options; each cell says its number, so that nothing hangs on telling shades apart."""
    columns, rows = sorted({x for x, _ in cells}), sorted({y for _, y in cells})
    low, high = min(cells.values()), max(cells.values())

    def draw(axes_: Any) -> None:
        from matplotlib.patches import Rectangle

        for (x, y), value in cells.items():
            step = round((len(RAMP) - 1) * ((value - low) / (high - low) if high > low else 0.5))
            i, j = columns.index(x), rows.index(y)
            axes_.add_patch(Rectangle((i - 0.47, j - 0.47), 0.94, 0.94, facecolor=RAMP[step], linewidth=0))
            axes_.text(i, j, f"{100 * value:.1f}", ha="center", va="center", color=ON[step])
        for i in range(len(columns)):
            for j in range(len(rows)):
                if (columns[i], rows[j]) not in cells:
                    axes_.text(i, j, "–", ha="center", va="center", color=MUTED)
        axes_.set_xlim(-0.5, len(columns) - 0.5)
        axes_.set_ylim(-0.5, len(rows) - 0.5)
        axes_.set_xticks(range(len(columns)), [plain(_value(x)) for x in columns])
        axes_.set_yticks(range(len(rows)), [plain(_value(y)) for y in rows])
        axes_.set_xlabel(_name(axes[0]))
        axes_.set_ylabel(_name(axes[1]))
        axes_.grid(visible=False)
        axes_.spines["bottom"].set_visible(False)

    best = max(cells, key=lambda at: cells[at])
    at = f"{_name(axes[0])} {_value(best[0])}, {_name(axes[1])} {_value(best[1])}"
    alt = f"{title}: from {100 * low:.2f} to {100 * high:.2f} %; best at {at}."
    data = Table(
        title, (_name(axes[0]), _name(axes[1]), "%"), [(number(x), number(y), share(value)) for (x, y), value in sorted(cells.items())]
    )
    return Figure(title, caption, alt, drawn(draw, key, height=1.0 + 0.42 * max(len(rows), 2)), (), data)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _name(option: str) -> str:
    return GREEK.get(option, option.replace("_", " "))


def _value(value: Any) -> str:
    return f"{value:.4g}" if _is_number(value) else str(value)


def _options(options: Json) -> str:
    return ", ".join(f"{_name(str(option))} {_value(value)}" for option, value in options.items()) or "the defaults"
