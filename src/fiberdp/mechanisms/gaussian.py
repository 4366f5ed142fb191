"""The Gaussian mechanism on the clipped sum (paper, eq. 3; Dwork and Roth 2014).

g_t = (1/B) ( Sum_i clip(u_i, C)  +  sigma C z_t ),      z_t ~ N(0, I_d), fresh at every step
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from fiberdp import _validate
from fiberdp.types import ClippedSum, Noise, Release

if TYPE_CHECKING:
    from torch import Tensor

    from fiberdp._random import Stream


@dataclass(frozen=True)
class White:
    """The choice of fresh, independent noise at every step; `gate` makes the mechanism once sigma and B are known."""

    name: ClassVar[str] = "gaussian"
    sampling: ClassVar[str] = "poisson"
    least_separation: ClassVar[int] = 1
    whole_horizon: ClassVar[bool] = False

    def groups(self, rounds: int) -> int:
        """Groups of a cyclic sampler if none are given.  rounds: N // B, the most there can be."""
        return rounds

    def gate(self, *, noise_multiplier: float, batch_size: int, steps: int, separation: int) -> Gaussian:
        return Gaussian(noise_multiplier=noise_multiplier, batch_size=batch_size)


@dataclass(frozen=True, kw_only=True)
class Gaussian:
    """noise_multiplier: sigma = std of the noise on the sum / sensitivity.  batch_size: B, the EXPECTED batch size.

    Guarantee: one release of a sum with sensitivity C is a Gaussian mechanism with noise multiplier sigma.  B is a
    constant: dividing by the realised batch size would release that size.  sigma = 0 adds nothing and protects nothing.
    """

    name: ClassVar[str] = "gaussian"
    noise_multiplier: float
    batch_size: int

    def __post_init__(self) -> None:
        check_noise(self.noise_multiplier, self.batch_size)

    def init(self, like: Tensor) -> dict[str, Tensor]:
        """White noise has no memory."""
        return {}

    def noise(self, sensitivity: float, step: int = 0) -> Noise:
        """The noise one coordinate of g_t carries: std sigma C / B, white, the same at every step."""
        return Noise(0.0 if self.noise_multiplier == 0 else self.noise_multiplier * sensitivity / self.batch_size)

    def release(self, clipped: ClippedSum, stream: Stream, step: int, state: dict[str, Tensor] | None = None) -> Release:
        """Spend `step` of the noise stream on `clipped`, whose total is used up (overwritten).

        Raises ValueError if the sensitivity is infinite and noise is asked for: no finite noise hides an unclipped example.
        """
        if self.noise_multiplier > 0:
            refuse_unclipped(clipped.sensitivity)
            scale = self.noise_multiplier * clipped.sensitivity
            stream.add_normal_(clipped.total, step=step, start=clipped.start, scale=scale)
        return Release(clipped.total.div_(self.batch_size), self.noise(clipped.sensitivity))


def check_noise(noise_multiplier: float, batch_size: int) -> None:
    """Raise ValueError unless sigma is a finite number of at least 0 and B a whole number of at least 1."""
    why = "It is the noise's std over the sensitivity."
    _validate.interval("noise_multiplier", noise_multiplier, 0, float("inf"), open_high=True, why=why)
    _validate.count("batch_size", batch_size, why="It divides the noisy sum.")


def refuse_unclipped(sensitivity: float) -> None:
    if sensitivity == float("inf"):
        raise ValueError(
            "clip_norm=inf with noise: the clip norm must be finite, because no finite noise hides an unclipped example. "
            "Set clip_norm, or noise_multiplier=0 for a run that is not private."
        )
