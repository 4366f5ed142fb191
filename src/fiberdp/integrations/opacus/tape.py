"""One physical batch on its way from the module's training pass to a clipped sum, and what may not happen on that way.

    forward        the module's inputs are kept; hooks: it runs at the first point that the method evaluates
    criterion      one loss per example, and its arguments are kept
    loss.backward  the other points are evaluated on what was kept, combined, clipped once
    step           takes the sum

Without a criterion (hooks and functorch) the loop's own backward leaves one-point gradients, or `step(closure)` evaluates every point.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from fiberdp import _tree
from fiberdp.engines import Loss, check_independent, check_loss
from fiberdp.engines.loss import random_state
from fiberdp.flat import FlatParameters
from fiberdp.integrations.opacus.call import OUTPUT, Call, CallLoss
from fiberdp.integrations.opacus.criterion import PrivateLoss
from fiberdp.types import ClippedSum

if TYPE_CHECKING:
    from fiberdp.integrations.opacus.steps import OpacusSteps


class Tape:
    """What hooks and ghost share.  steps: the run; it says where the batch stands, at which d, with which scale."""

    steps: OpacusSteps

    def __init__(self, flat: FlatParameters, loss: CallLoss, engine: Any) -> None:
        self.flat, self.loss, self.engine = flat, loss, engine
        self.row: dict[str, Tensor] | None = None  # one blank example, once a batch was seen
        self.set_up = False
        self._pass: Call | None = None
        self._output: Any = None
        self._sum: ClippedSum | None = None

    # what the module and the criterion call

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The module in training: its inputs are this step's physical batch."""
        if self._pass is not None:
            raise ValueError(
                "model: a second training pass before optimizer.step(): one forward and one backward pass belong to one step, because each "
                "example is clipped once. Call step() or zero_grad() first, use BatchMemoryManager for smaller batches in memory, and "
                "torch.no_grad() for what is not trained on."
            )
        self.flat.check()
        device = self.flat.theta.device.type
        if self.loss.known and torch.is_autocast_enabled(device):
            raise ValueError(
                "model: a training pass under torch.autocast with a criterion: every point must be evaluated in one precision, and "
                "backward() stands outside it. Leave autocast out."
            )
        call = Call(((args, kwargs),))
        self._output, self._pass = self._run(call, args, kwargs), call
        if not self.loss.known:
            self._see(call)
        return self._output

    def evaluate(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The module as it is, at theta: in eval mode, or without gradients."""
        return self.flat.module(*args, **kwargs)

    def lose(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> PrivateLoss:
        """The criterion in training."""
        if self._pass is None:
            raise ValueError(
                "criterion: no training pass came before it: it must be given the output of the model that make_private returned, in "
                "training mode, once a step. Call model(…) first; to evaluate, use torch.no_grad()."
            )
        others, named = ([OUTPUT if v is self._output else v for v in values] for values in (args, list(kwargs.values())))
        if OUTPUT not in others and OUTPUT not in named:
            raise ValueError(
                "criterion: none of its arguments is what the model returned: the pair must be evaluated again at the method's other "
                "points, so nothing may happen between them. Put what you do to the output into the module or the criterion."
            )
        if self.loss.call is self._pass and self._pass is not None:
            raise ValueError("criterion: called twice on one output: one loss belongs to one step. Put both terms into one criterion.")
        (inputs,) = self._pass.arguments(self._pass.batch)
        call = Call((inputs, (others, dict(zip(kwargs, named)))))
        if self._pass.changed:
            self._refuse_changed()
        self._see(call)
        losses = self._losses(args, kwargs)
        if not isinstance(losses, Tensor) or losses.shape != (call.rows,):
            got = f"shape {tuple(losses.shape)}" if isinstance(losses, Tensor) else type(losses).__name__
            raise ValueError(
                f"criterion returned {got} for {call.rows} examples: one loss per example is needed, because each example's gradient is "
                "clipped on its own. Give a loss with reduction, or a function that returns one loss per example."
            )
        self._pass = call
        if not self.set_up:
            self._check(call)
            self.set_up = True
        return PrivateLoss(self, call, losses)

    def backward(self, loss: PrivateLoss) -> None:
        if loss.call is not self._pass or self._sum is not None:
            raise ValueError(
                "loss.backward(): this batch has had its backward pass, or zero_grad() dropped it: each example is clipped once a step. "
                "Call model, criterion, backward and step once each, in this order."
            )
        if loss.call.changed:
            self._refuse_changed()
        self._sum = self._clip(loss)

    # what the optimizer calls

    def collect(self) -> tuple[ClippedSum, int]:
        """The clipped sum of the physical batch, and how many examples it has; the tape is then blank."""
        if self._pass is None:
            raise ValueError(
                "optimizer.step(): no training pass since the last one: each step is one batch of the returned data loader, an empty one "
                "too. Call model, criterion (if there is one) and backward first, with the model in training mode."
            )
        self.flat.check()
        if self._sum is None:
            self._sum = self._of_the_loop()
        found = self._sum, self._pass.rows
        self.drop()
        return found

    def drop(self) -> None:
        """Forget the physical batch."""
        self._pass, self._output, self._sum = None, None, None

    def blank_sum(self, count: int, d: Tensor | None, scale: Tensor | None) -> Tensor:
        """The same path on `count` blank examples with every loss multiplied by 0."""
        assert self.row is not None
        total = torch.zeros_like(self.flat.theta)
        for start in range(0, count, self.micro_batch_size):
            blank = _tree.zeros(self.row, min(self.micro_batch_size, count - start))
            self.engine.clipped_sum(self._probes, d, blank, self.steps.plan.clip, seed=0, loss_scale=0.0, scale=scale, out=total)
        return total

    # what differs

    micro_batch_size: int = 1

    def _run(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise NotImplementedError

    def _losses(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        assert self.loss.losses is not None
        with random_state(self._seed, self.flat.theta.device):
            return self.loss.losses(*args, **kwargs)

    def _clip(self, loss: PrivateLoss) -> ClippedSum:
        raise NotImplementedError

    def _of_the_loop(self) -> ClippedSum:
        raise ValueError(
            "optimizer.step(): no backward pass since the model's training pass: without it there is nothing to clip. Call loss.backward() "
            "on what the returned criterion gives."
        )

    def _check(self, call: Call) -> None:
        assert self.row is not None
        exact = Loss(self.flat.module, self.loss)
        check_loss(exact, self.flat.views(self.flat.theta), self.row)
        check_independent(exact, self.flat, self.row)

    # what all need

    @property
    def _probes(self) -> Any:
        return self.steps.plan.method.observation.probes()

    @property
    def _seed(self) -> int:
        """Of the random state of this physical batch: the plain path's."""
        return self.steps.keys.stream("model").seed(self.steps.optimizer.t + 1) + self.steps.pipeline.examples

    def _see(self, call: Call) -> None:
        self.loss.call = call
        if self.row is None:
            self.row = _tree.zeros(call.batch, 1)

    def _refuse_changed(self) -> NoReturn:
        raise ValueError(
            "the batch was changed in place after the model had read it: it must stay as it was until optimizer.step(), because other "
            "points are evaluated on it. Make a copy to change."
        )
