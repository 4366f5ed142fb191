"""Raw statistics of training, for whoever holds the data: NOT private, and kept in the secret folder alone."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor

from fiberdp.record import to_text, write_atomically


class Unaccounted:
    """Raw statistics of each step: batch size, mean loss, share of examples clipped.  They are NOT private, hence resume/."""

    def __init__(self, path: Path, step: int) -> None:
        self.path = path
        kept = [line for line in path.read_text().splitlines(keepends=True) if json.loads(line)["step"] < step] if path.exists() else []
        write_atomically(path, "".join(kept), mode=0o600)
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
        with self.path.open("a") as file:
            file.write(to_text(line, indent=None) + "\n")
        self.losses, self.norms = [], []
