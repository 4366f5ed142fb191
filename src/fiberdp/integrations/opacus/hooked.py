"""Clipped sums from the per-example gradients that Opacus's hooks leave on the parameters (p.grad_sample), at any points.

    u_i = scale * Sum_k w_k p.grad_sample_i at theta + lookahead_k d,      combined before the one clip

The parameters stand at a point while it is evaluated, and come back exactly.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor

from fiberdp import _tree
from fiberdp.engines.loss import random_state
from fiberdp.engines.points import points
from fiberdp.engines.sums import Clip, Tap, clipped_total
from fiberdp.flat import FlatParameters
from fiberdp.integrations.opacus.call import CallLoss
from fiberdp.types import ClippedSum, Probe

Pass = tuple[float, dict[str, Tensor]]
"""The weight of a point, and the per-example gradients there."""


class Position:
    """Where theta stands: at home or at an evaluation point."""

    def __init__(self, theta: Tensor) -> None:
        self.theta = theta
        self._home: Tensor | None = None

    @property
    def home(self) -> Tensor:
        return self.theta if self._home is None else self._home

    def go(self, point: Tensor) -> None:
        """To `point`; theta itself, as `points` gives it for a look-ahead of 0, is home."""
        if point is self.theta or point is self._home:
            self.back()
            return
        if self._home is None:
            self._home = self.theta.clone()
        self.theta.copy_(point)

    def back(self) -> None:
        """Home, to the last bit."""
        if self._home is not None:
            self.theta.copy_(self._home)
            self._home = None

    @contextmanager
    def at_home(self) -> Iterator[None]:
        """Home for a while, then where it stood."""
        away = None if self._home is None else self.theta.clone()
        self.back()
        try:
            yield
        finally:
            if away is not None:
                self.go(away)


class HooksEngine:
    """An engine as in `fiberdp.engines`, on Opacus's hooks.  hooks: the GradSampleModule around flat.module, whose loss is a sum."""

    name: ClassVar[str] = "opacus-hooks"

    def __init__(self, flat: FlatParameters, loss: CallLoss, hooks: Any) -> None:
        self.flat = flat
        self.loss = loss
        self.hooks = hooks
        self.position = Position(flat.theta)
        named = dict(flat.module.named_parameters())
        self._parameters = {slot.name: named[slot.name] for slot in flat.slots}

    def clipped_sum(
        self, probes: Sequence[Probe], d: Tensor | None, batch: Any, clip: Clip, *, seed: int, loss_scale: float = 1.0,
        scale: Tensor | None = None, tap: Tap | None = None, out: Tensor | None = None, first: Tensor | None = None,
    ) -> ClippedSum:  # fmt: skip
        """See `fiberdp.engines.VmapEngine.clipped_sum`.  first: losses at the first point, where theta stands now, with their graph."""
        rows = _tree.rows(batch)
        if rows == 0:
            return ClippedSum(torch.zeros_like(self.flat.theta) if out is None else out, clip.sensitivity)
        passes: list[Pass] = []
        try:
            for i, (weight, point) in enumerate(points(self.position.home, d, probes)):
                if i == 0 and first is not None:
                    losses = first
                else:
                    self.position.go(point)
                    self.hooks.enable_hooks()
                    with random_state(seed, point.device), torch.enable_grad():  # the same dropout masks at every point
                        losses = self.loss(self.flat.module, batch)
                (losses.sum() * loss_scale).backward()
                passes.append((weight, self.take(rows)))
        finally:
            self.position.back()
            self.forget()
        return self.clipped(combined(passes), clip, scale, out)

    def take(self, rows: int) -> dict[str, Tensor]:
        """p.grad_sample of every parameter that was used, [b, *shape], taken off the parameters together with the raw gradient.

        Raises ValueError if a parameter has a gradient and no per-example one, or gradients of another number of examples.
        """
        found: dict[str, Tensor] = {}
        for name, p in self._parameters.items():
            g, p.grad_sample = getattr(p, "grad_sample", None), None  # pyright: ignore
            if g is None and p.grad is not None:
                raise ValueError(
                    f"parameter {name} has a gradient but no per-example gradient: it must come through a layer that Opacus's hooks see, "
                    "or it cannot be clipped. Call the layer instead of using its weight, or use grad_sample_mode='ghost'."
                )
            p.grad = None
            if g is None:
                continue  # not used: a gradient of 0
            if isinstance(g, list) or len(g) != rows:
                raise ValueError(
                    f"parameter {name} has per-example gradients of more than one pass, or not of {rows} examples: one forward and one "
                    "backward pass belong to one step. For smaller batches in memory use BatchMemoryManager."
                )
            found[name] = g.to(p.dtype)
        return found

    def clipped(self, u: dict[str, Tensor], clip: Clip, scale: Tensor | None, out: Tensor | None) -> ClippedSum:
        """The clipped sum of the observations u, [b, *shape] a parameter."""
        total = torch.zeros_like(self.flat.theta) if out is None else out
        if scale is not None:
            factors = self.flat.views(scale)
            u = {name: g * factors[name] for name, g in u.items()}
        if u:
            clipped_total(((slot, u[slot.name]) for slot in self.flat.slots if slot.name in u), clip, total)
        return ClippedSum(total, clip.sensitivity)

    def forget(self) -> None:
        """Remove what passes left behind that were not finished: gradients, stored activations, counters."""
        for p in self._parameters.values():
            p.grad, p.grad_sample, p._forward_counter = None, None, 0  # pyright: ignore
            if hasattr(p, "_current_grad_sample"):
                del p._current_grad_sample  # pyright: ignore
        for module in self.flat.module.modules():
            if module.__dict__.get("activations"):
                module.activations.clear()  # pyright: ignore
            module.__dict__.pop("max_batch_len", None)


def combined(passes: list[Pass]) -> dict[str, Tensor]:
    """Sum_k w_k g_k per parameter, in the memory that Opacus made for each alone; two weights that add up to 1 take one pass over it."""
    (first, u), *others = passes or [(1.0, {})]
    if len(others) == 1 and u.keys() == others[0][1].keys() and abs(first + others[0][0] - 1) < 1e-12:
        weight, g = others[0]
        return {name: u[name].lerp_(g[name], weight) for name in u}
    u = u if first == 1 else {name: g.mul_(first) for name, g in u.items()}
    for weight, g in others:
        u = u | {name: u[name].add_(g[name], alpha=weight) if name in u else g[name].mul_(weight) for name in g}
    return u
