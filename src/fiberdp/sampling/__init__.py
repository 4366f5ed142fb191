"""Who is in the batch, and what a step with that batch is charged: the two answers live in one value.

    Poisson    add or remove one   each example with probability B/N, independently (the default)
    FixedSize  replace one         exactly B, without replacement
    Shuffle    zero out            every example once a pass; claims no amplification
    Cyclic     add or remove one   Poisson from one group of the examples after the other (banded noise)

`batch_size` is B, the expected (logical) batch size, and always the divisor; N and B are public.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from fiberdp._validate import choice
from fiberdp.sampling.cyclic import Cyclic
from fiberdp.sampling.fixed_size import FixedSize
from fiberdp.sampling.poisson import Poisson
from fiberdp.sampling.shuffle import Shuffle

if TYPE_CHECKING:
    from dp_accounting import DpEvent
    from torch import Tensor

    from fiberdp._random import Stream

__all__ = ["SAMPLERS", "Cyclic", "FixedSize", "Poisson", "Sampler", "Shuffle", "sampler"]


class Sampler(Protocol):
    """What the plan, the ledger and the trainer need to know of a sampler."""

    name: ClassVar[str]
    relation: ClassVar[str]

    @property
    def num_examples(self) -> int: ...
    @property
    def batch_size(self) -> int: ...
    @property
    def separation(self) -> int: ...  # two uses of one example are at least this many steps apart
    @property
    def steps_per_epoch(self) -> int: ...
    def indices(self, stream: Stream, step: int) -> Tensor: ...
    def event(self, noise_multiplier: float, step: int) -> DpEvent: ...
    def charge(self, noise_multiplier: float, steps: int) -> DpEvent: ...


SAMPLERS: dict[str, Any] = {cls.name: cls for cls in (Poisson, FixedSize, Shuffle, Cyclic)}


def sampler(name: str, num_examples: int, batch_size: int, groups: int | None = None) -> Any:
    """The sampler of that name.  Raises ValueError unless groups is given for cyclic sampling and for no other."""
    cls = SAMPLERS[choice("sampling", name, tuple(SAMPLERS))]
    if name != Cyclic.name:
        if groups is not None:
            raise ValueError(
                f"groups={groups} with sampling={name!r}: only cyclic sampling has groups. An option that nothing reads would mislead; "
                "leave it out, or use sampling='cyclic'."
            )
        return cls(num_examples=num_examples, batch_size=batch_size)
    if groups is None:
        raise ValueError("sampling='cyclic' without groups: their number must be given, because epsilon depends on it. Give groups.")
    return Cyclic(num_examples=num_examples, batch_size=batch_size, groups=groups)
