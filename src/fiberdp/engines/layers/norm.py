"""Normalisation with an affine part: grad gamma_i = Sum_s B_{i,s} x^_{i,s}, grad beta_i = Sum_s B_{i,s}; x^ is made again, not kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from fiberdp.engines.capture import Capture, Record, Ref
from fiberdp.engines.layers.linear import weighted_sum
from fiberdp.engines.parts import Dense, Part
from fiberdp.engines.tracing import Batched

if TYPE_CHECKING:
    from fiberdp.engines.layers.plan import Refs
    from fiberdp.engines.tracing import Call


@dataclass
class Norm:
    """trailing: how many last dimensions the affine part has; 0: it has one entry a channel, dimension 1."""

    rule: ClassVar[str] = "norm"
    function: Callable[..., Any]
    refs: tuple[Ref, ...]
    weight: Ref | None
    bias: Ref | None
    shape: torch.Size
    trailing: int
    batched: Batched
    normalised: Callable[..., Tensor]
    reads: tuple[Ref, ...] = ()

    def run(self, capture: Capture, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        capture.keep(args[0] if args else kwargs["input"])
        capture.records[-1].arguments = args[1:], {name: value for name, value in kwargs.items() if name != "input"}
        return capture.watch(self.function(*args, **kwargs))

    def parts(self, records: Sequence[Record], examples: int) -> list[tuple[Ref, Part]]:
        weights, biases = [], []
        for record in records:
            gradient = record.gradients[0]
            if self.weight:
                args, kwargs = record.arguments
                x_hat = self.normalised(record.inputs[0], *args, **kwargs)
                weights.append((record.weight, self._reduced(gradient * x_hat, examples)))
            if self.bias:
                biases.append((record.weight, self._reduced(gradient, examples)))
        return [(ref, Dense(weighted_sum(terms))) for ref, terms in ((self.weight, weights), (self.bias, biases)) if ref and terms]

    def _reduced(self, x: Tensor, examples: int) -> Tensor:
        """[N, ...] -> [b, *shape]: the sum over everything but example and affine entry."""
        x = self.batched.split(x, examples)  # [b, span, ...]
        if self.trailing:
            return x.flatten(1, -1 - self.trailing).sum(1)
        return x.flatten(3).sum((1, 3)) if x.dim() > 3 else x.sum(1)


def _layer_norm(x: Tensor, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Tensor:
    return F.layer_norm(x, normalized_shape, None, None, eps)


def _rms_norm(x: Tensor, normalized_shape: Any, weight: Any = None, eps: float | None = None) -> Tensor:
    return F.rms_norm(x, normalized_shape, None, eps)


def _group_norm(x: Tensor, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Tensor:
    return F.group_norm(x, num_groups, None, None, eps)


def _batch_norm(
    x: Tensor, running_mean: Any, running_var: Any, weight: Any = None, bias: Any = None, training: bool = False,
    momentum: float = 0.1, eps: float = 1e-5,
) -> Tensor:  # fmt: skip
    return F.batch_norm(x, running_mean, running_var, None, None, False, momentum, eps)


def _instance_norm(
    x: Tensor, running_mean: Any = None, running_var: Any = None, weight: Any = None, bias: Any = None, use_input_stats: bool = True,
    momentum: float = 0.1, eps: float = 1e-5,
) -> Tensor:  # fmt: skip
    return F.instance_norm(x, running_mean, running_var, None, None, use_input_stats, momentum, eps)


_TRAILING = {F.layer_norm: _layer_norm, F.rms_norm: _rms_norm}
_CHANNEL = {F.group_norm: _group_norm, F.batch_norm: _batch_norm, F.instance_norm: _instance_norm}
FUNCTIONS = (*_TRAILING, *_CHANNEL)


def match(call: Call, refs: Refs) -> Norm | None:
    x = call.args[0] if call.args else call.kwargs["input"]
    named = dict(zip(_arguments(call.function), call.args)) | call.kwargs
    weight, bias, where = refs.of(named.get("weight")), refs.of(named.get("bias")), call.where(x)
    affine = named["weight"] if weight else named["bias"]
    if refs.of(x) or not where or named.get("training"):
        return None
    trailing = affine.dim() if call.function in _TRAILING else 0
    if where.dim != 0 and (not trailing or where.dim >= x.dim() - trailing):
        return None
    normalised = (_TRAILING | _CHANNEL)[call.function]
    return Norm(call.function, tuple(r for r in (weight, bias) if r), weight, bias, affine.shape, trailing, where, normalised)


def _arguments(function: Any) -> list[str]:
    helper = (_TRAILING | _CHANNEL)[function]
    return ["input", *helper.__code__.co_varnames[1 : helper.__code__.co_argcount]]
