"""Scaling of gradients before the clip, by numbers that follow from earlier releases; undone after the filter.

    u_i  ->  clip(s_t * u_i, C)         released:  g_t = (1/B)(Sum_i clip(s_t * u_i, C) + sigma C z_t)         used:  filter(g)_t / s_t

Every example is still clipped to norm C, and s_t is a function of what was released before t, so sensitivity and epsilon stay as they
are (scale, then privatise: Li et al. 2023, DP2, arXiv 2212.00309).  What changes is where the noise goes: its std in coordinate i is
sigma_w / s_{t,i} gradient units, so a coordinate with small gradients gets less of it.
"""

from typing import Any

from fiberdp.scaling.second_moment import NoScaling, SecondMoment

SCALINGS: dict[str, Any] = {cls.name: cls for cls in (NoScaling, SecondMoment)}

__all__ = ["SCALINGS", "NoScaling", "SecondMoment"]
