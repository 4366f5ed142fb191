"""Tune a recipe's learning rates: every method gets the same number of trials, scored on held-out training rows, never on test.

    python scripts/tune.py mnist-cnn --out results/mnist-cnn-tuning.jsonl --workers 2 \
        --grid dp-sgd=0.25,0.5,1,2 --grid fiber=0.00025,0.0005,0.001,0.002

One line a trial, appended as it finishes; a second call skips what is there.  Keys are derived from --seed, so that a trial can be
rerun; a tuned model is trained anew with other keys.  (Tuning itself is not charged to epsilon; the table says so.)
"""

from __future__ import annotations

import argparse
import json
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path


def trial(recipe: str, method: str, lr: float, seed: int, epochs: int | None) -> dict:
    import torch

    from fiberdp import fit
    from fiberdp._allocator import keep_freed_memory

    torch.set_num_threads(1)  # two processes of one thread do more than one process of two
    keep_freed_memory()
    record = fit(recipe, method=method, options={"lr": lr}, seed=seed, epochs=epochs, test=False)
    kept = {name: record[name] for name in ("recipe", "method", "seed", "privacy", "result", "timing", "versions")}
    return kept | {"lr": lr, "epochs": epochs, "receipt": {k: record["receipt"][k] for k in ("std_ratio", "standard_error", "passed")}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--grid", action="append", required=True, metavar="METHOD=LR,LR,…")
    parser.add_argument("--seed", type=int, default=100)
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()

    done = [json.loads(line) for line in options.out.read_text().splitlines()] if options.out.exists() else []
    finished = {(row["method"], row["lr"], row["seed"], row["epochs"]) for row in done}
    grids = {method: [float(lr) for lr in lrs.split(",")] for method, lrs in (grid.split("=") for grid in options.grid)}
    wanted = [(method, lr, options.seed, options.epochs) for method, lrs in grids.items() for lr in lrs]
    with ProcessPoolExecutor(options.workers, max_tasks_per_child=1) as pool:
        running = [pool.submit(trial, options.recipe, *key) for key in wanted if key not in finished]
        for future in as_completed(running):
            row = future.result()
            with options.out.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(
                f"{row['method']:16} lr {row['lr']:<8g} held-out {row['result']['heldout']:.4f}  {row['timing']['seconds']:.0f} s",
                flush=True,
            )


if __name__ == "__main__":
    main()
