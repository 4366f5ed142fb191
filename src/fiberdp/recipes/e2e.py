"""E2E NLG: a sentence about a restaurant from what is to be said of it, by GPT-2 (Table 3)."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fiberdp.recipes.recipe import Published, Recipe

if TYPE_CHECKING:
    from torch import nn

MAX_LENGTH = 100  # tokens, as in Li et al.; of 42,061 training rows 14 are longer, by at most 17, and their ends are not learned
BEAMS = 5
MAX_NEW_TOKENS = 64  # 5 of 4,693 test references are longer
SAMPLES = 10

TABLE_3 = {  # bleu and rouge_l in percent
    3: {
        "dp-adamw": (61.52, 65.87, 0.417, 7.071, 2.167),
        "disk": (68.35, 70.23, 0.456, 8.636, 2.399),
        "fiber": (67.57, 69.97, 0.463, 8.660, 2.407),
    },
    8: {
        "dp-adamw": (64.99, 67.34, 0.425, 8.387, 2.192),
        "disk": (68.73, 70.58, 0.460, 8.697, 2.463),
        "fiber": (67.90, 70.56, 0.466, 8.669, 2.370),
    },
}


def half_over_rows(num_examples: int) -> float:
    """1/(2N), as Li et al. have it: the paper's Table 8 says 1.2e-5 for E2E, which N^-1.1 = 8.2e-6 is not."""
    return 1 / (2 * num_examples)


def linear(representation: str) -> str:
    """
    >>> linear("name[The Vaults], priceRange[more than £30]")
    'name : The Vaults | priceRange : more than £30'
    """
    fields = re.findall(r"([^,\[\]]+)\[([^\]]*)\]", representation)
    return " | ".join(f"{name.strip()} : {value}" for name, value in fields) or representation


def load_e2e(data_dir: str | None) -> dict[str, Any]:
    """{"train", "heldout", "test"}, `Pairs`.  Held out is the validation split: none of its inputs is among the training rows."""
    from fiberdp.recipes.pairs import Pairs
    from fiberdp.recipes.pretrained import Checkpoint, tokenizer
    from fiberdp.recipes.tables import Table, columns, read
    from fiberdp.recipes.text import texts_of

    splits = {"train": ("train",), "heldout": ("validation",), "test": ("test",)}
    table, names = Table("tuetschek/e2e_nlg", ("e2e_nlg",), splits), ("meaning_representation", "human_reference")
    found = {}
    for split, dataset in read(table, data_dir).items():
        where = f"{table.folders[0]} {split}"
        said = columns(dataset, names, table, where)
        found[split] = [texts_of(column, name, where) for column, name in zip(said, names, strict=True)]
    # its tokenizer class is named because the folder may hold a vocabulary alone
    encode = tokenizer(Checkpoint("openai-community/gpt2", ("gpt2_tokenizer", "gpt2"), tokenizer_class="GPT2TokenizerFast"), data_dir)
    return {split: Pairs(encode, [linear(text) for text in given], wanted, MAX_LENGTH) for split, (given, wanted) in found.items()}


def gpt2(**size: Any) -> nn.Module:
    """GPT2LMHeadModel, 124,439,808 parameters, or of another size; its outputs share the weights of its words."""
    from fiberdp.recipes.tables import extra

    transformers = extra("transformers")
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**size))


def small_gpt2() -> nn.Module:
    """4 layers of width 128."""
    return gpt2(n_layer=4, n_embd=128, n_head=4, n_positions=128, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)


def e2e_details(model: nn.Module, rows: Any) -> dict[str, Any]:
    """What the model says of every distinct input, against all its references: `text_metrics.scores`; and the first as "samples"."""
    from fiberdp.recipes.pairs import generated
    from fiberdp.recipes.text_metrics import scores

    inputs = list(rows.references)
    references = [rows.references[given] for given in inputs]
    outputs = generated(model, rows.tokenizer, inputs, beams=BEAMS, max_new_tokens=MAX_NEW_TOKENS)
    samples = [
        {"input": given, "output": said, "references": wanted} for given, said, wanted in zip(inputs, outputs, references, strict=True)
    ]
    return {"details": scores(outputs, references), "samples": samples[:SAMPLES]}


def e2e_gpt2() -> Recipe:
    from functools import partial

    from fiberdp.recipes.pairs import blank_pair, reference_loss, reference_metrics
    from fiberdp.recipes.pretrained import Checkpoint, load_weights

    return Recipe(
        name="e2e-gpt2",
        task="sentences from data",
        model="GPT-2, 124M",
        data="tuetschek/e2e_nlg",
        paper="Table 3",
        cpu_minutes=None,
        epsilon=3.0,
        clip_norm=0.1,  # this, B, E and the rate are Li et al.'s for DP-Adam: the paper says that it follows them (5.2) and gives none
        batch_size=1024,
        epochs=10,
        num_examples=42_061,
        published=tuple(
            Published(method, epsilon, value, "Table 3", metric=metric)
            for epsilon, rows in TABLE_3.items()
            for method, row in rows.items()
            for metric, value in zip(("bleu", "rouge_l", "meteor", "nist", "cider"), row, strict=True)
        ),
        grids={"omega": (0.9,), "kappa": (0.6,), "gamma": (0.7,)},  # fixed in 5.2; Table 9 has none for language
        options={method: {"lr": 2e-3} for method in ("dp-adamw", "disk", "fiber")},
        load=load_e2e,
        build=gpt2,
        weights=partial(load_weights, checkpoint=Checkpoint("openai-community/gpt2", ("gpt2",))),
        loss=reference_loss,
        metrics=reference_metrics,
        metric="token_accuracy",
        details=e2e_details,
        delta=half_over_rows,
        row=lambda: blank_pair(MAX_LENGTH, 55),
    )


def e2e_gpt2_small_scratch() -> Recipe:
    return replace(
        e2e_gpt2(),
        name="e2e-gpt2-small-scratch",
        model="GPT-2 of 4 layers",
        paper="-",
        cpu_minutes=120,  # extrapolated from 20 examples a second and core
        epsilon=8.0,
        epochs=3,
        published=(),
        grids={},
        options={},
        build=small_gpt2,
        weights=None,
    )
