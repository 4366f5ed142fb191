"""The arrow from data to the gate: who is in the batch -> per-example observations, clipped and summed -> a release.

The trainer and the noise receipt drive this same object, so what the receipt proves is what the run does.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fiberdp import _tree
from fiberdp._ranks import Ranks
from fiberdp.types import ClippedSum, Release

if TYPE_CHECKING:
    from fiberdp._random import Keys
    from fiberdp.engines.sums import Tap
    from fiberdp.flat import FlatParameters
    from fiberdp.planning import Plan
    from fiberdp.sampling.source import Source


class Gate:
    """Where a clipped sum becomes a release: the plan's mechanism, its noise from the run's keys, and what correlated noise remembers.

    ranks: the processes that share the work.  What is released here is then this process's slice of the vector, `own`.
    """

    def __init__(self, plan: Plan, flat: FlatParameters, keys: Keys, ranks: Ranks | None = None) -> None:
        self.plan = plan
        self.flat = flat
        self.keys = keys
        self.mechanism = plan.mechanism
        self.ranks = ranks or Ranks()
        self.own = self.ranks.own(flat.numel)
        self.noise_memory: dict[str, Tensor] = self.mechanism.init(flat.theta[self.own])
        """Of correlated noise, for the next step; secret.  {} for white noise."""

    def made_up_scale(self) -> Tensor | None:
        """A scale for the receipt, which has no releases to make one of: as wide as real ones, None if the method does not scale."""
        theta = self.flat.theta
        return torch.linspace(0.5, 2, len(theta), device=theta.device) if self.plan.method.scaling.name != "none" else None

    def secret_noise(self, step: int, memory: dict[str, Tensor]) -> Tensor:
        """w_t, what the gate adds to the average gradient at `step`, made again.  SECRET: with it, the noise can be taken off the release.

        memory: from `mechanism.init`, carried from step 0 on by its caller; the run's own is left alone.
        """
        return self._open_gate(self._own(torch.zeros_like(self.flat.theta[self.own])), "noise", step, memory).value

    def load_noise_memory(self, tensors: dict[str, Tensor]) -> None:
        """Continue from a copy of `noise_memory` as it was before a step.  Raises ValueError if it is another mechanism's."""
        shapes = {name: tuple(t.shape) for name, t in tensors.items()}
        expected = {name: tuple(t.shape) for name, t in self.noise_memory.items()}
        if shapes != expected:
            raise ValueError(
                f"noise memory {shapes}: this plan's is {expected}, because each step's noise continues the last one's. Load the "
                "checkpoint of the same plan."
            )
        for name, held in self.noise_memory.items():
            held.copy_(tensors[name])

    def _own(self, total: Tensor) -> ClippedSum:
        """This process's slice of a clipped sum."""
        return ClippedSum(total, self.plan.clip.sensitivity, self.own.start, self.flat.numel)

    def _open_gate(self, clipped: ClippedSum, stream: str, step: int, memory: dict[str, Tensor]) -> Release:
        return self.mechanism.release(clipped, self.keys.stream(stream), step, *([memory] if memory else []))


class Pipeline(Gate):
    """One plan over one model and data set.  micro_batch_size: how many examples the engine sees at a time; changes no result."""

    def __init__(
        self, plan: Plan, flat: FlatParameters, engine: Any, source: Source, keys: Keys, micro_batch_size: int, ranks: Ranks | None = None
    ) -> None:
        super().__init__(plan, flat, keys, ranks)
        self.engine = engine
        self.source = source
        self.micro_batch_size = micro_batch_size

    def release(self, step: int, d: Tensor | None, scale: Tensor | None = None, *, tap: Tap | None = None) -> Release:
        """g_t of this step.  d is d_{t-1}, None at the first step.  scale: from releases alone, see `scaling/`.  Both are whole."""
        indices = self.plan.sampler.indices(self.keys.stream("data"), step)
        clipped = self._clipped_sum(self.source.take, indices, step, d, scale, loss_scale=1.0, tap=tap)
        release = self._open_gate(clipped, "noise", step, self.noise_memory)
        return release if scale is None else replace(release, scale=scale[self.own])

    def release_of_nothing(self, step: int, d: Tensor | None, memory: dict[str, Tensor] | None = None) -> Release:
        """The same pipeline on blank examples with every loss multiplied by 0, on the receipt's own noise stream: noise alone.

        Touches no data.  The number of blank examples is drawn as the run draws its batches, from the receipt's sampling.
        memory: the noise memory of the receipt's own steps, from `mechanism.init`; the run's is left alone.
        """
        indices = self.plan.sampler.indices(self.keys.stream("data"), step)
        row = self.source.take(torch.tensor([len(self.source) - 1]))  # the shortest, of rows in order of their length
        scale = self.made_up_scale()
        clipped = self._clipped_sum(lambda part: _tree.zeros(row, len(part)), indices, step, d, scale, loss_scale=0.0, tap=None)
        return self._open_gate(clipped, "receipt", step, memory or {})

    def _clipped_sum(
        self, take: Any, indices: Tensor, step: int, d: Tensor | None, scale: Tensor | None, *, loss_scale: float, tap: Tap | None
    ) -> ClippedSum:
        """Sum over micro-batches, of all processes; any split gives the same sum, and noise is added to the whole once, at the gate."""
        total, device = None, self.flat.theta.device
        probes, clip = self.plan.method.observation.probes(), self.plan.clip
        seed = self.keys.stream("model").seed(step + 1)  # step 0 of this stream initialised the model
        # first: position in the whole batch, which the copies and masks of an example depend on; no split changes it
        for first, part in self.ranks.share(indices, self.micro_batch_size):
            batch = self._augmented(_tree.to(take(part), device), step, first, len(part))
            clipped = self.engine.clipped_sum(
                probes, d, batch, clip, seed=seed + first, loss_scale=loss_scale, scale=scale, tap=tap, out=total
            )
            total = clipped.total
        assert total is not None  # an empty batch is one empty part
        return self._own(self.ranks.reduce(total))

    def _augmented(self, batch: Any, step: int, first: int, count: int) -> Any:
        """The copies of examples [first, first + count) of this step's batch: made once, so every probe sees the same."""
        augmentation = self.plan.method.augmentation
        each = augmentation.multiplicity * augmentation.draws
        uniforms = self.keys.stream("augmentation").uniform(step, first * each, (first + count) * each)
        return augmentation.apply(batch, uniforms.view(count, augmentation.multiplicity, augmentation.draws))
