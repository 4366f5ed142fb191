"""Held-out metrics.  Their rows are never trained on, so they stand outside epsilon."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.func import functional_call


@torch.no_grad()
def evaluate(
    model: nn.Module, rows: dict[str, Tensor], *, parameters: Mapping[str, Tensor] | None = None, batch_size: int = 500
) -> dict[str, float]:
    """Accuracy and mean cross-entropy of a classifier on labelled rows; the model's mode is put back afterwards.

    parameters: used in the place of the model's own, which are not touched.
    """
    training = model.training
    device = next(model.parameters()).device
    model.eval()
    correct, loss = 0, 0.0
    for images, labels in zip(rows["image"].split(batch_size), rows["label"].split(batch_size), strict=True):
        logits, labels = functional_call(model, dict(parameters or {}), (images.to(device),)), labels.to(device)
        correct += int((logits.argmax(1) == labels).sum())
        loss += float(nn.functional.cross_entropy(logits, labels, reduction="sum"))
    model.train(training)
    count = len(rows["label"])
    return {"accuracy": correct / count, "loss": loss / count}
