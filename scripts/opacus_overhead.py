"""What the path through `fiberdp.integrations.opacus` costs beside Opacus's own step, in one process, interleaved.

    python scripts/opacus_overhead.py --models cnn5,mlp --batch-size 64 --rounds 9

Both train the same model on the same batch with the same loss: forward, backward, clipping, noise and update; loading is not timed.
A row's ratio is the median over rounds of our step over Opacus's of the same mode in that round, by the clock on the wall and by processor
time, which a busy machine disturbs less.  A two-point row is set beside what two points must cost: Opacus's step plus its forward and
backward pass once more.  Opacus's noise is torch's, ours the cryptographic one, and the update is ours as well: it is the whole step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from opacus import PrivacyEngine
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fiberdp._allocator import keep_freed_memory
from fiberdp._random import Keys
from fiberdp.bench.models import MODELS, Model
from fiberdp.bench.opacus import MODES
from fiberdp.integrations.opacus import make_private

WARM = 2
METHODS = {"dp-sgd": "one point", "dp-adamw": "one point", "fiber-lookahead": "one point, ahead", "fiber": "two points"}


class Losses(nn.Module):
    """One loss an example or their mean, as Opacus's criterion and as ours."""

    reduction = "mean"

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output, target, reduction=self.reduction)


def torch_optimizer(module: nn.Module, method: str) -> torch.optim.Optimizer:
    if method == "dp-sgd":
        return torch.optim.SGD(module.parameters(), lr=1e-3, momentum=0.9)
    return torch.optim.AdamW(module.parameters(), lr=1e-3, fused=True)


def steps(model: Model, batch_size: int, mode: str, method: str | None, update: str) -> tuple[Callable[[], None], Callable[[], None]]:
    """(a whole step, its forward and backward pass alone); method None is Opacus's own path with torch's `update` behind it."""
    module, (x, y) = model.new(), model.batch(batch_size)
    loader = DataLoader(TensorDataset(x, y), batch_size=batch_size)
    optimizer, losses = torch_optimizer(module, update), Losses()
    if method is None:
        made: Any = PrivacyEngine().make_private(
            module=module, optimizer=optimizer, criterion=losses, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0,
            grad_sample_mode=mode,
        )  # fmt: skip
        wrapped, private, criterion = made[0], made[1], made[2] if mode == "ghost" else losses
    else:  # every example is in every batch, so that both have the same
        wrapped, private, criterion, _ = make_private(
            module=module, optimizer=optimizer, criterion=losses, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0,
            target_delta=1e-5, epochs=1_000_000, grad_sample_mode=mode, method=method, keys=Keys.seeded(0),
        )  # fmt: skip

    def gradient() -> None:
        private.zero_grad()
        criterion(wrapped(x), y).backward()

    def step() -> None:
        gradient()
        private.step()

    return step, gradient


def measure(model: Model, batch_size: int, mode: str, rounds: int, progress: Callable[[str], None]) -> list[dict[str, Any]]:
    """One row a method."""
    opacus = {update: steps(model, batch_size, mode, None, update) for update in ("dp-sgd", "dp-adamw")}
    timed: dict[str, Callable[[], None]] = {"opacus dp-sgd": opacus["dp-sgd"][0], "opacus dp-adamw": opacus["dp-adamw"][0]}
    timed["opacus gradient"] = opacus["dp-adamw"][1]
    for method in METHODS:
        timed[method] = steps(model, batch_size, mode, method, "dp-sgd" if method == "dp-sgd" else "dp-adamw")[0]
    clocks = {"ratio": time.perf_counter, "cpu_ratio": time.process_time}
    seconds: dict[str, dict[str, list[float]]] = {clock: {name: [] for name in timed} for clock in clocks}
    for round in range(-WARM, rounds):
        progress(f"{model.name} {mode}: round {round + 1} of {rounds}")
        for name, run in timed.items():
            started = {clock: now() for clock, now in clocks.items()}
            run()
            for clock, now in clocks.items() if round >= 0 else ():
                seconds[clock][name].append(now() - started[clock])
    rows = []
    for method, points in METHODS.items():
        row: dict[str, Any] = {"model": model.name, "mode": mode, "method": method, "batch_size": batch_size}
        for clock, found in seconds.items():
            theirs = found["opacus dp-sgd" if method == "dp-sgd" else "opacus dp-adamw"]
            if points == "two points":
                theirs = [a + b for a, b in zip(theirs, found["opacus gradient"])]
            low, middle, high = statistics.quantiles([a / b for a, b in zip(found[method], theirs)], n=4)
            row |= {clock: middle, f"{clock}_spread": (high - low) / 2}
            if clock == "cpu_ratio":
                row |= {"cpu_seconds": statistics.median(found[method]), "opacus_cpu_seconds": statistics.median(theirs)}
                row["cpu_ratio_of_minima"] = min(found[method]) / min(theirs)
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", default="cnn5,mlp")
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    warnings.simplefilter("ignore", UserWarning)
    keep_freed_memory()  # as `fiberdp bench` does, for both alike: else a step's time is that of page faults
    rows = [
        row
        for name in given.models.split(",")
        for mode in given.modes.split(",")
        for row in measure(MODELS[name], given.batch_size, mode, given.rounds, lambda line: print(line, file=sys.stderr))
    ]
    if given.json:
        print(json.dumps({"rows": rows, "threads": torch.get_num_threads(), "torch": torch.__version__}))
        return
    print("| model | mode | method | ours, CPU ms | Opacus, CPU ms | CPU ratio | ± | of minima | wall ratio | ± |")
    print("|---" * 10 + "|")
    for row in rows:
        times = f"{1e3 * row['cpu_seconds']:.1f} | {1e3 * row['opacus_cpu_seconds']:.1f}"
        named = ("cpu_ratio", "cpu_ratio_spread", "cpu_ratio_of_minima", "ratio", "ratio_spread")
        ratios = " | ".join(f"{row[name]:.2f}" for name in named)
        print(f"| {row['model']} | {row['mode']} | {row['method']} | {times} | {ratios} |")


if __name__ == "__main__":
    main()
