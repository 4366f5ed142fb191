"""Random examples with the structure of a batch, for checks at set-up: private data are never touched."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fiberdp import _tree

if TYPE_CHECKING:
    from fiberdp.engines.loss import Loss

DRAWS = ("normal", "uniform", "normal, integers 0", "uniform, integers 0")
"""How leaves are drawn, in the order in which they are tried: a loss may take logarithms, or have one valid index only."""

REFUSALS = (IndexError, RuntimeError, ValueError, TypeError, AssertionError, NotImplementedError)


def synthetic(row: Any, count: int, generator: torch.Generator, draw: str = DRAWS[0]) -> Any:
    """`count` random examples with the structure of the one-row batch `row`, whose values are not read.

    Floating leaves are standard normal (draw "uniform": in [0, 1)), bool ones random, integer ones 0 or 1, which nearly any model takes
    as index and as label, but uint8 leaves of three dimensions or more are pixels, 0 to 255.  List leaves are as in `_tree.zeros`.
    """
    normal, integers = draw.startswith("normal"), "integers 0" not in draw

    def random(leaf: Any) -> Any:
        shape = (count, *leaf.shape[1:])
        if leaf.is_floating_point() or leaf.is_complex():
            return (torch.randn if normal else torch.rand)(shape, generator=generator).to(leaf.dtype)
        high = 256 if leaf.dtype == torch.uint8 and leaf.dim() > 2 else 2
        return torch.randint(high if integers or leaf.dtype == torch.bool else 1, shape, generator=generator).to(leaf.dtype)

    return _tree.map_leaves(lambda leaf: random(leaf) if isinstance(leaf, Tensor) else _tree.zeros(leaf, count), row)


def examples(loss: Loss, row: Any, count: int, seed: int, device: torch.device) -> Any:
    """`count` synthetic examples (K rows each) whose losses are finite numbers; zeros if no draw gives any.

    Whether they are valid is found out on the CPU: on a GPU an index out of range ends the process's use of it.
    """
    tensors = dict(loss.module.named_parameters()) | dict(loss.module.named_buffers())
    on_cpu = {f"module.{name}": tensor.detach().cpu() for name, tensor in tensors.items()}
    for draw in DRAWS:
        batch = synthetic(row, count * loss.multiplicity, torch.Generator().manual_seed(seed), draw)
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=[]), without_dropout(loss.module):
                losses = functional_call(loss, on_cpu, (batch,))
        except REFUSALS:
            continue
        if bool(losses.isfinite().all()):
            return _tree.to(batch, device)
    return _tree.to(_tree.zeros(row, count * loss.multiplicity), device)


@contextmanager
def without_dropout(module: nn.Module) -> Iterator[None]:
    """Every submodule in eval mode, and afterwards as it was."""
    modes = [(part, part.training) for part in module.modules() if part.training]
    try:
        for part, _ in modes:
            part.training = False
        yield
    finally:
        for part, mode in modes:
            part.training = mode
