"""Write Fashion-MNIST's idx files as Parquet in the hub's layout, for machines that have a package of them but no network.

    python scripts/fashion_parquet.py /usr/share/datasets/fashion-mnist data/fashion_mnist

The idx files are what the authors publish (Debian ships them as dataset-fashion-mnist); the columns are those of
zalando-datasets/fashion_mnist: a PNG and a label.
"""

from __future__ import annotations

import gzip
import io
import sys
from pathlib import Path

import numpy as np

PARTS = {"train": "train", "test": "t10k"}


def idx(path: Path) -> np.ndarray:
    """An idx file of bytes: two zeros, the type 8, the number of dimensions, the dimensions, the values."""
    raw = gzip.decompress(path.read_bytes())
    if raw[:3] != b"\0\0\x08":
        raise ValueError(f"{path}: must be an idx file of unsigned bytes, which begins with 00 00 08.")
    shape = np.frombuffer(raw, ">i4", raw[3], 4)
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * raw[3]).reshape(shape)


def main(source: Path, target: Path) -> None:
    from datasets import ClassLabel, Dataset, Features, Image
    from PIL import Image as pillow

    target.mkdir(parents=True, exist_ok=True)
    for split, part in PARTS.items():
        images, labels = (idx(source / f"{part}-{kind}.gz") for kind in ("images-idx3-ubyte", "labels-idx1-ubyte"))

        def png(image: np.ndarray) -> dict[str, bytes]:
            file = io.BytesIO()
            pillow.fromarray(image).save(file, "PNG")
            return {"bytes": file.getvalue()}

        columns = {"image": [png(image) for image in images], "label": labels.tolist()}
        Dataset.from_dict(columns, Features({"image": Image(), "label": ClassLabel(num_classes=10)})).to_parquet(
            target / f"{split}-00000-of-00001.parquet"
        )
        print(f"{split}: {len(labels)} rows")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
