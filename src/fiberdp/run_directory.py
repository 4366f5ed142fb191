"""The run directory: everything a run leaves behind, so that a crash loses nothing and hides nothing.

    record.json      the result with its privacy statement and noise receipt          public, written at the end
    ledger.jsonl     one line a step, on disk before the release                      public
    metrics.jsonl    epsilon so far and held-out metrics, one line an epoch           public
    resume/          the checkpoint with the generators' keys; unaccounted statistics SECRET
    release/         model.safetensors (averaged.safetensors), config.json, ledger summary   public, written at the end

Order of writing: the checkpoint of step 0 (the keys) before the first line of the ledger; metrics before the checkpoint that
covers them; release/ before record.json, which says that the run is complete.  Each is on disk before the next begins, so that
what a crash, a power cut or a full disk leaves can be resumed.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import save
from torch import Tensor

from fiberdp._disk import append, lock, make_folder, sweep, write_atomically, writing
from fiberdp.accounting import Ledger
from fiberdp.checkpoint import restore, save_checkpoint, secret_folder, state_of
from fiberdp.diagnostics.unaccounted import Unaccounted
from fiberdp.evaluation import evaluate
from fiberdp.planning import Plan
from fiberdp.recipes import Recipe
from fiberdp.record import lines_until, peak_mib, to_text, versions
from fiberdp.trainer import Run

CHECKPOINT_SECONDS = 60.0
LARGE_CLAMP_MASS = 0.5  # from here on the floor decides more of the update than the second moment does


class Reporter(Protocol):
    """Who is told how the run goes.  Everything it is told is public."""

    def proved(self, plan: Plan, receipt: Any) -> None: ...
    def stepped(self, step: int, steps: int) -> None: ...
    def evaluated(self, line: dict[str, Any], steps: int) -> None: ...


class Silent:
    def proved(self, plan: Plan, receipt: Any) -> None: ...
    def stepped(self, step: int, steps: int) -> None: ...
    def evaluated(self, line: dict[str, Any], steps: int) -> None: ...


@contextlib.contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Hold the run directory, and clear it of what a killed process had half written; ValueError if another run holds it."""
    secret_folder(folder / "resume")
    path = folder / "resume" / "lock"
    with writing(path):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        with writing(path):
            free = lock(descriptor)
        if not free:
            raise ValueError(
                f"--out {folder} belongs to a run that is still going on: a run directory has one writer at a time, because a step that "
                "two processes release would be charged once. Wait for its end, or choose another --out."
            )
        sweep(folder)
        yield
    finally:
        os.close(descriptor)


def refuse_used(folder: Path) -> None:
    """ValueError unless a run may begin here: the folder is new or empty, or what was begun there never came to its first checkpoint."""
    found = (path.relative_to(folder) for path in folder.rglob("*"))
    if any(not any(path.match(left) for left in ("resume", "resume/lock", "resume/.*.tmp")) for path in found):
        raise ValueError(
            f"--out {folder} is not empty: a new run needs a new folder, because mixing two runs' ledgers would falsify both. "
            "Choose another, or continue the run in it with --resume."
        )


class RunDirectory:
    """The bookkeeping around one Run.  held: what is to be given back at its end.

    Of several processes the first writes and evaluates.  The others go through the same steps, because their slices are asked for.
    """

    def __init__(
        self,
        folder: Path | None,
        run: Run,
        config: dict[str, Any],
        recipe: Recipe,
        rows: dict[str, Any],
        reporter: Reporter,
        unaccounted: bool,
        held: contextlib.ExitStack,
    ) -> None:
        self.kept = folder is not None
        self.folder = folder if run.ranks.first else None
        self.run, self.config, self.recipe, self.rows = run, config, recipe, rows
        self.reporter, self.unaccounted, self.held = reporter, unaccounted, held
        self.seconds = 0.0
        self.last: dict[str, Any] = {}
        self.fingerprint = run.source.fingerprint() if self.folder else ""

    def prepare(self, saved: dict[str, Tensor], state: dict[str, Any]) -> None:
        """Prove the noise; then create the directory, or bring it back to its checkpoint."""
        run, step = self.run, state.get("step", 0)
        run.ranks.from_first(lambda: self._same_rows(state))
        self.reporter.proved(run.plan, run.prove())
        if not self.kept:
            return
        if not state:
            run.ranks.from_first(self._take_folder)
            self._checkpoint()  # the keys are on disk before the first release uses them
        charged = run.ranks.from_first(self._open_ledger)
        if not run.ranks.first:
            for taken in range(min(charged, step)):
                run.ledger.spend(taken, run.plan.event(taken))  # in memory: the first process keeps the file
        if state:
            restore(run, saved, state)
            self.seconds = state["seconds"]
            run.ranks.from_first(lambda: self._rewind_metrics(step))

    def _same_rows(self, state: dict[str, Any]) -> None:
        if state and state["fingerprint"] != self.fingerprint:
            raise ValueError(
                "the training data changed since the run was started: a resumed run must see the same rows, because "
                "reusing its noise on others would reveal their difference. Restore the data, or start in a new --out."
            )

    def _take_folder(self) -> None:
        assert self.folder is not None
        self.held.enter_context(only_writer(self.folder))
        refuse_used(self.folder)  # again: another run may have begun and ended here meanwhile

    def _open_ledger(self) -> int:
        """How many steps it has charged."""
        assert self.folder is not None
        self.run.ledger = self.held.enter_context(Ledger(self.folder / "ledger.jsonl", self.run.plan.terms))
        return len(self.run.ledger)

    def train(self) -> None:
        run, plan = self.run, self.run.plan
        every = plan.sampler.steps_per_epoch
        raw = Unaccounted(self.folder / "resume" / "unaccounted.jsonl", run.optimizer.t) if self.unaccounted and self.folder else None
        run.tap = raw.add if raw else None
        started = time.monotonic()  # of the training since the last checkpoint: evaluation is not counted
        for step in run:
            done = step.step + 1
            if raw:
                raw.close(step.step, plan.clip.sensitivity)
            self.reporter.stepped(done, plan.steps)
            elapsed = time.monotonic() - started
            evaluating = done % every == 0 or done == plan.steps
            if evaluating or run.ranks.from_first(lambda waited=elapsed: waited > CHECKPOINT_SECONDS):
                self.seconds += elapsed
                if evaluating:
                    self._evaluate(done, step.lr)
                self._checkpoint()
                started = time.monotonic()

    def finish(self, test: bool) -> dict[str, Any]:
        """The record; and, with a directory, release/ and record.json, in that order: the record says that the rest is there."""
        run = self.run
        receipt = run.prove()
        chain = run.ledger.finish()
        if run.ranks.from_first(lambda: not self.last):  # the crash fell between the last step and the record
            self.last = self._line(run.plan.steps, 0.0)
        theta_bar = run.theta_bar  # here, because the slices of all processes are in it
        return run.ranks.from_first(lambda: self._record(receipt, chain, theta_bar, test))

    def _record(self, receipt: Any, chain: str, theta_bar: Tensor | None, test: bool) -> dict[str, Any]:
        run, plan, metric = self.run, self.run.plan, self.recipe.metric
        record = {
            "recipe": self.config["recipe"],
            "method": self.config["method"],
            "seed": self.config["seed"],
            "keys": run.keys.kind,
            "privacy": run.statement() | {"ledger_chain": chain},
            "receipt": receipt.to_json(),
            "clamp_mass": self.last.get("clamp_mass"),
            "warnings": _warnings(self.last.get("clamp_mass"), plan.method.calibration),
            "result": {
                "metric": metric,
                "heldout": self.last["heldout"][metric],
                "test": self._metrics("test")[metric] if test else None,
                "averaged": self._averaged_result(theta_bar, test),
                **(evaluate(self.recipe.details, run.model, self.rows["test"]) if test and self.recipe.details else {}),
                "note": "held-out and test rows are never trained on; these figures stand outside epsilon",
            },
            "timing": {
                "seconds": self.seconds,
                "examples_per_second": plan.steps * plan.batch_size / self.seconds if self.seconds else None,
                "peak_mib": peak_mib(),
                "processes": run.ranks.count,
                "threads": torch.get_num_threads(),
                "engine": run.engine,
                "micro_batch_size": run.pipeline.micro_batch_size,
            },
            "versions": versions(),
            "config": self.config,
        }
        if self.folder:
            release = self.folder / "release"
            make_folder(release)
            write_atomically(release / "model.safetensors", save(run.flat.state_dict(run.flat.theta)))
            if theta_bar is not None:
                write_atomically(release / "averaged.safetensors", save(run.flat.state_dict(theta_bar)))
            write_atomically(release / "config.json", to_text(self.config))
            write_atomically(release / "ledger_summary.json", to_text(record["privacy"]))
            write_atomically(self.folder / "record.json", to_text(record))
        return record

    def _line(self, done: int, lr: float) -> dict[str, Any]:
        run = self.run
        clamp_mass, theta_bar = run.clamp_mass(), run.theta_bar
        return run.ranks.from_first(
            lambda: {
                "step": done,
                "epoch": done / run.plan.sampler.steps_per_epoch,
                "epsilon": run.epsilon,
                "lr": lr,
                "clamp_mass": clamp_mass,
                "heldout": self._metrics("heldout"),
                "heldout_averaged": self._averaged("heldout", theta_bar),
            }
        )

    def _metrics(self, rows: str) -> dict[str, float]:
        return evaluate(self.recipe.metrics, self.run.model, self.rows[rows])

    def _averaged(self, rows: str, theta_bar: Tensor | None) -> dict[str, float] | None:
        """What the averaged weights reach; None without averaging."""
        flat = self.run.flat
        if theta_bar is None:
            return None
        return evaluate(self.recipe.metrics, self.run.model, self.rows[rows], parameters=flat.views(theta_bar))

    def _averaged_result(self, theta_bar: Tensor | None, test: bool) -> dict[str, float | None] | None:
        heldout = self.last["heldout_averaged"]
        reached = self._averaged("test", theta_bar) if test else None
        metric = self.recipe.metric
        return heldout and {"heldout": heldout[metric], "test": reached[metric] if reached else None}

    def _evaluate(self, done: int, lr: float) -> None:
        self.last = self._line(done, lr)
        if self.folder:
            append(self.folder / "metrics.jsonl", to_text(self.last, indent=None) + "\n")
        self.reporter.evaluated(self.last, self.run.plan.steps)

    def _checkpoint(self) -> None:
        run = self.run
        if not self.kept:
            return
        tensors, state = state_of(run)  # in every process: each holds a slice
        if self.folder:
            state |= {"config": self.config, "fingerprint": self.fingerprint, "seconds": self.seconds}
            save_checkpoint(self.folder / "resume", tensors, state)

    def _rewind_metrics(self, step: int) -> None:
        """Drop what was measured after the checkpoint: the resumed run measures it again."""
        assert self.folder is not None
        path = self.folder / "metrics.jsonl"
        if path.exists():
            kept = lines_until(path, step)
            write_atomically(path, b"".join(kept))
            last = json.loads(kept[-1]) if kept else {}
            self.last = last if last.get("step") == self.run.plan.steps else {}


def _warnings(clamp_mass: float | None, calibration: Any) -> list[str]:
    """The paper's advice (E.4, E.6) where the correction takes so much that the floor rules, without having been asked to.

    An automatic floor stands where the noise in v^ is, so it holds half of the coordinates or more wherever the noise rules: by choice.
    """
    if clamp_mass is None or clamp_mass <= LARGE_CLAMP_MASS or calibration.eps_v == "auto":
        return []
    return [
        f"clamp mass {clamp_mass:.2f} at the last step: the floor eps_v decides more than half of the update, so little of Adam's "
        "adaptivity is left. If eps_v was raised, lower it; if not, reduce omega, let the floor follow the noise (eps_v=auto), or "
        "test with layerwise clipping."
    ]
