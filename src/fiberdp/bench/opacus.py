"""Opacus's variants: what its PrivacyEngine makes of the same model, batch and loss, with torch's fused AdamW behind it.

Its data loading is not timed, and its noise is torch's own generator, not the cryptographic one that ours is drawn from.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fiberdp.bench.models import Batch, Model
from fiberdp.bench.variants import CLIP_NORM, LR, NOISE_MULTIPLIER, Ready, Unavailable

MODES = ("hooks", "functorch", "ghost")


class _Losses:
    """The losses as Opacus's criterion: it sets `reduction` to "none" before the call, and reduces and clips what comes back."""

    def __init__(self, loss_fn: Callable[[nn.Module, Batch], Tensor]) -> None:
        self.loss_fn, self.reduction = loss_fn, "mean"

    def __call__(self, module: nn.Module, batch: Batch) -> Tensor:
        return self.loss_fn(module, batch)


def opacus(model: Model, batch_size: int, mode: str) -> Ready:
    """A whole one-point step.  Raises Unavailable where Opacus is not installed or refuses the model."""
    step, _ = private_step(model, batch_size, mode, NOISE_MULTIPLIER)
    try:
        step()
    except (NotImplementedError, ValueError) as error:
        raise Unavailable(f"Opacus refuses: {' '.join(str(error).split())}") from error
    return Ready(step, step)


def private_step(model: Model, batch_size: int, mode: str, noise_multiplier: float) -> tuple[Callable[[], None], nn.Module]:
    """One step as a function, and the module that it trains: after it, `.grad` of the parameters is (clipped sum + noise) / batch_size."""
    try:
        from opacus import PrivacyEngine
        from opacus.validators.errors import UnsupportedError
    except ImportError as error:
        raise Unavailable("opacus is not installed (pip install fiberdp[opacus])") from error
    module, batch = model.new(), model.batch(batch_size)
    losses: Any = _Losses(model.loss_fn)  # Opacus declares nn.CrossEntropyLoss and takes any callable
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*batch), batch_size=batch_size)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that secure mode is off
        try:
            private: Any = PrivacyEngine().make_private(
                module=module, optimizer=torch.optim.AdamW(module.parameters(), lr=LR, fused=True), criterion=losses, data_loader=loader,
                noise_multiplier=noise_multiplier, max_grad_norm=CLIP_NORM, poisson_sampling=False, grad_sample_mode=mode,
            )  # fmt: skip
        except UnsupportedError as error:
            raise Unavailable(f"Opacus refuses: {' '.join(str(error).split())}") from error
    wrapped, optimizer, criterion = private[0], private[1], private[2] if mode == "ghost" else losses

    def step() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that a hook sees a layer whose input needs no gradient
            optimizer.zero_grad(set_to_none=True)
            loss = criterion(wrapped, batch)
            (loss if mode == "ghost" else loss.mean()).backward()
            optimizer.step()

    return step, module
