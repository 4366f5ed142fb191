"""Tables of the hub, read whole into memory: from Parquet files in the hub's layout, or by name.

where                      what is read                         what is written
--data DIR, FIBERDP_DATA   Parquet files in the hub's layout    nothing
the hub, by name           the same rows, streamed              the hub client keeps the card, a few kB
"""

from __future__ import annotations

import importlib
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROWS_PER_READ = 10_000
PATIENCE = 20.0  # seconds for the hub's first answer


@dataclass(frozen=True)
class Table:
    """hub_name, config: what `load_dataset` is given.  folders: where files may lie below --data, tried in this order.

    splits: ours -> the hub's name first, then other names that files may have.
    """

    hub_name: str
    folders: tuple[str, ...]
    splits: Mapping[str, tuple[str, ...]]
    config: str | None = None


def data_folder(data_dir: str | os.PathLike[str] | None) -> Path | None:
    """--data, or the environment variable FIBERDP_DATA; None: the hub."""
    given = (os.environ.get("FIBERDP_DATA") or None) if data_dir is None else data_dir
    return None if given is None else Path(given).expanduser()


def read(table: Table, data_dir: str | os.PathLike[str] | None = None) -> dict[str, Any]:
    """{split: rows}, rows being a `datasets.Dataset` in memory.

    data_dir: the folder that holds the files of every split, or its parent.  None takes the environment variable FIBERDP_DATA, and
    without that the hub.

    ValueError: a folder or file is missing or damaged.  ConnectionError: the hub cannot be read.  ImportError: the recipes extra is
    not installed.
    """
    found = parquet_files(table, data_dir)
    return {name: _read(files, table, name) for name, files in found.items()} if found else _from_hub(table)


def parquet_files(table: Table, data_dir: str | os.PathLike[str] | None) -> dict[str, list[Path]]:
    """The files of each split; {} where no folder is named, so that the hub is read.  ValueError if one is missing."""
    root = data_folder(data_dir)
    if root is None:
        return {}
    hint = f"Give --data DIR (or FIBERDP_DATA), the folder of {table.hub_name}'s Parquet files or its parent."
    if not root.is_dir():
        raise ValueError(f"data_dir={str(root)!r}: must be a folder; data are read from one. {hint}")
    found: dict[str, list[Path]] = {}
    for folder in (root, *(root / name for name in table.folders)):
        found = {name: _files(folder, splits) for name, splits in table.splits.items()}
        if any(found.values()):
            break
    missing = [f"{table.splits[name][0]}-*.parquet" for name, files in found.items() if not files]
    if missing:
        raise ValueError(
            f"data_dir={str(root)!r}: no {' and no '.join(missing)} there or in {'/ or '.join(table.folders)}/ "
            f"below it, and a recipe needs {'both' if len(table.splits) == 2 else 'all'} splits. {hint}"
        )
    return found


def columns(dataset: Any, names: tuple[str, ...], table: Table, where: str) -> list[Any]:
    """The named columns, as Arrow arrays.  ValueError if one is missing or there are no rows."""
    if not set(names) <= set(dataset.column_names):
        raise ValueError(
            f"{where}: has the columns {', '.join(dataset.column_names)}, but {' and '.join(names)} are "
            f"needed, because the recipe reads them. Give the files of {table.hub_name}."
        )
    if len(dataset) == 0:
        raise ValueError(f"{where}: has no rows; a split needs at least 1. Fetch {table.hub_name} again.")
    whole = dataset.with_format("arrow")[:]
    return [whole[name] for name in names]


def labels(column: Any, num_classes: int, where: str) -> Tensor:
    """int64 [N].  ValueError if one is missing or outside [0, num_classes)."""
    if not extra("pyarrow.types").is_integer(column.type) or column.null_count:
        raise ValueError(
            f"{where}: labels are {column.type} with {column.null_count} missing; each must be a whole "
            "number, because it is the index of a class. Number the classes from 0 and drop unlabelled rows."
        )
    label = torch.tensor(column.to_numpy(), dtype=torch.int64)
    low, high = int(label.min()), int(label.max())
    if low < 0 or high >= num_classes:
        raise ValueError(
            f"{where}: labels run from {low} to {high}; they must lie in [0, {num_classes - 1}], because the "
            f"data set has {num_classes} classes. Drop unlabelled rows, or give the right data set."
        )
    return label


def extra(module: str) -> Any:
    """Import a module that comes with the recipes extra."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"{module.partition('.')[0]} is not installed, and this recipe needs it. Run: pip install fiberdp[recipes]"
        ) from error


def ask_hub(name: str, kind: str) -> None:
    """Ask the hub whether it has `name`, a "model" or "dataset", before a client of it reads.  Raises what the hub's client raises.

    Without network the clients that read try again for half a minute and print each time; asked like this they fail at once, and quietly.
    """
    getattr(extra("huggingface_hub"), f"{kind}_info")(name, timeout=PATIENCE)


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


def _files(folder: Path, splits: tuple[str, ...]) -> list[Path]:
    """The files of the first of these names that has any."""
    return next((files for split in splits if (files := sorted(folder.glob(f"{split}-*.parquet")))), [])


def _read(files: list[Path], table: Table, split: str) -> Any:
    """The Parquet files as one `datasets.Dataset` in memory.

    Not by `load_dataset("parquet", ...)`: even when streaming it leaves lock files in the cache folder, and
    it reports each load to a server over HTTP.
    """
    pyarrow, parquet, _ = extra("pyarrow"), extra("pyarrow.parquet"), extra("datasets")
    try:
        rows = pyarrow.concat_tables([parquet.read_table(file, partitioning=None) for file in files])
        return _in_memory(rows.replace_schema_metadata(), table, split)  # what a file says of its own columns is not needed
    except Exception as error:  # A damaged file can make pyarrow raise ArrowException, OSError, UnicodeDecodeError, ….
        raise ValueError(
            f"{', '.join(map(str, files))}: must be readable Parquet files with one schema, because together "
            f"they are one split ({one_line(error)}). Fetch them again from {table.hub_name}."
        ) from error


def _from_hub(table: Table) -> dict[str, Any]:
    """Stream the splits into memory; what the builder must write goes to a folder that is deleted."""
    datasets, pyarrow = extra("datasets"), extra("pyarrow")
    splits = {}
    try:
        ask_hub(table.hub_name, "dataset")
        with tempfile.TemporaryDirectory(prefix="fiberdp-") as scratch:
            config = () if table.config is None else (table.config,)
            hub = datasets.load_dataset(table.hub_name, *config, streaming=True, cache_dir=scratch)
            for name, (split, *_) in table.splits.items():
                batches = hub[split].with_format("arrow").iter(batch_size=ROWS_PER_READ)
                splits[name] = _in_memory(pyarrow.concat_tables(list(batches)), table, name)
    except Exception as error:  # The hub's clients share no base class: OSError, httpx.HTTPError, KeyError.
        raise ConnectionError(
            f"{table.hub_name}: cannot be read from the Hugging Face hub, where data come from if no folder "
            f"is given ({type(error).__name__}: {one_line(error)}). Give --data DIR (or FIBERDP_DATA), a "
            "folder of its Parquet files."
        ) from error
    return splits


def _in_memory(rows: Any, table: Table, split: str) -> Any:
    """Wrap an Arrow table.  Without a fingerprint the constructor would hash every byte to make one."""
    return extra("datasets").Dataset(rows, fingerprint=f"fiberdp-{table.folders[0]}-{split}")
