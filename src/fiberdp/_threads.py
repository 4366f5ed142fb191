"""Long vectors in short pieces, shared between threads that each compute alone.

torch splits every operation between its threads.  Ours are so short, and so many, that threads would meet every few microseconds.
Here the pieces are split instead: a thread takes the next piece, does everything that is to be done with it while it is in the
cache, and takes another; a core that is busy elsewhere takes fewer.  Torch and the cipher let go of the interpreter's lock.

The helpers live as long as one call.  Starting one costs 0.1 ms, and nothing is left over that a forked child would miss.
"""

from __future__ import annotations

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
    helpers = min(torch.get_num_threads(), len(pieces)) - 1 if len(pieces) >= _LEAST else 0
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
        with ThreadPoolExecutor(helpers, thread_name_prefix="fiberdp") as pool:
            running = [pool.submit(help) for _ in range(helpers)]
            run()
            for helper in running:
                helper.result()


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
