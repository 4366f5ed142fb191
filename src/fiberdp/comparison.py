"""Methods side by side: each at every epsilon, with the same seeds, and what a few runs can say about their difference.

OUT/runs/METHOD-epsEPSILON-seedSEED/    a run directory each (`run_folder.py`)
OUT/sweeps/METHOD-epsEPSILON/           the search that found its options, if it was asked for (`sweeping.py`)
OUT/comparison.json, .md, .csv          rows and differences
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fiberdp import _validate
from fiberdp._disk import write_atomically
from fiberdp.experiment import tuned_method
from fiberdp.intervals import paired, percent, percents, summary
from fiberdp.methods import METHODS, Method
from fiberdp.recipes import Recipe, recipe_named
from fiberdp.record import markdown_table, to_text, versions
from fiberdp.run_folder import Task, begin, trained
from fiberdp.sweeping import sweep
from fiberdp.workers import Observer, Unheard

NOTE = (
    "Test accuracy at proven noise. Test rows are never trained on and stand outside epsilon, and so does tuning, which looked at "
    "held-out rows. Seeds are 0, 1, …: the runs of one seed have the same initial weights and batches, so differences are paired. "
    "± is the sample standard deviation over seeds; intervals are Student's t at 95 %."
)


@dataclass(frozen=True, order=True)
class Cell:
    """One run of the comparison."""

    method: str
    epsilon: float
    seed: int

    @property
    def name(self) -> str:
        return f"{self.method}-eps{self.epsilon:g}-seed{self.seed}"


def compare(
    recipe: str | Recipe,
    *,
    methods: Sequence[str],
    epsilons: Sequence[float],
    seeds: int = 3,
    out: str | Path | None = None,
    tuned: Sequence[dict[str, Any]] = (),
    trials: int | None = None,
    workers: int | None = None,
    observer: Observer | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Train `recipe` by every method at every epsilon, `seeds` times, and say how they compare.

    methods: names of the table, each with the options that the recipe tuned for it.  The first is the one that the others are compared
    with.  seeds: 0 .. seeds-1; keys follow from them, so these runs are reproducible and private against nobody who knows that.
    tuned: results of `sweep`, whose best options and numbers of trials stand in the place of the recipe's, at their epsilon.
    trials: sweep each method at each epsilon first, with so many, in OUT/sweeps/; needs `out`.  With it one call makes a whole table.
    out: keeps the runs; called again, it goes on where it stopped, and takes further methods, epsilons and seeds.  settings: of
    `fiberdp.fit`, the same for all runs (epochs, steps, batch_size, clip_norm, data, engine, …).

    Returns JSON values: rows [{method, epsilon, n, mean, std, ci95, trials, heldout, accuracies}], accuracy as a share; differences
    [{method, against, epsilon, n, mean, std, ci95}], paired by seed; warnings; note; settings.
    Raises ValueError, before anything is trained, for an unknown method or settings other than those that `out` was begun with.
    """
    chosen, folder = recipe_named(recipe), None if out is None else Path(out)
    count = _validate.count("seeds", seeds, why="Each method is trained once for every seed.")
    for what, given in (("methods", methods), ("epsilons", epsilons)):
        if not given or len(set(given)) < len(given):
            raise ValueError(f"{what}={','.join(map(str, given))}: at least one must be given, and none twice, because each is a row.")
    for method in methods:
        _validate.choice("methods", method, tuple(METHODS))
    for epsilon in epsilons:
        _validate.positive("epsilons", epsilon, why="It bounds the privacy loss: typical values are 0.5 to 8.")
    if trials is not None:
        if folder is None or tuned:
            raise ValueError(
                f"trials={trials} {'with tuned' if tuned else 'without out'}: the sweeps are kept in OUT/sweeps/, and no others are read "
                "then. Give --out, and either --trials or --tuned."
            )
        _validate.count("trials", trials, low=4, why="Every stage of a search needs one.")
    choices = _choices(chosen, methods, epsilons, tuned)
    kept = {"recipe": chosen.name} | {name: value for name, value in settings.items() if value is not None}
    if folder is not None:
        begin(folder, kept)
    if trials is not None and folder is not None:
        found = [
            sweep(
                recipe, method=method, trials=trials, epsilon=float(epsilon), out=folder / "sweeps" / f"{method}-eps{epsilon:g}",
                workers=workers, observer=observer, **settings,
            )
            for epsilon in epsilons for method in methods
        ]  # fmt: skip
        choices = _choices(chosen, methods, epsilons, found)
    cells = [Cell(method, float(epsilon), seed) for epsilon in epsilons for method in methods for seed in range(count)]
    tasks = [Task(cell.name, choices[cell.method, cell.epsilon].method, cell.epsilon, cell.seed, {}) for cell in cells]
    found = trained(tasks, recipe=recipe, folder=folder, settings=settings, workers=workers, observer=observer or Unheard())
    named = {cell.name: cell for cell in cells}
    result = _compared({named[name]: record for name, record in found.items()}, list(methods), choices) | {"settings": kept}
    if folder is not None:
        write_atomically(folder / "comparison.json", to_text(result | {"versions": versions()}))
        write_atomically(folder / "comparison.md", markdown(result))
        write_atomically(folder / "comparison.csv", table(result))
    return result


@dataclass(frozen=True)
class Choice:
    """What a method is trained with, and by how many trials its options were found."""

    method: Method
    trials: int


def _choices(
    recipe: Recipe, methods: Sequence[str], epsilons: Sequence[float], tuned: Sequence[dict[str, Any]]
) -> dict[tuple[str, float], Choice]:
    cells = [(method, float(epsilon)) for method in methods for epsilon in epsilons]
    found = {(method, epsilon): Choice(tuned_method(recipe, method, {}), recipe.trials.get(method, 0)) for method, epsilon in cells}
    for result in tuned:
        method, epsilon = str(result.get("method")), float(result.get("epsilon", math.nan))
        if result.get("recipe") != recipe.name or (method, epsilon) not in found:
            raise ValueError(
                f"tuned: a sweep of {result.get('recipe')}, {method} at epsilon {epsilon:g}: it must be of {recipe.name} and of a method "
                "and an epsilon that are compared, because its options are for those. Leave it out, or compare them."
            )
        found[method, epsilon] = Choice(tuned_method(recipe, method, result["best"]["options"]), len(result["trials"]))
    return found


def _compared(found: dict[Cell, dict[str, Any]], methods: list[str], choices: dict[tuple[str, float], Choice]) -> dict[str, Any]:
    rows, pairs = [], []
    accuracy = {cell: record["result"]["test"] for cell, record in found.items()}
    for epsilon in sorted({cell.epsilon for cell in found}):
        for method in methods:
            cells = sorted(cell for cell in found if (cell.method, cell.epsilon) == (method, epsilon))
            rows.append(
                {"method": method, "epsilon": epsilon}
                | summary([accuracy[cell] for cell in cells])
                | {
                    "trials": choices[method, epsilon].trials,
                    "heldout": summary([found[cell]["result"]["heldout"] for cell in cells])["mean"],
                    "accuracies": [accuracy[cell] for cell in cells],
                }
            )
            if method != methods[0]:
                against = [accuracy[Cell(methods[0], epsilon, cell.seed)] for cell in cells]
                pairs.append(
                    {"method": method, "against": methods[0], "epsilon": epsilon} | paired([accuracy[cell] for cell in cells], against)
                )
    return {"rows": rows, "differences": pairs, "warnings": _warnings(choices), "note": NOTE}


def _warnings(choices: dict[tuple[str, float], Choice]) -> list[str]:
    trials = {at: choice.trials for at, choice in choices.items()}
    if len(set(trials.values())) == 1 and all(trials.values()):
        return []
    told = ", ".join(f"{method} at epsilon {epsilon:g}: {n}" for (method, epsilon), n in trials.items())
    return [f"tuning trials differ ({told}): a difference between methods may be one of tuning."]


def lines(result: dict[str, Any]) -> list[tuple[str, ...]]:
    """method, epsilon, n, mean ± std, interval, trials; and the difference from the first method with its interval."""
    paired_by = {(d["method"], d["epsilon"]): d for d in result["differences"]}
    found = []
    for row in result["rows"]:
        d = paired_by.get((row["method"], row["epsilon"]))
        found.append(
            (
                row["method"], f"{row['epsilon']:g}", str(row["n"]), f"{percent(row['mean'])} ± {percent(row['std'])}",
                percents(row["ci95"]),
                str(row["trials"]), "" if d is None else f"{100 * d['mean']:+.2f} {percents(d['ci95'])}".strip(),
            )
        )  # fmt: skip
    return found


COLUMNS = ("method", "epsilon", "runs", "test, %", "95 % interval", "trials", "minus the first")


def markdown(result: dict[str, Any]) -> str:
    """The table, what it means, and how it was made."""
    settings = ", ".join(f"{name} {value}" for name, value in result["settings"].items())
    parts = [
        f"# {result['settings']['recipe']}: methods compared",
        markdown_table(COLUMNS, lines(result)),
        *(f"Warning: {warning}" for warning in result["warnings"]),
        result["note"],
        f"Settings: {settings}.",
    ]
    return "\n\n".join(parts) + "\n"


def table(result: dict[str, Any]) -> str:
    """CSV: one line a method and epsilon, shares with all their digits."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["method", "epsilon", "n", "mean", "std", "ci95_low", "ci95_high", "trials", "heldout"])
    for row in result["rows"]:
        low, high = row["ci95"] or (None, None)
        writer.writerow(
            [row["method"], row["epsilon"], row["n"], row["mean"], row["std"], low, high, row["trials"], row["heldout"]]
        )  # fmt: skip
    return text.getvalue()
