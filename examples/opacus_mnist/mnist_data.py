"""MNIST from the Parquet files below FIBERDP_DATA/mnist (the hub's ylecun/mnist), or scikit-learn's 8x8 digits where that is not set."""

from __future__ import annotations

import io
import os
from pathlib import Path

import torch
from torch.utils.data import TensorDataset


def train_and_test() -> tuple[TensorDataset, TensorDataset]:
    """(training rows, test rows): images float32 [N, 1, H, W] in [0, 1], labels int64 [N]."""
    folder = os.environ.get("FIBERDP_DATA")
    if folder and (Path(folder) / "mnist").is_dir():
        return _parquet(Path(folder) / "mnist", "train"), _parquet(Path(folder) / "mnist", "test")
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    rows = torch.from_numpy(images).float().view(-1, 1, 8, 8) / 16, torch.from_numpy(labels)
    return TensorDataset(*(leaf[:1536] for leaf in rows)), TensorDataset(*(leaf[1536:] for leaf in rows))


def _parquet(folder: Path, split: str) -> TensorDataset:
    import numpy as np
    import pyarrow.parquet as pq
    from PIL import Image

    tables = [pq.read_table(path, columns=["image", "label"]).to_pydict() for path in sorted(folder.glob(f"{split}-*.parquet"))]
    images = [np.asarray(Image.open(io.BytesIO(image["bytes"]))) for table in tables for image in table["image"]]
    labels = [label for table in tables for label in table["label"]]
    return TensorDataset(torch.from_numpy(np.stack(images)).float().unsqueeze(1) / 255, torch.tensor(labels))
