"""Charge, release, update for a loop that hands over clipped sums of physical batches; Opacus's accountant is charged beside the ledger."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from fiberdp._random import Keys
from fiberdp.flat import FlatParameters
from fiberdp.integrations.opacus.tape import Tape
from fiberdp.pipeline import Gate
from fiberdp.planning import Plan
from fiberdp.trainer import Steps
from fiberdp.types import ClippedSum, Release


class Handed(Gate):
    """The gate of one logical step: sums that were handed over, one a physical batch, are released together, with noise once.

    examples: how many were handed over for this step.  Raw data: compared, never shown.
    """

    def __init__(self, plan: Plan, flat: FlatParameters, keys: Keys, tape: Tape) -> None:
        super().__init__(plan, flat, keys)
        self.tape = tape
        self.examples = 0
        self._total: Tensor | None = None

    def add(self, clipped: ClippedSum, examples: int) -> None:
        self._total = clipped.total if self._total is None else self._total.add_(clipped.total)
        self.examples += examples

    def drop(self) -> None:
        self.examples, self._total = 0, None

    def release(self, step: int, d: Tensor | None, scale: Tensor | None = None, *, tap: Any = None) -> Release:
        """g_t of what was handed over, which is used up."""
        assert self._total is not None
        total = self._total
        self.drop()
        release = self._open_gate(self._own(total), "noise", step, self.noise_memory)
        return release if scale is None else replace(release, scale=scale)

    def release_of_nothing(self, step: int, d: Tensor | None, memory: dict[str, Tensor] | None = None) -> Release:
        """See `fiberdp.pipeline.Pipeline.release_of_nothing`."""
        count = len(self.plan.sampler.indices(self.keys.stream("data"), step))
        total = self.tape.blank_sum(count, d, self.made_up_scale())
        return self._open_gate(self._own(total), "receipt", step, memory or {})


class OpacusSteps(Steps):
    """accountant: Opacus's, or None.  Its history gets every step that the ledger gets, before the release."""

    pipeline: Handed

    def __init__(self, plan: Plan, model: nn.Module, flat: FlatParameters, pipeline: Handed, ledger: str | None, accountant: Any) -> None:
        super().__init__(plan, model, flat, pipeline, ledger)
        self.accountant = accountant

    def charge(self, t: int) -> None:
        super().charge(t)
        if self.accountant is not None:
            self.accountant.step(noise_multiplier=self.plan.noise_multiplier, sample_rate=self.plan.sampler.sampling_probability)

    def state(self) -> dict[str, Any]:
        """All there is to go on from, between two steps.  SECRET: it holds the keys."""
        return {
            "t": self.optimizer.t,
            "plan": self.plan.to_json(),
            "keys": self.keys.to_json(),
            "tensors": self.state_dict(),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Go on from a copy of `state()`: theta, moments, filter, keys, ledger and accountant as they were.

        Raises ValueError for another plan's state, and if Opacus's accountant holds another number of steps.
        """
        if state["plan"] != self.plan.to_json():
            raise ValueError(
                "optimizer state is of another plan: it must be the same, because epsilon was calibrated for it, and the noise belongs to "
                "it. Call make_private with what it was called with before."
            )
        t = state["t"]
        charged = 0 if self.accountant is None else steps_of(self.accountant)
        if charged not in (0, t):
            raise ValueError(
                f"privacy_engine has {charged} steps in its history, the state {t}: they must agree, or epsilon would not be that of this "
                "run. Load the accountant's state of the same moment."
            )
        self.load_state_dict(state["tensors"], t)
        self.keys = self.pipeline.keys = Keys.from_json(state["keys"])
        for step in range(t):
            self.ledger.spend(step, self.plan.event(step))
            if self.accountant is not None and charged == 0:
                self.accountant.step(noise_multiplier=self.plan.noise_multiplier, sample_rate=self.plan.sampler.sampling_probability)


def steps_of(accountant: Any) -> int:
    """How many steps its history holds; its len counts stretches of equal ones."""
    return sum(count for _, _, count in accountant.history)
