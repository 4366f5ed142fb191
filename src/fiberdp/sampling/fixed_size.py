"""Fixed-size sampling: at every step, B of the N examples, uniformly and without replacement."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from fiberdp.sampling import _sizes

if TYPE_CHECKING:
    from dp_accounting import DpEvent
    from torch import Tensor

    from fiberdp._random import Stream


@dataclass(frozen=True, kw_only=True)
class FixedSize:
    """The sampler the papers say they use: the batch size never varies, and the guarantee is weaker for it.

        B_t = the B examples with the smallest of N random 64-bit words, fresh at every step

    num_examples: N, public.  batch_size: B, realised and expected.

    Guarantee: a step with noise multiplier sigma = std / C is
    `SampledWithoutReplacementDpEvent(N, B, GaussianDpEvent(sigma))` under replace-one.  Replacing one example
    moves the clipped sum by up to 2C, so for the same epsilon sigma is about twice Poisson's.
    Edge cases: B = N takes every example at every step.  Two equal words among N = 10**6 have probability 3e-8
    and would only decide which of two examples comes first.
    Raises ValueError if B > N or either is no whole number of at least 1.

    >>> FixedSize(num_examples=60_000, batch_size=600).sampling_probability
    0.01
    """

    name: ClassVar[str] = "fixed_size"
    relation: ClassVar[str] = "replace_one"
    accountant: ClassVar[str] = "rdp"  # the tightest that can price it
    separation: ClassVar[int] = 1  # two uses of one example may be in neighbouring steps

    num_examples: int
    batch_size: int

    def __post_init__(self) -> None:
        _sizes.check(self.num_examples, self.batch_size)

    @property
    def sampling_probability(self) -> float:
        """B/N, the probability that a given example is in a given batch."""
        return self.batch_size / self.num_examples

    @property
    def steps_per_epoch(self) -> int:
        """L = floor(N/B), so that E epochs are E*L steps and read at most E*N examples."""
        return self.num_examples // self.batch_size

    def indices(self, stream: Stream, step: int) -> Tensor:
        """The examples of this step: int64, ascending, [B]."""
        words = stream.bits(step, 0, self.num_examples)
        return words.topk(self.batch_size, largest=False, sorted=False).indices.sort().values

    def event(self, noise_multiplier: float, step: int) -> DpEvent:
        """What this step is charged: the same at every step."""
        from dp_accounting import GaussianDpEvent, SampledWithoutReplacementDpEvent

        return SampledWithoutReplacementDpEvent(self.num_examples, self.batch_size, GaussianDpEvent(noise_multiplier))

    def charge(self, noise_multiplier: float, steps: int) -> DpEvent:
        """What steps 0 .. steps-1 are charged together."""
        from dp_accounting import SelfComposedDpEvent

        return SelfComposedDpEvent(self.event(noise_multiplier, 0), steps)
