"""Convolutions: the per-example weight gradient is a convolution of inputs with output gradients, one group an example."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from fiberdp.engines.capture import Capture, Record, Ref, fixed
from fiberdp.engines.layers.linear import weighted_sum
from fiberdp.engines.parts import Dense, Part
from fiberdp.engines.tracing import Batched

if TYPE_CHECKING:
    from fiberdp.engines.layers.plan import Refs
    from fiberdp.engines.tracing import Call

FUNCTIONS = (torch.conv1d, torch.conv2d, torch.conv3d)


@dataclass
class Conv:
    rule: ClassVar[str] = "conv"
    function: Callable[..., Any]
    refs: tuple[Ref, ...]
    weight: Ref | None
    bias: Ref | None
    shape: torch.Size
    geometry: Geometry
    batched: Batched
    reads: tuple[Ref, ...] = ()

    def run(self, capture: Capture, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        x = _bind(*args, **kwargs)[0]
        if self.weight:
            capture.keep(x)
        return capture.watch(self.function(*args, **kwargs))

    def parts(self, records: Sequence[Record], examples: int) -> list[tuple[Ref, Part]]:
        used = [record for record in records if record.gradients[0] is not None]
        if not used:
            return []
        outputs = [(record.weight, _wide(record.gradients[0])) for record in used]
        found: list[tuple[Ref, Part]] = []
        if self.bias:
            terms = [(w, self.batched.split(b, examples).flatten(3).sum((1, 3))) for w, b in outputs]
            found.append((self.bias, Dense(weighted_sum(terms))))
        if self.weight:
            inputs = [_wide(record.inputs[0]) for record in used]
            if fixed(used):
                outputs, inputs = [(1.0, weighted_sum(outputs))], inputs[:1]
            found.append((self.weight, Dense(per_example_weights(inputs, outputs, self.shape, self.geometry, examples))))
        return found


@dataclass(frozen=True)
class Geometry:
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int


def per_example_weights(
    inputs: Sequence[Tensor], outputs: Sequence[tuple[float, Tensor]], shape: torch.Size, geometry: Geometry, b: int
) -> Tensor:
    """Sum_k w_k grad W_i, [b, *shape]: the weight gradient of ONE convolution with b groups, whose batch are the points and copies."""
    span = len(inputs[0]) // b

    def grouped(x: Tensor) -> Tensor:  # [b span, C, ...] -> [span, b C, ...]
        if span == 1:
            return x.reshape(1, -1, *x.shape[2:])
        return x.unflatten(0, (b, span)).transpose(0, 1).reshape(span, -1, *x.shape[2:])

    x = torch.cat([grouped(a) for a in inputs]) if len(inputs) > 1 else grouped(inputs[0])
    scaled = [grouped(g if w == 1 else g * w) for w, g in outputs]
    g = torch.cat(scaled) if len(scaled) > 1 else scaled[0]
    weight = x.new_empty((b * shape[0], *shape[1:]))  # read for its shape only
    _, found, _ = torch.ops.aten.convolution_backward(
        g, x, weight, None, geometry.stride, geometry.padding, geometry.dilation, False, [0] * len(geometry.stride),
        b * geometry.groups, [False, True, False],
    )  # fmt: skip
    return found.view(b, *shape)


def match(call: Call, refs: Refs) -> Conv | None:
    x, weight, bias, stride, padding, dilation, groups = _bind(*call.args, **call.kwargs)
    where, dims = call.where(x), weight.dim() - 2
    if refs.of(x) or not where or where.dim != 0 or x.dim() != weight.dim():
        return None
    dilation = _tuple(dilation, dims)
    if isinstance(padding, str):
        if padding == "same" and any(d * (k - 1) % 2 for d, k in zip(dilation, weight.shape[2:])):
            return None  # padded on one side only
        padding = tuple(d * (k - 1) // 2 if padding == "same" else 0 for d, k in zip(dilation, weight.shape[2:]))
    geometry = Geometry(_tuple(stride, dims), _tuple(padding, dims), dilation, groups)
    names = refs.of(weight), refs.of(bias)
    return Conv(call.function, tuple(ref for ref in names if ref), *names, weight.shape, geometry, where)


def _tuple(value: Any, dims: int) -> tuple[int, ...]:
    return (value,) * dims if isinstance(value, int) else tuple(value) * (dims if len(value) == 1 else 1)


def _wide(x: Any) -> Tensor:
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def _bind(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1
) -> tuple[Tensor, Tensor, Tensor | None, Any, Any, Any, int]:
    return input, weight, bias, stride, padding, dilation, groups
