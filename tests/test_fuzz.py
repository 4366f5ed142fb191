"""Damaged and random input of every kind ends in one line or is accepted: no traceback, no hang, no file outside the folder it is given."""

from __future__ import annotations

import copy
import io
import json
import math
import random
import struct
import time
import zlib
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent

import fiberdp
from fiberdp import cli
from fiberdp.accounting import Ledger, read_ledger
from fiberdp.checkpoint import load_checkpoint, save_checkpoint
from fiberdp.cli import main
from fiberdp.planning import Plan
from fiberdp.recipes.data import ImageSource, load_images

pyarrow = pytest.importorskip("pyarrow", reason="needs the recipes extra")
parquet = pytest.importorskip("pyarrow.parquet", reason="needs the recipes extra")
Image = pytest.importorskip("PIL.Image", reason="needs the recipes extra")

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


def one_line(call, *arguments, expected: str = "") -> bool:
    """Does it return, or say what is wrong in one line?  Fails for any other exception, and for more than 5 s.

    expected: part of what it says.
    """
    began = time.monotonic()
    try:
        call(*arguments)
        accepted = True
        message = "accepted"
    except (ValueError, OSError) as error:
        message, accepted = str(error), False
        assert expected in message
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


TINY = ImageSource("nobody/tiny", "tiny", "image", "label", num_classes=3)


def png(pixels) -> dict:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return {"bytes": buffer.getvalue(), "path": None}


def images(count: int, side: int = 4) -> list[dict]:
    return [png(pixels) for pixels in np.random.default_rng(side).integers(0, 256, (count, side, side), dtype=np.uint8)]


def write_table(path: Path, **columns) -> None:
    parquet.write_table(pyarrow.table(columns), path)


def write_splits(folder: Path, rows: list[dict]) -> Path:
    """A right data set; returns the file of its training rows."""
    folder.mkdir(exist_ok=True)
    for split in ("test", "train"):
        write_table(folder / f"{split}-0.parquet", image=rows, label=[i % 3 for i in range(len(rows))])
    return folder / "train-0.parquet"


def test_600_damaged_parquet_files(tmp_path):
    path = write_splits(tmp_path, images(6))
    whole, rng, right = path.read_bytes(), random.Random(4), load_images(TINY, tmp_path)
    accepted = 0
    for _ in range(600):
        path.write_bytes(damaged(whole, rng))
        accepted += one_line(load_images, TINY, tmp_path, expected="train")  # the file or the split is named
    assert 0 < accepted < 300
    path.write_bytes(whole)
    assert torch.equal(load_images(TINY, tmp_path)["train"]["image"], right["train"]["image"])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["test-0.parquet", "train-0.parquet"]


def test_400_damaged_images_in_whole_files(tmp_path):
    """PNG, JPEG and WebP are read; of what Pillow reads besides, some would start a program or print."""
    path, rng = write_splits(tmp_path, images(6)), random.Random(5)
    pixels, accepted = Image.fromarray(np.arange(16, dtype=np.uint8).reshape(4, 4)), {}
    for kind in ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "EPS", "PPM"):
        buffer = io.BytesIO()
        pixels.save(buffer, kind)
        write_table(path, image=[{"bytes": buffer.getvalue()}], label=[0])
        accepted[kind] = [one_line(load_images, TINY, tmp_path)]
        for _ in range(50):
            write_table(path, image=[{"bytes": damaged(buffer.getvalue(), rng)}], label=[0])
            accepted[kind].append(one_line(load_images, TINY, tmp_path))
    assert [kind for kind, right in accepted.items() if any(right)] == ["PNG", "JPEG"]  # a WebP is RGB, as the other split is not
    assert not all(accepted["PNG"])


def header(width: int, height: int) -> dict:
    """A PNG of any size that holds next to nothing."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    start = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
    return {"bytes": b"\x89PNG\r\n\x1a\n" + start + chunk(b"IDAT", zlib.compress(bytes(100))) + chunk(b"IEND", b"")}


def wrong_tables() -> dict[str, Any]:
    """By what is wrong: the columns of a well-formed file, or a whole table."""
    good, labels = images(6), pyarrow.array([0, 1, 2, 0, 1, 2])
    whole = pyarrow.table({"image": good, "label": labels})

    def both(image: Any = good, label: Any = labels) -> Any:
        return pyarrow.table({"image": image, "label": label})

    sizes = ((30_000, 30_000), (20_000, 5_000), (65_535, 65_535), (2**31 - 1, 1), (0, 4), (4, 5))
    return {
        **{f"an image of {w} x {h}": both([header(w, h), *good[1:]]) for w, h in sizes},
        **{f"row {row} of {side} pixels": both([*good[:row], *images(1, side), *good[row + 1 :]]) for row in (1, 5) for side in (1, 3, 5)},
        **{f"label {label}": both(label=pyarrow.array([0, 1, 2, 0, 1, label], kind)) for label, kind in (
            (3, "int64"), (-1, "int64"), (-(2**63), "int64"), (2**63, "uint64"), (2**64 - 1, "uint64"), (127, "int8"),
            (math.nan, "float64"), (1.0, "float32"), (None, "int64"),
        )},
        "labels of bool": both(label=[True] * 6), "labels of text": both(label=list("012012")), "no labels": both(label=[None] * 6),
        "lists of labels": both(label=[[0]] * 6), "labels that are images": both(label=good), "dates": both(label=[date(2000, 1, 1)] * 6),
        "a null image": both([None, *good[1:]]), "all images null": both([None] * 6),
        "null bytes": both([{"bytes": None, "path": "x"}] * 6),
        "text": both([{"bytes": "text"}] * 6), "lists": both([{"bytes": [1, 2]}] * 6), "numbers": both([{"bytes": 1}] * 6),
        "no bytes": both([{"path": "x"}] * 6), "binary": both([b"x"] * 6), "empty bytes": both([{"bytes": b""}] * 6),
        "no image": both([{"bytes": b"no image" * 100}] * 6), "a path only": both([{"bytes": None, "path": "/dev/zero"}] * 6),
        "no image column": whole.drop_columns("image"), "no label column": whole.drop_columns("label"),
        "other names": whole.rename_columns(["img", "y"]),
        "no columns": pyarrow.table({}), "no rows": whole.slice(0, 0),
        "two columns of a name": pyarrow.table([whole["image"], whole["label"], whole["label"]], names=["image", "label", "label"]),
    }  # fmt: skip


def with_metadata() -> list[Any]:
    """Right rows whose file says something else of its columns."""
    table = pyarrow.table({"image": images(6), "label": [0, 1, 2, 0, 1, 2]})
    said = ["not json", "[]", "{}", "null", '{"info": []}', '{"info": {"features": {"image": {"_type": "Nope"}}}}',
            '{"info": {"features": {"image": {"_type": "Value", "dtype": "zzz"}, "label": 1}}}']  # fmt: skip
    return [table.replace_schema_metadata({"huggingface": text}) for text in said]


def test_well_formed_parquet_files_with_wrong_rows(tmp_path, recwarn):
    path = write_splits(tmp_path, images(6))
    for what, table in wrong_tables().items():
        parquet.write_table(table, path)
        assert not one_line(load_images, TINY, tmp_path), what
    for table in with_metadata():
        parquet.write_table(table, path)
        assert one_line(load_images, TINY, tmp_path), table.schema.metadata
    path.write_bytes(b"")
    assert not one_line(load_images, TINY, tmp_path)
    path.unlink()
    assert not one_line(load_images, TINY, tmp_path)  # no file
    path.mkdir()
    assert not one_line(load_images, TINY, tmp_path)
    assert not list(recwarn)


def test_train_refuses_wrong_data_in_one_line_and_writes_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    path, rng = write_splits(tmp_path / "data", images(6, 28)), random.Random(6)
    whole = path.read_bytes()

    def train(out: str) -> tuple[int, str]:
        began = time.monotonic()
        code = main(["train", "mnist-cnn", "--data", "data", "--steps", "1", "--batch-size", "2", "--method", "dp-sgd", "--out", out])
        said = capsys.readouterr()
        assert "Traceback" not in said.out + said.err
        assert time.monotonic() - began < SECONDS or code == 0
        return code, said.err

    for table in list(wrong_tables().values())[::4]:
        parquet.write_table(table, path)
        code, said = train("out")
        assert (code, said.count("\n")) == (2, 1), said
    for _ in range(20):
        path.write_bytes(damaged(whole, rng))
        code, said = train("out")
        assert (code, said.count("\n")) == (2, 1), said
    path.unlink()
    assert train("out")[0] == 2
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["data", "test-0.parquet"]
    write_table(path, image=images(1, 28) * 5003, label=[1] * 5003)  # 5,000 are held out: what is right is trained on
    assert train("out")[0] == 0
    assert {p.relative_to(tmp_path).parts[0] for p in tmp_path.rglob("*")} == {"data", "out"}
    assert sorted(p.name for p in (tmp_path / "data").iterdir()) == ["test-0.parquet", "train-0.parquet"]


WORDS = [
    "account", "audit", "train", "recipes", "check", "diagnose", "bench",
    "--epsilon", "--delta", "--num-examples", "--batch-size", "--steps", "--noise-multiplier", "--sampling", "--groups", "--accountant",
    "--json", "--ledger", "--unfinished", "--out", "--method", "--engine", "--",
    "1", "0", "-1", "nan", "1e999", "1e-5", "100", "x", "", "poisson", "shuffle", "cyclic", "nowhere", "é",
]  # fmt: skip


def test_1500_command_lines(tmp_path, monkeypatch, capsys):
    """Of `account` alone, and of others with a name that does not exist, since a right line would train."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli, "app", typer.main.get_command(cli.app))  # which every call would make anew, nine tenths of its time
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
