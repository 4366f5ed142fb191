"""Which functions of a model use its parameters, and where the batch stands in what they read and return.

The loss is evaluated twice on blank data, with 2 and with 3 examples, and every torch function that runs is noted.  A dimension
that grows from 2n to 3n is the batch; no layer's convention has to be known or guessed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

SIZES = (2, 3)


@dataclass(frozen=True)
class Batched:
    """Dimension `dim` holds the examples, `span` consecutive entries each."""

    dim: int
    span: int

    def split(self, tensor: Tensor, examples: int) -> Tensor:
        """[..., b span, ...] -> [b, span, ...], the rest in order: a view where memory allows one.  The span may differ from the trace's."""
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
    """One function call on the smaller batch.  batched: of each tensor argument and result, by id.  wrapped: it ran inside torch.func."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: list[Tensor]
    batched: dict[int, Batched | None]
    wrapped: bool = False

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


class _Note(TorchFunctionMode):
    """Notes every call that returns a tensor or writes into one."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], list[Tensor], list[torch.Size], bool]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        before = [t.shape for t in tensors((args, kwargs))]
        result = func(*args, **kwargs)
        results = list(tensors(result))
        if results or func == Tensor.__setitem__:
            wrapped = any(torch._C._functorch.is_functorch_wrapped_tensor(t) for t in tensors((args, kwargs)))
            self.calls.append((func, args, kwargs, results, before + [t.shape for t in results], wrapped))
        return result


def trace(run: Callable[[int], Any]) -> list[Call]:
    """Every call of `run(examples)` that returns a tensor.  Raises ValueError if the calls depend on the number of examples."""
    notes = []
    for size in SIZES:
        with _Note() as note:
            run(size)
        notes.append(note.calls)
    small, large = notes
    if [call[0] for call in small] != [call[0] for call in large]:
        raise ValueError(
            f"the model runs other operations on {SIZES[0]} examples than on {SIZES[1]}: they must be the same for any number, because "
            "each one's gradient is to be told apart. Use engine='loop'."
        )
    return [
        Call(func, args, kwargs, results, {
            id(tensor): _batched(before, after) for tensor, before, after in zip([*tensors((args, kwargs)), *results], shapes, larger[4])
        }, wrapped)
        for (func, args, kwargs, results, shapes, wrapped), larger in zip(small, large)
    ]  # fmt: skip


def _batched(small: torch.Size, large: torch.Size) -> Batched | None:
    grown = [i for i, (a, b) in enumerate(zip(small, large)) if a != b]
    if not grown and len(small) == len(large):
        return None
    if len(grown) != 1 or len(small) != len(large):
        return UNCLEAR
    dim = grown[0]
    span, rest = divmod(small[dim], SIZES[0])
    return Batched(dim, span) if rest == 0 and large[dim] == SIZES[1] * span else UNCLEAR
