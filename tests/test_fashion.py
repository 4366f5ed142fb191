"""Fashion-MNIST's idx files become Parquet that the recipe reads, pixel for pixel."""

from __future__ import annotations

import gzip
import struct

import numpy as np
import pytest
import torch

from fiberdp.recipes import RECIPES
from loading import script


@pytest.fixture
def convert():
    pytest.importorskip("datasets")
    return script("fashion_parquet")


def write_idx(path, array):
    path.write_bytes(
        gzip.compress(struct.pack(">BBBB", 0, 0, 8, array.ndim) + struct.pack(f">{array.ndim}i", *array.shape) + array.tobytes())
    )


def test_idx_files_arrive_at_the_recipe_as_they_are(convert, tmp_path):
    random = np.random.default_rng(0)
    made = {
        part: (random.integers(0, 256, (n, 28, 28), np.uint8), random.integers(0, 10, n, np.uint8))
        for part, n in (("train", 5003), ("t10k", 4))
    }
    for part, (images, labels) in made.items():
        write_idx(tmp_path / f"{part}-images-idx3-ubyte.gz", images)
        write_idx(tmp_path / f"{part}-labels-idx1-ubyte.gz", labels)
    convert.main(tmp_path, tmp_path / "data" / "fashion_mnist")
    rows = RECIPES["fashion-cnn"]().load(str(tmp_path / "data"))
    assert {name: len(part["label"]) for name, part in rows.items()} == {"train": 3, "heldout": 5000, "test": 4}
    assert torch.equal(rows["test"]["image"][:, 0], torch.from_numpy(made["t10k"][0]))
    assert torch.equal(torch.cat([rows["train"]["label"], rows["heldout"]["label"]]), torch.from_numpy(made["train"][1]).long())


def test_a_file_that_is_no_idx_file_of_bytes_is_refused(convert, tmp_path):
    (tmp_path / "x.gz").write_bytes(gzip.compress(b"\0\0\x0d\x01abcd"))
    with pytest.raises(ValueError, match="must be an idx file of unsigned bytes"):
        convert.idx(tmp_path / "x.gz")
