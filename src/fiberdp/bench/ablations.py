"""What each trick of engine ghost pays: the clipped sum of a two-point step with it and without it, interleaved in one process.

| option                     | without it                                                                     |
|----------------------------|--------------------------------------------------------------------------------|
| materialised where cheaper | all norms of products by the Gram form                                         |
| Gram where cheaper         | all per-example gradients of products are formed                               |
| first inputs shared        | the first layer's factors are kept and multiplied for every point              |
| channels-last weights      | convolutions in torch's default layout                                         |
| windows of the input       | every weight gradient of a convolution by one grouped convolution              |
| products in C              | torch's products and weighted sums, and windows written out before them        |
| micro-batches              | the whole batch at once (what the bound on memory costs: below 1, it costs)    |
| noise in C                 | the cipher of a library, torch's logarithm, sine and cosine (model `update`)   |
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from fiberdp import _normals
from fiberdp._random import Keys
from fiberdp.bench.clock import interleaved
from fiberdp.bench.models import Model
from fiberdp.bench.ours import clipped_sum, private_run
from fiberdp.engines import cost, ghost, parts, sums
from fiberdp.engines.layers import conv, linear
from fiberdp.engines.parts import Outer
from fiberdp.trainer import Run


@contextmanager
def _set(owner: Any, **values: Any) -> Iterator[None]:
    before = {name: getattr(owner, name) for name in values}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


def _gram_only(run: Run) -> Any:
    return _set(run.pipeline.engine, memory_budget=0)


def _materialised(run: Run) -> Any:
    return _set(ghost, materialised=lambda found, budget: {name for name, part in found.items() if isinstance(part, Outer)})


@contextmanager
def _nothing_shared(run: Run) -> Iterator[None]:
    with _set(linear, fixed=lambda records: False), _set(conv, fixed=lambda records: False):
        yield


def _channels_first(run: Run) -> Any:
    return _set(run.pipeline.engine, _channels_last=set())


def _grouped(run: Run) -> Any:
    return _set(conv.Conv, _plain=lambda self: False)


@contextmanager
def _products_by_torch(run: Run) -> Iterator[None]:
    def none(*_: Any) -> None:
        return None

    with (
        _set(parts, compiled_gram=none, compiled_products=none, compiled_product=none),
        _set(conv, compiled_products=none),
        _set(cost, compiled_gram=none),
        _set(sums, compiled_sum=none),
    ):
        yield


def _whole_batch(run: Run) -> Any:
    return _set(run.pipeline, micro_batch_size=run.plan.batch_size)


WITHOUT: dict[str, Callable[[Run], Any]] = {
    "materialised where cheaper": _gram_only,
    "Gram where cheaper": _materialised,
    "first inputs shared": _nothing_shared,
    "channels-last weights": _channels_first,
    "windows of the input": _grouped,
    "products in C": _products_by_torch,
    "micro-batches": _whole_batch,
}
CONVOLUTIONS = ("channels-last weights", "windows of the input")


def step_ablations(model: Model, *, rounds: int, progress: Callable[[str], None]) -> list[dict[str, Any]]:
    """[{model, option, seconds_with, seconds_without}], medians; options that do not concern the model are left out."""
    run = private_run(model, model.batch_size, "two-point", "ghost")
    run.step()
    convolves = any(isinstance(part, torch.nn.Conv2d) for part in run.model.modules())
    whole = run.pipeline.micro_batch_size >= run.plan.batch_size

    def without(option: str) -> Callable[[], Any]:
        def timed() -> None:
            with WITHOUT[option](run):
                clipped_sum(run)

        return timed

    options = [name for name in WITHOUT if (convolves or name not in CONVOLUTIONS) and not (whole and name == "micro-batches")]
    functions: dict[str, Callable[[], Any]] = {"with": lambda: clipped_sum(run)}
    timings = interleaved(functions | {name: without(name) for name in options}, rounds, lambda line: progress(f"{model.name}: {line}"))
    return [_row(model.name, name, timings["with"].seconds, timings[name].seconds) for name in options]


def noise_ablation(elements: int, *, rounds: int, progress: Callable[[str], None]) -> list[dict[str, Any]]:
    """The same for the noise; nothing where there is no compiler, or no AES in the processor."""
    if _normals.compiled_noise(torch.float32) is None:
        return []
    vector, stream = torch.zeros(elements), Keys.seeded(0).stream("noise")

    def by_torch() -> None:
        def none(*dtype: torch.dtype) -> None:
            return None

        with _set(_normals, compiled_noise=none, compiled_normals=none, compiled_keystream=none):
            stream.add_normal_(vector, step=0, scale=1.0)

    functions = {"with": lambda: stream.add_normal_(vector, step=0, scale=1.0), "without": by_torch}
    timings = interleaved(functions, rounds, lambda line: progress(f"noise: {line}"))
    return [_row("update", "noise in C", timings["with"].seconds, timings["without"].seconds)]


def _row(model: str, option: str, with_it: float, without_it: float) -> dict[str, Any]:
    return {"model": model, "option": option, "seconds_with": with_it, "seconds_without": without_it}
