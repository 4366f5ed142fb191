"""python killing.py FOLDER KILLS: kill a real run at random instants, resume it, and compare it with the uninterrupted one.

A process of its own, that forks one child a run: imports are paid once, and the parent has no threads that a fork would miss.
Prints one JSON document.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

from fiberdp import run_directory
from fiberdp.experiment import fit
from fiberdp.statement import account, account_ledger

FILES = ("ledger.jsonl", "metrics.jsonl", "release/model.safetensors", "release/ledger_summary.json", "release/config.json")


def train(out: Path, *, resume: bool) -> None:
    fit("digits", method="fiber", steps=40, seed=5, out=out, resume=resume, test=False)


def start(out: Path, *, resume: bool) -> int:
    child = os.fork()
    if child == 0:
        code = 1
        try:
            torch.set_num_threads(1)
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, 1)
            train(out, resume=resume)
            code = 0
        finally:
            os._exit(code)
    return child


def digests(out: Path) -> dict[str, str]:
    return {name: hashlib.sha256((out / name).read_bytes()).hexdigest() for name in FILES}


def stage(out: Path) -> str:
    """How far the run had come when it was killed."""
    if (out / "record.json").exists():
        return "after the record"
    if (out / "release").exists():
        return "writing the release"
    if not (out / "ledger.jsonl").exists():
        return "before the first step"
    return "training"


def main(folder: Path, kills: int) -> None:
    random.seed(20)
    run_directory.CHECKPOINT_SECONDS = 0.01  # so that most kills fall near one
    whole = folder / "whole"
    # prices are remembered, so that the children need not find sigma again
    account(num_examples=1300, batch_size=256, steps=40, delta=1300**-1.1, epsilon=4.0)
    assert os.waitpid(start(whole, resume=False), 0)[1] == 0
    began = time.monotonic()
    assert os.waitpid(start(folder / "again", resume=False), 0)[1] == 0
    seconds = time.monotonic() - began  # of a run that finds its caches warm, as those that are killed do
    expected, epsilon = digests(whole), json.loads((whole / "record.json").read_text())["privacy"]["epsilon"]
    assert digests(folder / "again") == expected
    found = []
    for i in range(kills):
        out, resume, stages, charged = folder / f"killed-{i}", False, [], []
        for _ in range(random.choice((1, 1, 2))):  # a third of the runs is killed again while it is resumed
            child = start(out, resume=resume)
            time.sleep(random.uniform(0, seconds))
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            stages.append(stage(out))
            if stages[-1] == "after the record":
                break
            resume = (out / "resume" / "checkpoint.safetensors").exists()
            if (out / "ledger.jsonl").exists() and (out / "ledger.jsonl").stat().st_size:
                charged.append(account_ledger(str(out / "ledger.jsonl"), unfinished=True)["steps"])
        if stages[-1] != "after the record":
            if not resume and out.exists():
                assert not (out / "ledger.jsonl").exists(), "charged before its keys were safe"
                for path in sorted(out.rglob("*"), reverse=True):
                    path.rmdir() if path.is_dir() else path.unlink()
            assert os.waitpid(start(out, resume=resume), 0)[1] == 0, f"run {i} could not be resumed after {stages}"
        record = json.loads((out / "record.json").read_text())
        found.append({
            "stages": stages, "charged": charged, "equal": digests(out) == expected, "epsilon": record["privacy"]["epsilon"],
            "from_ledger": account_ledger(str(out / "ledger.jsonl"))["epsilon"],
        })  # fmt: skip
    print(json.dumps({"epsilon": epsilon, "seconds": seconds, "runs": found}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
