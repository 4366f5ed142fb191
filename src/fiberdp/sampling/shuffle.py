"""Shuffled passes: a fresh random order of all N examples a pass, cut into consecutive batches."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar

from fiberdp.sampling import _sizes

if TYPE_CHECKING:
    from dp_accounting import DpEvent
    from torch import Tensor

    from fiberdp._random import Stream


@dataclass(frozen=True, kw_only=True)
class Shuffle:
    """What a data loader does, accounted for what it proves: each example is in exactly one batch of a pass.

        pass e = t // L,   batch t mod L of the order that sorts N random words,   L = ceil(N/B)

    num_examples: N, public.  batch_size: B, the divisor; the last batch of a pass may be shorter, the divisor
    stays B.

    Guarantee: no amplification is claimed.  The batches of a pass are disjoint, so blanking one example (zero-out)
    moves one released sum of the pass by at most C: a whole pass costs one `GaussianDpEvent(sigma)`, charged at
    its first step.  A run stopped in the middle of a pass has paid for all of it.
    Source: Chua et al. 2024 (arXiv 2403.17673): the Poisson figure on shuffled batches can be far too low.
    Raises ValueError if B > N or either is no whole number of at least 1.

    >>> Shuffle(num_examples=1_000, batch_size=300).steps_per_epoch
    4
    """

    name: ClassVar[str] = "shuffle"
    relation: ClassVar[str] = "zero_out"
    accountant: ClassVar[str] = "pld"  # the tightest that can price it
    separation: ClassVar[int] = 1  # two uses of one example may be in neighbouring steps

    num_examples: int
    batch_size: int

    def __post_init__(self) -> None:
        _sizes.check(self.num_examples, self.batch_size)

    @property
    def steps_per_epoch(self) -> int:
        """L = ceil(N/B): a pass ends when every example has been used once."""
        return -(-self.num_examples // self.batch_size)

    def indices(self, stream: Stream, step: int) -> Tensor:
        """The examples of this step, in shuffled order: int64, [B], or fewer in the last batch of a pass."""
        this_pass, batch = divmod(step, self.steps_per_epoch)
        start = batch * self.batch_size
        return _order(stream, this_pass, self.num_examples)[start : start + self.batch_size].clone()

    def event(self, noise_multiplier: float, step: int) -> DpEvent:
        """What this step is charged: the whole pass at its first step, nothing at the others."""
        from dp_accounting import GaussianDpEvent, NoOpDpEvent

        return NoOpDpEvent() if step % self.steps_per_epoch else GaussianDpEvent(noise_multiplier)

    def charge(self, noise_multiplier: float, steps: int) -> DpEvent:
        """What steps 0 .. steps-1 are charged together: every pass that was begun."""
        from dp_accounting import SelfComposedDpEvent

        passes = -(-steps // self.steps_per_epoch)
        return SelfComposedDpEvent(self.event(noise_multiplier, 0), passes)


# A memo of one pass, not state: sorting N words again at every step would give the same order, N/B times slower.
@lru_cache(maxsize=1)
def _order(stream: Stream, this_pass: int, num_examples: int) -> Tensor:
    return stream.bits(this_pass, 0, num_examples).argsort(stable=True)
