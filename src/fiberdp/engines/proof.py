"""What is checked at set-up on synthetic examples: that examples do not meet in the loss, and that a fast engine agrees with the oracle."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fiberdp import _tree
from fiberdp.engines.capture import Site, name_of
from fiberdp.engines.layers.derived import Derived
from fiberdp.engines.layers.fallback import Fallback
from fiberdp.engines.loop import LoopEngine
from fiberdp.engines.loss import Loss, random_state
from fiberdp.engines.synthetic import REFUSALS, examples, without_dropout
from fiberdp.flat import FlatParameters
from fiberdp.types import Probe

LIMIT = {torch.float32: 1e-4, torch.float64: 1e-8}
"""Largest relative error of one parameter's clipped sum, and of a loss.  float32 models reach 1e-6; a wrong rule is off by far more."""

SMALLEST_SHARE = 1e-2
"""Of the sum of all examples' norms: smaller sums are measured against this, since what cancels has no digits of its own."""


@dataclass(frozen=True)
class Whole:
    """u itself: here a wrong gradient is wrong, and spoils no other parameter's factor."""

    sensitivity: float = float("inf")

    def groups(self, names: Sequence[str]) -> list[int]:
        return [0] * len(names)

    def factors(self, norms: Tensor) -> Tensor:
        return torch.ones_like(norms)


@dataclass(frozen=True)
class _Normalised:
    """u / (||u|| + 1e-3): every example's factor depends on its norm, whatever the scale, so a wrong norm is a wrong sum."""

    sensitivity: float = 1.0

    def groups(self, names: Sequence[str]) -> list[int]:
        return [0] * len(names)

    def factors(self, norms: Tensor) -> Tensor:
        return 1 / (norms + 1e-3)


def check_independent(loss: Loss, flat: FlatParameters, row: Any) -> None:
    """Raise ValueError if the loss of one example depends on another example, or on how many there are.

    Three synthetic examples: the losses of the last two must stay when the first is replaced, and be what each has alone.  The second
    is asked without dropout, and of models that draw no other random numbers.  No data are read: `row` gives the structure.
    """
    device, k = flat.theta.device, loss.multiplicity
    parameters = flat.views(flat.theta.detach())
    batch, other = (examples(loss, row, 3, seed, device) for seed in (1, 2))
    replaced = _first_replaced(batch, other, k)

    def losses(of: Any, rows: int, seed: int = 0) -> Tensor:
        with torch.no_grad(), random_state(seed, device):
            return loss.at(parameters, of, rows * k)

    def same(a: Tensor, b: Tensor) -> bool:
        tolerance = LIMIT[flat.theta.dtype]
        finite = a.detach()[a.isfinite()].abs()
        return torch.allclose(a, b, rtol=tolerance, atol=tolerance * float(finite.max()) if len(finite) else 0.0, equal_nan=True)

    before = losses(batch, 3)
    if not same(before[k:], losses(replaced, 3)[k:]):
        raise ValueError(
            "loss_fn gives an example another loss when another example of the batch is replaced: each loss must depend on its own example "
            "only, because clipping one example's gradient bounds nothing that others carry. Leave out what mixes examples (statistics of "
            "the batch, in-batch negatives, sorting)."
        )
    with without_dropout(loss.module):
        whole, alone = losses(batch, 3)[k : 2 * k], losses(_tree.take(batch, slice(k, 2 * k)), 1)
        if not same(whole, alone) and same(whole, losses(batch, 3, seed=1)[k : 2 * k]):
            raise ValueError(
                "loss_fn gives an example another loss in a batch of 3 than alone: each loss must depend on its own example only, because "
                "the number of examples in memory may not decide how much each counts. Do not divide by the size of the batch."
            )


def compare(
    engine: Any, loss: Loss, row: Any, probes: Sequence[Probe], *, count: int = 3, seed: int = 0, clip: Any = None
) -> dict[str, float]:
    """Per parameter, how far the engine's clipped sum is from the loop oracle's, on `count` synthetic examples without dropout.

        || ours - oracle || / max(|| oracle ||, 1 % of the sum of all clipped norms)

    d is 0.01 z, so that layers that start at zero are tested as well.  clip: by default one that depends on every norm.
    """
    flat: FlatParameters = engine.flat
    device = flat.theta.device
    generator = torch.Generator().manual_seed(seed)
    d = torch.randn(flat.numel, generator=generator, dtype=flat.theta.dtype).mul_(0.01).to(device)
    batch = engine_batch(loss, row, count, seed, device)
    clip, norms = clip or _Normalised(), []
    with without_dropout(loss.module):
        oracle = LoopEngine(flat, loss).clipped_sum(probes, d, batch, clip, seed=seed, tap=lambda _, norm: norms.append(norm)).total
        ours = engine.clipped_sum(probes, d, batch, clip, seed=seed).total.sub_(oracle)
    each = torch.cat(norms)
    least = max(SMALLEST_SHARE * float((clip.factors(each) * each).nansum()), torch.finfo(torch.float64).tiny)
    wrong, right = flat.views(ours), flat.views(oracle)
    return {name: float(error.double().norm()) / max(float(right[name].double().norm()), least) for name, error in wrong.items()}


def prove(engine: Any, loss: Loss, row: Any, probes: Sequence[Probe]) -> None:
    """Raise ValueError unless the engine's clipped sum is the oracle's, naming the worst parameter and the rule that serves it.

    One evaluation by each on 2 examples; more only if they disagree, see `settled`.
    """
    flat: FlatParameters = engine.flat
    where = probes if len({probe.lookahead for probe in probes}) > 1 else [Probe(1.0, 1.0)]
    errors = settled(engine, loss, row, where, count=2)
    if passed(errors, LIMIT[flat.theta.dtype]):
        return
    whole = compare(engine, loss, row, where, count=2, clip=Whole())
    errors = whole if not passed(whole) else errors
    worst, limit = max(errors, key=lambda name: badness(errors[name])), LIMIT[flat.theta.dtype]
    raise ValueError(
        f"parameter {worst}, served by {' + '.join(rules(engine)[worst]) or 'no rule'}: on synthetic examples engine {engine.name} gives a "
        f"sum that is {errors[worst]:.1e} off the oracle's, relatively; at most {limit:g} is allowed, because clipping bounds "
        "nothing where norms are wrong. Use engine='vmap' or engine='loop'."
    )


def settled(engine: Any, loss: Loss, row: Any, probes: Sequence[Probe], *, count: int = 3, seed: int = 0) -> dict[str, float]:
    """`compare`, and if float32 disagrees the errors of a copy in float64.

    Rounding flips a ReLU or a maximum of a large model now and then, which moves its gradient by 1e-3; a wrong rule is wrong in any
    precision.
    Of one example if the model draws random numbers itself, which then are the same in both.  Where the model cannot run in float64, or
    float32 is off by more than 5 %, the float32 errors stand.
    """
    errors = compare(engine, loss, row, probes, count=count, seed=seed)
    if passed(errors, LIMIT[engine.flat.theta.dtype]):
        return errors
    if _draws(loss, engine.flat, row):
        count = 1
        errors = compare(engine, loss, row, probes, count=count, seed=seed)
    if engine.flat.theta.dtype != torch.float32 or passed(errors) or not passed(errors, 0.05):
        return errors
    try:
        module = copy.deepcopy(loss.module).double()
        wide = Loss(module, loss.loss_fn, loss.multiplicity)
        row = _tree.map_leaves(lambda leaf: leaf.double() if isinstance(leaf, Tensor) and leaf.dtype == torch.float32 else leaf, row)
        return compare(type(engine)(FlatParameters(module), wide), wide, row, probes, count=count, seed=seed)
    except REFUSALS:
        return errors


def passed(errors: dict[str, float], limit: float = LIMIT[torch.float32]) -> bool:
    return all(error <= limit for error in errors.values())  # NaN is not


def rules(engine: Any) -> dict[str, list[str]]:
    """Per parameter, the rule of each use, in order: `linear`; `derived via linear` where a tensor computed from it is used."""
    found: dict[str, list[str]] = {slot.name: [] for slot in engine.flat.slots}
    if not hasattr(engine, "sites"):
        return {name: [engine.name] for name in found}
    sources: list[set[str]] = []  # of every derived tensor
    for site in engine.sites or []:
        used = {ref.name for ref in site.refs if ref.name}
        behind = set().union(*(sources[ref.derived] for ref in site.refs if not ref.name)) - used
        if isinstance(site, Derived):
            sources += [used | behind] * site.results
            continue
        for name in used | behind:
            found[name].append(_said(site) if name in used else f"derived via {_said(site)}")
    return {name: list(dict.fromkeys(uses)) for name, uses in found.items()}


def _said(site: Site) -> str:
    return f"{site.rule} fallback of {name_of(site.function)}" if isinstance(site, Fallback) else site.rule


def badness(error: float) -> float:
    """By which errors are ordered."""
    return error if error == error else float("inf")  # NaN is worst


def _draws(loss: Loss, flat: FlatParameters, row: Any) -> bool:
    """Whether the losses depend on the random state, dropout switched off."""
    device = flat.theta.device
    batch, found = examples(loss, row, 1, 0, device), []
    for seed in (0, 1):
        with torch.no_grad(), random_state(seed, device), without_dropout(loss.module):
            found.append(loss.at(flat.views(flat.theta.detach()), batch, loss.multiplicity))
    return not torch.equal(*found)


def _first_replaced(batch: Any, other: Any, rows: int) -> Any:
    replacements = iter(_tree.leaves(other))

    def replaced(leaf: Any) -> Any:
        new = next(replacements)
        return torch.cat([new[:rows], leaf[rows:]]) if isinstance(leaf, Tensor) else new[:rows] + leaf[rows:]

    return _tree.map_leaves(replaced, batch)


def engine_batch(loss: Loss, row: Any, count: int, seed: int, device: torch.device) -> Any:
    """`count` synthetic examples as an engine takes them: with K > 1 copies, [b K, …] is [b, K, …]."""
    batch, k = examples(loss, row, count, seed, device), loss.multiplicity

    def apart(leaf: Any) -> Any:
        return leaf.unflatten(0, (-1, k)) if isinstance(leaf, Tensor) else [leaf[i : i + k] for i in range(0, len(leaf), k)]

    return _tree.map_leaves(apart, batch) if k > 1 else batch
