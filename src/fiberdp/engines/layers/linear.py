"""Products with a weight matrix: grad W_i = Sum_s B_{i,s} A_{i,s}^T for out = A W^T + bias, and its transpose for out = A W + bias."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from fiberdp.engines.capture import Capture, Record, Ref, fixed, wide
from fiberdp.engines.parts import Block, Dense, Outer, Part
from fiberdp.engines.tracing import Batched

if TYPE_CHECKING:
    from fiberdp.engines.layers.plan import Refs
    from fiberdp.engines.tracing import Call

PRODUCTS = (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm)
FUNCTIONS = (F.linear, torch.addmm, *PRODUCTS)


@dataclass
class Linear:
    """weight: Ref of W or None if it is frozen; out_first: W is [out, in] as in F.linear, not [in, out].  bias likewise."""

    rule: ClassVar[str] = "linear"
    function: Callable[..., Any]
    refs: tuple[Ref, ...]
    weight: Ref | None
    bias: Ref | None
    out_first: bool
    batched: Batched
    reads: tuple[Ref, ...] = ()

    def run(self, capture: Capture, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        x, _, _ = _bind(self.function, args, kwargs)
        if self.weight:
            capture.keep(x)
        return capture.watch(self.function(*args, **kwargs))

    def parts(self, records: Sequence[Record], examples: int) -> list[tuple[Ref, Part]]:
        outputs = [(record.weight, features(self.batched, record.gradients[0], examples)) for record in records]
        inputs = [features(self.batched, record.inputs[0], examples).to(outputs[0][1].dtype) for record in records] if self.weight else []
        return product_parts(self.weight, self.bias, inputs, outputs, out_first=self.out_first, same=fixed(records))


def product_parts(
    weight: Ref | None, bias: Ref | None, inputs: Sequence[Tensor], outputs: Sequence[tuple[float, Tensor]], *,
    out_first: bool = True, same: bool = False,
) -> list[tuple[Ref, Part]]:  # fmt: skip
    """From inputs A^k [b, s, p] and (w_k, output gradient B^k [b, s, q]).  same: A is the same at every point, so the B^k add up."""
    found: list[tuple[Ref, Part]] = []
    if bias:
        found.append((bias, Dense(weighted_sum([(w, b.sum(1)) for w, b in outputs]))))
    if weight:
        pairs = [(1.0, weighted_sum(outputs), inputs[0])] if same else [(w, b, a) for (w, b), a in zip(outputs, inputs)]
        found.append((weight, Outer([Block(w, *((b, a) if out_first else (a, b))) for w, b, a in pairs])))
    return found


def match(call: Call, refs: Refs) -> Linear | None:
    try:
        x, weight, bias = _bind(call.function, call.args, call.kwargs)
    except TypeError:  # alpha or beta of addmm
        return None
    where, out = call.where(x), call.where(call.results[0])
    if refs.of(x) or not where or not out or weight.dim() != 2 or call.where(weight) or call.where(bias):
        return None
    if where.dim == x.dim() - 1 or (bias is not None and bias.shape != call.results[0].shape[-1:]):
        return None
    out_first, name = call.function is F.linear, refs.of(weight)
    transposed = refs.transposed(weight)
    if transposed:
        out_first, name = not out_first, Ref(transposed)
    used = tuple(ref for ref in (name, refs.of(bias)) if ref)
    return Linear(call.function, used, name, refs.of(bias), out_first, where)


def features(batched: Batched, x: Tensor, examples: int) -> Tensor:
    """[..., p] -> [b, s, p], float32 or more."""
    return wide(batched.split(x, examples).flatten(1, -2))


def weighted_sum(terms: Sequence[tuple[float, Tensor]]) -> Tensor:
    """Sum_k w_k x_k."""
    (weight, first), *others = terms
    total = first if weight == 1 else first * weight
    for i, (w, x) in enumerate(others):
        total = total.add(x, alpha=w) if i == 0 and total is first else total.add_(x, alpha=w)
    return total


def _bind(function: Any, args: Any, kwargs: Any) -> tuple[Tensor, Tensor, Tensor | None]:
    if function is F.linear:
        return _linear(*args, **kwargs)
    return _addmm(*args, **kwargs) if function is torch.addmm else _matmul(*args, **kwargs)


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor | None]:
    return input, weight, bias


def _addmm(input: Tensor, mat1: Tensor, mat2: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    return mat1, mat2, input


def _matmul(input: Tensor, other: Tensor | None = None, mat2: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor | None]:
    weight = other if other is not None else mat2
    assert weight is not None
    return input, weight, None
