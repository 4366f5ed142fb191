"""What metrics.jsonl and record.json say as TensorBoard event files, one folder a run."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

from fiberdp._disk import make_folder, writing
from fiberdp.report.reading import Found


def require_tensorboard() -> None:
    try:
        import tensorboard  # noqa: F401
    except ImportError:
        raise ImportError(
            "--tensorboard writes event files and needs tensorboard, which is not installed: pip install fiberdp[recipes], or leave "
            "--tensorboard out."
        ) from None


def refuse_foreign(folder: Path) -> None:
    """ValueError unless the folder is new or holds event files alone: it is replaced as a whole."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--tensorboard writes {folder}, which is a file: it must be free, because it becomes a folder. Remove it.")
    strange = next((p for p in folder.rglob("*") if p.is_file() and not p.name.startswith("events.out.tfevents.")), None)
    if strange is not None:
        raise ValueError(
            f"--tensorboard would replace {folder}, in which {strange.name} is no event file: nothing else is overwritten. Move it."
        )


def write_events(found: Found, folder: Path) -> None:
    """Write beside, then rename: a failure leaves the old folder, or none."""
    from torch.utils.tensorboard import SummaryWriter

    fresh = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    with writing(folder):
        try:
            make_folder(fresh)
            for i, run in enumerate(found.runs):
                name = re.sub(r"[^\w.=-]", "_", run.name)
                with SummaryWriter(str(fresh / f"{i:03d}-{name}")) as writer:
                    for line in run.metrics:
                        for tag, value in _scalars(line):
                            writer.add_scalar(tag, value, int(line["step"]))
                    last = run.record["privacy"]["steps"]
                    for tag, value in _scalars({"result": run.record["result"], "receipt": run.record["receipt"]}):
                        writer.add_scalar(tag, value, last)
            if folder.exists():
                shutil.rmtree(folder)
            os.replace(fresh, folder)
        except BaseException:
            shutil.rmtree(fresh, ignore_errors=True)
            raise


def _scalars(values: dict[str, Any], where: str = "") -> list[tuple[str, float]]:
    """("heldout/accuracy", 0.97) for every number in a tree."""
    found = []
    for name, value in values.items():
        tag = f"{where}/{name}" if where else name
        if isinstance(value, dict):
            found += _scalars(value, tag)
        elif isinstance(value, (int, float)) and not isinstance(value, bool) and tag not in ("step",):
            found.append((tag, float(value)))
    return found
