"""python ranks.py JOB OUT: one of several processes, told by the launcher's variables who it is; saves what it finds as OUT/RANK.pt.

`together` starts them: by hand and not by torchrun, so that a test knows which process is which.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

import fiberdp
from fiberdp import Keys, plan
from fiberdp._ranks import Ranks, join
from fiberdp.augmentation import CropFlip
from fiberdp.mechanisms import WhiteOnGrid
from fiberdp.optim import EMAWeights
from fiberdp.scaling import SecondMoment

N, STEPS = 60, 6
COMPOSED = {
    "averaged and scaled": lambda: replace(
        fiberdp.method("fiber-plus"), name="custom", averaging=EMAWeights(decay=0.9), scaling=SecondMoment(offset=0.3)
    ),
    "copies": lambda: replace(fiberdp.method("fiber"), name="custom", augmentation=CropFlip(padding=1, multiplicity=2, flip=True)),
    "exact noise": lambda: replace(fiberdp.method("dp-adamw"), name="custom", mechanism=WhiteOnGrid()),
}
METHODS = ("dp-sgd", "dp-adamw", "disk", "fiber", "fiber-lookahead", "fiber-plus", "doppler", "mf-dp-ftrl", *COMPOSED)


def command(arguments, ranks, *, port=None, environment=None):
    """The processes, started."""
    port = port or free_port()
    common = {
        **os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1",
        **({"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}), **(environment or {}),
    }  # fmt: skip
    return [
        subprocess.Popen(
            [sys.executable, *arguments], env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for rank in range(ranks)
    ]  # fmt: skip


def together(job, out, ranks, **environment):
    """What each process found, in order of rank."""
    out.mkdir(parents=True, exist_ok=True)
    processes = command([__file__, job, str(out)], ranks, environment=environment)
    ends = [process.communicate(timeout=300) for process in processes]
    assert not any(process.returncode for process in processes), [error for _, error in ends]
    return [torch.load(out / f"{rank}.pt", weights_only=False) for rank in range(ranks)]


def free_port():
    with contextlib.closing(socket.socket()) as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def network(dtype):
    """5,010 parameters: the noise receipt takes 10 steps."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.GroupNorm(1, 3), nn.Tanh(), nn.Flatten(), nn.Linear(108, 44), nn.Linear(44, 4)).to(dtype)


def rows(dtype):
    made = torch.Generator().manual_seed(4)
    return {"image": torch.randn(N, 1, 8, 8, generator=made).to(dtype), "label": torch.randint(0, 4, (N,), generator=made)}


def loss(model, batch):
    return nn.functional.cross_entropy(model(batch["image"]), batch["label"], reduction="none")


def agreed(name, **changes):
    method = COMPOSED[name]() if name in COMPOSED else name
    given = {"method": method, "num_examples": N, "batch_size": 6, "steps": STEPS, "delta": 1e-3, "clip_norm": 0.5}
    return plan(**given | {"noise_multiplier": 1.0} | changes)


def run_of(name, *, dtype=torch.float64, ledger=None, data=None, **changes):
    model = network(dtype)
    return agreed(name, **changes).private(
        model, loss, rows(dtype) if data is None else data, keys=Keys.seeded(5), ledger=ledger, micro_batch_size=2
    )


def trained(name, **options):
    run = run_of(name, **options)
    for _ in run:
        pass
    bar = run.theta_bar
    return {
        "theta": run.flat.theta.clone(), "bar": None if bar is None else bar.clone(), "epsilon": run.epsilon, "clamp": run.clamp_mass(),
        "receipt": run.receipt.to_json(), "state": {k: v.clone() for k, v in run.state_dict().items()},
        "own": sum(t.numel() for t in run.optimizer.vectors().values()), "chain": run.ledger.finish(),
    }  # fmt: skip


def every_method(out):
    """Of every method the result in float64; of some in float32, with a ledger."""
    found = {name: trained(name) for name in METHODS}
    for name in ("dp-sgd", "dp-adamw", "disk", "fiber-plus"):
        found[name, "float32"] = trained(name, dtype=torch.float32, ledger=str(out / f"{name}.jsonl"))
    found["tiny batches"] = trained("fiber", batch_size=1, noise_multiplier=2.0)
    for name in ("fiber", "mf-dp-ftrl"):
        first = run_of(name)
        for _ in range(2):
            first.step()
        found[name, "half"] = {k: v.clone() for k, v in first.state_dict().items()}
    return found


def half_way(out):
    """Resumed from what `half` says, which was written by another number of processes."""
    found = {}
    for name, state in torch.load(out.parent / "half.pt", weights_only=False).items():
        run = run_of(name)
        run.load_state_dict(state, 2)
        for t in range(2):
            run.ledger.spend(t, run.plan.event(t))
        for _ in run:
            pass
        found[name] = {"theta": run.flat.theta.clone(), "epsilon": run.epsilon}
    return found


def message(make):
    try:
        make()
    except ValueError as error:
        return str(error)
    return None


def refusals(out):
    """What each process is told."""
    rank, mixed = Ranks.joined().rank, rows(torch.float64)
    order = torch.arange(N).roll(rank)
    return {
        "data": message(lambda: run_of("fiber", data={k: v[order] for k, v in mixed.items()})),
        "plan": message(lambda: run_of("fiber", noise_multiplier=1.0 + rank)),
        "filter": message(lambda: run_of_filter()),
        "first": message(lambda: Ranks.joined().from_first(lambda: int("x" * (1 - rank) + "1"))),
    }


def run_of_filter():
    from fiberdp.filters import KalmanAuto

    COMPOSED["learning"] = lambda: replace(fiberdp.method("fiber"), name="custom", filter=KalmanAuto())
    return run_of("learning")


def copies(out):
    """Weights that differ at first, and what they are once the run is made."""
    torch.manual_seed(Ranks.joined().rank)
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    model[0].bias.requires_grad_(False)
    model.register_buffer("mean", torch.randn(2))
    data = (torch.ones(10, 3), torch.zeros(10, dtype=torch.int64))
    p = plan(method="dp-sgd", num_examples=10, batch_size=4, steps=1, noise_multiplier=1.0, delta=1e-3, clip_norm=1.0)
    run = p.private(model, lambda m, b: nn.functional.cross_entropy(m(b[0]), b[1], reduction="none"), data)
    return {"state": {k: v.clone() for k, v in model.state_dict().items()}, "keys": run.keys.to_json(), "held": sorted(vars(run.ranks))}


def faulty(out):
    """The noise receipt of processes that all draw the first slice of the noise."""
    from fiberdp.diagnostics.receipt import ReceiptError
    from fiberdp.mechanisms import Gaussian
    from fiberdp.types import ClippedSum

    honest = Gaussian.release
    Gaussian.release = lambda self, clipped, *rest: honest(self, ClippedSum(clipped.total, clipped.sensitivity), *rest)
    run = run_of("dp-sgd")
    try:
        run.prove()
    except ReceiptError as error:
        return str(error)
    return "proved"


def several(out):
    return {job.__name__: job(out) for job in (refusals, copies, faulty)}


JOBS = {job.__name__: job for job in (every_method, half_way, several)}

if __name__ == "__main__":
    torch.set_num_threads(1)
    with join("cpu") as (ranks, _):
        torch.save(JOBS[sys.argv[1]](Path(sys.argv[2])), Path(sys.argv[2]) / f"{ranks.rank}.pt")
