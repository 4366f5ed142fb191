"""engine="auto": the faster of ghost and vmap for this model on this machine, measured at set-up."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fiberdp import _tree
from fiberdp.engines.ghost import GhostEngine
from fiberdp.engines.loss import Loss, random_state
from fiberdp.engines.proof import Whole, engine_batch
from fiberdp.engines.vmap import VmapEngine
from fiberdp.flat import FlatParameters
from fiberdp.types import Probe

ROUNDS = 3  # after one that is not counted; they take turns, and the shortest time of each counts
MOST_SECONDS = 20.0  # then the rounds so far decide


def faster(flat: FlatParameters, loss: Loss, row: Any, probes: Sequence[Probe], batch_size: int) -> str:
    """ "ghost" or "vmap": the one with the least time an example, each at its own micro-batch size, on synthetic examples.

    One that cannot run this model loses to the other; if neither can, the error is ghost's, which names the layer and the remedy.
    """
    seconds: dict[str, float] = {}
    refused: dict[str, ValueError] = {}
    workers: dict[str, tuple[Any, Any]] = {}
    for engine in (GhostEngine, VmapEngine):
        worker = engine(flat, loss)
        try:
            count = min(batch_size, worker.micro_batch_size(row, len(probes), batch_size))
            batch = engine_batch(loss, row, count, 0, flat.theta.device)
            _seconds(worker, probes, batch)
            workers[engine.name], seconds[engine.name] = (worker, batch), float("inf")
        except ValueError as error:
            refused[engine.name] = error
    if not workers:
        raise refused["ghost"]
    started = time.perf_counter()
    for _ in range(ROUNDS if len(workers) > 1 else 0):
        for name, (worker, batch) in workers.items():
            seconds[name] = min(seconds[name], _seconds(worker, probes, batch) / _tree.rows(batch))
        if time.perf_counter() - started > MOST_SECONDS:
            break
    return min(seconds, key=lambda name: seconds[name])


def _seconds(worker: Any, probes: Sequence[Probe], batch: Any) -> float:
    theta: Tensor = worker.flat.theta
    started = time.perf_counter()
    with random_state(0, theta.device):
        total = worker.clipped_sum(probes, torch.zeros_like(theta), batch, Whole(), seed=0).total
    float(total[0])  # an accelerator may still be at work
    return time.perf_counter() - started
