"""C files of the package, compiled for this machine where it has a C compiler; elsewhere their callers compute with torch.

A library is compiled once (0.3 s) and kept in $XDG_CACHE_HOME/fiberdp or ~/.cache/fiberdp, under a name made of the source, the compiler
and the processor, so a home folder shared between machines is no trap.  Where nothing can be kept it is compiled for this process alone.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

FLAGS = ("-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-shared", "-fPIC")


@cache
def library(name: str) -> ctypes.CDLL | None:
    """The functions of `name`.c; None where there is no compiler, or it fails.  Linux only: elsewhere `cc` may ask to be installed."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if sys.platform != "linux" or compiler is None:
        return None
    source = Path(__file__).with_name(f"{name}.c")
    try:
        version = subprocess.run([compiler, "--version"], capture_output=True, check=True).stdout
        key = hashlib.sha256(b"\0".join([source.read_bytes(), " ".join(FLAGS).encode(), version, _processor()])).hexdigest()
        try:
            folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fiberdp"
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            return ctypes.CDLL(str(_compiled(compiler, source, folder / f"{name}-{key[:32]}.so")))
        except (OSError, RuntimeError):  # a read-only or full home, no home, or one from which nothing may be executed
            with tempfile.TemporaryDirectory(prefix="fiberdp-") as scratch:
                return ctypes.CDLL(str(_compiled(compiler, source, Path(scratch) / f"{name}.so")))
    except (OSError, subprocess.CalledProcessError):
        return None


def _compiled(compiler: str, source: Path, kept: Path) -> Path:
    if not kept.exists():
        handle, partial = tempfile.mkstemp(dir=kept.parent, suffix=".so")
        os.close(handle)
        try:
            subprocess.run([compiler, *FLAGS, "-o", partial, str(source), "-lm"], capture_output=True, check=True)
            os.replace(partial, kept)  # another process may be doing the same
        finally:
            Path(partial).unlink(missing_ok=True)
    return kept


def _processor() -> bytes:
    """What tells one machine's instructions from another's."""
    lines = Path("/proc/cpuinfo").read_bytes().splitlines()
    kept = {line for line in lines if line.split(b":")[0].strip() in (b"flags", b"Features", b"model name")}
    return os.uname().machine.encode() + b"".join(sorted(kept))
