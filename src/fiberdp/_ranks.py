"""The processes that train one model together, and what they exchange.

    every process   the same keys, so the same sample; its share of the micro-batches, of which it makes the clipped sum
    reduce          the sums are added; each process is left with its own slice of the whole
    own slice       noise, filter, moments and update of that slice: state of size d / R
    spread          the updated slices of theta reach every process

Which example is in the batch, what noise coordinate j carries at step t and what the step costs do not depend on how many processes there
are: keyed streams are addressed by position.  So R processes release what one would have released, up to the order of additions.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")

PATIENCE = timedelta(hours=12)  # a process that died is noticed at once; one that evaluates is waited for
_SAID = "fiberdp/said/"


class RankLost(ConnectionError):
    """Another process of the run ended before its time."""


@dataclass(frozen=True)
class Ranks:
    """rank: which one of `count` processes this is, from 0.  One process alone exchanges nothing, and every method is the identity.

    Holds no process group: one that is still held when the interpreter ends has threads that abort it.
    """

    rank: int = 0
    count: int = 1

    @classmethod
    def joined(cls) -> Ranks:
        """Those of torch.distributed's default process group; alone without one.

        Raises ValueError where a launcher started several processes that did not join: each would release by itself, for an epsilon each.
        """
        if dist.is_available() and dist.is_initialized():
            return cls(dist.get_rank(), dist.get_world_size())
        if (wanted := launched()) > 1:
            raise ValueError(
                f"WORLD_SIZE={wanted} without a process group: processes that were started together must train together, because each "
                "release by one alone would cost its own epsilon. Call torch.distributed.init_process_group() first, or unset WORLD_SIZE."
            )
        return cls()

    @property
    def first(self) -> bool:
        """Whether this is the process that writes."""
        return self.rank == 0

    def share(self, indices: Tensor, at_most: int) -> list[tuple[int, Tensor]]:
        """This process's micro-batches of a step's batch, with their position in it: all of them together are the batch, none twice.

        Several processes cut it into equal parts, a multiple of their number, and take turns.
        """
        if self.count == 1:
            size = at_most
        else:
            rounds = -(-len(indices) // (self.count * at_most))
            size = max(1, -(-len(indices) // max(1, self.count * rounds)))
        parts = [(i * size, part) for i, part in enumerate(indices.split(size))]
        return parts[self.rank :: self.count] or [(0, indices[:0])]

    def slices(self, numel: int) -> list[slice]:
        """Which part of a vector of `numel` entries is whose."""
        bounds = [numel * r // self.count for r in range(self.count + 1)]
        return [slice(a, b) for a, b in pairwise(bounds)]

    def own(self, numel: int) -> slice:
        return self.slices(numel)[self.rank]

    def reduce(self, total: Tensor) -> Tensor:
        """This process's slice of the sum of everyone's `total`, Tensor[d], which is used up."""
        if self.count == 1:
            return total
        with _exchange():
            _wait([dist.reduce(total[part], rank, async_op=True) for rank, part in enumerate(self.slices(len(total)))])
        return total[self.own(len(total))]

    def spread(self, whole: Tensor) -> None:
        """Fill the others' slices of `whole`, Tensor[d], of which this process's own is right."""
        if self.count > 1:
            with _exchange():
                _wait([dist.broadcast(whole[part], rank, async_op=True) for rank, part in enumerate(self.slices(len(whole)))])

    def gather(self, own: Tensor, numel: int) -> Tensor:
        """The whole vector [numel] (or rows of vectors, [k, numel]), of which everyone gives a slice; `own` itself if alone."""
        if self.count == 1:
            return own
        if own.dim() == 2:
            return torch.stack([self.gather(row, numel) for row in own]) if len(own) else own.new_empty(0, numel)
        whole = own.new_empty(numel)
        whole[self.own(numel)] = own
        self.spread(whole)
        return whole

    def sum(self, *values: float) -> list[float]:
        """The sum of everyone's, of each value."""
        if self.count == 1:
            return list(values)
        return [sum(column) for column in zip(*self.everyones(values))]

    def everyones(self, value: T) -> list[T]:
        """What each process holds, in order of rank."""
        if self.count == 1:
            return [value]
        found: list[Any] = [None] * self.count
        with _exchange():
            dist.all_gather_object(found, value)
        return found

    def from_first(self, make: Callable[[], T]) -> T:
        """What `make` returns, or the error it raises, in the first process: the others do not call it."""
        if self.count == 1:
            return make()
        said: list[Any] = [None, None]
        if self.first:
            try:
                said[0] = make()
            except (ValueError, OSError, ImportError) as error:
                said[1] = error
        with _exchange():
            dist.broadcast_object_list(said, src=0)
        if said[1] is not None:
            raise said[1]
        return said[0]

    def copy_from_first(self, tensors: Sequence[Tensor]) -> None:
        """Fill everyone's `tensors` with the first one's."""
        if self.count > 1:
            with _exchange():
                for tensor in tensors:
                    dist.broadcast(tensor, 0)

    def first_to_say(self, text: str) -> bool:
        """Whether no other process has said this yet, so that what all of them find is said once."""
        if self.count == 1:
            return True
        store = dist.distributed_c10d._get_default_store()
        try:
            return store.add(_SAID + text, 1) == 1
        except RuntimeError:  # the process that kept the store is gone
            return True


def launched() -> int:
    """How many processes a launcher such as torchrun started together; 1 without one."""
    wanted = os.environ.get("WORLD_SIZE", "1")
    return int(wanted) if wanted.isdecimal() else 1


@contextlib.contextmanager
def join(device: str) -> Iterator[tuple[Ranks, str]]:
    """Join the processes that a launcher started, and leave them at the end; (who this is, the device it works on).

    device: "cuda" becomes this process's own, by LOCAL_RANK.  Vectors travel by nccl between GPUs and by gloo otherwise.
    """
    if launched() == 1:
        yield Ranks(), device
        return
    signal.signal(signal.SIGTERM, _stopped)  # what a launcher sends to the others when one has died
    if device == "cuda":
        device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
        torch.cuda.set_device(device)
    with _exchange():
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.startswith("cuda") else "gloo", timeout=PATIENCE)
    try:
        yield Ranks.joined(), device
        with _exchange():
            dist.barrier()
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def said_once(ranks: Ranks) -> Iterator[None]:
    """Let one process alone raise what all of them find; the others end with the same exit code, and say nothing."""
    try:
        yield
    except (ValueError, ImportError, RankLost) as error:
        lost = isinstance(error, RankLost)
        if ranks.first_to_say("lost" if lost else str(error)):
            raise
        raise SystemExit(1 if lost else 2) from error


def _stopped(*_: Any) -> NoReturn:
    raise RankLost(_lost("SIGTERM, which a launcher sends to all when one has died"))


def _lost(how: str) -> str:
    return (
        f"another process of the run is gone ({how}): no step can be taken without it, because its examples and its slice of the model are "
        "missing. Start all again with --resume, with any number of processes."
    )


def _wait(handles: Sequence[Any]) -> None:
    """For all of them, failed ones too: an exchange that is still going on when its process ends would abort it."""
    failed = None
    for handle in handles:
        try:
            handle.wait()
        except RuntimeError as error:
            failed = failed or error
    if failed:
        raise failed


@contextlib.contextmanager
def _exchange() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        first = re.sub(r"^\[[^]]*\] ", "", str(error).splitlines()[0]).split(". ")[0]  # without the place in the source, and the advice
        raise RankLost(_lost(first)) from error
