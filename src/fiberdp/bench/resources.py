"""What a method costs beside what it brings: whole steps of a recipe, and accuracy per overhead (paper, appendix F, Tables 12 and 13).

    overhead   = seconds of a step / seconds of the baseline's, in the same round
    efficiency = (accuracy - the baseline's) / (overhead - 1), points                                       (84)

A step is a real one, with its Poisson batch, both probes, the noise and the update; every method takes one in each round, in one process.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from fiberdp import _validate
from fiberdp._random import Keys
from fiberdp.bench.clock import interleaved
from fiberdp.bench.memory import RESET, STEPS, in_a_child
from fiberdp.diagnostics.runs import Subject, subject
from fiberdp.experiment import tuned_method
from fiberdp.methods import METHODS
from fiberdp.recipes import recipe_named
from fiberdp.record import forget_peak, memory_mib
from fiberdp.trainer import Run

ONE_POINT, LOOK_AHEAD, TWO_POINT = "one point", "look-ahead", "two points"


def resources(
    recipe: str,
    methods: Sequence[str] = ("dp-adamw", "disk", "fiber", "fiber-lookahead"),
    *,
    accuracies: dict[str, Any] | None = None,
    rounds: int = 7,
    data: str | None = None,
    memory: bool = True,
    progress: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """{"rows": [{method, evaluations, batch_size, steps, step_seconds, spread, examples_per_second, run_seconds, overhead, peak_mib,
    results}], …}; the first method is the baseline.

    accuracies: a result of `compare` on this recipe; results: [{epsilon, accuracy, gain, efficiency}] of each method in it, a share and
    points.  run_seconds: step_seconds times the steps of a run, without start, receipt and evaluation.  peak_mib: in a process of its
    own, see `memory`.  efficiency is None where the overhead is not above 1.
    Raises ValueError for an unknown recipe or method, or a comparison of another recipe.
    """
    chosen = recipe_named(recipe)
    for name in methods:
        _validate.choice("methods", name, tuple(METHODS))
    _validate.count("rounds", rounds, why="It is how often everything is timed.")
    reached = _reached(chosen.name, accuracies)
    progress(f"{recipe}: setting up {len(methods)} methods")
    runs = {name: _begun(_subject(recipe, name, data)) for name in methods}
    timings = interleaved({name: run.step for name, run in runs.items()}, rounds, lambda line: progress(f"{recipe}: {line}"))
    rows = []
    for name, run in runs.items():
        timing = timings[name]
        results = [_result(at, reached, name, methods[0], timing.ratio) for at in sorted({at for method, at in reached if method == name})]
        rows.append(
            {
                "method": name,
                "evaluations": evaluations(name),
                "batch_size": run.plan.batch_size,
                "steps": run.plan.steps,
                "step_seconds": timing.seconds,
                "spread": timing.spread,
                "examples_per_second": run.plan.batch_size / timing.seconds,
                "run_seconds": run.plan.steps * timing.seconds,
                "overhead": timing.ratio,
                "peak_mib": None,
                "results": results,
            }
        )
    runs.clear()
    for row in rows if memory and RESET.exists() else ():
        progress(f"{recipe}: memory of {row['method']}")
        row["peak_mib"] = in_a_child("fiberdp.bench.resources", recipe, row["method"], data or "")
    return {"recipe": chosen.name, "baseline": methods[0], "rounds": rounds, "rows": rows}


def evaluations(method: str) -> str:
    """At how many points a step takes every example's gradient."""
    probes = METHODS[method].observation.probes()
    return TWO_POINT if len(probes) == 2 else LOOK_AHEAD if probes[0].lookahead else ONE_POINT


def _subject(recipe: str, method: str, data: str | None) -> Subject:
    return subject(recipe, tuned_method(recipe_named(recipe), method, {}), steps=None, epsilon=None, data=data)


def _begun(it: Subject) -> Run:
    """A run at its second step: the first of a two-point method evaluates once."""
    made = it.make(Keys.seeded(0))
    made.step()
    return made


def _reached(recipe: str, accuracies: dict[str, Any] | None) -> dict[tuple[str, float], float]:
    if accuracies is None:
        return {}
    if accuracies["settings"]["recipe"] != recipe:
        raise ValueError(
            f"accuracies are of {accuracies['settings']['recipe']}: they must be of {recipe}, because that is what is timed. Give its "
            "comparison.json."
        )
    return {(row["method"], row["epsilon"]): row["mean"] for row in accuracies["rows"]}


def _result(epsilon: float, reached: dict[tuple[str, float], float], method: str, baseline: str, overhead: float) -> dict[str, Any]:
    accuracy, against = reached[method, epsilon], reached.get((baseline, epsilon))
    gain = None if against is None else 100 * (accuracy - against)
    return {
        "epsilon": epsilon,
        "accuracy": accuracy,
        "gain": gain,
        "efficiency": gain / (overhead - 1) if gain is not None and overhead > 1 and method != baseline else None,
    }


def _peak(recipe: str, method: str, data: str | None) -> float:
    """What the child does: the peak of three steps above what was resident with the data, before the model."""
    it = _subject(recipe, method, data)
    idle = memory_mib("VmRSS")
    run = _begun(it)
    forget_peak()
    for _step in range(STEPS):
        run.step()
    return memory_mib("VmHWM") - idle


if __name__ == "__main__":
    sys.stdout.write(f"{_peak(sys.argv[1], sys.argv[2], sys.argv[3] or None)}\n")
