"""Raw parameters that enter by addition, scaling and the like, or are laid out once an example (class tokens).

Each example reads a copy of its own, [b, *shape] with stride 0, so autograd itself returns the per-example gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from fiberdp.engines.capture import Capture, Record, Ref
from fiberdp.engines.layers.linear import weighted_sum
from fiberdp.engines.parts import Dense, Part
from fiberdp.engines.tracing import Batched, rebuilt, tensors

if TYPE_CHECKING:
    from fiberdp.engines.layers.plan import Refs
    from fiberdp.engines.tracing import Call

LAYOUTS = (Tensor.expand, Tensor.expand_as, Tensor.repeat, torch.broadcast_to, Tensor.broadcast_to)
FUNCTIONS = (
    torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__, Tensor.add_, Tensor.__iadd__,
    torch.sub, Tensor.sub, Tensor.__sub__, Tensor.__rsub__, Tensor.sub_, Tensor.__isub__,
    torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__, Tensor.mul_, Tensor.__imul__,
    torch.div, Tensor.div, Tensor.__truediv__, Tensor.__rtruediv__, Tensor.div_, Tensor.__itruediv__,
    torch.maximum, torch.minimum, torch.lerp, Tensor.lerp, torch.addcmul, Tensor.addcmul, torch.where, Tensor.where,
    *LAYOUTS,
)  # fmt: skip


@dataclass
class Broadcast:
    """An elementwise function whose result has the batch in dimension `out.dim` of `dims` dimensions."""

    rule: ClassVar[str] = "broadcast"
    function: Callable[..., Any]
    refs: tuple[Ref, ...]
    out: Batched
    dims: int
    reads: tuple[Ref, ...] = ()

    def run(self, capture: Capture, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        shapes = [_padded(t.shape, self.dims) for t in tensors((args, kwargs)) if not capture.ref(t)]
        span = max(shape[self.out.dim] for shape in shapes if shape) // capture.examples

        def own_copies(tensor: Tensor) -> Tensor:
            return self._aligned(capture.per_example(tensor), span) if capture.ref(tensor) else tensor

        return self.function(*rebuilt(args, own_copies), **rebuilt(kwargs, own_copies))

    def parts(self, records: Sequence[Record], examples: int) -> list[tuple[Ref, Part]]:
        return leaf_parts(self.refs, records)

    def _aligned(self, leaf: Tensor, span: int) -> Tensor:
        """[b, *shape] -> a tensor that broadcasts against the result, every example against its own copy."""
        b, *shape = leaf.shape
        leaf = leaf.reshape(b, *(1,) * (self.dims - len(shape)), *shape)  # [b, padded shape], padded[out.dim] is 1
        leaf = leaf.movedim(0, self.out.dim).squeeze(self.out.dim + 1)
        return leaf if span == 1 else leaf.repeat_interleave(span, self.out.dim)


@dataclass
class Layout:
    """expand, repeat: a parameter laid out over the batch in dimension 0 of the result."""

    rule: ClassVar[str] = "expand"
    function: Callable[..., Any]
    refs: tuple[Ref, ...]
    shape: torch.Size
    batched: Batched
    reads: tuple[Ref, ...] = ()

    def run(self, capture: Capture, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        return capture.watch(self.function(*args, **kwargs).clone(memory_format=torch.contiguous_format))

    def parts(self, records: Sequence[Record], examples: int) -> list[tuple[Ref, Part]]:
        terms = [(record.weight, record.gradients[0]) for record in records]
        gradient = self.batched.split(weighted_sum(terms), examples)  # [b, span, ...]
        padded = (1,) * (gradient.dim() - 1 - len(self.shape)) + tuple(self.shape)
        summed = [i + 1 for i, (size, own) in enumerate(zip(gradient.shape[1:], padded)) if own != size]
        return [(self.refs[0], Dense((gradient.sum(summed, keepdim=True) if summed else gradient).reshape(-1, *self.shape)))]


def match(call: Call, refs: Refs) -> Broadcast | Layout | None:
    result = call.results[0]
    out = call.where(result)
    arguments = list(tensors((call.args, call.kwargs)))
    used = [(t, ref) for t in arguments for ref in [refs.of(t)] if ref]
    if out is None or len(call.results) != 1:
        return None
    free = [_padded(t.shape, result.dim()) for t, _ in used]
    if any(shape is None or shape[out.dim] != 1 for shape in free):
        return None
    if call.function in LAYOUTS:
        source = used[0][0]
        repeated = call.function is Tensor.repeat and any(
            r != own and own != 1
            for r, own in zip(result.shape[1:], _padded(source.shape, result.dim())[1:])  # pyright: ignore
        )
        return None if repeated or out.dim != 0 or len(used) > 1 else Layout(call.function, (used[0][1],), source.shape, out)
    others = [call.where(t) for t in arguments if not refs.of(t)]
    return Broadcast(call.function, tuple(ref for _, ref in used), out, result.dim()) if any(others) else None


def leaf_parts(refs: Sequence[Ref], records: Sequence[Record]) -> list[tuple[Ref, Part]]:
    """Per-example gradients as autograd returned them for copies [b, *shape], one for each ref."""
    found: list[tuple[Ref, Part]] = []
    for j, ref in enumerate(refs):
        terms = [(record.weight, gradient) for record in records if (gradient := record.gradients[j]) is not None]
        if terms:
            found.append((ref, Dense(weighted_sum(terms))))
    return found


def _padded(shape: Sequence[int], dims: int) -> tuple[int, ...] | None:
    return None if len(shape) > dims else (1,) * (dims - len(shape)) + tuple(shape)
