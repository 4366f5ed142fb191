"""The Gaussian mechanism in exact arithmetic: what is released are whole numbers of a grid, as if computed with real numbers.

    s   = grid round(Sum_i clip(u_i, C) / grid),          grid = 2^k <= 2^-11 C / sqrt(d)
    g_t = (1/B) ( s + grid round(sigma C' z_t / grid) ),  C'   = (1 + 2^-10) C,     z_t ~ N(0, I_d) of real numbers, exactly

Why it is a Gaussian mechanism.  s is a whole number of the grid, so s + grid round(w / grid) = grid round((s + w) / grid): the release is
s + w, rounded, and rounding what a Gaussian mechanism released costs nothing.  That holds for every accountant, sampler and number of
steps.  Rounding moves s by at most grid/2 in each coordinate, so two neighbouring s differ by at most C + grid sqrt(d) <= (1 + 2^-11) C;
the other 2^-11 C is for what float32 rounds in norms and in the sum itself.

What it withstands that `Gaussian` does not: a float32 sum of gradient and noise is itself rounded to a grid, which depends on both, so its
last bits can tell which of two gradients it holds (Mironov 2012; Jin et al. 2022, arXiv 2112.05307).  Here the set of values that can be
released, and the probability of each, is that of the real mechanism whatever the gradient: z is drawn in intervals that are refined until
they round alike (Haney et al. 2022, arXiv 2207.13793), once in a million numbers beyond the first, so that time tells next to nothing.
What neither withstands: whoever has the keys, or watches the process at work; and sums so long that rounding moves them by more than
2^-11 C.  In float32 a sum of B examples moves by about 2^-24 sqrt(B) times its norm, which B = 10,000 equal examples bring to 0.06 C: the
allowance suffices up to some B = 400 then, and far beyond where gradients differ.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from fiberdp.mechanisms.gaussian import Gaussian, White, refuse_unclipped
from fiberdp.types import ClippedSum, Noise, Release

if TYPE_CHECKING:
    from torch import Tensor

    from fiberdp._random import Stream

ALLOWANCE = 2.0**-10  # by which the noise is larger, for everything that is rounded before it


@dataclass(frozen=True)
class WhiteOnGrid(White):
    """The choice of white noise in exact arithmetic, whatever is white otherwise."""

    name: ClassVar[str] = "gaussian-on-grid"

    def gate(self, *, noise_multiplier: float, batch_size: int, steps: int, separation: int) -> GaussianOnGrid:
        return GaussianOnGrid(noise_multiplier=noise_multiplier, batch_size=batch_size)


@dataclass(frozen=True, kw_only=True)
class GaussianOnGrid(Gaussian):
    """noise_multiplier: sigma.  batch_size: B, expected.

    Guarantee: one release of a sum with sensitivity C is a post-processing of a Gaussian mechanism over the real numbers with noise
    multiplier sigma, as long as rounding before the gate moves the sum by at most 2^-11 C.  Costs 0.1 % more noise, and time.
    """

    name: ClassVar[str] = "gaussian-on-grid"

    def noise(self, sensitivity: float, step: int = 0) -> Noise:
        """std sigma (1 + 2^-10) C / B.  That it is rounded adds grid^2 / 12 to the variance, at most 2e-8 / (d sigma^2) of it."""
        return super().noise(sensitivity * (1 + ALLOWANCE), step)

    def release(self, clipped: ClippedSum, stream: Stream, step: int, state: dict[str, Tensor] | None = None) -> Release:
        """See `Gaussian.release`."""
        if self.noise_multiplier > 0:
            refuse_unclipped(clipped.sensitivity)
            scale = self.noise_multiplier * clipped.sensitivity * (1 + ALLOWANCE)
            grid = grid_of(clipped.sensitivity, clipped.numel)
            stream.add_rounded_normal_(clipped.total, step=step, start=clipped.start, scale=scale, grid=grid)
        return Release(clipped.total.div_(self.batch_size), self.noise(clipped.sensitivity))


def grid_of(sensitivity: float, numel: int) -> float:
    """The largest power of two of at most 2^-11 C / sqrt(d)."""
    return 2.0 ** math.floor(math.log2(ALLOWANCE / 2 * sensitivity / math.sqrt(numel)))
