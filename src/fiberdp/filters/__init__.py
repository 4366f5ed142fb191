"""Filters of the released gradients over time: post-processing, free of privacy cost.

A filter is a frozen value with `init(g) -> state`, `update(g, state) -> (g_tilde, state)` (pure, on any slice of the
vector) and `system(t) -> StateSpace`, the linear system it is, from which its noise gain comes.
"""

from fiberdp.filters.ema import EMA
from fiberdp.filters.identity import Identity
from fiberdp.filters.innovation import Innovation

FILTERS = {cls.name: cls for cls in (Identity, EMA, Innovation)}

__all__ = ["EMA", "FILTERS", "Identity", "Innovation"]
