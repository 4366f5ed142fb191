"""What a step costs, measured in one process: variants interleaved, medians, ratios to a baseline of the same round.

    | model  | variant                          | what is timed                                                        |
    |--------|----------------------------------|----------------------------------------------------------------------|
    | update | adamw-fused                      | torch's fused AdamW on one vector of `elements` floats, the baseline |
    | update | fiber, kalman, kalman_auto, …    | filter + calibration + AdamW + d on the same vector, noise excluded  |
    | update | normal_                          | torch's own float32 normals for the vector (one thread, no key)      |
    | update | noise                            | white noise for the vector                                           |
    | update | noise-banded-16, reads-16        | banded noise with 16 bands; reading 16 such vectors once             |
    | update | noise+fiber                      | noise and update together                                            |

Interleaving makes a slow minute of a shared machine slow for every variant alike, so compare ratios, not seconds.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from fiberdp import _validate
from fiberdp._random import Keys, one_thread
from fiberdp.filters import EMA, FILTERS, Identity, Innovation
from fiberdp.mechanisms import Banded
from fiberdp.moments import Exact, NoCorrection, Steady
from fiberdp.optim import AdamW, Constant, Optimizer
from fiberdp.record import versions
from fiberdp.types import ClippedSum, Noise, Release

MODELS = ("update",)
Variant = Callable[[], Any]


def bench(
    models: tuple[str, ...] = MODELS, *, elements: int = 20_000_000, rounds: int = 7, progress: Callable[[str], None] = print
) -> dict:
    """{"rows": [{model, variant, batch_size, seconds, ratio, spread, peak_mib}], "versions", "threads"}.

    seconds: median over `rounds` interleaved rounds, after one that is not counted (it compiles).  ratio: median of the ratios to the
    baseline of the same round.  spread: half the interquartile range of that ratio.
    Raises ValueError for a model that is not in the table.
    """
    for model in models:
        _validate.choice("model", model, MODELS)
    _validate.count("elements", elements, why="It is the length of the vector.")
    _validate.count("rounds", rounds, why="It is how often everything is timed.")
    rows = _interleaved("update", update_variants(elements), rounds, progress)
    return {"rows": rows, "elements": elements, "rounds": rounds, "threads": torch.get_num_threads(), "versions": versions()}


def update_variants(elements: int) -> dict[str, Variant]:
    """The functions of model `update`; the first is the baseline."""
    theta, g = torch.randn(elements), 0.01 * torch.randn(elements)
    theta.grad = g.clone()
    baseline = torch.optim.AdamW([theta], lr=1e-3, fused=True)
    release = Release(g, Noise(0.01))
    stream, sigma, bands = Keys.seeded(0).stream("noise"), 1.0, 16

    def optimizer(filter: Any, calibration: Any) -> Optimizer:
        return Optimizer(
            torch.randn(elements), filter=filter, calibration=calibration, update=AdamW(lr=1e-3), schedule=Constant(), steps=1,
            groups=[slice(0, elements // 2), slice(elements // 2, elements)],
        )  # fmt: skip

    fiber = optimizer(Innovation(), Steady())
    others = {
        "dp-adamw": optimizer(Identity(), NoCorrection()),
        "disk-corr": optimizer(EMA(), Steady()),
        **{name: optimizer(FILTERS[name](), Exact()) for name in ("innovation", "lowpass", "kalman", "kalman_auto")},
    }
    white, banded = torch.zeros(elements), torch.zeros(elements)
    gate = Banded(strategy="bandmf", bands=bands).gate(noise_multiplier=sigma, batch_size=1, steps=1000, separation=bands)
    memory = gate.init(banded)

    def noise_banded() -> None:
        gate.release(ClippedSum(banded, 1.0), stream, int(memory["t"]), memory)

    def reads() -> None:
        """Each of the 15 vectors of the memory and one more, read once and added up: the least that banded noise can cost."""
        with one_thread():
            torch.addmv(white, memory["w"].t(), torch.full((bands - 1,), 1e-9), out=white)

    def noise_and_fiber() -> None:
        stream.add_normal_(g, step=0, scale=0.01)
        fiber.step(release)

    return {
        "adamw-fused": baseline.step,
        "fiber": lambda: fiber.step(release),
        **{name: (lambda o=o: o.step(release)) for name, o in others.items()},
        "normal_": white.normal_,
        "noise": lambda: stream.add_normal_(white, step=0, scale=1.0),
        "noise+fiber": noise_and_fiber,
        f"reads-{bands}": reads,
        f"noise-banded-{bands}": noise_banded,
    }


def _interleaved(model: str, variants: dict[str, Variant], rounds: int, progress: Callable[[str], None]) -> list[dict[str, Any]]:
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for round in range(-2, rounds):  # the first round compiles, the second warms the memory
        progress(f"{model}: round {max(0, round + 1)} of {rounds}")
        for name, run in variants.items():
            started = time.perf_counter()
            run()
            if round >= 0:
                seconds[name].append(time.perf_counter() - started)
    baseline = next(iter(seconds.values()))
    rows = []
    for name, times in seconds.items():
        ratios = [a / b for a, b in zip(times, baseline)]
        low, _, high = statistics.quantiles(ratios, n=4) if rounds > 1 else (ratios[0],) * 3
        rows.append(
            {
                "model": model, "variant": name, "batch_size": None, "seconds": statistics.median(times),
                "ratio": statistics.median(ratios), "spread": (high - low) / 2, "peak_mib": None,
            }
        )  # fmt: skip
    return rows
