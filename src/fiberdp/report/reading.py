"""The folders that a report is made of, read and checked before anything is drawn.

a run directory              record.json, metrics.jsonl
what `compare` wrote         comparison.json, and its runs
what `sweep` wrote           sweep.json
what `ablate` wrote          ablation.json
a folder of such folders     all of them, to any depth; what is secret (resume/) is not looked into
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from fiberdp._version import __version__
from fiberdp.record import differences, lines_until

Json = dict[str, Any]
NUMBER, MAYBE = (int, float), (int, float, type(None))
KEYS: Json = {
    "recipe": str, "method": str, "keys": str, "config": {"plan": {"method": dict}}, "versions": {"fiberdp": str},
    "privacy": {
        "epsilon": NUMBER, "delta": NUMBER, "relation": str, "accountant": str, "noise_multiplier": NUMBER, "sampling": str,
        "batch_size": NUMBER, "num_examples": NUMBER, "steps": int,
    },
    "receipt": {"std_ratio": NUMBER, "standard_error": NUMBER, "lag1_correlation": NUMBER, "passed": bool},
    "result": {"metric": str, "heldout": MAYBE, "test": MAYBE},
    "timing": {"seconds": MAYBE, "examples_per_second": MAYBE, "peak_mib": MAYBE},
}  # fmt: skip
"""What DESIGN promises of a record; the rest is shown if it is there."""
NEEDED: dict[str, Json] = {
    "comparison.json": {"rows": list, "differences": list, "settings": {"recipe": str}},
    "sweep.json": {"recipe": str, "method": str, "epsilon": NUMBER, "trials": list, "best": {"options": dict}},
    "ablation.json": {"recipe": str, "name": str, "axes": list, "cells": list},
}
ROWS: dict[str, tuple[str, Json]] = {
    "comparison.json": ("rows", {"method": str, "epsilon": NUMBER, "n": int, "mean": NUMBER, "std": MAYBE}),
    "sweep.json": ("trials", {"options": dict, "heldout": NUMBER}),
    "ablation.json": ("cells", {"n": int, "mean": NUMBER}),
}
PARTS = {"augmentation": "none", "scaling": "none", "averaging": "none", "mechanism": "gaussian"}
"""Parts of a method that the first records did not name, and what they were."""


@dataclass(frozen=True)
class Run:
    """name: of its folder, as it was given.  metrics: lines of metrics.jsonl.  ablated: one of an ablation's, whose table tells of it."""

    name: str
    record: Json
    metrics: list[Json]
    ablated: bool = False

    @property
    def epsilon(self) -> float:
        return self.record["privacy"]["epsilon"]

    @cached_property
    def plan(self) -> Json:
        """The plan with every part of the method named, and without the noise multiplier, which follows from the rest."""
        plan = self.record["config"]["plan"]
        method = {part: {"type": kind} for part, kind in PARTS.items()} | plan["method"]
        return {key: value for key, value in plan.items() if key != "noise_multiplier"} | {"method": method}


@dataclass(frozen=True)
class Group:
    """Runs that differ in nothing but their keys."""

    recipe: str
    method: str
    epsilon: float
    label: str
    runs: tuple[Run, ...]

    @property
    def metric(self) -> str:
        return self.runs[0].record["result"]["metric"]

    def results(self, rows: str) -> list[float]:
        """`rows` "test" or "heldout": of the runs that have it."""
        return [found for run in self.runs if (found := run.record["result"][rows]) is not None]


@dataclass(frozen=True)
class Found:
    """All that was read.  comparisons, sweeps, ablations: (name of the folder, JSON)."""

    runs: tuple[Run, ...] = ()
    comparisons: tuple[tuple[str, Json], ...] = ()
    sweeps: tuple[tuple[str, Json], ...] = ()
    ablations: tuple[tuple[str, Json], ...] = ()
    unfinished: tuple[str, ...] = ()

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        """Sorted by recipe and epsilon, in the order of the runs; a label says in what a group differs from the first of its name.

        Runs of ablations are left to the ablations' own sections, unless there are no others.
        """
        kept: dict[tuple[str, float, str, str], list[Run]] = {}
        for run in [run for run in self.runs if not run.ablated] or self.runs:
            key = (run.record["recipe"], float(f"{run.epsilon:.3g}"), run.record["method"], json.dumps(run.plan, sort_keys=True))
            kept.setdefault(key, []).append(run)
        first: dict[tuple[str, float, str], Run] = {}
        groups = []
        for (recipe, epsilon, method, _), runs in kept.items():
            base = first.setdefault((recipe, epsilon, method), runs[0])
            changed = [f"{where.rpartition('.')[2]} {new}" for where, _, new in differences(base.plan, runs[0].plan)]
            label = f"{method} ({', '.join(changed[:3])}{', …' if len(changed) > 3 else ''})" if changed else method
            groups.append(Group(recipe, method, epsilon, label, tuple(runs)))
        return tuple(sorted(groups, key=lambda group: (group.recipe, group.epsilon)))

    @property
    def recipes(self) -> list[str]:
        return sorted({group.recipe for group in self.groups})


@dataclass
class _Reading:
    runs: dict[Path, Run] = field(default_factory=dict)
    others: dict[Path, Json] = field(default_factory=dict)
    unfinished: list[str] = field(default_factory=list)


def read(folders: Sequence[str | Path]) -> Found:
    """Everything in the folders, each run once however often it is named.

    Raises ValueError, in one line, for a folder that is not there or holds nothing to report, for an unfinished run that was named
    itself, and for a record of another version or without what a record has.
    """
    if not folders:
        raise ValueError("report of nothing: at least one run directory must be named, because a report is about runs. Give RUN.")
    reading = _Reading()
    for given in folders:
        folder = Path(given)
        if not folder.is_dir():
            raise ValueError(
                f"RUN {folder} is {'a file' if folder.exists() else 'not there'}: it must be a run directory, what compare or sweep wrote "
                "with --out, or a folder of such folders. Give the folder that record.json is in."
            )
        if _unfinished(folder):
            raise ValueError(
                f"RUN {folder} holds an unfinished run: a report needs record.json, which is written at the end. Continue the run with "
                "--resume, or wait for its end."
            )
        before = len(reading.runs) + len(reading.others)
        _walk(folder, folder.name or str(folder), reading)
        if len(reading.runs) + len(reading.others) == before and not _named_twice(folder, reading):
            raise ValueError(
                f"RUN {folder} holds no finished run, comparison, sweep or ablation: a report is made of those. Give the --out of "
                "fiberdp train, compare, sweep or ablate."
            )
    kept = {name: tuple((p.parent.name, found) for p, found in reading.others.items() if p.name == name) for name in NEEDED}
    return Found(
        tuple(reading.runs.values()), kept["comparison.json"], kept["sweep.json"], kept["ablation.json"], tuple(reading.unfinished)
    )


def _walk(folder: Path, name: str, reading: _Reading, ablated: bool = False) -> None:
    here = folder.resolve()
    if (folder / "record.json").exists():
        reading.runs.setdefault(here, replace(_run(folder, name), ablated=ablated))
        return
    if _unfinished(folder):
        reading.unfinished.append(name)
        return
    for other in NEEDED:
        if (path := folder / other).exists():
            reading.others.setdefault(here / other, _other(path))
    ablated = ablated or (folder / "ablation.json").exists()
    for inner in _folders(folder):
        _walk(inner, inner.name if inner.parent.name == "runs" else f"{name}/{inner.name}", reading, ablated)


def _folders(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        if path.is_dir() and not path.is_symlink() and not path.name.startswith(".") and path.name not in ("resume", "release"):
            yield path


def _unfinished(folder: Path) -> bool:
    begun = (folder / "ledger.jsonl").exists() or (folder / "resume").is_dir()
    return begun and not (folder / "record.json").exists()


def _named_twice(folder: Path, reading: _Reading) -> bool:
    here = folder.resolve()
    return any(path == here or here in path.parents for path in (*reading.runs, *reading.others))


def _run(folder: Path, name: str) -> Run:
    path = folder / "record.json"
    record = _json(path)
    _check_version(path, record)
    _check(path, record, KEYS)
    metrics = [json.loads(line) for line in lines_until(folder / "metrics.jsonl", 2**62)]
    return Run(name, record, metrics)


def _other(path: Path) -> Json:
    found = _json(path)
    _check_version(path, found)
    _check(path, found, NEEDED[path.name])
    where, keys = ROWS[path.name]
    for row in found[where]:
        _check(path, row, keys, f"{where}.")
    return found


def _json(path: Path) -> Json:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ValueError(f"{path} is not a JSON object: fiberdp writes one there, and a report is made of it. Restore the file.")
    return found


def _check_version(path: Path, found: Json) -> None:
    """Another major version may mean something else by the same key."""
    versions = found.get("versions")
    version = versions.get("fiberdp") if isinstance(versions, dict) else None
    ours = __version__.split(".")[0]
    if isinstance(version, str) and version.split(".")[0] != ours:
        raise ValueError(
            f"{path} is of fiberdp {version[:40]}: this is {__version__}, which reads records of version {ours}, because another may mean "
            "something else by the same words. Make the report with the version that made the run."
        )


def _check(path: Path, found: Any, keys: Json, where: str = "") -> None:
    for key, kind in keys.items():
        value = found.get(key, ...) if isinstance(found, dict) else ...
        right = isinstance(value, dict if isinstance(kind, dict) else kind) and not (isinstance(value, bool) and kind is not bool)
        if not right or (isinstance(value, float) and not math.isfinite(value)):
            raise ValueError(
                f"{path}: {where}{key} is {'missing' if value is ... else 'not what it must be'}: a record of this version has it, and the "
                "report states it. Make the report with the version that made the run, or restore the file."
            )
        if isinstance(kind, dict):
            _check(path, value, kind, f"{where}{key}.")
