"""Modes hooks and functorch: the loop's own pass is the evaluation of the first point, Opacus's hooks give the gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fiberdp.engines import Loss, compare
from fiberdp.engines.loss import random_state
from fiberdp.engines.points import points
from fiberdp.integrations.opacus.call import Call
from fiberdp.integrations.opacus.criterion import PrivateLoss
from fiberdp.integrations.opacus.hooked import HooksEngine, Pass, combined
from fiberdp.integrations.opacus.tape import Tape
from fiberdp.types import ClippedSum

LIMIT = 1e-2
"""Largest relative error of a parameter's sum by hooks, beside the oracle's: rounding may flip a ReLU, a wrong rule is off by more."""


class HookedTape(Tape):
    """See `Tape`.  Without a criterion, one-point gradients are those that the loop's backward left."""

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
