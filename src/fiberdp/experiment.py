"""A whole run: recipe -> plan -> proof -> training -> record, in a run directory that survives a crash.

record.json      the result with its privacy statement and noise receipt          public, written at the end
ledger.jsonl     one line a step, on disk before the release                      public
metrics.jsonl    epsilon so far and held-out metrics, one line an epoch           public
resume/          the checkpoint with the generators' keys; unaccounted statistics SECRET
release/         model.safetensors, config.json, ledger summary                   public, written at the end
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import save
from torch import Tensor, nn

from fiberdp import _validate
from fiberdp._random import Keys
from fiberdp.accounting import Ledger
from fiberdp.checkpoint import load_checkpoint, save_checkpoint
from fiberdp.methods import method as method_named
from fiberdp.planning import Plan, plan
from fiberdp.recipes import RECIPES, Recipe
from fiberdp.record import peak_mib, to_text, versions, write_atomically
from fiberdp.trainer import Run

CHECKPOINT_SECONDS = 60.0


class Reporter(Protocol):
    """Who is told how the run goes.  Everything it is told is public."""

    def proved(self, plan: Plan, receipt: Any) -> None: ...
    def stepped(self, step: int, steps: int) -> None: ...
    def evaluated(self, line: dict[str, Any], steps: int) -> None: ...


class Silent:
    def proved(self, plan: Plan, receipt: Any) -> None: ...
    def stepped(self, step: int, steps: int) -> None: ...
    def evaluated(self, line: dict[str, Any], steps: int) -> None: ...


def fit(
    recipe: str | Recipe,
    *,
    method: str = "fiber",
    options: dict[str, Any] | None = None,
    epsilon: float | None = None,
    delta: float | None = None,
    clip_norm: float | None = None,
    batch_size: int | None = None,
    epochs: int | None = None,
    steps: int | None = None,
    sampling: str = "poisson",
    accountant: str | None = None,
    data: str | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    seed: int | None = None,
    device: str = "cpu",
    engine: str = "vmap",
    micro_batch_size: int | None = None,
    unaccounted: bool = False,
    test: bool = True,
    reporter: Reporter | None = None,
) -> dict[str, Any]:
    """Train a recipe privately and return its record (the content of record.json).

    What is None comes from the recipe.  options: changes to the method (lr, omega, kappa, …).  out: the run directory, which must be
    new, or hold the run to `resume`; without it nothing is written.  seed: derive every stream from it (reproducible, and not private
    against who knows it); by default keys are secret.  unaccounted: also keep raw training statistics, in the secret folder.
    test: evaluate on the test rows at the end (leave it out while tuning).

    Guarantee: see `fiberdp.trainer.Run`.  The held-out and test metrics stand outside epsilon: their rows are never trained on.
    Raises ValueError in one line for bad input, before anything is written.
    """
    chosen = recipe if isinstance(recipe, Recipe) else RECIPES[_validate.choice("recipe", recipe, tuple(RECIPES))]()
    tuned = method_named(method, **({**chosen.options.get(method, {}), **(options or {})}))
    folder = _folder(out, resume)
    if epsilon is not None:
        _validate.positive("epsilon", epsilon, why="It bounds the privacy loss: typical values are 0.5 to 8.")
    if delta is not None:
        _validate.interval("delta", delta, 0, 1, open_low=True, open_high=True, why="It is a failure probability: choose it below 1/N.")
    if epochs is not None and steps is not None:
        raise ValueError(f"epochs={epochs}, steps={steps}: only one may be given, because each determines the other. Drop one.")
    target = _device(device)
    if folder and resume and (folder / "record.json").exists():
        raise ValueError(f"{folder} holds a finished run: there is nothing to resume. Its result is in record.json.")

    rows = chosen.load(data)
    num_examples = len(rows["train"]["label"])
    agreed = plan(
        method=tuned,
        num_examples=num_examples,
        batch_size=chosen.batch_size if batch_size is None else batch_size,
        epochs=None if steps is not None else (chosen.epochs if epochs is None else epochs),
        steps=steps,
        epsilon=chosen.epsilon if epsilon is None else epsilon,
        delta=num_examples**-1.1 if delta is None else delta,
        clip_norm=chosen.clip_norm if clip_norm is None else clip_norm,
        sampling=sampling,
        accountant=accountant,
    )
    saved, state = load_checkpoint(folder / "resume") if folder and resume else ({}, {})
    keys = Keys.from_json(state["keys"]) if state else (Keys.secret() if seed is None else Keys.seeded(seed))
    config = {"recipe": chosen.name, "method": method, "seed": seed, "device": device, "engine": engine, "plan": agreed.to_json()}
    if state:
        _same_run(state["config"], config)
        micro_batch_size = micro_batch_size or state["micro_batch_size"]

    torch.manual_seed(keys.stream("model").seed(0))
    run = Run(
        agreed, chosen.build().to(target), chosen.loss, rows["train"],
        keys=keys, engine=engine, micro_batch_size=micro_batch_size,
    )  # fmt: skip
    trained = _Directory(folder, run, config, chosen, rows, reporter or Silent(), unaccounted)
    trained.prepare(saved, state)
    trained.train()
    return trained.finish(test)


class _Directory:
    """The bookkeeping around one Run."""

    def __init__(
        self,
        folder: Path | None,
        run: Run,
        config: dict[str, Any],
        recipe: Recipe,
        rows: dict[str, Any],
        reporter: Reporter,
        unaccounted: bool,
    ) -> None:
        self.folder, self.run, self.config, self.recipe, self.rows = folder, run, config, recipe, rows
        self.reporter, self.unaccounted = reporter, unaccounted
        self.seconds = 0.0
        self.last: dict[str, Any] = {}
        self.fingerprint = run.source.fingerprint() if folder else ""

    def prepare(self, saved: dict[str, Tensor], state: dict[str, Any]) -> None:
        """Prove the noise; then create the directory, or bring it back to its checkpoint."""
        run = self.run
        if state and state["fingerprint"] != self.fingerprint:
            raise ValueError(
                "the training data changed since the run was started: a resumed run must see the same rows, because "
                "reusing its noise on others "
                "would reveal their difference. Restore the data, or start in a new --out."
            )
        self.reporter.proved(run.plan, run.prove())
        if not self.folder:
            return
        if state:
            run.optimizer.load_state_dict(saved, state["step"])
            run.ledger = Ledger(self.folder / "ledger.jsonl")
            if len(run.ledger) < state["step"]:
                raise ValueError(
                    f"the ledger has {len(run.ledger)} lines, the checkpoint is at step {state['step']}: every step "
                    "before it must be charged, or "
                    "epsilon would come out too small. Restore ledger.jsonl."
                )
            self.seconds = state["seconds"]
            self._rewind_metrics(state["step"])
        else:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._checkpoint()  # the keys are on disk before the first release uses them
            run.ledger = Ledger(self.folder / "ledger.jsonl")

    def train(self) -> None:
        run, plan = self.run, self.run.plan
        every = plan.sampler.steps_per_epoch
        raw = _Unaccounted(self.folder / "resume" / "unaccounted.jsonl", run.optimizer.t) if self.unaccounted and self.folder else None
        run.tap = raw.add if raw else None
        started = saved = time.monotonic()
        for step in run:
            done = step.step + 1
            if raw:
                raw.close(step.step, plan.clip.sensitivity)
            self.reporter.stepped(done, plan.steps)
            now = time.monotonic()
            if done % every == 0 or done == plan.steps:
                self.seconds += now - started
                self._evaluate(done, step.lr)
                self._checkpoint()
                started = saved = time.monotonic()
            elif now - saved > CHECKPOINT_SECONDS:
                self.seconds += now - started
                self._checkpoint()
                started = saved = time.monotonic()

    def finish(self, test: bool) -> dict[str, Any]:
        """The record; and, with a directory, release/ and record.json, in that order: the record says that the rest is there."""
        run, plan = self.run, self.run.plan
        receipt = run.prove()
        if not self.last:  # the crash fell between the last step and the record
            self.last = self._line(plan.steps, 0.0)
        record = {
            "recipe": self.config["recipe"],
            "method": self.config["method"],
            "seed": self.config["seed"],
            "keys": run.keys.kind,
            "privacy": {
                "epsilon": run.epsilon,
                "delta": plan.delta,
                "relation": plan.relation,
                "accountant": plan.accountant,
                "noise_multiplier": plan.noise_multiplier,
                "clip_norm": plan.clip.sensitivity,
                "sampling": plan.sampler.name,
                "batch_size": plan.batch_size,
                "num_examples": plan.num_examples,
                "steps": len(run.ledger),
            },
            "receipt": receipt.to_json(),
            "result": {
                "metric": "accuracy",
                "heldout": self.last["heldout"]["accuracy"],
                "test": evaluate(run.model, self.rows["test"])["accuracy"] if test else None,
                "note": "held-out and test rows are never trained on; these figures stand outside epsilon",
            },
            "timing": {
                "seconds": self.seconds,
                "examples_per_second": plan.steps * plan.batch_size / self.seconds if self.seconds else None,
                "peak_mib": peak_mib(),
                "threads": torch.get_num_threads(),
                "micro_batch_size": run.pipeline.micro_batch_size,
            },
            "versions": versions(),
            "config": self.config,
        }
        if self.folder:
            release = self.folder / "release"
            release.mkdir(exist_ok=True)
            tensors = {name: t.detach().cpu().clone() for name, t in run.model.state_dict().items()}  # views into theta: copied apart
            write_atomically(release / "model.safetensors", save(tensors))
            write_atomically(release / "config.json", to_text(self.config))
            write_atomically(release / "ledger_summary.json", to_text(record["privacy"]))
            write_atomically(self.folder / "record.json", to_text(record))
        return record

    def _line(self, done: int, lr: float) -> dict[str, Any]:
        plan = self.run.plan
        return {
            "step": done,
            "epoch": done / plan.sampler.steps_per_epoch,
            "epsilon": self.run.epsilon,
            "lr": lr,
            "heldout": evaluate(self.run.model, self.rows["heldout"]),
        }

    def _evaluate(self, done: int, lr: float) -> None:
        self.last = self._line(done, lr)
        if self.folder:
            with (self.folder / "metrics.jsonl").open("a") as file:
                file.write(to_text(self.last, indent=None) + "\n")
        self.reporter.evaluated(self.last, self.run.plan.steps)

    def _checkpoint(self) -> None:
        if self.folder:
            run = self.run
            state = {
                "step": run.optimizer.t,
                "keys": run.keys.to_json(),
                "config": self.config,
                "micro_batch_size": run.pipeline.micro_batch_size,
                "fingerprint": self.fingerprint,
                "seconds": self.seconds,
            }
            save_checkpoint(self.folder / "resume", run.optimizer.state_dict(), state)

    def _rewind_metrics(self, step: int) -> None:
        """Drop what was measured after the checkpoint: the resumed run measures it again."""
        assert self.folder is not None
        path = self.folder / "metrics.jsonl"
        if path.exists():
            kept = []
            for line in path.read_text().splitlines(keepends=True):
                if not line.endswith("\n") or (entry := json.loads(line))["step"] > step:
                    break
                kept.append(line)
                self.last = entry if entry["step"] == self.run.plan.steps else {}
            write_atomically(path, "".join(kept))


class _Unaccounted:
    """Raw statistics of each step: batch size, mean loss, share of examples clipped.  They are NOT private, hence resume/."""

    def __init__(self, path: Path, step: int) -> None:
        self.path = path
        kept = [line for line in path.read_text().splitlines(keepends=True) if json.loads(line)["step"] < step] if path.exists() else []
        write_atomically(path, "".join(kept), mode=0o600)
        self.losses: list[Tensor] = []
        self.norms: list[Tensor] = []

    def add(self, losses: Tensor, norms: Tensor) -> None:
        self.losses.append(losses.detach())
        self.norms.append(norms.detach())

    def close(self, step: int, clip_norm: float) -> None:
        losses = torch.cat(self.losses) if self.losses else torch.empty(0)
        norms = torch.cat(self.norms) if self.norms else torch.empty(0)
        line = {
            "step": step,
            "batch_size": len(norms),
            "loss": float(losses.mean()) if len(losses) else None,
            "clipped": float((norms > clip_norm).float().mean()) if len(norms) else None,
            "silenced": int((~norms.isfinite()).sum()),
        }
        with self.path.open("a") as file:
            file.write(to_text(line, indent=None) + "\n")
        self.losses, self.norms = [], []


@torch.no_grad()
def evaluate(model: nn.Module, rows: dict[str, Tensor], *, batch_size: int = 500) -> dict[str, float]:
    """Accuracy and mean cross-entropy of a classifier on labelled rows; the model's mode is put back afterwards."""
    training = model.training
    device = next(model.parameters()).device
    model.eval()
    correct, loss = 0, 0.0
    for images, labels in zip(rows["image"].split(batch_size), rows["label"].split(batch_size), strict=True):
        logits, labels = model(images.to(device)), labels.to(device)
        correct += int((logits.argmax(1) == labels).sum())
        loss += float(nn.functional.cross_entropy(logits, labels, reduction="sum"))
    model.train(training)
    count = len(rows["label"])
    return {"accuracy": correct / count, "loss": loss / count}


def _folder(out: str | Path | None, resume: bool) -> Path | None:
    if out is None:
        if resume:
            raise ValueError("resume without --out: the run directory must be named, because the checkpoint lies in it. Give --out DIR.")
        return None
    folder = Path(out)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--out {folder} is a file: it must be a folder for the run's files. Choose another name.")
    if not resume and folder.exists() and any(folder.iterdir()):
        raise ValueError(
            f"--out {folder} is not empty: a new run needs a new folder, because mixing two runs' ledgers would falsify both. "
            "Choose another, or continue the run in it with --resume."
        )
    return folder


def _device(device: str) -> torch.device:
    try:
        target = torch.device(device)
        torch.empty(0, device=target)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(
            f"device={device!r} cannot be used here ({str(error).splitlines()[0]}): it must be one that torch sees. Use --device cpu."
        ) from error
    return target


def _same_run(before: dict[str, Any], now: dict[str, Any]) -> None:
    """Raise ValueError naming the first setting in which the resumed run would differ."""
    for where, old, new in _differences(before, json.loads(json.dumps(now)), ""):
        raise ValueError(
            f"resume with {where}={new}, but the run was started with {old}: the plan must be the same, because epsilon "
            "was calibrated for it. "
            "Repeat the options of the first call."
        )


def _differences(old: Any, new: Any, where: str) -> list[tuple[str, Any, Any]]:
    if isinstance(old, dict) and isinstance(new, dict):
        return [d for key in {**old, **new} for d in _differences(old.get(key), new.get(key), f"{where}.{key}" if where else key)]
    return [] if old == new else [(where, old, new)]


__all__ = ["Reporter", "evaluate", "fit"]
