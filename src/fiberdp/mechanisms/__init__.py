"""The gate: a clipped sum goes in, a release comes out.  Nothing to the right of it can name a raw gradient.

A method holds the choice of noise (`White()`, `WhiteOnGrid()`, `Banded(…)`); the plan makes the gate from it once sigma, B and T are known:

    gate.init(theta)                              the noise memory, {} for white noise; secret
    gate.noise(sensitivity, step)                 what the release of that step carries
    gate.release(clipped, stream, step[, memory])
"""

from __future__ import annotations

from typing import Any

from fiberdp.mechanisms.banded import Banded
from fiberdp.mechanisms.correlated import CorrelatedGaussian
from fiberdp.mechanisms.gaussian import Gaussian, White
from fiberdp.mechanisms.on_grid import GaussianOnGrid, WhiteOnGrid

MECHANISMS: dict[str, Any] = {cls.name: cls for cls in (White, WhiteOnGrid, Banded)}

__all__ = ["MECHANISMS", "Banded", "CorrelatedGaussian", "Gaussian", "GaussianOnGrid", "White", "WhiteOnGrid"]
