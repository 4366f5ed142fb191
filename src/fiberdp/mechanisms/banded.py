"""Correlated noise by name: which strategy, with which of its settings.

| strategy   | reads   | accounted for                                                                       |
|------------|---------|-------------------------------------------------------------------------------------|
| bandmf     | bands   | with amplification: an example's uses lie at least `bands` steps apart              |
| bsr        | bands   | the same                                                                            |
| bisr       | bands   | as one Gaussian over the whole horizon, from the sensitivity of the whole pattern   |
| lambda-cgd | decay   | the same                                                                            |
| blt        | buffers | the same                                                                            |
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from fiberdp import _validate
from fiberdp.mechanisms.bandmf import bandmf
from fiberdp.mechanisms.blt import blt
from fiberdp.mechanisms.correlated import CorrelatedGaussian
from fiberdp.mechanisms.strategies import Strategy, bisr, bsr, lambda_cgd

READS: dict[str, dict[str, Any]] = {
    "bandmf": {"bands": 8},
    "bsr": {"bands": 8},
    "bisr": {"bands": 8},
    "lambda-cgd": {"decay": 0.9},
    "blt": {"buffers": 4},
}


@dataclass(frozen=True, kw_only=True)
class Banded:
    """strategy: a name of the table.  What it reads has a default (8 bands, decay 0.9, 4 buffers); what it does not read is refused.

    bands: coefficients of C (bandmf, bsr) or of C^{-1} (bisr).  decay: lambda in (0, 1).  buffers: of blt.

    >>> Banded()
    Banded(strategy='bandmf', bands=8, decay=None, buffers=None)
    """

    name: ClassVar[str] = "banded"
    sampling: ClassVar[str] = "cyclic"
    strategy: str = "bandmf"
    bands: int | None = None
    decay: float | None = None
    buffers: int | None = None

    def __post_init__(self) -> None:
        reads = READS[_validate.choice("strategy", self.strategy, tuple(READS))]
        for option in ("bands", "decay", "buffers"):
            if getattr(self, option) is None:
                object.__setattr__(self, option, reads.get(option))
            elif option not in reads:
                raise ValueError(
                    f"{option}={getattr(self, option)!r} with strategy={self.strategy!r}: that strategy reads {', '.join(reads)} alone. An "
                    "option that nothing reads would mislead; leave it out."
                )
        if self.bands is not None:
            _validate.count("bands", self.bands, why="It is how many coefficients the noise has; 1 is white noise.")
        if self.decay is not None:
            _validate.interval("decay", self.decay, 0, 1, open_low=True, open_high=True, why="It is the share of the last noise taken off.")
        if self.buffers is not None:
            _validate.count("buffers", self.buffers, why="It is how many vectors the noise remembers.")

    @property
    def whole_horizon(self) -> bool:
        """C is not banded: no amplification is claimed, and all steps together are one Gaussian."""
        return self.strategy not in ("bandmf", "bsr")

    @property
    def least_separation(self) -> int:
        """How many steps must lie between two uses of one example for the accounting to hold."""
        return 1 if self.bands is None or self.whole_horizon else self.bands

    def groups(self, rounds: int) -> int:
        """Groups of the cyclic sampler if none are given: the bands if C is banded, else `rounds` = N // B, the most there can be."""
        return rounds if self.whole_horizon else min(self.least_separation, rounds)

    def gate(self, *, noise_multiplier: float, batch_size: int, steps: int, separation: int) -> CorrelatedGaussian:
        """The mechanism for a run of `steps` steps whose examples are used at steps that differ by multiples of `separation`.

        A banded C is accounted for a round at a time, so its sensitivity is that of one use; otherwise that of all ceil(T/separation).
        """
        uses = -(-steps // separation)
        strategy = self._solve(steps, separation, uses)
        square = strategy.sensitivity_squared(separation, uses) if self.whole_horizon else strategy.sensitivity_squared(steps, 1)
        return CorrelatedGaussian(
            noise_multiplier=noise_multiplier, batch_size=batch_size, strategy=strategy, matrix_sensitivity=math.sqrt(square)
        )  # fmt: skip

    def _solve(self, steps: int, separation: int, uses: int) -> Strategy:
        if self.strategy == "lambda-cgd":
            assert self.decay is not None
            return lambda_cgd(steps, self.decay)
        if self.strategy == "blt":
            assert self.buffers is not None
            return blt(steps, self.buffers, separation, uses)
        assert self.bands is not None
        return {"bandmf": bandmf, "bsr": bsr, "bisr": bisr}[self.strategy](steps, self.bands)
