"""A data set as the sampler sees it: a number of examples, and `take(indices) -> batch` for any indices, none included."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from fiberdp import _tree


@runtime_checkable
class Source(Protocol):
    def __len__(self) -> int: ...
    def take(self, indices: Tensor) -> Any: ...
    def fingerprint(self) -> str: ...


class TensorSource:
    """Nested dicts and tuples of tensors that all have N rows, in memory."""

    def __init__(self, tree: Any) -> None:
        self._tree = tree
        self._rows = _tree.rows(tree)

    def __len__(self) -> int:
        return self._rows

    def take(self, indices: Tensor) -> Any:
        return _tree.take(self._tree, indices)

    def fingerprint(self) -> str:
        """SHA-256 of all the data: secret, for the resume folder only.  A resumed run must see the same rows."""
        digest = hashlib.sha256()
        for leaf in _tree.leaves(self._tree):
            digest.update(f"{leaf.dtype}{tuple(leaf.shape)}".encode())
            digest.update(leaf.detach().cpu().contiguous().view(torch.uint8).numpy().data)
        return digest.hexdigest()


class PaddedSource(TensorSource):
    """Rows of different lengths: {"length": [N], others [N] or [N, L]}, of which a batch keeps the columns that its longest row fills.

    The rows are put in order, longest first, ties by position: a sampler's batch is ascending, so its micro-batches hold rows of about
    one length, and row 0, from which memory is estimated, is the longest.  No row is changed: a model that heeds `length` gives each
    example the gradient that it has alone.

    >>> rows = {"ids": torch.tensor([[7, 0, 0], [1, 2, 0]]), "length": torch.tensor([1, 2])}
    >>> PaddedSource(rows).take(torch.tensor([0, 1]))["ids"]
    tensor([[1, 2],
            [7, 0]])
    """

    def __init__(self, tree: Mapping[str, Tensor]) -> None:
        order = tree["length"].sort(descending=True, stable=True).indices
        super().__init__(_tree.take(dict(tree), order))

    def take(self, indices: Tensor) -> Any:
        batch = super().take(indices)
        longest = max(1, int(batch["length"].max())) if len(indices) else 1
        return {name: leaf[:, :longest] if leaf.dim() == 2 else leaf for name, leaf in batch.items()}


class MapSource:
    """A map-style data set (`len`, `[i]`).  Rows are stacked by `collate`; an empty batch keeps their structure and dtypes."""

    def __init__(self, dataset: Any, collate: Callable[[Sequence[Any]], Any] | None = None) -> None:
        self._dataset = dataset
        self._collate = collate or _tree.collate
        self._empty: Any = None

    def __len__(self) -> int:
        return len(self._dataset)

    def take(self, indices: Tensor) -> Any:
        if len(indices):
            return _tree.normal(self._collate([self._dataset[i] for i in indices.tolist()]))
        if self._empty is None:
            self._empty = _tree.take(_tree.normal(self._collate([self._dataset[0]])), slice(0, 0))
        return self._empty

    def fingerprint(self) -> str:
        """Only the length: reading a whole unknown data set may be expensive."""
        return f"length {len(self)}"


def as_source(dataset: Any, collate: Callable[[Sequence[Any]], Any] | None = None) -> Source:
    """Wrap what users have: a mapping or tuple of tensors or arrays, a TensorDataset, or any map-style data set.  A source is itself.

    Raises ValueError for a DataLoader or an iterable: they draw their own batches, which the accounting cannot vouch for; and for
    a mapping or tuple that holds anything but tensors.
    """
    if isinstance(dataset, Source):
        return dataset
    if isinstance(dataset, torch.utils.data.DataLoader) or not hasattr(dataset, "__len__"):
        raise ValueError(
            f"dataset is a {type(dataset).__name__}: a data set with len() and [i], or a dict of tensors, is needed, because the plan's "
            "sampler must draw the batches that are accounted for. Pass the data set itself."
        )
    if isinstance(dataset, torch.utils.data.TensorDataset):
        return TensorSource(dataset.tensors)
    whole = _tree.normal(dataset) if isinstance(dataset, (Mapping, tuple)) else dataset
    if isinstance(whole, (dict, tuple, Tensor)):
        if not all(isinstance(leaf, Tensor) for leaf in _tree.leaves(whole)):
            raise ValueError(
                f"dataset is a {type(dataset).__name__} with fields that are not tensors: a mapping or tuple must hold tensors with "
                "one row per example, or one row could not be told from a field. Pass tensors, or a data set with len() and [i]."
            )
        return TensorSource(whole)
    return MapSource(dataset, collate)
