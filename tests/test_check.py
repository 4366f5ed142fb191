"""`fiberdp check` and what is checked at set-up: every model's clipped sum is the oracle's, and what would be wrong is refused."""

from __future__ import annotations

import json
import math
import sys
import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fiberdp
from fiberdp.augmentation import CropFlip
from fiberdp.bench import models as made
from fiberdp.bench import transformers as former
from fiberdp.checking import check, check_named
from fiberdp.cli import main
from fiberdp.clipping import Flat
from fiberdp.engines import ENGINES, Loss, check_independent, check_model
from fiberdp.engines.layers.linear import Linear
from fiberdp.engines.parts import Dense, Outer
from fiberdp.engines.synthetic import examples, synthetic, without_dropout
from fiberdp.flat import FlatParameters
from fiberdp.recipes import RECIPES
from fiberdp.types import Probe

TOKENS = {"ids": torch.zeros(1, 6, dtype=torch.int64), "label": torch.zeros(1, dtype=torch.int64)}
ROWS = {"x": torch.zeros(1, 5), "label": torch.zeros(1, dtype=torch.int64)}


def classes(model, batch):
    return F.cross_entropy(model(batch["x"]), batch["label"], reduction="none")


def logits(model, batch):
    return F.cross_entropy(model(batch["ids"]).logits, batch["label"], reduction="none")


def next_token(model, batch):
    """The mean over the tokens of an example."""
    found = model(batch["ids"]).logits[:, :-1]
    return F.cross_entropy(found.transpose(1, 2), batch["ids"][:, 1:], reduction="none").mean(1)


def bert():
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = transformers.BertConfig(
        vocab_size=11,
        hidden_size=12,
        num_hidden_layers=2,
        num_attention_heads=3,
        intermediate_size=16,
        max_position_embeddings=8,
        num_labels=3,
    )
    return transformers.BertForSequenceClassification(config)


def gpt2():
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=11, n_positions=8, n_embd=12, n_layer=2, n_head=3))


def vit():
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = transformers.ViTConfig(
        hidden_size=12, num_hidden_layers=2, num_attention_heads=3, intermediate_size=16, image_size=8, patch_size=4, num_labels=3
    )
    return transformers.ViTForImageClassification(config)


def lora(base, **options):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    return peft.get_peft_model(base, peft.LoraConfig(r=2, **options))


IMAGE = {"ids": torch.zeros(1, 3, 8, 8), "label": torch.zeros(1, dtype=torch.int64)}
HUGGING_FACE = {
    "bert": (bert, logits, TOKENS),
    "gpt2": (gpt2, next_token, TOKENS),
    "vit": (vit, logits, IMAGE),
    "bert with LoRA": (lambda: lora(bert(), target_modules=["query", "value"]), logits, TOKENS),
    "gpt2 with LoRA": (lambda: lora(gpt2(), target_modules=["c_attn", "c_proj"], fan_in_fan_out=True), next_token, TOKENS),
}
BENCH = {
    "cnn5": (lambda: made.cnn5((4, 6, 6, 8)), made.images, made.classification),
    "wrn-16-4": (lambda: made.wide_resnet(10, 1, 4), made.images, made.classification),
    "mlp": (lambda: made.mlp(16), made.MODELS["mlp"].rows, made.classification),
    "vit-tiny": (lambda: former.vit(32, 16, 12, 2, 3), made.images, made.classification),
    "roberta-like": (lambda: former.roberta_like(11, 5, 12, 2, 3), lambda count: made.text(count, 11, 5), made.classification),
    "gpt2-like": (lambda: former.gpt2_like(11, 5, 12, 2, 3), lambda count: made.tokens(count, 11, 5), made.next_token),
}


def assert_exact(found):
    assert found["passed"]
    wrong = {row["name"]: (row["rules"], row["error"]) for row in found["parameters"] if not row["error"] < 1e-5}
    assert not wrong
    assert found["max_error"] == max(row["error"] for row in found["parameters"])


LARGE = ("sst2-minilm", "e2e-gpt2", "cifar100-vit-small-ft", "imagenet-vit-small", *(name for name in RECIPES if name.startswith("glue-")))
"""Tens or hundreds of millions of parameters: test_recipe_text.py and test_recipe_vision.py check tiny models of the same kinds."""


@pytest.mark.parametrize("name", [name for name in RECIPES if name not in LARGE])
def test_every_recipes_model_is_exact(name):
    assert_exact(check_named(name))


@pytest.mark.parametrize("name", [name for name in RECIPES if name not in LARGE])
def test_a_recipes_blank_row_is_one_example(name):
    recipe = RECIPES[name]()
    row = recipe.row()
    assert recipe.loss(recipe.build(), row).shape == (1,)


def test_the_blank_row_of_digits_has_the_structure_of_its_data():
    pytest.importorskip("sklearn")
    recipe = RECIPES["digits"]()
    data, row = recipe.load(None)["train"], recipe.row()
    assert {name: (leaf.dtype, leaf.shape[1:]) for name, leaf in data.items()} == {
        n: (leaf.dtype, leaf.shape[1:]) for n, leaf in row.items()
    }


@pytest.mark.parametrize("name", BENCH)
def test_small_models_of_the_benchmark_are_exact(name):
    build, rows, loss_fn = BENCH[name]
    assert set(BENCH) == set(made.MODELS)
    assert_exact(check(build(), loss_fn, rows(1)))


@pytest.mark.parametrize("name", HUGGING_FACE)
def test_hugging_face_models_are_exact_in_training_mode_with_dropout(name):
    build, loss_fn, row = HUGGING_FACE[name]
    model = build()
    model.train()
    found = check(model, loss_fn, row)
    assert_exact(found)
    assert all(part.training for part in model.modules())
    if "LoRA" in name:
        assert all("lora_" in parameter["name"] for parameter in found["parameters"])
        assert all(parameter["rules"] == ["linear"] for parameter in found["parameters"])


def test_every_use_of_a_parameter_is_named():
    build, rows, loss_fn = BENCH["gpt2-like"]
    found = {row["name"]: row["rules"] for row in check(build(), loss_fn, rows(1))["parameters"]}
    assert found["words.weight"] == ["embedding", "linear"]

    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c, self.unused = (nn.Parameter(torch.randn(5, 5)) for _ in range(4))

        def forward(self, x):
            return F.linear(x, self.a * self.b) + torch.einsum("bi,ij->bj", x, self.c)

    found = {row["name"]: row["rules"] for row in check(Odd(), classes, ROWS)["parameters"]}
    assert found["a"] == found["b"] == ["derived via linear"] or found["a"][0].startswith("derived via")
    assert found["c"] == ["vmap fallback of einsum"]
    assert found["unused"] == []


@pytest.mark.parametrize("engine", ENGINES)
def test_float64_and_every_engine(engine):
    row = {"x": torch.zeros(1, 5, dtype=torch.float64), "label": torch.zeros(1, dtype=torch.int64)}
    found = check(nn.Linear(5, 3).double(), classes, row, engine=engine)
    assert found["passed"]
    assert found["max_error"] < 1e-12
    rule = "linear" if engine == "ghost" else engine
    assert [(row["name"], row["rules"]) for row in found["parameters"]] == [("weight", [rule]), ("bias", [rule])]


# ---- the synthetic examples ----


def test_synthetic_examples_read_no_value_and_keep_the_structure():
    row = {
        "x": torch.full((1, 2), math.nan),
        "y": (torch.tensor([7]), torch.tensor([True])),
        "picture": torch.full((1, 1, 9, 9), 3, dtype=torch.uint8),
        "text": ["secret"],
    }
    found = synthetic(row, 50, torch.Generator().manual_seed(0))
    assert found["text"] == [""] * 50
    assert found["x"].shape == (50, 2)
    assert found["x"].isfinite().all()
    assert abs(float(found["x"].std()) - 1) < 0.3
    assert set(found["y"][0].tolist()) == {0, 1}
    assert set(found["y"][1].tolist()) == {False, True}
    assert int(found["picture"].max()) > 250
    again = synthetic(row, 50, torch.Generator().manual_seed(0))
    assert torch.equal(again["x"], found["x"])


@pytest.mark.parametrize(
    ("loss_fn", "kept"),
    [
        (lambda m, b: m(b["x"].log()).sum(1), "x"),  # a logarithm wants uniform numbers
        (lambda m, b: m(b["x"]).sum(1) + torch.zeros(1)[b["label"]], "zero label"),  # the only valid index is 0
    ],
)
def test_a_draw_that_the_loss_refuses_gives_way_to_another(loss_fn, kept):
    model = nn.Linear(5, 3)
    found = examples(Loss(model, loss_fn), ROWS, 20, 0, torch.device("cpu"))
    assert loss_fn(model, found).isfinite().all()
    assert found["x"].unique().numel() == 100
    assert not found["label"].any() if kept == "zero label" else found["label"].any()


def test_modes_come_back_even_after_an_error():
    model = nn.Sequential(nn.Dropout(0.5), nn.Sequential(nn.Dropout(0.5)).eval())

    def fail():
        with without_dropout(model):
            assert not any(part.training for part in model.modules())
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert [part.training for part in model.modules()] == [True, True, False, False]


# ---- what a run refuses ----


def private(model, loss_fn, row, *, engine="ghost", method="fiber", **options):
    data = {name: leaf.repeat(8, *(1,) * (leaf.dim() - 1)) for name, leaf in row.items()}
    plan = fiberdp.plan(method=method, num_examples=8, batch_size=4, steps=2, noise_multiplier=1.0, delta=1e-2, clip_norm=1.0)
    return plan.private(model, loss_fn, data, engine=engine, **options)


right_linear = Linear.parts


def biases_off(self, records, count):
    return [(ref, Dense(part.gradient * 1.01) if isinstance(part, Dense) else part) for ref, part in right_linear(self, records, count)]


@pytest.mark.parametrize("method", ["fiber", "dp-sgd"])
@pytest.mark.parametrize("kind", [Dense, Outer])
def test_a_rule_that_is_one_percent_off_is_refused_at_set_up(monkeypatch, method, kind):
    def off(self, records, count):
        found = []
        for ref, part in right_linear(self, records, count):
            if isinstance(part, kind):
                part = Dense(part.dense().gradient * 1.01)
            found.append((ref, part))
        return found

    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))
    private(model, classes, ROWS, method=method)
    monkeypatch.setattr(Linear, "parts", off)
    with pytest.raises(ValueError, match=r"served by linear.*Use engine='vmap' or engine='loop'") as error:
        private(model, classes, ROWS, method=method)
    assert str(error.value).split(",")[0].endswith("weight" if kind is Outer else "bias")  # not the one whose factor it spoils
    assert "\n" not in str(error.value)
    for engine in ("vmap", "loop"):
        private(model, classes, ROWS, method=method, engine=engine)


def test_a_layer_that_starts_at_zero_hides_no_wrong_rule(monkeypatch):
    """With B = 0, A has gradient 0 at theta itself, where any rule would be right."""

    class Adapter(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(5, 2, bias=False), nn.Linear(2, 3, bias=False)
            nn.init.zeros_(self.b.weight)

        def forward(self, x):
            return self.b(self.a(x))

    def off(self, records, count):
        return [(r, Dense(p.dense().gradient * (1.01 if r.name == "a.weight" else 1))) for r, p in right_linear(self, records, count)]

    monkeypatch.setattr(Linear, "parts", off)
    with pytest.raises(ValueError, match=r"a\.weight"):
        private(Adapter(), classes, ROWS, method="dp-sgd")


def test_a_flipped_relu_is_no_wrong_rule(monkeypatch):
    """float32 rounding is planted, 0.1 % of one weight's gradient: float64 tells that the rule is right."""

    def rounded(self, records, count):
        return [
            (ref, Dense(part.dense().gradient * 1.001) if part.dense().gradient.dtype == torch.float32 else part)
            for ref, part in right_linear(self, records, count)
        ]

    monkeypatch.setattr(Linear, "parts", rounded)
    private(nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 3)), classes, ROWS)


def test_models_with_dropout_and_with_random_numbers_of_their_own_are_not_refused():
    class Noisy(nn.Linear):
        def forward(self, x):
            return super().forward(x + torch.randn_like(x))

    model = nn.Sequential(nn.Linear(5, 6), nn.Dropout(0.5), nn.Linear(6, 3))
    private(model, classes, ROWS)
    assert all(part.training for part in model.modules())
    private(Noisy(5, 3), classes, ROWS)


def test_copies_of_an_example_are_proved_as_copies():
    method = replace(fiberdp.method("fiber"), augmentation=CropFlip(multiplicity=3, padding=1))
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(144, 3))
    private(model, classes, {"x": torch.zeros(1, 1, 8, 8), "label": torch.zeros(1, dtype=torch.int64)}, method=method)


def contrastive(model, batch):
    z = model(batch["x"])
    return F.cross_entropy(z @ z.t(), torch.arange(len(z)), reduction="none")


def normalised(model, batch):
    x = batch["x"]
    return model((x - x.mean(0)) / (x.std(0, correction=0) + 1e-3)).sum(1)


MIXED = {
    "contrastive": (contrastive, "another loss when another example"),
    "batch statistics": (normalised, "another loss when another example"),
    "divided by the batch": (lambda m, b: classes(m, b) / len(b["x"]), "in a batch of 3 than alone"),
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", MIXED)
def test_a_loss_through_which_examples_meet_is_refused(kind, engine):
    loss_fn, said = MIXED[kind]
    with pytest.raises(ValueError, match=said) as error:
        private(nn.Linear(5, 3), loss_fn, ROWS, engine=engine)
    assert "\n" not in str(error.value)


def test_a_layer_that_mixes_in_training_mode_only_is_refused_and_examples_apart_are_not():
    class Mean(nn.Module):
        def forward(self, x):
            return x - x.mean(0) if self.training else x

    mixing, apart = nn.Sequential(Mean(), nn.Linear(5, 3)), nn.Sequential(nn.Linear(5, 6), nn.Dropout(0.5), nn.Linear(6, 3))
    flat = FlatParameters(mixing)
    with pytest.raises(ValueError, match="another loss when another example"):
        check_independent(Loss(mixing, classes), flat, ROWS)
    check_independent(Loss(apart, classes), FlatParameters(apart), ROWS)
    mixing.eval()
    check_independent(Loss(mixing, classes), flat, ROWS)


class Checkpointed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.first, self.second, self.reentrant = nn.Linear(5, 6), nn.Linear(6, 3), reentrant

    def forward(self, x):
        hidden = self.first(x)
        return checkpoint(lambda h: self.second(torch.tanh(h)), hidden, use_reentrant=self.reentrant)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing_is_refused(reentrant, engine):
    with pytest.raises(ValueError, match=r"torch\.utils\.checkpoint.*gradient_checkpointing_disable\(\).*micro_batch_size") as error:
        private(Checkpointed(reentrant), classes, ROWS, engine=engine)
    assert "\n" not in str(error.value)


def test_what_checkpointing_would_do_to_a_look_ahead():
    """Why: torch runs the layers again after functional_call has put the module's own parameters back, so the gradient is another."""
    torch.manual_seed(0)
    plain, again = Checkpointed(False), Checkpointed(False)
    again.load_state_dict(plain.state_dict())
    plain.forward = lambda x: plain.second(torch.tanh(plain.first(x)))
    sums = []
    for model in (plain, again):
        flat, batch = FlatParameters(model), synthetic(ROWS, 3, torch.Generator().manual_seed(1))
        d, clip = torch.linspace(-1, 1, flat.numel), Flat(clip_norm=math.inf)
        sums.append(ENGINES["loop"](flat, Loss(model, classes)).clipped_sum([Probe(1.0, 1.0)], d, batch, clip, seed=0).total)
    assert float((sums[0] - sums[1]).norm() / sums[0].norm()) > 1e-2


@pytest.mark.parametrize("name", ["bert", "gpt2"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_of_transformers_is_refused_at_set_up_and_in_mid_run(name, reentrant):
    build, loss_fn, row = HUGGING_FACE[name]
    model = build()
    model.train()
    run = private(model, loss_fn, row, method="dp-sgd", engine="ghost")
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    with pytest.raises(ValueError, match="gradient_checkpointing on"):
        check_model(run.model)  # as before every step
    with pytest.raises(ValueError, match="gradient_checkpointing on"):
        private(model, loss_fn, row)
    model.gradient_checkpointing_disable()
    private(model, loss_fn, row)


def test_dropout_in_eval_mode_is_told_once():
    model = nn.Sequential(nn.Linear(5, 6), nn.Dropout(0.0), nn.Dropout(0.3), nn.Dropout(0.2), nn.Linear(6, 3)).eval()
    with pytest.warns(UserWarning, match=r"layer 2 is Dropout\(p=0.3\) and the model is in eval mode") as caught:
        private(model, classes, ROWS)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    model.train()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        private(model, classes, ROWS)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_parameter_thawed_in_mid_run_is_refused(engine):
    """CASES E05."""
    model = nn.Sequential(nn.Linear(5, 6), nn.Linear(6, 3))
    model[0].weight.requires_grad_(False)
    run = private(model, classes, ROWS, engine=engine)
    model[0].weight.requires_grad_(True)
    with pytest.raises(ValueError, match=r"0\.weight.*Freeze or unfreeze before"):
        run.flat.check()  # as before every step


# ---- the command ----


def command(capsys, *arguments):
    code = main(["check", *arguments])
    return (code, *capsys.readouterr())


def test_the_command_prints_a_row_a_parameter_and_a_verdict(capsys):
    code, out, err = command(capsys, "digits")
    lines = out.splitlines()
    assert (code, err) == (0, "")
    assert [line.split()[0] for line in lines] == ["parameter", "1.weight", "1.bias", "3.weight", "3.bias", "engine"]
    assert "48 x 64" in lines[1]
    assert "linear" in lines[1]
    assert lines[-1].startswith("engine ghost, largest error")
    assert lines[-1].endswith("passed")


def test_the_command_for_scripts(capsys):
    code, out, _ = command(capsys, "cnn5", "--json", "--examples", "2")
    found = json.loads(out)
    assert code == 0
    assert found.keys() == {"model", "engine", "parameters", "max_error", "passed"}
    assert all(row.keys() == {"name", "shape", "rules", "error"} for row in found["parameters"])
    assert found["parameters"][0] | {"error": 0} == {"name": "0.weight", "shape": [32, 3, 3, 3], "rules": ["conv"], "error": 0}
    assert (found["model"], found["engine"], found["passed"]) == ("cnn5", "ghost", True)


MODULE = """
import torch
from torch import nn
def good():
    return nn.Linear(5, 3), lambda m, b: m(b["x"]).square().sum(1), {"x": torch.zeros(4, 5), "text": ["a"] * 4}
def bad():
    return nn.Linear(5, 3), 7
def asks(width, *, depth=1):
    return None


def nothing():
    return None
def empty():
    return nn.Linear(5, 3), lambda m, b: m(b["x"]).sum(1), {"x": torch.zeros(0, 5)}
def mixed():
    return nn.Linear(5, 3), lambda m, b: m(b["x"]).sum(1) / len(b["x"]), {"x": torch.zeros(4, 5)}
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    (tmp_path / "my_own_models.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "my_own_models", raising=False)


@pytest.mark.usefixtures("own")
def test_the_command_on_a_function_of_the_users(capsys, monkeypatch):
    code, out, _ = command(capsys, "my_own_models:good")
    assert code == 0
    assert out.splitlines()[-1].endswith("passed")
    monkeypatch.setattr(Linear, "parts", biases_off)
    code, out, _ = command(capsys, "my_own_models:good")
    assert code == 1
    assert out.splitlines()[-1].endswith("FAILED")


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("nope",), "must be one of digits, mnist-cnn"),
        (("nowhere_at_all:f",), "must be a module that can be imported"),
        (("my_own_models:f",), "my_own_models has no f"),
        (("my_own_models:bad",), "returned (Linear, int)"),
        (("my_own_models:nothing",), "returned NoneType"),
        (("my_own_models:asks",), "needs width"),
        (("my_own_models:empty",), "no rows"),
        (("my_own_models:mixed",), "in a batch of 3 than alone"),
        (("digits", "--engine", "warp"), "engine='warp'"),
        (("digits", "--examples", "0"), "examples=0"),
        ((), "target"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(capsys, arguments, said):
    code, out, err = command(capsys, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("fiberdp: ")
    assert err.count("\n") == 1
    assert said in err
