"""An audit of a recipe, or of what a run was: the same method, noise and sampling, with canaries among the rows."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fiberdp import _validate
from fiberdp._random import Keys
from fiberdp.diagnostics.audit import Audit, audit, random_canaries
from fiberdp.experiment import tuned_method
from fiberdp.methods import Method
from fiberdp.planning import Plan, plan
from fiberdp.recipes import recipe_named
from fiberdp.sampling.source import as_source


def audit_named(
    target: str,
    *,
    method: str | Method | None = None,
    epsilon: float | None = None,
    delta: float | None = None,
    canaries: int = 10_000,
    guesses: int | None = None,
    attack: str = "sum",
    confidence: float = 0.95,
    steps: int | None = None,
    sampling: str | None = None,
    data: str | None = None,
    seed: int | None = None,
    engine: str = "ghost",
    progress: Callable[[int, int], None] = lambda done, steps: None,
) -> Audit:
    """See `fiberdp.diagnostics.audit.audit`.  target: the name of a recipe, or a run directory whose configuration is taken.

    A run cannot be audited after the fact, for want of canaries; its configuration is run again with them, on the same rows.
    The sampling rate and the number of steps are those without canaries, so the batch grows with the rows.  delta: 0.01 / canaries if
    None, because the bound is void unless delta is far below one in their number.  Of a recipe, sigma is calibrated for epsilon at that
    delta; of a run, sigma is the run's, and epsilon is what it costs at that delta.
    Raises ValueError in one line for bad input.
    """
    config = _config(Path(target)) if Path(target).is_dir() else {}
    given = {"method": method, "epsilon": epsilon, "steps": steps, "sampling": sampling}
    for name, value in given.items() if config else ():
        if value is not None:
            raise ValueError(f"{name}={value!r}: {target} is a run, audited with what it was made with. Leave it out, or name the recipe.")
    chosen = recipe_named(config.get("recipe", target))
    _validate.count("canaries", canaries, low=20, why="A tenth of them is guessed, and each guess is one coin.")
    rows = chosen.load(data)["train"]
    if not isinstance(rows, dict):
        raise ValueError(
            f"audit {target}: its rows have different lengths, and a canary is a row of one shape: recipes of images can be audited. "
            "Choose one, or audit your own model with fiberdp.diagnostics.audit."
        )
    own = len(as_source(rows))
    whole = own + canaries
    delta = 0.01 / canaries if delta is None else delta

    batch_size = round((config["plan"]["batch_size"] if config else chosen.batch_size) * whole / own)
    if config:
        agreed = Plan.from_json(config["plan"] | {"num_examples": whole, "batch_size": batch_size, "delta": delta})
    else:
        agreed = plan(
            method=tuned_method(chosen, method or "fiber", {}),
            num_examples=whole,
            batch_size=batch_size,
            epochs=chosen.epochs if steps is None else None,
            steps=steps,
            epsilon=chosen.epsilon if epsilon is None else epsilon,
            delta=delta,
            clip_norm=chosen.clip_norm,
            sampling=sampling,
        )
    keys = Keys.secret() if seed is None else Keys.seeded(seed)
    marked = random_canaries(rows, canaries, seed=keys.stream("audit").seed(1))
    return audit(
        agreed, chosen.fresh(keys, data=data), chosen.loss, rows, marked,
        attack=attack, guesses=guesses, confidence=confidence, keys=keys, engine=engine, progress=progress,
    )  # fmt: skip


def _config(folder: Path) -> dict[str, Any]:
    path = folder / "release" / "config.json"
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        raise ValueError(
            f"{folder} holds no finished run: {path} is read for its configuration. Name a recipe, or a run that ended."
        ) from None
