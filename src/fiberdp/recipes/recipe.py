"""A recipe: everything a run needs but the method's seed, as one value."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from fiberdp._random import Keys


@dataclass(frozen=True)
class Published:
    """A figure that somebody reports for this task: context for ours, never a bar.  value, std: in percent, or in the metric's own unit."""

    method: str
    epsilon: float
    value: float
    place: str
    std: float | None = None
    metric: str = "accuracy"


def published(place: str, epsilons: Sequence[float], figures: Mapping[str, Sequence[float]], **rest: Any) -> tuple[Published, ...]:
    """The rows of a table of a paper: method -> one figure an epsilon."""
    return tuple(
        Published(method, epsilon, value, place, **rest)
        for method, row in figures.items()
        for epsilon, value in zip(epsilons, row, strict=True)
    )


def image_logits(model: nn.Module, batch: Any) -> Tensor:
    return model(batch["image"])


def classification_loss(model: nn.Module, batch: Any, logits: Callable[[nn.Module, Any], Tensor] = image_logits) -> Tensor:
    """Cross-entropy, one number an example."""
    from torch.nn.functional import cross_entropy

    return cross_entropy(logits(model, batch), batch["label"], reduction="none")


def classification(model: nn.Module, rows: Any, logits: Callable[[nn.Module, Any], Tensor] = image_logits) -> dict[str, float]:
    """accuracy and loss; f1 too for two classes."""
    from fiberdp.evaluation import classified

    return classified(logits, model, rows)


def power_delta(num_examples: int) -> float:
    """N^-1.1, as the paper says (5.1, E.2)."""
    return num_examples**-1.1


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """load(data_dir) -> {"train", "heldout", "test"}, each a dict of tensors with one row an example, or a source of such batches.
    build() -> the model, freshly initialised; trainable parameters are those that require gradients.
    weights(model, data_dir): puts pretrained ones into what build() made, from a folder below data_dir, a package or the hub; None: the
    task is learned from scratch.  build() needs none of these, so that a model can be checked anywhere.

    loss(model, batch) -> [b].  metrics(model, rows) -> {name: figure} at the end of every epoch, of held-out rows; `metric`, a share, is
    the one that runs are tuned and compared by.  details(model, test rows) -> {"details": {name: figure}, "samples": […]}, once, after
    training; for what is too slow to measure at every epoch.
    num_examples: N, the training rows without the held-out ones.  grids: what the paper searches (Table 9), and we.

    options: per method, what was tuned on the held-out rows (never on test), such as {"fiber": {"lr": 1e-3}}.  trials: by how many trials.
    row() -> a batch of one blank example, for its structure, so that the model can be checked without data; None: read from load.
    augmentation: how --multiplicity makes copies of an example; None if the task has no such way.  Used only when asked for.
    paper: where the paper's figures for this task stand; published: the figures.  cpu_minutes: of `fiber` on 2 cores; None: not measured.
    delta: of the number N of training rows; the paper's N**-1.1.
    """

    name: str
    task: str
    model: str
    data: str
    paper: str
    cpu_minutes: float | None
    epsilon: float
    clip_norm: float
    batch_size: int
    epochs: int
    num_examples: int
    options: dict[str, dict[str, Any]]
    load: Callable[[str | None], dict[str, Any]]
    build: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Any], Tensor] = classification_loss
    metrics: Callable[[nn.Module, Any], dict[str, float]] = classification
    metric: str = "accuracy"
    details: Callable[[nn.Module, Any], dict[str, Any]] | None = None
    published: tuple[Published, ...] = ()
    grids: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    trials: Mapping[str, int] = field(default_factory=dict)
    augmentation: Any = None
    row: Callable[[], dict[str, Tensor]] | None = None
    weights: Callable[[nn.Module, str | None], None] | None = None
    delta: Callable[[int], float] = power_delta

    def fresh(self, keys: Keys, device: torch.device | str = "cpu", data: str | None = None) -> nn.Module:
        """The model, initialised from the keys: the same for the same keys.  data: as `load` is given it; weights may lie there."""
        import torch

        from fiberdp.engines.loss import random_state

        target = torch.device(device)
        with random_state(keys.stream("model").seed(0), target):
            model = self.build()
        if self.weights:
            self.weights(model, data)
        return model.to(target)


def by_logits(logits: Callable[[nn.Module, Any], Tensor]) -> dict[str, Any]:
    """loss and metrics of a classifier that reads a batch in its own way."""
    return {"loss": partial(classification_loss, logits=logits), "metrics": partial(classification, logits=logits)}


def blank_image(*shape: int, floating: bool = False) -> dict[str, Tensor]:
    """One black image [1, C, H, W], uint8 or float32, with label 0."""
    import torch

    image = torch.zeros(1, *shape, dtype=torch.float32 if floating else torch.uint8)
    return {"image": image, "label": torch.zeros(1, dtype=torch.int64)}


def with_held_out(rows: dict[str, dict[str, Tensor]], count: int, *, sampled: bool = False) -> dict[str, dict[str, Tensor]]:
    """Take the last `count` training rows out of training: tuning looks at them, so that it never looks at test.

    sampled: the rows may be a sample of the data set; then a quarter of them at most.
    """
    from fiberdp.recipes.data import split_held_out

    train, heldout = split_held_out(rows["train"], min(count, len(rows["train"]["label"]) // 4) if sampled else count)
    return {"train": train, "heldout": heldout, "test": rows["test"]}
