"""What the loop sees of the loss: the user's criterion, and in training a loss that can be read and sent backward, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn

from fiberdp.integrations.opacus.call import Call

if TYPE_CHECKING:
    from fiberdp.integrations.opacus.tape import Tape


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
