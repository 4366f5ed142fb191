"""theta as ONE contiguous vector, with the module's trainable parameters as views into it.

The paper writes theta in R^d; so does this library.  Noise is then one call, a norm is one call, filter + moments +
update is one pass over memory, a checkpoint is a handful of vectors named by their symbols, and a rank's share is a slice.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Slot:
    """Where one parameter lies in theta: theta[start:stop], reshaped to `shape`."""

    name: str
    start: int
    stop: int
    shape: torch.Size


class FlatParameters:
    """The trainable parameters of `module` as views into one vector `theta`, Tensor[d].

    Tied weights (one Parameter under several names) are one slot, under the first name.  Frozen parameters
    (requires_grad False) and buffers are left alone.  Besides its parameters' storage, nothing of the module changes.

    Raises ValueError if nothing is trainable, or a trainable parameter is not float32 or float64, or parameters differ in
    dtype or device (one vector has one dtype and one device).

    >>> layer = nn.Linear(2, 3)
    >>> flat = FlatParameters(layer)
    >>> [(slot.name, slot.start, slot.stop) for slot in flat.slots]
    [('weight', 0, 6), ('bias', 6, 9)]
    >>> _ = flat.theta.fill_(1.0)
    >>> layer.bias.sum().item()
    3.0
    """

    def __init__(self, module: nn.Module) -> None:
        named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        if not named:
            raise ValueError(
                "model has no trainable parameter: at least one must have requires_grad=True, or there is nothing "
                "to train. Unfreeze a layer."
            )
        first_name, first = named[0]
        for name, p in named:
            if not p.is_floating_point():
                raise ValueError(
                    f"parameter {name} has dtype {p.dtype}: a trainable parameter must be a real floating-point tensor, "
                    "or its gradient cannot be clipped. Freeze it (requires_grad=False)."
                )
            if p.dtype not in (torch.float32, torch.float64):
                raise ValueError(
                    f"parameter {name} has dtype {p.dtype}: trainable parameters must be float32 or float64, because norms and sums in "
                    "half precision undercount. Use model.float()."
                )
            if p.dtype != first.dtype or p.device != first.device:
                raise ValueError(
                    f"parameter {name} is {p.dtype} on {p.device}, {first_name} is {first.dtype} on {first.device}: "
                    "all trainable parameters must share both, because theta is one vector. Use model.to(dtype=…, device=…)."
                )
        slots, start = [], 0
        for name, p in named:
            slots.append(Slot(name, start, start + p.numel(), p.shape))
            start += p.numel()
        self.module = module
        self.slots = tuple(slots)
        self.theta = torch.cat([p.detach().reshape(-1) for _, p in named])
        for (_, p), view in zip(named, self.views(self.theta).values(), strict=True):
            p.data = view
        self._parameters = tuple(p for _, p in named)

    @property
    def numel(self) -> int:
        """d, the number of trainable parameters."""
        return self.slots[-1].stop

    def views(self, vector: Tensor) -> dict[str, Tensor]:
        """The parameters' shapes laid over `vector`, Tensor[d], without a copy: name -> view."""
        return {slot.name: vector[slot.start : slot.stop].view(slot.shape) for slot in self.slots}

    def state_dict(self, vector: Tensor) -> dict[str, Tensor]:
        """The module's state dict with `vector`, Tensor[d], in the place of theta: copies on the CPU, tied weights under each name."""
        views, own = self.views(vector), self.module.state_dict()
        first = {id(p): name for name, p in self.module.named_parameters()}
        for name, p in self.module.named_parameters(remove_duplicate=False):
            if first[id(p)] in views:
                own[name] = views[first[id(p)]]
        return {name: tensor.detach().cpu().clone() for name, tensor in own.items()}

    def groups(self, least: int = 1024) -> list[slice]:
        """Slices of theta that belong together: one a tensor, small ones (biases) joined to their neighbour, so that each has at least
        `least` coordinates if theta has.

        >>> FlatParameters(nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 2))).groups()
        [slice(0, 1722, None)]
        """
        starts, size = [0], 0
        for slot in self.slots:
            if size >= least and self.numel - slot.start >= least:
                starts.append(slot.start)
                size = 0
            size += slot.stop - slot.start
        return [slice(a, b) for a, b in zip(starts, [*starts[1:], self.numel])]

    def check(self) -> None:
        """Raise ValueError if the module no longer trains what `theta` holds (moved, replaced, frozen or unfrozen)."""
        now = [(name, p) for name, p in self.module.named_parameters() if p.requires_grad]
        itemsize = self.theta.element_size()
        for slot, p in zip(self.slots, self._parameters, strict=True):
            if p.data_ptr() != self.theta.data_ptr() + slot.start * itemsize and math.prod(slot.shape):
                raise ValueError(
                    f"parameter {slot.name} no longer lies in theta: its storage must stay as it was set up, or training would "
                    "not reach it. Move or convert the model (model.to(…)) before making it private."
                )
        if [id(p) for _, p in now] != [id(p) for p in self._parameters]:
            changed = {name for name, _ in now} ^ {slot.name for slot in self.slots}
            raise ValueError(
                f"the set of trainable parameters changed in mid-run ({', '.join(sorted(changed)) or 'replaced objects'}): it must "
                "stay fixed, or some would be trained unclipped. Freeze or unfreeze before making the model private."
            )
