"""Who is in the batch, and what a step with that batch is charged: the two answers live in one value.

    Poisson    add or remove one   each example with probability B/N, independently (the default)
    FixedSize  replace one         exactly B, without replacement
    Shuffle    zero out            every example once a pass; claims no amplification

`batch_size` is B, the expected (logical) batch size, and always the divisor; N and B are public.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Protocol

from fiberdp.sampling.fixed_size import FixedSize
from fiberdp.sampling.poisson import Poisson
from fiberdp.sampling.shuffle import Shuffle

if TYPE_CHECKING:
    from dp_accounting import DpEvent
    from torch import Tensor

    from fiberdp._random import Stream

__all__ = ["SAMPLERS", "FixedSize", "Poisson", "Sampler", "Shuffle"]


class Sampler(Protocol):
    """What the plan, the ledger and the trainer need to know of a sampler."""

    name: ClassVar[str]
    relation: ClassVar[str]

    @property
    def num_examples(self) -> int: ...
    @property
    def batch_size(self) -> int: ...
    @property
    def steps_per_epoch(self) -> int: ...
    def indices(self, stream: Stream, step: int) -> Tensor: ...
    def event(self, noise_multiplier: float, step: int) -> DpEvent: ...
    def charge(self, noise_multiplier: float, steps: int) -> DpEvent: ...


SAMPLERS: dict[str, type[Poisson] | type[FixedSize] | type[Shuffle]] = {
    "poisson": Poisson,
    "fixed_size": FixedSize,
    "shuffle": Shuffle,
}
