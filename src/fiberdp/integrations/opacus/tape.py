"""One physical batch on its way from the module's training pass to a clipped sum, and what may not happen on that way.

    forward        the module's inputs are kept; hooks: it runs at the first point that the method evaluates
    criterion      one loss per example, and its arguments are kept
    loss.backward  the other points are evaluated on what was kept, combined, clipped once
    step           takes the sum

Without a criterion (hooks and functorch) the loop's own backward leaves one-point gradients, or `step(closure)` evaluates every point.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from fiberdp import _tree
from fiberdp.engines import GhostEngine, Loss, check_independent, check_loss, compare, prove
from fiberdp.engines.loss import random_state
from fiberdp.engines.points import points
from fiberdp.flat import FlatParameters
from fiberdp.integrations.opacus.call import OUTPUT, Call, CallLoss
from fiberdp.integrations.opacus.hooked import HooksEngine, Pass, combined
from fiberdp.types import ClippedSum

if TYPE_CHECKING:
    from fiberdp.integrations.opacus.steps import OpacusSteps

LIMIT = 1e-2
"""Largest relative error of a parameter's sum by hooks, beside the oracle's: rounding may flip a ReLU, a wrong rule is off by more."""


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


class HookedTape(Tape):
    """Modes hooks and functorch.  The loop's own pass is the evaluation of the first point."""

    engine: HooksEngine
    _first: Tensor | None = None
    _observing = False

    def _run(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.micro_batch_size = max(self.micro_batch_size, call.rows)
        if call.rows == 0:
            self.engine.hooks.disable_hooks()  # there are no examples to have gradients
        else:
            self.engine.hooks.enable_hooks()
            if self.loss.known:
                self.engine.position.go(points(self.engine.position.home, self.steps.optimizer.d, self._probes)[0][1])
        with random_state(self._seed, self.flat.theta.device):
            return self.flat.module(*args, **kwargs)

    def evaluate(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with self.engine.position.at_home():
            return self.flat.module(*args, **kwargs)

    def _losses(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._first = super()._losses(args, kwargs)
        return self._first

    def _clip(self, loss: PrivateLoss) -> ClippedSum:
        now, first = self.steps.optimizer, self._first
        return self.engine.clipped_sum(
            self._probes, now.d, loss.call.batch, self.steps.plan.clip, seed=self._seed, scale=now.scale, first=first
        )

    def _of_the_loop(self) -> ClippedSum:
        if self.loss.known:
            return super()._of_the_loop()
        if any(probe.weight and probe.lookahead for probe in self._probes):
            raise ValueError(
                f"optimizer.step(): method {self.steps.plan.method.name!r} evaluates examples at another point than the weights, which "
                "loss.backward() alone cannot. Give make_private criterion=… and use the criterion it returns, or call "
                "optimizer.step(closure)."
            )
        assert self._pass is not None
        u: dict[str, Tensor] = {}
        if self._pass.rows:
            self._require_backward()
            u = self.engine.take(self._pass.rows)
        self.engine.forget()
        return self.engine.clipped(u, self.steps.plan.clip, self.steps.optimizer.scale, None)

    def observe(self, closure: Callable[[], Any]) -> Any:
        """Evaluate closure() (zero_grad, model, loss, backward) at every point of the method; returns what it returned first."""
        where = points(self.engine.position.home, self.steps.optimizer.d, self._probes)
        now, results, rows = self.steps.optimizer, [], []
        passes: list[Pass] = []
        self._observing = True
        try:
            for weight, point in where:
                self._pass = self._sum = None
                self.engine.position.go(point)
                with torch.enable_grad():
                    results.append(closure())
                rows.append(self._rows_of_closure())
                if rows[-1]:
                    self._require_backward()
                    passes.append((weight, self.engine.take(rows[-1])))
        finally:
            self._observing = False
            self.engine.position.back()
            self.engine.forget()
        if len(set(rows)) > 1:
            raise ValueError("closure: another batch at another point: it must see the same examples each time. Draw the batch outside.")
        self._sum = self.engine.clipped(combined(passes), self.steps.plan.clip, now.scale, None)
        return results[0]

    def _rows_of_closure(self) -> int:
        if self._pass is None:
            raise ValueError("closure: it made no training pass of the model: it must call model, loss and backward. Put them into it.")
        return self._pass.rows

    def _require_backward(self) -> None:
        if all(getattr(p, "grad_sample", None) is None and p.grad is None for p in self.engine._parameters.values()):
            super()._of_the_loop()

    def drop(self) -> None:
        super().drop()
        self._first = None
        if not self._observing:
            self.engine.position.back()
        self.engine.forget()

    def _check(self, call: Call) -> None:
        """Also that what the hooks give is what the oracle gives: a use of a parameter that they do not see would go unnoticed."""
        engine = self.engine
        with engine.position.at_home():
            engine.forget()
            engine.hooks.disable_hooks()
            super()._check(call)
            exact = Loss(self.flat.module, self.loss)
            errors = compare(_Alone(engine), exact, self.row, self._probes)
        self._first = None  # its graph was made for hooks that have now been used for something else
        worst = max(errors, key=lambda name: errors[name] if errors[name] == errors[name] else float("inf"))
        if not errors[worst] <= LIMIT:
            raise ValueError(
                f"parameter {worst}: on synthetic examples Opacus's per-example gradients give a clipped sum that is {errors[worst]:.1e} "
                f"off the oracle's, relatively; at most {LIMIT:g} is allowed, because the hooks do not see every use of it. Use "
                "grad_sample_mode='ghost'."
            )


class _Alone:
    """The engine with its hooks on while it works, and off while the oracle beside it does, which would set them off.

    Layers with parameters are in training mode then, where alone the hooks work; dropout, which has none, stays as it is.
    """

    def __init__(self, engine: HooksEngine) -> None:
        self.engine, self.flat = engine, engine.flat

    def clipped_sum(self, *args: Any, **kwargs: Any) -> ClippedSum:
        layers = [
            layer for layer in self.flat.module.modules() if not layer.training and any(True for _ in layer.parameters(recurse=False))
        ]
        try:
            for layer in layers:
                layer.training = True
            return self.engine.clipped_sum(*args, **kwargs)
        finally:
            self.engine.hooks.disable_hooks()
            for layer in layers:
                layer.training = False


class GhostTape(Tape):
    """Mode ghost: the loop's own pass shows its output, and the engine evaluates all points on the remembered batch."""

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


class PrivateLoss:
    """The losses of one physical batch.  `backward()` evaluates and clips; `item()` and `detach()` are their mean: raw data, not for the "
    "public."""

    def __init__(self, tape: Tape, call: Call, losses: Tensor) -> None:
        self.tape, self.call, self._values = tape, call, losses.detach()

    def backward(self) -> None:
        """Clip this batch's per-example gradients at all of the method's points."""
        self.tape.backward(self)

    def detach(self) -> Tensor:
        return self._values.mean()

    def item(self) -> float:
        return float(self.detach())

    __float__ = item

    def _refuse(self, *_: Any) -> NoReturn:
        raise ValueError(
            "loss: it cannot be added to or multiplied: at the method's other points the criterion alone is evaluated, so what is done to "
            "its result would count at one point only. Put the factor or term into the criterion."
        )

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __neg__ = _refuse


class PrivateCriterion:
    """The user's criterion: in training a `PrivateLoss`, otherwise (eval mode, or without gradients) what it always was."""

    def __init__(self, criterion: Callable[..., Any], module: nn.Module, tape: Tape) -> None:
        self.criterion, self._module, self._tape = criterion, module, tape

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or not self._module.training:
            return self.criterion(*args, **kwargs)
        return self._tape.lose(args, kwargs)


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
