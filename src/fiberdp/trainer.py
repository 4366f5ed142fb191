"""The arrow: sample, charge, observe, release, filter, update; one logical step after the other.

for step in range(T):
    ledger.spend(step, plan.event(step))          # on disk before the release
    g = pipeline.release(step, d, scale)          # the gate
    d = optimizer.step(g)                         # filter -> moments -> update
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fiberdp import _tree, _validate
from fiberdp._random import Keys
from fiberdp.accounting import Ledger
from fiberdp.diagnostics.receipt import Receipt, noise_receipt, receipt_steps
from fiberdp.engines import ENGINES, PRECISIONS, Loss, LossFn, check_independent, check_loss, check_model, faster, prove, warn_of_dropout
from fiberdp.flat import FlatParameters
from fiberdp.optim import Optimizer
from fiberdp.pipeline import Pipeline
from fiberdp.planning import Plan
from fiberdp.sampling.source import as_source
from fiberdp.types import Release


@dataclass(frozen=True)
class Step:
    """What may be said in public of one finished step: nothing here is computed from raw data."""

    step: int
    lr: float


class Run:
    """A plan joined with a model, a loss and data.  Iterate to train; `model` then holds the result.

    model: its trainable parameters become views into one vector (see `FlatParameters`); nothing else of it changes.
    loss_fn(model, batch) -> Tensor[b], one loss per example.  dataset: a dict or tuple of tensors, or any map-style data set.
    keys: where all randomness comes from; by default secret operating-system entropy.  ledger: path of the ledger file; without one
    it is kept in memory.  engine, micro_batch_size: change time and memory, never epsilon, and never the result but by rounding, with
    one exception: a model that draws random numbers (dropout) gets its masks a micro-batch at a time from vmap and ghost, an example from
    loop.  engine "auto": the faster of ghost and vmap, measured here; `engine` of the run says which.  precision "bf16": the forward and
    backward passes in bfloat16 (torch.autocast); norms, sums, noise and state as always, so the guarantee is the same, the gradients not.

    Guarantee: the sequence of releases, and so everything computed from them (theta included), is
    (epsilon, delta)-DP under the plan's relation; each step is charged before its release, an empty batch and a NaN example included.
    Raises ValueError, before anything is written or released, for what cannot be trained privately; for a loss through which examples
    meet; and for engine ghost if its clipped sum of synthetic examples is not the oracle's.
    """

    def __init__(
        self,
        plan: Plan,
        model: nn.Module,
        loss_fn: LossFn,
        dataset: Any,
        *,
        keys: Keys | None = None,
        engine: str = "ghost",
        precision: str = "float32",
        collate: Callable[..., Any] | None = None,
        micro_batch_size: int | None = None,
        ledger: str | None = None,
    ) -> None:
        _validate.choice("engine", engine, (*ENGINES, "auto"))
        _validate.choice("precision", precision, PRECISIONS)
        source = as_source(dataset, collate)
        if len(source) != plan.num_examples:
            raise ValueError(
                f"the data set has {len(source)} examples, the plan {plan.num_examples}: they must agree, because the sampling rate and so "
                f"epsilon follow from that number. Make the plan with num_examples={len(source)}."
            )
        check_model(model)
        warn_of_dropout(model)
        self.plan = plan
        self.model = model
        self.source = source
        self.keys = keys or Keys.secret()
        self.flat = FlatParameters(model)
        augmentation = plan.method.augmentation
        exact = Loss(model, loss_fn, augmentation.multiplicity)
        row = source.take(torch.zeros(1, dtype=torch.int64))  # read for its structure only
        check_loss(exact, self.flat.views(self.flat.theta), row)
        check_independent(exact, self.flat, row)
        probes = plan.method.observation.probes()
        loss = Loss(model, loss_fn, augmentation.multiplicity, precision)
        self.engine = faster(self.flat, loss, row, probes, plan.batch_size) if engine == "auto" else engine
        worker = ENGINES[self.engine](self.flat, loss)
        # once on blank examples, so that what the engine cannot do is refused here and not in mid-run
        uniforms = torch.zeros(2, augmentation.multiplicity, augmentation.draws)
        blank = augmentation.apply(_tree.to(_tree.zeros(row, 2), self.flat.theta.device), uniforms)
        worker.clipped_sum(probes, torch.zeros_like(self.flat.theta), blank, plan.clip, seed=0, loss_scale=0.0)
        if self.engine == "ghost":
            prove(worker if precision == "float32" else ENGINES[self.engine](self.flat, exact), exact, row, probes)
        # asked even if one is given: the engine's memory budget follows from it, and with it the last bits of a resumed run
        fitting = worker.micro_batch_size(row, len(probes), plan.batch_size)
        micro_batch_size = fitting if micro_batch_size is None else micro_batch_size
        _validate.count("micro_batch_size", micro_batch_size, why="It is how many examples are in memory at a time.")
        self.pipeline = Pipeline(plan, self.flat, worker, source, self.keys, micro_batch_size)
        self.optimizer = Optimizer(
            self.flat.theta,
            filter=plan.method.filter,
            calibration=plan.method.calibration,
            update=plan.method.update,
            schedule=plan.method.schedule,
            averaging=plan.method.averaging,
            scaling=plan.method.scaling,
            steps=plan.steps,
            groups=self.flat.groups(),
        )
        self.ledger = Ledger(ledger, plan.terms)
        self.receipt: Receipt | None = None
        self.tap: Callable[[Tensor, Tensor], None] | None = None
        self.ahead = True  # steps may be charged before their own, where fsync is slow; False if the run may end before its plan
        self.heard: Callable[[Release], None] | None = None  # told every release before it is used: what an outsider may see

    def prove(self) -> Receipt:
        """Make the noise receipt (once), or raise ReceiptError if the noise is not what is charged.  Touches no data."""
        if self.receipt is None:
            d = torch.full_like(self.flat.theta, 1e-3)  # not zero, so that every probe is evaluated
            memory = self.plan.mechanism.init(self.flat.theta)
            noise = self.plan.charged_noise(0)
            self.receipt = noise_receipt(
                lambda step: self.pipeline.release_of_nothing(step, d, memory).value,
                std=noise.std,
                tensors=[(slot.name, slice(slot.start, slot.stop)) for slot in self.flat.slots],
                steps=receipt_steps(self.flat.numel),
                charged=None if noise.white else self.plan.charged_noise,
            )
        return self.receipt.require()

    def __iter__(self) -> Iterator[Step]:
        """Train from where the run stands to its last step."""
        while self.optimizer.t < self.plan.steps:
            yield self.step()

    def step(self) -> Step:
        """One logical step: charge, release, update.  Raises ReceiptError at the first if the noise is not proved."""
        if self.optimizer.t >= self.plan.steps:
            raise ValueError(
                f"step {self.optimizer.t} of a plan of {self.plan.steps} steps: a run ends with its plan, because its "
                "epsilon was calibrated for those steps. Make a plan with more steps."
            )
        self.flat.check()
        check_model(self.model)  # a BatchNorm may have been switched back to training mode by model.train()
        self.prove()
        t, lr = self.optimizer.t, self.optimizer.lr
        following = (self.plan.event(later) for later in range(t + 1, self.plan.steps if self.ahead else t + 1))
        self.ledger.spend(t, self.plan.event(t), following)
        release = self.pipeline.release(t, self.optimizer.d, self.optimizer.scale, tap=self.tap)
        if self.heard:
            self.heard(release)
        self.optimizer.step(release)
        return Step(t, lr)

    def statement(self) -> dict[str, Any]:
        """The privacy of all steps that are charged, as JSON values: epsilon with everything that it depends on, none of it from data."""
        plan = self.plan
        return {
            "epsilon": plan.price(self.ledger.event()),
            "delta": plan.delta,
            "relation": plan.relation,
            "accountant": plan.accountant,
            "noise_multiplier": plan.noise_multiplier,
            "clip_norm": plan.clip.sensitivity,
            "sampling": plan.sampler.name,
            **({"groups": plan.sampler.groups} if plan.sampler.name == "cyclic" else {}),
            "batch_size": plan.batch_size,
            "num_examples": plan.num_examples,
            "steps": len(self.ledger),
        }

    @property
    def epsilon(self) -> float:
        """epsilon of the steps taken so far, from the ledger alone."""
        return self.plan.price(self.ledger.event(self.optimizer.t))
