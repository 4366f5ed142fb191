"""What epsilon means, in words that do not need the definition; and what it does not mean."""

from __future__ import annotations

import math
from itertools import groupby
from typing import Any

from fiberdp.report.document import Block, Cell, Columns, Facts, Notice, Points, Section, Table, Text, number, power, quantity
from fiberdp.report.reading import Found, Run
from fiberdp.report.tradeoff import detection, tradeoff

NEIGHBOURS = {
    "add_or_remove_one": "two data sets are neighbours if one has one example more than the other",
    "replace_one": "two data sets are neighbours if one example of the one is another in the other",
    "zero_out": "two data sets are neighbours if one example of the one contributes nothing in the other",
}
SAMPLERS = {
    "poisson": "every example enters each batch by a coin flip of its own, at rate B/N",
    "fixed_size": "each batch is B examples drawn without replacement",
    "shuffle": "the examples are shuffled and taken in turn; no credit is taken for the randomness",
    "cyclic": "the examples are dealt into groups once, and a batch is drawn from one group after the other",
}
ACCOUNTANTS = {
    "pld": "privacy loss distributions, which are tight",
    "rdp": "Rényi divergences with the improved conversion, an upper bound",
    "rdp-classic": "Rényi divergences with the classic conversion, an upper bound",
}
NOT_COVERED = (
    "**Who holds `resume/`.** It has the keys of the noise, which can then be subtracted. The statement is about everything else: "
    "`release/`, the ledger, the metrics and this page.",
    "**Tuning.** Hyperparameters were chosen by looking at held-out rows, and that choice is not charged.",
    "**Held-out and test rows.** They are never trained on and stand outside ε; their accuracy is published as it is.",
    "**A person with several examples.** The statement is about one example; with k of them a person is protected at kε at best.",
    "**What holds without the person.** A model may teach that smoking harms, and so say something about a smoker who was not in the data.",
)


def receipt(found: Found) -> Section:
    """The first card: whether the noise was there, of all runs together."""
    runs = found.runs
    ratios = sorted((run.record["receipt"] for run in runs), key=lambda r: r["std_ratio"])
    failed = [run for run in runs if not run.record["receipt"]["passed"]]
    worst = max((abs(r["std_ratio"] - 1) / r["standard_error"] for r in ratios if r["standard_error"] > 0), default=0.0)
    one = ratios[0]
    told = (
        f"Measured / charged std **{one['std_ratio']:.4f} ± {one['standard_error']:.4f}**"
        if len(runs) == 1
        else f"Measured / charged std **{one['std_ratio']:.4f} to {ratios[-1]['std_ratio']:.4f}** in {len(runs)} runs"
    )
    text = (
        f"{told}: {'at most ' if len(runs) > 1 else ''}{worst:.1f} standard errors away from 1. Before the first step the pipeline of "
        "the run itself was driven on blank examples with every loss multiplied by 0, so that what came out was noise alone, and this was "
        "compared with what the ledger charges: strength, shape, and correlation between steps, coordinates and tensors. More than 5 "
        "standard errors off, and the run would not have started. No data was touched."
    )
    title = "The noise was proved" + ("" if len(runs) == 1 else " in every run")
    blocks: list[Block] = [Notice("good", title, text)]
    if failed:
        named = ", ".join(run.name for run in failed[:5])
        blocks = [Notice("warning", "The noise was not what was charged", f"In {named}. The statements below do not hold for these runs.")]
    return Section("receipt", "Noise receipt", (*blocks, *(_checks(runs[0]) if len(runs) == 1 else _receipts(found))))


def _checks(run: Run) -> tuple[Table, ...]:
    checks = run.record["receipt"].get("checks") or []
    rows = [
        (
            Cell(str(c["name"])), number(c["value"]), number(c["expected"]), number(c["standard_error"], ".2g"),
            number(c["deviation"], "+.2f"), number(c["limit"], ".2f"), Cell("yes" if c["passed"] else "no"),
        )
        for c in checks
    ]  # fmt: skip
    columns = ("check", "measured", "charged", "standard error", "standard errors off", "allowed", "passed")
    return (Table(f"All {len(rows)} checks", columns, rows, folded=True),) if rows else ()


def _receipts(found: Found) -> tuple[Table, ...]:
    rows = [
        (
            Cell(run.name), number(r["std_ratio"], ".4f"), number(r["standard_error"], ".4f"), number(r["lag1_correlation"], "+.4f"),
            number(len(r.get("checks") or []), "d"), Cell("yes" if r["passed"] else "no"),
        )
        for run in found.runs
        for r in (run.record["receipt"],)
    ]  # fmt: skip
    return (
        Table(
            "The receipt of each run",
            ("run", "std / charged", "standard error", "lag-1 correlation", "checks", "passed"),
            rows,
            folded=True,
        ),
    )


def statement(found: Found) -> Section:
    """(epsilon, delta) with relation, accountant and sampler, and what an outsider may conclude."""
    stated = sorted({_terms(run) for run in found.runs}, key=lambda terms: (terms[0], terms[1]))
    blocks: list[Block] = []
    if len(stated) == 1:
        blocks.append(_facts(stated[0]))
    else:
        blocks.append(_table(found, stated))
    told = (_conclusion(stated[-1], len({terms[0] for terms in stated})), *_together(found))
    blocks.append(Columns(told, (tradeoff(sorted({(epsilon, delta) for epsilon, delta, *_ in stated})),)))
    seeded = [run for run in found.runs if run.record["keys"] == "seeded"]
    if seeded:
        which = "The run's keys" if len(found.runs) == 1 else f"The keys of {quantity(len(seeded), 'run')}"
        blocks.append(
            Notice(
                "warning",
                "Reproducible, so not private against who knows the seed",
                f"{which} follow from a seed: whoever knows it can draw the same noise and subtract it. The statements hold against "
                "everyone else. For a release, train without a seed.",
            )
        )
    blocks.append(Points("What the statement does not cover", NOT_COVERED))
    return Section("privacy", "Privacy statement", tuple(blocks))


def _terms(run: Run) -> tuple[Any, ...]:
    p = run.record["privacy"]
    return (float(f"{p['epsilon']:.4g}"), p["delta"], p["relation"], p["accountant"], p["sampling"], p["batch_size"], p["num_examples"])


def _facts(terms: tuple[Any, ...]) -> Facts:
    epsilon, delta, relation, accountant, sampling, batch, examples = terms
    return Facts(
        "",
        (
            ("ε", f"{epsilon:g}", f"one example changes the odds of anything that is seen by a factor of {_factor(epsilon)} at most"),
            ("δ", power(f"{delta:.2g}"), f"the slack of that bound, {delta * examples:.2g} of 1/N"),
            ("Relation", relation.replace("_", "-"), NEIGHBOURS.get(relation, "")),
            ("Accountant", accountant, ACCOUNTANTS.get(accountant, "")),
            ("Sampler", sampling.replace("_", "-"), f"{SAMPLERS.get(sampling, '')}; B = {batch:,}, N = {examples:,}"),
        ),
    )


def _factor(epsilon: float) -> str:
    """e^epsilon, or an order of magnitude."""
    return f"{math.exp(epsilon):.3g}" if epsilon < 7 else f"e^{epsilon:.3g}"


def _table(found: Found, stated: list[tuple[Any, ...]]) -> Table:
    rows = []
    for terms in stated:
        runs = [run for run in found.runs if _terms(run) == terms]
        epsilon, delta, relation, accountant, sampling, batch, examples = terms
        one, five = (number(100 * detection(epsilon, delta, rate), ".3g") for rate in (0.01, 0.05))
        rows.append(
            (
                Cell(", ".join(sorted({run.record["recipe"] for run in runs}))), number(epsilon), number(delta, ".3g"),
                Cell(relation.replace("_", "-")), Cell(accountant), Cell(sampling.replace("_", "-")), number(batch, ",d"),
                number(examples, ",d"), number(len(runs), "d"), one, five,
            )
        )  # fmt: skip
    kinds = {terms[2:5] for terms in stated}
    explained = [f"{relation.replace('_', '-')}: {NEIGHBOURS.get(relation, '')}" for relation in sorted({k[0] for k in kinds})]
    explained += [f"{accountant}: {ACCOUNTANTS.get(accountant, '')}" for accountant in sorted({k[1] for k in kinds})]
    explained += [f"{sampling.replace('_', '-')}: {SAMPLERS.get(sampling, '')}" for sampling in sorted({k[2] for k in kinds})]
    columns = ("recipe", "ε", "δ", "relation", "accountant", "sampler", "B", "N", "runs", "at 1 %", "at 5 %")
    return Table(
        "What each run guarantees", columns, rows, "; ".join(explained) + ". At 1 and 5 % of false alarms: what a test can find at most, %."
    )


def _conclusion(terms: tuple[Any, ...], count: int) -> Text:
    epsilon, delta = terms[:2]
    one, five = (100 * detection(epsilon, delta, rate) for rate in (0.01, 0.05))
    which = "" if count == 1 else f" (of the run with the largest ε, {epsilon:g})"
    instead = ", or another in its place" if terms[2] == "replace_one" else ""
    rises = (
        f"they find a person who is there **{_times(one)} %** of the time if they accept one false alarm in a hundred (a blind guess: "
        f"1 %), and **{_times(five)} %** of the time at five in a hundred"
    )
    return Text(
        f"**What an outsider may conclude.** Take someone who sees everything that was released{which} at every step, who knows all other "
        f"examples, and who asks whether one certain person's example was among them{instead}. Whatever test they use, {rises}. These are "
        "limits that no test can pass, not estimates of what an attack reaches."
    )


def _times(value: float) -> str:
    return f"{value:.1f}" if value < 99.95 else "100"


def _together(found: Found) -> list[Text]:
    """Basic composition of the runs that saw the same rows: what publishing all of them costs."""
    runs = sorted((run for run in found.runs), key=lambda run: run.record["recipe"])
    told = []
    for recipe, same in groupby(runs, key=lambda run: run.record["recipe"]):
        each = [run.record["privacy"] for run in same]
        if len(each) > 1:
            epsilon, delta = sum(p["epsilon"] for p in each), sum(p["delta"] for p in each)
            told.append(f"{recipe}, {len(each)} runs: ε = {epsilon:.3g}, δ = {power(f'{delta:.2g}')}")
    if not told:
        return []
    return [
        Text(
            "**Each ε is the price of one run.** Whoever sees all runs on the same rows learns more: together they cost at most the sum "
            f"({'; '.join(told)}), by basic composition."
        )
    ]
