"""Exact clipped sums from book-keeping: per-example gradients are never formed where their factors are cheaper.

For a layer whose per-example gradient is a product of factors, grad W_i = Sum_s B_{i,s} A_{i,s}^T, a linear combination over
evaluation points is the same product with the factors of all points side by side along s.  So one forward and one backward to the
layers' outputs a point give all norms, and the clipped sum is one weighted product: no second backward, no [b, d].
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from fiberdp import _tree
from fiberdp.engines.capture import Capture, Record, Ref, Site
from fiberdp.engines.cost import materialised
from fiberdp.engines.layers import plan_sites
from fiberdp.engines.layers.conv import Conv, channels_last
from fiberdp.engines.loss import Loss, random_state, saved_bytes
from fiberdp.engines.parts import Dense, Outer, Part, Rows, Tied
from fiberdp.engines.points import points
from fiberdp.engines.sums import Clip, Tap, clip_factors, fitting_micro_batch
from fiberdp.engines.tracing import check_seen, trace
from fiberdp.flat import FlatParameters
from fiberdp.types import ClippedSum, Probe

LEAST_BUDGET, MOST_BUDGET, SMALL = 2**26, 2**30, 2**23  # bytes


class GhostEngine:
    """Sum_i clip(Sum_k w_k grad f(theta_k; xi_i)) without per-example gradients where factors do."""

    name: ClassVar[str] = "ghost"

    def __init__(self, flat: FlatParameters, loss: Loss, *, memory_budget: int | None = None) -> None:
        """memory_budget: bytes for what is captured, and as many for what is materialised; None: see `micro_batch_size`."""
        self.flat = flat
        self.loss = loss
        self._memory_budget = memory_budget
        self.memory_budget = memory_budget or 2**28
        self.sites: list[Site] | None = None
        self._channels_last: set[str] = set()  # weights that are given in this memory format

    def micro_batch_size(self, row: Any, num_probes: int, batch_size: int) -> int:
        """How many examples at a time, of `batch_size`, so that a step needs about the memory of a plain step a point.

            plain   = batch_size graph                              graph: what autograd keeps of one example
            budget  = points plain + two vectors of size d          unless `memory_budget` was given; within 64 MiB and 1 GiB
            example = graph + (points - 1) factors + gradients      factors: inputs and output gradients of the layers

        The batch is split evenly, at most 256 rows of copies at a time, or what 8 MiB hold: of a few kB each, examples cost more to hand
        around than to compute.  `row` is a batch of one example, read for its structure only.
        """
        if self.sites is None:
            self.prepare(row)
        copies, device = self.loss.multiplicity, self.flat.theta.device

        def held(examples: int) -> tuple[int, int, int]:
            blank = _tree.to(_tree.zeros(row, examples * copies), device)
            with saved_bytes(self.flat) as saved:
                capture, _ = self._evaluate(self.flat.theta.detach(), 1.0, blank, examples, 0, 0.0)
            inputs = {x.untyped_storage().data_ptr(): x.nbytes for record in capture.records for x in record.inputs}
            gradients = sum(g.nbytes for record in capture.records for g in record.gradients if g is not None)
            return saved[0], sum(inputs.values()), gradients

        # the difference of two, because some of it (copies of weights) does not grow with the batch
        graph, inputs, gradients = (two - one for one, two in zip(held(1), held(2)))
        evaluated = min(num_probes, 2)
        if self._memory_budget is None:
            theta = self.flat.theta
            self.memory_budget = min(max(evaluated * batch_size * graph + 2 * theta.nbytes, LEAST_BUDGET), MOST_BUDGET)
        each = graph + (evaluated - 1) * (inputs + gradients) + gradients
        fitting = fitting_micro_batch(each, self.memory_budget, copies, SMALL)
        return -(-batch_size // -(-batch_size // fitting))

    def prepare(self, row: Any) -> list[Site]:
        """Trace the loss on blank rows and choose a rule for every use of a parameter.  row: a batch of one example, for its structure."""
        device = self.flat.theta.device
        views = {name: view.requires_grad_() for name, view in self.flat.views(self.flat.theta.detach()).items()}

        def run(examples: int) -> Tensor:
            rows = examples * self.loss.multiplicity
            with random_state(0, device), torch.enable_grad():
                return self.loss.exact.at(views, _tree.to(_tree.zeros(row, rows), device), rows)

        calls, losses = trace(run)
        sites = plan_sites(calls, views)
        check_seen(calls, views, losses)
        self._check_apart(sites, row)
        self.sites = sites
        self._channels_last = {
            site.weight.name for site in sites if isinstance(site, Conv) and site.function is torch.conv2d and site.weight
        } & set(views)
        return sites

    def _check_apart(self, sites: list[Site], row: Any) -> None:
        """See `Capture.check_apart`; on two made-up examples, uniform where blank ones hold floating-point zeros."""
        copies, device = self.loss.multiplicity, self.flat.theta.device
        values = self.flat.views(self.flat.theta.detach())

        def filled(leaf: Any) -> Any:
            return torch.rand_like(leaf) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

        with random_state(0, device), torch.enable_grad():
            batch = _tree.map_leaves(filled, _tree.to(_tree.zeros(row, 2 * copies), device))
            with Capture(sites, values, 1.0, 2) as capture:
                losses = self.loss.exact.at(values, batch, 2 * copies)
            capture.check_apart(losses[:copies].sum())

    def clipped_sum(
        self, probes: Sequence[Probe], d: Tensor | None, batch: Any, clip: Clip, *,
        seed: int, loss_scale: float = 1.0, scale: Tensor | None = None, tap: Tap | None = None, out: Tensor | None = None,
    ) -> ClippedSum:  # fmt: skip
        """See `VmapEngine.clipped_sum`; the numbers are the same to rounding."""
        examples = _tree.rows(batch)
        if examples == 0:
            return ClippedSum(torch.zeros_like(self.flat.theta) if out is None else out, clip.sensitivity)
        total = torch.empty_like(self.flat.theta) if out is None else out  # every entry of an empty one is written below
        copies = self.loss.multiplicity
        if copies > 1:
            batch = _tree.map_leaves(lambda leaf: leaf.flatten(0, 1), batch)
        if self.sites is None:
            self.prepare(_tree.take(batch, slice(0, 1)))
        captures, losses = [], None
        for weight, point in points(self.flat.theta.detach(), d, probes):
            capture, values = self._evaluate(point, weight, batch, examples, seed, loss_scale)
            captures.append(capture)
            losses = values.view(examples, copies).mean(1) if losses is None else losses
        parts = self._parts(captures, examples)
        captures.clear()
        for name in materialised(parts, self.memory_budget):
            parts[name] = parts[name].dense()
        if scale is not None:
            by_name = self.flat.views(scale)
            parts = {name: Dense(part.dense().gradient * by_name[name]) for name, part in parts.items()}
        squares = torch.stack([
            parts[slot.name].squared_norms() if slot.name in parts else torch.zeros(examples, dtype=torch.float64, device=total.device)
            for slot in self.flat.slots
        ])  # fmt: skip
        factors, norms = clip_factors(squares, [slot.name for slot in self.flat.slots], clip, total.dtype)
        finite = norms.isfinite()
        silenced = not bool(finite.all())
        views = self.flat.views(total)
        for slot, weights in zip(self.flat.slots, factors):
            part = parts.pop(slot.name, None)  # its memory is free before the next is used
            if part is not None:
                (part.silenced(finite) if silenced else part).add_weighted_(views[slot.name], weights, fresh=out is None)
            elif out is None:
                views[slot.name].zero_()
        if tap is not None and losses is not None:
            tap(losses, norms)
        return ClippedSum(total, clip.sensitivity)

    def _evaluate(self, point: Tensor, weight: float, batch: Any, examples: int, seed: int, scale: float) -> tuple[Capture, Tensor]:
        """One forward and one backward to the layers' outputs, with the parameters of `point`."""
        assert self.sites is not None
        rows, up = examples * self.loss.multiplicity, self.loss.gradient_scale
        views = self.flat.views(point)
        for name in self._channels_last:
            views[name] = channels_last(views[name])
        with random_state(seed, point.device), torch.enable_grad():  # the same dropout masks at every point
            with Capture(self.sites, views, weight / up, examples) as capture:
                losses = self.loss.at(views, batch, rows)
            capture.gradients(losses * (up * scale / self.loss.multiplicity))
        return capture, losses.detach()

    def _parts(self, captures: list[Capture], examples: int) -> dict[str, Part]:
        """Per parameter, what its per-example gradients are made of."""
        assert self.sites is not None
        found: dict[str, list[Part]] = {}
        for at, site in enumerate(self.sites):
            reached = [capture for capture in captures if any(g is not None for g in capture.records[at].gradients)]
            # what is derived from parameters differs from point to point
            groups = [reached] if all(ref.name for ref in site.refs) else [[capture] for capture in reached]
            for group in filter(None, groups):
                for ref, part in site.parts([capture.records[at] for capture in group], examples):
                    for name, own in _pulled_back(group[0], ref, part):
                        found.setdefault(name, []).append(own)
            for capture in captures:
                capture.records[at] = Record(capture.weight)  # only the parts hold what was captured: some need less
        return {name: _joined(parts) for name, parts in found.items()}


def _pulled_back(capture: Capture, ref: Ref, part: Part) -> Iterator[tuple[str, Part]]:
    if ref.name:
        yield ref.name, part
    else:
        for name, gradient in capture.pull_back(ref, part.dense().gradient).items():
            yield name, Dense(gradient)


def _joined(parts: list[Part]) -> Part:
    """One part from those of every use of a parameter: per-example gradients add up before they are squared."""
    if len(parts) == 1:
        return parts[0]
    outers = [part for part in parts if isinstance(part, Outer)]
    rows = [part for part in parts if isinstance(part, Rows)]
    if len(outers) + len(rows) == len(parts):
        outer = Outer([block for part in outers for block in part.blocks]) if outers else None
        table = Rows.joined(rows) if rows else None
        if outer and table:
            return Tied(table, outer)
        return outer or table  # pyright: ignore
    total = parts[0].dense().gradient.clone()
    for part in parts[1:]:
        total += part.dense().gradient
    return Dense(total)
