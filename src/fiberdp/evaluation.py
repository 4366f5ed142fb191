"""Held-out metrics.  Their rows are never trained on, so they stand outside epsilon."""

from __future__ import annotations

import torch
from torch import Tensor, nn


@torch.no_grad()
def evaluate(model: nn.Module, rows: dict[str, Tensor], *, batch_size: int = 500) -> dict[str, float]:
    """Accuracy and mean cross-entropy of a classifier on labelled rows; the model's mode is put back afterwards."""
    training = model.training
    device = next(model.parameters()).device
    model.eval()
    correct, loss = 0, 0.0
    for images, labels in zip(rows["image"].split(batch_size), rows["label"].split(batch_size), strict=True):
        logits, labels = model(images.to(device)), labels.to(device)
        correct += int((logits.argmax(1) == labels).sum())
        loss += float(nn.functional.cross_entropy(logits, labels, reduction="sum"))
    model.train(training)
    count = len(rows["label"])
    return {"accuracy": correct / count, "loss": loss / count}
