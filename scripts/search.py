"""Search compositions on held-out training rows, never on test, and write every trial down.

    python scripts/search.py mnist-cnn --epochs 8 --out results/search/mnist-cnn.jsonl --workers 1 \
        "dp-sgd lr=0.5" "dp-adamw observation=look_ahead(kappa=0.6) filter=innovation(omega=0.9) lr=0.005"

A trial is a method of the table with parts replaced (part=type(field=value, …)) and options changed (name=value).  One line a trial,
appended as it finishes; a second call skips what is there.  Trials may also be given one a line in a file, as @FILE.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path
from typing import Any


def composition(spec: str) -> Any:
    """The method that a trial's line says.  Raises ValueError for anything it cannot read."""
    from fiberdp.methods import PARTS, method
    from fiberdp.observation import TwoPoint

    name, *words = spec.split()
    parts, options = {}, {}
    for word in words:
        key, _, value = word.partition("=")
        if key in PARTS:
            call = ast.parse(value if "(" in value else value + "()", mode="eval").body
            assert isinstance(call, ast.Call)
            fields = {k.arg: ast.literal_eval(k.value) for k in call.keywords}
            kind = ast.unparse(call.func)
            parts[key] = TwoPoint.look_ahead(**fields) if kind == "look_ahead" else PARTS[key][kind](**fields)
        else:
            options[key] = ast.literal_eval(value)
    base = method(name) if not parts else replace(method(name), name="custom", **parts)
    for part in PARTS:
        own = {k: v for k, v in options.items() if hasattr(getattr(base, part), k)}
        if own:
            base = replace(base, name="custom", **{part: replace(getattr(base, part), **own)})
            options = {k: v for k, v in options.items() if k not in own}
    if options:
        raise ValueError(f"{spec}: no part has {', '.join(options)}")
    return base


def trial(recipe: str, spec: str, seed: int, epochs: int | None, epsilon: float | None) -> dict[str, Any]:
    import torch

    from fiberdp import fit
    from fiberdp._allocator import keep_freed_memory

    torch.set_num_threads(1)  # two processes of one thread do more than one process of two
    keep_freed_memory()
    record = fit(recipe, method=composition(spec), seed=seed, epochs=epochs, epsilon=epsilon, test=False)
    return {
        "spec": spec, "recipe": recipe, "seed": seed, "epochs": epochs, "heldout": record["result"]["heldout"],
        "averaged": record["result"].get("averaged"), "clamp_mass": record.get("clamp_mass"),
        "epsilon": record["privacy"]["epsilon"], "noise_multiplier": record["privacy"]["noise_multiplier"],
        "std_ratio": record["receipt"]["std_ratio"], "passed": record["receipt"]["passed"],
        "seconds": record["timing"]["seconds"], "commit": record["versions"].get("commit"),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("trials", nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=200)
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--epsilon", type=float)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()

    specs = []
    for given in options.trials:
        specs += Path(given[1:]).read_text().splitlines() if given.startswith("@") else [given]
    specs = [re.sub(r"\s+", " ", spec).strip() for spec in specs if spec.strip()]
    for spec in specs:
        composition(spec)  # refuse a slip before the first trial
    options.out.parent.mkdir(parents=True, exist_ok=True)
    done = [json.loads(line) for line in options.out.read_text().splitlines()] if options.out.exists() else []
    finished = {(row["spec"], row["seed"], row["epochs"]) for row in done}
    with ProcessPoolExecutor(options.workers, max_tasks_per_child=1) as pool:
        running = [
            pool.submit(trial, options.recipe, spec, options.seed, options.epochs, options.epsilon)
            for spec in dict.fromkeys(specs)
            if (spec, options.seed, options.epochs) not in finished
        ]
        for future in as_completed(running):
            row = future.result()
            with options.out.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(f"held-out {row['heldout']:.4f}  {row['seconds']:.0f} s  {row['spec']}", flush=True)


if __name__ == "__main__":
    main()
