"""From the traced calls to sites: each call that reads a trainable parameter gets the rule that serves it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from fiberdp.engines.capture import Ref, Site
from fiberdp.engines.layers import attention, broadcast, conv, embedding, linear, norm
from fiberdp.engines.layers.derived import Constant, Derived
from fiberdp.engines.layers.fallback import Fallback
from fiberdp.engines.tracing import Call, tensors

Match = Callable[[Call, "Refs"], Site | None]

RULES: dict[Any, Match] = {
    function: rule.match for rule in (linear, conv, embedding, norm, attention, broadcast) for function in rule.FUNCTIONS
}


class Refs:
    """Which tensors of a trace are parameters or derived from them."""

    def __init__(self, views: dict[str, Tensor]) -> None:
        self._refs = {id(view): Ref(name) for name, view in views.items()}
        self._transposed: dict[int, str] = {}
        self._count = 0

    def of(self, value: Any) -> Ref | None:
        return self._refs.get(id(value))

    def transposed(self, value: Any) -> str | None:
        """The name of the parameter whose transpose `value` is, if it is one's."""
        return self._transposed.get(id(value))

    def derive(self, value: Tensor) -> None:
        self._refs[id(value)] = Ref(derived=self._count)
        self._count += 1

    def transpose(self, value: Tensor, name: str) -> None:
        self._transposed[id(value)] = name


def plan_sites(calls: list[Call], views: dict[str, Tensor]) -> list[Site]:
    """One site a call that reads a trainable parameter, in order.  views: the parameters that the trace ran with."""
    refs, sites = Refs(views), []
    for call in calls:
        arguments = list(tensors((call.args, call.kwargs)))
        read = tuple(ref for ref in map(refs.of, arguments) if ref)
        if not read:
            continue
        if not any(result.requires_grad for result in call.results):
            sites.append(Constant(call.function, read))
        elif not any(call.where(tensor) for tensor in [*arguments, *call.results]):
            sites.append(Derived.of(call, read, refs))
        else:
            rule = RULES.get(call.function)
            sites.append((rule(call, refs) if rule else None) or Fallback.of(call, read, refs))
    return sites
