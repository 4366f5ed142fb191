"""The model's own loss, one number an example.

A model of transformers reduces its loss over a batch.  Taken apart it is one of these, and which one is not read off the model's name: on
synthetic examples, one at a time, model(**row).loss is compared with each that fits the shape of the logits.

    loss           logits      labels         of one example
    single label   [b, c]      int [b]        cross-entropy
    regression     [b, c]      [b] or [b, c]  mean square error over its c outputs
    multi-label    [b, c]      float [b, c]   mean binary cross-entropy over its c labels
    next tokens    [b, T, v]   int [b, T]     mean cross-entropy of labels[1:] given logits[:-1] over its own labels that are not -100
    tokens         [b, T, v]   int [b, T]     the same without the shift

An example whose labels are all -100 has loss 0 and gradient 0 (CASES E07).  Where the model's reduction weighs examples by their number of
tokens, this one gives each example the same weight: per-example gradients are what is clipped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, pad

from fiberdp import _tree
from fiberdp.engines import LossFn
from fiberdp.engines.synthetic import DRAWS, REFUSALS, synthetic, without_dropout

IGNORED = -100
TOLERANCE = 1e-4  # relative, float32
ROWS = 3  # synthetic examples that a loss is told by

Each = Callable[[Tensor, Tensor, float], Tensor]
"""(logits, labels, label smoothing) -> [b]."""


def single_label(logits: Tensor, labels: Tensor, smoothing: float) -> Tensor:
    return cross_entropy(logits.float(), labels.view(-1).long(), ignore_index=IGNORED, reduction="none", label_smoothing=smoothing)


def regression(logits: Tensor, labels: Tensor, smoothing: float) -> Tensor:
    return (logits - labels.to(logits.dtype).view_as(logits)).square().flatten(1).mean(1)


def multi_label(logits: Tensor, labels: Tensor, smoothing: float) -> Tensor:
    return binary_cross_entropy_with_logits(logits, labels.to(logits.dtype), reduction="none").flatten(1).mean(1)


def tokens(logits: Tensor, labels: Tensor, smoothing: float) -> Tensor:
    # flat, because the classes come last in memory
    each = cross_entropy(
        logits.flatten(0, 1).float(), labels.flatten().long(), ignore_index=IGNORED, reduction="none", label_smoothing=smoothing
    )
    return each.view(labels.shape).sum(1) / (labels != IGNORED).sum(1).clamp(min=1)


def next_tokens(logits: Tensor, labels: Tensor, smoothing: float) -> Tensor:
    return tokens(logits, pad(labels[:, 1:], (0, 1), value=IGNORED), smoothing)


KINDS: dict[str, Each] = {
    "single label": single_label,
    "regression": regression,
    "multi-label": multi_label,
    "next tokens": next_tokens,
    "tokens": tokens,
}


def per_example(model: nn.Module, row: Any, *, smoothing: float, own: Callable[..., Tensor] | None) -> LossFn:
    """loss_fn(model, batch) -> Tensor[b] for batches of the structure of `row`, whose values are not read.

    smoothing: label smoothing.  own: a user's compute_loss_func(outputs, labels, num_items_in_batch=None), which must return [b]; what it
    returns is checked where the run is made.
    Raises ValueError if the rows have no labels, or if the model's own loss is none of `KINDS`.
    """
    if not isinstance(row, Mapping) or not isinstance(row.get("labels"), Tensor):
        fields = ", ".join(row) if isinstance(row, Mapping) else type(row).__name__
        raise ValueError(
            f"a batch of the training rows has {fields}: it must have labels, a tensor, because the loss is computed from them example by "
            "example. Name the column labels (or label), or use plan.private with a loss of your own."
        )
    if own is not None:

        def custom(model: nn.Module, batch: Any) -> Tensor:
            return own(model(**_inputs(batch)), batch["labels"], num_items_in_batch=None)

        return custom
    kind = _kind(model, row)
    if smoothing and kind in ("regression", "multi-label"):
        raise ValueError(f"label_smoothing_factor={smoothing:g} with a {kind} loss: only classes can be smoothed. Leave it out.")
    each = KINDS[kind]

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        return each(_logits(model(**_inputs(batch))), batch["labels"], smoothing)

    return loss_fn


def _inputs(batch: Any) -> dict[str, Any]:
    return {name: leaf for name, leaf in batch.items() if name != "labels"}


def _logits(outputs: Any) -> Tensor:
    return outputs["logits"] if isinstance(outputs, Mapping) else outputs[0] if isinstance(outputs, tuple) else outputs.logits


def _loss(outputs: Any) -> Tensor:
    return outputs["loss"] if isinstance(outputs, Mapping) else outputs[0]


def _kind(model: nn.Module, row: Mapping[str, Any]) -> str:
    """Which of `KINDS` the model's own loss is: the one that agrees with it on every synthetic example on which it is a number."""
    device = next(model.parameters()).device
    left, told, error = set(KINDS), 0, ""
    for draw in DRAWS:
        for seed in range(ROWS):
            one = synthetic(row, 1, torch.Generator().manual_seed(seed), draw)
            for mask in ("attention_mask", "pixel_mask"):
                if isinstance(one.get(mask), Tensor):
                    one[mask] = torch.ones_like(one[mask])  # nothing hidden: a row of padding alone tells nothing
            one = _tree.to(one, device)
            try:
                with torch.no_grad(), without_dropout(model):
                    whole, logits = _loss(model(**one)), _logits(model(**_inputs(one)))
            except (*REFUSALS, AttributeError, KeyError) as refused:  # an index, or an argument, that the model does not have
                error = f"{type(refused).__name__}: {' '.join(str(refused).split())[:150]}"
                continue
            if not bool(whole.isfinite()):
                continue
            told += 1
            left &= {kind for kind in left if _agrees(KINDS[kind], logits, one["labels"], whole)}
        if told:
            break
    if len(left) == 1:
        return left.pop()
    if left and told:  # one class, or one position
        return next(kind for kind in KINDS if kind in left)
    what = f"could not be computed ({error or 'it is no number'})" if not told else f"is none of {', '.join(KINDS)}"
    raise ValueError(
        f"the loss of {type(model).__name__} on one synthetic example {what}: a private step needs it example by example. Give "
        "compute_loss_func(outputs, labels, num_items_in_batch=None) returning one loss per example, or use plan.private."
    )


def _agrees(each: Each, logits: Tensor, labels: Tensor, whole: Tensor) -> bool:
    if (logits.dim() == 3) != (each in (tokens, next_tokens)):
        return False
    if each in (single_label, tokens, next_tokens) and labels.is_floating_point():
        return False
    try:
        mine = each(logits, labels, 0.0)
    except REFUSALS:
        return False
    return mine.shape == (1,) and bool((mine[0] - whole).abs() <= TOLERANCE * whole.abs().clamp(min=1e-3))
