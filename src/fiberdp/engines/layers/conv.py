"""Convolutions: the per-example weight gradient, as one grouped convolution or as products with the windows of the input.

    form      computation                                             used for
    grouped   one convolution backward with b groups                  anything
    windows   Sum_s B_s (window s of the input)^T, channels last      2-D, one group, not dilated

In channels-last memory a window is kh runs of kw C numbers, so it is copied at the speed of memory; the products then take 4 to 40 % less
time than the grouped convolution does (eight shapes, 3 to 256 channels, 4 x 4 to 32 x 32).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from fiberdp.engines.capture import Capture, Record, Ref, fixed, wide
from fiberdp.engines.compiled import Windows, compiled_products
from fiberdp.engines.layers.linear import weighted_sum
from fiberdp.engines.parts import Block, Dense, Part
from fiberdp.engines.tracing import Batched

if TYPE_CHECKING:
    from fiberdp.engines.layers.plan import Refs
    from fiberdp.engines.tracing import Call

FUNCTIONS = (torch.conv1d, torch.conv2d, torch.conv3d)
WINDOWS = 2**22  # numbers in the windows held at a time


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
        outputs = [(record.weight, record.gradients[0]) for record in records]
        found: list[tuple[Ref, Part]] = []
        if self.bias:
            terms = [(w, self.batched.split(b, examples).flatten(3).sum((1, 3))) for w, b in outputs]
            found.append((self.bias, Dense(weighted_sum(terms))))
        if self.weight:
            inputs = [wide(record.inputs[0]) for record in records]
            if fixed(records):
                outputs, inputs = [(1.0, weighted_sum(outputs))], inputs[:1]
            form = by_windows if self._plain() else by_groups
            found.append((self.weight, form(inputs, outputs, self.shape, self.geometry, examples)))
        return found

    def _plain(self) -> bool:
        return self.function is torch.conv2d and self.geometry.groups == 1 and self.geometry.dilation == (1, 1)


@dataclass(frozen=True)
class Geometry:
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int


def by_groups(
    inputs: Sequence[Tensor], outputs: Sequence[tuple[float, Tensor]], shape: torch.Size, geometry: Geometry, examples: int
) -> Dense:
    """Sum_k w_k grad W_i, [b, *shape]: the weight gradient of ONE convolution with b groups, whose batch are the points and copies."""
    b, span = examples, len(inputs[0]) // examples

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
    return Dense(found.view(b, *shape))


def by_windows(
    inputs: Sequence[Tensor], outputs: Sequence[tuple[float, Tensor]], shape: torch.Size, geometry: Geometry, examples: int
) -> Dense:
    """The same for conv2d, from the windows of the input: read where they lie, or written out if the compiled function is not there."""
    (q, c, kh, kw), b, span = shape, examples, len(inputs[0]) // examples
    height, width = outputs[0][1].shape[2:]
    products = compiled_products(inputs[0].dtype, inputs[0].device.type)

    def factors(rows: slice) -> tuple[list[Tensor], list[Tensor], tuple[int, ...]]:
        """Of these images: output gradients [b, s, q], padded inputs, and how far apart windows are: image, down, right, run."""
        lefts = [gradient[rows].permute(0, 2, 3, 1).reshape(-1, span * height * width, q) for _, gradient in outputs]
        padded = [_padded(x[rows], geometry.padding) for x in inputs]
        image, down, right, _ = padded[0].stride()
        return lefts, padded, (image, down * geometry.stride[0], right * geometry.stride[1], down)

    if products:
        lefts, padded, (*strides, down) = factors(slice(None))
        at = [torch.arange(n, device="cpu") * stride for n, stride in zip((span, height, width), strides)]
        starts = (at[0][:, None, None] + at[1][:, None] + at[2]).flatten()
        blocks = [Block(weight, left, x.view(b, -1)) for (weight, _), left, x in zip(outputs, lefts, padded)]
        total, squares = products(blocks, Windows(starts, kh * kw * c, kw * c, down))
        return Dense(total.view(b, q, kh, kw, c), (0, 1, 4, 2, 3), squares)
    total = inputs[0].new_empty(b, q, kh * kw * c)
    at_a_time = max(1, WINDOWS // (span * height * width * kh * kw * c))  # so that the windows stay in the cache
    for first in range(0, b, at_a_time):
        lefts, padded, strides = factors(slice(first * span, min(b, first + at_a_time) * span))
        part = total[first : first + at_a_time]
        for k, (x, left, (weight, _)) in enumerate(zip(padded, lefts, outputs)):
            windows = x.as_strided((len(x), height, width, kh, kw * c), (*strides, 1)).reshape(len(part), -1, kh * kw * c)
            if k == 0:
                torch.bmm(left.transpose(1, 2), windows, out=part)
                if weight != 1:
                    part.mul_(weight)
            else:
                part.baddbmm_(left.transpose(1, 2), windows, alpha=weight)
    return Dense(total.view(b, q, kh, kw, c), (0, 1, 4, 2, 3))


def _padded(x: Tensor, padding: tuple[int, ...]) -> Tensor:
    """[n, c, h, w] -> [n, h + 2 v, w + 2 u, c], contiguous."""
    v, u = padding
    return F.pad(x.permute(0, 2, 3, 1), (0, 0, u, u, v, v)).contiguous()


def channels_last(weight: Tensor) -> Tensor:
    """A copy of a conv2d weight in channels-last memory, so that the result is too: pooling and norms then run several times faster.

    With one channel the strides are set by hand, because torch takes ambiguous ones for channels first.
    """
    _, c, h, w = weight.shape
    return weight.contiguous(memory_format=torch.channels_last).as_strided(weight.shape, (h * w * c, 1, w * c, c))


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


def _bind(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1
) -> tuple[Tensor, Tensor, Tensor | None, Any, Any, Any, int]:
    return input, weight, bias, stride, padding, dilation, groups
