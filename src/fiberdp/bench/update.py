"""Model `update`: what happens to a gradient once it is there, on one vector of `elements` floats, beside torch's fused AdamW.

| variant                          | what is timed                                              |
|----------------------------------|------------------------------------------------------------|
| adamw-fused                      | torch's fused AdamW, the baseline                          |
| fiber, kalman, kalman_auto, …    | filter + calibration + AdamW + d, noise excluded           |
| normal_                          | torch's own float32 normals (one thread, no key)           |
| noise                            | white noise for the vector                                 |
| noise-banded-16, reads-16        | banded noise with 16 bands; reading 16 such vectors once   |
| noise+fiber                      | noise and update together                                  |
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fiberdp._random import Keys, one_thread
from fiberdp.filters import EMA, FILTERS, Identity, Innovation
from fiberdp.mechanisms import Banded
from fiberdp.moments import Exact, NoCorrection, Steady
from fiberdp.optim import AdamW, Constant, Optimizer
from fiberdp.types import ClippedSum, Noise, Release


def update_variants(elements: int) -> dict[str, Callable[[], Any]]:
    """Variant -> what is timed; the first is the baseline."""
    theta, g = torch.randn(elements), 0.01 * torch.randn(elements)
    theta.grad = g.clone()
    baseline = torch.optim.AdamW([theta], lr=1e-3, fused=True)
    release = Release(g, Noise(0.01))
    stream, sigma, bands = Keys.seeded(0).stream("noise"), 1.0, 16

    def optimizer(filter: Any, calibration: Any) -> Optimizer:
        return Optimizer(
            torch.randn(elements), filter=filter, calibration=calibration, update=AdamW(lr=1e-3), schedule=Constant(), steps=1,
            groups=[slice(0, elements // 2), slice(elements // 2, elements)],
        )  # fmt: skip

    fiber = optimizer(Innovation(), Steady())
    others = {
        "dp-adamw": optimizer(Identity(), NoCorrection()),
        "disk-corr": optimizer(EMA(), Steady()),
        **{name: optimizer(FILTERS[name](), Exact()) for name in ("innovation", "lowpass", "kalman", "kalman_auto")},
    }
    white, banded = torch.zeros(elements), torch.zeros(elements)
    gate = Banded(strategy="bandmf", bands=bands).gate(noise_multiplier=sigma, batch_size=1, steps=1000, separation=bands)
    memory = gate.init(banded)

    def noise_banded() -> None:
        gate.release(ClippedSum(banded, 1.0), stream, int(memory["t"]), memory)

    def reads() -> None:
        """Each of the 15 vectors of the memory and one more, read once and added up: the least that banded noise can cost."""
        with one_thread():
            torch.addmv(white, memory["w"].t(), torch.full((bands - 1,), 1e-9), out=white)

    def noise_and_fiber() -> None:
        stream.add_normal_(g, step=0, scale=0.01)
        fiber.step(release)

    return {
        "adamw-fused": baseline.step,
        "fiber": lambda: fiber.step(release),
        **{name: (lambda o=o: o.step(release)) for name, o in others.items()},
        "normal_": white.normal_,
        "noise": lambda: stream.add_normal_(white, step=0, scale=1.0),
        "noise+fiber": noise_and_fiber,
        f"reads-{bands}": reads,
        f"noise-banded-{bands}": noise_banded,
    }
