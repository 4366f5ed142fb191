"""Long vectors in short pieces, shared between threads that each compute alone.

torch splits every operation between its threads.  Ours are so short, and so many, that threads would meet every few microseconds.
Here the pieces are split instead: a thread takes the next piece, does everything that is to be done with it while it is in the
cache, and takes another; a core that is busy elsewhere takes fewer.  Torch and the cipher let go of the interpreter's lock.

The helpers live as long as one call.  Starting one costs 0.1 ms, and nothing is left over that a forked child would miss.  Torch's own
threads are ended first: after every operation they wait for the next with a core kept busy, for more milliseconds than most of our calls
take (noise of 4.2M elements after a matrix product, 2 cores: 16 ms beside them, 10 without).  Torch starts them again, in 0.1 ms.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch

_LEAST = 4  # pieces (of some 0.5 ms): with fewer, a helper costs more than it saves


def share(work: Callable[[int], None], pieces: range) -> None:
    """work(piece) for every piece, once each, by as many threads as torch has (`torch.set_num_threads`), the caller among them.

    Nothing is promised about the order, so what is done with a piece may depend on that piece alone.  Grad and inference mode are the
    caller's.  Returns, or raises the first error, when no helper is running any more; after an error some pieces may be left out.
    """
    helpers = min(usable_threads(), len(pieces)) - 1 if len(pieces) >= _LEAST else 0
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    left, taking = iter(pieces), threading.Lock()

    def run() -> None:
        while True:
            with taking:  # without it two threads could be given one piece where the interpreter has no lock
                piece = next(left, None)
            if piece is None:
                return
            work(piece)

    def help() -> None:
        with torch.inference_mode(inference), torch.set_grad_enabled(grad), one_thread():
            run()

    with one_thread():
        if not helpers:
            run()
            return
        _end_waiting_threads()
        with ThreadPoolExecutor(helpers, thread_name_prefix="fiberdp") as pool:
            running = [pool.submit(help) for _ in range(helpers)]
            run()
            for helper in running:
                helper.result()


def usable_threads() -> int:
    """As many as torch has; in a forked child only itself, because the runtime would wait for threads that fork did not copy."""
    return 1 if _forked else torch.get_num_threads()


def _waiting_threads() -> Callable[[int], int] | None:
    """OpenMP's `omp_pause_resource_all`, of the runtime that torch loaded; None if it has none."""
    try:
        return ctypes.CDLL(None).omp_pause_resource_all  # a symbol that any library of this process made global
    except (OSError, AttributeError, TypeError):  # another platform, an OpenMP older than 5.0, or none
        return None


_pause = _waiting_threads()
_OMP_PAUSE_SOFT = 1


def _end_waiting_threads() -> None:
    """End the threads that torch keeps for this one."""
    if _pause is not None:
        _pause(_OMP_PAUSE_SOFT)


_forked: list[bool] = []  # not empty in a forked child
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: _forked.append(True))


@contextmanager
def one_thread() -> Iterator[None]:
    """Keep torch from splitting operations between threads, for this block.

    On a busy machine the splitting of short operations costs ten times what it saves, and a forked child would wait for ever for
    threads that fork did not copy.
    """
    before = torch.get_num_threads()
    if before == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
