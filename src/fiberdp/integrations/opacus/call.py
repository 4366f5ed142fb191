"""What a loop does with one physical batch, criterion(module(…), …), as a loss of a batch of tensors that can be evaluated again."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

OUTPUT = object()
"""Stands for the module's output among the criterion's arguments."""


class Call:
    """Nested arguments with their tensors taken out: `batch`, {position: Tensor[b, …]}, is all of them that belongs to examples.

    rows: b, the first dimension of the first tensor.  Raises ValueError unless every tensor has as many rows.
    """

    def __init__(self, arguments: Any) -> None:
        self.leaves, self.spec = tree_flatten(arguments)
        self.batch = {str(i): leaf for i, leaf in enumerate(self.leaves) if isinstance(leaf, Tensor)}
        shapes = [tuple(leaf.shape) for leaf in self.batch.values()]
        if not shapes or any(not shape or shape[0] != shapes[0][0] for shape in shapes):
            raise ValueError(
                f"module and criterion were given tensors of shapes {shapes}: every one must have one row per example as its first "
                "dimension, so that examples can be told apart. Keep what all examples share in the module or the criterion."
            )
        self.rows = shapes[0][0]
        self._versions = [leaf._version for leaf in self.batch.values()]

    @property
    def changed(self) -> bool:
        """Whether a tensor was changed in place since."""
        return self._versions != [leaf._version for leaf in self.batch.values()]

    def arguments(self, batch: dict[str, Tensor]) -> Any:
        """The arguments with the tensors of `batch` in the places of these."""
        return tree_unflatten([batch.get(str(i), leaf) for i, leaf in enumerate(self.leaves)], self.spec)


def per_example(criterion: Callable[..., Any]) -> Callable[..., Tensor]:
    """criterion as a function that returns one loss per example, Tensor[b].

    A module or object with `reduction` is copied and asked for "none"; what it then returns for one example, [b, …], is averaged over that
    example's entries, without those that its `ignore_index` leaves out: an example's loss is what it would have alone.  Anything else
    must return one loss per example itself.
    """
    if not hasattr(criterion, "reduction"):
        return criterion
    alone: Any = copy.copy(criterion)
    alone.reduction = "none"
    ignored = getattr(criterion, "ignore_index", None)

    def losses(*args: Any, **kwargs: Any) -> Any:
        found = alone(*args, **kwargs)
        if not isinstance(found, Tensor) or found.dim() < 2:
            return found
        found = found.flatten(1)
        target = kwargs.get("target", args[1] if len(args) > 1 else None)
        if ignored is None or not isinstance(target, Tensor) or target.flatten(1).shape != found.shape:
            return found.mean(1)
        return found.sum(1) / (target.flatten(1) != ignored).sum(1).clamp(min=1)

    return losses


class CallLoss:
    """loss_fn(module, batch) of whatever call was seen last.  known: whether there is a criterion; without one every loss is sum(outputs),
    which the receipt multiplies by 0."""

    def __init__(self, criterion: Callable[..., Any] | None) -> None:
        self.losses = None if criterion is None else per_example(criterion)
        self.call: Call | None = None

    @property
    def known(self) -> bool:
        return self.losses is not None

    def __call__(self, module: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        assert self.call is not None
        (args, kwargs), *rest = self.call.arguments(batch)
        output = module(*args, **kwargs)
        if self.losses is None:
            outputs = [leaf for leaf in tree_flatten(output)[0] if isinstance(leaf, Tensor) and leaf.requires_grad]
            return torch.stack([leaf.float().sum() for leaf in outputs]).sum()
        ((others, named),) = rest
        return self.losses(*put(output, others), **dict(zip(named, put(output, list(named.values())))))


def put(output: Any, values: Any) -> list[Any]:
    """`values` with the module's output where OUTPUT stands."""
    return [output if value is OUTPUT else value for value in values]
