"""The modules that are handed back: Opacus's own class, or its base, whose training passes go through a `Tape`."""

from __future__ import annotations

from typing import Any

import torch
from opacus.grad_sample import AbstractGradSampleModule, GradSampleModule
from torch import nn

from fiberdp.integrations.opacus.tape import Tape


class HookedModule(GradSampleModule):
    """Per-example gradients by Opacus's hooks, or by functorch for every layer (force_functorch)."""

    tape: Tape

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return _forward(self, args, kwargs)


class GhostModule(AbstractGradSampleModule):
    """No hooks: the engine evaluates the remembered batch."""

    tape: Tape

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return _forward(self, args, kwargs)

    def remove_hooks(self) -> None:
        """There are none."""


def _forward(module: HookedModule | GhostModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if module.training and torch.is_grad_enabled():
        return module.tape.forward(args, kwargs)
    return module.tape.evaluate(args, kwargs)


def unwrapped(module: nn.Module) -> nn.Module:
    """The user's module, out of a GradSampleModule if it is in one, whose hooks are then removed."""
    return module.to_standard_module() if isinstance(module, AbstractGradSampleModule) else module
