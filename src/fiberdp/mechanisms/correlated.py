"""The matrix mechanism on the clipped sums: noise that partly cancels in the sum of the steps.

    g_t = (1/B) ( Sum_i clip(u_i, C)  +  sigma C sens x_t ),        x = C^{-1} z,   z_t ~ N(0, I_d)

`C^{-1}` is the inverse of the strategy matrix, `sens` its sensitivity to the participation pattern of one example (see
`strategies.py`).  The filter b/a is run in its canonical form, which needs one memory w for both parts, scaled by d_t afterwards:

    w_t = z_t - Sum_{j>=1} a_j w_{t-j},        x_t = d_t Sum_j b_j w_{t-j}                        (a_0 = 1)

For a banded C, w is the past noise x; for a banded C^{-1} it is the past z.  BLT keeps its own buffers s_i instead (`blt.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from fiberdp import _validate
from fiberdp._threads import share
from fiberdp.mechanisms.gaussian import check_noise, refuse_unclipped
from fiberdp.mechanisms.strategies import Strategy
from fiberdp.types import ClippedSum, Noise, Release

if TYPE_CHECKING:
    from torch import Tensor

    from fiberdp._random import Stream

BLOCK = 2**17  # elements worked on at a time: one block of z stays in the cache while the memory passes by


@dataclass(frozen=True, kw_only=True)
class CorrelatedGaussian:
    """noise_multiplier: sigma, std over the sensitivity of C G.  batch_size: B, expected.  matrix_sensitivity: sens, in clip norms.

    Guarantee: if one example is used in a pattern that moves C G by at most sens times the clip norm, all releases together are one
    Gaussian mechanism with noise multiplier sigma, adaptively (Denisov et al. 2022, arXiv 2202.08312, Theorem 2.1).
    The memory is secret: whoever has it can take the noise off.  It costs `strategy.order` vectors.
    """

    name: ClassVar[str] = "banded"
    noise_multiplier: float
    batch_size: int
    strategy: Strategy
    matrix_sensitivity: float

    def __post_init__(self) -> None:
        check_noise(self.noise_multiplier, self.batch_size)
        _validate.positive("matrix_sensitivity", self.matrix_sensitivity, why="It is the largest norm of a sum of used columns.")

    def init(self, like: Tensor) -> dict[str, Tensor]:
        """w: [order, d], w_{t-j} in row (t - j) mod order (or s_i in row i), zeros before step 0.

        t: the step it stands at; -1 while it is written, so that half a step is never taken for a whole one.
        """
        return {"w": like.new_zeros((self.strategy.order, len(like))), "t": torch.zeros((), dtype=torch.int64)}

    def noise(self, sensitivity: float, step: int = 0) -> Noise:
        """What g_t carries: std = sigma C sens d_t / B through the strategy's own filter.  Beyond the horizon d_t is its last value."""
        return Noise(self._on_sum(sensitivity, step) / self.batch_size, self.strategy.b, self.strategy.a)

    def release(self, clipped: ClippedSum, stream: Stream, step: int, state: dict[str, Tensor]) -> Release:
        """Spend `step` of the noise stream on `clipped`, whose total is used up, and move the memory `state` on to the next step.

        Raises ValueError if the memory does not stand at `step` (the noise would be another one than was charged), or if the
        sensitivity is infinite and noise is asked for.
        """
        if self.noise_multiplier > 0:
            refuse_unclipped(clipped.sensitivity)
            if int(state["t"]) != step:
                raise ValueError(
                    f"step={step}: the noise memory stands at {int(state['t'])}, it must stand at the step that is released, because "
                    "each step's noise continues the last one's. Resume from a checkpoint."
                )
            state["t"].fill_(-1)
            add = self._add_buffered if self.strategy.buffers else self._add_filtered
            add(clipped, stream, step, state["w"], self._on_sum(clipped.sensitivity, step))
            state["t"].fill_(step + 1)
        return Release(clipped.total.div_(self.batch_size), self.noise(clipped.sensitivity, step))

    def _on_sum(self, sensitivity: float, step: int) -> float:
        """sigma C sens d_t: the std on the sum that one unit of the filter's output stands for."""
        if self.noise_multiplier == 0:
            return 0.0
        scale = self.strategy.scale
        d = 1.0 if scale is None else scale[min(step, len(scale) - 1)]
        return self.noise_multiplier * sensitivity * self.matrix_sensitivity * d

    def _add_filtered(self, clipped: ClippedSum, stream: Stream, step: int, memory: Tensor, std: float) -> None:
        order, total = len(memory), clipped.total
        age = [(step - row) % order or order for row in range(order)]  # row holds w_{t-age}
        a, b = ([x / self.strategy.a[0] for x in (*part, *[0.0] * order)] for part in (self.strategy.a, self.strategy.b))
        recursive, moving = (memory.new_tensor([part[j] for j in age]) for part in (a, b))
        oldest = memory[step % order] if order else None

        def add(block: slice, w: Tensor) -> None:
            past = memory[:, block].t()
            if len(self.strategy.a) > 1:
                torch.addmv(w, past, recursive, alpha=-1, out=w)  # one pass over the memory
            out = total[block].add_(w, alpha=std * b[0])
            if len(self.strategy.b) > 1:
                torch.addmv(out, past, moving, alpha=std, out=out)
            if oldest is not None:
                oldest[block] = w  # read for the last time, it makes room

        _in_blocks(add, clipped, stream, step)

    def _add_buffered(self, clipped: ClippedSum, stream: Stream, step: int, memory: Tensor, std: float) -> None:
        def add(block: slice, x: Tensor) -> None:
            for s, (_, omega) in zip(memory, self.strategy.buffers, strict=True):
                x.add_(s[block], alpha=-omega)
            clipped.total[block].add_(x, alpha=std)
            for s, (theta, _) in zip(memory, self.strategy.buffers, strict=True):
                s[block].mul_(theta).add_(x)

        _in_blocks(add, clipped, stream, step)


def _in_blocks(add: Callable[[slice, Tensor], None], clipped: ClippedSum, stream: Stream, step: int) -> None:
    """add(where, z_t there) for blocks that cover the total, several at once; z_t may be overwritten."""
    total = clipped.total

    def block(start: int) -> None:
        where = slice(start, min(start + BLOCK, len(total)))
        z = total.new_zeros(where.stop - start)
        add(where, stream.add_normal_(z, step=step, start=clipped.start + start, scale=1.0))

    share(block, range(0, len(total), BLOCK))
