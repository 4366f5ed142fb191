"""Tune a method on held-out training rows, in stages (paper, appendix E.1): the base first, then (kappa, gamma), then omega.

    stage      options                                      trials of N
    base       lr, from the recipe's, and bands             what the others leave: N, or N/2 if there are others
    geometry   kappa, gamma of the observation              N/4, or N/2 without a filter stage
    filter     omega, or kappa of an EMA of its own         N/4, or N/2 without a geometry stage

Every stage keeps the best options of those before it, the defaults of those after it.  Every method gets the same N, so the number of
trials is no reason for a difference.  Tuning looks at rows that are never trained on; it is not charged to epsilon, and the result says so.
"""

from __future__ import annotations

import os
import random
import socket
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from fiberdp import _validate
from fiberdp._disk import make_folder, write_atomically
from fiberdp.experiment import tuned_method
from fiberdp.filters import EMA, Innovation
from fiberdp.mechanisms import Banded
from fiberdp.methods import METHODS, Method
from fiberdp.observation import TwoPoint
from fiberdp.optim import SGD
from fiberdp.recipes import Recipe, recipe_named
from fiberdp.record import differences, markdown_table, to_text, versions
from fiberdp.workers import Job, Observer, Unheard, records

KAPPA, GAMMA, OMEGA = (0.5, 0.6, 0.7, 0.8, 0.9), (0.6, 0.7, 0.8, 0.9), (0.6, 0.7, 0.8, 0.9, 0.99)  # Table 9
LR_ADAMW, LR_SGD = (1e-4, 1e-1), (2e-2, 5.0)
BANDS = (1, 2, 4, 8, 16)
START = (1, 2, 1 / 2, 4, 1 / 4, 8, 1 / 8)  # times the learning rate that the method has in the recipe: the first trials, then TPE
ATTEMPTS = 5
NOTE = (
    "Scored on held-out training rows, which are never trained on, by one run a trial with keys of one seed. Tuning is not charged to "
    "epsilon: on rows that must be protected, tune on others."
)


@dataclass(frozen=True)
class Stage:
    """lr: the first ones, then the ends of a range that is searched in its logarithm; None for none.  grid: what else is tried."""

    name: str
    trials: int
    lr: tuple[tuple[float, ...], tuple[float, float]] | None
    grid: tuple[dict[str, Any], ...]


def stages(method: Method, trials: int, most_bands: int) -> list[Stage]:
    """What is searched for this method, in this order, with `trials` in all.  most_bands: N // B, more would share examples."""
    later: list[tuple[str, tuple[dict[str, Any], ...]]] = []
    observation, filter = method.observation, method.filter
    if isinstance(observation, TwoPoint):
        if observation.a == 1:
            later.append(("geometry", _others(observation, [{"kappa": kappa} for kappa in KAPPA])))
        else:
            convex = [{"kappa": kappa, "gamma": gamma} for kappa, gamma in product(KAPPA, GAMMA) if gamma >= (1 - kappa) / kappa]
            later.append(("geometry", _others(observation, convex)))
    if isinstance(filter, Innovation):
        later.append(("filter", _others(filter, [{"omega": omega} for omega in OMEGA])))
    elif isinstance(filter, EMA) and not isinstance(observation, TwoPoint):  # DiSK's shares kappa with the geometry
        later.append(("filter", _others(filter, [{"kappa": kappa} for kappa in KAPPA])))
    shares = {0: [], 1: [trials // 2], 2: [trials // 4, trials // 4]}[len(later)]
    shares = [min(share, len(grid)) for share, (_, grid) in zip(shares, later)]
    bands: tuple[dict[str, Any], ...] = ({},)
    if isinstance(method.mechanism, Banded):
        bands = tuple({"bands": each} for each in sorted(BANDS, key=lambda each: each != method.mechanism.bands) if each <= most_bands)
    low, high = LR_SGD if isinstance(method.update, SGD) else LR_ADAMW
    first = tuple(dict.fromkeys(min(high, max(low, factor * method.update.lr)) for factor in START))
    base = Stage("base", trials - sum(shares), (first, (low, high)), bands)
    return [base, *(Stage(name, share, None, grid) for share, (name, grid) in zip(shares, later))]


def _others(part: Any, grid: list[dict[str, Any]]) -> tuple[dict[str, Any], ...]:
    """Without what the part has already: the base stage has tried that."""
    return tuple(options for options in grid if any(getattr(part, name) != value for name, value in options.items()))


def sweep(
    recipe: str | Recipe,
    *,
    method: str,
    trials: int = 20,
    epsilon: float | None = None,
    out: str | Path | None = None,
    storage: str | None = None,
    study: str | None = None,
    seed: int = 100,
    workers: int | None = None,
    observer: Observer | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Search the options of a method for a recipe at one epsilon; `trials` runs, the best held-out accuracy wins.

    out: a folder for sweep.json and sweep.md, and for the trials (sweep.db) unless `storage`, a database URL that Optuna reads
    (sqlite:///…, postgresql://…), is given: with one, several machines work on one study, and each goes on where all of them are.
    study: its name there.  seed: of the search and of every trial's keys, other than those that `compare` trains with.  settings: of
    `fiberdp.fit`, the same for all trials (epochs, batch_size, clip_norm, data, …).

    Returns JSON values: recipe, method, epsilon, trials [{number, stage, options, heldout, epsilon, std_ratio, seconds}], best {options,
    heldout}, budget, note.
    Raises ValueError for bad input, ImportError without optuna.
    """
    chosen = recipe_named(recipe)
    base = tuned_method(chosen, _validate.choice("method", method, tuple(METHODS)), {})
    budget = _validate.count("trials", trials, low=4, why="Every stage of the search needs one.")
    target = _validate.positive("epsilon", chosen.epsilon if epsilon is None else epsilon, why="It bounds the privacy loss.")
    folder = None if out is None else Path(out)
    if folder is not None and folder.exists() and not folder.is_dir():
        raise ValueError(f"--out {folder} is a file: it must be a folder for the trials. Choose another name.")
    optuna = _optuna()
    if folder is not None:
        make_folder(folder)
    named = study or f"{chosen.name}-{method}-eps{target:g}"
    kept = _study(optuna, named, storage or (f"sqlite:///{folder}/sweep.db" if folder else None))
    common = {"recipe": chosen.name, "method": method, "epsilon": target, "seed": seed} | settings
    _same_search(kept, common)
    watching = observer or Unheard()
    watching.planned(len(_complete(kept)), budget)
    best: dict[str, Any] = {}
    so_far: list[str] = []
    for stage in stages(base, budget, chosen.num_examples // (settings.get("batch_size") or chosen.batch_size)):
        open_trials: dict[str, Any] = {}
        job = {"recipe": recipe, "method": method, "epsilon": target, "seed": seed, "test": False, **settings}
        waiting = _jobs(kept, stage, best, job, open_trials, random.Random(f"{seed} {stage.name}"))
        for name, record in records(waiting, workers=workers, observer=watching):
            trial = open_trials.pop(name)
            for key, value in _kept(record).items():
                trial.set_user_attr(key, value)
            kept.tell(trial, record["result"]["heldout"])
        so_far.append(stage.name)
        best |= _best(kept, so_far)
    found = _result(kept, common, best, budget)
    if folder is not None:
        write_atomically(folder / "sweep.json", to_text(found | {"versions": versions()}))
        write_atomically(folder / "sweep.md", markdown(found))
    return found


def _optuna() -> Any:
    try:
        import optuna
    except ImportError:
        raise ImportError("a sweep needs optuna, which is not installed: pip install fiberdp[recipes].") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def _study(optuna: Any, name: str, storage: str | None) -> Any:
    """The study of that name, made if it is not there; trials of processes that died on this machine are given back."""
    study = None
    for attempt in range(ATTEMPTS):  # two processes that make the tables of a new database at once: one of them fails, and finds them
        try:
            study = optuna.create_study(study_name=name, storage=storage, direction="maximize", load_if_exists=True)
            break
        except Exception as error:
            if attempt == ATTEMPTS - 1:
                raise ValueError(
                    f"storage {storage!r} cannot be used ({str(error).splitlines()[0]}): it must be a database URL that answers, because "
                    "every trial is kept there. Give sqlite:///FILE or postgresql://…, or leave it out."
                ) from error
            time.sleep(0.1 * (attempt + 1))
    assert study is not None
    for trial in study.get_trials(states=(optuna.trial.TrialState.RUNNING,)):
        host, _, pid = trial.user_attrs.get("owner", ":0").rpartition(":")
        if host == socket.gethostname() and not Path(f"/proc/{pid}").exists():
            study.tell(trial.number, state=optuna.trial.TrialState.FAIL)
    return study


def _sampler(trial: int, seed: int, first: tuple[float, ...]) -> Any:
    """Of its own for each trial, or two processes would draw the same."""
    samplers = _optuna().samplers
    found = samplers.TPESampler(seed=(seed * 1_000_003 + trial) % 2**32, n_startup_trials=len(first), constant_liar=True)
    if trial >= len(first):
        return found
    with warnings.catch_warnings(action="ignore"):  # it is called experimental
        return samplers.PartialFixedSampler({"lr": first[trial]}, found)


def _same_search(study: Any, settings: dict[str, Any]) -> None:
    now = {name: value for name, value in settings.items() if value is not None}
    if "settings" not in study.user_attrs:
        study.set_user_attr("settings", now)
    for name, before, given in differences(study.user_attrs["settings"], now):
        raise ValueError(
            f"{name}={given}: study {study.study_name} was begun with {before}, and its trials must not differ in it. Repeat the options "
            "of the first call, or give another --study."
        )


def _jobs(
    study: Any, stage: Stage, best: dict[str, Any], job: dict[str, Any], open_trials: dict[str, Any], rng: random.Random
) -> Iterator[Job]:
    """Trials of the stage, one at a time, until all machines together have begun as many as it has."""
    order = list(stage.grid) if stage.lr else rng.sample(stage.grid, len(stage.grid))
    while True:
        begun = [t for t in study.trials if t.user_attrs.get("stage") == stage.name and t.state.name in ("RUNNING", "COMPLETE")]
        if len(begun) >= stage.trials:
            return
        tried = [t.user_attrs["options"] for t in begun]
        options = best | order[len(begun) % len(order)]
        if stage.lr is None:
            options = next(best | grid for grid in order if best | grid not in tried)
        trial = study.ask()
        trial.set_user_attr("owner", f"{socket.gethostname()}:{os.getpid()}")
        if stage.lr is not None:
            study.sampler = _sampler(trial.number, job["seed"], stage.lr[0])
            options = options | {"lr": trial.suggest_float("lr", *stage.lr[1], log=True)}
        trial.set_user_attr("options", options)
        trial.set_user_attr("stage", stage.name)  # the last: from here on others count it, and read its options
        name = f"{stage.name} {trial.number}: " + ", ".join(f"{option} {value:.4g}" for option, value in options.items())
        open_trials[name] = trial
        yield name, {**job, "options": options}


def _kept(record: dict[str, Any]) -> dict[str, Any]:
    return {
        "epsilon": record["privacy"]["epsilon"],
        "noise_multiplier": record["privacy"]["noise_multiplier"],
        "std_ratio": record["receipt"]["std_ratio"],
        "seconds": record["timing"]["seconds"],
    }


def _complete(study: Any) -> list[Any]:
    return [t for t in study.trials if t.state.name == "COMPLETE"]


def _best(study: Any, so_far: list[str]) -> dict[str, Any]:
    """The options of the best trial of these stages: one that finds nothing better changes nothing, and a later one is not looked at."""
    done = [t for t in _complete(study) if t.user_attrs["stage"] in so_far]
    return dict(max(done, key=lambda t: t.value).user_attrs["options"]) if done else {}


def _result(study: Any, settings: dict[str, Any], best: dict[str, Any], budget: int) -> dict[str, Any]:
    done = _complete(study)
    rows = [
        {"number": t.number, "heldout": t.value} | {k: t.user_attrs[k] for k in ("stage", "options", "epsilon", "std_ratio", "seconds")}
        for t in done
    ]
    return {
        **settings,
        "study": study.study_name,
        "budget": budget,
        "best": {"options": best, "heldout": max(t.value for t in done)},
        "trials": rows,
        "note": NOTE,
    }


def markdown(found: dict[str, Any]) -> str:
    """The trials, best first."""
    columns = ("held-out, %", "stage", "options", "epsilon", "noise / charged", "s")
    rows = [
        (
            f"{100 * t['heldout']:.2f}", t["stage"], ", ".join(f"{k} {v:.4g}" for k, v in t["options"].items()), f"{t['epsilon']:.4f}",
            f"{t['std_ratio']:.4f}", f"{t['seconds']:.0f}",
        )
        for t in sorted(found["trials"], key=lambda t: -t["heldout"])
    ]  # fmt: skip
    title = f"# {found['recipe']}: {found['method']} at epsilon {found['epsilon']:g}, {len(rows)} trials"
    return f"{title}\n\n{markdown_table(columns, rows)}\n\n{found['note']}\n"
