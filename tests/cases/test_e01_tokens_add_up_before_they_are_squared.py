"""E01 (CLIP): Linear(2, 2), one example of 2 tokens, inputs (1, 0), (1, 1), output gradients (1, 2), (3, 4): norm sqrt(52 + 77).

Origin: CASES.md (opacus#751).  Wrong: a bias term of 892, squared before the tokens add up.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from fiberdp.clipping import Flat
from fiberdp.engines import ENGINES, Loss
from fiberdp.flat import FlatParameters
from fiberdp.types import Probe

BATCH = {"x": torch.tensor([[[1.0, 0.0], [1.0, 1.0]]]), "g": torch.tensor([[[1.0, 2.0], [3.0, 4.0]]])}


def norm(engine, frozen=()):
    model = nn.Linear(2, 2)
    for name in frozen:
        getattr(model, name).requires_grad_(False)
    norms = []
    ENGINES[engine](FlatParameters(model), Loss(model, lambda m, b: (m(b["x"]) * b["g"]).sum((1, 2)))).clipped_sum(
        [Probe(1.0, 0.0)], None, BATCH, Flat(clip_norm=1.0), seed=0, tap=lambda losses, n: norms.append(n)
    )
    return float(norms[0][0])


@pytest.mark.parametrize("engine", ENGINES)
def test_norms_of_bias_weight_and_both(engine):
    assert norm(engine, ["weight"]) == pytest.approx(math.sqrt(52), rel=1e-6)
    assert norm(engine, ["bias"]) == pytest.approx(math.sqrt(77), rel=1e-6)
    assert norm(engine) == pytest.approx(11.35782, rel=1e-6)
