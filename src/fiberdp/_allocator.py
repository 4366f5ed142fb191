"""Keep freed memory in the process (glibc only).

By default glibc returns large freed blocks to the system, and every step faults the same pages in again: on CNN5 that nearly
doubles a step.  Only processes of this library's own do this (the command line, workers): it does not set its host's allocator.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import sys

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4


def keep_freed_memory() -> None:
    """Never trim the heap and never use mmap for single blocks.  Does nothing where there is no glibc."""
    if sys.platform == "linux":
        try:
            mallopt = ctypes.CDLL("libc.so.6").mallopt
        except (OSError, AttributeError):
            return
        mallopt(M_TRIM_THRESHOLD, -1)  # never; any other threshold is at most 2 GiB, which per-example gradients can exceed
        mallopt(M_MMAP_MAX, 0)


def give_back_freed_memory() -> None:
    """Return the freed pages after all: between two runs of one process."""
    if sys.platform == "linux":
        gc.collect()
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL("libc.so.6").malloc_trim(0)
