"""One part of FiBeR at a time, everything else equal: the paper's ablations as studies (Tables 4 and 5, Figures 3, 4, 12 and 13).

    study        what changes                                           paper
    filter       EMA of DiSK, innovation tied to kappa, none            Table 4
    omega        the filter's gain, 1 for no filter                     Table 5
    geometry     (kappa, gamma) of the observation                      Figures 3 and 12 (a)
    gain         (kappa, omega) at gamma = 0.7                          Figures 3 and 12 (b)
    correction   none, raw, steady, exact, for FiBeR and for DiSK       Figure 4
    eps_v        the floor below the corrected second moment            Figure 13

OUT/runs/ARM-lrRATE-seedSEED/   a run directory each (`run_folder.py`)
OUT/ablation.json, .md          cells and differences

Every arm is trained at the same learning rates, and the rate that is best on held-out rows is its own: an arm is not judged by a rate
that was tuned for another.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from fiberdp import _validate
from fiberdp._disk import write_atomically
from fiberdp.experiment import tuned_method
from fiberdp.filters import Identity
from fiberdp.intervals import paired, percent, percents, summary
from fiberdp.methods import Method
from fiberdp.moments import Exact
from fiberdp.recipes import Recipe, recipe_named
from fiberdp.record import markdown_table, to_text, versions
from fiberdp.run_folder import Task, begin, trained
from fiberdp.sweeping import GAMMA, KAPPA, OMEGA, START
from fiberdp.workers import Observer, Unheard

TUNING_SEED = 100
NOTE = (
    "Test accuracy at proven noise; seeds 0, 1, … are the same for every arm, so differences are paired. Each arm has the learning rate "
    "that was best on held-out rows among the same factors of its method's rate. ± is the sample standard deviation over seeds; intervals "
    "are Student's t at 95 %."
)


@dataclass(frozen=True)
class Arm:
    """One cell of a study.  options: what it is called by, along the study's axes."""

    options: dict[str, Any]
    method: Method

    @property
    def name(self) -> str:
        return "-".join(f"{key}{value}" if isinstance(value, float) else str(value) for key, value in self.options.items())


@dataclass(frozen=True)
class Study:
    """arms(named): named(method, **options) is a method as the recipe tuned it.  reference: what the others are compared with."""

    axes: tuple[str, ...]
    arms: Callable[[Callable[..., Method]], list[Arm]]
    reference: dict[str, Any]
    paper: tuple[tuple[dict[str, Any], float, float, str], ...] = ()  # options, epsilon, percent, place


def _by(*axes: str) -> Callable[[list[tuple[Any, ...]]], Callable[[Callable[..., Method]], list[Arm]]]:
    """Arms of fiber with the values of these options."""

    def study(values: list[tuple[Any, ...]]) -> Callable[[Callable[..., Method]], list[Arm]]:
        return lambda named: [Arm(options, named("fiber", **options)) for options in (dict(zip(axes, each)) for each in values)]

    return study


def _filters(named: Callable[..., Method]) -> list[Arm]:
    """The observation of each method with its filter and without: what the filter does apart from the second point."""
    disk, tied, fiber = named("disk"), named("fiber-tied"), named("fiber-nocorr")
    return [
        Arm({"method": "dp-adamw"}, named("dp-adamw")),
        Arm({"method": "disk"}, disk),
        Arm({"method": "disk without filter"}, replace(disk, filter=Identity())),
        Arm({"method": "fiber-tied"}, tied),
        Arm({"method": "fiber-nocorr"}, fiber),
        Arm({"method": "fiber-nocorr without filter"}, replace(fiber, filter=Identity())),
    ]


def _corrections(named: Callable[..., Method]) -> list[Arm]:
    fiber = named("fiber")
    return [
        Arm({"method": "fiber"}, fiber),
        Arm({"method": "fiber-nocorr"}, named("fiber-nocorr")),
        Arm({"method": "fiber-bccorr"}, named("fiber-bccorr")),
        Arm({"method": "fiber, exact"}, replace(fiber, calibration=Exact())),
        Arm({"method": "fiber, exact, automatic floor"}, replace(fiber, calibration=Exact(eps_v="auto"))),
        Arm({"method": "disk"}, named("disk")),
        Arm({"method": "disk-corr"}, named("disk-corr")),
    ]


_CONVEX = [(kappa, gamma) for kappa, gamma in product(KAPPA, GAMMA) if gamma >= (1 - kappa) / kappa]

STUDIES: dict[str, Study] = {
    "filter": Study(
        ("method",), _filters, {"method": "disk"},
        tuple(
            ({"method": method}, epsilon, value, "Table 4")
            for epsilon, disk, tied in ((0.5, 59.70, 65.32), (2.0, 68.80, 71.39), (8.0, 74.90, 73.19))
            for method, value in (("disk", disk), ("fiber-tied", tied))
        ),
    ),
    "omega": Study(
        ("omega",), _by("omega")([*((omega,) for omega in OMEGA), (1.0,)]), {"omega": 0.9},
        tuple(
            ({"omega": omega}, 1.0, value, "Table 5")
            for omega, value in zip(OMEGA, (68.86, 69.66, 70.74, 70.76, 70.62), strict=True)
        ),
    ),
    "geometry": Study(
        ("kappa", "gamma"), _by("kappa", "gamma")(_CONVEX), {"kappa": 0.6, "gamma": 0.7},
        (({"kappa": 0.6, "gamma": 0.7}, 4.0, 75.44, "Figure 12 (a)"),),
    ),
    "gain": Study(
        ("kappa", "omega"), _by("kappa", "omega")(list(product(KAPPA[1:], (0.5, 0.6, 0.7, 0.8, 0.9)))), {"kappa": 0.6, "omega": 0.9},
        (({"kappa": 0.6, "omega": 0.9}, 4.0, 75.44, "Figure 12 (b)"),),
    ),
    "correction": Study(("method",), _corrections, {"method": "fiber"}),
    "eps_v": Study(("eps_v",), _by("eps_v")([(1e-8,), (1e-7,), (1e-6,), (1e-5,), ("auto",)]), {"eps_v": 1e-8}),
}  # fmt: skip


def ablate(
    recipe: str | Recipe,
    study: str,
    *,
    epsilon: float | None = None,
    seeds: int = 3,
    trials: int = 3,
    out: str | Path | None = None,
    workers: int | None = None,
    observer: Observer | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Train every arm of a study: `trials` learning rates each, scored on held-out rows, then `seeds` runs at the best one.

    trials: 1 keeps the rate that the recipe has for the arm's method.  Rates are that one times 1, 2, 1/2, 4, ….
    out: keeps the runs; called again, it goes on.  settings: of `fiberdp.fit`, the same for all runs.

    Returns JSON values: recipe, name, epsilon, axes, cells [{options, method, lr, n, mean, std, ci95, accuracies, clamp_mass, difference
    {mean, ci95} from the reference}], reference, paper [{options, epsilon, value, place}], trials, note, settings.
    Raises ValueError, before anything is trained, for an unknown study or settings other than those that `out` was begun with.
    """
    chosen, folder = recipe_named(recipe), None if out is None else Path(out)
    planned = STUDIES[_validate.choice("study", study, tuple(STUDIES))]
    count = _validate.count("seeds", seeds, why="Each arm is trained once for every seed.")
    rates = START[: _validate.count("trials", trials, why="Each is a learning rate, and an arm needs one.")]
    if trials > len(START):
        raise ValueError(f"trials={trials}: must be at most {len(START)}, because that many learning rates are known. Give fewer.")
    target = float(_validate.positive("epsilon", chosen.epsilon if epsilon is None else epsilon, why="It bounds the privacy loss."))
    kept = {"recipe": chosen.name, "study": study, "epsilon": target} | {k: v for k, v in settings.items() if v is not None}
    if folder is not None:
        begin(folder, kept)
    common = {"recipe": recipe, "folder": folder, "settings": settings, "workers": workers, "observer": observer or Unheard()}
    arms = planned.arms(lambda method, **options: tuned_method(chosen, method, options))
    best = arms
    if trials > 1:
        tried = {(i, factor): _at(arm, factor) for i, arm in enumerate(arms) for factor in rates}
        tasks = {key: _task(arm, target, TUNING_SEED, {"test": False}) for key, arm in tried.items()}
        scored = trained(list(tasks.values()), **common)
        heldout = {key: scored[task.name]["result"]["heldout"] for key, task in tasks.items()}
        best = [tried[i, max(rates, key=lambda factor: heldout[i, factor])] for i in range(len(arms))]
    tasks = {(i, seed): _task(arm, target, seed, {}) for i, arm in enumerate(best) for seed in range(count)}
    records = trained(list(tasks.values()), **common)
    each = [[records[tasks[i, seed].name] for seed in range(count)] for i in range(len(best))]
    result = _told(chosen, study, planned, target, best, each) | {"trials": trials, "settings": kept}
    if folder is not None:
        write_atomically(folder / "ablation.json", to_text(result | {"versions": versions()}))
        write_atomically(folder / "ablation.md", markdown(result))
    return result


def _at(arm: Arm, factor: float) -> Arm:
    update = arm.method.update
    return replace(arm, method=replace(arm.method, update=replace(update, lr=factor * update.lr)))


def _task(arm: Arm, epsilon: float, seed: int, rest: dict[str, Any]) -> Task:
    name = f"{arm.name}-lr{arm.method.update.lr:.3g}-seed{seed}".replace(" ", "-").replace(",", "")
    return Task(name, arm.method, epsilon, seed, rest)


def _told(recipe: Recipe, study: str, planned: Study, epsilon: float, arms: list[Arm], each: list[list[dict[str, Any]]]) -> dict[str, Any]:
    accuracy = [[record["result"]["test"] for record in records] for records in each]
    reference = accuracy[[arm.options for arm in arms].index(planned.reference)]
    cells = []
    for arm, found, records in zip(arms, accuracy, each, strict=True):
        masses = [record["clamp_mass"] for record in records if record["clamp_mass"] is not None]
        difference = paired(found, reference)
        cells.append(
            {"options": arm.options, "method": arm.method.name, "lr": arm.method.update.lr}
            | summary(found)
            | {
                "accuracies": found,
                "heldout": summary([record["result"]["heldout"] for record in records])["mean"],
                "clamp_mass": sum(masses) / len(masses) if masses else None,
                "difference": {"mean": difference["mean"], "ci95": difference["ci95"]},
            }
        )
    return {
        "recipe": recipe.name,
        "name": study,
        "epsilon": epsilon,
        "axes": list(planned.axes),
        "cells": cells,
        "reference": planned.reference,
        "paper": [
            {"options": options, "epsilon": at, "value": value, "place": place} for options, at, value, place in planned.paper
        ],
        "note": NOTE,
    }  # fmt: skip


COLUMNS = ("lr", "runs", "test, %", "95 % interval", "minus the reference", "clamp mass")


def lines(result: dict[str, Any]) -> list[tuple[str, ...]]:
    """The axes' values, then COLUMNS."""
    found = []
    for cell in result["cells"]:
        difference = cell["difference"]
        figures = (
            f"{cell['lr']:.3g}",
            str(cell["n"]),
            f"{percent(cell['mean'])} ± {percent(cell['std'])}",
            percents(cell["ci95"]),
            f"{100 * difference['mean']:+.2f} {percents(difference['ci95'])}".strip(),
            "" if cell["clamp_mass"] is None else f"{cell['clamp_mass']:.2f}",
        )
        found.append((*(str(cell["options"][axis]) for axis in result["axes"]), *figures))
    return found


def markdown(result: dict[str, Any]) -> str:
    """The table, the paper's figures, and how it was made."""
    reference = ", ".join(f"{key} {value}" for key, value in result["reference"].items())
    parts = [
        f"# {result['recipe']} at epsilon {result['epsilon']:g}: {result['name']}",
        markdown_table((*result["axes"], *COLUMNS), lines(result)),
        f"The reference is {reference}. {result['trials']} learning rates were tried for each arm.",
        result["note"],
    ]
    if result["paper"]:
        told = (
            (", ".join(f"{k} {v}" for k, v in row["options"].items()), f"{row['epsilon']:g}", f"{row['value']:.2f}", row["place"])
            for row in result["paper"]
        )
        parts += ["The paper, on CIFAR-10 with CNN5:", markdown_table(("arm", "epsilon", "test, %", "place"), told)]
    return "\n\n".join(parts) + "\n"
