"""Poisson sampling: each example is in the batch with probability q = B/N, independently, at every step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from fiberdp.sampling import _sizes

if TYPE_CHECKING:
    from dp_accounting import DpEvent
    from torch import Tensor

    from fiberdp._random import Stream


@dataclass(frozen=True, kw_only=True)
class Poisson:
    """The sampler whose amplification by sampling is the best understood, and the default.

        i in B_t   iff   U_{t,i} < q,      q = B/N,   U_{t,i} uniform on [0, 1), one a (step, example)

    num_examples: N, public.  batch_size: B, the EXPECTED batch size, always the divisor; the realised size is
    Binomial(N, q) and stays on the raw side.

    Guarantee: a step with noise multiplier sigma is `PoissonSampledDpEvent(q, GaussianDpEvent(sigma))` under
    add-or-remove-one.  q is exact to 2**-53, the grid of U.
    Edge cases: an empty batch is a tensor of length 0; the step is released and charged like any other.  B = N
    takes every example at every step.
    Raises ValueError if B > N or either is no whole number of at least 1.

    >>> Poisson(num_examples=50_000, batch_size=5_000).sampling_probability
    0.1
    """

    name: ClassVar[str] = "poisson"
    relation: ClassVar[str] = "add_or_remove_one"
    accountant: ClassVar[str] = "pld"  # the tightest that can price it
    separation: ClassVar[int] = 1  # two uses of one example may be in neighbouring steps

    num_examples: int
    batch_size: int

    def __post_init__(self) -> None:
        _sizes.check(self.num_examples, self.batch_size)

    @property
    def sampling_probability(self) -> float:
        """q = B/N."""
        return self.batch_size / self.num_examples

    @property
    def steps_per_epoch(self) -> int:
        """L = floor(N/B), so that E epochs are E*L steps and read at most E*N examples in expectation.

        >>> 3 * Poisson(num_examples=14_732, batch_size=1_024).steps_per_epoch
        42
        """
        return self.num_examples // self.batch_size

    def indices(self, stream: Stream, step: int) -> Tensor:
        """The examples of this step: int64, ascending, [realised batch size], possibly [0]."""
        return (stream.uniform(step, 0, self.num_examples) < self.sampling_probability).nonzero().flatten()

    def event(self, noise_multiplier: float, step: int) -> DpEvent:
        """What this step is charged: the same at every step."""
        from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent

        return PoissonSampledDpEvent(self.sampling_probability, GaussianDpEvent(noise_multiplier))

    def charge(self, noise_multiplier: float, steps: int) -> DpEvent:
        """What steps 0 .. steps-1 are charged together."""
        from dp_accounting import SelfComposedDpEvent

        return SelfComposedDpEvent(self.event(noise_multiplier, 0), steps)
