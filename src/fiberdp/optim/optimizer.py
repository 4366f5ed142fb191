"""filter -> moments -> update -> theta, d: everything right of the gate, in one pass over memory.

The state is a few vectors named by their symbols (theta, d, g_tilde, r, m, v, theta_bar) and the step t; it is a function of the
releases alone, so it may be published with them.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from fiberdp.optim.averaging import NoAveraging
from fiberdp.types import Noise, Release

BLOCK = 2**17  # elements updated at a time: state and temporaries of one block stay in the L2 cache


Scalars = dict[str, np.ndarray]
"""A calibration's state: a few numbers, the same for every coordinate."""


class Filter(Protocol):
    def init(self, g: Tensor) -> dict[str, Tensor]: ...
    def update(self, g: Tensor, state: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]: ...
    def system(self, t: int) -> Any: ...


class Calibration(Protocol):
    @property
    def eps_v(self) -> float: ...
    @property
    def state_names(self) -> tuple[str, ...]: ...
    def phi(self, noise: Noise, filter: Any, t: int, beta2: float, state: Scalars) -> tuple[float | None, Scalars]: ...


class Update(Protocol):
    @property
    def lr(self) -> float: ...
    @property
    def state_names(self) -> tuple[str, ...]: ...
    def update(
        self, theta: Tensor, g_tilde: Tensor, state: dict[str, Tensor], *, t: int, lr: float, phi: float | None, eps_v: float
    ) -> None: ...


class Schedule(Protocol):
    def factor(self, t: int, steps: int) -> float: ...


class Averaging(Protocol):
    def init(self, theta: Tensor) -> dict[str, Tensor]: ...
    def update(self, theta: Tensor, state: dict[str, Tensor], *, t: int) -> None: ...
    def average(self, state: dict[str, Tensor]) -> Tensor | None: ...


class Optimizer:
    """theta: Tensor[d], changed in place by `step`.  steps: T, which the schedule needs.  t: the next step, from 0.

    d is theta_t - theta_{t-1} with everything the update did, weight decay included; None before the first step.
    """

    def __init__(
        self, theta: Tensor, *, filter: Filter, calibration: Calibration, update: Update, schedule: Schedule, steps: int,
        averaging: Averaging | None = None,
    ) -> None:  # fmt: skip
        self.theta = theta
        self.filter = filter
        self.calibration = calibration
        self.rule = update
        self.schedule = schedule
        self.steps = steps
        self.t = 0
        self.d: Tensor | None = None
        self.filter_state: dict[str, Tensor] = {}
        self.moments = {name: torch.zeros_like(theta) for name in update.state_names}
        self.calibration_state: dict[str, np.ndarray] = {}
        self.averaging = averaging or NoAveraging()
        self.averaging_state = self.averaging.init(theta)

    @property
    def lr(self) -> float:
        """The learning rate of the next step."""
        return self.rule.lr * self.schedule.factor(self.t, self.steps)

    @torch.no_grad()
    def step(self, release: Release) -> Tensor:
        """Use one release; return d_t = theta_{t+1} - theta_t, a buffer that the next step overwrites."""
        assert release.value.shape == self.theta.shape
        beta2 = getattr(self.rule, "betas", (0.0, 0.0))[1]
        phi, self.calibration_state = self.calibration.phi(release.noise, self.filter, self.t, beta2, self.calibration_state)
        lr, g = self.lr, release.value
        if self.t == 0:
            self.filter_state = self.filter.init(g)
            self.d = torch.empty_like(self.theta)
        assert self.d is not None
        for start in range(0, len(g), BLOCK):
            part = slice(start, start + BLOCK)
            theta, d, held = self.theta[part], self.d[part], {name: s[part] for name, s in self.filter_state.items()}
            g_tilde, new = self.filter.update(g[part], held)
            d.copy_(theta)
            self.rule.update(
                theta, g_tilde, {name: s[part] for name, s in self.moments.items()},
                t=self.t, lr=lr, phi=phi, eps_v=self.calibration.eps_v,
            )  # fmt: skip
            torch.sub(theta, d, out=d)
            self.averaging.update(theta, {name: s[part] for name, s in self.averaging_state.items()}, t=self.t)
            for name, value in new.items():
                held[name].copy_(value)
        self.t += 1
        return self.d

    @property
    def theta_bar(self) -> Tensor | None:
        """The average of the weights, Tensor[d]; None without averaging."""
        return self.averaging.average(self.averaging_state)

    def state_dict(self) -> dict[str, Tensor]:
        """Every vector by its symbol, and the calibration's scalars: with t, all there is to resume."""
        tensors = {"theta": self.theta, **self.filter_state, **self.moments, **self.averaging_state}
        if self.d is not None:
            tensors["d"] = self.d
        return tensors | {f"calibration.{name}": torch.as_tensor(np.asarray(value)) for name, value in self.calibration_state.items()}

    def load_state_dict(self, tensors: dict[str, Tensor], t: int) -> None:
        """Continue from a copy of `state_dict()` as it was before step t; theta is filled in place.

        Raises ValueError if the state is another method's: a vector or a calibration's number is missing, or there is one too many.
        """
        started = t > 0
        filters = set(self.filter.init(self.theta)) if started else set()
        scalars = {f"calibration.{name}" for name in self.calibration.state_names} if started else set()
        expected = {"theta", *self.moments, *self.averaging_state, *filters, *scalars} | ({"d"} if started else set())
        if tensors.keys() != expected:
            raise ValueError(
                f"optimizer state holds {', '.join(sorted(tensors))}: at step {t} this method's holds {', '.join(sorted(expected))}, "
                "because each filter and calibration has its own memory. Load the state of the same method."
            )
        self.theta.copy_(tensors["theta"])
        for name, vector in {**self.moments, **self.averaging_state}.items():
            vector.copy_(tensors[name])
        self.t = t
        self.d = tensors["d"].to(self.theta, copy=True) if started else None
        self.filter_state = {name: tensors[name].to(self.theta, copy=True) for name in filters}
        self.calibration_state = {name.removeprefix("calibration."): tensors[name].cpu().numpy().copy() for name in scalars}
