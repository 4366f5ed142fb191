"""Real training runs of a recipe to measure on: several from one plan, and what random directions see of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fiberdp import _validate
from fiberdp._random import Keys, Stream
from fiberdp.methods import Method
from fiberdp.methods import method as method_named
from fiberdp.planning import Plan, plan
from fiberdp.recipes import Recipe, recipe_named
from fiberdp.sampling.source import as_source
from fiberdp.trainer import Run
from fiberdp.types import Release


@dataclass(frozen=True)
class Subject:
    """A recipe with its rows, from where, and a plan: what runs are made of.  make(keys) is a run at its first step."""

    recipe: Recipe
    rows: dict[str, Any]
    plan: Plan
    data: str | None = None

    def make(self, keys: Keys) -> Run:
        return Run(self.plan, self.recipe.fresh(keys, data=self.data), self.recipe.loss, self.rows["train"], keys=keys)

    def with_method(self, method: Method) -> Subject:
        """The same at the same noise: what the noise is added to, and what is made of the release, may change."""
        return replace(self, plan=replace(self.plan, method=method))


def subject(recipe: str | Recipe, method: Method | None, *, steps: int | None, epsilon: float | None, data: str | None) -> Subject:
    """method: fiber with the recipe's options if None.  steps, epsilon: the recipe's if None.  Raises ValueError for bad input."""
    chosen = recipe_named(recipe)
    if epsilon is not None:
        _validate.positive("epsilon", epsilon, why="It bounds the privacy loss: typical values are 0.5 to 8.")
    if steps is not None:
        _validate.count("steps", steps, why="It is how many releases are measured.")
    rows = chosen.load(data)
    num_examples = len(as_source(rows["train"]))
    agreed = plan(
        method=method or fiber(chosen),
        num_examples=num_examples,
        batch_size=chosen.batch_size,
        epochs=chosen.epochs if steps is None else None,
        steps=steps,
        epsilon=chosen.epsilon if epsilon is None else epsilon,
        delta=chosen.delta(num_examples),
        clip_norm=chosen.clip_norm,
    )
    return Subject(chosen, rows, agreed, data)


def fiber(recipe: str | Recipe, **changes: Any) -> Method:
    """The method fiber with the recipe's options and then these."""
    return method_named("fiber", **{**recipe_named(recipe).options.get("fiber", {}), **changes})


@dataclass(frozen=True)
class Replica(Keys):
    """The keys of a run with only its noise drawn from other ones: same initial model, batches, masks and copies."""

    noise: Keys | None = None

    def stream(self, name: str) -> Stream:
        return (self.noise if self.noise and name in ("noise", "receipt") else super()).stream(name)


class Projections:
    """u_1 … u_P in R^d, orthonormal: the coordinates dealt at random to P groups, each with random signs.  P = d at most.

    Costs d operations a vector, where dense directions would cost P d, and sees isotropic noise as well as they do.

    >>> u = Projections(10, 3, seed=0)
    >>> rows = torch.stack([u(e) for e in torch.eye(10)], 1)
    >>> torch.allclose(rows @ rows.T, torch.eye(3).double())
    True
    """

    def __init__(self, d: int, count: int, *, seed: int) -> None:
        _validate.count("projections", count, low=2, why="The standard error comes from the spread over them.")
        generator = torch.Generator().manual_seed(seed)
        self.count = min(count, d)
        self.group = torch.arange(d)[torch.randperm(d, generator=generator)] % self.count
        size = torch.bincount(self.group, minlength=self.count).double()
        signs = torch.randint(0, 2, (d,), generator=generator).double().mul_(2).sub_(1)
        self.weight = signs / size.sqrt()[self.group]

    def __call__(self, x: Tensor) -> Tensor:
        """(u_1' x, …, u_P' x), float64."""
        return torch.zeros(self.count, dtype=torch.float64).index_add_(0, self.group, x.detach().double() * self.weight)


class Watch:
    """A run seen through projections.  After each `step()`: release, g = u' g_t, and g_tilde = u' g~_t.

    g~_t is recovered from what it was added to, g~_t = (m_t - beta1 m_{t-1}) / (1 - beta1), so it is what really reached the moments,
    whatever the filter is and however the update was compiled.
    """

    def __init__(self, run: Run, projections: Projections) -> None:
        self.run, self.u = run, projections
        self.beta1: float = run.optimizer.rule.betas[0]  # pyright: ignore[reportAttributeAccessIssue]
        self.m = torch.zeros(projections.count, dtype=torch.float64)
        run.heard = self._hear

    def step(self) -> None:
        self.run.step()
        m = self.u(self.run.optimizer.moments["m"])
        self.g_tilde = (m - self.beta1 * self.m) / (1 - self.beta1)
        self.m = m

    def _hear(self, release: Release) -> None:
        self.g, self.noise = self.u(release.value), release.noise
