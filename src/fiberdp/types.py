"""What crosses a border of the pipeline.  Values only: no behaviour that needs a neighbour.

    raw-data side                     gate                   post-processing side
    probes -> ClippedSum      |  mechanism -> Release    |   filter -> moments -> update

A `Release` is the first value that anyone outside may see; everything computed from releases alone is
post-processing and costs no privacy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, islice
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Probe:
    """One point at which each example's gradient is evaluated: theta + lookahead * d, with this weight."""

    weight: float
    lookahead: float


@dataclass(frozen=True)
class ClippedSum:
    """The sum over the batch of clipped per-example observations, in gradient units.

    total: Tensor[d], or a slice of it, whose first entry is number `start` of `numel`.  sensitivity: the most that the whole moves, in L2
    norm, when one example is added to or removed from the batch (replacing one example moves it by at most twice that).
    """

    total: Tensor
    sensitivity: float
    start: int = 0
    numel: int = -1

    def __post_init__(self) -> None:
        if self.numel < 0:
            object.__setattr__(self, "numel", self.start + len(self.total))


@dataclass(frozen=True)
class Noise:
    """What noise one coordinate of a released gradient carries: w_t = std x_t, with x_t white noise through a noising filter.

        Sum_j a_j x_{t-j}  =  Sum_j b_j z_{t-j},        z_t ~ N(0, 1) white,  z = x = 0 before step 0

    std: standard deviation of what one unit of z adds, gradient units (sigma_w = sigma C / B for white noise).
    b, a: the noising filter of a correlated mechanism, moving-average and recursive part; both (1.0,) is white noise.  For a Toeplitz
    strategy matrix with coefficients c (x = C^{-1} z), a is c.
    """

    std: float
    b: tuple[float, ...] = (1.0,)
    a: tuple[float, ...] = (1.0,)

    @property
    def white(self) -> bool:
        return len(self.a) == len(self.b) == 1

    def impulse_response(self, length: int) -> tuple[float, ...]:
        """k_j, j < length, of the noising filter: x_t = Sum_j k_j z_{t-j}.

        >>> Noise(1.0, a=(1.0, -0.5)).impulse_response(4)
        (1.0, 0.5, 0.25, 0.125)
        """
        return tuple(islice(self.coefficients(), length))

    def coefficients(self) -> Iterator[float]:
        """k_0, k_1, … without end, each from the last len(a) - 1."""
        before: deque[float] = deque(maxlen=len(self.a) - 1)  # k_{j-1}, k_{j-2}, …
        for j in count():
            recursive = sum(a * k for a, k in zip(self.a[1:], before))
            k = ((self.b[j] if j < len(self.b) else 0.0) - recursive) / self.a[0]
            before.appendleft(k)
            yield k


@dataclass(frozen=True)
class Release:
    """A privatised average gradient g_t, Tensor[d], and the noise it carries.

    scale: Tensor[d], by which gradients were multiplied before the clip, or None: value / scale is in gradient units, and the noise
    is the same in every coordinate of `value`.
    """

    value: Tensor
    noise: Noise
    scale: Tensor | None = None
