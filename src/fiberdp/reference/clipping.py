"""clip(u, C) = u min(1, C / ||u||), the only thing the algorithms share (FiBeR paper, section 3.2)."""

from __future__ import annotations

import numpy as np


def clip(u: np.ndarray, C: float) -> np.ndarray:
    """u: [d] -> [d] with norm at most C; a u of norm 0 is itself.

    >>> clip(np.array([3.0, 4.0]), 1.0)
    array([0.6, 0.8])
    """
    norm = np.linalg.norm(u)
    return u * min(1.0, C / norm) if norm > 0 else u
