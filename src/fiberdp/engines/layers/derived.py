"""Functions of parameters alone: views, parametrisations, and what no gradient passes.

A derived tensor enters the model like a parameter of its own; its per-example gradients are pulled back through its graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from fiberdp.engines.capture import Capture, Record, Ref
from fiberdp.engines.parts import Part
from fiberdp.engines.tracing import rebuilt, tensors

if TYPE_CHECKING:
    from fiberdp.engines.layers.plan import Refs
    from fiberdp.engines.tracing import Call

TRANSPOSES = (torch.t, Tensor.t, Tensor.T.__get__, Tensor.mT.__get__, torch.transpose, Tensor.transpose)  # pyright: ignore


@dataclass
class Constant:
    """No gradient passes this call: weight.detach(), or a region under no_grad."""

    rule: ClassVar[str] = "constant"
    function: Callable[..., Any]
    refs: tuple[Ref, ...]
    reads: tuple[Ref, ...] = ()

    def run(self, capture: Capture, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.function(*args, **kwargs)

    def parts(self, records: Sequence[Record], examples: int) -> list[tuple[Ref, Part]]:
        return []


@dataclass
class Derived:
    """Tensors computed from parameters alone: as many as `results`."""

    rule: ClassVar[str] = "derived"
    function: Callable[..., Any]
    refs: tuple[Ref, ...]
    reads: tuple[Ref, ...] = ()
    results: int = 1

    @classmethod
    def of(cls, call: Call, read: tuple[Ref, ...], refs: Refs) -> Derived:
        for result in call.results:
            if not refs.of(result):  # weight.to(dtype) may return its argument
                refs.derive(result)
        if call.function in TRANSPOSES and len(call.results) == 1 and read[0].name:
            source, result = call.args[0], call.results[0]
            if source.dim() == 2 and result.shape == source.shape[::-1] and result.stride() == source.stride()[::-1]:
                refs.transpose(result, read[0].name)
        return cls(call.function, read, results=len(call.results))

    def run(self, capture: Capture, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with torch.enable_grad():
            graph = self.function(*rebuilt(args, capture.graph), **rebuilt(kwargs, capture.graph))

        own = {id(capture.graph(tensor)): tensor for tensor in tensors((args, kwargs))}

        def value(tensor: Tensor) -> Tensor:
            if id(tensor) in own:
                return own[id(tensor)]
            plain = tensor.detach()
            capture.track(plain, tensor)
            return plain

        return rebuilt(graph, value)

    def parts(self, records: Sequence[Record], examples: int) -> list[tuple[Ref, Part]]:
        return []
