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
from fiberdp._ranks import Ranks
from fiberdp.accounting import Ledger
from fiberdp.diagnostics.receipt import Receipt, noise_receipt, receipt_steps
from fiberdp.engines import (
    ENGINES,
    PRECISIONS,
    Loss,
    LossFn,
    check_independent,
    check_loss,
    check_model,
    faster,
    prove,
    warn_of_compiled,
    warn_of_dropout,
)
from fiberdp.flat import FlatParameters
from fiberdp.optim import Optimizer
from fiberdp.pipeline import Pipeline
from fiberdp.planning import Plan
from fiberdp.sampling.source import Source, as_source
from fiberdp.types import Release


@dataclass(frozen=True)
class Step:
    """What may be said in public of one finished step: nothing here is computed from raw data."""

    step: int
    lr: float


class Steps:
    """Charge, release, update: what every way of training a plan shares.  Iterate to take all steps; `model` then holds the result.

    pipeline: whatever has `release` and `release_of_nothing`; see `fiberdp.pipeline.Pipeline`.
    """

    def __init__(self, plan: Plan, model: nn.Module, flat: FlatParameters, pipeline: Any, ledger: str | None) -> None:
        self.plan = plan
        self.model = model
        self.flat = flat
        self.keys: Keys = pipeline.keys
        self.pipeline = pipeline
        self.ranks: Ranks = pipeline.ranks
        self.optimizer = Optimizer(
            self.flat.theta[pipeline.own],
            filter=plan.method.filter,
            calibration=plan.method.calibration,
            update=plan.method.update,
            schedule=plan.method.schedule,
            averaging=plan.method.averaging,
            scaling=plan.method.scaling,
            steps=plan.steps,
            groups=self.flat.groups(),
        )
        self.ledger = Ledger(ledger if self.ranks.first else None, plan.terms)
        self._whole_d: Tensor | None = None  # of several processes, if a probe looks ahead
        self._looks_ahead = any(probe.lookahead for probe in plan.method.observation.probes())
        self.receipt: Receipt | None = None
        self.tap: Callable[[Tensor, Tensor], None] | None = None
        self.ahead = True  # steps may be charged before their own, where fsync is slow; False if the run may end before its plan
        self.heard: Callable[[Release], None] | None = None  # told every release (of its slice) before it is used

    def prove(self) -> Receipt:
        """Make the noise receipt (once), or raise ReceiptError if the noise is not what is charged.  Touches no data."""
        if self.receipt is None:
            d = torch.full_like(self.flat.theta, 1e-3)  # not zero, so that every probe is evaluated
            memory = self.plan.mechanism.init(self.flat.theta[self.pipeline.own])
            slices = self.ranks.slices(self.flat.numel) if self.ranks.count > 1 else []
            noise = self.plan.charged_noise(0)
            self.receipt = noise_receipt(
                lambda step: self.ranks.gather(self.pipeline.release_of_nothing(step, d, memory).value, self.flat.numel),
                std=noise.std,
                tensors=[(slot.name, slice(slot.start, slot.stop)) for slot in self.flat.slots],
                parts=[(f"process {rank}", part) for rank, part in enumerate(slices)],
                steps=receipt_steps(self.flat.numel),
                charged=None if noise.white else self.plan.charged_noise,
            )
        return self.receipt.require()

    def __iter__(self) -> Iterator[Step]:
        """Train from where the run stands to its last step."""
        while self.optimizer.t < self.plan.steps:
            yield self.step()

    def step(self, lr: float | None = None) -> Step:
        """One logical step: charge, release, update.  Raises ReceiptError at the first if the noise is not proved.

        lr: the learning rate of this step, where something else than the plan's schedule decides it.
        """
        if self.optimizer.t >= self.plan.steps:
            raise ValueError(
                f"step {self.optimizer.t} of a plan of {self.plan.steps} steps: a run ends with its plan, because its "
                "epsilon was calibrated for those steps. Make a plan with more steps."
            )
        self.flat.check()
        check_model(self.model)  # a BatchNorm may have been switched back to training mode by model.train()
        self.prove()
        t, lr = self.optimizer.t, self.optimizer.lr if lr is None else lr
        self.charge(t)
        release = self.pipeline.release(t, self.d, self.scale, tap=self.tap)
        if self.heard:
            self.heard(release)
        self._update(release, lr)
        return Step(t, lr)

    def charge(self, t: int) -> None:
        """Put step t into the ledger, durably; with it, where fsync takes long, steps that follow for certain."""
        following = (self.plan.event(later) for later in range(t + 1, self.plan.steps if self.ahead else t + 1))
        self.ledger.spend(t, self.plan.event(t), following)

    def _update(self, release: Release, lr: float) -> None:
        if self.ranks.count == 1:
            self.optimizer.step(release, lr)
            return
        with torch.no_grad():
            theta = self.flat.theta
            before = None
            if self._looks_ahead:
                before = theta.clone() if self._whole_d is None else self._whole_d.copy_(theta)
            self.optimizer.step(release, lr)
            self.ranks.spread(theta)
            self._whole_d = None if before is None else torch.sub(theta, before, out=before)

    @property
    def d(self) -> Tensor | None:
        """theta_t - theta_{t-1}, Tensor[d]; None before the first step, and in one of several processes if no probe needs it."""
        return self.optimizer.d if self.ranks.count == 1 else self._whole_d

    @property
    def scale(self) -> Tensor | None:
        """By what the next step's gradients are to be multiplied before the clip, Tensor[d]: a function of the whole vector."""
        return self.optimizer.scale_of({name: self.ranks.gather(v, self.flat.numel) for name, v in self.optimizer.scaling_state.items()})

    @property
    def theta_bar(self) -> Tensor | None:
        """The average of the weights, Tensor[d]; None without averaging."""
        own = self.optimizer.theta_bar
        return None if own is None else self.ranks.gather(own, self.flat.numel)

    def clamp_mass(self) -> float | None:
        """See `Optimizer.clamp_mass`."""
        return self.optimizer.clamp_mass(self.ranks.sum)

    def state_dict(self) -> dict[str, Tensor]:
        """Whole vectors by their symbols, the numbers of calibration and filter, and the memory of correlated noise as noise.…: SECRET.

        With the step, the plan and the keys, all there is to resume, by any number of processes.
        """
        memory = {f"noise.{name}": t for name, t in self.pipeline.noise_memory.items()}
        vectors = self.optimizer.vectors() | {name: t for name, t in memory.items() if t.dim()}
        whole = {name: self.ranks.gather(t, self.flat.numel) for name, t in vectors.items()}
        return self.optimizer.state_dict() | memory | whole

    def load_state_dict(self, tensors: dict[str, Tensor], t: int) -> None:
        """Continue from a copy of `state_dict()` as it was before step t.  Raises ValueError if it is another method's."""
        own = self.pipeline.own
        vectors = {name for name, v in tensors.items() if "." not in name or (name.startswith("noise.") and v.dim())}
        part = {name: v[..., own] if name in vectors else v for name, v in tensors.items()}
        memory = {name: v for name, v in part.items() if name.startswith("noise.")}
        self.pipeline.load_noise_memory({name.removeprefix("noise."): v for name, v in memory.items()})
        self.optimizer.load_state_dict({name: v for name, v in part.items() if name not in memory}, t)
        if self.ranks.count > 1:
            self.flat.theta.copy_(tensors["theta"])
            self._whole_d = tensors["d"].to(self.flat.theta, copy=True) if t and self._looks_ahead else None

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


class Run(Steps):
    """A plan joined with a model, a loss and data.  Iterate to train; `model` then holds the result.

    model: its trainable parameters become views into one vector (see `FlatParameters`); nothing else of it changes.
    loss_fn(model, batch) -> Tensor[b], one loss per example.  dataset: a dict or tuple of tensors, or any map-style data set.
    keys: where all randomness comes from; by default secret operating-system entropy.  ledger: path of the ledger file; without one
    it is kept in memory.  engine, micro_batch_size: change time and memory, never epsilon, and never the result but by rounding, with
    one exception: a model that draws random numbers (dropout) gets its masks a micro-batch at a time from vmap and ghost, an example from
    loop.  engine "auto": the faster of ghost and vmap, measured here; `engine` of the run says which.  precision "bf16", "fp16": the
    forward and backward passes in half precision (torch.autocast); norms, sums, noise and state as always, so the guarantee is the same,
    the gradients not.  In fp16 losses are scaled by a constant, 1,024; an example whose gradient overflows all the same contributes 0.

    Guarantee: the sequence of releases, and so everything computed from them (theta included), is
    (epsilon, delta)-DP under the plan's relation; each step is charged before its release, an empty batch and a NaN example included.
    Raises ValueError, before anything is written or released, for what cannot be trained privately; for a loss through which examples
    meet; and for engine ghost if its clipped sum of synthetic examples is not the oracle's.

    Several processes (a default process group of torch.distributed): each makes the clipped sum of its share of the batch, and noise,
    filter and update of its slice of the vector.  Every process calls every method alike; model, keys and what was measured here are the
    first process's, which alone writes the ledger.  Releases and epsilon are those of one process, up to the order of additions.
    Raises ValueError if their plans or data differ, or for a filter that fits whole tensors; RankLost when one of them is gone.
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
        _validate.choice("precision", precision, tuple(PRECISIONS))
        source = as_source(dataset, collate)
        if len(source) != plan.num_examples:
            raise ValueError(
                f"the data set has {len(source)} examples, the plan {plan.num_examples}: they must agree, because the sampling rate and so "
                f"epsilon follow from that number. Make the plan with num_examples={len(source)}."
            )
        check_model(model)
        warn_of_dropout(model)
        warn_of_compiled(model)
        self.source = source
        ranks = Ranks.joined()
        keys, flat = keys or Keys.secret(), FlatParameters(model)
        if ranks.count > 1:
            keys = Keys.from_json(ranks.from_first(keys.to_json))
        augmentation = plan.method.augmentation
        exact = Loss(model, loss_fn, augmentation.multiplicity)
        row = source.take(torch.zeros(1, dtype=torch.int64))  # read for its structure only
        check_loss(exact, flat.views(flat.theta), row)
        check_independent(exact, flat, row)
        probes = plan.method.observation.probes()
        loss = Loss(model, loss_fn, augmentation.multiplicity, precision)
        self.engine = ranks.from_first(lambda: faster(flat, loss, row, probes, plan.batch_size)) if engine == "auto" else engine
        worker = ENGINES[self.engine](flat, loss)
        # once on blank examples, so that what the engine cannot do is refused here and not in mid-run
        uniforms = torch.zeros(2, augmentation.multiplicity, augmentation.draws)
        blank = augmentation.apply(_tree.to(_tree.zeros(row, 2), flat.theta.device), uniforms)
        worker.clipped_sum(probes, torch.zeros_like(flat.theta), blank, plan.clip, seed=0, loss_scale=0.0)
        if self.engine == "ghost":
            prove(worker if precision == "float32" else ENGINES[self.engine](flat, exact), exact, row, probes)
        # asked even if one is given: the engine's memory budget follows from it, and with it the last bits of a resumed run
        fitting = worker.micro_batch_size(row, len(probes), plan.batch_size)
        micro_batch_size = ranks.from_first(lambda: fitting if micro_batch_size is None else micro_batch_size)
        _validate.count("micro_batch_size", micro_batch_size, why="It is how many examples are in memory at a time.")
        if ranks.count > 1:
            _alike(ranks, plan, source, model)
        super().__init__(plan, model, flat, Pipeline(plan, flat, worker, source, keys, micro_batch_size, ranks), ledger)


def _alike(ranks: Ranks, plan: Plan, source: Source, model: nn.Module) -> None:
    """Give every process the first one's model, and refuse processes that would not train the same thing on the same rows."""
    if plan.method.filter.learns:
        raise ValueError(
            f"filter {plan.method.filter.name!r} with {ranks.count} processes: it fits its gains to whole tensors, of which "
            "each process holds a slice. Choose another filter, or train in one process."
        )
    for what, found in (("plan", plan.to_json()), ("data", source.fingerprint())):
        said = ranks.everyones(found)
        if odd := [rank for rank, other in enumerate(said) if other != said[0]]:
            raise ValueError(
                f"process {odd[0]} of {ranks.count} has another {what} than process 0: they must be the same, or an example could "
                "be in the share of two, and count twice. Start all with the same options, on the same rows in the same order."
            )
    ranks.copy_from_first([t.detach() for t in (*model.parameters(), *model.buffers())])
