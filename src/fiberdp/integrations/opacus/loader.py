"""A DataLoader over the user's data set whose batches are the plan's, drawn from the run's keys."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, Sampler, SequentialSampler

if TYPE_CHECKING:
    from fiberdp.integrations.opacus.steps import OpacusSteps


class Batches(Sampler[list[int]]):
    """The logical batches of the steps that come, one epoch at a time; empty ones are batches too."""

    def __init__(self, steps: OpacusSteps) -> None:
        self.steps = steps
        self.restarted: Callable[[], None] = lambda: None  # told when a pass begins: what is left of a pass that was broken off is void
        self._sizes: dict[int, int] = {}

    def __len__(self) -> int:
        return self.steps.plan.sampler.steps_per_epoch

    def __iter__(self) -> Iterator[list[int]]:
        self.restarted()
        self._sizes.clear()
        first, plan = self.steps.optimizer.t, self.steps.plan
        for step in range(first, min(first + len(self), plan.steps)):
            indices = self._draw(step)
            self._sizes[step] = len(indices)
            yield indices.tolist()

    def size(self, step: int) -> int:
        """The number of examples in the batch of `step`.  Raw data: compared with, never shown."""
        size = self._sizes.pop(step, None)
        return len(self._draw(step)) if size is None else size

    def _draw(self, step: int) -> Tensor:
        return self.steps.plan.sampler.indices(self.steps.keys.stream("data"), step)


class WithEmpty:
    """The user's collate function, and for an empty batch the structure of a batch with 0 rows."""

    def __init__(self, collate: Callable[[list[Any]], Any], dataset: Any) -> None:
        self.collate, self.dataset = collate, dataset

    def __call__(self, examples: list[Any]) -> Any:
        return self.collate(examples) if examples else emptied(self.collate([self.dataset[0]]))


def emptied(batch: Any) -> Any:
    """`batch` with 0 rows: structure, trailing shapes and dtypes stay.

    >>> import torch
    >>> emptied([torch.ones(1, 3), {"text": ["a"]}])
    [tensor([], size=(0, 3)), {'text': []}]
    """
    if isinstance(batch, Tensor):
        return batch[:0]
    if isinstance(batch, Mapping):
        return {key: emptied(value) for key, value in batch.items()}
    if isinstance(batch, tuple):
        return tuple(emptied(value) for value in batch)
    if isinstance(batch, list):
        return [emptied(value) for value in batch] if any(isinstance(x, (Tensor, Mapping, list, tuple)) for x in batch) else []
    return batch


def batch_size_of(loader: DataLoader[Any]) -> int:
    """B, from a plain DataLoader.  Raises ValueError for one whose own way of drawing batches would be lost."""
    if isinstance(loader.dataset, IterableDataset) or not hasattr(loader.dataset, "__len__"):
        raise ValueError(
            "data_loader is over an iterable data set: one with len() and [i] is needed, because each example must be drawn with a known "
            "probability. Use a map-style data set."
        )
    if loader.batch_size is None:
        raise ValueError(
            f"data_loader has a batch sampler of its own ({type(loader.batch_sampler).__name__}): the plan's must draw the batches, "
            "because those are accounted for. Give DataLoader(dataset, batch_size=…), as it was before anything made it private."
        )
    if not isinstance(loader.sampler, (RandomSampler, SequentialSampler)) or getattr(loader.sampler, "replacement", False):
        raise ValueError(
            f"data_loader draws with {type(loader.sampler).__name__}: it would be replaced by the plan's sampler, because that is "
            "accounted for. Give a DataLoader with shuffle=True or False; to train on a part, give torch.utils.data.Subset."
        )
    return loader.batch_size


def private_loader(loader: DataLoader[Any], batches: Batches) -> DataLoader[Any]:
    """A new DataLoader like `loader`, over the plan's batches."""
    collate: Any = WithEmpty(loader.collate_fn, loader.dataset)
    return DataLoader(
        loader.dataset, batch_sampler=batches, collate_fn=collate, num_workers=loader.num_workers, pin_memory=loader.pin_memory,
        timeout=loader.timeout, worker_init_fn=loader.worker_init_fn, multiprocessing_context=loader.multiprocessing_context,
        generator=loader.generator, prefetch_factor=loader.prefetch_factor, persistent_workers=loader.persistent_workers,
    )  # fmt: skip
