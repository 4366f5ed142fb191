"""What is public of runs: what a record depends on, JSON that any parser reads, tables, and where two settings differ."""

from __future__ import annotations

import contextlib
import json
import math
import os
import platform
import resource
import subprocess
import sys
from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from fiberdp._version import __version__


def to_text(value: Any, *, indent: int | None = 2) -> str:
    """JSON that any parser reads: an infinite or undefined number becomes null."""
    return json.dumps(_finite(value), indent=indent, ensure_ascii=False)


def differences(old: Any, new: Any, where: str = "") -> list[tuple[str, Any, Any]]:
    """(where, old, new) of every setting in which two trees of plain values differ, "plan.steps" for one in a branch."""
    if isinstance(old, dict) and isinstance(new, dict):
        return [d for key in {**old, **new} for d in differences(old.get(key), new.get(key), f"{where}.{key}" if where else key)]
    return [] if old == new else [(where, old, new)]


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown, one line a row."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def lines_until(path: Path, step: int) -> list[bytes]:
    """The lines of a file of JSON objects in the order of their "step", as far as `step`; a torn last line is none, no file has none.

    Raises ValueError, in one line, if another line is not such an object.
    """
    kept = []
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True) if path.exists() else [], 1):
        try:
            if not line.endswith(b"\n") or json.loads(line)["step"] > step:
                break
        except (ValueError, KeyError, TypeError):
            raise ValueError(
                f"{path}: line {number} is not what a run writes there: a resumed run goes on with this file. Restore it, or remove it."
            ) from None
        kept.append(line)
    return kept


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(v) for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def versions() -> dict[str, str]:
    """What the numbers depend on: packages, Python, machine, and the commit where the package runs from a checkout."""
    found = {name: package_version(name) for name in ("torch", "numpy", "scipy", "dp-accounting", "cryptography", "safetensors")}
    return {"fiberdp": __version__, **found, "python": platform.python_version(), "machine": _machine(), "commit": _commit()}


def peak_mib() -> float:
    """Largest resident memory of this process so far, or since `forget_peak`, MiB."""
    with contextlib.suppress(OSError):
        return memory_mib("VmHWM")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)


def forget_peak() -> bool:
    """Let `peak_mib` begin anew with what is resident now; False where that cannot be done: only Linux can."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def memory_mib(field: str) -> float:
    """VmRSS, what is resident of this process now, or VmHWM, the largest of it so far, MiB.  OSError where there is no /proc."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith(f"{field}:")) / 2**10


def package_version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "unknown"


def _machine() -> str:
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        model = names[0] if names else model
    return f"{model}, {os.cpu_count()} cores"


def _commit() -> str:
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return "unknown"
    try:
        done = subprocess.run(["git", "-C", str(root), "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return done.stdout.strip() or "unknown"
