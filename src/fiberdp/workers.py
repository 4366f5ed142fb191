"""Many runs, several at a time: in processes that tell how far they are."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from itertools import islice
from typing import Any, Protocol

from fiberdp import _validate

RUNS_PER_PROCESS = 32  # imports, compiled updates and prices are made once for so many; then what a run may have left ends with its process

Job = tuple[str, dict[str, Any]]
"""A name, and the arguments of `fiberdp.fit`."""


class Observer(Protocol):
    """Who is told how the runs go."""

    def planned(self, done: int, total: int) -> None: ...
    def began(self, name: str, steps: int) -> None: ...
    def stepped(self, name: str, step: int) -> None: ...
    def ended(self, name: str, record: dict[str, Any]) -> None: ...


class Unheard:
    def planned(self, done: int, total: int) -> None: ...
    def began(self, name: str, steps: int) -> None: ...
    def stepped(self, name: str, step: int) -> None: ...
    def ended(self, name: str, record: dict[str, Any]) -> None: ...


def records(jobs: Iterable[Job], *, workers: int | None, observer: Observer) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, record) of each job, as it ends.  A job is taken when a worker is free, so that it may depend on what ended before.

    workers: processes at a time, None for one a core; each has its share of the cores as threads: for small models, two processes of
    one thread do more than one process of two.
    Raises what a run raises, after the others that are running have ended; no further one is begun.
    """
    cores = os.cpu_count() or 1
    most = _validate.count("workers", cores if workers is None else workers, why="It is the number of processes.")
    queued = iter(jobs)
    context = multiprocessing.get_context("spawn")  # a forked child of a process with threads may hang
    queue = context.SimpleQueue()  # what a run says is read before its result is
    with ProcessPoolExecutor(
        most, mp_context=context, max_tasks_per_child=RUNS_PER_PROCESS, initializer=_begin_worker, initargs=(queue,)
    ) as pool:

        def more(count: int) -> set[Any]:
            return {pool.submit(_run, name, job, max(1, cores // most)) for name, job in islice(queued, count)}

        running = more(most)
        try:
            while running:
                done, running = wait(running, timeout=0.2, return_when=FIRST_COMPLETED)
                while not queue.empty():
                    what, about, number = queue.get()
                    getattr(observer, what)(about, number)
                for future in done:
                    name, record = future.result()
                    observer.ended(name, record)
                    yield name, record
                running |= more(len(done))
        except BrokenProcessPool as error:
            raise OSError("a worker was killed, probably for memory: use fewer --workers, or a smaller --micro-batch-size.") from error


_to_parent: Any = None  # of a worker


def _begin_worker(queue: Any) -> None:
    """A worker whose parent was killed ends at once: its run can be resumed, and would else hold its folder until its last step."""
    global _to_parent
    _to_parent = queue
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _run(name: str, job: dict[str, Any], threads: int) -> tuple[str, dict[str, Any]]:
    import torch

    from fiberdp._allocator import give_back_freed_memory, keep_freed_memory
    from fiberdp.experiment import fit
    from fiberdp.record import forget_peak

    torch.set_num_threads(threads)
    keep_freed_memory()
    give_back_freed_memory()  # of the run before
    forget_peak()
    return name, fit(**job, reporter=_Messages(name))


class _Messages:
    """A run's reporter that sends what it hears to the parent, at most once a percent."""

    def __init__(self, name: str) -> None:
        self.name = name

    def proved(self, plan: Any, receipt: Any) -> None:
        _to_parent.put(("began", self.name, plan.steps))

    def stepped(self, step: int, steps: int) -> None:
        if step % max(1, steps // 100) == 0:
            _to_parent.put(("stepped", self.name, step))

    def evaluated(self, line: dict[str, Any], steps: int) -> None: ...
