"""What crosses a border of the pipeline.  Values only: no behaviour that needs a neighbour.

    raw-data side                     gate                   post-processing side
    probes -> ClippedSum      |  mechanism -> Release    |   filter -> moments -> update

A `Release` is the first value that anyone outside may see; everything computed from releases alone is
post-processing and costs no privacy.
"""

from __future__ import annotations

from dataclasses import dataclass
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

    total: Tensor[d].  sensitivity: the most that `total` moves, in L2 norm, when one example is added to or
    removed from the batch (replacing one example moves it by at most twice that).
    """

    total: Tensor
    sensitivity: float


@dataclass(frozen=True)
class Noise:
    """What noise one coordinate of a released gradient carries.

    std: standard deviation of the white innovations, gradient units (sigma_w = sigma C / B).
    impulse_response: k of the noising filter, w_t = std * sum_j k_j z_{t-j}; (1.0,) is white noise.
    """

    std: float
    impulse_response: tuple[float, ...] = (1.0,)

    @property
    def white(self) -> bool:
        return self.impulse_response == (1.0,)


@dataclass(frozen=True)
class Release:
    """A privatised average gradient g_t, Tensor[d], and the noise it carries."""

    value: Tensor
    noise: Noise
