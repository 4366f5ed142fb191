"""One evaluation of the losses that leaves, for every use of a parameter, what its per-example gradient is made of.

Parameters enter as tensors that need no gradient, so no weight gradient is computed; what a function returned is watched instead,
through an edge of autograd's graph, so a later in-place operation (ReLU(inplace=True)) cannot change what is captured.  Nothing is
left on the user's module: this is a context, not a hook.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode

from fiberdp.engines.parts import Part
from fiberdp.engines.tracing import Batched, tensors


@dataclass(frozen=True)
class Ref:
    """A trainable parameter by its name, or a tensor computed from parameters alone by its number (name is then "")."""

    name: str = ""
    derived: int = -1


@dataclass
class Record:
    """What one use left at one evaluation point of weight `weight`.

    inputs: values the function read.  fixed: none of them needs a gradient.  arguments: its other arguments.
    gradients: of the sum of losses with respect to what was watched, float32 or more, None where it does not matter.
    """

    weight: float
    inputs: tuple[Tensor, ...] = ()
    fixed: bool = False
    gradients: tuple[Any, ...] = ()  # Tensor or None
    versions: tuple[int, ...] = ()
    arguments: tuple[Any, ...] = ()
    watched: list[GradientEdge | Tensor] = field(default_factory=list)


class Site(Protocol):
    """One call of a function that uses parameters: how it runs under capture, and the parts it leaves."""

    function: Callable[..., Any]
    rule: str
    refs: tuple[Ref, ...]
    reads: tuple[Ref, ...]  # what the call read at set-up, in order; refs are those that get gradients

    def run(self, capture: Capture, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...
    def parts(self, records: Sequence[Record], examples: int) -> list[tuple[Ref, Part]]:
        """records: one a point, those in which a gradient arrived; at least one."""
        ...


class Capture(TorchFunctionMode):
    """A context in which `sites` run, in their order.  views: the parameters at this point, by name."""

    def __init__(self, sites: Sequence[Site], views: dict[str, Tensor], weight: float, examples: int) -> None:
        super().__init__()
        self.sites = sites
        self.examples = examples
        self.weight = weight
        self.records: list[Record] = []
        self.values = views
        self.derived: list[Tensor] = []  # with the graph that leads to `leaves`
        self.leaves: dict[str, Tensor] = {}
        self._alive: list[Tensor] = list(views.values())  # so that no id is used twice
        self._refs = {id(view): Ref(name) for name, view in views.items()}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self._involved(args) and not (kwargs and self._involved(tuple(kwargs.values()))):
            return func(*args, **kwargs)
        at = len(self.records)
        read = tuple(ref for ref in map(self.ref, tensors((args, kwargs))) if ref)
        if at < len(self.sites) and self.sites[at].function == func and self.sites[at].reads == read:
            self.records.append(Record(self.weight))
            return self.sites[at].run(self, args, kwargs)
        result = func(*args, **kwargs)
        if next(tensors(result), None) is not None or func == Tensor.__setitem__:  # sizes and types may be asked at any time
            raise ValueError(self._changed(func))
        return result

    def gradients(self, losses: Tensor) -> None:
        """Fill the records' gradients: of sum(losses) with respect to everything watched."""
        if len(self.records) != len(self.sites):
            raise ValueError(self._changed(None))
        for site, record in zip(self.sites, self.records):
            if any(x._version != version for x, version in zip(record.inputs, record.versions)):
                raise ValueError(
                    f"the input of {name_of(site.function)} with {_names(site)} was changed in place after the layer had read it: it must "
                    "stay as it was, because the gradient is made of it. Use the operation that is not in place, or engine='vmap'."
                )
        watched = [item for record in self.records for item in record.watched]
        total = losses.sum()
        wanted = total.requires_grad and watched
        found = iter(torch.autograd.grad(total, watched, allow_unused=True) if wanted else [None] * len(watched))  # pyright: ignore
        for record in self.records:
            record.gradients = tuple(wide(next(found)) for _ in record.watched)
            record.watched = []

    def check_apart(self, loss: Tensor) -> None:
        """Raise ValueError unless `loss`, the first of two examples', reaches the first example's entries alone."""
        watched = [(site, item) for site, record in zip(self.sites, self.records) for item in record.watched]
        if not watched or not loss.requires_grad:
            return
        found = torch.autograd.grad(loss, [item for _, item in watched], allow_unused=True)  # pyright: ignore
        for (site, item), gradient in zip(watched, found):
            where = Batched(0, 1) if isinstance(item, Tensor) else site.batched  # pyright: ignore
            if gradient is not None and bool((where.split(gradient, self.examples)[1].abs() > 0).any()):  # NaN tells nothing
                raise ValueError(
                    f"at {name_of(site.function)} with {_names(site)} one example's loss reaches another's entries: examples must lie one "
                    "after the other in the batch's dimension and not be mixed. Put the batch first before flattening (not [T, b, …] or "
                    "cat([view, view])), or use engine='vmap' or engine='loop'."
                )

    # What sites call.

    def ref(self, value: Any) -> Ref | None:
        return self._refs.get(id(value))

    def track(self, value: Tensor, graph: Tensor) -> None:
        """`value`, computed from parameters alone by `graph`, is from now on a tensor to watch for."""
        self._refs[id(value)] = Ref(derived=len(self.derived))
        self._alive.append(value)
        self.derived.append(graph)

    def graph(self, value: Tensor) -> Tensor:
        """The tensor that stands for `value` in the graph from the parameters to what is derived from them."""
        ref = self._refs.get(id(value))
        if ref is None:
            return value
        if not ref.name:
            return self.derived[ref.derived]
        return self.leaves.setdefault(ref.name, self.values[ref.name].detach().requires_grad_())

    def keep(self, *inputs: Tensor) -> None:
        record = self.records[-1]
        record.inputs = tuple(x.detach() for x in inputs)
        record.fixed = not any(x.requires_grad for x in inputs)
        record.versions = tuple(x._version for x in inputs)

    def watch(self, result: Tensor) -> Tensor:
        """The result of a captured function, whose gradient is wanted."""
        if not result.requires_grad or result._is_view():
            result = _Source.apply(result, torch.empty(0, device=result.device, requires_grad=True))  # pyright: ignore
        self.records[-1].watched.append(get_gradient_edge(result))
        return result

    def per_example(self, value: Tensor) -> Tensor:
        """A parameter as one copy an example, [b, *shape] without memory of its own, whose gradient is wanted."""
        leaf = value.detach().expand(self.examples, *value.shape).requires_grad_()
        self.records[-1].watched.append(leaf)
        return leaf

    def pull_back(self, ref: Ref, gradient: Tensor) -> dict[str, Tensor]:
        """Per-example gradients [b, *shape] of the parameters from those of a tensor derived from them."""
        names = list(self.leaves)
        found = torch.autograd.grad(
            self.derived[ref.derived], [self.leaves[name] for name in names], gradient,
            retain_graph=True, allow_unused=True, is_grads_batched=True,
        )  # fmt: skip
        return {name: g for name, g in zip(names, found) if g is not None}

    def _involved(self, values: Sequence[Any]) -> bool:
        refs = self._refs
        return any(
            id(value) in refs
            or (isinstance(value, (tuple, list)) and self._involved(value))
            or (isinstance(value, dict) and self._involved(tuple(value.values())))
            for value in values
        )

    def _changed(self, func: Any) -> str:
        expected = self.sites[len(self.records)] if len(self.records) < len(self.sites) else None
        return (
            f"the model ran {name_of(func) if func else 'nothing more'} on a parameter where it ran "
            f"{name_of(expected.function) if expected else 'nothing more'} at set-up: engine ghost needs the same operations for every "
            "batch, because it was checked for those. Use engine='vmap' or engine='loop'."
        )


def wide(x: Any) -> Any:
    """In float32 if `x` is shorter: norms and sums are never half precision."""
    return x.float() if x is not None and x.dtype in (torch.bfloat16, torch.float16) else x


def fixed(records: Sequence[Record]) -> bool:
    """Whether the function read the same at every point.  Needing no gradient is not enough: it may come from behind a detach."""
    first, *others = records
    return first.fixed and all(r.fixed and all(map(torch.equal, first.inputs, r.inputs)) for r in others)


class _Source(torch.autograd.Function):
    """The identity without a copy: for the first layers, whose inputs need no gradient, and for views, whose node a later in-place
    operation would replace, so that no gradient would arrive at the edge.
    """

    @staticmethod
    def forward(ctx: Any, result: Tensor, anchor: Tensor) -> Tensor:
        return result.data  # the same memory, but no view of `result`

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], None


def name_of(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", str(function)).strip("_")


def _names(site: Site) -> str:
    return ", ".join(ref.name for ref in site.refs if ref.name) or "parameters"
