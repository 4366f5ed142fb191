"""Many runs, several at a time: each in a process of its own, which tells how far it is."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from queue import Empty
from typing import Any, Protocol

from fiberdp import _validate


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


def records(jobs: Mapping[str, dict[str, Any]], *, workers: int | None, observer: Observer) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, record) of each job, as it ends.  jobs: name -> the arguments of `fiberdp.fit`.

    workers: processes, None for one a core, each with its share of the cores as threads: for small models, two processes of one
    thread do more than one process of two.
    Raises what a run raises, after the others that are running have ended; those that wait are not begun.
    """
    cores = os.cpu_count() or 1
    most = min(_validate.count("workers", cores if workers is None else workers, why="It is the number of processes."), max(1, len(jobs)))
    context = multiprocessing.get_context("spawn")  # a forked child of a process with threads may hang
    with context.Manager() as manager:
        queue = manager.Queue()
        with ProcessPoolExecutor(most, mp_context=context, max_tasks_per_child=1) as pool:
            waiting = {pool.submit(_run, name, job, max(1, cores // most), queue) for name, job in jobs.items()}
            try:
                while waiting:
                    done, waiting = wait(waiting, timeout=0.2, return_when=FIRST_COMPLETED)
                    _tell(queue, observer)
                    for future in done:
                        name, record = future.result()
                        observer.ended(name, record)
                        yield name, record
            except BrokenProcessPool as error:
                raise OSError("a worker was killed, probably for memory: use fewer --workers, or a smaller --micro-batch-size.") from error
            finally:
                for future in waiting:
                    future.cancel()


def _run(name: str, job: dict[str, Any], threads: int, queue: Any) -> tuple[str, dict[str, Any]]:
    import torch

    from fiberdp._allocator import keep_freed_memory
    from fiberdp.experiment import fit

    torch.set_num_threads(threads)
    keep_freed_memory()
    return name, fit(**job, reporter=_Messages(name, queue))


class _Messages:
    """A run's reporter that sends what it hears to the parent, at most once a percent."""

    def __init__(self, name: str, queue: Any) -> None:
        self.name, self.queue = name, queue

    def proved(self, plan: Any, receipt: Any) -> None:
        self.queue.put(("began", self.name, plan.steps))

    def stepped(self, step: int, steps: int) -> None:
        if step % max(1, steps // 100) == 0:
            self.queue.put(("stepped", self.name, step))

    def evaluated(self, line: dict[str, Any], steps: int) -> None: ...


def _tell(queue: Any, observer: Observer) -> None:
    while True:
        try:
            what, name, number = queue.get_nowait()
        except Empty:
            return
        getattr(observer, what)(name, number)
