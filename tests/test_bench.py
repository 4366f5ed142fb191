"""The benchmark compares like with like: its models are what they are called, and all variants compute the same clipped sum."""

from __future__ import annotations

import json

import pytest
import torch

from fiberdp.bench import MODELS, VARIANTS, memory, steps
from fiberdp.bench import ablations as ablation
from fiberdp.bench import models as made
from fiberdp.bench import transformers as former
from fiberdp.bench.clock import interleaved
from fiberdp.bench.opacus import MODES, private_step
from fiberdp.bench.ours import METHODS, clipped_sum, private_run
from fiberdp.bench.variants import Unavailable
from fiberdp.cli import main
from fiberdp.engines import ENGINES
from loading import script

KEYS = {"model", "variant", "batch_size", "seconds", "ratio", "spread", "peak_mib", "kernel_seconds", "kernel_ratio", "skipped"}
PARAMETERS = {
    "cnn5": 131_466, "mlp": 4_206_602, "wrn-16-4": 2_748_890, "vit-tiny": 5_362_762, "roberta-like": 67_646_978, "gpt2-like": 67_048_704,
}  # fmt: skip
TINY = {  # the architectures of the benchmark at a size at which every engine is quick
    model.name: model
    for model in (
        made.Model("cnn5", 4, lambda: made.cnn5((4, 6, 6, 8)), made.images, made.classification),
        made.Model("wrn-16-4", 4, lambda: made.wide_resnet(10, 1, 4), made.images, made.classification),
        made.Model("mlp", 4, lambda: made.mlp(16), made.MODELS["mlp"].rows, made.classification),
        made.Model("vit-tiny", 4, lambda: former.vit(32, 16, 12, 2, 3), made.images, made.classification),
        made.Model(
            "roberta-like", 4, lambda: former.roberta_like(11, 5, 12, 2, 3), lambda count: made.text(count, 11, 5), made.classification
        ),
        made.Model("gpt2-like", 4, lambda: former.gpt2_like(11, 5, 12, 2, 3), lambda count: made.tokens(count, 11, 5), made.next_token),
    )
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_models_have_the_size_that_they_are_called_by(name):
    with torch.device("meta"):  # shapes and sizes without 270 MB of weights
        module = made.MODELS[name].build()
    assert sum(p.numel() for p in module.parameters()) == PARAMETERS[name]
    assert f"{PARAMETERS[name]:,}" in (made.__doc__ or "")
    batch = tuple(leaf.to("meta") for leaf in made.MODELS[name].batch(2))
    assert made.MODELS[name].loss_fn(module, batch).shape == (2,)


@pytest.mark.parametrize("name", TINY)
def test_a_model_and_its_data_are_the_same_at_every_call(name):
    model, before = TINY[name], torch.random.get_rng_state()
    for first, second in ((model.data(4), model.data(4)), (tuple(model.new().parameters()), tuple(model.new().parameters()))):
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert all(torch.equal(a, b[:4]) for a, b in zip(model.batch(4), model.data(4), strict=True))
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("engine", [name for name in ENGINES if name != "loop"])
@pytest.mark.parametrize("name", TINY)
def test_our_engines_give_the_oracles_clipped_sum(name, engine):
    expected = clipped_sum(private_run(TINY[name], 4, "one-point", "loop"))
    found = clipped_sum(private_run(TINY[name], 4, "one-point", engine))
    assert _apart(found, expected) < 1e-4


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", TINY)
def test_opacus_without_noise_gives_our_clipped_sum(name, mode):
    """So that its step and ours do the same work: same weights, batch, loss and clip; 1e-6 in its clip factor is the largest difference."""
    pytest.importorskip("opacus")
    step, module = private_step(TINY[name], 4, mode, noise_multiplier=0.0)
    if (name, mode) == ("gpt2-like", "ghost"):
        with pytest.raises(NotImplementedError, match="tying"):
            step()
        return
    step()
    found = torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None]) * 4
    expected = clipped_sum(private_run(TINY[name], 4, "one-point", "vmap"))
    assert expected.norm() > 0.5
    assert _apart(found, expected) < 1e-4


def _apart(found, expected) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("observation", METHODS)
def test_a_run_draws_whole_batches_and_evaluates_every_point(observation):
    run = private_run(TINY["mlp"], 4, observation, "vmap")
    assert [len(run.plan.sampler.indices(run.keys.stream("data"), step)) for step in range(3)] == [4, 4, 4]
    assert len(run.plan.method.observation.probes()) == (2 if observation == "two-point" else 1)


def test_every_variant_of_a_model_has_a_row(monkeypatch):
    monkeypatch.setattr(steps, "BUDGET", 5 * steps.HELD * sum(p.numel() for p in TINY["gpt2-like"].new().parameters()))  # two groups
    rows = steps.step_rows(TINY["gpt2-like"], tuple(VARIANTS), rounds=2, progress=lambda line: None)
    assert [row["variant"] for row in rows] == list(VARIANTS)
    assert (rows[0]["ratio"], rows[0]["spread"]) == (1.0, 0.0)
    for row in rows:
        assert row.keys() == KEYS
        ours = row["variant"].split("-")[0] in ("one", "two", "look")
        measured = not row["skipped"]
        assert all((row[key] is not None) == measured for key in ("seconds", "ratio", "spread"))
        assert (row["kernel_ratio"] is not None) == (measured and ours)
    skipped = {row["variant"]: row["skipped"] for row in rows if row["skipped"]}
    assert set(skipped) <= {name for name in VARIANTS if name.startswith("opacus")}
    assert "Opacus refuses" in skipped["opacus-ghost"] or "not installed" in skipped["opacus-ghost"]


def test_without_opacus_its_rows_say_so(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "opacus", None)
    with pytest.raises(Unavailable, match=r"pip install fiberdp\[opacus\]"):
        VARIANTS["opacus-hooks"](TINY["mlp"], 4)


def test_the_json_contract(capsys):
    line = "bench --models mlp,update --variants one-point-vmap --batch-size 2 --elements 1000 --rounds 1 --no-memory --json"
    assert main(line.split()) == 0
    found = json.loads(capsys.readouterr().out)
    assert found.keys() == {
        "rows", "ablations", "caveats", "elements", "rounds", "threads", "instructions", "versions", "variants", "batch", "commits",
    }  # fmt: skip
    assert all(row.keys() == KEYS for row in found["rows"])
    assert [(row["model"], row["variant"]) for row in found["rows"][:3]] == [
        ("mlp", "nonprivate"), ("mlp", "one-point-vmap"), ("update", "adamw-fused"),
    ]  # fmt: skip
    assert found["rows"][0]["batch_size"] == 2
    assert {"fiber", "noise", "noise+fiber"} <= {row["variant"] for row in found["rows"]}
    assert {"torch", "opacus", "machine"} <= found["versions"].keys()


def test_what_a_file_holds_is_not_measured_again_and_other_settings_are_refused(tmp_path, capsys, monkeypatch):
    line = "bench --models mlp,update --variants one-point-vmap --batch-size 2 --elements 1000 --rounds 1 --no-memory --json"
    line += f" --out {tmp_path}/b"
    assert main(line.replace("mlp,update", "update").split()) == 0
    first = json.loads(capsys.readouterr().out)["rows"]
    monkeypatch.setattr("fiberdp.bench._update_rows", lambda *_: pytest.fail("measured again"))
    assert main(line.split()) == 0
    assert json.loads(capsys.readouterr().out) == (found := json.loads((tmp_path / "b").read_text()))
    assert found["rows"][: len(first)] == first
    assert found["rows"][len(first)]["model"] == "mlp"
    assert main([*line.split(), "--rounds", "2"]) == 2
    assert "was measured with rounds=1, now it is 2" in capsys.readouterr().err
    assert main([*line.split()[:-1], f"{tmp_path}/no/b"]) == 2
    assert "its folder does not exist" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["cnn5", "mlp", "gpt2-like"])
def test_without_a_trick_the_sum_is_the_same_and_afterwards_the_trick_is_back(name):
    run = private_run(TINY[name], 4, "two-point", "ghost")
    run.step()
    run.pipeline.micro_batch_size = 2
    expected = clipped_sum(run)
    for option, without in ablation.WITHOUT.items():
        with without(run):
            assert _apart(clipped_sum(run), expected) < 1e-4, option
        assert torch.equal(clipped_sum(run), expected), option
    rows = ablation.step_ablations(TINY[name], rounds=1, progress=lambda line: None)
    assert {"model", "option", "seconds_with", "seconds_without"} == rows[0].keys()
    assert (name == "cnn5") == any(row["option"] in ablation.CONVOLUTIONS for row in rows)


def test_the_table_names_what_was_skipped(capsys):
    line = "bench --models cnn5 --variants one-point-ghost-bf16,opacus-hooks --batch-size 1 --rounds 1 --no-memory"
    assert main(line.split()) == 0
    out, err = capsys.readouterr()
    assert {"nonprivate", "one-point-ghost-bf16", "opacus-hooks"} <= set(out.split())
    assert "cnn5: round 1 of 1" in err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("--models cnn6", "must be one of cnn5, wrn-16-4, mlp, vit-tiny, roberta-like, gpt2-like, update."),
        ("--variants ghost", "must be one of nonprivate, one-point-ghost"),
        ("--rounds 0", "rounds=0"),
        ("--batch-size 0", "batch_size=0"),
        ("--elements 0", "elements=0"),
    ],
)
def test_misuse_is_one_line(capsys, arguments, told):
    assert main(["bench", *arguments.split()]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert told in err


def test_ratios_are_to_the_first_of_the_same_round():
    calls: list[str] = []
    found = interleaved({name: (lambda name=name: calls.append(name)) for name in ("a", "b")}, 3, lambda line: None)
    assert calls == ["a", "b"] * 5  # two rounds that are not counted
    assert (found["a"].ratio, found["a"].spread) == (1.0, 0.0)


@pytest.mark.skipif(not memory.RESET.exists(), reason="needs Linux's /proc")
def test_peak_memory_counts_what_a_step_holds():
    """The mlp at batch 8: 16.8 MB of weights, as much again for gradients and for each moment; per-example gradients are 8 times that."""
    weights = 4 * PARAMETERS["mlp"] / 2**20
    plain = memory.peak_mib("mlp", "nonprivate", 8)
    private = memory.peak_mib("mlp", "one-point-vmap", 8)
    assert plain is not None
    assert private is not None
    assert 4 * weights < plain < 7 * weights
    assert private > plain + 6 * weights


def test_the_performance_page_is_the_one_the_figures_give():
    module = script("performance_table")
    assert module.PAGE.read_text() == module.page(json.loads(module.SOURCE.read_text()))
    assert set(MODELS) - {"update"} == {row["model"] for row in json.loads(module.SOURCE.read_text())["rows"]} - {"update"}


def test_a_bound_that_is_not_met_says_by_how_much():
    module = script("performance_table")
    measured = {"nonprivate": 1.0, "one-point-ghost": 1.2, "two-point-ghost": 3.0, "opacus-hooks": 2.0, "opacus-ghost": 4.0}
    rows = [
        {"model": "cnn5", "variant": variant, "ratio": ratio, "kernel_ratio": ratio, "peak_mib": 100 * ratio, "skipped": None}
        for variant, ratio in measured.items()
    ]
    lines = "\n".join(module.summary(module.Figures({"rows": rows})))
    assert "| two-point step / Opacus's best one-point step, geometric mean | 1.50 | ≤ 1.15 | no, 30 % above | all |" in lines
    assert "| one-point step / Opacus's best, geometric mean | 0.60 | ≤ 0.75 | yes | all |" in lines
    assert "| two-point peak memory / plain, largest | 3.00 | ≤ 2.00 | no, 50 % above | cnn5 |" in lines
    assert "| two-point step in bf16 / Opacus's best, geometric mean | not measured | ≤ 0.85 | | |" in lines


def test_noisy_ratios_and_known_faults_of_a_run_are_told():
    module = script("performance_table")
    rows = [{"seconds": 1.0, "ratio": ratio, "spread": spread} for ratio, spread in ((1.0, 0.0), (2.0, 0.4), (2.0, 0.6))]
    lines = module._caveats({"rows": rows, "caveats": ["The machine was busy."]})
    assert lines[0].startswith("\n**Caveat.** 1 of 2 ratios")
    assert lines[1] == "\n**Caveat.** The machine was busy."
    assert module._caveats({"rows": rows[:2], "caveats": []}) == []


def test_ablations_are_shown_with_and_without():
    module = script("performance_table")
    lines = module.ablation_table([{"model": "cnn5", "option": "book-keeping", "seconds_with": 0.1, "seconds_without": 0.15}])
    assert lines[-1] == "| cnn5 | book-keeping | 100.0 | 150.0 | 1.50 |"
