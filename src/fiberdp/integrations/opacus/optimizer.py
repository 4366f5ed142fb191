"""The optimizer that is handed back: torch's interface and Opacus's, this library's step.

for physical batch:  model, criterion, loss.backward()        the tape holds its clipped sum
    step()           not the last of its logical batch        the sum is kept (BatchMemoryManager says so)
                     the last                                 charge -> release -> filter, moments, update
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from fiberdp.accounting import Ledger
from fiberdp.diagnostics.receipt import Receipt
from fiberdp.integrations.opacus.by_hooks import HookedTape
from fiberdp.integrations.opacus.loader import Batches
from fiberdp.integrations.opacus.rules import rate
from fiberdp.integrations.opacus.steps import OpacusSteps
from fiberdp.integrations.opacus.tape import Tape
from fiberdp.planning import Plan


class PrivateOptimizer(torch.optim.Optimizer):
    """Made by `make_private`.  param_groups are those of the optimizer that was given, shared with it: the learning rate of a step is what
    they say when it is taken, whichever scheduler set it.

    state_dict() is SECRET, unlike Opacus's: it holds the run's keys, from which the noise follows, because a run that went on with
    other keys would release charged steps again.
    """

    def __init__(self, original: torch.optim.Optimizer, steps: OpacusSteps, tape: Tape, batches: Batches) -> None:
        super().__init__(original.param_groups, original.defaults)
        self.original_optimizer = original
        self._steps, self._tape, self._batches = steps, tape, batches
        self._skip: list[bool] = []
        batches.restarted = self._restarted

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Take the physical batch; at the end of its logical batch: charge, release, update.  Returns what `closure` returned.

        closure: zero_grad, model, loss, backward, for loops without a criterion of ours; it is called once a point of the method.
        Raises ReceiptError, at the first step, if the noise is not proved; ValueError in one line for a batch that is not the plan's, for a
        step without a backward pass, and for one past the plan's last.
        """
        result = None
        if closure is not None:
            if isinstance(self._tape, HookedTape) and not self._tape.loss.known:
                result = self._tape.observe(closure)
            else:
                with torch.enable_grad():
                    result = closure()
        lr = rate(self, self._steps.plan.method)
        clipped, examples = self._tape.collect()
        self._steps.pipeline.add(clipped, examples)
        if self._skip and self._skip.pop(0):
            return result
        t = self._steps.optimizer.t
        if t < self._steps.plan.steps and self._steps.pipeline.examples != self._batches.size(t):
            self._steps.pipeline.drop()
            raise ValueError(
                f"step {t}: its batch is not the one that the returned data loader drew for this step: the batches must be those, because "
                "they are accounted for. Loop over that data loader, take a step for every batch (an empty one too), and wrap it in "
                "BatchMemoryManager to split them."
            )
        self._steps.step(lr)
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the physical batch that no step has taken.  Sums that wait for the rest of their logical batch stay."""
        self._tape.drop()

    def signal_skip_step(self, do_skip: bool = True) -> None:
        """BatchMemoryManager's word, one a physical batch: whether more of the logical batch follow."""
        self._skip.append(do_skip)

    def prove(self) -> Receipt:
        """The noise receipt, once a batch was seen (the first step makes it by itself); ReceiptError if the noise is not what is "
        "charged."""
        if self._tape.row is None:
            raise ValueError(
                "optimizer.prove(): no batch was seen yet: the model must have run once, because blank examples need its inputs' shapes. "
                "The first step() makes the receipt by itself."
            )
        return self._steps.prove()

    @property
    def plan(self) -> Plan:
        return self._steps.plan

    @property
    def receipt(self) -> Receipt | None:
        return self._steps.receipt

    @property
    def ledger(self) -> Ledger:
        return self._steps.ledger

    @property
    def epsilon(self) -> float:
        """epsilon of the steps taken so far, from the ledger, by the plan's accountant."""
        return self._steps.epsilon

    def averaged_state_dict(self) -> dict[str, Tensor] | None:
        """The user's module's state dict with the average of the weights; None for a method without averaging."""
        average = self._steps.optimizer.theta_bar
        return None if average is None else self._steps.flat.state_dict(average)

    def _fixed(self, name: str) -> NoReturn:
        raise ValueError(
            f"optimizer.{name} cannot be set: it is the plan's, because epsilon was computed for it. Make another plan: call make_private "
            "again."
        )

    noise_multiplier = property(lambda self: self.plan.noise_multiplier, lambda self, value: self._fixed("noise_multiplier"))
    max_grad_norm = property(lambda self: self.plan.clip.clip_norm, lambda self, value: self._fixed("max_grad_norm"))
    expected_batch_size = property(lambda self: self.plan.batch_size, lambda self, value: self._fixed("expected_batch_size"))

    def state_dict(self) -> dict[str, Any]:
        """torch's form, and the run under "fiberdp".  SECRET: see the class.  Taken between two logical steps."""
        if self._steps.pipeline.examples:
            raise ValueError(
                "optimizer.state_dict() in the middle of a logical batch: part of it would be lost. Take it when step() has made an update."
            )
        return super().state_dict() | {"fiberdp": self._steps.state()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on exactly where `state_dict` was taken: weights, moments, filter, keys, ledger, learning rates."""
        if "fiberdp" not in state_dict:
            raise ValueError(
                "optimizer state without 'fiberdp': it is not of an optimizer that make_private returned, so the run cannot go on from it. "
                "Load the state of this optimizer."
            )
        self._tape.drop()
        self._restarted()
        self._steps.load(state_dict["fiberdp"])
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({name: value for name, value in saved.items() if name != "params"})

    def _restarted(self) -> None:
        """A pass over the data begins: nothing of one that was broken off counts."""
        self._skip.clear()
        self._tape.drop()
        self._steps.pipeline.drop()
