"""Our variants: a real run from a real plan, its noise proved, timed step by step."""

from __future__ import annotations

import torch
from torch import Tensor

from fiberdp import plan
from fiberdp._random import Keys
from fiberdp.bench.models import Model
from fiberdp.bench.variants import CLIP_NORM, LR, NOISE_MULTIPLIER, Ready
from fiberdp.methods import method
from fiberdp.trainer import Run

METHODS = {"one-point": "dp-adamw", "two-point": "fiber", "look-ahead": "fiber-lookahead"}
STEPS = 1_000_000  # more than anyone times: a run refuses to go past its plan


def ours(model: Model, batch_size: int, observation: str, engine: str, precision: str) -> Ready:
    """The run past its first step, so that d exists and every probe is evaluated."""
    run = private_run(model, batch_size, observation, engine, precision)
    run.prove()
    run.step()
    return Ready(run.step, run.step, lambda: clipped_sum(run))


def private_run(model: Model, batch_size: int, observation: str, engine: str, precision: str = "float32") -> Run:
    """A run of the method behind `observation` that has not begun.

    The data set has 4 batch_size rows and the sampling is `fixed_size`, so that every batch has exactly batch_size examples.
    """
    chosen = plan(
        method=method(METHODS[observation], lr=LR), sampling="fixed_size", num_examples=4 * batch_size, batch_size=batch_size, steps=STEPS,
        noise_multiplier=NOISE_MULTIPLIER, delta=1e-5, clip_norm=CLIP_NORM,
    )  # fmt: skip
    return chosen.private(model.new(), model.loss_fn, model.data(batch_size), engine=engine, precision=precision, keys=Keys.seeded(0))


def clipped_sum(run: Run) -> Tensor:
    """Forward, backward and clipping of the first batch_size rows, in micro-batches: a step without sampling, noise and update."""
    pipeline, rows = run.pipeline, torch.arange(run.plan.batch_size)
    return pipeline._clipped_sum(pipeline.source.take, rows, 0, run.d, run.scale, loss_scale=1.0, tap=None).total
