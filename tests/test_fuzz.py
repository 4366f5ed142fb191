"""Damaged and random input of every kind ends in one line or is accepted: no traceback, no hang, no file outside the folder it is given."""

from __future__ import annotations

import copy
import json
import random
import time
from pathlib import Path

import torch
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent

import fiberdp
from fiberdp.accounting import Ledger, read_ledger
from fiberdp.checkpoint import load_checkpoint, save_checkpoint
from fiberdp.cli import main
from fiberdp.planning import Plan

SECONDS = 5.0
VALUES = [
    None,
    True,
    False,
    0,
    1,
    -1,
    2**70,
    -(2**70),
    1e308,
    -1e-308,
    float("nan"),
    float("inf"),
    "",
    "x",
    "poisson",
    [],
    [1],
    {},
    {"type": "x"},
]


def damaged(data: bytes, rng: random.Random) -> bytes:
    """Bits turned, bytes left out, doubled, overwritten, or the end cut off."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 5))):
        at, length = rng.randrange(len(changed) + 1), rng.choice((1, 2, 8, 60))
        way = rng.randrange(5)
        if way == 0 and at < len(changed):
            changed[at] ^= 1 << rng.randrange(8)
        elif way == 1:
            del changed[at : at + length]
        elif way == 2:
            changed[at:at] = changed[at : at + length]
        elif way == 3:
            changed[at : at + length] = bytes(rng.randrange(256) for _ in range(length))
        else:
            del changed[at:]
    return bytes(changed)


def mutated(tree, rng: random.Random):
    """The same JSON with one value replaced, one key lost, or one added."""
    tree = copy.deepcopy(tree)
    spots: list[tuple] = []

    def walk(node):
        for key in list(node) if isinstance(node, dict) else range(len(node)):
            spots.append((node, key))
            if isinstance(node[key], dict | list):
                walk(node[key])

    walk(tree)
    node, key = rng.choice(spots)
    way = rng.randrange(4)
    if way == 0 and isinstance(node, dict):
        del node[key]
    elif way == 1 and isinstance(node, dict):
        node["extra"] = rng.choice(VALUES)
    else:
        node[key] = rng.choice(VALUES)
    return tree


def one_line(call, *arguments) -> bool:
    """Does it return, or say what is wrong in one line?  Fails for any other exception, and for more than 5 s."""
    began = time.monotonic()
    try:
        call(*arguments)
        accepted = True
        message = "accepted"
    except (ValueError, OSError) as error:
        message, accepted = str(error), False
    assert message
    assert "\n" not in message
    assert time.monotonic() - began < SECONDS
    return accepted


def test_4000_damaged_ledgers(tmp_path):
    path = tmp_path / "ledger.jsonl"
    with Ledger(path, {"delta": 1e-5, "relation": "add_or_remove_one", "accountant": "pld"}) as ledger:
        for step in range(4):
            ledger.spend(step, PoissonSampledDpEvent(0.1, GaussianDpEvent(1.5)))
        ledger.finish()
    whole, rng = path.read_bytes(), random.Random(0)
    right = read_ledger(path)
    accepted = 0
    for _ in range(4000):
        path.write_bytes(damaged(whole, rng))
        if one_line(read_ledger, path):
            accepted += 1
            found = read_ledger(path)  # what is left may be shorter, but says nothing else
            assert found.events == right.events[: len(found.events)]
            assert found.terms in (None, right.terms)
    assert accepted < 2000


def test_3000_mutated_plans():
    rng = random.Random(1)
    for name in ("fiber", "mf-dp-ftrl", "doppler"):
        options = {"bands": 4} if name == "mf-dp-ftrl" else {}
        config = fiberdp.plan(
            method=fiberdp.method(name, lr=0.01, **options), num_examples=1000, batch_size=100, steps=20, noise_multiplier=1.0, delta=1e-5,
            clip_norm=1.0,
        ).to_json()  # fmt: skip
        config = json.loads(json.dumps(config))
        assert json.loads(json.dumps(Plan.from_json(config).to_json())) == config
        for _ in range(1000):
            one_line(Plan.from_json, mutated(config, rng))


def test_1500_damaged_checkpoints(tmp_path):
    save_checkpoint(tmp_path / "resume", {"theta": torch.zeros(3), "t": torch.ones(1)}, {"step": 3, "keys": {}, "config": {"a": 1}})
    (path,) = (tmp_path / "resume").iterdir()
    whole, rng = path.read_bytes(), random.Random(2)
    for _ in range(1500):
        path.write_bytes(damaged(whole, rng))
        one_line(load_checkpoint, tmp_path / "resume")
    assert sorted(p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*")) == ["resume", f"resume/{path.name}"]


WORDS = [
    "account", "audit", "train", "recipes", "check", "diagnose", "bench",
    "--epsilon", "--delta", "--num-examples", "--batch-size", "--steps", "--noise-multiplier", "--sampling", "--groups", "--accountant",
    "--json", "--ledger", "--unfinished", "--out", "--method", "--engine", "--",
    "1", "0", "-1", "nan", "1e999", "1e-5", "100", "x", "", "poisson", "shuffle", "cyclic", "nowhere", "é",
]  # fmt: skip


def test_1500_command_lines(tmp_path, monkeypatch, capsys):
    """Of `account` alone, and of others with a name that does not exist, since a right line would train."""
    monkeypatch.chdir(tmp_path)
    rng = random.Random(3)
    for _ in range(1500):
        line = [rng.choice(WORDS[7:]) for _ in range(rng.randrange(10))]
        line = ["account", *line] if rng.random() < 0.7 else [rng.choice(["audit", "train", "check", "diagnose"]), "no-such-thing", *line]
        began = time.monotonic()
        code = main(line)
        out, err = capsys.readouterr()
        assert code in (0, 1, 2), line
        assert "Traceback" not in out + err, line
        assert code == 0 or err.count("\n") <= 1 or line[-1:] == ["--help"], (line, err)
        assert time.monotonic() - began < 2 * SECONDS, line
    assert not list(Path(tmp_path).iterdir())
