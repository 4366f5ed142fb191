"""The modules that are handed back: Opacus's own class, or its base, whose training passes go through a `Tape`."""

from __future__ import annotations

from typing import Any

import torch
from opacus.grad_sample import AbstractGradSampleModule, GradSampleModule
from torch import nn

from fiberdp.integrations.opacus.tape import Tape


class _Taped(AbstractGradSampleModule):
    tape: Tape | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.tape is None:
            return self._module(*args, **kwargs)
        if self.training and torch.is_grad_enabled():
            return self.tape.forward(args, kwargs)
        return self.tape.evaluate(args, kwargs)

    def __getstate__(self) -> dict[str, Any]:
        """Without the tape: a copy, or a file of the whole module, holds no keys, and is a module like any other."""
        return {name: value for name, value in self.__dict__.items() if name != "tape"}


class HookedModule(_Taped, GradSampleModule):
    """Per-example gradients by Opacus's hooks, or by functorch for every layer (force_functorch)."""


class GhostModule(_Taped):
    """No hooks: the engine evaluates the remembered batch."""

    def remove_hooks(self) -> None:
        """There are none."""


def unwrapped(module: nn.Module) -> nn.Module:
    """The user's module, out of a GradSampleModule if it is in one, whose hooks are then removed."""
    return module.to_standard_module() if isinstance(module, AbstractGradSampleModule) else module
