"""What a training step costs: variants interleaved in one process, medians, ratios to a baseline of the same round; memory beside it.

Models are in `models`, what is timed of each in `variants`; model `update` is what comes after the gradient, in `update`.
Interleaving makes a slow minute of a shared machine slow for every variant alike, so compare ratios, not seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fiberdp import _validate
from fiberdp.bench.clock import interleaved
from fiberdp.bench.memory import peak_mib
from fiberdp.bench.models import MODELS as STEP_MODELS
from fiberdp.bench.steps import row, step_rows
from fiberdp.bench.update import update_variants
from fiberdp.bench.variants import BASELINE, VARIANTS
from fiberdp.record import package_version, versions

MODELS = (*STEP_MODELS, "update")


def bench(
    models: Sequence[str] = MODELS,
    variants: Sequence[str] = tuple(VARIANTS),
    *,
    elements: int = 20_000_000,
    rounds: int = 7,
    batch_size: int | None = None,
    memory: bool = True,
    progress: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """{"rows": [{model, variant, batch_size, seconds, ratio, spread, peak_mib, kernel_seconds, kernel_ratio, skipped}], …}.

    seconds: median over `rounds` interleaved rounds, after two that are not counted.  ratio: median of the ratios to the baseline of the
    same round (`nonprivate`: forward and backward).  spread: half the interquartile range of that ratio.  kernel_*: forward, backward and
    clipping alone, of our variants.  peak_mib: see `memory`; None where its process failed, and `progress` is told why.  skipped: why a
    row has no numbers, else None.
    elements: length of model `update`, which has variants of its own.  batch_size: instead of each model's own.
    Raises ValueError for a model or variant that does not exist.
    """
    for name in models:
        _validate.choice("model", name, MODELS)
    for name in variants:
        _validate.choice("variant", name, tuple(VARIANTS))
    _validate.count("elements", elements, why="It is the length of the vector.")
    _validate.count("rounds", rounds, why="It is how often everything is timed.")
    if batch_size is not None:
        _validate.count("batch_size", batch_size, why="It is the number of examples of a step.")
    rows: list[dict[str, Any]] = []
    for name in models:
        if name == "update":
            rows += _update_rows(elements, rounds, progress)
        else:
            rows += step_rows(STEP_MODELS[name], variants, rounds=rounds, batch_size=batch_size, progress=progress)
    if memory:
        for found in rows:
            if found["model"] != "update" and not found["skipped"]:
                progress(f"{found['model']}: memory of {found['variant']}")
                try:
                    found["peak_mib"] = peak_mib(found["model"], found["variant"], found["batch_size"])
                except RuntimeError as error:  # most likely killed for want of memory: what was timed is worth keeping
                    progress(str(error))
    return {
        "rows": rows,
        "ablations": [],
        "caveats": [],
        "elements": elements,
        "rounds": rounds,
        "threads": torch.get_num_threads(),
        "versions": versions() | {"opacus": package_version("opacus")},
    }


def _update_rows(elements: int, rounds: int, progress: Callable[[str], None]) -> list[dict[str, Any]]:
    timings = interleaved(update_variants(elements), rounds, lambda line: progress(f"update: {line}"))
    return [row("update", name, None, timing) for name, timing in timings.items()]


__all__ = ["BASELINE", "MODELS", "VARIANTS", "bench"]
