"""Per-example gradients of one parameter, held as cheaply as their structure allows.

    | part     | per-example gradient                  | held                                   | weighted sum             |
    |----------|---------------------------------------|----------------------------------------|--------------------------|
    | Outer    | Sum_k w_k Sum_s L^k_{i,s} R^k_{i,s}^T | factors of every evaluation point k    | one product a point      |
    | Rows     | rows of a table that example i read   | the rows, repeated tokens added up     | rows added to the total  |
    | Dense    | itself                                | [b, *shape]                            | one pass over it         |

A linear combination over points is the same product with the factors of all points side by side along s, so one formula serves any
list of probes, and a parameter used twice (tied weights) is the same concatenation once more.

Gram form: ||Sum_s L_s R_s^T||^2 = <L L^T, R R^T>, s^2 (p + q) products instead of s p q.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from fiberdp.engines.compiled import LEAST_PRODUCTS, compiled_gram, compiled_product, compiled_products
from fiberdp.engines.sums import BLOCK, add_weighted_rows_, lost, squared_norms

GRAM_ERROR = {torch.float64: 2.0**-48, torch.float32: 2.0**-21}
"""What rounding may have taken from <L L^T, R R^T>, in units of its diagonal: terms of both signs cancel, rounding errors do not."""

UNDERFLOWS = {dtype: 8 / error for dtype, error in GRAM_ERROR.items()}
"""That diagonal is Sum_s (|L_s|^2 + x s q) (|R_s|^2 + x s p), x the least normal number times this: each of s^2 pairs may have lost q and p
products to underflow, and only GRAM_ERROR of the diagonal counts."""


class Part(Protocol):
    def squared_norms(self) -> Tensor:
        """||g_i||^2, float64 [b]; never below the true value."""
        ...

    def add_weighted_(self, out: Tensor, factors: Tensor, *, fresh: bool = False) -> None:
        """out += Sum_i factor_i g_i, in place, or out = that if `fresh` (whatever it held); out [*shape], factors [b]."""
        ...

    def dense(self) -> Dense: ...
    def silenced(self, finite: Tensor) -> Part:
        """The same with the gradients of examples that are not finite set to 0 (0 * NaN is NaN); finite: bool [b]."""
        ...


@dataclass
class Dense:
    """held: Tensor[b, ...], the gradients in any order of their dimensions.  order: that which makes them [b, *shape], None: as they are.
    squares: ||g_i||^2, float64 [b], where they came with the gradients.

    Norms do not depend on the order, and the sum is put right once: bringing every gradient into order would cost a pass over all.
    """

    held: Tensor
    order: tuple[int, ...] | None = None
    squares: Tensor | None = None

    @property
    def gradient(self) -> Tensor:
        return self.held if self.order is None else self.held.permute(self.order)

    def squared_norms(self) -> Tensor:
        return squared_norms(self.held) if self.squares is None else self.squares + lost(self.held[0].numel(), self.held.dtype)

    def add_weighted_(self, out: Tensor, factors: Tensor, *, fresh: bool = False) -> None:
        flat, factors = self.held.reshape(len(factors), -1), factors.to(self.held.dtype)
        if self.order is None:
            add_weighted_rows_(out.view(-1), flat, factors, fresh=fresh)
        else:
            total = flat.new_empty(flat.shape[1])
            add_weighted_rows_(total, flat, factors, fresh=True)
            total = total.view(1, *self.held.shape[1:]).permute(self.order)[0]
            out.copy_(total) if fresh else out.add_(total)

    def dense(self) -> Dense:
        return self

    def silenced(self, finite: Tensor) -> Dense:
        return Dense(_silence(self.held, finite), self.order)


@dataclass
class Block:
    """One point's factors of an `Outer`: weight w, left L [b, s, q], right R [b, s, p]."""

    weight: float
    left: Tensor
    right: Tensor


@dataclass
class Outer:
    """Sum_k w_k Sum_s L^k_{i,s} R^k_{i,s}^T, [b, q, p]."""

    blocks: list[Block]

    def squared_norms(self) -> Tensor:
        return gram(self.blocks)

    def add_weighted_(self, out: Tensor, factors: Tensor, *, fresh: bool = False) -> None:
        out = out.view(self.blocks[0].left.shape[2], self.blocks[0].right.shape[2])
        pairs = [self._weighted(block, factors) for block in self.blocks]
        product = compiled_product(out.dtype, out.device.type)
        alike = {(len(factor), factor.dtype) for pair in pairs for factor in pair} == {(len(pairs[0][0]), out.dtype)}
        if product and alike and out.is_contiguous() and len(pairs[0][0]) * out.numel() >= LEAST_PRODUCTS:
            product(pairs, out, fresh=fresh)
            return
        for left, right in pairs:
            out.addmm_(left.t(), right, beta=int(not fresh))
            fresh = False

    @staticmethod
    def _weighted(block: Block, factors: Tensor) -> tuple[Tensor, Tensor]:
        """[b s, q] and [b s, p], one of them weighted: that which has fewer entries."""
        left, right = block.left, block.right
        weights = (factors * block.weight)[:, None, None].to(left.dtype)
        if left.shape[2] <= right.shape[2]:
            left = left * weights
        else:
            right = right * weights
        return left.flatten(0, 1), right.flatten(0, 1)

    def dense(self) -> Dense:
        first, *others = self.blocks
        products = compiled_products(first.left.dtype, first.left.device.type) if first.left.shape[1] > 1 else None
        if products is not None:
            total, squares = products(self.blocks)
            return Dense(total, squares=squares)
        total = torch.bmm(first.left.transpose(1, 2), first.right)
        if first.weight != 1:
            total.mul_(first.weight)
        for block in others:
            total.baddbmm_(block.left.transpose(1, 2), block.right, alpha=block.weight)
        return Dense(total)

    def silenced(self, finite: Tensor) -> Outer:
        return Outer([Block(block.weight, _silence(block.left, finite), _silence(block.right, finite)) for block in self.blocks])


@dataclass
class Rows:
    """Rows of a table [v, p]: example[j] read row[j], whose gradient is gradient[j] [p]; pairs (example, row) are distinct."""

    example: Tensor
    row: Tensor
    gradient: Tensor
    examples: int
    table: torch.Size

    @classmethod
    def merged(cls, ids: Tensor, gradient: Tensor, table: torch.Size, ignored: int | None) -> Rows:
        """From ids [b, s] and gradients [b, s, p]: a repeated token adds up before it is squared; `ignored` tokens are left out."""
        example = torch.arange(len(ids), device=ids.device)[:, None].expand_as(ids).reshape(-1)
        row, gradient = ids.long().reshape(-1), gradient.reshape(-1, gradient.shape[-1])
        if ignored is not None:
            kept = row != ignored
            example, row, gradient = example[kept], row[kept], gradient[kept]
        return cls._distinct(example, row, gradient, len(ids), table)

    @classmethod
    def joined(cls, parts: Sequence[Rows]) -> Rows:
        """The sum of several."""
        example, row, gradient = (torch.cat([getattr(p, name) for p in parts]) for name in ("example", "row", "gradient"))
        return cls._distinct(example, row, gradient, parts[0].examples, parts[0].table)

    @classmethod
    def _distinct(cls, example: Tensor, row: Tensor, gradient: Tensor, examples: int, table: torch.Size) -> Rows:
        keys, where = torch.unique(example * table[0] + row, return_inverse=True)
        summed = gradient.new_zeros(len(keys), gradient.shape[1]).index_add_(0, where, gradient)
        return cls(keys // table[0], keys % table[0], summed, examples, table)

    def squared_norms(self) -> Tensor:
        total = torch.zeros(self.examples, dtype=torch.float64, device=self.gradient.device)
        return total.index_add_(0, self.example, squared_norms(self.gradient))

    def add_weighted_(self, out: Tensor, factors: Tensor, *, fresh: bool = False) -> None:
        if fresh:
            out.zero_()
        out.index_add_(0, self.row, self.gradient * factors.to(self.gradient.dtype)[self.example, None])

    def dense(self) -> Dense:
        total = self.gradient.new_zeros(self.examples * self.table[0], self.table[1])
        total[self.example * self.table[0] + self.row] = self.gradient
        return Dense(total.view(self.examples, *self.table))

    def silenced(self, finite: Tensor) -> Rows:
        return Rows(self.example, self.row, _silence(self.gradient, finite[self.example]), self.examples, self.table)


@dataclass
class Tied:
    """Rows read of a table that is also a factor of products: an embedding tied to an output layer."""

    rows: Rows
    outer: Outer

    def squared_norms(self) -> Tensor:
        """||E||^2 + 2 <E, H> + ||H||^2;  <E, H>_i = Sum_j Sum_k w_k Sum_s L^k_{i,s,row_j} <E_j, R^k_{i,s}>."""
        rows, outer = self.rows, self.outer
        own, products = rows.squared_norms(), outer.squared_norms()
        cross = torch.zeros_like(own)
        starts = torch.searchsorted(rows.example, torch.arange(rows.examples + 1, device=rows.example.device)).tolist()
        for i, (start, stop) in enumerate(pairwise(starts)):
            for block in outer.blocks:
                met = rows.gradient[start:stop] @ block.right[i].t()
                cross[i] += block.weight * (met.double() * block.left[i][:, rows.row[start:stop]].t()).sum()
        error = GRAM_ERROR[rows.gradient.dtype] * (own + products)  # they may cancel
        return (own + 2 * cross + products).clamp_min(0) + error

    def add_weighted_(self, out: Tensor, factors: Tensor, *, fresh: bool = False) -> None:
        self.outer.add_weighted_(out, factors, fresh=fresh)
        self.rows.add_weighted_(out, factors)

    def dense(self) -> Dense:
        return Dense(self.rows.dense().gradient + self.outer.dense().gradient)

    def silenced(self, finite: Tensor) -> Tied:
        return Tied(self.rows.silenced(finite), self.outer.silenced(finite))


def gram(blocks: Sequence[Block]) -> Tensor:
    """||Sum_k w_k Sum_s L^k_s R^k_s^T||^2 = Sum_{jk} w_j w_k <L^j L^k^T, R^j R^k^T>, float64 [b], plus what rounding may have taken."""
    if len(blocks) == 1 and blocks[0].left.shape[1] == 1:
        only = blocks[0]
        return squared_norms(only.left) * squared_norms(only.right) * only.weight**2
    total = torch.zeros(len(blocks[0].left), dtype=torch.float64, device=blocks[0].left.device)
    diagonal = torch.zeros_like(total)
    for j, one in enumerate(blocks):
        own, of_itself = _inner_gram(one, one)
        total += one.weight**2 * own
        diagonal += one.weight**2 * of_itself
        for other in blocks[:j]:
            total += 2 * one.weight * other.weight * _inner_gram(one, other)[0]
    return total.clamp_min(0) + GRAM_ERROR[blocks[0].left.dtype] * diagonal


def _inner_gram(one: Block, other: Block) -> tuple[Tensor, Tensor]:
    """<L L'^T, R R'^T> of every example, float64 [b], and the most its diagonal, Sum_s |L_s|^2 |R_s|^2, may be, if the two are one."""
    function = compiled_gram(one.left.dtype, one.left.device.type)
    if function is not None:
        return function(one, other)
    lefts, rights = _products(one.left, other.left), _products(one.right, other.right)
    total = _inner(lefts, rights)
    if one is not other:
        return total, torch.zeros_like(total)
    each = UNDERFLOWS[lefts.dtype] * lost(one.left.shape[1], lefts.dtype)
    left, right = (
        products.diagonal(dim1=1, dim2=2).double() + each * factor.shape[2] for products, factor in ((lefts, one.left), (rights, one.right))
    )
    return total, (left * right).sum(1)


def _products(a: Tensor, b: Tensor) -> Tensor:
    """a b^T, [b, s, s'], over at most BLOCK columns at a time: a longer float32 dot product is too small."""
    total = torch.bmm(a[:, :, :BLOCK], b[:, :, :BLOCK].transpose(1, 2))
    for start in range(BLOCK, a.shape[2], BLOCK):
        total.baddbmm_(a[:, :, start : start + BLOCK], b[:, :, start : start + BLOCK].transpose(1, 2))
    return total


def _inner(a: Tensor, b: Tensor) -> Tensor:
    """<a_i, b_i> over all but the first dimension, float64 [b]: row sums in the factors' precision, rows in float64."""
    return (a * b).sum(-1, dtype=torch.float64).reshape(len(a), -1).sum(1)


def _silence(tensor: Tensor, finite: Tensor) -> Tensor:
    return torch.where(finite.view(-1, *(1,) * (tensor.dim() - 1)), tensor, 0.0)
