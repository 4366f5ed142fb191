"""Images that do not fit into memory: read and decoded when a batch asks for them.

where                      what is read                           what is written
--data DIR, FIBERDP_DATA   Parquet files in the hub's layout      `datasets` makes them one file in its cache, once
the hub, by name           the same rows                          the download, in the cache of `datasets`
"""

from __future__ import annotations

import hashlib
import io
import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fiberdp.recipes.tables import Table, columns, extra, labels, one_line, parquet_files


@dataclass(frozen=True)
class ImageFiles:
    """A data set of encoded images of any size: its table on the hub and its columns."""

    table: Table
    image_column: str
    label_column: str
    num_classes: int

    @property
    def hub_name(self) -> str:
        return self.table.hub_name


IMAGENET = ImageFiles(
    Table("ILSVRC/imagenet-1k", ("imagenet-1k",), {"train": ("train",), "test": ("validation",)}), "image", "label", num_classes=1000
)


class EncodedImages:
    """A source (`fiberdp.sampling.source`): the rows of a `datasets.Dataset` as {"image": uint8 [b, 3, s, s], "label": int64 [b]}.

    The shorter side is scaled to 8/7 of s and the middle cut out, so that an image is read the same way in training and in evaluation;
    what varies is the augmentation's.
    """

    def __init__(self, dataset: Any, label: Tensor, source: ImageFiles, size: int, where: str) -> None:
        self.dataset, self.label, self.source, self.size, self.where = dataset, label, source, size, where

    def __len__(self) -> int:
        return len(self.label)

    def take(self, indices: Tensor) -> dict[str, Tensor]:
        found = self.dataset[indices.tolist()][self.source.image_column] if len(indices) else []
        images = [self._image(each, int(row)) for each, row in zip(found, indices)]
        image = torch.stack(images) if images else torch.zeros(0, 3, self.size, self.size, dtype=torch.uint8)
        return {"image": image, "label": self.label[indices]}

    def fingerprint(self) -> str:
        """Of the rows as `datasets` knows them, and of the labels: reading every image would take as long as an epoch."""
        digest = hashlib.sha256(f"{self.dataset._fingerprint} {self.size} ".encode())
        digest.update(self.label.numpy().data)
        return digest.hexdigest()

    def _image(self, encoded: dict[str, Any], row: int) -> Tensor:
        image_module, numpy = extra("PIL.Image"), extra("numpy")
        try:
            with image_module.open(io.BytesIO(encoded["bytes"]) if encoded["bytes"] else encoded["path"]) as opened:
                image = opened.convert("RGB")
        except Exception as error:  # Pillow raises what its parsers meet: OSError, SyntaxError, DecompressionBombError, ….
            raise ValueError(
                f"{self.where}: the image of row {row} cannot be decoded ({one_line(error)}); every row must have one, because rows are "
                "drawn by index. Fetch the files again."
            ) from error
        scale = self.size * 8 / 7 / min(image.size)
        image = image.resize([max(self.size, round(scale * side)) for side in image.size], image_module.Resampling.BILINEAR)
        left, top = ((side - self.size) // 2 for side in image.size)
        return torch.from_numpy(numpy.array(image.crop((left, top, left + self.size, top + self.size)))).permute(2, 0, 1)


def load_image_files(source: ImageFiles, data_dir: str | os.PathLike[str] | None, *, size: int, held_out: int) -> dict[str, EncodedImages]:
    """{"train", "heldout", "test"}; the last `held_out` training rows are held out, of a sample a quarter at most.

    ValueError: a file or column is missing, or a label outside [0, num_classes).  ConnectionError: the hub cannot be read.
    """
    splits = {name: _dataset(source.table, name, data_dir) for name in source.table.splits}
    found = {}
    for name, dataset in splits.items():
        where = f"{source.table.folders[0]} {name}"
        bare = dataset.remove_columns(source.image_column) if source.image_column in dataset.column_names else dataset
        (column,) = columns(bare, (source.label_column,), source.table, where)  # without the images, which do not fit into memory
        columns(dataset.select(range(min(1, len(dataset)))), (source.image_column,), source.table, where)
        encoded = dataset.select_columns([source.image_column]).cast_column(source.image_column, extra("datasets").Image(decode=False))
        found[name] = encoded, labels(column, source.num_classes, where), where
    dataset, label, where = found["train"]
    cut = len(label) - min(held_out, len(label) // 4)
    test, test_label, test_where = found["test"]
    return {
        "train": EncodedImages(dataset.select(range(cut)), label[:cut], source, size, where),
        "heldout": EncodedImages(dataset.select(range(cut, len(label))), label[cut:], source, size, where),
        "test": EncodedImages(test, test_label, source, size, test_where),
    }


def _dataset(table: Table, split: str, data_dir: str | os.PathLike[str] | None) -> Any:
    datasets, files = extra("datasets"), parquet_files(table, data_dir)
    try:
        if files:
            return datasets.Dataset.from_parquet([str(file) for file in files[split]])
        return datasets.load_dataset(table.hub_name, split=table.splits[split][0])
    except Exception as error:  # the clients of the hub and the readers of files share no base class
        if files:
            raise ValueError(
                f"{', '.join(map(str, files[split]))}: must be readable Parquet files with one schema, because together they are one split "
                f"({one_line(error)}). Fetch them again from {table.hub_name}."
            ) from error
        raise ConnectionError(
            f"{table.hub_name}: cannot be read from the Hugging Face hub, where data come from if no folder is given "
            f"({type(error).__name__}: {one_line(error)}). Give --data DIR (or FIBERDP_DATA), a folder of its Parquet files."
        ) from error
