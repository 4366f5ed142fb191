"""A run survives what happens to disks and folders: a second process, a full or read-only disk, a damaged checkpoint, a power cut.

A tiny run is broken at every call it makes to the operating system; each time it is continued and compared with the unbroken one.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

import fiberdp
from fiberdp import experiment
from fiberdp.cli import main
from fiberdp.recipes.recipe import Recipe, classification_loss

PATHS = [str(Path(fiberdp.__file__).parents[1]), str(Path(__file__).parent)]
ENV = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(PATHS)}
CLI = [
    sys.executable,
    "-c",
    "import sys, test_crash as t; t.experiment.recipe_named = lambda name: t.RECIPE; sys.exit(t.main(sys.argv[1:]))",
    "train",
    "tiny",
]
"""The command line as a process of its own, which knows the recipe `tiny`."""


def rows(n: int, seed: int) -> dict[str, torch.Tensor]:
    image = torch.randn(n, 4, generator=torch.Generator().manual_seed(seed))
    return {"image": image, "label": (image[:, 0] > 0).long()}


DATA = {"train": rows(40, 1), "heldout": rows(10, 2), "test": rows(10, 3)}
RECIPE = Recipe(
    name="tiny", task="", model="", data="", paper="", cpu_minutes=0, epsilon=3.0, clip_norm=1.0, batch_size=20, epochs=2,
    options={"fiber": {"lr": 0.02}, "mf-dp-ftrl": {"bands": 2}}, load=lambda data: DATA, loss=classification_loss,
    build=lambda: nn.Linear(4, 2),
)  # fmt: skip


@pytest.fixture(autouse=True)
def _prove_the_noise_once(monkeypatch):
    """The receipt takes most of the time of a tiny run, touches no disk, and is the same each time."""
    real, known = fiberdp.Run.prove, {}

    def prove(run):
        name = run.plan.method.name
        run.receipt = known.get(name)
        known[name] = real(run)
        return known[name]

    monkeypatch.setattr(fiberdp.Run, "prove", prove)


@pytest.fixture
def tiny(monkeypatch):
    """The command line knows the recipe `tiny`."""
    monkeypatch.setattr(experiment, "recipe_named", lambda name: RECIPE)


def fit(out: Path, **options):
    return fiberdp.fit(RECIPE, **{"seed": 7, "out": out} | options)


class Reporter:
    """Counts the steps that were released, and does `then` after step `at`."""

    def __init__(self, at: int = -1, then=lambda: None):
        self.at, self.then, self.released = at, then, 0

    def proved(self, plan, receipt): ...
    def evaluated(self, line, steps): ...
    def stepped(self, step, steps):
        self.released = step
        if step == self.at:
            self.then()


class Crash(Exception):
    pass


def crash() -> None:
    raise Crash


def files(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def finished(out: Path) -> dict[str, bytes]:
    """What a finished run leaves that two runs of one seed have in common; and nothing is left over."""
    found = files(out)
    assert set(found) == {
        "ledger.jsonl", "metrics.jsonl", "record.json", "release/config.json", "release/ledger_summary.json", "release/model.safetensors",
        "resume/checkpoint.safetensors", "resume/lock",
    }  # fmt: skip
    record = json.loads(found.pop("record.json"))
    found.pop("resume/checkpoint.safetensors")  # holds the time it took
    return found | {"record": json.dumps([record["privacy"], record["result"], record["receipt"]]).encode()}


def continued(out: Path, **options) -> None:
    """As the user would go on: resume if there is a checkpoint, start again if the run never began, nothing if it had ended."""
    if not (out / "record.json").exists():
        fit(out, resume=(out / "resume" / "checkpoint.safetensors").exists(), **options)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    out = tmp_path_factory.mktemp("whole") / "run"
    fit(out)
    return finished(out)


def refused(match: str, kind: type[Exception] = ValueError, **options) -> None:
    with pytest.raises(kind, match=match) as error:
        fit(**options)
    assert "\n" not in str(error.value)


def command(capsys, *arguments: str) -> tuple[int, str]:
    """Exit code and stderr of `fiberdp train tiny`; the last line is the error, if there is one."""
    code = main(["train", "tiny", "--seed", "7", "--json", *arguments])
    return code, capsys.readouterr().err


# ---- two processes on one run directory ----


def test_a_second_run_in_a_folder_is_one_line_exit_code_2_and_changes_nothing(tmp_path, capsys, tiny, whole):
    """Whether it starts or resumes, from another thread; the first goes on to the bit-identical end."""
    out, codes = tmp_path / "run", []

    def second() -> None:
        before = files(out)
        for more in ([], ["--resume"]):
            line = ["train", "tiny", "--seed", "7", "--out", str(out), *more]
            thread = threading.Thread(target=lambda line=line: codes.append(main(line)))
            thread.start()
            thread.join()
        assert files(out) == before

    fit(out, reporter=Reporter(3, second))
    assert codes == [2, 2]
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2
    assert "is not empty" in said[0]
    assert "belongs to a run that is still going on" in said[1]
    assert finished(out) == whole


def test_a_second_start_before_the_first_checkpoint_is_refused(tmp_path, whole, monkeypatch):
    """Between the first run's folder and its checkpoint the folder still looks unused: the lock tells, and the keys stay the first's."""
    out, real, seen = tmp_path / "run", fiberdp.run_directory.RunDirectory._checkpoint, []

    def checkpoint(self) -> None:
        if not seen:
            seen.append(files(out))
            refused("still going on", out=out, seed=8)
            refused("does not exist", out=out, resume=True)
            seen.append(files(out))
        real(self)

    monkeypatch.setattr(fiberdp.run_directory.RunDirectory, "_checkpoint", checkpoint)
    fit(out)
    assert seen == [{"resume/lock": b""}] * 2
    assert finished(out) == whole


def test_a_start_that_waited_while_another_ran_through_is_refused(tmp_path, whole, monkeypatch):
    """The folder was unused when the second looked, and is another run's when it begins."""
    out, real, first = tmp_path / "run", fiberdp.Run.prove, []

    def prove(run):
        if not first:
            first.append(run)
            fit(out)
        return real(run)

    monkeypatch.setattr(fiberdp.Run, "prove", prove)
    refused("is not empty", out=out, seed=8)
    assert finished(out) == whole


def test_a_killed_process_leaves_no_lock(tmp_path, whole):
    """The lock is another process's, which is killed: the resume that was refused goes through."""
    out = tmp_path / "run"
    with pytest.raises(Crash):
        fit(out, reporter=Reporter(3, crash))
    holder = (
        "import os, sys, time; from fiberdp._disk import lock; print(lock(os.open(sys.argv[1], os.O_RDWR)), flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", holder, str(out / "resume" / "lock")], stdout=subprocess.PIPE, text=True, env=ENV)
    try:
        assert process.stdout
        assert process.stdout.readline() == "True\n"
        refused("still going on", out=out, resume=True)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    fit(out, resume=True)
    assert finished(out) == whole


def test_two_processes_that_start_at_once_are_one_run(tmp_path):
    """Real processes of the command line: one run, whole, and one line with exit code 2."""
    line = [*CLI, "--accountant", "rdp", "--json", "--out", str(tmp_path / "run")]
    both = [subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENV) for _ in range(2)]
    said = [process.communicate(timeout=120) for process in both]
    won, lost = sorted(zip([process.returncode for process in both], said))
    assert won[0] == 0, won
    assert (tmp_path / "run" / "record.json").read_text().strip() == won[1][0].strip()
    assert (lost[0], lost[1][0], lost[1][1].count("\n")) == (2, "", 1)
    assert lost[1][1].startswith("fiberdp: --out ")


def test_where_there_are_no_locks_runs_go_without(tmp_path, whole, monkeypatch):
    from fiberdp import _disk

    def flock(descriptor, how):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(_disk.fcntl, "flock", flock)
    fit(tmp_path / "a")
    monkeypatch.setattr(_disk, "fcntl", None)
    fit(tmp_path / "b")
    assert finished(tmp_path / "a") == finished(tmp_path / "b") == whole
