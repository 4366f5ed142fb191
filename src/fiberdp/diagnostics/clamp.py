"""How much of the update the floor decides (paper, appendix E.6, Figures 7 and 13).

    clamp mass_t = Sum_i 1[v-_i = eps_v] |m^_i| / Sum_i |m^_i|,          v- = max(v^ - phi, eps_v)

Near 0 the floor is a safeguard; near 1 every coordinate takes the step that the floor sets, and Adam's adaptivity is gone.  One run for
each floor, with the same model, batches and noise.  "auto" is the floor that follows the noise (`moments/calibration.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from fiberdp import _validate
from fiberdp._random import Keys
from fiberdp.diagnostics.folder import BLUE, GREEN, GREY, ORANGE, PURPLE, Advance, Table, unheard
from fiberdp.diagnostics.runs import subject
from fiberdp.evaluation import evaluate
from fiberdp.recipes import Recipe

FLOORS: tuple[float | str, ...] = (1e-8, 1e-7, 1e-6, 1e-5, "auto")
PAPER = {1e-8: "< 0.01", 1e-7: "near 0", 1e-6: "> 0.8", 1e-5: "> 0.8", "auto": "–"}

TEXT = (
    "Clamp mass: the share of the update on coordinates whose second moment is held at the floor ε_v. One run of fiber for each floor, "
    "with the same model, batches and noise. The paper's figures are for CIFAR-10 with CNN5 at ε = 1; what a fixed floor does depends on "
    "the size of σ_w², which C, B and σ set. At the full noise v̂ scatters around what is subtracted, so that even a tiny floor holds many "
    "coordinates."
)


def clamp(
    *,
    recipe: str | Recipe = "digits",
    steps: int | None = None,
    epsilon: float | None = None,
    floors: Sequence[float | str] = FLOORS,
    seed: int = 0,
    data: str | None = None,
    advance: Advance = unheard,
) -> dict[str, Any]:
    """One run of the method fiber for each floor.  steps: the recipe's epochs if None.

    Returns rows [{eps_v, clamp_mass (mean after the warm-up, an eighth of the steps), final (of the last step), heldout (accuracy)}],
    settings, and series {eps_v: clamp mass of each step}.  Raises ValueError for bad input.
    """
    it = subject(recipe, None, steps=steps, epsilon=epsilon, data=data)
    total = it.plan.steps
    warm_up = total // 8
    _validate.count("steps", total, low=2, why="The mean is taken after a warm-up.")
    rows, series = [], {}
    for i, eps_v in enumerate(floors):
        method = it.plan.method
        calibration = replace(method.calibration, eps_v=eps_v)
        run = it.with_method(replace(method, calibration=calibration)).make(Keys.seeded(seed))
        masses = []
        for step in run:
            masses.append(run.optimizer.clamp_mass())
            advance(i * total + step.step + 1, len(floors) * total)
        heldout = evaluate(it.recipe.metrics, run.model, it.rows["heldout"])[it.recipe.metric]
        rows.append({"eps_v": eps_v, "clamp_mass": float(np.mean(masses[warm_up:])), "final": masses[-1], "heldout": heldout})
        series[str(eps_v)] = masses
    noise = it.plan.charged_noise(0)
    return {
        "rows": rows,
        "settings": {
            "recipe": it.recipe.name, "method": it.plan.method.name, "epsilon": it.plan.epsilon, "steps": total, "warm_up": warm_up,
            "seed": seed, "sigma_w_squared": noise.std**2,
        },
        "series": series,
    }  # fmt: skip


def tables(found: dict[str, Any]) -> list[Table]:
    rows = []
    for row in found["rows"]:
        eps_v = row["eps_v"]
        name = eps_v if isinstance(eps_v, str) else f"{eps_v:.0e}"
        rows.append((name, PAPER.get(eps_v, "–"), f"{row['clamp_mass']:.4f}", f"{row['final']:.4f}", f"{row['heldout']:.4f}"))
    title = f"Clamp mass for each floor (Figures 7 and 13); noise variance σ_w² = {found['settings']['sigma_w_squared']:.3g}"
    return [Table(title, ("ε_v", "paper, CIFAR-10", "clamp mass", "last step", "held-out accuracy"), rows)]


def draw(found: dict[str, Any], figure: Any) -> None:
    """Figure 13: clamp mass over the steps."""
    figure.set_size_inches(7.2, 4.0)
    axis = figure.subplots()
    axis.axvspan(0, found["settings"]["warm_up"], color="#f2f2f2", lw=0)
    looks = ((BLUE, "-"), (GREEN, "--"), (ORANGE, "-"), (PURPLE, "--"), (GREY, "-."))
    for (name, masses), (colour, dashes) in zip(found["series"].items(), looks * 3):
        axis.plot(np.arange(1, len(masses) + 1), masses, color=colour, ls=dashes, label=f"ε_v = {name}")
    for height, words in ((0.8, "paper: above, for ε_v ≥ 1e-6"), (0.01, "paper: below 0.01, for ε_v ≤ 1e-7")):
        axis.axhline(height, color="black", lw=0.8, ls=":")
        axis.text(0.99 * found["settings"]["steps"], height + 0.01, words, ha="right", va="bottom", fontsize=8)
    axis.set(xlabel="step (grey: not in the means)", ylabel="clamp mass", ylim=(-0.02, 1.02), xlim=(0, found["settings"]["steps"]))
    axis.set_title(f"Share of the update that the floor decides: {found['settings']['recipe']}, ε = {found['settings']['epsilon']:.3g}")
    axis.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
