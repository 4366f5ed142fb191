"""The conformance grid: filters with parameters, kinds of noise, and how to drive them.  A new filter is tested by being registered."""

from __future__ import annotations

import math

import torch

from fiberdp.filters import FILTERS, LTI
from fiberdp.filters.kalman_auto import Tuned

SETTINGS = {
    "ema": [{}, *({"kappa": kappa, "init_at": at} for kappa in (0.05, 0.3, 0.7, 1.0) for at in ("first", "zero"))],
    "innovation": [{"omega": omega} for omega in (0.05, 0.3, 0.5, 0.9, 1.0)],
    "alpha_beta": [{}, {"alpha": 0.9, "beta": 0.9}, {"alpha": 0.2, "beta": 0.02}, {"alpha": 1.2, "beta": 0.3}],
    "lowpass": [{}, {"b": (0.1,), "a": (1.0, -0.9)}, {"b": (0.25, 0.5, 0.25), "a": (1.0,)}, {"b": (1.0,), "a": (1.0,)}],
    "kalman": [{}, {"sigma_s": 0.5, "sigma_r": 0.0}, {"sigma_s": 0.0, "sigma_r": 0.1}, {"sigma_s": 0.3, "sigma_r": 1.0}],
    "lti": [
        {"M": ((0.5, 0.2), (-0.1, 0.7)), "G": (1.0, -0.5), "H": (0.3, 0.2)},
        {"M": ((0.5,),), "G": (0.25,), "H": (1.0,), "D": 0.5},
        {"M": ((0.0,),), "G": (1.0,), "H": (0.0,), "D": 1.0},
    ],
}  # fmt: skip
LEARNING = [name for name, cls in FILTERS.items() if cls.learns]
CASES = [cls(**settings) for name, cls in FILTERS.items() if name not in LEARNING for settings in SETTINGS.get(name, [{}])]
CASES += [Tuned(K=0.3, alpha=0.4, beta=0.1, w=0.25)]

FEW = [*{type(filter): filter for filter in reversed(CASES)}.values()]
"""One of each kind, for what takes long."""

TRACKING = [filter for filter in CASES if not isinstance(filter, LTI)]
"""Those that a constant gradient comes through unchanged."""


def run(filter, inputs):
    """[T, d] -> [T, d] through init and update."""
    state, outputs = filter.init(inputs[0]), []
    for t, g in enumerate(inputs):
        g_tilde, state = filter.update(g, state, t)
        outputs.append(g_tilde.clone())
    return torch.stack(outputs)


def memory(filter):
    """Steps after which what is left of the start is below 1e-9."""
    radius = filter.system(None).spectral_radius
    return 3 if radius < 1e-6 else 3 + math.ceil(math.log(1e-9) / math.log(radius))
