"""What is to be said and a sentence that says it, as tokens of a causal language model; and what the model says.

    tokens    input, end-of-text, reference, end-of-text; cut to L
    rows      {"input_ids": int32 [N, L], "at": int64 [N, R], "mask": bool [N, R], "length": int64 [N], "targets": int64 [N]}

`at` are the positions whose next token is to be predicted, `targets` of them, the others masked: logits are computed there only, because
GPT-2's 50,257 outputs are most of a small model's cost.  Attention looks back only, so padding behind a row needs no mask.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from fiberdp.evaluation import batches
from fiberdp.recipes.text import padded
from fiberdp.sampling.source import PaddedSource

EVALUATED_AT_ONCE = 32  # rows: their logits are some 200 MB


class Pairs(PaddedSource):
    """The rows, of which a batch keeps as many positions as its longest reference has; and the texts, for `generated`.

    references: input -> every reference of it.
    """

    def __init__(self, tokenizer: Any, inputs: list[str], references: list[str], max_length: int) -> None:
        super().__init__(encoded(tokenizer, inputs, references, max_length))
        self.tokenizer = tokenizer
        self.references: dict[str, list[str]] = {}
        for said, wanted in zip(inputs, references, strict=True):
            self.references.setdefault(said, []).append(wanted)

    def take(self, indices: Tensor) -> Any:
        batch = super().take(indices)
        longest = max(1, int(batch["targets"].max())) if len(indices) else 1
        return batch | {name: batch[name][:, :longest] for name in ("at", "mask")}


def encoded(tokenizer: Any, inputs: list[str], references: list[str], max_length: int) -> dict[str, Tensor]:
    """The rows.  Of an input that fills them, nothing is predicted."""
    before = prompts(tokenizer, inputs)
    after = tokenizer([" " + text for text in references])["input_ids"]
    rows = [(p + a + [tokenizer.eos_token_id])[:max_length] for p, a in zip(before, after, strict=True)]
    tokens = padded(rows, tokenizer.eos_token_id)
    targets = torch.tensor([max(0, len(row) - len(p)) for row, p in zip(rows, before, strict=True)])
    steps = torch.arange(max(1, int(targets.max())))
    mask = steps < targets[:, None]
    first = torch.tensor([len(p) for p in before]) - 1
    return {
        "input_ids": tokens["input_ids"],
        "at": (first[:, None] + steps) * mask,
        "mask": mask,
        "length": tokens["length"],
        "targets": targets,
    }


def prompts(tokenizer: Any, inputs: Iterable[str]) -> list[list[int]]:
    return [[*ids, tokenizer.eos_token_id] for ids in tokenizer(list(inputs))["input_ids"]]


def blank_pair(length: int, targets: int) -> dict[str, Tensor]:
    """One row of `length` tokens 0, of which the last `targets` are predicted."""
    at = torch.arange(length - targets - 1, length - 1)[None]
    return {
        "input_ids": torch.zeros(1, length, dtype=torch.int32),
        "at": at,
        "mask": torch.ones_like(at, dtype=torch.bool),
        "length": torch.full((1,), length),
        "targets": torch.full((1,), targets),
    }


def next_tokens(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    """Logits [b, R, vocabulary] at the positions `at`, and the tokens [b, R] that come after them."""
    hidden = model.transformer(input_ids=batch["input_ids"]).last_hidden_state  # pyright: ignore[reportCallIssue]
    at = batch["at"]
    chosen = hidden.gather(1, at[:, :, None].expand(-1, -1, hidden.shape[-1]))
    return model.lm_head(chosen), batch["input_ids"].gather(1, at + 1).long()  # pyright: ignore[reportCallIssue]


def reference_loss(model: nn.Module, batch: Any) -> Tensor:
    """[b]: the mean cross-entropy of a reference's tokens; 0 if there is none."""
    logits, token = next_tokens(model, batch)
    # flat, because the classes come last in memory: in the form [b, classes, R] twice as much time goes into copies
    each = nn.functional.cross_entropy(logits.flatten(0, 1), token.flatten(), reduction="none").view(token.shape) * batch["mask"]
    return each.sum(1) / batch["mask"].sum(1).clamp(min=1)


@torch.no_grad()
def reference_metrics(model: nn.Module, rows: Any) -> dict[str, float]:
    """token_accuracy: the share of reference tokens that are the likeliest where they stand; loss: their mean cross-entropy."""
    device = next(model.parameters()).device
    right, loss, count = 0, 0.0, 0
    for batch in batches(rows, device, EVALUATED_AT_ONCE):
        logits, token = next_tokens(model, batch)
        mask = batch["mask"]
        logits, token = logits[mask], token[mask]
        right += int((logits.argmax(1) == token).sum())
        loss += float(nn.functional.cross_entropy(logits.float(), token, reduction="sum"))
        count += len(token)
    return {"token_accuracy": right / max(1, count), "loss": loss / max(1, count)}


def generated(model: Any, tokenizer: Any, inputs: list[str], *, beams: int, max_new_tokens: int, batch_size: int = 64) -> list[str]:
    """What the model says after each input, by beam search (1: greedily), in the order of the inputs."""
    device = next(model.parameters()).device
    end, said = tokenizer.eos_token_id, []
    for start in range(0, len(inputs), batch_size):
        before = prompts(tokenizer, inputs[start : start + batch_size])
        longest = max(map(len, before))
        ids = torch.tensor([[end] * (longest - len(p)) + p for p in before], device=device)  # padded in front: all begin to speak at once
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in before], device=device)
        found = model.generate(
            input_ids=ids, attention_mask=mask, num_beams=beams, do_sample=False, max_new_tokens=max_new_tokens,
            eos_token_id=end, pad_token_id=end,
        )  # fmt: skip
        said += [text.strip() for text in tokenizer.batch_decode(found[:, longest:], skip_special_tokens=True)]
    return said
