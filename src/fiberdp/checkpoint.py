"""The resume file: one safetensors file, written beside the old one and renamed, so that a crash leaves one or the other.

It holds the generators' keys and the memory of correlated noise, and so is secret: whoever has it can subtract the noise.  Mode 0600, in
the run's `resume/` of mode 0700.  Its metadata hold `state` (plain values, as JSON) and the SHA-256 of all it says, because a digit of
the key that changed unseen would let steps that are charged be released again with other noise.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from fiberdp._disk import make_folder, write_atomically, writing

if TYPE_CHECKING:
    from fiberdp.trainer import Run

FILE = "checkpoint.safetensors"


def state_of(run: Run) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """(tensors, plain values) from which a run of the same plan, model and data goes on bit for bit.  SECRET: the keys are in it."""
    return run.state_dict(), {
        "step": run.optimizer.t,
        "keys": run.keys.to_json(),
        "engine": run.engine,
        "micro_batch_size": run.pipeline.micro_batch_size,
    }


def restore(run: Run, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
    """Bring a new run, made with the state's keys and with its ledger open, to where `state_of` saw it.

    Raises ValueError if the state is of another method, or if its ledger lacks a step.
    """
    if len(run.ledger) < state["step"]:
        raise ValueError(
            f"the ledger has {len(run.ledger)} lines, the checkpoint is at step {state['step']}: every step "
            "before it must be charged, or epsilon would come out too small. Restore ledger.jsonl."
        )
    run.load_state_dict(tensors, state["step"])


def secret_folder(folder: Path) -> None:
    """Make it, or take it as it is, and let no one else in, whatever the umask is and its mode was."""
    make_folder(folder)
    with writing(folder):
        folder.chmod(0o700)


def save_checkpoint(folder: Path, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
    """Write tensors and `state` (plain values) as one file, readable by the owner only.  Raises OSError, in one line."""
    secret_folder(folder)
    tensors, text = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}, json.dumps(state)
    payload = save(tensors, metadata={"state": text, "sha256": _digest(tensors, text)})
    write_atomically(folder / FILE, payload, mode=0o600)


def require_checkpoint(folder: Path) -> Path:
    """The resume file; ValueError if there is none."""
    path = folder / FILE
    if not path.exists():
        raise ValueError(
            f"{os.fspath(path)} does not exist: a resume needs the run's checkpoint, which holds its keys. Start without --resume, in a "
            "new --out if this one is not empty."
        )
    return path


def load_checkpoint(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read what `save_checkpoint` wrote.  Raises ValueError, in one line, if the file is missing or one bit of it changed."""
    path = require_checkpoint(folder)
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata()
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
        if metadata.get("sha256") != _digest(tensors, metadata["state"]):
            raise ValueError("its SHA-256 is another, or missing as in files of earlier versions")
        return tensors, json.loads(metadata["state"])
    except (SafetensorError, OSError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{os.fspath(path)} cannot be read ({str(error).splitlines()[0]}): it must be whole, because a run "
            "continued from a guess would not be "
            "the run that was charged. Restore it from a backup, or start in a new --out."
        ) from error


def _digest(tensors: dict[str, Tensor], state: str) -> str:
    digest = hashlib.sha256(state.encode())
    for name, t in sorted(tensors.items()):
        digest.update(f"\n{name} {t.dtype} {list(t.shape)}\n".encode())
        digest.update(t.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
