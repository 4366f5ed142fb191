"""Tables read by index: the gradient of a row is the sum over the places where the example read it; the padding row has none.

The padding row still moves in training: noise is added to every coordinate of theta, of that row too.  To keep it, take the padded
positions out of the loss and of attention by a mask; then its value does not matter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from fiberdp.engines.capture import Capture, Record, Ref, fixed
from fiberdp.engines.layers.linear import weighted_sum
from fiberdp.engines.parts import Part, Rows
from fiberdp.engines.tracing import Batched

if TYPE_CHECKING:
    from fiberdp.engines.layers.plan import Refs
    from fiberdp.engines.tracing import Call

FUNCTIONS = (F.embedding,)


@dataclass
class Embedding:
    rule: ClassVar[str] = "embedding"
    function: Callable[..., Any]
    refs: tuple[Ref, ...]
    table: torch.Size
    padding: int | None
    batched: Batched
    reads: tuple[Ref, ...] = ()

    def run(self, capture: Capture, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        ids, *_ = _bind(*args, **kwargs)
        capture.keep(ids)
        return capture.watch(self.function(*args, **kwargs))

    def parts(self, records: Sequence[Record], examples: int) -> list[tuple[Ref, Part]]:
        if fixed(records):
            total = weighted_sum([(record.weight, record.gradients[0]) for record in records])
            return [(self.refs[0], self._rows(records[0], total, examples))]
        rows = [self._rows(record, record.gradients[0] * record.weight, examples) for record in records]
        return [(self.refs[0], Rows.joined(rows))]

    def _rows(self, record: Record, gradient: Tensor, examples: int) -> Rows:
        ids = self.batched.split(record.inputs[0], examples).flatten(1)
        return Rows.merged(ids, self.batched.split(gradient, examples).reshape(*ids.shape, self.table[1]), self.table, self.padding)


def match(call: Call, refs: Refs) -> Embedding | None:
    ids, weight, padding, max_norm, by_frequency, _ = _bind(*call.args, **call.kwargs)
    name, where = refs.of(weight), call.where(ids)
    if max_norm is not None or by_frequency:
        option = "max_norm" if max_norm is not None else "scale_grad_by_freq"
        raise ValueError(
            f"embedding {name.name if name else 'derived from parameters'} has {option}: an example's gradient "
            "must not depend on what else is in the batch, and weights must change through the noisy update alone. Leave it out."
        )
    if not name or not where:
        return None
    if padding is not None and padding < 0:
        padding += len(weight)
    return Embedding(call.function, (name,), weight.shape, padding, where)


def _bind(
    input: Tensor, weight: Tensor, padding_idx: int | None = None, max_norm: float | None = None, norm_type: float = 2.0,
    scale_grad_by_freq: bool = False, sparse: bool = False,
) -> tuple[Tensor, Tensor, int | None, float | None, bool, bool]:  # fmt: skip
    return input, weight, padding_idx, max_norm, scale_grad_by_freq, sparse
