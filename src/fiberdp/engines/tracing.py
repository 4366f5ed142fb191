"""Which functions of a model use its parameters, and where the batch stands in what they read and return.

The loss is evaluated twice on blank data, with 2 and with 3 examples, and every torch function that runs is noted.  A dimension
that grows from 2n to 3n is the batch; no layer's convention has to be known or guessed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge
from torch.overrides import TorchFunctionMode

SIZES = (2, 3)


@dataclass(frozen=True)
class Batched:
    """Dimension `dim` holds the examples, `span` consecutive entries each."""

    dim: int
    span: int

    def split(self, tensor: Tensor, examples: int) -> Tensor:
        """[..., b span, ...] -> [b, span, ...], the rest in order: a view where memory allows.  The span may differ from the trace's."""
        return self.unflatten(tensor, examples).movedim((self.dim, self.dim + 1), (0, 1))

    def unflatten(self, tensor: Tensor, examples: int) -> Tensor:
        """[..., b span, ...] -> [..., b, span, ...].  Raises ValueError if the examples have not equally many entries."""
        size = tensor.shape[self.dim]
        if size % examples:
            raise ValueError(
                f"a layer read {size} entries for {examples} examples: each example must have equally many, or its gradient cannot be told "
                "apart. Pad instead of selecting entries by value, or use engine='vmap' or engine='loop'."
            )
        return tensor.unflatten(self.dim, (examples, size // examples))


UNCLEAR = Batched(-1, 0)
"""Stands for a tensor whose shape depends on the number of examples in another way, such as [b, b]."""


@dataclass
class Call:
    """One function call on the smaller batch.  batched: of each tensor argument and result, by id.  wrapped: it ran inside torch.func.

    before, after: the graph's nodes that lead to the arguments and to the results.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: list[Tensor]
    batched: dict[int, Batched | None]
    wrapped: bool = False
    before: tuple[Node, ...] = ()
    after: tuple[Node, ...] = ()

    def where(self, tensor: Any) -> Batched | None:
        """Where the batch stands in this argument or result; None if it has none, UNCLEAR if no one dimension holds it."""
        return self.batched.get(id(tensor)) if isinstance(tensor, Tensor) else None


def tensors(value: Any) -> Iterator[Tensor]:
    """Every tensor among arguments or results, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors(item)


def rebuilt(value: Any, fn: Callable[[Tensor], Any]) -> Any:
    """Arguments or results with fn(tensor) in the place of every tensor."""
    if isinstance(value, Tensor):
        return fn(value)
    if isinstance(value, dict):
        return {key: rebuilt(item, fn) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        items = [rebuilt(item, fn) for item in value]
        return type(value)(items) if type(value) in (tuple, list) else type(value)(*items)  # pyright: ignore
    return value


def nodes(values: Iterable[Tensor]) -> tuple[Node, ...]:
    return tuple(get_gradient_edge(value).node for value in values if value.requires_grad)


def check_seen(calls: list[Call], views: dict[str, Tensor], losses: Tensor) -> None:
    """Raise ValueError if a parameter enters the losses' graph through anything but a noted call: a scripted module, an autograd Function.

    Going back from a call's results to its arguments visits what the call did; any other node that follows on a parameter is unseen.
    """
    seen: set[Node] = set()
    for call in calls:
        visit(call.after, set(call.before), seen)
    whole = visit(nodes([losses]))
    names = {get_gradient_edge(view).node: name for name, view in views.items()}
    hidden = {names[after] for node in whole - seen for after, _ in node.next_functions if after in names}
    if hidden:
        raise ValueError(
            f"{', '.join(sorted(hidden))} is used inside a scripted module or an autograd Function: engine ghost sees torch functions "
            "only, and its gradient would be missing. Pass the parameter through torch functions, or use engine='loop'."
        )


def visit(start: Iterable[Node], stop: Set[Node] = frozenset(), found: set[Node] | None = None) -> set[Node]:
    """Every node from `start` back to `stop`, added to `found`."""
    found = set() if found is None else found
    waiting = [node for node in start if node not in stop]
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += [after for after, _ in node.next_functions if after is not None and after not in stop]
    return found


class _Note(TorchFunctionMode):
    """Notes every call that returns a tensor or writes into one."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], list[Tensor], list[torch.Size], tuple[Any, ...]]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        before, sources = [t.shape for t in tensors((args, kwargs))], nodes(tensors((args, kwargs)))
        result = func(*args, **kwargs)
        results = list(tensors(result))
        if results or func == Tensor.__setitem__:
            wrapped = any(
                torch._C._functorch.is_functorch_wrapped_tensor(t)  # pyright: ignore
                for t in tensors((args, kwargs))
            )
            self.calls.append((func, args, kwargs, results, before + [t.shape for t in results], (wrapped, sources, nodes(results))))
        return result


def trace(run: Callable[[int], Tensor]) -> tuple[list[Call], Tensor]:
    """Every call of `run(examples)`, and the losses it returned.  Raises ValueError if the calls depend on the number of examples."""
    notes, losses = [], []
    for size in SIZES:
        with _Note() as note:
            losses.append(run(size))
        notes.append(note.calls)
    small, large = notes
    if [call[0] for call in small] != [call[0] for call in large]:
        raise ValueError(
            f"the model runs other operations on {SIZES[0]} examples than on {SIZES[1]}: they must be the same for any number, because "
            "each one's gradient is to be told apart. Use engine='loop'."
        )
    calls = [
        Call(func, args, kwargs, results, {
            id(tensor): _batched(before, after) for tensor, before, after in zip([*tensors((args, kwargs)), *results], shapes, larger[4])
        }, *state)
        for (func, args, kwargs, results, shapes, state), larger in zip(small, large)
    ]  # fmt: skip
    return calls, losses[0]


def _batched(small: torch.Size, large: torch.Size) -> Batched | None:
    grown = [i for i, (a, b) in enumerate(zip(small, large)) if a != b]
    if not grown and len(small) == len(large):
        return None
    if len(grown) != 1 or len(small) != len(large):
        return UNCLEAR
    dim = grown[0]
    span, rest = divmod(small[dim], SIZES[0])
    return Batched(dim, span) if rest == 0 and large[dim] == SIZES[1] * span else UNCLEAR
