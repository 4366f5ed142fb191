"""A whole run: recipe -> plan -> proof -> training -> record."""

from __future__ import annotations

import contextlib
import errno
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fiberdp import _validate
from fiberdp._random import Keys
from fiberdp._ranks import Ranks
from fiberdp.augmentation import NoAugmentation
from fiberdp.checkpoint import load_checkpoint, require_checkpoint
from fiberdp.mechanisms import White, WhiteOnGrid
from fiberdp.methods import Method
from fiberdp.methods import method as method_named
from fiberdp.optim import EMAWeights
from fiberdp.planning import plan
from fiberdp.recipes import Recipe, recipe_named
from fiberdp.record import differences
from fiberdp.run_directory import Reporter, RunDirectory, Silent, only_writer, refuse_used
from fiberdp.sampling.source import as_source
from fiberdp.scaling import SecondMoment
from fiberdp.trainer import Run


def fit(
    recipe: str | Recipe,
    *,
    method: str | Method = "fiber",
    options: dict[str, Any] | None = None,
    multiplicity: int | None = None,
    averaging: float | None = None,
    scaling: float | None = None,
    epsilon: float | None = None,
    delta: float | None = None,
    clip_norm: float | None = None,
    clip: str = "flat",
    batch_size: int | None = None,
    epochs: int | None = None,
    steps: int | None = None,
    sampling: str | None = None,
    groups: int | None = None,
    accountant: str | None = None,
    data: str | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    seed: int | None = None,
    device: str = "cpu",
    engine: str = "ghost",
    precision: str = "float32",
    micro_batch_size: int | None = None,
    exact_noise: bool = False,
    unaccounted: bool = False,
    test: bool = True,
    reporter: Reporter | None = None,
) -> dict[str, Any]:
    """Train a recipe privately and return its record (the content of record.json).

    What is None comes from the recipe.  method: a name of the table, or a composition (`fiberdp.Method`).  options: changes to a named
    method (lr, omega, kappa, …).  multiplicity: K augmented copies an example, by the recipe's augmentation unless the method has its
    own; averaging: decay of an average of the weights, evaluated and released beside them.  scaling: offset of a `SecondMoment` before
    the clip.  exact_noise: white noise in exact arithmetic (`WhiteOnGrid`).
    out: the run directory, which must be new, or hold the run to `resume`; without it nothing is written.
    seed: derive every stream from it (reproducible, and not private
    against who knows it); by default keys are secret.  unaccounted: also keep raw training statistics, in the secret folder.
    test: evaluate on the test rows at the end (leave it out while tuning).

    Under torchrun, after torch.distributed.init_process_group(): all processes call this alike and get the same record; the first writes.

    Guarantee: see `fiberdp.trainer.Run`.  The held-out and test metrics stand outside epsilon: their rows are never trained on.
    Raises ValueError in one line for bad input, before anything is written, and for an `out` that another run is writing to; OSError in
    one line if the disk refuses: what is in `out` can then be resumed.
    """
    chosen = recipe_named(recipe)
    tuned = extended_method(
        chosen, tuned_method(chosen, method, options or {}), multiplicity=multiplicity, averaging=averaging, scaling=scaling,
        exact_noise=exact_noise,
    )  # fmt: skip
    ranks = Ranks.joined()
    if unaccounted and ranks.count > 1:
        raise ValueError(
            f"unaccounted with {ranks.count} processes: each sees the raw gradients of its share alone, and no statistics of the whole. "
            "Leave it out, or train in one process."
        )
    folder = ranks.from_first(lambda: _folder(out, resume))
    if epsilon is not None:
        _validate.positive("epsilon", epsilon, why="It bounds the privacy loss: typical values are 0.5 to 8.")
    if delta is not None:
        _validate.interval("delta", delta, 0, 1, open_low=True, open_high=True, why="It is a failure probability: choose it below 1/N.")
    if epochs is not None and steps is not None:
        raise ValueError(f"epochs={epochs}, steps={steps}: only one may be given, because each determines the other. Drop one.")
    target = _device(device)
    with contextlib.ExitStack() as held:
        saved, state = ranks.from_first(lambda: _saved(folder, held)) if folder and resume else ({}, {})
        rows = chosen.load(data)
        train = as_source(rows["train"])
        num_examples = len(train)
        agreed = plan(
            method=tuned,
            num_examples=num_examples,
            batch_size=chosen.batch_size if batch_size is None else batch_size,
            epochs=None if steps is not None else (chosen.epochs if epochs is None else epochs),
            steps=steps,
            epsilon=chosen.epsilon if epsilon is None else epsilon,
            delta=chosen.delta(num_examples) if delta is None else delta,
            clip_norm=chosen.clip_norm if clip_norm is None else clip_norm,
            clip=clip,
            sampling=sampling,
            groups=groups,
            accountant=accountant,
        )
        fresh = Keys.secret() if seed is None else Keys.seeded(seed)
        keys = Keys.from_json(ranks.from_first(lambda: state["keys"] if state else fresh.to_json()))
        config = {
            "recipe": chosen.name, "method": tuned.name, "seed": seed, "device": device, "engine": engine, "precision": precision,
            "plan": agreed.to_json(),
        }  # fmt: skip
        if state:
            _same_run(state["config"], config)
            micro_batch_size = micro_batch_size or state["micro_batch_size"]
            engine = state["engine"]  # what "auto" chose may not change on the way

        model = chosen.fresh(keys, target, data)
        run = Run(agreed, model, chosen.loss, train, keys=keys, engine=engine, precision=precision, micro_batch_size=micro_batch_size)
        trained = RunDirectory(folder, run, config, chosen, rows, reporter or Silent(), unaccounted, held)
        trained.prepare(saved, state)
        trained.train()
        return trained.finish(test)


def _saved(folder: Path, held: contextlib.ExitStack) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The checkpoint, with the folder taken."""
    held.enter_context(only_writer(folder))
    if (folder / "record.json").exists():
        raise ValueError(f"{folder} holds a finished run: there is nothing to resume. Its result is in record.json.")
    return load_checkpoint(folder / "resume")


def tuned_method(recipe: Recipe, method: str | Method, options: dict[str, Any]) -> Method:
    """A name of the table with the recipe's tuned options and the caller's; or a composition, as it is."""
    if isinstance(method, str):
        return method_named(method, **{**recipe.options.get(method, {}), **options})
    if options:
        raise ValueError(f"options {', '.join(options)} with a composed method: it already says everything. Use dataclasses.replace on it.")
    return method


def extended_method(
    recipe: Recipe,
    method: Method,
    *,
    multiplicity: int | None = None,
    averaging: float | None = None,
    scaling: float | None = None,
    exact_noise: bool = False,
    **_: Any,
) -> Method:
    """The method that `fit` trains: `method` with the parts that these settings of `fit` put in.  Other settings are not looked at."""
    if multiplicity is not None:
        method = replace(method, augmentation=replace(_augmentation(recipe, method), multiplicity=multiplicity))
    if averaging is not None:
        method = replace(method, averaging=EMAWeights(decay=averaging))
    if scaling is not None:
        method = replace(method, scaling=SecondMoment(offset=scaling))
    if exact_noise:
        method = replace(method, mechanism=_exact(method.mechanism))
    return method


def _exact(mechanism: Any) -> WhiteOnGrid:
    if not isinstance(mechanism, White):
        raise ValueError(
            f"exact_noise with noise {mechanism.name!r}: the noise must be white, because correlated noise is made of the past noise in "
            "floating point, which no rounding makes exact. Choose a method with white noise, or leave exact_noise out."
        )
    return WhiteOnGrid()


def _augmentation(recipe: Recipe, method: Method) -> Any:
    if not isinstance(method.augmentation, NoAugmentation):
        return method.augmentation
    if recipe.augmentation is None:
        raise ValueError(
            f"multiplicity with recipe {recipe.name}: it has no augmentation, so there is nothing to make copies with. Leave multiplicity "
            "out, or give a method with augmentation=CropFlip(…)."
        )
    return recipe.augmentation


def _folder(out: str | Path | None, resume: bool) -> Path | None:
    if out is None:
        if resume:
            raise ValueError("resume without --out: the run directory must be named, because the checkpoint lies in it. Give --out DIR.")
        return None
    folder = Path(out)
    try:
        nearest = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        if not nearest.is_dir():
            raise ValueError(f"--out {folder}: {nearest} is a file: a run directory must be a folder. Choose another name.")
        if not os.access(nearest, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, f"{nearest} may not be written to")
        if resume:
            require_checkpoint(folder / "resume")
        else:
            refuse_used(folder)
    except OSError as error:
        raise ValueError(
            f"--out {folder} cannot be used ({error.strerror}): the ledger must be on disk before each release. Give write access, or "
            "choose another folder."
        ) from error
    return folder


def _device(device: str) -> torch.device:
    try:
        target = torch.device(device)
        torch.empty(0, device=target)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(
            f"device={device!r} cannot be used here ({str(error).splitlines()[0]}): it must be one that torch sees. Use --device cpu."
        ) from error
    return target


def _same_run(before: dict[str, Any], now: dict[str, Any]) -> None:
    """Raise ValueError naming the first setting in which the resumed run would differ."""
    for where, old, new in differences(before, json.loads(json.dumps(now))):
        raise ValueError(
            f"resume with {where}={new}, but the run was started with {old}: the plan must be the same, because epsilon "
            "was calibrated for it. Repeat the options of the first call."
        )
