"""Sentences with a label, or pairs of them, as tokens.

    rows   {"input_ids": int32 [N, L], "mask": bool [N, L], "length": int64 [N], "label": int64 [N]}

`mask` says which positions hold tokens; the rest is padding, which no example's gradient depends on.  Rows come as a `PaddedSource`, which
trims a batch to its longest row.  Nothing here computes a statistic of the data: the vocabulary is the pretrained model's, L is a constant.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fiberdp.recipes.data import split_held_out
from fiberdp.recipes.tables import Table, columns, extra, labels, read
from fiberdp.sampling.source import PaddedSource

HIDDEN = -1e9
"""Added to attention scores of padding: exp of it is 0 in every precision; -inf would make a row of padding alone NaN."""


@dataclass(frozen=True)
class TextTask:
    """A table, the columns of its one or two texts, the number of classes, and how many of the last training rows are held out."""

    table: Table
    texts: tuple[str, ...]
    num_classes: int
    held_out: int


def _glue(config: str, texts: tuple[str, ...], num_classes: int, validation: str = "validation") -> TextTask:
    splits = {"train": ("train",), "test": tuple(dict.fromkeys((validation, "validation")))}
    return TextTask(Table("nyu-mll/glue", (config, f"glue_sample_{config}"), splits, config), texts, num_classes, 1000)


# Of GLUE's own test rows the labels are not public: test is the validation split, here and in the literature.
SST2 = TextTask(Table("stanfordnlp/sst2", ("sst2",), {"train": ("train",), "test": ("validation",)}), ("sentence",), 2, 2000)
MNLI = _glue("mnli", ("premise", "hypothesis"), 3, "validation_matched")
QNLI = _glue("qnli", ("question", "sentence"), 2)
QQP = _glue("qqp", ("question1", "question2"), 2)


def load_text(
    task: TextTask, tokenizer: Callable[[], Any], max_length: int, data_dir: str | os.PathLike[str] | None = None
) -> dict[str, PaddedSource]:
    """{"train", "heldout", "test"}.  Texts are cut to max_length tokens, the longer of a pair first.

    The last `held_out` training rows by position are held out.  data_dir: see `tables.read`.  tokenizer: called after the rows were read.
    ValueError: besides those of `tables.read`, a label outside [0, num_classes), a text that is missing or no text.
    """
    found = {split: _texts_and_label(dataset, task, split) for split, dataset in read(task.table, data_dir).items()}
    encode = tokenizer()
    rows = {split: encoded(encode, texts, max_length) | {"label": label} for split, (texts, label) in found.items()}
    train, heldout = split_held_out(rows["train"], task.held_out)
    return {"train": PaddedSource(train), "heldout": PaddedSource(heldout), "test": PaddedSource(rows["test"])}


def encoded(tokenizer: Any, texts: list[list[str]], max_length: int) -> dict[str, Tensor]:
    """input_ids, mask and length of texts[0], or of pairs of texts[0] and texts[1]."""
    found = tokenizer(*texts, truncation=True, max_length=max_length, return_attention_mask=False)["input_ids"]
    return padded(found, tokenizer.pad_token_id)


def padded(tokens: list[list[int]], filling: int) -> dict[str, Tensor]:
    """Rows of different lengths as input_ids [N, longest], with mask and length.

    >>> padded([[5, 6], [7]], 0)["mask"]
    tensor([[ True,  True],
            [ True, False]])
    """
    length = torch.tensor([len(row) for row in tokens])
    mask = torch.arange(int(length.max())) < length[:, None]
    ids = torch.full(mask.shape, filling, dtype=torch.int32)
    ids[mask] = torch.tensor([token for row in tokens for token in row], dtype=torch.int32)
    return {"input_ids": ids, "mask": mask, "length": length}


def attended(mask: Tensor) -> Tensor:
    """[b, 1, 1, L], to be added to attention scores.  In this form: into a mask of two dimensions models look, which vmap cannot."""
    return torch.where(mask, 0.0, HIDDEN)[:, None, None, :]


def text_logits(model: nn.Module, batch: Any) -> Tensor:
    """[b, classes] of transformers' classifiers."""
    return model(input_ids=batch["input_ids"], attention_mask=attended(batch["mask"])).logits


def blank_text(length: int) -> dict[str, Tensor]:
    """One row of `length` tokens 0, with label 0."""
    ids = torch.zeros(1, length, dtype=torch.int32)
    return {
        "input_ids": ids,
        "mask": torch.ones_like(ids, dtype=torch.bool),
        "length": torch.full((1,), length),
        "label": torch.zeros(1, dtype=torch.int64),
    }


def texts_of(column: Any, name: str, where: str) -> list[str]:
    """A column of texts.  ValueError naming the first row that has none."""
    types = extra("pyarrow.types")
    if not (types.is_string(column.type) or types.is_large_string(column.type)):
        raise ValueError(
            f"{where}: column {name} holds {column.type}; it must hold text, because its tokens are what the model reads. "
            "Give the data set's own files."
        )
    texts = column.to_pylist()
    if column.null_count:
        raise ValueError(
            f"{where}: row {texts.index(None)} of column {name} is missing ({column.null_count} of {len(texts)} are); every row must "
            "have a text, because rows are drawn by index. Drop such rows before training."
        )
    return texts


def _texts_and_label(dataset: Any, task: TextTask, split: str) -> tuple[list[list[str]], Tensor]:
    where = f"{task.table.folders[0]} {split}"
    *texts, label = columns(dataset, (*task.texts, "label"), task.table, where)
    return [texts_of(column, name, where) for column, name in zip(texts, task.texts, strict=True)], labels(label, task.num_classes, where)
