"""Every method as a value: observation x mechanism x filter x calibration x update (METHODS.md section 4).

| method          | observation           | filter           | update | calibration |
|-----------------|-----------------------|------------------|--------|-------------|
| dp-sgd          | one-point             | identity         | SGD    | none        |
| dp-adamw        | one-point             | identity         | AdamW  | none        |
| dp-adambc       | one-point             | identity         | AdamW  | raw         |
| doppler         | one-point             | low-pass         | AdamW  | none        |
| disk            | two-point (0.7, 0.5)  | ema 0.7          | AdamW  | none        |
| disk-corr       | two-point (0.7, 0.5)  | ema 0.7          | AdamW  | steady      |
| fiber           | two-point (0.6, 0.7)  | innovation 0.9   | AdamW  | steady      |
| fiber-nocorr    | two-point (0.6, 0.7)  | innovation 0.9   | AdamW  | none        |
| fiber-bccorr    | two-point (0.6, 0.7)  | innovation 0.9   | AdamW  | raw         |
| fiber-tied      | two-point (0.6, 0.7)  | innovation 0.6   | AdamW  | none        |
| fiber-lookahead | look-ahead (0.6)      | innovation 0.9   | AdamW  | exact       |
| fiber-plus      | look-ahead (0.4)      | innovation 0.9   | AdamW  | exact, auto |
| mf-dp-ftrl      | one-point             | identity         | SGD    | none        |

The noise is white, but mf-dp-ftrl's: BandMF with 8 bands.  fiber-plus is the best composition of a search on held-out rows
(results/README.md); its floor is 10 standard deviations of the noise in v^.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from fiberdp import _validate
from fiberdp.augmentation import AUGMENTATIONS, NoAugmentation
from fiberdp.filters import EMA, FILTERS, Identity, Innovation, LowPass
from fiberdp.mechanisms import MECHANISMS, Banded, White
from fiberdp.moments import CALIBRATIONS, Exact, NoCorrection, Raw, Steady
from fiberdp.observation import OBSERVATIONS, OnePoint, TwoPoint
from fiberdp.optim import AVERAGINGS, SCHEDULES, SGD, UPDATES, AdamW, NoAveraging, WarmupCosine
from fiberdp.scaling import SCALINGS, NoScaling

PARTS = {
    "augmentation": AUGMENTATIONS,
    "observation": OBSERVATIONS,
    "scaling": SCALINGS,
    "mechanism": MECHANISMS,
    "filter": FILTERS,
    "calibration": CALIBRATIONS,
    "update": UPDATES,
    "schedule": SCHEDULES,
    "averaging": AVERAGINGS,
}


@dataclass(frozen=True, kw_only=True)
class Method:
    """A composition.  Any observation, filter, calibration and update go together, but SGD has nothing to calibrate."""

    name: str = "custom"
    augmentation: Any = NoAugmentation()
    observation: Any = OnePoint()
    scaling: Any = NoScaling()
    mechanism: Any = White()
    filter: Any = Identity()
    calibration: Any = NoCorrection()
    update: Any
    schedule: Any = WarmupCosine()
    averaging: Any = NoAveraging()

    def __post_init__(self) -> None:
        for part, known in PARTS.items():
            value = getattr(self, part)
            if isinstance(value, (str, type)) or getattr(value, "name", None) is None:
                raise ValueError(
                    f"{part}={value!r}: must be a value such as {next(iter(known.values())).__name__}(…), not a name or a class."
                )
        if isinstance(self.update, SGD) and not isinstance(self.calibration, NoCorrection):
            raise ValueError(
                f"calibration={self.calibration.name!r} with update='sgd': SGD takes calibration 'none', because it has no second moment "
                "to correct. Use AdamW."
            )

    def to_json(self) -> dict[str, Any]:
        """A dict that `from_json` turns back into an equal method."""
        return {"name": self.name} | {part: _encode(getattr(self, part)) for part in PARTS}

    @classmethod
    def from_json(cls, config: dict[str, Any]) -> Method:
        """Raises ValueError for an unknown part or field: nothing is guessed and nothing is ignored."""
        _refuse_unknown("method", config, ["name", *PARTS])
        missing = [part for part in ("name", *PARTS) if part not in config]
        if missing:
            raise ValueError(f"method without {', '.join(missing)}: it must name every part, because nothing is guessed. Add it.")
        return cls(name=config["name"], **{part: _decode(part, config[part]) for part in PARTS})


def _encode(value: Any) -> dict[str, Any]:
    return {"type": value.name} | {f.name: getattr(value, f.name) for f in fields(value)}


def _decode(part: str, config: Any) -> Any:
    if not isinstance(config, dict) or "type" not in config:
        raise ValueError(f"{part}={config!r}: must be an object with a type, one of {', '.join(PARTS[part])}, because nothing is guessed.")
    cls = PARTS[part][_validate.choice(f"{part}.type", config["type"], tuple(PARTS[part]))]
    given = {key: value for key, value in config.items() if key != "type"}
    _refuse_unknown(f"{part} {config['type']}", given, [f.name for f in fields(cls)])
    return cls(**given)


def _refuse_unknown(what: str, given: dict[str, Any], known: list[str]) -> None:
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise ValueError(
            f"{what} has no option {', '.join(unknown)}: it has {', '.join(known)}. An ignored option would mislead; remove it."
        )


# options of parts that no method of the table has: what to do instead
_PART_OF = {"multiplicity": "augmentation=CropFlip(multiplicity=…)", "decay": "averaging=EMAWeights(decay=…)"}

_FIBER = Method(name="fiber", observation=TwoPoint(), filter=Innovation(), calibration=Steady(), update=AdamW(lr=1e-3))
_DISK = Method(
    name="disk", observation=TwoPoint(kappa=0.7, gamma=0.5), filter=EMA(kappa=0.7), calibration=NoCorrection(), update=AdamW(lr=1e-3)
)

METHODS: dict[str, Method] = {
    m.name: m
    for m in (
        Method(name="dp-sgd", update=SGD(lr=0.1)),
        Method(name="dp-adamw", update=AdamW(lr=1e-3)),
        Method(name="dp-adambc", calibration=Raw(), update=AdamW(lr=1e-3)),
        Method(name="doppler", filter=LowPass(), update=AdamW(lr=1e-3)),
        _DISK,
        replace(_DISK, name="disk-corr", calibration=Steady()),
        _FIBER,
        replace(_FIBER, name="fiber-nocorr", calibration=NoCorrection()),
        replace(_FIBER, name="fiber-bccorr", calibration=Raw()),
        replace(_FIBER, name="fiber-tied", filter=Innovation(omega=0.6), calibration=NoCorrection()),
        replace(_FIBER, name="fiber-lookahead", observation=TwoPoint.look_ahead(kappa=0.6), calibration=Exact()),
        replace(
            _FIBER,
            name="fiber-plus",
            observation=TwoPoint.look_ahead(kappa=0.4),
            calibration=Exact(eps_v="auto", eps_v_scale=10.0),
            update=AdamW(lr=0.02),
        ),
        Method(name="mf-dp-ftrl", mechanism=Banded(strategy="bandmf", bands=8), update=SGD(lr=0.1)),
    )
}


def method(name: str, **options: Any) -> Method:
    """A method of the table, with options changed by their field's name: lr, momentum, betas, kappa, gamma, omega, eps_v, ….

    An option goes to every part that has a field of that name, except that `kappa` and `gamma` belong to the two-point
    observation (Remark 4.2: FiBeR decouples them from the filter); DiSK's filter shares kappa with it, by definition.
    Raises ValueError for an unknown method, an option that no part of it has, or a value out of range.

    >>> method("fiber", omega=0.5).filter
    Innovation(omega=0.5)
    """
    base = METHODS[_validate.choice("method", name, tuple(METHODS))]
    changes: dict[str, Any] = {}
    used: set[str] = set()
    for part in PARTS:
        value = getattr(base, part)
        own = {key: options[key] for key in options if key in {f.name for f in fields(value)}}
        if part == "observation" and getattr(value, "a", None) == 1:  # one evaluation, by definition of the method
            if own.keys() - {"kappa"}:
                raise ValueError(
                    f"method {name} has no option gamma: it is (1-kappa)/kappa, which makes one evaluation enough. "
                    "Give kappa alone, or use method fiber."
                )
            if own:
                changes[part] = TwoPoint.look_ahead(**own)
        elif own:
            if own.get("eps_v", "auto") != "auto" and "eps_v_scale" not in own:
                own["eps_v_scale"] = 1.0  # it belongs to the automatic floor, which is given up
            changes[part] = replace(value, **own)
        used |= own.keys()
    unknown = sorted(set(options) - used)
    if unknown:
        known = sorted({f.name for part in PARTS for f in fields(getattr(base, part))})
        part = next((_PART_OF[option] for option in unknown if option in _PART_OF), None)
        if part:
            raise ValueError(
                f"method {name} has no option {', '.join(unknown)}: its {part.partition('=')[0]} is none, which has nothing to set. "
                f"Give it one: dataclasses.replace(method, {part})."
            )
        raise ValueError(
            f"method {name} has no option {', '.join(unknown)}: it has {', '.join(known)}. An option that nothing reads "
            "would mislead; remove it, "
            "or choose a method that has it."
        )
    return replace(base, **changes)
