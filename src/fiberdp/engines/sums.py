"""What every engine needs right: norms that are never too small, and factors that silence an example that is not finite."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from fiberdp.engines.compiled import compiled_sum
from fiberdp.flat import Slot

LARGEST_MICRO_BATCH = 256  # beyond it the working set leaves the cache and nothing gets faster
BLOCK = 4096  # a float32 dot product over more than this loses digits, always downwards

# Norms are inflated by this much, which covers every rounding between the true norm and the scaled gradient, so that a
# clipped observation has norm <= C in exact arithmetic.
NORM_SLACK = {torch.float64: 2.0**-46, torch.float32: 2.0**-20}

Tap = Callable[[Tensor, Tensor], None]
"""Receives (losses [b], norms [b]) of raw data: unaccounted, for the secret folder only."""


class Clip(Protocol):
    @property
    def sensitivity(self) -> float: ...
    def groups(self, names: Sequence[str]) -> list[int]:
        """Which of its norms each parameter belongs to."""
        ...

    def factors(self, norms: Tensor) -> Tensor:
        """[groups, b] -> [groups, b]."""
        ...


def lost(products: int, dtype: torch.dtype) -> float:
    """The most that a sum of so many products may miss because each of them may underflow to 0.

    Nothing beside an ordinary norm; but a factor of 1e-23 whose square is 0 in float32, times one of 1e18, is a gradient of 1e-5.
    """
    return products * torch.finfo(dtype).tiny


def representable(factors: Tensor, dtype: torch.dtype) -> Tensor:
    """float64 factors as `dtype` can hold them: 0 below its normal range, where rounding could double one, and at most its largest number,
    since 0 * inf is NaN.  An infinite factor stays so: it is a fault of the clip, which is to be seen."""
    most = torch.finfo(dtype)
    return torch.where(factors < most.tiny, 0.0, torch.where(factors.isinf(), factors, factors.clamp(max=most.max)))


def squared_norms(gradient: Tensor) -> Tensor:
    """||g_i||^2 over all but the first dimension, float64 [b], from [b, …]; float32 blocks, float64 between blocks.

    Relative error below 1e-6 at any size (a plain float32 dot product of 2.4M entries is 1.8e-3 too small), and entries whose squares
    underflow are made up for.
    """
    flat = gradient.flatten(1) if gradient.dim() > 1 else gradient.unsqueeze(1)
    whole = flat.shape[1] // BLOCK * BLOCK
    tail = torch.linalg.vector_norm(flat[:, whole:], dim=1).double().square() + lost(flat.shape[1], flat.dtype)
    if not whole:
        return tail
    blocks = torch.linalg.vector_norm(flat[:, :whole].unflatten(1, (-1, BLOCK)), dim=2)
    return blocks.double().square().sum(1) + tail


def clip_factors(squares: Tensor, names: Sequence[str], clip: Clip, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """From ||u_i||^2 of each parameter, float64 [slots, b]: what its gradients are multiplied with, [slots, b], and ||u_i||, float64 [b].

    An example whose norm is NaN or infinite, or so large that its factor would lose digits, gets factors of exactly 0.
    """
    groups = torch.tensor(clip.groups(names), device=squares.device)
    norms = squares.new_zeros(int(groups.max()) + 1, squares.shape[1]).index_add_(0, groups, squares).sqrt()
    whole = squares.sum(0).sqrt()
    finite = whole.isfinite()
    factors = clip.factors(torch.where(finite, norms, 0.0) * (1 + NORM_SLACK[dtype]))
    return torch.where(finite, representable(factors, dtype), 0.0).to(dtype)[groups], whole


def clipped_total(leaves: Iterable[tuple[Slot, Tensor]], clip: Clip, out: Tensor) -> Tensor:
    """out[slot] += Sum_i factor_i u_i for each (slot, u [b, …]); returns the norms ||u_i||, float64 [b].

    An example that is not finite contributes exactly 0: its rows are overwritten, since 0 * NaN is NaN.
    """
    leaves = list(leaves)
    squares = torch.stack([squared_norms(u) for _, u in leaves])
    factors, norms = clip_factors(squares, [slot.name for slot, _ in leaves], clip, out.dtype)
    finite = norms.isfinite()
    silenced = not bool(finite.all())
    for (slot, u), weights in zip(leaves, factors):
        u = u.flatten(1) if u.dim() > 1 else u.unsqueeze(1)
        if silenced:
            u = torch.where(finite[:, None], u, 0.0)
        add_weighted_rows_(out[slot.start : slot.stop], u, weights)
    return norms


def add_weighted_rows_(out: Tensor, rows: Tensor, factors: Tensor, *, fresh: bool = False) -> None:
    """out += Sum_i factor_i row_i, in place, or out = that if `fresh` (whatever it held); out [n], rows [b, n], factors [b]."""
    weighted = compiled_sum(out.dtype, out.device.type)
    if weighted and rows.dtype == factors.dtype == out.dtype and out.is_contiguous() and rows.is_contiguous():
        weighted(rows, factors, out, fresh=fresh)
    else:
        out.addmv_(rows.t(), factors, beta=int(not fresh))


def fitting_micro_batch(bytes_each: int, budget: int, copies: int, small: int = 0) -> int:
    """How many examples of `copies` rows and `bytes_each` fit `budget`: at least one, else 256 rows at most, or what fits `small` bytes."""
    each = max(1, bytes_each)
    return max(1, min(max(LARGEST_MICRO_BATCH // copies, small // each), budget // each))
