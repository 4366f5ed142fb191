"""Which rule serves each parameter of a model, and how far its clipped sum is from the oracle's: `fiberdp check`."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from inspect import Parameter, signature
from typing import Any

import torch
from torch import nn

from fiberdp import _tree, _validate
from fiberdp.engines import ENGINES, Loss, LossFn, check_independent, check_loss, check_model, rules
from fiberdp.engines.proof import LIMIT, badness, settled
from fiberdp.flat import FlatParameters
from fiberdp.types import Probe

PROBES = ([Probe(1.0, 0.0)], [Probe(0.4, 0.0), Probe(0.6, 0.7)])


def check(
    model: nn.Module, loss_fn: LossFn, batch: Any, *, name: str = "model", engine: str = "ghost", examples: int = 3
) -> dict[str, Any]:
    """{"model", "engine", "parameters": [{"name", "shape", "rules", "error"}], "max_error", "passed"}.

    batch: at least one row, read for its structure only.  rules: of each use of the parameter, in order; empty if the loss does not use
    it.  error: the larger of one probe and two, relative, see `fiberdp.engines.proof.settled`.  passed: none above 1e-4 (float64: 1e-8).
    The model's parameters become views into one vector, as in a run; their values and modes stay.
    Raises ValueError for what a run would refuse: more than one number an example, examples that meet, layers no engine can clip.
    """
    _validate.choice("engine", engine, tuple(ENGINES))
    _validate.count("examples", examples, why="It is how many synthetic examples are compared.")
    check_model(model)
    flat, loss = FlatParameters(model), Loss(model, loss_fn)
    row = _tree.take(_tree.normal(batch), slice(0, 1))
    if _tree.rows(row) != 1:
        raise ValueError("batch has no rows: at least one is needed, because its structure is read from it. Give a batch of one example.")
    check_loss(loss, flat.views(flat.theta), row)
    check_independent(loss, flat, row)
    worker = ENGINES[engine](flat, loss)
    found = [settled(worker, loss, row, probes, count=examples, seed=seed) for seed, probes in enumerate(PROBES)]
    used = rules(worker)
    errors = {slot.name: max((each[slot.name] for each in found), key=badness) for slot in flat.slots}
    parameters = [
        {"name": slot.name, "shape": list(slot.shape), "rules": used[slot.name], "error": errors[slot.name]} for slot in flat.slots
    ]
    worst = max(errors.values(), key=badness)
    passed = worst <= LIMIT[flat.theta.dtype]
    return {"model": name, "engine": engine, "parameters": parameters, "max_error": worst, "passed": passed}


def check_named(target: str, *, engine: str = "ghost", examples: int = 3) -> dict[str, Any]:
    """`check` of a recipe, of a model of `fiberdp bench`, or of what `module:function` returns: (model, loss_fn, batch).

    Raises ValueError, in one line, for a name that is none of these and for a function that returns something else.
    """
    model, loss_fn, batch = _found(target)
    return check(model, loss_fn, batch, name=target, engine=engine, examples=examples)


def _found(target: str) -> tuple[nn.Module, LossFn, Any]:
    from fiberdp.bench.models import MODELS
    from fiberdp.recipes import RECIPES

    if target in RECIPES:
        recipe = RECIPES[target]()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return recipe.build(), recipe.loss, recipe.row() if recipe.row else recipe.load(None)["train"]
    if target in MODELS:
        return MODELS[target].new(), MODELS[target].loss_fn, MODELS[target].batch(1)
    module, colon, function = target.partition(":")
    if not (colon and module and function):
        raise ValueError(
            f"{target!r} is no recipe, no model of `fiberdp bench` and not module:function: must be one of "
            f"{', '.join([*RECIPES, *MODELS])}, or the name of a function that returns (model, loss_fn, batch)."
        )
    try:
        make = getattr(import_module(module), function)
    except (ImportError, SyntaxError) as error:
        raise ValueError(f"{target}: {module} must be a module that can be imported, and {error}. Run where it can be found.") from error
    except AttributeError as error:
        raise ValueError(f"{target}: {module} has no {function}: it must be defined there to be called. Check its name.") from error
    if callable(make) and (needed := _needed(make)):
        raise ValueError(
            f"{target} needs {needed}: it must be callable without arguments, because nothing is known to call it with. Wrap it."
        )
    made = make() if callable(make) else make
    if not (isinstance(made, (tuple, list)) and len(made) == 3 and isinstance(made[0], nn.Module) and callable(made[1])):
        raise ValueError(
            f"{target} returned {_described(made)}: must be (model, loss_fn, batch), a module, a function of model and batch and a "
            "batch of at least one row, because these are what is checked. Return those three."
        )
    return made[0], made[1], made[2]  # pyright: ignore


def _needed(function: Callable[..., Any]) -> str:
    """The arguments that `function` cannot be called without."""
    optional = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
    return ", ".join(p.name for p in signature(function).parameters.values() if p.default is p.empty and p.kind not in optional)


def _described(made: Any) -> str:
    return f"({', '.join(type(part).__name__ for part in made)})" if isinstance(made, (tuple, list)) else type(made).__name__
