"""filter -> moments -> update -> theta, d: everything right of the gate, and the state it keeps between steps.

The pass over the vectors is in `onepass.py`.  The state is a few vectors named by their symbols (theta, d, g_tilde, r, m, v) and the
step t; it is a function of the releases alone, so it may be published with them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from fiberdp.optim.averaging import NoAveraging
from fiberdp.optim.onepass import OnePass, Vectors
from fiberdp.optim.parts import Averaging, Calibration, Filter, Scalars, Scaling, Schedule, Update
from fiberdp.types import Release


class Optimizer:
    """theta: Tensor[d], changed in place by `step`.  steps: T, which the schedule needs.  t: the next step, from 0.

    groups: the slices of theta that a filter which learns (`KalmanAuto`) fits apart; others treat theta as one.
    compiled: one generated function instead of blocks of eager operations; changes time, and results by rounding only.  None compiles
    where a compiler is at hand and theta is large.

    d is theta_t - theta_{t-1} with everything the update did, weight decay included; None before the first step.
    """

    def __init__(
        self,
        theta: Tensor,
        *,
        filter: Filter,
        calibration: Calibration,
        update: Update,
        schedule: Schedule,
        steps: int,
        averaging: Averaging | None = None,
        scaling: Scaling | None = None,
        groups: Sequence[slice] | None = None,
        compiled: bool | None = None,
    ) -> None:
        self.theta = theta
        self.filter = filter
        self.calibration = calibration
        self.rule = update
        self.schedule = schedule
        self.steps = steps
        self.groups = list(groups) if groups and filter.learns else [slice(0, len(theta))]
        self.t = 0
        self.d: Tensor | None = None
        self.filter_state: dict[str, Tensor] = {}
        self.moments = {name: torch.zeros_like(theta) for name in update.state_names}
        self.calibration_state: list[Scalars] = [{} for _ in self.groups]
        self.learned: list[Any] = [filter.begin(_size(group)) for group in self.groups] if filter.learns else []  # pyright: ignore
        self.averaging = averaging or NoAveraging()
        self.averaging_state = self.averaging.init(theta)
        self.scaling = scaling
        self.scaling_state = scaling.init(theta) if scaling else {}
        self._corrections: list[Any] = []
        self._advance = OnePass(filter, update, self.averaging, scaling, size=len(theta), compiled=compiled)

    @property
    def lr(self) -> float:
        """The learning rate of the next step."""
        return self.rule.lr * self.schedule.factor(self.t, self.steps)

    @property
    def param_groups(self) -> NoReturn:
        """Refused, read or replaced: torch's schedulers and wrappers set rates in there, which nothing would read."""
        raise AttributeError(
            "optimizer.param_groups: there are none, because the learning rate is a function of the step that the plan holds, and one that "
            "is set elsewhere would change nothing. Give the method a schedule: dataclasses.replace(method, schedule=…)."
        )

    @torch.no_grad()
    def step(self, release: Release, lr: float | None = None) -> Tensor:
        """Use one release; return d_t = theta_{t+1} - theta_t, a buffer that the next step overwrites.

        lr: the learning rate of this step, from 0 on; None: the update's own, by the schedule.
        """
        assert release.value.shape == self.theta.shape
        g, noise, scale, t = release.value, release.noise, release.scale, self.t
        if t == 0:
            self.filter_state = self.filter.init(g)
            self.d = torch.empty_like(self.theta)
        assert self.d is not None
        beta2 = getattr(self.rule, "betas", (0.0, 0.0))[1]
        coefficients = self.rule.coefficients(t, self.lr if lr is None else lr)
        self._corrections = []
        spread = _variances(scale, g) if self.scaling_state else None
        vectors = Vectors(self.theta, g, self.d, self.filter_state, self.moments, self.averaging_state, self.scaling_state, scale)
        for i, group in enumerate(self.groups):
            now = self.filter.tuned(self.learned[i]) if self.learned else self.filter  # pyright: ignore
            correction, self.calibration_state[i] = self.calibration.correction(
                noise, now.system(t), now.system(None), t, beta2, self.calibration_state[i], None if spread is None else spread[group]
            )
            self._corrections.append(correction)
            self._advance(vectors.part(group), now.gains(t), coefficients, correction, self.averaging.weight(t))
            if self.learned:
                self.learned[i] = self.filter.learn(self.learned[i], g[group], noise, t)  # pyright: ignore
        self.t += 1
        return self.d

    @property
    def scale(self) -> Tensor | None:
        """By what the next step's gradients are to be multiplied before the clip, Tensor[d]; None: not at all."""
        return self.scale_of(self.scaling_state)

    def scale_of(self, state: dict[str, Tensor]) -> Tensor | None:
        """`scale` by the state of the whole vector, of which this may hold a slice."""
        return self.scaling.scale(state) if self.scaling else None

    @property
    def theta_bar(self) -> Tensor | None:
        """The average of the weights, Tensor[d]; None without averaging."""
        return self.averaging.average(self.averaging_state)

    def clamp_mass(self, total: Callable[..., Sequence[float]] = lambda *sums: sums) -> float | None:
        """Sum 1[v-_i = floor] |m^_i| / Sum |m^_i| of the last step (paper, E.6): the share of the update that the floor decides.

        total: adds both sums to those of other slices of the vector.
        In [0, 1]; None for a method without correction, or before the first step.  A function of releases alone: free of privacy cost.
        """
        if self.t == 0 or not self._corrections or self._corrections[0] is None:
            return None
        v_weight = self.rule.coefficients(self.t - 1, self.rule.lr)[1]
        pairs = [
            self.rule.clamped(_of(self.moments, group), v_weight, correction)  # pyright: ignore
            for group, correction in zip(self.groups, self._corrections)
        ]
        held, mass = total(*(sum(column) for column in zip(*pairs)))
        return held / mass if mass else 0.0

    def state_dict(self) -> dict[str, Tensor]:
        """`vectors`, and the numbers of calibration and filter: with t, all there is to resume."""
        return self.vectors() | {name: torch.as_tensor(np.asarray(value)) for name, value in self._numbers().items()}

    def vectors(self) -> dict[str, Tensor]:
        """Everything of theta's length, by its symbol."""
        found = {"theta": self.theta, **self.filter_state, **self.moments, **self.averaging_state, **self.scaling_state}
        return found if self.d is None else found | {"d": self.d}

    def load_state_dict(self, tensors: dict[str, Tensor], t: int) -> None:
        """Continue from a copy of `state_dict()` as it was before step t; theta is filled in place.

        Raises ValueError if the state is another method's: a vector or a number is missing, or there is one too many.
        """
        started = t > 0
        vectors = set(self.filter.init(self.theta)) if started else set()
        numbers = set(self._numbers())
        for i in range(len(self.groups)):
            numbers |= {_name("calibration", name, i) for name in self.calibration.state_names} if started else set()
        expected = {"theta", *self.moments, *self.averaging_state, *self.scaling_state, *vectors, *numbers} | ({"d"} if started else set())
        if tensors.keys() != expected:
            raise ValueError(
                f"optimizer state holds {', '.join(sorted(tensors))}: at step {t} this method's holds {', '.join(sorted(expected))}, "
                "because each filter and calibration has its own memory. Load the state of the same method."
            )
        self.theta.copy_(tensors["theta"])
        for name, vector in {**self.moments, **self.averaging_state, **self.scaling_state}.items():
            vector.copy_(tensors[name])
        self.t = t
        self.d = tensors["d"].to(self.theta, copy=True) if started else None
        self.filter_state = {name: tensors[name].to(self.theta, copy=True) for name in vectors}
        for name in numbers:
            part, key, *i = name.split(".")
            held = (self.calibration_state if part == "calibration" else self.learned)[int(i[0]) if i else 0]
            value = tensors[name]
            held[key] = value.to(self.theta, copy=True) if value.dim() == 1 and key == "P" else value.cpu().numpy().copy()

    def _numbers(self) -> dict[str, Any]:
        parts = {"calibration": self.calibration_state, "filter": self.learned}
        return {_name(part, key, i): value for part, states in parts.items() for i, s in enumerate(states) for key, value in s.items()}


def _of(vectors: dict[str, Tensor], part: slice) -> dict[str, Tensor]:
    return {name: vector[part] for name, vector in vectors.items()}


def _variances(scale: Tensor | None, g: Tensor) -> Tensor:
    """By what the variance of the noise in each coordinate differs, once the scaling is undone."""
    return torch.ones_like(g) if scale is None else scale.double().pow(-2).to(scale.dtype)


def _name(part: str, key: str, group: int) -> str:
    return f"{part}.{key}.{group}" if group else f"{part}.{key}"


def _size(group: slice) -> int:
    return group.stop - group.start
