"""The command lines that make a run, a comparison or a sweep again."""

from __future__ import annotations

import json
import shlex
from dataclasses import fields
from typing import Any

from fiberdp.methods import METHODS, method
from fiberdp.recipes import RECIPES, Recipe
from fiberdp.report.reading import Json, Run

OPTIONS = ("lr", "omega", "kappa", "gamma", "eps_v", "eps_v_scale", "bands", "allow_extrapolation")
"""What `fiberdp train` takes of a method; the rest of it is the recipe's."""


def command(run: Run) -> tuple[str, bool]:
    """(`fiberdp train …`, whether it gives exactly this method).  A secret key cannot be repeated: results scatter."""
    record, plan = run.record, run.record["config"]["plan"]
    chosen = RECIPES[record["recipe"]]() if record["recipe"] in RECIPES else None
    given, exact = _method(chosen, run.plan["method"])
    wanted: dict[str, Any] = {
        "epsilon": f"{run.epsilon:.6g}", "delta": repr(plan.get("delta", record["privacy"]["delta"])), "steps": record["privacy"]["steps"],
        "batch-size": record["privacy"]["batch_size"], "clip-norm": plan.get("clip", {}).get("clip_norm"),
        "clip": _unless(plan.get("clip", {}).get("type"), "flat"), "sampling": _unless(plan.get("sampling"), "poisson"),
        "groups": plan.get("groups"), "accountant": _unless(plan.get("accountant"), "pld"), "seed": record.get("seed"),
        "device": _unless(record["config"].get("device"), "cpu"), "engine": _unless(record["config"].get("engine"), "ghost"),
        "precision": _unless(record["config"].get("precision"), "float32"), **given,
    }  # fmt: skip
    if chosen is None or chosen.data != "scikit-learn":
        wanted["data"] = "DIR"
    return _line(["train", record["recipe"], "--method", record["method"]], wanted | {"out": "OUT"}), exact


def compared(result: Json) -> str:
    rows = result["rows"]
    wanted: dict[str, Any] = {
        "methods": ",".join(dict.fromkeys(row["method"] for row in rows)),
        "epsilons": ",".join(dict.fromkeys(f"{row['epsilon']:g}" for row in rows)),
        "seeds": max((row["n"] for row in rows), default=1),
    }
    settings = {name.replace("_", "-"): value for name, value in result["settings"].items() if name != "recipe"}
    return _line(["compare", result["settings"]["recipe"]], wanted | _placed(settings) | {"out": "OUT"})


def swept(result: Json) -> str:
    own = ("recipe", "method", "epsilon", "seed", "study", "budget", "best", "trials", "note", "versions")
    wanted: dict[str, Any] = {
        "method": result["method"],
        "epsilon": f"{result['epsilon']:g}",
        "trials": result.get("budget", len(result["trials"])),
    }
    settings = {name.replace("_", "-"): value for name, value in result.items() if name not in own}
    return _line(["sweep", result["recipe"]], wanted | {"seed": result.get("seed")} | _placed(settings) | {"out": "OUT"})


def ablated(result: Json) -> str:
    return _line(["ablate", result["recipe"], result["name"]], {"epsilon": result.get("epsilon"), "out": "OUT"})


def _placed(settings: Json) -> Json:
    """Without a place on the machine that the runs were made on."""
    return {name: "DIR" if name == "data" else value for name, value in settings.items()}


def _line(words: list[str], wanted: dict[str, Any]) -> str:
    for name, value in wanted.items():
        if isinstance(value, bool):
            words = [*words, f"--{name}"] if value else words
        elif value is not None:
            words = [*words, f"--{name}", str(value)]
    return shlex.join(["fiberdp", *words])


def _unless(value: Any, default: str) -> Any:
    return None if value == default else value


def _method(chosen: Recipe | None, config: Json) -> tuple[Json, bool]:
    """Options in which the method differs from the recipe's, and whether those make it this one."""
    name = config["name"]
    if chosen is None or name not in METHODS:
        return {}, False
    tuned = method(name, **chosen.options.get(name, {}))
    have: Json = json.loads(json.dumps(tuned.to_json()))
    given: Json = {}
    for part in ("observation", "filter", "calibration", "update", "mechanism"):
        base, now = have.get(part, {}), config.get(part, {})
        given |= {key: now[key] for key in OPTIONS if key in now and now[key] != base.get(key)}
    if getattr(tuned.observation, "a", None) == 1:
        given.pop("gamma", None)  # it follows from kappa
    try:
        made = json.loads(json.dumps(method(name, **{**chosen.options.get(name, {}), **given}).to_json()))
    except (ValueError, TypeError):
        return {}, False
    options = {key.replace("_", "-"): value for key, value in given.items()}
    copies, average, scaling = config.get("augmentation", {}), config.get("averaging", {}), config.get("scaling", {})
    if copies.get("type") != "none":
        options["multiplicity"] = copies.get("multiplicity")
        made["augmentation"] = _read(chosen.augmentation, copies)
    if average.get("type") == "ema":
        options["averaging"] = average.get("decay")
        made["averaging"] = average
    if scaling.get("type") != "none":
        options["scaling"] = scaling.get("offset")
        made["scaling"] = scaling
    if config.get("mechanism", {}).get("type") == "gaussian-on-grid":
        options["exact-noise"] = True
        made["mechanism"] = config["mechanism"]
    return options, all(made.get(part) == value or _defaulted(made.get(part), value) for part, value in config.items())


def _read(augmentation: Any, copies: Json) -> Json:
    if augmentation is None:
        return {}
    return (
        {"type": augmentation.name}
        | {f.name: getattr(augmentation, f.name) for f in fields(augmentation)}
        | {"multiplicity": copies.get("multiplicity")}
    )


def _defaulted(made: Any, recorded: Any) -> bool:
    """A record of an earlier version may leave out fields that were added since."""
    return isinstance(made, dict) and isinstance(recorded, dict) and recorded.items() <= made.items()
