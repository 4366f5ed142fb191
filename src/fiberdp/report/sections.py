"""The report as a document: what stands in it and in which order."""

from __future__ import annotations

import json
import re
from statistics import fmean
from typing import Any

from fiberdp.intervals import summary
from fiberdp.report import figures, rerun
from fiberdp.report.beside import beside
from fiberdp.report.document import (
    Block,
    Cell,
    Code,
    Columns,
    Document,
    Facts,
    Key,
    Notice,
    Sample,
    Section,
    Table,
    Text,
    number,
    quantity,
    share,
    span,
    without_empty,
)  # fmt: skip
from fiberdp.report.grids import ablations, searches
from fiberdp.report.privacy import receipt, statement
from fiberdp.report.reading import Found, Group, Json, Run

GAIN = (
    "**Noise gain** A at a step: the variance of the filtered noise over that of white noise at the level that is charged. The second "
    "moment holds A·σ_w² of noise, which is what the correction takes away. No filter: 1. Correlated noise can be above 1, because it "
    "cancels over steps and not within one."
)
CLAMP = (
    "**Clamp mass**: the share of the first moment, Σ|m̂|, on coordinates whose corrected second moment lies on the floor ε_v. "
    "There the update is momentum with one step size; near 100 %, little of Adam's adaptivity is left."
)
SAMPLES, CONFIGS = 12, 40
"""As many generated texts a run, and configurations a page, as are shown."""


def document(found: Found) -> Document:
    """The receipt and the privacy statement first; then what came out; then how, and how again."""
    keyed = figures.keys(found)
    sections: list[Section] = []
    if found.runs:
        sections += [receipt(found), statement(found), *_results(found, keyed), *beside(found, keyed)]
        sections += _curves(found, keyed)
        sections += _noise(found, keyed)
    sections += searches(found) + ablations(found)
    if found.runs:
        sections += [_cost(found, keyed), *_texts(found)]
    sections.append(_again(found))
    if found.runs:
        sections.append(_settings(found))
    warnings = _warnings(found)
    if warnings:
        first = sections[0]
        sections[0] = Section(first.id, first.title, (*first.blocks, *warnings))
    return Document(*_titles(found), tuple(sections))


def _titles(found: Found) -> tuple[str, str]:
    if len(found.runs) == 1 and not (found.comparisons or found.sweeps or found.ablations):
        record = found.runs[0].record
        return (
            f"{record['recipe']}: {record['method']}",
            f"One private run at ε = {found.runs[0].epsilon:.4g}, {record['privacy']['steps']:,} steps",
        )
    recipes = sorted(
        {
            *found.recipes,
            *(f["settings"]["recipe"] for _, f in found.comparisons),
            *(f["recipe"] for _, f in (*found.sweeps, *found.ablations)),
        }
    )
    counts = {"private run": found.runs, "comparison": found.comparisons, "sweep": found.sweeps, "ablation": found.ablations}
    what = [quantity(len(each), name) for name, each in counts.items() if each]
    title = ", ".join(recipes[:3]) + (", …" if len(recipes) > 3 else "")
    return title, ", ".join(what)


def _results(found: Found, keyed: dict[str, Key]) -> list[Section]:
    rows = []
    for group in found.groups:
        s, held = _summary(group.results("test")), _summary(group.results("heldout"))
        rows.append(
            (
                Cell(group.recipe), Cell(group.label), number(group.epsilon, "g"), number(len(group.runs), "d"),
                Cell(group.metric.replace("_", " ")), share(s["mean"]), share(s["std"]), span(s["ci95"]),
                share(held["mean"]), share(_averaged(group)),
            )
        )  # fmt: skip
    columns = ("recipe", "method", "ε", "runs", "metric", "test, %", "std", "95 % interval", "held-out, %", "averaged weights, %")
    rows, columns = without_empty(rows, columns)
    note = "Held-out and test rows are never trained on and stand outside ε. std: over runs; the interval is Student's t."
    table = Table("All results", columns, rows, note)
    blocks: list[Block] = [*figures.results(found, keyed), table if len(rows) > 1 else _outcome(found.groups[0])]
    for name, result in found.comparisons:
        blocks += _comparison(name, result)
    blocks += [Table("Further metrics", *_details(found))] if _details(found)[1] else []
    return [Section("results", "Results", tuple(blocks))]


def _outcome(group: Group) -> Facts:
    """What one run, or some that differ in nothing, came to."""
    facts = []
    for name, rows in (("Test", "test"), ("Held-out", "heldout")):
        s = _summary(group.results(rows))
        if s["n"]:
            spread = f"mean of {s['n']} runs, 95 % interval {span(s['ci95']).text}" if s["ci95"] else "one run: no interval"
            facts.append((f"{name} {group.metric.replace('_', ' ')}", f"{share(s['mean']).text} %", f"{spread}; outside ε"))
    averaged = _averaged(group)
    if averaged is not None:
        facts.append(("Averaged weights", f"{share(averaged).text} %", "test, of the average of the weights; costs no ε"))
    seconds = _mean([run.record["timing"]["seconds"] for run in group.runs])
    if seconds is not None:
        facts.append(("Time of a run", f"{seconds:,.0f} s" if seconds >= 10 else f"{seconds:.1f} s", "training alone, without evaluation"))
    return Facts("", tuple(facts))


def _summary(values: list[float]) -> dict[str, Any]:
    return summary(values) if values else {"n": 0, "mean": None, "std": None, "ci95": None}


def _averaged(group: Group) -> float | None:
    kept = [averaged.get("test") for run in group.runs if (averaged := run.record["result"].get("averaged"))]
    kept = [value for value in kept if value is not None]
    return fmean(kept) if kept else None


def _details(found: Found) -> tuple[tuple[str, ...], list[tuple[Cell, ...]]]:
    detailed = [(run, details) for run in found.runs if isinstance(details := run.record["result"].get("details"), dict) and details]
    names = sorted({str(name) for _, details in detailed for name in details})
    rows = [
        (
            Cell(run.name),
            Cell(run.record["method"]),
            *(number(v) if isinstance(v := details.get(name), (int, float)) else Cell("–") for name in names),
        )
        for run, details in detailed
    ]
    return ("run", "method", *names), rows


def _comparison(name: str, result: Json) -> list[Block]:
    rows = [
        (
            Cell(d["method"]),
            Cell(d["against"]),
            number(d["epsilon"], "g"),
            number(d["n"], "d"),
            number(100 * d["mean"], "+.2f"),
            share(d["std"]),
            span(d["ci95"]),
        )
        for d in result["differences"]
    ]
    if not rows:
        return []
    columns = ("method", "minus", "ε", "pairs", "difference, points", "std", "95 % interval")
    note = "Runs of one seed have the same initial weights and batches, so differences are paired."
    warnings = [Notice("warning", "Tuning differs", str(w)) for w in result.get("warnings") or []]
    return [Table(f"Paired differences, {result['settings']['recipe']} ({name})", columns, rows, note), *warnings]


def _curves(found: Found, keyed: dict[str, Key]) -> list[Section]:
    drawn = [*figures.learning_curves(found, keyed), *figures.spent(found, keyed)]
    return [Section("curves", "Learning curves", tuple(drawn))] if drawn else []


def _noise(found: Found, keyed: dict[str, Key]) -> list[Section]:
    gains, masses = figures.gains(found, keyed), figures.clamp_mass(found, keyed)
    told = [Text(text) for text, shown in ((GAIN, gains), (CLAMP, masses)) if shown]
    if not told:
        return []
    first = Columns((told[0],), (told[1],)) if len(told) == 2 else told[0]
    return [Section("noise", "Noise over time", (first, *gains, *masses))]


def _cost(found: Found, keyed: dict[str, Key]) -> Section:
    rows = []
    for group in found.groups:
        timing = [run.record["timing"] for run in group.runs]
        means = [_mean([t.get(name) for t in timing]) for name in ("seconds", "examples_per_second", "peak_mib")]
        threads = ", ".join(sorted({str(t.get("threads", "–")) for t in timing}))
        engine = ", ".join(sorted({str(t.get("engine") or run.record["config"].get("engine", "–")) for t, run in zip(timing, group.runs)}))
        rows.append(
            (
                Cell(group.recipe), Cell(group.label), number(group.epsilon, "g"), number(means[0], ".1f"), number(means[1], ",.0f"),
                number(means[2], ",.0f"), Cell(engine), Cell(threads),
            )
        )  # fmt: skip
    columns = ("recipe", "method", "ε", "seconds", "examples / s", "peak memory, MiB", "engine", "threads")
    machines = sorted({str(run.record["versions"].get("machine", "unknown")) for run in found.runs})
    note = f"Means over runs; training alone, without evaluation. Machine: {'; '.join(machines)}."
    return Section("cost", "Cost", (*figures.cost(found, keyed), Table("Cost of a run", columns, rows, note)))


def _mean(values: list[Any]) -> float | None:
    kept = [value for value in values if isinstance(value, (int, float))]
    return fmean(kept) if kept else None


def _texts(found: Found) -> list[Section]:
    blocks: list[Block] = []
    for run in found.runs:
        samples = run.record["result"].get("samples")
        for i, sample in enumerate(samples[:SAMPLES] if isinstance(samples, list) else []):
            if isinstance(sample, dict):
                parts = tuple((name, str(sample[name])) for name in ("input", "output", "reference") if name in sample)
                blocks.append(Sample(f"{run.name}, {i + 1}", parts))
    return [Section("texts", "Generated text", tuple(blocks))] if blocks else []


def _again(found: Found) -> Section:
    made = [("Comparison", name, rerun.compared(f)) for name, f in found.comparisons]
    made += [("Sweep", name, rerun.swept(f)) for name, f in found.sweeps] + [
        ("Ablation", name, rerun.ablated(f)) for name, f in found.ablations
    ]
    blocks: list[Block] = [Code(f"{kind} {name}", line, command=True) for kind, name, line in made]
    if found.runs:
        lines, inexact = [], []
        for run in found.runs:
            line, exact = rerun.command(run)
            lines.append(line if len(found.runs) == 1 else f"# {run.name}\n{line}")
            inexact += [] if exact else [run.name]
        blocks.append(Code("The run" if len(found.runs) == 1 else "Each run", "\n".join(lines), folded=len(found.runs) > 4, command=True))
        told = "`DIR` is the folder of the data, `OUT` a new one for the run."
        if any(run.record["keys"] == "secret" for run in found.runs):
            told += " Keys were secret, so a new run draws other noise: it scatters around these results, and is charged anew."
        blocks.append(Text(told))
        if inexact:
            named = ", ".join(inexact[:8])
            text = f"The methods of {named} were composed in Python: `fiberdp.Method.from_json` makes them from the settings below."
            blocks.append(Notice("warning", "Not by options alone", text))
    return Section("again", "Run it again", tuple(blocks))


def _settings(found: Found) -> Section:
    versions = found.runs[0].record["versions"]
    rows = [(Cell(str(name)), Cell(str(value))) for name, value in versions.items()]
    blocks: list[Block] = [
        Table("Versions" if len(found.runs) == 1 else f"Versions, of {found.runs[0].name}", ("what", "version"), rows, sortable=False)
    ]
    for group in found.groups[:CONFIGS]:
        run: Run = group.runs[0]
        name = f"Full configuration: {group.recipe}, {group.label}, ε = {group.epsilon:g}"
        blocks.append(Code(name, json.dumps(run.record["config"], indent=2, ensure_ascii=False), folded=True))
    left = len(found.groups) - CONFIGS
    if left > 0:
        blocks.append(Text(f"{quantity(left, 'more configuration')}: each record.json has its own."))
    return Section("settings", "Configuration", tuple(blocks))


def warnings(found: Found) -> list[str]:
    """What a reader must know about the runs as a whole, one line each."""
    told = []
    mixed = sorted({run.record["versions"]["fiberdp"] for run in found.runs})
    if len(mixed) > 1:
        told.append(f"The runs are of different versions of fiberdp ({', '.join(mixed)}): a difference may be one of versions.")
    if found.unfinished:
        told.append(f"{quantity(len(found.unfinished), 'unfinished run')} left out: {', '.join(found.unfinished[:6])}.")
    return told + _together([str(w) for run in found.runs for w in run.record.get("warnings") or []])


def _together(warnings: list[str]) -> list[str]:
    """Warnings of many runs that differ in their first number alone, as one: "clamp mass 0.86 to 0.93 …", and of how many runs.

    >>> _together(["mass 0.9: high", "mass 0.86: high", "slow"])
    ['Mass 0.86 to 0.9: high (2 runs)', 'Slow']
    """
    kept: dict[tuple[str, ...], list[str]] = {}
    for text in warnings:
        before, number, after = [*re.split(r"(\d+\.\d+)", text, maxsplit=1), "", ""][:3]
        kept.setdefault((before, after), []).append(number)
    told = []
    for (before, after), numbers in kept.items():
        low, high = min(numbers, key=lambda n: float(n or 0)), max(numbers, key=lambda n: float(n or 0))
        count = f" ({len(numbers)} runs)" if len(numbers) > 1 else ""
        text = f"{before}{low if low == high else f'{low} to {high}'}{after}{count}"
        told.append(text[0].upper() + text[1:])
    return told


def _warnings(found: Found) -> list[Notice]:
    return [Notice("warning", "Note", text) for text in warnings(found)]
