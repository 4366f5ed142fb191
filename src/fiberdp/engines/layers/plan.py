"""From the traced calls to sites: each call that reads a trainable parameter gets the rule that serves it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from fiberdp.engines.capture import Ref, Site, name_of
from fiberdp.engines.layers import attention, broadcast, conv, embedding, linear, norm
from fiberdp.engines.layers.derived import Constant, Derived
from fiberdp.engines.layers.fallback import Fallback
from fiberdp.engines.tracing import UNCLEAR, Call, tensors

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
    data: set[int] = set()  # tensors made of what has a batch
    for call in calls:
        arguments = list(tensors((call.args, call.kwargs)))
        of_data = any(call.where(tensor) or id(tensor) in data for tensor in arguments)
        if of_data and not _blank(call.function):
            data.update(map(id, call.results))
        read = tuple(ref for ref in map(refs.of, arguments) if ref)
        if not read:
            continue
        _check(call, read, of_data)
        if not any(result.requires_grad for result in call.results):
            site = Constant(call.function, read)
        elif not any(call.where(tensor) for tensor in [*arguments, *call.results]):
            site = Derived.of(call, read, refs)
        else:
            rule = RULES.get(call.function)
            site = (rule(call, refs) if rule else None) or Fallback.of(call, read)
        site.reads = read
        sites.append(site)
    return sites


def _blank(function: Callable[..., Any]) -> bool:
    """new_zeros, zeros_like, …: of the argument only its type and shape."""
    return name_of(function).startswith("new_") or name_of(function).endswith("_like")


def _check(call: Call, read: tuple[Ref, ...], of_data: bool) -> None:
    """Raise ValueError for a use of a parameter that would be silently wrong."""
    names = ", ".join(ref.name for ref in read if ref.name) or "a tensor derived from parameters"
    places = [call.where(tensor) for tensor in tensors((call.args, call.kwargs, call.results))]
    if call.function == Tensor.__setitem__:
        said, do = f"{names} is written into another tensor (x[…] = p)", "Use torch.cat, torch.where or an addition"
    elif call.wrapped:
        said, do = f"{name_of(call.function)} with {names} runs inside torch.func (vmap, grad)", "Call it on whole batches"
    elif UNCLEAR in places:
        said, do = f"no one dimension holds the examples where {name_of(call.function)} reads {names}", "Give the batch one dimension"
    elif not any(places) and of_data:
        said, do = f"{name_of(call.function)} with {names} reads data in which no dimension holds the examples", "Pad instead of selecting"
    else:
        return
    raise ValueError(f"{said}: engine ghost cannot tell the examples apart there. {do}, or use engine='vmap' or engine='loop'.")
