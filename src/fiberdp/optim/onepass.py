"""One step of the vectors in one pass over memory: filter, moments, update, theta, d, average.

Every line is elementwise, so any piece of the vectors can be advanced by itself.  Where a compiler is at hand and theta is long, the
lines are one generated function (`fused.py`), run on the whole; elsewhere they run on pieces that stay in the cache, shared between
threads.  Either way no temporary has size d (a calibration of scaled gradients brings vectors of its own).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor, sub

from fiberdp._threads import share
from fiberdp.optim.fused import fused
from fiberdp.optim.parts import Averaging, Filter, Scaling, Update

BLOCK = 2**17  # elements updated at a time: the temporaries of one block stay in the cache
COMPILE_FROM = 2**20  # elements: below, one pass takes less time than starting a compiled function is worth


class Vectors(NamedTuple):
    """Everything of size d that a step reads or writes: theta, g_t (read alone), d, memories by name, and 1 / the unit of g_t."""

    theta: Tensor
    g: Tensor
    d: Tensor
    filter: dict[str, Tensor]
    moments: dict[str, Tensor]
    averages: dict[str, Tensor]
    scales: dict[str, Tensor]
    scale: Tensor | None

    def part(self, part: slice) -> Vectors:
        """The same slice of each, sharing their memory."""
        return Vectors(*(_part(value, part) for value in self))


class OnePass:
    """size: d.  compiled: None compiles where a compiler is at hand and d is large; it changes time, and results by rounding only."""

    def __init__(
        self, filter: Filter, rule: Update, averaging: Averaging, scaling: Scaling | None, *, size: int, compiled: bool | None
    ) -> None:
        self._lines = _lines(type(filter).recursion, rule, averaging, scaling)
        self._generated = fused(self._lines) if (size >= COMPILE_FROM if compiled is None else compiled) else None

    def __call__(self, vectors: Vectors, gains: Any, coefficients: Any, correction: Any, weight: float) -> None:
        """Advance `vectors` by a step, in place.  correction: its numbers may be vectors of the same length."""
        if self._generated is not None:
            return self._generated(vectors, gains, coefficients, correction, weight)

        def block(start: int) -> None:
            part = slice(start, start + BLOCK)
            self._lines(vectors.part(part), gains, coefficients, _within(correction, part), weight)

        return share(block, range(0, len(vectors.theta), BLOCK))


def _lines(
    recursion: Callable[..., tuple[Tensor, dict[str, Tensor]]], rule: Update, averaging: Averaging, scaling: Scaling | None
) -> Callable[..., None]:
    def advance(vectors: Vectors, gains: Any, coefficients: Any, correction: Any, weight: float) -> None:
        theta, g, d, held, moments, averages, scales, scale = vectors
        g_tilde, new = recursion(g, held, *gains)
        if scale is not None:  # undone here, so that the filter saw the same noise in every coordinate
            g_tilde = g_tilde / scale
        if scaling is not None:
            scaling.update(g if scale is None else g / scale, scales)
        d.copy_(theta)
        rule.update(theta, g_tilde, moments, *coefficients, correction)
        sub(theta, d, out=d)
        averaging.update(theta, averages, weight)
        for name, value in new.items():
            held[name].copy_(value)

    return advance


def _part(value: Any, part: slice) -> Any:
    return {name: vector[part] for name, vector in value.items()} if isinstance(value, dict) else None if value is None else value[part]


def _within(correction: Any, part: slice) -> Any:
    """The part of a correction whose numbers are vectors."""
    if correction is None:
        return None
    return type(correction)(*(x[part] if isinstance(x, Tensor) and x.dim() else x for x in correction))
