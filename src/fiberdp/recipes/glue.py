"""MNLI, QNLI, SST-2 and QQP with RoBERTa: full fine-tuning (Table 2) and rank-16 adapters (Table 17).

The paper gives no epochs, batch sizes, rates or grids for these, and says that it follows prior work (F.9): so they are those of Li et al.
(2022), whose code scales 3 epochs and batches of 1,000 by a factor for each task.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from fiberdp.recipes.recipe import Published, Recipe, by_logits, published

if TYPE_CHECKING:
    from torch import nn

MAX_LENGTH = 256
LORA_RANK = 16
FACTOR = {"mnli": 6, "qnli": 2, "sst2": 1, "qqp": 6}  # Li et al.: epochs 3 f, batch 1,000 f
ROWS = {"mnli": 392_702, "qnli": 104_743, "sst2": 67_349, "qqp": 363_846}
NAMES = {"mnli": "entailment", "qnli": "answers", "sst2": "sentiment", "qqp": "paraphrases"}
METRIC = {"qqp": "f1"}  # E.1; accuracy for the others
PARAMETERS = {  # trained: all, or adapters and head; with three classes a few more
    ("roberta-base", False): "RoBERTa-base, 125M",
    ("roberta-base", True): "RoBERTa-base, LoRA 16, 1.2M",
    ("roberta-large", False): "RoBERTa-large, 355M",
    ("roberta-large", True): "RoBERTa-large, LoRA 16, 2.6M",
}

TABLE_2 = {  # RoBERTa-base, at epsilon 6.7 and 1; DOPPLER's "use looser privacy budgets", which are not given
    "mnli": {"dp-adamw": (83.2, 80.7), "disk": (84.8, 82.0), "doppler": (83.80, 83.55), "fiber": (84.7, 83.0)},
    "qnli": {"dp-adamw": (87.5, 86.0), "disk": (88.9, 88.7), "doppler": (87.76, 87.63), "fiber": (90.6, 90.5)},
    "sst2": {"dp-adamw": (91.5, 91.4), "disk": (92.8, 91.5), "doppler": (91.82, 91.71), "fiber": (94.0, 93.1)},
    "qqp": {"dp-adamw": (85.8, 84.2), "disk": (89.0, 86.9), "doppler": (86.50, 85.71), "fiber": (89.5, 88.6)},
}
TABLE_17 = {  # LoRA, at epsilon 6.7 and 1
    "roberta-base": {
        "mnli": {"dp-adamw": (83.5, 81.1), "disk": (85.9, 84.7), "fiber": (86.2, 84.8)},
        "qnli": {"dp-adamw": (87.4, 85.5), "disk": (90.5, 90.3), "fiber": (91.1, 90.2)},
        "sst2": {"dp-adamw": (91.5, 90.9), "disk": (93.1, 92.9), "fiber": (93.1, 93.1)},
        "qqp": {"dp-adamw": (85.7, 83.9), "disk": (89.0, 87.8), "fiber": (89.4, 88.5)},
    },
    "roberta-large": {
        "mnli": {"dp-adamw": (87.8, 85.6), "disk": (89.4, 87.9), "fiber": (89.7, 88.8)},
        "qnli": {"dp-adamw": (90.8, 89.5), "disk": (92.6, 92.5), "fiber": (93.7, 92.5)},
        "sst2": {"dp-adamw": (94.3, 90.9), "disk": (95.4, 95.2), "fiber": (96.0, 95.3)},
        "qqp": {"dp-adamw": (87.4, 85.1), "disk": (89.6, 88.2), "fiber": (90.1, 89.4)},
    },
}


def figures(task: str, model: str, lora: bool) -> tuple[Published, ...]:
    """The paper's; none for RoBERTa-large without adapters."""
    epsilons, metric = (6.7, 1.0), METRIC.get(task, "accuracy")
    if lora:
        return published("Table 17", epsilons, TABLE_17[model][task], metric=metric)
    return published("Table 2", epsilons, TABLE_2[task], metric=metric) if model == "roberta-base" else ()


def roberta(model: str, num_classes: int, lora: bool, **size: int) -> nn.Module:
    """RobertaForSequenceClassification, of the named size or another.  lora: adapters of queries and values, and the head, are trained."""
    from fiberdp.recipes.pretrained import with_lora
    from fiberdp.recipes.tables import extra

    large = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
    common = {"vocab_size": 50_265, "max_position_embeddings": 514, "type_vocab_size": 1, "layer_norm_eps": 1e-5}
    transformers = extra("transformers")
    options = common | (large if model == "roberta-large" else {}) | size  # roberta-base is BERT's, transformers' default
    config = transformers.RobertaConfig(num_labels=num_classes, **options)
    made = transformers.RobertaForSequenceClassification(config)
    return with_lora(made, LORA_RANK, ("query", "value"), ("classifier",)) if lora else made


def glue(task: str, model: str, lora: bool) -> Recipe:
    """task: mnli, qnli, sst2 or qqp; model: roberta-base or roberta-large."""
    from fiberdp.recipes import text
    from fiberdp.recipes.pretrained import Checkpoint, load_weights, tokenizer

    source = {"mnli": text.MNLI, "qnli": text.QNLI, "sst2": text.SST2, "qqp": text.QQP}[task]
    checkpoint = Checkpoint(f"FacebookAI/{model}", (model,))

    def load(data_dir: str | None) -> dict[str, Any]:
        return text.load_text(source, partial(tokenizer, checkpoint, data_dir), MAX_LENGTH, data_dir)

    return Recipe(
        name=name(task, model, lora),
        task=NAMES[task],
        model=PARAMETERS[model, lora],
        data=f"{source.table.hub_name} {source.table.config or ''}".strip(),
        paper="Table 17" if lora else "Table 2" if model == "roberta-base" else "-",
        cpu_minutes=None,
        epsilon=1.0,
        clip_norm=0.1,  # Li et al.
        batch_size=1000 * FACTOR[task],
        epochs=3 * FACTOR[task],
        num_examples=ROWS[task] - source.held_out,
        published=figures(task, model, lora),
        grids={"omega": (0.9,), "kappa": (0.6,), "gamma": (0.7,)},  # fixed in 5.2 and F.9; Table 9 has none for language
        options={method: {"lr": 5e-4} for method in ("dp-adamw", "disk", "fiber")},  # Li et al., for DP-Adam; not tuned here
        load=load,
        build=partial(roberta, model, source.num_classes, lora),
        weights=partial(load_weights, checkpoint=checkpoint),
        metric=METRIC.get(task, "accuracy"),
        row=partial(text.blank_text, MAX_LENGTH),
        **by_logits(text.text_logits),
    )


def name(task: str, model: str, lora: bool) -> str:
    return f"glue-{task}-{model}{'-lora' if lora else ''}"


GLUE: dict[str, Callable[[], Recipe]] = {
    name(task, model, lora): partial(glue, task, model, lora)
    for task in FACTOR
    for model in ("roberta-base", "roberta-large")
    for lora in (False, True)
}
