"""A Trainer's training rows and collator as a source: what the plan's sampler draws from."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fiberdp import _tree
from fiberdp.engines import Loss, LossFn
from fiberdp.engines.synthetic import without_dropout
from fiberdp.sampling.source import MapSource, Source

TESTED = 32  # rows that are collated twice, spread over the data set
MOVED = 0.3  # std: so far from its initialisation, where attention is often uniform, that a model heeds what it can


class Ordered:
    """The rows of `dataset` in the order of a permutation."""

    def __init__(self, dataset: Any, order: Sequence[int]) -> None:
        self._dataset, self._order = dataset, order

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, i: int) -> Any:
        return self._dataset[self._order[i]]


def by_length(dataset: Any, lengths: Sequence[int] | None, name: str) -> Ordered:
    """Longest first, ties by position: a sampler's batch is ascending, so its micro-batches hold rows of about one length.

    lengths: of the rows; counted in field `name` if None.  Which rows a batch has is the sampler's matter, so this costs no privacy.
    Raises ValueError if the rows have no such field.
    """
    if lengths is None:
        try:
            lengths = [len(dataset[i][name]) for i in range(len(dataset))]
        except (KeyError, TypeError, IndexError) as error:
            raise ValueError(
                f"train_sampling_strategy='group_by_length': row 0 has no {name} to count ({type(error).__name__}): rows must have one, or "
                "a column named by length_column_name. Use 'random'."
            ) from error
    order = torch.as_tensor(lengths).sort(descending=True, stable=True).indices.tolist()
    return Ordered(dataset, order)


def source_of(dataset: Any, collate: Callable[..., Any]) -> Source:
    """Raises ValueError for rows or a collator that draw random numbers: they are looked at several times with other random states.

    A step that a resumed run repeats must see the same examples, because it is charged once and its noise is the same: on other examples,
    the difference of the two releases would be without noise.
    """
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise ValueError(
            f"train_dataset is a {type(dataset).__name__}: a data set with len() and [i] is needed, because the plan's sampler must draw "
            "the batches that are accounted for. Load it without streaming."
        )
    if not len(dataset):
        raise ValueError("train_dataset has no rows: there is nothing to train on. Check how it was made.")
    source = MapSource(dataset, collate)
    some = _some(len(source))
    with _any_state(0):
        first = source.take(some)
    for seed in (1, 2):
        with _any_state(seed):
            again = source.take(some)
        if not _equal(first, again):
            raise ValueError(
                "train_dataset and data_collator give the same rows other values each time: they may draw no random numbers, because a "
                "resumed run repeats a step, with the same noise, and must see the same examples. Mask or augment once, with dataset.map, "
                "or give the method an augmentation."
            )
    return source


def row_of(source: Source) -> Any:
    """A batch of one row, as wide as the widest of some: for its structure."""
    return _tree.take(source.take(_some(len(source))), slice(0, 1))


def check_padding(model: nn.Module, loss_fn: LossFn, source: Source) -> None:
    """Raise ValueError if a row has another loss beside a longer row than alone.

    Looks at the shortest and the longest of some rows, at weights moved at random, and releases nothing of it.  A batch is padded to its
    longest row: a model that heeds the padding (no attention mask; positions counted from padding on the left) would let one example
    change the gradients of all others, and clipping would bound nothing.
    """
    device = next(model.parameters()).device
    rows = [torch.tensor([i]) for i in _some(len(source)).tolist()]
    sizes = [sum(leaf.numel() for leaf in _tree.leaves(source.take(row)) if isinstance(leaf, Tensor)) for row in rows]
    short, long = rows[sizes.index(min(sizes))], rows[sizes.index(max(sizes))]
    if min(sizes) == max(sizes):
        return
    generator = torch.Generator().manual_seed(0)
    weights = {
        name: p.detach() + MOVED * torch.randn(p.shape, generator=generator).to(p)
        for name, p in model.named_parameters()
        if p.requires_grad
    }

    def of_short(*which: Tensor) -> Tensor:
        with torch.no_grad(), without_dropout(model):
            return Loss(model, loss_fn).at(weights, _tree.to(source.take(torch.cat(which)), device), len(which))[0]

    alone, beside = of_short(short), of_short(short, long)
    rounding = 1000 * max(torch.finfo(p.dtype).eps for p in model.parameters() if p.is_floating_point())
    if bool((beside - alone).abs() > rounding * alone.abs().clamp(min=1)):
        raise ValueError(
            "a row has another loss when it is padded to a longer row of its batch than alone: padding must change nothing, because by "
            "it one example would change what others contribute. Return an attention_mask from the collator, pad on the right "
            "(tokenizer.padding_side), or pad all rows to one length."
        )


def _some(count: int) -> Tensor:
    return torch.linspace(0, count - 1, min(count, TESTED)).long().unique()


def _equal(a: Any, b: Any) -> bool:
    ours, theirs = _tree.leaves(a), _tree.leaves(b)
    return len(ours) == len(theirs) and all(
        torch.equal(x, y) if isinstance(x, Tensor) and isinstance(y, Tensor) else repr(x) == repr(y) for x, y in zip(ours, theirs)
    )


@contextmanager
def _any_state(seed: int) -> Iterator[None]:
    """Another state of every common generator, and the caller's afterwards."""
    before, before_numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        try:
            yield
        finally:
            random.setstate(before)
            np.random.set_state(before_numpy)
