"""E03 (CLIP): y = B(A(x)), A and B share one weight w = 3, loss y, x = 1 and 2: dy/dw = 2 w x, norms 6 and 12, clipped sum 2 at C = 1.

Origin: CASES.md (opacus#413/#417).  Wrong: norms a module, 4.243 and 8.485, and a sum of 2.828: a sensitivity of sqrt(2) C.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fiberdp.clipping import Flat
from fiberdp.engines import ENGINES, Loss
from fiberdp.flat import FlatParameters
from fiberdp.types import Probe


@pytest.mark.parametrize("engine", ENGINES)
def test_both_uses_add_up_before_they_are_squared(engine):
    a, b = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
    b.weight = a.weight
    model, norms = nn.Sequential(a, b), []
    nn.init.constant_(a.weight, 3.0)
    flat = FlatParameters(model)
    total = ENGINES[engine](flat, Loss(model, lambda m, x: m(x).squeeze(1))).clipped_sum(
        [Probe(1.0, 0.0)], None, torch.tensor([[1.0], [2.0]]), Flat(clip_norm=1.0), seed=0, tap=lambda losses, n: norms.append(n)
    )
    torch.testing.assert_close(torch.cat(norms), torch.tensor([6.0, 12.0], dtype=torch.float64), rtol=1e-6, atol=0)
    torch.testing.assert_close(total.total, torch.tensor([2.0]), rtol=1e-5, atol=0)
