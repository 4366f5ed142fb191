"""Folders for the tests of reports: copies of committed records, changed; nothing is trained."""

from __future__ import annotations

import copy
import json
from pathlib import Path

RESULTS = Path(__file__).parent.parent / "results" / "mnist-cnn"


def run_folder(folder: Path, of: str = "fiber-plus-1", change=None, metrics: bool = True) -> Path:
    """A run directory like the committed run `of`; change(record) may alter its record."""
    record = copy.deepcopy(json.loads((RESULTS / of / "record.json").read_text()))
    if change:
        change(record)
    folder.mkdir(parents=True)
    (folder / "record.json").write_text(json.dumps(record))
    if metrics:
        (folder / "metrics.jsonl").write_text((RESULTS / of / "metrics.jsonl").read_text())
    return folder


def many(root: Path, count: int) -> Path:
    """`count` runs of seven methods at four epsilons, with results that scatter."""
    names = ("fiber-1", "fiber-plus-1", "disk-1", "dp-sgd-1", "dp-adamw-1", "doppler-1", "mf-dp-ftrl-1")
    for i in range(count):
        epsilon = (0.5, 1.0, 2.0, 4.0)[i // len(names) % 4]

        def change(record, epsilon=epsilon, i=i):
            record["privacy"]["epsilon"] = epsilon
            record["result"]["test"] += 1e-3 * (i % 11 - 5)

        run_folder(root / f"run-{i:03d}", names[i % len(names)], change)
    return root


def comparison(folder: Path) -> Path:
    for seed in range(3):
        for of in ("fiber-1", "dp-sgd-1"):

            def change(record, seed=seed):
                record["seed"], record["keys"] = seed, "seeded"
                record["result"]["test"] += 0.002 * seed

            run_folder(folder / "runs" / f"{of[:-2]}-eps1-seed{seed}", of, change)
    rows = [
        {"method": method, "epsilon": 1.0, "n": 3, "mean": mean, "std": 0.002, "ci95": [mean - 0.005, mean + 0.005], "trials": 5}
        for method, mean in (("fiber", 0.9625), ("dp-sgd", 0.9678))
    ]
    pair = {"method": "dp-sgd", "against": "fiber", "epsilon": 1.0, "n": 3, "mean": 0.0053, "std": 0.0, "ci95": [0.0053, 0.0053]}
    found = {
        "rows": rows,
        "differences": [pair],
        "warnings": [],
        "note": "",
        "settings": {"recipe": "mnist-cnn", "epochs": 16, "data": "/secret/place"},
    }
    (folder / "comparison.json").write_text(json.dumps(found))
    return folder


def searched(folder: Path) -> Path:
    tried = [{"lr": lr} for lr in (1e-3, 2e-3, 4e-3, 8e-3)] + [
        {"lr": 2e-3, **more} for more in ({"kappa": 0.7, "gamma": 0.8}, {"kappa": 0.9, "gamma": 0.6}, {"omega": 0.6}, {"omega": 0.8})
    ]
    trials = [
        {"number": i, "stage": "base", "options": options, "heldout": 0.8 + 0.01 * i, "epsilon": 1.0, "std_ratio": 1.001, "seconds": 3.0}
        for i, options in enumerate(tried)
    ]
    best = {"options": tried[-1], "heldout": trials[-1]["heldout"]}
    folder.mkdir(parents=True)
    found = {
        "recipe": "mnist-cnn",
        "method": "fiber",
        "epsilon": 1.0,
        "seed": 100,
        "budget": 8,
        "best": best,
        "trials": trials,
        "note": "Held out.",
    }
    (folder / "sweep.json").write_text(json.dumps(found))
    return folder


def ablated(root: Path) -> Path:
    omegas = [
        {
            "options": {"omega": w},
            "method": "fiber",
            "n": 2,
            "mean": 0.9 + w / 100,
            "std": 0.001,
            "ci95": [0.89, 0.93],
            "accuracies": [0.9, 0.92],
        }
        for w in (0.3, 0.6, 0.9)
    ]
    paper = [{"options": {"omega": 0.9}, "value": 93.0, "place": "Table 11"}]
    grid = [
        {
            "options": {"kappa": k, "gamma": g},
            "method": "fiber",
            "n": 1,
            "mean": 0.8 + k * g / 10,
            "std": None,
            "ci95": None,
            "accuracies": [0.8],
        }
        for k in (0.6, 0.7)
        for g in (0.7, 0.8)
    ]
    for name, axes, cells, theirs in (("omega", ["omega"], omegas, paper), ("geometry", ["kappa", "gamma"], grid, [])):
        (root / name).mkdir(parents=True)
        found = {"recipe": "mnist-cnn", "name": name, "epsilon": 1.0, "axes": axes, "cells": cells, "paper": theirs, "note": "Varied."}
        (root / name / "ablation.json").write_text(json.dumps(found))
    return root
