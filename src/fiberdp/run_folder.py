"""Many runs of one recipe in one folder, begun once and taken up again: what `fiberdp compare` and `fiberdp ablate` share.

OUT/settings.json     what all runs have in common; a later call must repeat it
OUT/runs/NAME/        a run directory each: one that was interrupted is resumed, one that is there is read
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fiberdp._disk import make_folder, write_atomically
from fiberdp.experiment import extended_method
from fiberdp.methods import Method
from fiberdp.recipes import recipe_named
from fiberdp.record import differences, to_text
from fiberdp.workers import Observer, records


@dataclass(frozen=True)
class Task:
    """One run.  method: all that it is trained with.  rest: further arguments of `fiberdp.fit`, of this run alone."""

    name: str
    method: Method
    epsilon: float
    seed: int
    rest: dict[str, Any]


def trained(
    tasks: Sequence[Task], *, recipe: Any, folder: Path | None, settings: dict[str, Any], workers: int | None, observer: Observer
) -> dict[str, dict[str, Any]]:
    """name -> record of every task, in their order; what lies finished in the folder is not trained again.

    settings: of `fiberdp.fit`, the same for all.  Raises ValueError if a finished run of that name was trained by another method.
    """
    found = {task.name: record for task in tasks if (record := _finished(folder, task, recipe, settings))}
    jobs = [(task.name, _job(recipe, task, folder, settings)) for task in tasks if task.name not in found]
    observer.planned(len(found), len(tasks))
    if jobs:
        at_a_time = min(os.cpu_count() or 1, len(jobs)) if workers is None else workers
        for name, record in records(jobs, workers=at_a_time, observer=observer):
            found[name] = record
    failed = [name for name, record in found.items() if not record["receipt"]["passed"]]
    assert not failed, failed  # a run whose receipt fails does not start
    return {task.name: found[task.name] for task in tasks}


def begin(folder: Path, settings: dict[str, Any]) -> None:
    """Take a new folder, or one that was begun with the same settings.  ValueError otherwise."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--out {folder} is a file: it must be a folder for the runs. Choose another name.")
    path, now = folder / "settings.json", json.loads(to_text(settings))
    if path.exists():
        for name, before, given in differences(json.loads(path.read_text()), now):
            raise ValueError(
                f"{name}={given}: --out {folder} was begun with {before}, and runs of one comparison must not differ in it. Repeat the "
                "options of the first call, or choose another --out."
            )
    elif folder.exists() and any(folder.iterdir()):
        raise ValueError(
            f"--out {folder} is not empty: it must be new, or hold a comparison, because nothing is overwritten. Choose another."
        )
    else:
        make_folder(folder)
        write_atomically(path, to_text(now))


def _finished(folder: Path | None, task: Task, recipe: Any, settings: dict[str, Any]) -> dict[str, Any] | None:
    path = None if folder is None else folder / "runs" / task.name / "record.json"
    if path is None or not path.exists():
        return None
    record = json.loads(path.read_text())
    asked = extended_method(recipe_named(recipe), task.method, **settings | task.rest)
    if record["config"]["plan"]["method"] != json.loads(json.dumps(asked.to_json())):
        raise ValueError(
            f"{path.parent} was trained with other options of {task.method.name} than are asked for now: a row holds runs of one method. "
            "Choose another --out, or remove that run."
        )
    return record


def _job(recipe: Any, task: Task, folder: Path | None, settings: dict[str, Any]) -> dict[str, Any]:
    where = None if folder is None else folder / "runs" / task.name
    begun = where is not None and (where / "resume" / "checkpoint.safetensors").exists()
    given = {"method": task.method, "epsilon": task.epsilon, "seed": task.seed, **task.rest}
    return {"recipe": recipe, "out": where, "resume": begun, **given, **settings}
