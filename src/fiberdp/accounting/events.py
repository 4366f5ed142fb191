"""What was done to the data, as dp_accounting events: their JSON, their composition, the mechanisms inside.

    GaussianDpEvent                    {"type": "gaussian", "noise_multiplier": s}
    PoissonSampledDpEvent              {"type": "poisson_sampled", "sampling_probability": q, "event": {...}}
    SampledWithoutReplacementDpEvent   {"type": "sampled_without_replacement", "source_dataset_size": N,
                                        "sample_size": B, "event": {...}}
    NoOpDpEvent                        {"type": "no_op"}
    SelfComposedDpEvent                {"type": "self_composed", "event": {...}, "count": n}
    ComposedDpEvent                    {"type": "composed", "events": [...]}

An event whose meaning is not in this table is refused, never guessed: a wrong guess is a wrong epsilon.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable
from functools import cache
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

from fiberdp._validate import count, interval

if TYPE_CHECKING:
    from dp_accounting import DpEvent


@cache
def _classes() -> dict[str, tuple[Any, tuple[str, ...]]]:
    """type name -> (class, fields).  Imported late: dp_accounting takes a second and a half."""
    import dp_accounting as dp

    return {
        "gaussian": (dp.GaussianDpEvent, ("noise_multiplier",)),
        "poisson_sampled": (dp.PoissonSampledDpEvent, ("sampling_probability", "event")),
        "sampled_without_replacement": (
            dp.SampledWithoutReplacementDpEvent,
            ("source_dataset_size", "sample_size", "event"),
        ),
        "no_op": (dp.NoOpDpEvent, ()),
        "self_composed": (dp.SelfComposedDpEvent, ("event", "count")),
        "composed": (dp.ComposedDpEvent, ("events",)),
    }


def _type_of(event: Any) -> str:
    for name, (cls, _) in _classes().items():
        if type(event) is cls:  # a subclass may mean something else
            return name
    raise ValueError(
        f"event={event!r}: must be one of {', '.join(_classes())}, as dp_accounting defines them. Another event "
        "would have to be priced by guesswork. Charge the mechanism that really ran."
    )


def to_json(event: DpEvent) -> dict[str, Any]:
    """The event as a dict of JSON values; floats keep every bit.  Raises ValueError for an unknown event.

    >>> from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
    >>> to_json(PoissonSampledDpEvent(0.1, GaussianDpEvent(1.5)))["event"]
    {'type': 'gaussian', 'noise_multiplier': 1.5}
    """
    name = _type_of(event)
    data: dict[str, Any] = {"type": name}
    for key in _classes()[name][1]:
        value = getattr(event, key)
        if key == "event":
            value = to_json(value)
        elif key == "events":
            value = [to_json(e) for e in value]
        data[key] = value
    return data


def from_json(data: Any) -> DpEvent:
    """Undo `to_json`.  Raises ValueError for an unknown type, a missing key or one too many.

    >>> from_json({"type": "gaussian", "noise_multiplier": 1.5})
    GaussianDpEvent(noise_multiplier=1.5)
    """
    name = data.get("type") if isinstance(data, dict) else None
    if not isinstance(name, str) or name not in _classes():
        raise ValueError(
            f"event type {name!r}: must be one of {', '.join(_classes())}. An unknown event cannot be priced. "
            "Read it with the version of fiberdp that wrote it."
        )
    cls, keys = _classes()[name]
    if set(data) != {"type", *keys} or not isinstance(data.get("events", []), list):
        raise ValueError(
            f"event {data!r}: a {name} event must hold exactly type{''.join(', ' + k for k in keys)}. Anything else "
            "would be priced as a mechanism that did not run. Restore the line as it was written."
        )
    values = {key: data[key] for key in keys}
    if "event" in values:
        values["event"] = from_json(values["event"])
    if "events" in values:
        values["events"] = [from_json(e) for e in values["events"]]
    return cls(**values)


def compose(events: Iterable[DpEvent]) -> DpEvent:
    """One event that stands for all of them; equal events are counted, so their order cannot matter.

    Nothing, or only no-ops, gives `NoOpDpEvent`.

    >>> from dp_accounting import GaussianDpEvent as G, NoOpDpEvent
    >>> compose([G(2.0), G(1.0), NoOpDpEvent(), G(2.0)]) == compose([G(2.0), G(2.0), G(1.0)])
    True
    """
    import dp_accounting as dp

    counted: Counter[str] = Counter()
    for event, run in groupby(events):  # a long run of equal steps is the usual case
        counted[json.dumps(to_json(event))] += sum(1 for _ in run)
    del counted[json.dumps(to_json(dp.NoOpDpEvent()))]
    parts: list[DpEvent] = [dp.SelfComposedDpEvent(from_json(json.loads(t)), n) for t, n in sorted(counted.items())]
    if not parts:
        return dp.NoOpDpEvent()
    return parts[0] if len(parts) == 1 else dp.ComposedDpEvent(parts)


class Mechanism(NamedTuple):
    """A Gaussian sum over a sample: what an accountant prices.

    sampling: "none" (everyone), "poisson" or "without_replacement".  probability: that a given example is in the
    sample, in (0, 1]; 1 exactly when sampling is "none".  noise_multiplier: std / C, >= 0.  population, sample: N and B
    of a sample without replacement, else 0.
    """

    sampling: str
    probability: float
    noise_multiplier: float
    population: int = 0
    sample: int = 0


def mechanisms(event: DpEvent) -> Counter[Mechanism]:
    """How often each mechanism ran, with what costs nothing left out and sampling everyone written as no sampling.

    Raises ValueError for an unknown event, a sampled event that is no Gaussian, or a parameter out of range.

    >>> from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
    >>> mechanisms(SelfComposedDpEvent(PoissonSampledDpEvent(1.0, GaussianDpEvent(2.0)), 5)) == {Mechanism("none", 1.0, 2.0): 5}
    True
    """
    found: Counter[Mechanism] = Counter()
    _collect(event, 1, found)
    return found


def _collect(event: Any, times: int, found: Counter[Mechanism]) -> None:
    name = _type_of(event)
    if name == "self_composed":
        count("count", event.count, low=0, why="It is how often the mechanism ran.")
        _collect(event.event, times * event.count, found)
    elif name == "composed":
        for part in event.events:
            _collect(part, times, found)
    elif name != "no_op":
        mechanism = _mechanism(name, event)
        if times and mechanism.probability > 0:
            found[mechanism] += times


def _mechanism(name: str, event: Any) -> Mechanism:
    sampling, probability, gaussian = "none", 1.0, event
    population, sample = 0, 0
    if name == "poisson_sampled":
        q = event.sampling_probability
        interval("sampling_probability", q, 0, 1, why="It is the probability q = B/N of being in the batch.")
        sampling, probability, gaussian = "poisson", float(q), event.event
    elif name == "sampled_without_replacement":
        count("source_dataset_size", event.source_dataset_size, why="It is N, the size of the data set.")
        count("sample_size", event.sample_size, low=0, why="It is B, the number of examples drawn.")
        population, sample = event.source_dataset_size, event.sample_size
        probability = sample / population
        interval("sample_size / source_dataset_size", probability, 0, 1, why="B examples are drawn from N.")
        sampling, gaussian = "without_replacement", event.event
    if _type_of(gaussian) != "gaussian":
        raise ValueError(
            f"event={event!r}: a sampled event must hold one gaussian event. No other mechanism on a sample is "
            "priced here. Charge each Gaussian release with its own sampling."
        )
    sigma = gaussian.noise_multiplier
    interval("noise_multiplier", sigma, 0, math.inf, open_high=True, why="It is sigma = std / C; 0 is no privacy.")
    if probability == 1:
        return Mechanism("none", 1.0, float(sigma))
    return Mechanism(sampling, probability, float(sigma), population, sample)
