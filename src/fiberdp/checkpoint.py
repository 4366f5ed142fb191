"""The resume file: one safetensors file, written beside the old one and renamed, so that a crash leaves one or the other.

It holds the generators' keys and the memory of correlated noise and so is secret: whoever has it can subtract the noise.  Mode 0600, in the run's `resume/`.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from fiberdp.record import write_atomically

FILE = "checkpoint.safetensors"


def save_checkpoint(folder: Path, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
    """Write tensors and `state` (plain values) as one file, readable by the owner only."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    payload = save({name: t.detach().cpu().contiguous() for name, t in tensors.items()}, metadata={"state": json.dumps(state)})
    write_atomically(folder / FILE, payload, mode=0o600)


def load_checkpoint(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read what `save_checkpoint` wrote.  Raises ValueError, in one line, if the file is missing or damaged."""
    path = folder / FILE
    if not path.exists():
        raise ValueError(
            f"{os.fspath(path)} does not exist: a resume needs the run's checkpoint, which holds its keys. Start in a new --out."
        )
    try:
        with safe_open(path, framework="pt") as file:
            state = json.loads(file.metadata()["state"])
            return {name: file.get_tensor(name) for name in file.keys()}, state  # noqa: SIM118 (not a dict)
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{os.fspath(path)} cannot be read ({str(error).splitlines()[0]}): it must be whole, because a run "
            "continued from a guess would not be "
            "the run that was charged. Restore it from a backup, or start in a new --out."
        ) from error
