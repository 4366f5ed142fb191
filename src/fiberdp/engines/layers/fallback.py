"""Any other function: every example gets its own copy of the parameters, and the function runs once an example, through vmap or a loop.

Exact for every function that treats examples apart; it costs [b, *shape] for each parameter of such a call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.func import vmap

from fiberdp.engines.capture import Capture, Record, Ref, name_of
from fiberdp.engines.layers.broadcast import leaf_parts
from fiberdp.engines.parts import Part
from fiberdp.engines.tracing import Batched, rebuilt, tensors

if TYPE_CHECKING:
    from fiberdp.engines.tracing import Call


@dataclass
class Fallback:
    """batched: of each tensor argument in order (None: the same for all examples).  outputs: of each result."""

    function: Callable[..., Any]
    refs: tuple[Ref, ...]
    batched: tuple[Batched | None, ...]
    outputs: tuple[Batched | None, ...]
    rule: str = "vmap"
    reads: tuple[Ref, ...] = ()

    @classmethod
    def of(cls, call: Call, read: tuple[Ref, ...]) -> Fallback:
        arguments = list(tensors((call.args, call.kwargs)))
        return cls(call.function, read, tuple(map(call.where, arguments)), tuple(map(call.where, call.results)))

    def run(self, capture: Capture, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        values, dims = [], []
        for tensor, where in zip(tensors((args, kwargs)), self.batched):
            if capture.ref(tensor):
                # a parameter read twice in one call is two copies whose gradients add up
                values.append(capture.per_example(tensor))
                dims.append(0)
            else:
                values.append(tensor if where is None else where.unflatten(tensor, capture.examples))
                dims.append(None if where is None else where.dim)
        structure: list[Any] = []

        def one(*own: Tensor) -> tuple[Tensor, ...]:
            each = iter(own)
            result = self.function(*rebuilt(args, lambda _: next(each)), **rebuilt(kwargs, lambda _: next(each)))
            structure[:] = [result]
            return tuple(tensors(result))

        results = self._vectorised(one, values, dims, capture.examples)
        whole = iter(
            r if where is None else r.movedim(0, where.dim).flatten(where.dim, where.dim + 1) for r, where in zip(results, self.outputs)
        )
        return rebuilt(structure[0], lambda _: next(whole))

    def parts(self, records: Sequence[Record], examples: int) -> list[tuple[Ref, Part]]:
        return leaf_parts(self.refs, records)

    def _vectorised(self, one: Callable[..., Any], values: list[Tensor], dims: list[int | None], examples: int) -> list[Tensor]:
        """Results with the examples in front."""
        if self.rule == "vmap":
            try:
                return list(vmap(one, in_dims=tuple(dims), randomness="different")(*values))
            except (RuntimeError, NotImplementedError, ValueError):
                self.rule = "loop"
        try:
            rows = [one(*(v if d is None else v.select(d, i) for v, d in zip(values, dims))) for i in range(examples)]
        except (RuntimeError, IndexError, TypeError) as error:
            names = ", ".join(ref.name for ref in self.refs if ref.name) or "a tensor derived from parameters"
            raise ValueError(
                f"engine ghost has no rule for {name_of(self.function)} with {names}, and it cannot run one example at a time "
                f"({str(error).splitlines()[0][:120]}). Use engine='vmap' or engine='loop', or freeze those parameters."
            ) from error
        return [torch.stack(column) for column in zip(*rows)]
