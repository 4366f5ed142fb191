"""Cyclic Poisson sampling: one group of the examples at a time, so that two uses of an example lie whole rounds apart."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar

from fiberdp._validate import count
from fiberdp.sampling import _sizes

if TYPE_CHECKING:
    from dp_accounting import DpEvent
    from torch import Tensor

    from fiberdp._random import Stream

_ASSIGNMENT = 2**48 - 1  # the step of the data stream that says who is in which group; no run comes this far


@dataclass(frozen=True, kw_only=True)
class Cyclic:
    """What banded noise needs: its amplification by sampling, with a known separation between the uses of an example.

        group of i  ~  uniform on {0, …, groups - 1}, independent, once
        i in B_t   iff   group of i = t mod groups   and   U_{t,i} < p,      p = groups B/N

    num_examples: N, public.  batch_size: B, the EXPECTED batch size, always the divisor.  groups: how many; 1 is Poisson sampling.

    Guarantee: with white noise, or noise whose strategy matrix has at most `groups` bands and columns of norm at most 1, a round of
    `groups` steps is `PoissonSampledDpEvent(p, GaussianDpEvent(sigma))` under add-or-remove-one: an example can be in one step of
    the round only.  It is charged at the first step of a round; a run stopped in the middle of one has paid for all of it.
    Source: Choquette-Choo et al. 2023 (arXiv 2306.08153), cyclic Poisson sampling with banded matrices.
    Edge cases: a group, and so a batch, may be empty.  p = 1 takes the whole group: no amplification.
    Raises ValueError if groups B > N, or a number is no whole number of at least 1.

    >>> Cyclic(num_examples=50_000, batch_size=500, groups=25).sampling_probability
    0.25
    """

    name: ClassVar[str] = "cyclic"
    relation: ClassVar[str] = "add_or_remove_one"
    accountant: ClassVar[str] = "pld"  # the tightest that can price it

    num_examples: int
    batch_size: int
    groups: int = 1

    def __post_init__(self) -> None:
        _sizes.check(self.num_examples, self.batch_size)
        count("groups", self.groups, why="It is how many steps a round has.")
        if self.groups * self.batch_size > self.num_examples:
            raise ValueError(
                f"groups={self.groups}: groups * batch_size must be at most num_examples={self.num_examples}, because an example of the "
                f"step's group is used with probability groups * {self.batch_size} / {self.num_examples}. Use at most "
                f"{self.num_examples // self.batch_size} groups, or a smaller batch_size."
            )

    @property
    def sampling_probability(self) -> float:
        """p = groups B/N, for the examples of the step's group."""
        return self.groups * self.batch_size / self.num_examples

    @property
    def separation(self) -> int:
        """Two uses of one example are a multiple of this many steps apart."""
        return self.groups

    @property
    def steps_per_epoch(self) -> int:
        """L = floor(N/B), so that E epochs are E*L steps and read at most E*N examples in expectation."""
        return self.num_examples // self.batch_size

    def indices(self, stream: Stream, step: int) -> Tensor:
        """The examples of this step: int64, ascending, [realised batch size], possibly [0]."""
        group = (_groups(stream, self.num_examples, self.groups) == step % self.groups).nonzero().flatten()
        return group[stream.uniform(step, 0, len(group)) < self.sampling_probability]

    def event(self, noise_multiplier: float, step: int) -> DpEvent:
        """What this step is charged: the whole round at its first step, nothing at the others."""
        from dp_accounting import GaussianDpEvent, NoOpDpEvent, PoissonSampledDpEvent

        return NoOpDpEvent() if step % self.groups else PoissonSampledDpEvent(self.sampling_probability, GaussianDpEvent(noise_multiplier))

    def charge(self, noise_multiplier: float, steps: int) -> DpEvent:
        """What steps 0 .. steps-1 are charged together: every round that was begun."""
        from dp_accounting import SelfComposedDpEvent

        return SelfComposedDpEvent(self.event(noise_multiplier, 0), -(-steps // self.groups))


# A memo, not state: drawing the assignment again at every step would give the same one.
@lru_cache(maxsize=1)
def _groups(stream: Stream, num_examples: int, groups: int) -> Tensor:
    return stream.bits(_ASSIGNMENT, 0, num_examples).remainder(groups)
