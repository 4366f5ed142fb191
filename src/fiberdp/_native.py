"""C files of the package, compiled for this machine where it has a C compiler; elsewhere their callers compute with torch.

A library is compiled once (0.5 s) and kept in $XDG_CACHE_HOME/fiberdp or ~/.cache/fiberdp, under a name made of the source, the compiler
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
from typing import Any

from fiberdp._disk import cache_folder

FLAGS = ("-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-fPIC")
PARALLEL = ("-fopenmp",)  # when compiling alone: the runtime is the one that torch has loaded, so that both share their threads


@cache
def library(name: str, *flags: str) -> ctypes.CDLL | None:
    """The functions of `name`.c; None where there is no compiler, or it fails.  Linux only: elsewhere `cc` may ask to be installed.

    flags: after those of every file, which they override.  Where torch's OpenMP is not the compiler's, the file is compiled without it,
    and what is meant for several threads is left out of it.
    """
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if sys.platform != "linux" or compiler is None:
        return None
    for flags_tried in ((*FLAGS, *flags, *PARALLEL), (*FLAGS, *flags)):
        try:
            return _loaded(compiler, name, flags_tried)
        except (OSError, subprocess.CalledProcessError):
            continue
    return None


def function(name: str, which: str, argtypes: tuple[Any, ...], *flags: str) -> Any:
    """`which` of `library(name, *flags)`, which returns nothing; None where it cannot be had."""
    found = getattr(library(name, *flags), which, None)
    if found is not None:
        found.argtypes, found.restype = argtypes, None
    return found


@cache
def _version(compiler: str) -> bytes:
    return subprocess.run([compiler, "--version"], capture_output=True, check=True).stdout


def _loaded(compiler: str, name: str, flags: tuple[str, ...]) -> ctypes.CDLL:
    source = Path(__file__).with_name(f"{name}.c")
    key = hashlib.sha256(b"\0".join([source.read_bytes(), " ".join(flags).encode(), _version(compiler), _processor()])).hexdigest()
    try:
        folder = cache_folder()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return ctypes.CDLL(str(_compiled(compiler, flags, source, folder / f"{name}-{key[:32]}.so")))
    except (OSError, RuntimeError):  # a read-only or full home, no home, or one from which nothing may be executed
        with tempfile.TemporaryDirectory(prefix="fiberdp-") as scratch:
            return ctypes.CDLL(str(_compiled(compiler, flags, source, Path(scratch) / f"{name}.so")))


def _compiled(compiler: str, flags: tuple[str, ...], source: Path, kept: Path) -> Path:
    if not kept.exists():
        handle, partial = tempfile.mkstemp(dir=kept.parent, suffix=".so")
        os.close(handle)
        unlinked = Path(partial).with_suffix(".o")
        try:
            subprocess.run([compiler, *flags, "-c", "-o", str(unlinked), str(source)], capture_output=True, check=True)
            # -z now: a function that nobody provides is found out when the file is loaded
            subprocess.run([compiler, "-shared", "-Wl,-z,now", "-o", partial, str(unlinked), "-lm"], capture_output=True, check=True)
            os.replace(partial, kept)  # another process may be doing the same
        finally:
            Path(partial).unlink(missing_ok=True)
            unlinked.unlink(missing_ok=True)
    return kept


def _processor() -> bytes:
    """What tells one machine's instructions from another's."""
    return os.uname().machine.encode() + b"".join(sorted(processor_lines(b"flags", b"Features", b"model name")))


def processor_lines(*names: bytes) -> set[bytes]:
    """The lines of these names in Linux's description of the processor, those of all cores."""
    lines = Path("/proc/cpuinfo").read_bytes().splitlines()
    return {line for line in lines if line.split(b":")[0].strip() in names}
