"""PrivateTrainer: the Trainer's surroundings, plan.private's steps (docs/from-transformers.md)."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import stat
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import fiberdp
from fiberdp._random import Keys, Stream
from fiberdp.accounting import read_ledger
from fiberdp.diagnostics.receipt import ReceiptError
from fiberdp.optim import Constant, WarmupConstant, WarmupCosine, WarmupLinear

transformers = pytest.importorskip("transformers", minversion="5.0", reason="needs the transformers extra")
pytest.importorskip("accelerate", reason="needs the transformers extra")
peft = pytest.importorskip("peft", reason="needs the transformers extra")

from fiberdp.integrations.transformers import PrivacyArguments, PrivateTrainer  # noqa: E402
from fiberdp.integrations.transformers.arguments import PASSED, REFUSED, USED, method_of, plan_of  # noqa: E402
from fiberdp.integrations.transformers.loss import per_example  # noqa: E402
from fiberdp.integrations.transformers.rows import source_of  # noqa: E402

PAGE = (Path(__file__).parent.parent / "docs" / "from-transformers.md").read_text()
WORDS, SIZE = 600, {"hidden_size": 12, "num_hidden_layers": 1, "num_attention_heads": 3, "intermediate_size": 16}
SIGMA = {"noise_multiplier": 1.0, "delta": 1e-3, "clip_norm": 1.0}


def bert(num_labels=3, cls="BertForSequenceClassification", dropout=0.0, **more):
    torch.manual_seed(0)
    none = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    config = transformers.BertConfig(vocab_size=WORDS, max_position_embeddings=20, num_labels=num_labels, **SIZE, **none, **more)
    return getattr(transformers, cls)(config)


def gpt2(cls="GPT2LMHeadModel", **more):
    torch.manual_seed(0)
    none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = transformers.GPT2Config(
        vocab_size=WORDS, n_positions=20, n_embd=12, n_layer=1, n_head=3, bos_token_id=0, eos_token_id=0, **none
    )
    return getattr(transformers, cls)(config)


def vit(num_labels=3):
    torch.manual_seed(0)
    none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = transformers.ViTConfig(image_size=8, patch_size=4, num_labels=num_labels, **SIZE, **none)
    return transformers.ViTForImageClassification(config)


def sentences(count, seed=0, low=3, high=12, label=lambda ids, draw: int(draw(3))):
    generator = torch.Generator().manual_seed(seed)

    def draw(n, size=()):
        return torch.randint(n, size, generator=generator)

    rows = []
    for _ in range(count):
        ids = (1 + draw(WORDS - 1, (low + int(draw(high - low + 1)),))).tolist()
        rows.append({"input_ids": ids, "labels": label(ids, draw)})
    return rows


def continued(ids, draw):
    """Labels of a causal model whose first third is ignored; of some rows, all."""
    return [-100] * len(ids) if int(draw(5)) == 0 else [-100 if i < len(ids) // 3 else token for i, token in enumerate(ids)]


def pad(rows, *, side="right", mask=True):
    longest = max(len(row["input_ids"]) for row in rows)

    def filled(values, filling):
        missing = [filling] * (longest - len(values))
        return missing + list(values) if side == "left" else list(values) + missing

    batch = {"input_ids": torch.tensor([filled(row["input_ids"], 0) for row in rows])}
    if mask:
        batch["attention_mask"] = torch.tensor([filled([1] * len(row["input_ids"]), 0) for row in rows])
    whole = isinstance(rows[0]["labels"], list)
    return batch | {"labels": torch.tensor([filled(row["labels"], -100) if whole else row["labels"] for row in rows])}


def images(count):
    generator = torch.Generator().manual_seed(0)
    pixels, labels = torch.randn(count, 3, 8, 8, generator=generator), torch.randint(3, (count,), generator=generator)
    return [{"pixel_values": p, "labels": int(y)} for p, y in zip(pixels, labels, strict=True)]


def arguments(folder, *, batch=8, accumulated=2, steps=4, lr=0.01, **more):
    quiet = {"report_to": [], "logging_steps": 100, "save_strategy": "no", "disable_tqdm": True, "use_cpu": True}
    return transformers.TrainingArguments(
        output_dir=str(folder / "out"), per_device_train_batch_size=batch, gradient_accumulation_steps=accumulated, max_steps=steps,
        learning_rate=lr, **(quiet | more),
    )  # fmt: skip


def trainer(folder, model=None, *, rows=None, privacy=None, collator=pad, cls=PrivateTrainer, named=None, **more):
    rows = sentences(48) if rows is None else rows
    return cls(
        model if model is not None else bert(),
        arguments(folder, **more),
        train_dataset=rows,
        data_collator=collator,
        privacy=PrivacyArguments(**(SIGMA | {"seed": 1} | (privacy or {}))),
        **(named or {}),
    )


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def refused(*parts, exception=ValueError):
    return pytest.raises(exception, match="(?s)" + ".*".join(re.escape(part) for part in parts))


# ---- the same numbers as plan.private ----


def by_label(model, batch):
    inputs = {name: leaf for name, leaf in batch.items() if name != "labels"}
    return cross_entropy(model(**inputs).logits, batch["labels"], reduction="none")


def of_next_tokens(model, batch):
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
    each = cross_entropy(logits.transpose(1, 2), batch["labels"][:, 1:], reduction="none", ignore_index=-100)
    return each.sum(1) / (batch["labels"][:, 1:] != -100).sum(1).clamp(min=1)


PATHS = {
    "classification": (bert, lambda: sentences(48), by_label),
    "causal": (gpt2, lambda: sentences(48, label=continued), of_next_tokens),
    "images": (vit, lambda: images(48), by_label),
}


def stacked(rows):
    return {name: torch.stack([torch.as_tensor(row[name]) for row in rows]) for name in rows[0]}


@pytest.mark.parametrize("name", PATHS)
def test_the_weights_and_epsilon_are_those_of_plan_private(tmp_path, name):
    """Same keys, same plan: the weights agree to the rounding of padding (rows padded to one length there, to their batch's here)."""
    make, rows, loss_fn = PATHS[name]
    collate = stacked if name == "images" else pad
    ours = trainer(tmp_path, make(), rows=rows(), collator=collate, lr_scheduler_type="cosine", warmup_steps=0.05)
    out = ours.train()

    model = make().train()
    method = fiberdp.method("fiber", lr=0.01)
    plan = fiberdp.plan(method=method, num_examples=48, batch_size=16, steps=4, **SIGMA)
    run = plan.private(model, loss_fn, collate(rows()), keys=Keys.seeded(1), micro_batch_size=8)
    list(run)
    assert ours.plan == plan
    assert out.metrics["epsilon"] == run.epsilon
    start = weights(make())
    assert float((weights(model) - start).norm()) > 0.1
    difference = weights(ours.model) - weights(model)
    assert (
        float(difference.abs().max()) == 0 if name == "images" else float(difference.norm()) < 2e-4 * float((weights(model) - start).norm())
    )


def test_micro_batches_change_nothing_but_rounding_and_their_product_is_the_batch_size(tmp_path):
    moved = []
    for i, (batch, accumulated) in enumerate([(16, 1), (8, 2), (4, 4), (1, 16)]):
        one = trainer(tmp_path / str(i), batch=batch, accumulated=accumulated, privacy={"method": "dp-adamw"})
        one.train()
        assert one.run.pipeline.micro_batch_size == batch
        assert one.plan.batch_size == 16
        assert len(one.run.ledger) == 4
        moved.append(weights(one.model))
    for other in moved[1:]:
        assert float((other - moved[0]).norm()) < 1e-3 * float((moved[0] - weights(bert())).norm())


def test_epochs_are_those_of_the_plan_and_steps_their_product(tmp_path):
    made = arguments(tmp_path, steps=-1, num_train_epochs=2.5)
    assert plan_of(made, PrivacyArguments(**SIGMA), 100).steps == 15  # 2.5 * floor(100 / 16)
    with refused("per_device_train_batch_size * gradient_accumulation_steps = 16 with 10 rows"):
        plan_of(made, PrivacyArguments(**SIGMA), 10)


def test_an_empty_batch_is_a_step_like_any_other(tmp_path):
    one = trainer(tmp_path, batch=1, accumulated=1, steps=6)  # P(empty) = 0.36
    sizes = [len(one.plan.sampler.indices(Keys.seeded(1).stream("data"), t)) for t in range(6)]
    assert 0 in sizes
    one.train()
    assert len(one.run.ledger) == 6
    assert weights(one.model).isfinite().all()


def test_lora_trains_adapters_and_head_alone_and_saves_as_usual(tmp_path):
    """E35 with peft and the Trainer: B moves by lr, the base stays bit for bit, the adapter file is the plain Trainer's."""

    def adapted():
        torch.manual_seed(0)
        return peft.get_peft_model(bert(), peft.LoraConfig(r=4, target_modules=["query", "value"], task_type="SEQ_CLS", lora_dropout=0.0))

    model = adapted()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    one = trainer(tmp_path, model, steps=1, lr_scheduler_type="constant", lr=1e-4, privacy={"method": "dp-adamw"})
    one.train()
    moved = {name: float((p.detach() - before[name]).abs().max()) for name, p in model.named_parameters()}
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert {name for name, by in moved.items() if by} == trained
    assert all("lora_" in name or "classifier" in name for name in trained)
    assert all(moved[name] == pytest.approx(1e-4, rel=2e-2) for name in trained if "lora_B" in name)
    model.save_pretrained(tmp_path / "private")
    plain = transformers.Trainer(adapted(), arguments(tmp_path / "p"), train_dataset=sentences(48), data_collator=pad)
    plain.train()
    plain.model.save_pretrained(tmp_path / "plain")
    assert shapes(tmp_path / "private" / "adapter_model.safetensors") == shapes(tmp_path / "plain" / "adapter_model.safetensors")
    assert (tmp_path / "private" / "adapter_config.json").read_bytes() == (tmp_path / "plain" / "adapter_config.json").read_bytes()
    again = peft.PeftModel.from_pretrained(bert(), tmp_path / "private")
    assert torch.equal(again(**batch_of()).logits, model.eval()(**batch_of()).logits)


def batch_of(count=4):
    return {name: leaf for name, leaf in pad(sentences(count)).items() if name != "labels"}


def shapes(path):
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        return {name: (file.get_slice(name).get_shape(), file.get_slice(name).get_dtype()) for name in file.keys()}  # noqa: SIM118


# ---- the loss ----

TOKENS = {"input_ids": [[5, 6, 7, 8, 9]], "attention_mask": [[1, 1, 1, 1, 1]]}
LOSSES = {
    "single label": (lambda: bert(3), TOKENS, [2]),
    "regression": (lambda: bert(1), TOKENS, [0.7]),
    "regression of two": (lambda: bert(2, problem_type="regression"), TOKENS, [[0.7, -1.0]]),
    "multi-label": (lambda: bert(3), TOKENS, [[1.0, 0.0, 1.0]]),
    "causal": (gpt2, TOKENS, [[-100, 6, 7, -100, 9]]),
    "tokens": (lambda: bert(3, "BertForTokenClassification"), TOKENS, [[0, 1, -100, 2, -100]]),
    "masked": (lambda: bert(3, "BertForMaskedLM"), TOKENS, [[-100, 1, -100, 2, -100]]),
    "images": (vit, {"pixel_values": torch.randn(1, 3, 8, 8).tolist()}, [1]),
}


def tensors(inputs, labels):
    return {name: torch.tensor(value) for name, value in inputs.items()} | {"labels": torch.tensor(labels)}


@pytest.mark.parametrize("name", LOSSES)
def test_one_examples_loss_is_the_models_own(name):
    make, inputs, labels = LOSSES[name]
    model, row = make().eval(), tensors(inputs, labels)
    loss_fn = per_example(make().eval(), row, smoothing=0.0, own=None)
    assert loss_fn(model, row).item() == pytest.approx(model(**row).loss.item(), rel=1e-6)


@pytest.mark.parametrize("name", ["single label", "causal", "tokens"])
def test_label_smoothing_is_the_trainers(name):
    make, inputs, labels = LOSSES[name]
    model, row = make().eval(), tensors(inputs, labels)
    smoother = transformers.trainer_pt_utils.LabelSmoother(epsilon=0.1)
    own = smoother(
        {"logits": model(**{k: v for k, v in row.items() if k != "labels"}).logits}, row["labels"], shift_labels=name == "causal"
    )
    assert per_example(model, row, smoothing=0.1, own=None)(model, row).item() == pytest.approx(own.item(), rel=1e-6)
    with refused("label_smoothing_factor=0.1 with a regression loss"):
        make, inputs, labels = LOSSES["regression"]
        per_example(make(), tensors(inputs, labels), smoothing=0.1, own=None)


def test_a_row_whose_labels_are_all_ignored_has_loss_and_gradient_exactly_zero_e07():
    model = gpt2()
    batch = tensors({"input_ids": [[5, 6, 7, 8]] * 2, "attention_mask": [[1] * 4] * 2}, [[1, 5, -100, -100], [-100] * 4])
    loss_fn = per_example(model, batch, smoothing=0.0, own=None)
    first, second = loss_fn(model, batch)
    assert float(first) == pytest.approx(float(model(**{k: v[:1] for k, v in batch.items()}).loss), rel=1e-6)
    assert float(second) == 0
    assert all(not g.any() for g in torch.autograd.grad(second, list(model.parameters())))


def test_losses_that_cannot_be_taken_apart_are_refused():
    class Meets(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(4, 3)

        def forward(self, x, labels=None):
            logits = self.head(x)
            return (
                {"logits": logits} if labels is None else {"loss": cross_entropy(logits, labels) + logits.square().mean(), "logits": logits}
            )

    row = {"x": torch.randn(1, 4), "labels": torch.tensor([1])}
    with refused("the loss of Meets on one synthetic example is none of single label", "Give compute_loss_func"):
        per_example(Meets(), row, smoothing=0.0, own=None)
    with refused("a batch of the training rows has x: it must have labels"):
        per_example(Meets(), {"x": row["x"]}, smoothing=0.0, own=None)
    t5 = transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=WORDS, d_model=12, d_kv=4, d_ff=16, num_layers=1, num_heads=3)
    )
    with refused("the loss of T5ForConditionalGeneration on one synthetic example could not be computed"):
        per_example(t5, tensors(TOKENS, [[1, 2]]), smoothing=0.0, own=None)


def test_a_compute_loss_func_is_used_if_it_gives_one_loss_an_example(tmp_path):
    def each(outputs, labels, num_items_in_batch=None):
        return cross_entropy(outputs.logits, labels, reduction="none")

    def mean(outputs, labels, num_items_in_batch=None):
        return cross_entropy(outputs.logits, labels)

    one, own = trainer(tmp_path / "a", steps=2), trainer(tmp_path / "b", steps=2, named={"compute_loss_func": each})
    one.train()
    own.train()
    assert torch.equal(weights(one.model), weights(own.model))
    own.evaluate(sentences(8, 5))
    with refused("loss_fn returned shape () for"):
        trainer(tmp_path / "c", named={"compute_loss_func": mean}).train()
    assert not (tmp_path / "c" / "out" / "ledger.jsonl").exists()


# ---- the Trainer around it ----


class Heard(transformers.TrainerCallback):
    def __init__(self):
        self.events = []

    def __getattribute__(self, name):
        if not name.startswith("on_"):
            return super().__getattribute__(name)

        def event(args, state, control, **given):
            self.events.append((name, state.global_step, round(state.epoch or 0, 6)))

        return event


def test_callbacks_come_in_the_order_and_number_of_a_plain_trainer(tmp_path):
    """With one micro-batch a step; with several, on_substep_end is not called: how many there are is raw data."""
    often = {
        "batch": 16, "accumulated": 1, "steps": 8, "logging_steps": 2, "eval_strategy": "steps", "eval_steps": 3, "save_strategy": "epoch",
        "logging_first_step": True, "eval_on_start": True, "save_total_limit": 1,
    }  # fmt: skip
    heard, plain = Heard(), Heard()
    held_out = sentences(10, 3)
    trainer(tmp_path / "a", named={"callbacks": [heard], "eval_dataset": held_out}, **often).train()
    transformers.Trainer(
        bert(), arguments(tmp_path / "b", **often), train_dataset=sentences(48), eval_dataset=held_out, data_collator=pad, callbacks=[plain]
    ).train()
    assert heard.events == plain.events
    assert [path.name for path in (tmp_path / "a" / "out").glob("checkpoint-*")] == ["checkpoint-8"]
    assert [path.name for path in (tmp_path / "a" / "out-secret").iterdir()] == ["checkpoint-8"]


def test_every_step_is_taken_in_training_mode_whatever_was_evaluated_before(tmp_path):
    modes = []

    class Mode(transformers.TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model=None, **rest):
            modes.extend(part.training for part in model.modules())

    often = {"eval_strategy": "steps", "eval_steps": 1, "eval_on_start": True, "steps": 3}
    trainer(tmp_path, bert(dropout=0.1), named={"callbacks": [Mode()], "eval_dataset": sentences(8, 4)}, **often).train()
    assert modes
    assert all(modes)


def test_early_stopping_ends_the_run_and_epsilon_is_that_of_the_steps_taken(tmp_path):
    stop = transformers.EarlyStoppingCallback(early_stopping_patience=1, early_stopping_threshold=1e9)
    often = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1, "load_best_model_at_end": True}
    one = trainer(tmp_path, steps=20, named={"callbacks": [stop], "eval_dataset": sentences(8, 4)}, metric_for_best_model="loss", **often)
    out = one.train()
    assert out.global_step == 2
    assert out.metrics["epsilon"] == one.run.epsilon < one.plan.epsilon
    assert len(read_ledger(one.args.output_dir + "/ledger.jsonl").events) == 2
    best = transformers.BertForSequenceClassification.from_pretrained(one.state.best_model_checkpoint)
    assert torch.equal(weights(best), weights(one.model))


def test_the_log_says_nothing_that_is_raw(tmp_path):
    heard = []

    class Logs(transformers.TrainerCallback):
        def on_log(self, args, state, control, logs=None, **rest):
            heard.append(dict(logs))

    one = trainer(tmp_path, logging_steps=1, named={"callbacks": [Logs()]})
    out = one.train()
    assert math.isnan(out.training_loss)
    timing = {"train_runtime", "train_samples_per_second", "train_steps_per_second"}
    assert [set(logs) for logs in heard] == [{"learning_rate", "epsilon", "epoch"}] * 4 + [
        timing | {"epsilon", "delta", "noise_multiplier", "epoch"}
    ]
    assert one.state.total_flos == 0
    one.log_metrics("train", out.metrics)
    one.save_metrics("train", out.metrics)
    one.save_state()
    epsilons = [logs["epsilon"] for logs in one.state.log_history]
    assert epsilons == sorted(epsilons)
    assert epsilons[3] == epsilons[4] == one.plan.epsilon
    assert [round(logs["learning_rate"], 6) for logs in heard[:4]] == [0.01, 0.0075, 0.005, 0.0025]
    expected = 4 * 16  # samples a second are of the expected batch, not of the realised
    assert out.metrics["train_samples_per_second"] * out.metrics["train_runtime"] == pytest.approx(expected, rel=0.02)


def test_nothing_is_wrapped_and_what_is_saved_is_what_a_plain_trainer_saves(tmp_path):
    model = bert()
    kept = {name: id(p) for name, p in model.named_parameters()}
    one = trainer(tmp_path / "a", model, named={"eval_dataset": sentences(8, 3)}, eval_strategy="steps", eval_steps=2)
    one.train()
    assert one.model is one.model_wrapped is model
    assert type(model) is transformers.BertForSequenceClassification
    assert {name: id(p) for name, p in model.named_parameters()} == kept
    for part in model.modules():
        assert not part._forward_hooks
        assert not part._forward_pre_hooks
        assert not part._backward_hooks
        assert "forward" not in vars(part)
    assert all(p.grad is None for p in model.parameters())
    plain = transformers.Trainer(bert(), arguments(tmp_path / "b"), train_dataset=sentences(48), data_collator=pad)
    plain.train()
    one.save_model(str(tmp_path / "private"))
    plain.save_model(str(tmp_path / "plain"))
    files = {path.name for path in (tmp_path / "plain").iterdir()}
    assert {path.name for path in (tmp_path / "private").iterdir()} == files
    assert shapes(tmp_path / "private" / "model.safetensors") == shapes(tmp_path / "plain" / "model.safetensors")
    assert (tmp_path / "private" / "config.json").read_bytes() == (tmp_path / "plain" / "config.json").read_bytes()
    again = transformers.BertForSequenceClassification.from_pretrained(tmp_path / "private")
    assert torch.equal(weights(again), weights(model))
    assert (
        abs((tmp_path / "private" / "model.safetensors").stat().st_size - (tmp_path / "plain" / "model.safetensors").stat().st_size) < 100
    )


def test_a_module_that_is_no_pretrained_model_is_trained_and_saved(tmp_path):
    class Small(nn.Module):
        def __init__(self, normed=False):
            super().__init__()
            self.words = nn.Embedding(WORDS, 40)
            self.head = nn.Linear(40, 3)

            self.norm = nn.BatchNorm1d(40) if normed else nn.Identity()

        def forward(self, input_ids, attention_mask, labels=None):
            weight = attention_mask.unsqueeze(2)
            logits = self.head(self.norm((self.words(input_ids) * weight).sum(1) / weight.sum(1).clamp(min=1)))
            return {"logits": logits} if labels is None else {"loss": cross_entropy(logits, labels), "logits": logits}

    torch.manual_seed(0)
    model = Small()
    one = trainer(tmp_path, model, save_strategy="steps", save_steps=2)
    one.train()
    assert set(shapes(tmp_path / "out" / "checkpoint-4" / "model.safetensors")) == {"words.weight", "head.weight", "head.bias"}
    with refused("layer norm is BatchNorm1d", "give the model a train() that leaves these layers in eval mode"):
        trainer(tmp_path / "b", Small(normed=True)).train()


def test_model_init_and_a_tokenizer_and_datasets_work_as_they_do(tmp_path):
    tokenizers, datasets = pytest.importorskip("tokenizers"), pytest.importorskip("datasets")
    words = {"[PAD]": 0, "[UNK]": 1} | {f"w{i}": i for i in range(2, WORDS)}
    fast = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    fast.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=fast, pad_token="[PAD]", unk_token="[UNK]")
    rows = sentences(48)
    table = datasets.Dataset.from_dict(
        {"text": [" ".join(f"w{i}" for i in row["input_ids"]) for row in rows], "label": [row["labels"] for row in rows]}
    )
    table = table.map(lambda batch: tokenizer(batch["text"]), batched=True)
    found = {}
    for strategy in ("random", "group_by_length"):
        one = PrivateTrainer(
            args=arguments(tmp_path / strategy, train_sampling_strategy=strategy, steps=2),
            model_init=lambda: bert(),
            train_dataset=table,
            eval_dataset=table.select(range(8)),
            processing_class=tokenizer,
            privacy=PrivacyArguments(**SIGMA, seed=1),
        )
        one.train()
        one.evaluate()
        found[strategy] = one
    lengths = [len(found["group_by_length"].run.source.take(torch.tensor([i]))["input_ids"][0]) for i in range(48)]
    assert lengths == sorted(lengths, reverse=True)
    assert set(found["random"].run.source.take(torch.tensor([0, 1]))) == {"input_ids", "attention_mask", "labels"} | (
        {"token_type_ids"} if "token_type_ids" in tokenizer.model_input_names else set()
    )
    found["random"].create_model_card()


# ---- proof, ledger, secrets ----


def test_the_receipt_fails_when_the_noise_is_scaled_by_0_95(tmp_path, monkeypatch):
    """50,000 samples of the noise: 5 % are 16 standard errors; and nothing was written, charged or trained."""
    honest = Stream.add_normal_

    def quieter(self, out, *, step, scale, start=0):
        return honest(self, out, step=step, scale=0.95 * scale, start=start)

    monkeypatch.setattr(Stream, "add_normal_", quieter)
    one = trainer(tmp_path)
    before = weights(one.model)
    with pytest.raises(ReceiptError, match="std"):
        one.train()
    assert torch.equal(weights(one.model), before)
    assert list((tmp_path / "out").iterdir()) == []


def test_privacy_json_is_what_the_ledger_says(tmp_path):
    one = trainer(tmp_path, privacy={"noise_multiplier": None, "epsilon": 3.0})
    one.train()
    said = json.loads((tmp_path / "out" / "privacy.json").read_text())
    ledger = read_ledger(tmp_path / "out" / "ledger.jsonl")
    assert ledger.finished
    assert said["privacy"]["ledger_chain"] == ledger.chain
    assert said["privacy"]["epsilon"] == one.plan.price(ledger.event()) <= 3.0
    assert said["privacy"]["epsilon"] == pytest.approx(3.0, rel=0.01)
    assert said["receipt"]["passed"]
    assert said["keys"] == "seeded"
    assert said == json.loads(json.dumps(one.privacy))
    assert fiberdp.Plan.from_json(said["config"]["plan"]) == one.plan


def test_secret_keys_are_in_the_secret_folder_and_nowhere_else(tmp_path):
    one = trainer(tmp_path, privacy={"seed": None}, save_strategy="steps", save_steps=2)
    one.train()
    assert one.run.keys.kind == "secret"
    assert one.run.keys != trainer(tmp_path / "b", privacy={"seed": None}).run
    out, secret = tmp_path / "out", tmp_path / "out-secret"
    key = one.run.keys.key
    holding = [
        path for path in tmp_path.rglob("*") if path.is_file() and (key in path.read_bytes() or key.hex().encode() in path.read_bytes())
    ]
    assert sorted(holding) == sorted(secret / f"checkpoint-{n}" / "checkpoint.safetensors" for n in (2, 4))
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in holding)
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o700 for path in (secret, *(path.parent for path in holding)))
    assert {path.name for path in (out / "checkpoint-4").iterdir()} == {
        "model.safetensors", "config.json", "trainer_state.json", "training_args.bin",
    }  # fmt: skip


def test_the_trainers_seed_makes_no_keys(tmp_path):
    runs = [trainer(tmp_path / str(i), privacy={"seed": None}, steps=1) for i in range(2)]
    for one in runs:
        one.train()
    assert runs[0].args.seed == runs[1].args.seed == 42
    assert not torch.equal(weights(runs[0].model), weights(runs[1].model))


class Killed(transformers.TrainerCallback):
    def on_pre_optimizer_step(self, args, state, control, **rest):
        if state.global_step == 4:
            raise KeyboardInterrupt


def test_a_killed_run_goes_on_bit_for_bit_and_is_charged_once(tmp_path):
    """Dropout on, correlated noise: weights, epsilon and ledger are those of the run that was not killed."""
    options = {
        "steps": 6, "save_strategy": "steps", "save_steps": 3, "rows": sentences(80), "batch": 4,
        "privacy": {"method": "mf-dp-ftrl", "groups": 8},
    }  # fmt: skip
    whole = trainer(tmp_path / "a", bert(dropout=0.1), **options)
    whole.train()
    with pytest.raises(KeyboardInterrupt):
        trainer(tmp_path / "b", bert(dropout=0.1), named={"callbacks": [Killed()]}, **options).train()
    charged = (tmp_path / "b" / "out" / "ledger.jsonl").read_bytes()
    assert len(read_ledger(tmp_path / "b" / "out" / "ledger.jsonl").events) >= 5
    torch.manual_seed(99)
    again = trainer(tmp_path / "b", transformers.BertForSequenceClassification(bert(dropout=0.1).config), **options)
    with refused("holds the ledger of a run"):
        again.train()
    out = again.train(resume_from_checkpoint=True)
    assert out.global_step == 6
    assert torch.equal(weights(again.model), weights(whole.model))
    assert again.run.epsilon == whole.run.epsilon
    ledgers = [(tmp_path / name / "out" / "ledger.jsonl").read_bytes() for name in "ab"]
    assert ledgers[0] == ledgers[1]
    assert ledgers[1].startswith(charged)
    assert again.state.log_history[-1]["step"] == 6


def test_a_resume_with_other_terms_or_without_its_secret_is_refused(tmp_path):
    options = {"steps": 4, "save_strategy": "steps", "save_steps": 2}
    trainer(tmp_path, **options).train()
    with refused("plan.clip.clip_norm=0.5, but the run was started with 1.0"):
        trainer(tmp_path, privacy={"clip_norm": 0.5}, **options).train(resume_from_checkpoint=True)
    with refused("per_device_train_batch_size=4"):
        trainer(tmp_path, **(options | {"batch": 4, "accumulated": 4})).train(resume_from_checkpoint=True)
    state = tmp_path / "out" / "checkpoint-2" / "trainer_state.json"
    state.write_text(state.read_text().replace('"global_step": 2', '"global_step": 3'))
    with refused("its trainer_state.json is at step 3, its secret half at 2"):
        trainer(tmp_path, **options).train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))
    (tmp_path / "out-secret" / "checkpoint-4" / "checkpoint.safetensors").unlink()
    with refused("checkpoint-4/checkpoint.safetensors does not exist: a resume needs the checkpoint's secret half"):
        trainer(tmp_path, **options).train(resume_from_checkpoint=True)
    with refused("there is no trainer_state.json in it"):
        trainer(tmp_path, **options).train(resume_from_checkpoint=str(tmp_path))
    with refused("holds no checkpoint"):
        trainer(tmp_path / "new", **options).train(resume_from_checkpoint=True)


# ---- the arguments ----


def test_every_argument_of_the_trainer_is_used_passed_or_refused_and_the_page_says_which():
    fields = {field.name for field in dataclasses.fields(transformers.TrainingArguments)}
    groups = {"used": set(USED), "passed": set(PASSED), "refused": set(REFUSED)}
    assert sum(len(names) for names in groups.values()) == len(set().union(*groups.values()))
    assert fields <= set().union(*groups.values())
    said = {}
    for line in PAGE.splitlines():
        if line.startswith("| `") and line.count("|") == 4:
            names, what, _ = line.strip("|").split("|")
            said |= dict.fromkeys(re.findall(r"`(\w+)`", names), what.strip())
    assert {name: group for group, names in groups.items() for name in names} == said


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"max_grad_norm": 0.5}, "max_grad_norm=0.5"),
({"activation_checkpointing": True}, "activation_checkpointing=True"),
        ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha=5.0"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size=True"),
        ({"include_num_input_tokens_seen": "all"}, "include_num_input_tokens_seen"),
        ({"data_seed": 3}, "data_seed=3"),
        ({"dataloader_drop_last": True}, "dataloader_drop_last=True"),
        ({"ignore_data_skip": True}, "ignore_data_skip=True"),
        ({"use_liger_kernel": True}, "use_liger_kernel=True"),
        ({"torch_compile": True}, "torch_compile=True"),
        ({"optim": "adafactor"}, "optim='adafactor'"),
        ({"optim": "sgd"}, "optim='sgd': the method's update is AdamW"),
        ({"optim_args": "a=1"}, "optim_args='a=1'"),
        ({"lr_scheduler_type": "polynomial"}, "lr_scheduler_type='polynomial': must be one of linear, cosine"),
        ({"lr_scheduler_kwargs": {"num_cycles": 2}}, "lr_scheduler_kwargs"),
        ({"lr_scheduler_type": "constant", "warmup_steps": 3}, "warmup_steps=3 with lr_scheduler_type='constant'"),
        ({"warmup_steps": 4}, "warmup_steps=4: must be fewer than the 4 steps"),
        ({"train_sampling_strategy": "sequential"}, "train_sampling_strategy='sequential'"),
        ({"torch_empty_cache_steps": 3}, "torch_empty_cache_steps=3"),
        ({"debug": "underflow_overflow"}, "debug="),
        ({"enable_jit_checkpoint": True}, "enable_jit_checkpoint=True"),
        ({"privacy": {"epsilon": 3.0}}, "exactly one must be given"),
        ({"privacy": {"delta": 0.0}}, "delta=0.0"),
        ({"privacy": {"secret_dir": "OUT/keys"}}, "/keys': must lie outside output_dir="),
        ({"privacy": {"clip_norm": -1.0}}, "clip_norm=-1.0"),
        ({"privacy": {"method": "adam"}}, "method='adam': must be one of"),
        ({"privacy": {"options": {"lr": 0.1}}}, "lr is TrainingArguments.learning_rate"),
        ({"privacy": {"options": {"omegas": 0.1}}}, "has no option omegas"),
        ({"privacy": {"method": "dp-sgd"}, "adam_beta1": 0.8}, "adam_beta1 with method dp-sgd"),
        ({"privacy": {"method": fiberdp.method("fiber")}}, "learning_rate with a composed method"),
        ({"named": {"optimizers": (torch.optim.SGD([torch.zeros(1)], lr=1.0), None)}}, "optimizers or optimizer_cls_and_kwargs"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_what_cannot_be_honoured_is_refused_in_one_line_before_anything_is_written(tmp_path, given, says):
    if "secret_dir" in given.get("privacy", {}):
        given = {"privacy": {"secret_dir": str(tmp_path / "out" / "keys")}}
    with pytest.raises(ValueError, match=re.escape(says)) as caught:
        trainer(tmp_path, **given)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_products_in_tf32_are_refused(tmp_path):
    one = arguments(tmp_path)
    one.tf32 = True  # its own check wants a GPU first
    with refused("TrainingArguments.tf32=True: a private run takes None, False only"):
        PrivateTrainer(bert(), one, train_dataset=sentences(48), data_collator=pad, privacy=PrivacyArguments(**SIGMA))


def test_an_argument_of_a_later_version_is_refused_unless_it_has_its_default(tmp_path):
    @dataclasses.dataclass
    class Later(transformers.TrainingArguments):
        mix_examples: bool = False

    quiet = {"output_dir": str(tmp_path / "out"), "report_to": [], "use_cpu": True, "max_steps": 1}
    kept = {"train_dataset": sentences(48), "data_collator": pad, "privacy": PrivacyArguments(**SIGMA)}
    PrivateTrainer(bert(), Later(**quiet), **kept)
    with refused("TrainingArguments.mix_examples=True: PrivateTrainer does not know this argument"):
        PrivateTrainer(bert(), Later(**quiet, mix_examples=True), **kept)


def test_rates_and_schedules_come_from_the_trainers_arguments(tmp_path):
    more = {
        "adam_beta1": 0.8,
        "adam_beta2": 0.99,
        "adam_epsilon": 1e-7,
        "weight_decay": 0.1,
        "lr_scheduler_type": "linear",
        "warmup_steps": 3,
    }
    chosen = method_of(arguments(tmp_path, **more), PrivacyArguments(**SIGMA, options={"omega": 0.7}), 10)
    update = fiberdp.optim.AdamW(lr=0.01, betas=(0.8, 0.99), eps=1e-7, weight_decay=0.1)
    assert (chosen.update, chosen.filter.omega) == (update, 0.7)
    assert [round(chosen.schedule.factor(t, 10), 3) for t in range(10)] == [0.333, 0.667, 1, 1, 0.857, 0.714, 0.571, 0.429, 0.286, 0.143]

    def schedule(kind, warmup):
        return method_of(arguments(tmp_path, lr_scheduler_type=kind, warmup_steps=warmup), PrivacyArguments(**SIGMA), 40).schedule

    assert schedule("cosine", 0.05) == WarmupCosine(warmup=0.05)
    assert schedule("constant", 0) == Constant()
    assert [type(schedule(kind, 7)) for kind in ("linear", "constant_with_warmup")] == [WarmupLinear, WarmupConstant]
    for steps in range(2, 60):
        for rising in range(1, steps):
            made = method_of(arguments_cached(tmp_path, rising), PrivacyArguments(**SIGMA), steps).schedule
            assert next(t for t in range(steps) if made.factor(t, steps) == 1) == rising - 1
    assert method_of(arguments(tmp_path), PrivacyArguments(**SIGMA, method="dp-sgd"), 10).update.lr == 0.01


def arguments_cached(folder, rising, made={}):  # noqa: B006 (kept on purpose: a thousand of them take a minute)
    one = made.setdefault(folder, arguments(folder))
    one.warmup_steps = rising
    return one


def test_the_linear_schedule_is_the_trainers_but_for_the_first_rate(tmp_path):
    """A step at rate 0, as the Trainer's first with warm-up, would be charged for nothing."""
    parameter = nn.Parameter(torch.zeros(1))
    for kind, ours in (("linear", WarmupLinear), ("cosine", WarmupCosine), ("constant_with_warmup", WarmupConstant)):
        optimizer = torch.optim.SGD([parameter], lr=1.0)
        theirs = transformers.get_scheduler(kind, optimizer, num_warmup_steps=3, num_training_steps=12)
        rates = []
        for _ in range(12):
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            theirs.step()
        mine = [ours(warmup=2.5 / 12).factor(t, 12) for t in range(12)]
        assert mine[3:] == pytest.approx(rates[3:])
        assert mine[:3] == pytest.approx(rates[1:4])


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_is_the_engines_and_patches_nothing(precision, tmp_path):
    often = {"named": {"eval_dataset": sentences(8, 3)}, "eval_strategy": "steps", "eval_steps": 1, "steps": 2}
    one = trainer(tmp_path / "a", **{precision: True}, **often)
    assert one.accelerator.mixed_precision == "no"  # of the process, so before another trainer is made
    one.train()
    assert one.run.pipeline.engine.loss.precision == precision
    assert "forward" not in vars(one.model)
    exact = trainer(tmp_path / "b", **often)
    exact.train()
    assert one.run.epsilon == exact.run.epsilon
    assert not torch.equal(weights(one.model), weights(exact.model))


# ---- rows, collators and subclasses ----


def test_rows_and_collators_that_draw_random_numbers_are_refused():
    tokenizers = pytest.importorskip("tokenizers")
    fast = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[PAD]": 0, "[MASK]": 1} | {f"w{i}": i for i in range(2, WORDS)}))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=fast, pad_token="[PAD]", mask_token="[MASK]")
    masking = transformers.DataCollatorForLanguageModeling(tokenizer, mlm=True)
    rows = [{"input_ids": row["input_ids"]} for row in sentences(48)]
    with refused("give the same rows other values each time", "must see the same examples"):
        source_of(rows, masking)
    quiet = transformers.DataCollatorForLanguageModeling(tokenizer, mlm=False)
    assert source_of(rows, quiet).take(torch.arange(0))["input_ids"].shape[0] == 0

    class Flipped:
        def __len__(self):
            return 48

        def __getitem__(self, i):
            image = torch.arange(192.0).view(3, 8, 8)
            return {"pixel_values": image.flip(2) if torch.rand(()) < 0.5 else image, "labels": 0}

    with refused("give the same rows other values each time"):
        source_of(Flipped(), stacked)
    before = torch.get_rng_state()
    source_of(rows, quiet)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("make", "label", "collate"),
    [
        (gpt2, continued, lambda rows: pad(rows, side="left")),
        (bert, lambda ids, draw: int(draw(3)), lambda rows: pad(rows, mask=False)),
    ],
    ids=["positions counted from the left of the padding", "no attention mask"],
)
def test_padding_through_which_examples_meet_is_refused(tmp_path, make, label, collate):
    with refused("a row has another loss when it is padded to a longer row of its batch than alone"):
        trainer(tmp_path, make(), rows=sentences(48, label=label), collator=collate).train()
    assert not (tmp_path / "out" / "ledger.jsonl").exists()


def test_what_would_be_ignored_or_publish_raw_data_is_refused(tmp_path):
    class Own(PrivateTrainer):
        def compute_loss(self, model, inputs, **rest):
            return super().compute_loss(model, inputs, **rest)

    with refused("Own.compute_loss: a private step does not call it"):
        trainer(tmp_path, cls=Own)
    rows = sentences(48)
    with refused("eval_dataset is train_dataset"):
        trainer(tmp_path, rows=rows, named={"eval_dataset": {"a": sentences(4), "b": rows}})
    one = trainer(tmp_path)
    with refused("trainer.privacy: there is no run yet"):
        _ = one.privacy
    with refused("hyperparameter_search: every trial"):
        one.hyperparameter_search()
    one.train()
    with refused("holds the ledger of a run"):
        one.train()
    with refused("train() without train_dataset"):
        PrivateTrainer(bert(), arguments(tmp_path / "b"), privacy=PrivacyArguments(**SIGMA)).train()
    with pytest.raises(TypeError, match="privacy"):
        PrivateTrainer(bert(), arguments(tmp_path / "b"), train_dataset=rows)
    for name in ("delta", "clip_norm"):
        with pytest.raises(TypeError, match=name):
            PrivacyArguments(**{key: value for key, value in SIGMA.items() if key != name})

    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(rows)

    with refused("train_dataset is a Stream: a data set with len() and [i] is needed"):
        trainer(tmp_path / "c", rows=Stream()).train()


def test_the_pages_swap_runs(tmp_path, capsys):
    """The first block of the page, with what a script has by then."""
    code = re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)[1]
    names = {"model": bert(), "args": arguments(tmp_path, steps=2), "train": sentences(48), "held_out": sentences(8), "tokenizer": None}
    names["accuracy"] = lambda found: {"accuracy": float((found.predictions.argmax(1) == found.label_ids).mean())}
    exec(
        compile(code.replace("compute_metrics=", "data_collator=pad,\n    compute_metrics="), "from-transformers.md", "exec"),
        names | {"pad": pad},
    )
    epsilon, ratio = capsys.readouterr().out.split()[-2:]
    assert float(epsilon) <= 3.0
    assert float(ratio) == pytest.approx(1, abs=0.05)
