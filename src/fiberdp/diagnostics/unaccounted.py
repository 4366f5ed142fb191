"""Raw statistics of training, for whoever holds the data: NOT private, and kept in the secret folder alone."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from fiberdp._disk import append, write_atomically
from fiberdp.record import lines_until, to_text


class Unaccounted:
    """Raw statistics of each step: batch size, mean loss, share of examples clipped.  They are NOT private, hence resume/.

    Lines from `step` on are dropped, a torn last one too: a resumed run writes them again.
    """

    def __init__(self, path: Path, step: int) -> None:
        self.path = path
        write_atomically(path, b"".join(lines_until(path, step - 1)), mode=0o600)
        self.losses: list[Tensor] = []
        self.norms: list[Tensor] = []

    def add(self, losses: Tensor, norms: Tensor) -> None:
        self.losses.append(losses.detach())
        self.norms.append(norms.detach())

    def close(self, step: int, clip_norm: float) -> None:
        losses = torch.cat(self.losses) if self.losses else torch.empty(0)
        norms = torch.cat(self.norms) if self.norms else torch.empty(0)
        line = {
            "step": step,
            "batch_size": len(norms),
            "loss": float(losses.mean()) if len(losses) else None,
            "clipped": float((norms > clip_norm).float().mean()) if len(norms) else None,
            "silenced": int((~norms.isfinite()).sum()),
        }
        append(self.path, to_text(line, indent=None) + "\n", mode=0o600, durable=False)
        self.losses, self.norms = [], []
