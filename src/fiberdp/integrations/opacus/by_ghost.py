"""Mode ghost: the loop's own pass shows its output, and this library's engine evaluates all points on the remembered batch."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from fiberdp import _tree
from fiberdp.engines import GhostEngine, Loss, prove
from fiberdp.engines.loss import random_state
from fiberdp.integrations.opacus.call import Call
from fiberdp.integrations.opacus.criterion import PrivateLoss
from fiberdp.integrations.opacus.tape import Tape
from fiberdp.types import ClippedSum


class GhostTape(Tape):
    """See `Tape`.  No gradient is computed but by the engine."""

    engine: GhostEngine

    def _run(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with torch.no_grad(), random_state(self._seed, self.flat.theta.device):
            output = self.flat.module(*args, **kwargs)
        return tree_map(_without_backward, output)

    def _losses(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with torch.no_grad():
            return super()._losses(args, kwargs)

    def _clip(self, loss: PrivateLoss) -> ClippedSum:
        now, total = self.steps.optimizer, torch.zeros_like(self.flat.theta)
        for start in range(0, loss.call.rows, self.micro_batch_size):
            part = _tree.take(loss.call.batch, slice(start, start + self.micro_batch_size))
            self.engine.clipped_sum(
                self._probes, now.d, part, self.steps.plan.clip, seed=self._seed + start, scale=now.scale, out=total
            )  # fmt: skip
        return ClippedSum(total, self.steps.plan.clip.sensitivity)

    def _check(self, call: Call) -> None:
        super()._check(call)
        exact = Loss(self.flat.module, self.loss)
        prove(self.engine, exact, self.row, self._probes)
        self.micro_batch_size = self.engine.micro_batch_size(self.row, len(self._probes), self.steps.plan.batch_size)


def _without_backward(output: Any) -> Any:
    """The output as one that asks for gradients, so that a backward pass past the criterion is refused instead of doing nothing."""
    if not isinstance(output, Tensor) or not output.is_floating_point():
        return output
    output.requires_grad_().register_hook(_refuse_backward)
    return output


def _refuse_backward(gradient: Tensor) -> NoReturn:
    raise ValueError(
        "backward(): in mode ghost it must start from what the returned criterion gives, because that clips. Use the criterion that "
        "make_private returned, on the model's output."
    )
