"""The plan: the only place where sampler, q, C, sigma, B, T, delta and the neighbouring relation meet.

Whatever runs, runs from a plan; the accountant prices the plan's own sampler, and the mechanism uses the plan's own sigma,
so they cannot drift apart.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from fiberdp import _validate
from fiberdp.accounting import ACCOUNTANTS, epsilon, noise_multiplier
from fiberdp.accounting.events import mechanisms as charged
from fiberdp.clipping import CLIPS
from fiberdp.mechanisms import Gaussian
from fiberdp.methods import METHODS, Method
from fiberdp.methods import method as method_named
from fiberdp.sampling import SAMPLERS
from fiberdp.sampling import sampler as sampler_named
from fiberdp.types import Noise

if TYPE_CHECKING:
    from dp_accounting import DpEvent
    from torch import nn

    from fiberdp._random import Keys
    from fiberdp.trainer import Run


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything that may change epsilon or the iterates, and nothing that may not.  Frozen; JSON round-trips.

    noise_multiplier: sigma.  steps: T.  Build one with `fiberdp.plan(...)`.
    """

    method: Method
    sampler: Any
    clip: Any
    noise_multiplier: float
    steps: int
    delta: float
    accountant: str = "pld"

    def __post_init__(self) -> None:
        _validate.count("steps", self.steps, why="A run releases at least one gradient.")
        _validate.interval(
            "delta",
            self.delta,
            0,
            1,
            open_low=True,
            open_high=True,
            why="It is a failure probability: choose it below 1/N, such as N**-1.1.",
        )
        _validate.choice("accountant", self.accountant, ACCOUNTANTS)
        Gaussian(noise_multiplier=self.noise_multiplier, batch_size=self.batch_size)  # validates sigma
        _check_separation(self.method.mechanism, self.sampler)

    @property
    def num_examples(self) -> int:
        return self.sampler.num_examples

    @property
    def batch_size(self) -> int:
        """B, the expected batch size and constant divisor."""
        return self.sampler.batch_size

    @property
    def relation(self) -> str:
        """The neighbouring relation under which epsilon holds: it is the sampler's."""
        return self.sampler.relation

    @cached_property
    def mechanism(self) -> Any:
        """The gate: the method's choice of noise at this plan's sigma, B, T and separation of uses."""
        return self.method.mechanism.gate(
            noise_multiplier=self.noise_multiplier, batch_size=self.batch_size, steps=self.steps, separation=self.sampler.separation
        )  # fmt: skip

    def event(self, step: int) -> DpEvent:
        """What step `step` is charged, written to the ledger before its release.

        Noise whose strategy matrix is not banded is one Gaussian over all T steps, charged at the first.
        """
        if not self.method.mechanism.whole_horizon:
            return self.sampler.event(self.noise_multiplier, step)
        from dp_accounting import GaussianDpEvent, NoOpDpEvent

        return NoOpDpEvent() if step else GaussianDpEvent(self.noise_multiplier)

    def charge(self, noise_multiplier: float) -> DpEvent:
        """What all T steps are charged together at this sigma."""
        if not self.method.mechanism.whole_horizon:
            return self.sampler.charge(noise_multiplier, self.steps)
        from dp_accounting import GaussianDpEvent

        return GaussianDpEvent(noise_multiplier)

    def charged_noise(self, step: int) -> Noise:
        """The noise that the ledger's charge stands for: sigma is read from the event of step 0, which every later one repeats."""
        (mechanism,) = charged(self.event(0))
        return replace(self.mechanism, noise_multiplier=mechanism.noise_multiplier).noise(self.clip.sensitivity, step)

    @cached_property
    def epsilon(self) -> float:
        """epsilon of all T steps.  A finished run's epsilon comes from its ledger instead (they agree)."""
        return self.price(self.charge(self.noise_multiplier))

    @property
    def terms(self) -> dict[str, Any]:
        """What epsilon of this plan's ledger means: delta, relation, accountant."""
        return {"delta": self.delta, "relation": self.relation, "accountant": self.accountant}

    def price(self, event: DpEvent) -> float:
        """epsilon of `event` at this plan's delta, relation and accountant."""
        return epsilon(event, self.delta, relation=self.relation, accountant=self.accountant)

    def private(
        self,
        model: nn.Module,
        loss_fn: Callable[[nn.Module, Any], Any],
        dataset: Any,
        *,
        keys: Keys | None = None,
        engine: str = "ghost",
        precision: str = "float32",
        collate: Callable[..., Any] | None = None,
        micro_batch_size: int | None = None,
        ledger: str | None = None,
    ) -> Run:
        """Join the plan with a model and data: see `fiberdp.trainer.Run`."""
        from fiberdp.trainer import Run

        return Run(
            self, model, loss_fn, dataset, keys=keys, engine=engine, precision=precision, collate=collate,
            micro_batch_size=micro_batch_size, ledger=ledger,
        )  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        """A dict of plain values that `from_json` turns back into an equal plan."""
        return {
            "method": self.method.to_json(),
            "sampling": self.sampler.name,
            "num_examples": self.num_examples,
            "batch_size": self.batch_size,
            **({"groups": self.sampler.groups} if self.sampler.name == "cyclic" else {}),
            "clip": {"type": self.clip.name} | {f.name: getattr(self.clip, f.name) for f in fields(self.clip)},
            "noise_multiplier": self.noise_multiplier,
            "steps": self.steps,
            "delta": self.delta,
            "accountant": self.accountant,
        }

    @classmethod
    def from_json(cls, config: dict[str, Any]) -> Plan:
        """Raises ValueError, in one line, for anything that `to_json` does not write."""
        try:
            clip = dict(config["clip"])
            return cls(
                method=Method.from_json(config["method"]),
                sampler=sampler_named(config["sampling"], config["num_examples"], config["batch_size"], config.get("groups")),
                clip=CLIPS[_validate.choice("clip.type", clip.pop("type"), tuple(CLIPS))](**clip),
                noise_multiplier=config["noise_multiplier"],
                steps=config["steps"],
                delta=config["delta"],
                accountant=config["accountant"],
            )
        except (KeyError, TypeError, AttributeError, OverflowError) as error:
            what = f"no {error}" if isinstance(error, KeyError) else str(error).splitlines()[0]
            raise ValueError(
                f"plan: it must be what Plan.to_json wrote ({what}), because any other would be charged for what does not run. Restore it."
            ) from error


def plan(
    *,
    method: str | Method,
    num_examples: int,
    batch_size: int,
    epochs: int | None = None,
    steps: int | None = None,
    epsilon: float | None = None,
    noise_multiplier: float | None = None,
    delta: float,
    clip_norm: float,
    clip: str = "flat",
    sampling: str | None = None,
    groups: int | None = None,
    accountant: str | None = None,
    relation: str | None = None,
) -> Plan:
    """Make a plan that meets (epsilon, delta), or that uses the given noise multiplier.

    Exactly one of epochs / steps, and exactly one of epsilon / noise_multiplier.  There is no default for epsilon, delta or
    clip_norm: a privacy default is never a guess.  relation: the neighbouring relation you expect; refused unless it is
    the sampler's.  accountant: "pld" (tight; "rdp" for fixed_size, which PLD cannot price), "rdp", "rdp-classic".
    sampling: what the method's noise needs if left out: "poisson" for white noise, "cyclic" for correlated.  groups: of cyclic sampling;
    by default the bands of a banded strategy, else N // B.

    Guarantee: the released gradients of a run of this plan are (plan.epsilon, delta)-DP under plan.relation, and
    plan.epsilon <= epsilon.
    Raises ValueError, in one line, for anything out of range or that does not fit together.
    """
    chosen = method if isinstance(method, Method) else method_named(_validate.choice("method", method, tuple(METHODS)))
    sampling = _validate.choice("sampling", chosen.mechanism.sampling if sampling is None else sampling, tuple(SAMPLERS))
    if groups is None and sampling == "cyclic":
        groups = chosen.mechanism.groups(sampler_named("poisson", num_examples, batch_size).steps_per_epoch)
    sampler = sampler_named(sampling, num_examples, batch_size, groups)
    if (epochs is None) == (steps is None):
        raise ValueError(f"epochs={epochs}, steps={steps}: exactly one must be given, because each determines the other. Drop one.")
    if (epsilon is None) == (noise_multiplier is None):
        raise ValueError(
            f"epsilon={epsilon}, noise_multiplier={noise_multiplier}: exactly one must be given, because each "
            "determines the other. Drop one."
        )
    if epochs is not None:
        steps = _validate.count("epochs", epochs, why="It is how often each example is expected to be used.") * sampler.steps_per_epoch
    if relation is not None and relation != sampler.relation:
        raise ValueError(
            f"relation={relation!r} with sampling={sampling!r}: that sampler is accounted for under {sampler.relation!r}, because its "
            "guarantee is proved for that relation. Choose the sampler whose relation you need, or leave relation out."
        )
    priced_by = _validate.choice("accountant", sampler.accountant if accountant is None else accountant, ACCOUNTANTS)
    assert steps is not None
    draft = Plan(
        method=chosen,
        sampler=sampler,
        clip=CLIPS[_validate.choice("clip", clip, tuple(CLIPS))](clip_norm=clip_norm),
        noise_multiplier=1.0 if noise_multiplier is None else noise_multiplier,
        steps=steps,
        delta=delta,
        accountant=priced_by,
    )
    if epsilon is None:
        return draft
    _validate.positive("epsilon", epsilon, why="It bounds the privacy loss: typical values are 0.5 to 8.")
    return replace(draft, noise_multiplier=_calibrated(draft, epsilon))


def _calibrated(draft: Plan, target: float) -> float:
    return noise_multiplier(draft.charge, target, draft.delta, relation=draft.relation, accountant=draft.accountant)


def _check_separation(mechanism: Any, sampler: Any) -> None:
    """Raise ValueError if an example could be used more often, or at closer steps, than the mechanism's sensitivity allows for."""
    if mechanism.sampling == "cyclic" != sampler.name:
        raise ValueError(
            f"mechanism={mechanism.name!r} with sampling={sampler.name!r}: correlated noise needs cyclic sampling, because an example "
            "could be used twice within its memory, and the sensitivity would exceed what is charged. Leave sampling out, or use white "
            "noise."
        )
    if mechanism.least_separation > sampler.separation:
        most = sampler.num_examples // sampler.batch_size
        raise ValueError(
            f"bands={mechanism.least_separation} with groups={sampler.groups}: bands must be at most groups, because an example could be "
            f"used twice within the bands, and the sensitivity would exceed what is charged. N // B = {most}: use at most {most} bands "
            "and as many groups, or a smaller batch_size."
        )
