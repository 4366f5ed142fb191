"""The oracle: one example after the other, with plain autograd.  Slow, obvious, and what every other engine is compared with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from fiberdp import _tree
from fiberdp.engines.loss import Loss, random_state
from fiberdp.engines.points import points
from fiberdp.engines.sums import NORM_SLACK, Clip, Tap, representable
from fiberdp.flat import FlatParameters
from fiberdp.types import ClippedSum, Probe


class LoopEngine:
    """Sum_i clip(Sum_k w_k grad f(theta_k; xi_i)) with one backward pass an example and point."""

    name: ClassVar[str] = "loop"

    def __init__(self, flat: FlatParameters, loss: Loss) -> None:
        self.flat = flat
        self.loss = loss

    def micro_batch_size(self, row: Any, num_probes: int, batch_size: int) -> int:
        return 64

    def clipped_sum(
        self, probes: Sequence[Probe], d: torch.Tensor | None, batch: Any, clip: Clip, *,
        seed: int, loss_scale: float = 1.0, scale: torch.Tensor | None = None, tap: Tap | None = None, out: torch.Tensor | None = None,
    ) -> ClippedSum:  # fmt: skip
        """See `VmapEngine.clipped_sum`; the numbers are the same to rounding."""
        theta = self.flat.theta.detach()
        total = torch.zeros_like(theta) if out is None else out
        where = points(theta, d, probes)
        slack, up = 1 + NORM_SLACK[theta.dtype], self.loss.gradient_scale
        groups = torch.tensor(clip.groups([slot.name for slot in self.flat.slots]), device=theta.device)
        for i in range(_tree.rows(batch)):
            example = _tree.take(batch, slice(i, i + 1))
            if self.loss.multiplicity > 1:
                example = _tree.map_leaves(lambda leaf: leaf[0], example)  # [1, K, …] -> its K copies as rows
            u = torch.zeros_like(theta)
            losses = []
            for weight, point in where:
                vector = point.clone().requires_grad_(True)
                with random_state(seed + i, theta.device), torch.enable_grad():  # same dropout masks at every point
                    value = self.loss.of_one(self.flat.views(vector), example)
                    (gradient,) = torch.autograd.grad(value * (up * loss_scale), vector)
                u.add_(gradient, alpha=weight / up)
                losses.append(value.detach())
            if scale is not None:
                u.mul_(scale)
            parts = [u[slot.start : slot.stop] for slot in self.flat.slots]
            squares = torch.stack([part.double().square().sum() for part in parts])
            norm = squares.sum().sqrt()
            if bool(norm.isfinite()):
                norms = torch.stack([squares[groups == group].sum().sqrt() for group in range(int(groups.max()) + 1)])
                factors = representable(clip.factors((norms * slack)[:, None]), theta.dtype)[groups, 0]
                for slot, part, factor in zip(self.flat.slots, parts, factors.tolist()):
                    total[slot.start : slot.stop].add_(part, alpha=factor)
            if tap is not None:
                tap(torch.stack(losses[:1]), norm[None])
        return ClippedSum(total, clip.sensitivity)
