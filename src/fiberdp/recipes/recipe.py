"""A recipe: everything a run needs but the method's seed, as one value."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from fiberdp._random import Keys


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """load(data_dir) -> {"train", "heldout", "test"}, each {"image", "label"} with N rows.  build() -> the model, freshly initialised.

    options: per method, what was tuned on the held-out rows (never on test), such as {"fiber": {"lr": 1e-3}}.  trials: by how many trials.
    row() -> a batch of one blank example, for its structure, so that the model can be checked without data; None: read from load.
    augmentation: how --multiplicity makes copies of an example; None if the task has no such way.  Used only when asked for.
    paper: where the paper's figure for this task stands, and the figure.  cpu_minutes: measured for `fiber` on 2 cores.
    delta is N**-1.1 from the number N of training rows, computed.
    """

    name: str
    task: str
    model: str
    data: str
    paper: str
    cpu_minutes: float
    epsilon: float
    clip_norm: float
    batch_size: int
    epochs: int
    options: dict[str, dict[str, Any]]
    load: Callable[[str | None], dict[str, dict[str, Tensor]]]
    build: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Any], Tensor]
    trials: Mapping[str, int] = field(default_factory=dict)
    augmentation: Any = None
    row: Callable[[], dict[str, Tensor]] | None = None

    def fresh(self, keys: Keys, device: torch.device | str = "cpu") -> nn.Module:
        """The model, initialised from the keys: the same for the same keys."""
        import torch

        from fiberdp.engines.loss import random_state

        target = torch.device(device)
        with random_state(keys.stream("model").seed(0), target):
            return self.build().to(target)


def classification_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Cross-entropy, one number an example."""
    from torch.nn.functional import cross_entropy

    return cross_entropy(model(batch["image"]), batch["label"], reduction="none")


def blank_image(*shape: int, floating: bool = False) -> dict[str, Tensor]:
    """One black image [1, C, H, W], uint8 or float32, with label 0."""
    import torch

    image = torch.zeros(1, *shape, dtype=torch.float32 if floating else torch.uint8)
    return {"image": image, "label": torch.zeros(1, dtype=torch.int64)}


def with_held_out(rows: dict[str, dict[str, Tensor]], count: int) -> dict[str, dict[str, Tensor]]:
    """Take the last `count` training rows out of training: tuning looks at them, so that it never looks at test."""
    from fiberdp.recipes.data import split_held_out

    train, heldout = split_held_out(rows["train"], count)
    return {"train": train, "heldout": heldout, "test": rows["test"]}
