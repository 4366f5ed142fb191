"""The data of the image recipes, whole and in memory: {"train": {"image", "label"}, "test": {...}}.

From Parquet files or the hub (`tables.py`), or, for `load_digits`, scikit-learn's copy of UCI digits.

Images are tensors `[N, C, H, W]`, labels int64 `[N]`, rows in the order of the files.  Nothing here computes
a statistic of the data: the models scale the pixels, by constants that no example decides (`models.py`).
"""

from __future__ import annotations

import io
import os
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fiberdp import _validate
from fiberdp.recipes.tables import Table, columns, extra, labels, one_line, read

Rows = dict[str, Tensor]

CHANNELS = {"L": 1, "RGB": 3}
FORMATS = ("PNG", "JPEG", "WEBP")  # others of Pillow's would start programs (EPS) or write to stderr (TIFF)
DIGITS_TEST_STRIDE = 7


@dataclass(frozen=True)
class ImageSource:
    """An image data set: its name on the hub, its folder under --data, its columns and splits."""

    hub_name: str
    folder: str
    image_column: str
    label_column: str
    num_classes: int
    train_split: str = "train"
    test_split: str = "test"
    other_label: str | None = None  # what the label's column is called in files that lack `label_column`

    @property
    def table(self) -> Table:
        return Table(self.hub_name, (self.folder,), {"train": (self.train_split,), "test": (self.test_split,)})


MNIST = ImageSource("ylecun/mnist", "mnist", "image", "label", num_classes=10)
FASHION_MNIST = ImageSource("zalando-datasets/fashion_mnist", "fashion_mnist", "image", "label", num_classes=10)
CIFAR10 = ImageSource("uoft-cs/cifar10", "cifar10", "img", "label", num_classes=10)
CIFAR100 = ImageSource("uoft-cs/cifar100", "cifar100", "img", "fine_label", num_classes=100, other_label="label")


def load_images(source: ImageSource, data_dir: str | os.PathLike[str] | None = None) -> dict[str, Rows]:
    """Return {"train": rows, "test": rows}, rows being {"image": uint8 [N, C, H, W], "label": int64 [N]}.

    data_dir: the folder that holds train-*.parquet and test-*.parquet, or its parent (`source.folder` is then
    looked up in it).  None takes the environment variable FIBERDP_DATA, and without that the hub.

    ValueError: a folder, file or column is missing, a label lies outside [0, num_classes), an image cannot be
    decoded or differs from the first in size or channels.  ConnectionError: the hub cannot be read.
    ImportError: the recipes extra is not installed.
    """
    rows = {name: _decode(dataset, source, name) for name, dataset in read(source.table, data_dir).items()}
    train, test = (tuple(rows[name]["image"].shape[1:]) for name in ("train", "test"))
    if train != test:
        raise ValueError(
            f"{source.folder}: train images are {train} and test images {test} (channels, height, width); "
            "they must agree, because one model reads both. Give the two splits of the same data set."
        )
    return rows


def load_digits() -> dict[str, Rows]:
    """Return scikit-learn's 1,797 handwritten digits as `load_images` does, but as float32 in [0, 1].

    A pixel is a count 0..16, so v / 16 is exact in float32, while 8-bit grey levels would round it.  Every
    seventh row (0, 7, 14, ...) is a test row: 257 test, 1,540 train, the same on every machine.  Seven,
    because the labels run 0..9 in cycles and a stride that shares a factor with ten would favour some digits.
    Each writer has rows on both sides, so test accuracy says nothing about unseen writers.

    >>> {name: tuple(rows["image"].shape) for name, rows in load_digits().items()}
    {'train': (1540, 1, 8, 8), 'test': (257, 1, 8, 8)}
    """
    digits = extra("sklearn.datasets").load_digits()
    image = torch.from_numpy(digits.images).to(torch.float32).div(16).unsqueeze(1)
    label = torch.from_numpy(digits.target).to(torch.int64)
    test = torch.arange(len(label)) % DIGITS_TEST_STRIDE == 0
    return {
        "train": {"image": image[~test], "label": label[~test]},
        "test": {"image": image[test], "label": label[test]},
    }


def split_held_out(train: Rows, count: int) -> tuple[Rows, Rows]:
    """Return (train, held_out): the last `count` training rows are held out and never trained on.

    Their position alone decides, not their content or a seed, so every run and method measures on the same
    rows (CIFAR-10 with 5,000: rows 45,000-49,999).  The accounting's N is the size of the first part; metrics
    on the second stand outside epsilon.  count = 0 holds nothing out.  Both parts are views, not copies.

    >>> rows = {"image": torch.zeros(5, 1, 2, 2), "label": torch.arange(5)}
    >>> [part["label"].tolist() for part in split_held_out(rows, 2)]
    [[0, 1, 2], [3, 4]]
    """
    _validate.count("held_out", count, low=0, why="It is the number of training rows that are set aside.")
    size = len(train["label"])
    if count >= size:
        raise ValueError(f"held_out={count}: must be below the {size} training rows, or nothing is left to train on. Hold out fewer.")
    cut = size - count
    return {key: rows[:cut] for key, rows in train.items()}, {key: rows[cut:] for key, rows in train.items()}


def _decode(dataset: Any, source: ImageSource, split: str) -> Rows:
    where = f"{source.folder} {split}"
    given = source.label_column
    if source.other_label and given not in dataset.column_names and source.other_label in dataset.column_names:
        given = source.other_label
    image, label = columns(dataset, (source.image_column, given), source.table, where)
    classes = labels(label, source.num_classes, where)
    with warnings.catch_warnings(action="ignore"):  # of Pillow's: an image is decoded, or it is an error
        return {"image": _images(image, where), "label": classes}


def _images(column: Any, where: str) -> Tensor:
    """Decode a column of encoded images.  One thread: Pillow holds the interpreter lock."""
    if not extra("pyarrow.types").is_struct(column.type) or column.type.get_field_index("bytes") < 0:
        raise ValueError(
            f"{where}: images are {column.type}; they must be a struct with a field `bytes` ({', '.join(FORMATS)}), "
            "because that is the hub's layout. Save the data set with a `datasets.Image` feature."
        )
    extra("PIL.Image")
    pixels: list[bytes] = []
    first: Any = None
    for chunk in column.chunks:
        for raw in chunk.field("bytes").to_pylist():
            row = len(pixels)
            try:
                image = _open(raw, first)
                first = first or image
                fits = (image.size, image.mode) == (first.size, first.mode) and image.mode in CHANNELS
                pixels.append(image.tobytes() if fits else b"")
            except Exception as error:  # Pillow raises what its parsers meet: OSError, SyntaxError, DecompressionBombError, ….
                reason = f"it is no {', '.join(FORMATS)}" if type(error).__name__ == "UnidentifiedImageError" else one_line(error)
                raise ValueError(
                    f"{where}: the image of row {row} cannot be decoded ({reason}); every row must "
                    "have one, because rows are drawn by index. Fetch the files again."
                ) from error
            if not fits:
                raise ValueError(
                    f"{where}: the image of row {row} is {image.width}x{image.height} {image.mode} and "
                    f"that of row 0 {first.width}x{first.height} {first.mode}; all must share one size and a "
                    f"mode of {', '.join(CHANNELS)}, because they become one tensor. Resize or convert them."
                )
    shape = (len(pixels), first.height, first.width, CHANNELS[first.mode])
    flat = torch.frombuffer(bytearray().join(pixels), dtype=torch.uint8)
    return flat.view(shape).permute(0, 3, 1, 2).contiguous()


def _open(raw: bytes, first: Any) -> Any:
    """Open an image, trying the first one's format first: asking each in turn doubles CIFAR-10's time."""
    from PIL import Image, UnidentifiedImageError

    if first is not None:
        try:
            return Image.open(io.BytesIO(raw), formats=(first.format,))
        except UnidentifiedImageError:
            pass
    return Image.open(io.BytesIO(raw), formats=FORMATS)
