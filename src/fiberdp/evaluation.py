"""Held-out metrics.  Their rows are never trained on, so they stand outside epsilon."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fiberdp import _tree
from fiberdp.sampling.source import as_source

Metrics = Callable[[nn.Module, Any], dict[str, float]]
"""(model, rows) -> {name: figure}."""


class _Applied(nn.Module):
    """A function of a module, as a module: so that it can be called with other parameters."""

    def __init__(self, module: nn.Module, function: Metrics) -> None:
        super().__init__()
        self.module, self.function = module, function

    def forward(self, rows: Any) -> dict[str, float]:
        return self.function(self.module, rows)


@torch.no_grad()
def evaluate(metrics: Metrics, model: nn.Module, rows: Any, *, parameters: Mapping[str, Tensor] | None = None) -> dict[str, float]:
    """metrics(model, rows) in eval mode, without gradients; the mode is put back.

    parameters: used in the place of the model's own, which are not touched.
    """
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        given = {f"module.{name}": p for name, p in (parameters or {}).items()}
        return functional_call(_Applied(model, metrics), given, (rows,))
    finally:
        for module, training in modes.items():
            module.training = training


def batches(rows: Any, device: torch.device, size: int = 500) -> Iterator[Any]:
    """All rows in order, `size` at a time, on the device."""
    source = as_source(rows)
    for part in torch.arange(len(source)).split(size):
        yield _tree.to(source.take(part), device)


def classified(logits: Callable[[nn.Module, Any], Tensor], model: nn.Module, rows: Any) -> dict[str, float]:
    """accuracy, loss (mean cross-entropy), and for two classes f1 of class 1 (0 if nothing of it is found).

    logits(model, batch) -> [b, classes]; the batch holds `label`.
    """
    device = next(model.parameters()).device
    scores, labels = [], []
    for batch in batches(rows, device):
        scores.append(logits(model, batch).float())
        labels.append(batch["label"])
    score, label = torch.cat(scores), torch.cat(labels)
    guess = score.argmax(1)
    found = {
        "accuracy": float((guess == label).double().mean()),
        "loss": float(nn.functional.cross_entropy(score, label)),
    }
    if score.shape[1] == 2:
        found["f1"] = 2 * int((guess * label).sum()) / max(1, int(guess.sum() + label.sum()))
    return found
