"""E34 (STATE): a learning rate that is halved at every step halves the updates: (0.3, 0.4), then half, then a quarter.

Origin: CASES.md (opacus#649/#660, dpt#43): torch's StepLR on the object that is handed out changes nothing.  Wrong: constant updates.
Here the schedule is a part of the method, a pure function of the step; torch's schedulers are refused, aloud.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, StepLR

import fiberdp
from fiberdp.engines import ENGINES
from fiberdp.optim import SCHEDULES

GRADIENT = torch.tensor([0.3, 0.4])


@dataclass(frozen=True, kw_only=True)
class Stepped:
    """StepLR(step_size=1, gamma)."""

    name: ClassVar[str] = "stepped"
    gamma: float = 0.5

    def factor(self, t: int, steps: int) -> float:
        return self.gamma**t


class Vector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.w


def private(schedule, engine="ghost", steps=3):
    method = replace(fiberdp.method("dp-sgd", lr=1.0, momentum=0.0), schedule=schedule)
    plan = fiberdp.plan(method=method, num_examples=1, batch_size=1, steps=steps, noise_multiplier=0.0, delta=1e-5, clip_norm=1.0)
    return plan.private(Vector(), lambda m, batch: m(batch), GRADIENT[None], engine=engine)


def updates(run):
    found = []
    for _ in range(run.plan.steps - run.optimizer.t):
        before = run.flat.theta.clone()
        run.step()
        found.append(before - run.flat.theta)
    return torch.stack(found)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_halved_learning_rate_halves_the_updates(engine):
    run = private(Stepped(), engine)
    factors = torch.tensor([1.0, 0.5, 0.25])
    torch.testing.assert_close(updates(run), factors[:, None] * GRADIENT, rtol=1e-6, atol=1e-7)


def test_that_is_what_torchs_step_lr_does():
    """A second route to the case's numbers."""
    model = Vector()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler, found = StepLR(optimizer, step_size=1, gamma=0.5), []
    for _ in range(3):
        before = model.w.detach().clone()
        optimizer.zero_grad()
        model(GRADIENT[None]).sum().backward()
        optimizer.step()
        scheduler.step()
        found.append(before - model.w.detach())
    torch.testing.assert_close(torch.stack(found), updates(private(Stepped())), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_of_the_library_reaches_the_updates_and_what_a_step_reports(name):
    schedule, steps = SCHEDULES[name](**({} if name == "constant" else {"warmup": 0.7})), 8
    factors = torch.tensor([schedule.factor(t, steps) for t in range(steps)])
    torch.testing.assert_close(updates(private(schedule, steps=steps)), factors[:, None] * GRADIENT, rtol=1e-5, atol=1e-6)
    reported = torch.tensor([step.lr for step in private(schedule, steps=steps)])
    torch.testing.assert_close(reported, factors)
    assert name == "constant" or len(set(factors.tolist())) > 4


def test_a_resumed_run_goes_on_where_the_schedule_stands():
    run, again = private(Stepped()), private(Stepped())
    run.step()
    again.optimizer.load_state_dict(run.optimizer.state_dict(), 1)
    again.ledger.spend(0, again.plan.event(0))
    assert torch.equal(updates(again), updates(run))


def test_a_scheduler_of_torch_is_refused():
    run = private(Stepped())
    for handed_out in (run, run.optimizer):
        with pytest.raises(TypeError, match="is not an Optimizer"):
            StepLR(handed_out, step_size=1, gamma=0.5)
    with pytest.raises(AttributeError, match=r"^optimizer\.param_groups: [^\n]* Give the method a schedule: [^\n]*$"):
        LambdaLR(run.optimizer, lambda t: 0.5**t)


def test_nor_can_a_rate_be_set_that_nothing_reads():
    """By hand, or by a wrapper that hands its own groups to what it wraps."""
    optimizer = private(Stepped()).optimizer
    with pytest.raises(AttributeError, match="Give the method a schedule"):
        optimizer.param_groups[0]["lr"] = 0.5
    with pytest.raises(AttributeError, match="param_groups"):
        optimizer.param_groups = [{"lr": 0.5}]
    with pytest.raises(AttributeError, match="lr"):
        optimizer.lr = 0.5
