"""Batches as nested dicts and tuples.  A Tensor leaf has one row per example; a list leaf holds one object per example.

Text and other things torch cannot hold stay in lists, so a batch of anything can be cut into micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

Tree = Any


def normal(tree: Tree) -> Tree:
    """What users' collate functions return, as nested dicts and tuples: any mapping is a dict, a list of tensors or mappings a tuple."""
    if isinstance(tree, Mapping):
        return {key: normal(value) for key, value in tree.items()}
    if isinstance(tree, tuple) or (isinstance(tree, list) and any(isinstance(x, (Tensor, Mapping, tuple, np.ndarray)) for x in tree)):
        return tuple(normal(value) for value in tree)
    return torch.as_tensor(tree) if isinstance(tree, np.ndarray) and tree.dtype.kind in "biuf" else tree


def map_leaves(fn: Callable[[Any], Any], tree: Tree) -> Tree:
    """Apply `fn` to every leaf (Tensor or list), keeping the structure."""
    if isinstance(tree, dict):
        return {key: map_leaves(fn, value) for key, value in tree.items()}
    if isinstance(tree, tuple):
        return tuple(map_leaves(fn, value) for value in tree)
    return fn(tree)


def leaves(tree: Tree) -> list[Any]:
    """All leaves, in the order of `map_leaves`."""
    found: list[Any] = []
    map_leaves(found.append, tree)
    return found


def rows(tree: Tree) -> int:
    """The number of examples.  Raises ValueError if the leaves disagree or there are none."""
    sizes = {len(leaf) for leaf in leaves(tree)}
    if len(sizes) != 1:
        raise ValueError(
            f"batch leaves have {sorted(sizes) or 'no'} rows: every leaf must have one row per example, so that examples can be "
            "told apart. Give each tensor the batch as its first dimension."
        )
    return sizes.pop()


def take(tree: Tree, index: slice | Tensor) -> Tree:
    """The rows `index` of every leaf."""

    def pick(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) or isinstance(index, slice):
            return leaf[index]
        return [leaf[i] for i in index.tolist()]

    return map_leaves(pick, tree)


def zeros(row: Tree, count: int) -> Tree:
    """`count` examples of the structure of the one-row batch `row`, holding zeros (empty strings, None): no data in them."""

    def blank(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.new_zeros((count, *leaf.shape[1:]))
        return [type(leaf[0])() if isinstance(leaf[0], (str, bytes)) else None] * count

    return map_leaves(blank, row)


def to(tree: Tree, device: torch.device) -> Tree:
    return map_leaves(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, tree)


def collate(examples: Sequence[Any]) -> Tree:
    """Stack examples (numbers, arrays, tensors, lists of numbers; mappings and tuples of these) into one batch.

    Anything else (strings, None) becomes a list.  Raises ValueError when shapes differ: padding is the caller's choice.

    >>> collate([{"ids": [1, 2], "text": "a"}, {"ids": [3, 4], "text": "b"}])
    {'ids': tensor([[1, 2],
            [3, 4]]), 'text': ['a', 'b']}
    """
    first = examples[0]
    if isinstance(first, (str, bytes)):  # NumPy's strings too, which are np.generic
        return list(examples)
    if isinstance(first, Mapping):
        return {key: collate([example[key] for example in examples]) for key in first}
    if isinstance(first, tuple) or (isinstance(first, list) and not _is_numeric(first)):
        return tuple(collate(column) for column in zip(*examples, strict=True))
    if isinstance(first, (Tensor, np.ndarray, np.generic, bool, int, float)) or _is_numeric(first):
        tensors = [_as_tensor(example) for example in examples]
        shapes = sorted({tuple(t.shape) for t in tensors})
        if len(shapes) > 1:
            raise ValueError(
                f"examples have shapes {', '.join(map(str, shapes[:3]))}: all rows of a field must have one shape to be stacked. "
                "Pad them in the data set, or pass collate=…."
            )
        return torch.stack(tensors)
    return list(examples)


def _is_numeric(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(x, (bool, int, float)) or _is_numeric(x) for x in value)


def _as_tensor(value: Any) -> Tensor:
    if isinstance(value, float):
        return torch.tensor(value)
    return torch.as_tensor(value)
