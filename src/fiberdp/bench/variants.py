"""What is timed of a model, and how a variant says that it cannot run here.

    | variant                                            | one step                                                           |
    |----------------------------------------------------|--------------------------------------------------------------------|
    | nonprivate                                         | forward and backward, the baseline; no update                      |
    | one-point-*, two-point-*, look-ahead-*             | `run.step()` of dp-adamw, fiber, fiber-lookahead: sampling,        |
    |                                                    | forward and backward, clipping, noise, filter, update              |
    | opacus-hooks, opacus-functorch, opacus-ghost       | forward and backward, clipping, noise and fused AdamW by Opacus;   |
    |                                                    | one point, on a batch that is already there                        |

`-vmap` and `-ghost` are our engines; `-bf16` is the engine's precision, float32 if not said.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from fiberdp.bench.models import Model

CLIP_NORM = NOISE_MULTIPLIER = 1.0
LR = 1e-3


class Unavailable(Exception):
    """This variant cannot run here, or not on this model; the message says why."""


@dataclass(frozen=True)
class Ready:
    """A variant with all its state.

    step: what a row's seconds are of.  train: a whole training step, whose peak memory is measured (for `nonprivate` it has an
    update, so that state counts on both sides).  kernel: forward, backward and clipping alone, or None where they are not apart.
    """

    step: Callable[[], Any]
    train: Callable[[], Any]
    kernel: Callable[[], Any] | None = None


def nonprivate(model: Model, batch_size: int) -> Ready:
    """Forward and backward; `train` has torch's fused AdamW behind it."""
    module, batch = model.new(), model.batch(batch_size)
    optimizer = torch.optim.AdamW(module.parameters(), lr=LR, fused=True)

    def step() -> None:
        module.zero_grad(set_to_none=True)
        model.loss_fn(module, batch).mean().backward()

    def train() -> None:
        step()
        optimizer.step()

    return Ready(step, train)


def _ours(observation: str, engine: str, precision: str) -> Callable[[Model, int], Ready]:
    def build(model: Model, batch_size: int) -> Ready:
        from fiberdp.bench.ours import ours

        return ours(model, batch_size, observation, engine, precision)

    return build


def _opacus(mode: str) -> Callable[[Model, int], Ready]:
    def build(model: Model, batch_size: int) -> Ready:
        from fiberdp.bench.opacus import opacus

        return opacus(model, batch_size, mode)

    return build


VARIANTS: dict[str, Callable[[Model, int], Ready]] = {
    "nonprivate": nonprivate,
    "one-point-ghost": _ours("one-point", "ghost", "float32"),
    "two-point-ghost": _ours("two-point", "ghost", "float32"),
    "look-ahead-ghost": _ours("look-ahead", "ghost", "float32"),
    "one-point-ghost-bf16": _ours("one-point", "ghost", "bf16"),
    "two-point-ghost-bf16": _ours("two-point", "ghost", "bf16"),
    "one-point-vmap": _ours("one-point", "vmap", "float32"),
    "two-point-vmap": _ours("two-point", "vmap", "float32"),
    "opacus-hooks": _opacus("hooks"),
    "opacus-functorch": _opacus("functorch"),
    "opacus-ghost": _opacus("ghost"),
}
BASELINE = "nonprivate"
