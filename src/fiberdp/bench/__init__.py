"""What a training step costs: variants interleaved in one process, medians, ratios to a baseline of the same round; memory beside it.

Models are in `models`, what is timed of each in `variants`; model `update` is what comes after the gradient, in `update`.
Interleaving makes a slow minute of a shared machine slow for every variant alike, so compare ratios, not seconds.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from fiberdp import _validate
from fiberdp._allocator import give_back_freed_memory
from fiberdp._disk import write_atomically
from fiberdp.bench.ablations import noise_ablation, step_ablations
from fiberdp.bench.clock import interleaved
from fiberdp.bench.memory import peak_mib
from fiberdp.bench.models import MODELS as STEP_MODELS
from fiberdp.bench.steps import row, step_rows
from fiberdp.bench.update import update_variants
from fiberdp.bench.variants import BASELINE, VARIANTS
from fiberdp.record import package_version, to_text, versions

MODELS = (*STEP_MODELS, "update")


def bench(
    models: Sequence[str] = MODELS,
    variants: Sequence[str] = tuple(VARIANTS),
    *,
    elements: int = 20_000_000,
    rounds: int = 7,
    batch_size: int | None = None,
    memory: bool = True,
    tricks: bool = False,
    kept: str | Path | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """{"rows": [{model, variant, batch_size, seconds, ratio, spread, peak_mib, kernel_seconds, kernel_ratio, skipped}], …}.

    seconds: median over `rounds` interleaved rounds, after two that are not counted.  ratio: median of the ratios to the baseline of the
    same round (`nonprivate`: forward and backward).  spread: half the interquartile range of that ratio.  kernel_*: forward, backward and
    clipping alone, of our variants.  peak_mib: see `memory`; None where its process failed, and `progress` is told why.  skipped: why a
    row has no numbers, else None.
    elements: length of model `update`, which has variants of its own.  batch_size: instead of each model's own.
    tricks: also time the engine without each of its tricks, "ablations": see `ablations`.
    kept: a file that holds the result after every model and every peak; what it holds already, from the same settings, is not done again.
    "commits": of the code that measured, one unless a file was continued.
    Raises ValueError for a model or variant that does not exist, and if `kept` is of other settings.
    """
    for name in models:
        _validate.choice("model", name, MODELS)
    for name in variants:
        _validate.choice("variant", name, tuple(VARIANTS))
    _validate.count("elements", elements, why="It is the length of the vector.")
    _validate.count("rounds", rounds, why="It is how often everything is timed.")
    if batch_size is not None:
        _validate.count("batch_size", batch_size, why="It is the number of examples of a step.")
    if kept is not None and not Path(kept).absolute().parent.is_dir():
        raise ValueError(f"out={kept}: its folder does not exist, so hours of measuring would be lost. Make it first.")
    settings = {
        "elements": elements,
        "rounds": rounds,
        "threads": torch.get_num_threads(),
        "instructions": instructions(),
        "versions": {name: value for name, value in versions().items() if name != "commit"} | {"opacus": package_version("opacus")},
        "variants": list(variants),
        "batch": batch_size,
    }
    found: dict[str, Any] = _held(kept, settings) or {"rows": [], "ablations": [], "caveats": [], "commits": [], **settings}
    if (commit := versions()["commit"]) not in found["commits"]:
        found["commits"].append(commit)
    rows: list[dict[str, Any]] = found["rows"]

    def keep() -> None:
        if kept is not None:
            write_atomically(Path(kept), to_text(found))

    for name in models:
        if not any(one["model"] == name for one in rows):
            if name == "update":
                rows += _update_rows(elements, rounds, progress)
            else:
                rows += step_rows(STEP_MODELS[name], variants, rounds=rounds, batch_size=batch_size, progress=progress)
            keep()
    for name in models if tricks else ():
        if not any(one["model"] == name for one in found["ablations"]):
            if name == "update":
                found["ablations"] += noise_ablation(elements, rounds=rounds, progress=progress)
            else:
                found["ablations"] += step_ablations(STEP_MODELS[name], rounds=rounds, progress=progress)
            keep()
    give_back_freed_memory()  # some 20 GiB after the timings, which the children need
    for one in rows if memory else ():
        if one["model"] != "update" and not one["skipped"] and one["peak_mib"] is None:
            progress(f"{one['model']}: memory of {one['variant']}")
            try:
                one["peak_mib"] = peak_mib(one["model"], one["variant"], one["batch_size"])
            except RuntimeError as error:  # most likely killed for want of memory: what was timed is worth keeping
                progress(str(error))
            keep()
    return found


def instructions() -> list[str]:
    """Those of this processor that decide how fast matrix products are; without one of the last two, products in bf16 are emulated."""
    capabilities = getattr(torch.cpu, "get_capabilities", dict)()
    return [name for name in ("avx2", "avx512_f", "avx512_bf16", "amx_bf16") if capabilities.get(name)]


def _held(kept: str | Path | None, settings: dict[str, Any]) -> dict[str, Any] | None:
    """What an earlier call left in `kept`."""
    if kept is None or not Path(kept).exists():
        return None
    found = json.loads(Path(kept).read_text())
    for name, value in settings.items():
        if found.get(name) != value:
            raise ValueError(
                f"{kept} was measured with {name}={found.get(name)}, now it is {value}: rows of two kinds would stand in one table. "
                "Name a new file."
            )
    return found


def _update_rows(elements: int, rounds: int, progress: Callable[[str], None]) -> list[dict[str, Any]]:
    timings = interleaved(update_variants(elements), rounds, lambda line: progress(f"update: {line}"))
    return [row("update", name, None, timing) for name, timing in timings.items()]


__all__ = ["BASELINE", "MODELS", "VARIANTS", "bench"]
