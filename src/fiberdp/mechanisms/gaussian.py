"""The Gaussian mechanism on the clipped sum (paper, eq. 3; Dwork and Roth 2014).

g_t = (1/B) ( Sum_i clip(u_i, C)  +  sigma C z_t ),      z_t ~ N(0, I_d), fresh at every step
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from fiberdp import _validate
from fiberdp.types import ClippedSum, Noise, Release

if TYPE_CHECKING:
    from fiberdp._random import Stream


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
        _validate.interval(
            "noise_multiplier", self.noise_multiplier, 0, float("inf"), open_high=True, why="It is the noise's std over the sensitivity."
        )
        _validate.count("batch_size", self.batch_size, why="It divides the noisy sum.")

    def noise(self, sensitivity: float) -> Noise:
        """The noise one coordinate of g_t carries: std sigma C / B, white."""
        return Noise(0.0 if self.noise_multiplier == 0 else self.noise_multiplier * sensitivity / self.batch_size)

    def release(self, clipped: ClippedSum, stream: Stream, step: int) -> Release:
        """Spend `step` of the noise stream on `clipped`, whose total is used up (overwritten).

        Raises ValueError if the sensitivity is infinite and noise is asked for: no finite noise hides an unclipped example.
        """
        if self.noise_multiplier > 0:
            if clipped.sensitivity == float("inf"):
                raise ValueError(
                    "clip_norm=inf with noise: the clip norm must be finite, because no finite noise hides an unclipped example. "
                    "Set clip_norm, or noise_multiplier=0 for a run that is not private."
                )
            stream.add_normal_(clipped.total, step=step, scale=self.noise_multiplier * clipped.sensitivity)
        return Release(clipped.total.div_(self.batch_size), self.noise(clipped.sensitivity))
