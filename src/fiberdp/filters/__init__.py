"""Filters of the released gradients over time: post-processing, free of privacy cost.

A filter is a frozen value that says what linear system it is at every step; see `filters/filter.py`.
"""

from typing import Any

from fiberdp.filters.alpha_beta import AlphaBeta
from fiberdp.filters.ema import EMA
from fiberdp.filters.filter import Filter
from fiberdp.filters.identity import Identity
from fiberdp.filters.innovation import Innovation
from fiberdp.filters.kalman import Kalman
from fiberdp.filters.kalman_auto import KalmanAuto
from fiberdp.filters.lowpass import LowPass
from fiberdp.filters.lti import LTI

FILTERS: dict[str, Any] = {cls.name: cls for cls in (Identity, EMA, Innovation, AlphaBeta, LowPass, Kalman, KalmanAuto, LTI)}

__all__ = ["EMA", "FILTERS", "LTI", "AlphaBeta", "Filter", "Identity", "Innovation", "Kalman", "KalmanAuto", "LowPass"]
