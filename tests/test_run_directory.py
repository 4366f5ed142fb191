"""A run survives a crash bit for bit, hides nothing, and refuses what would falsify it."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import fiberdp
from fiberdp import experiment
from fiberdp.accounting import read_ledger
from fiberdp.evaluation import evaluate
from fiberdp.recipes.recipe import Recipe, classification, classification_loss


def rows(n, seed):
    generator = torch.Generator().manual_seed(seed)
    image = torch.randn(n, 6, generator=generator)
    return {"image": image, "label": (image[:, 0] > 0).long()}


def recipe() -> Recipe:
    data = {"train": rows(300, 1), "heldout": rows(50, 2), "test": rows(50, 3)}
    return Recipe(
        name="tiny", task="", model="", data="", paper="", cpu_minutes=0, epsilon=3.0, clip_norm=1.0, batch_size=50, epochs=4,
        num_examples=300, options={"fiber": {"lr": 0.02}, "mf-dp-ftrl": {"bands": 4}}, load=lambda data_dir: data, loss=classification_loss,
        build=lambda: nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.2), nn.Tanh(), nn.Linear(16, 2)),
    )  # fmt: skip


class Crash(Exception):
    pass


class CrashAfter:
    """A reporter that ends the process, as far as `fit` can tell, after so many steps."""

    def __init__(self, step):
        self.step = step

    def proved(self, plan, receipt): ...
    def evaluated(self, line, steps): ...
    def stepped(self, step, steps):
        if step == self.step:
            raise Crash


def contents(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in ("ledger.jsonl", "metrics.jsonl", "release/model.safetensors")}


@pytest.mark.parametrize("method", fiberdp.METHODS)
def test_resumed_run_is_bit_equal_to_the_uninterrupted_one(tmp_path, method):
    """For every method, dropout included; the crash falls between two checkpoints."""
    whole = fiberdp.fit(recipe(), method=method, seed=7, out=tmp_path / "whole")
    for step in (1, 9, 24):
        broken = tmp_path / f"broken{step}"
        with pytest.raises(Crash):
            fiberdp.fit(recipe(), method=method, seed=7, out=broken, reporter=CrashAfter(step))
        resumed = fiberdp.fit(recipe(), method=method, seed=7, out=broken, resume=True)
        assert contents(broken) == contents(tmp_path / "whole")
        assert resumed["privacy"] == whole["privacy"]
        assert resumed["result"] == whole["result"]
        assert resumed["receipt"] == whole["receipt"]


def test_noise_memory_is_kept_in_the_secret_checkpoint_alone_and_missed_without_it(tmp_path):
    from fiberdp.checkpoint import load_checkpoint, save_checkpoint

    with pytest.raises(Crash):
        fiberdp.fit(recipe(), method="mf-dp-ftrl", seed=7, out=tmp_path / "a", reporter=CrashAfter(9))
    tensors, state = load_checkpoint(tmp_path / "a" / "resume")
    assert state["step"] == 6
    assert int(tensors["noise.t"]) == 6
    assert tensors["noise.w"].shape == (3, 146)
    assert bool(tensors["noise.w"].any(1).all())
    save_checkpoint(tmp_path / "a" / "resume", tensors | {"noise.w": tensors["noise.w"][:2]}, state)
    refused("noise memory", method="mf-dp-ftrl", seed=7, out=tmp_path / "a", resume=True)
    save_checkpoint(tmp_path / "a" / "resume", tensors | {"noise.t": tensors["noise.t"] - 1}, state)
    refused("the noise memory stands at 5", method="mf-dp-ftrl", seed=7, out=tmp_path / "a", resume=True)
    save_checkpoint(tmp_path / "a" / "resume", tensors, state)
    record = fiberdp.fit(recipe(), method="mf-dp-ftrl", seed=7, out=tmp_path / "a", resume=True)
    assert (record["privacy"]["sampling"], record["privacy"]["groups"]) == ("cyclic", 4)
    public = b"".join(p.read_bytes() for p in (tmp_path / "a").rglob("*") if p.is_file() and "resume" not in p.parts)
    assert b"noise.w" not in public


def test_resume_that_started_the_noise_afresh_would_be_caught(tmp_path, monkeypatch):
    """The test above has power: with other keys after the crash the weights differ."""
    fiberdp.fit(recipe(), seed=7, out=tmp_path / "whole")
    with pytest.raises(Crash):
        fiberdp.fit(recipe(), seed=7, out=tmp_path / "broken", reporter=CrashAfter(9))
    monkeypatch.setattr(experiment.Keys, "from_json", lambda _: fiberdp.Keys.seeded(8))
    fiberdp.fit(recipe(), seed=7, out=tmp_path / "broken", resume=True)
    assert contents(tmp_path / "whole")["release/model.safetensors"] != contents(tmp_path / "broken")["release/model.safetensors"]


def test_secret_keys_are_the_default_and_survive_a_resume(tmp_path):
    with pytest.raises(Crash):
        fiberdp.fit(recipe(), out=tmp_path / "a", reporter=CrashAfter(9))
    record = fiberdp.fit(recipe(), out=tmp_path / "a", resume=True)
    assert record["keys"] == "secret"
    assert record["seed"] is None
    other = fiberdp.fit(recipe(), out=tmp_path / "b")
    assert contents(tmp_path / "a")["release/model.safetensors"] != contents(tmp_path / "b")["release/model.safetensors"]
    assert other["privacy"] == record["privacy"]


def test_the_step_is_charged_before_its_release(tmp_path, monkeypatch):
    """A crash inside the release leaves its line in the ledger; one that charged afterwards would not."""
    real = fiberdp.Run.step

    def crash_in_release(run):
        if run.optimizer.t == 4:
            monkeypatch.setattr(run.pipeline.mechanism.__class__, "release", lambda *a: (_ for _ in ()).throw(Crash()))
        return real(run)

    monkeypatch.setattr(fiberdp.Run, "step", crash_in_release)
    with pytest.raises(Crash):
        fiberdp.fit(recipe(), out=tmp_path / "a")
    assert len(read_ledger(tmp_path / "a" / "ledger.jsonl").events) >= 5


def test_epsilon_of_the_record_is_that_of_the_ledger_and_within_the_target(tmp_path):
    record = fiberdp.fit(recipe(), out=tmp_path / "a")
    privacy = record["privacy"]
    ledger = read_ledger(tmp_path / "a" / "ledger.jsonl").event()
    assert privacy["epsilon"] == fiberdp.accounting.epsilon(ledger, privacy["delta"], relation=privacy["relation"])
    assert 0.99 * 3.0 < privacy["epsilon"] <= 3.0
    assert privacy["delta"] == 300**-1.1
    assert privacy["steps"] == 24
    assert json.loads((tmp_path / "a" / "record.json").read_text())["privacy"] == privacy


def test_files_of_the_run_directory(tmp_path):
    record = fiberdp.fit(recipe(), out=tmp_path / "a")
    found = sorted(p.relative_to(tmp_path / "a").as_posix() for p in (tmp_path / "a").rglob("*") if p.is_file())
    assert found == [
        "ledger.jsonl", "metrics.jsonl", "record.json", "release/config.json", "release/ledger_summary.json",
        "release/model.safetensors", "resume/checkpoint.safetensors", "resume/lock",
    ]  # fmt: skip
    assert stat.S_IMODE((tmp_path / "a" / "resume").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "a" / "resume" / "checkpoint.safetensors").stat().st_mode) == 0o600
    assert len((tmp_path / "a" / "metrics.jsonl").read_text().splitlines()) == 4
    model = recipe().build()
    model.load_state_dict(load_file(tmp_path / "a" / "release" / "model.safetensors"))
    assert evaluate(classification, model, rows(50, 3))["accuracy"] == record["result"]["test"]
    for key in ("recipe", "method", "seed", "keys", "privacy", "receipt", "result", "timing", "versions", "config"):
        assert key in record


def test_nothing_public_holds_a_key_or_raw_statistics(tmp_path):
    fiberdp.fit(recipe(), out=tmp_path / "a", unaccounted=True)
    from fiberdp.checkpoint import load_checkpoint

    _, state = load_checkpoint(tmp_path / "a" / "resume")
    secrets = [value for value in state["keys"].values() if len(value) > 16] + [state["fingerprint"]]
    assert secrets
    for path in (tmp_path / "a").rglob("*"):
        if path.is_file() and "resume" not in path.parts:
            text = path.read_bytes()
            assert not any(secret.encode() in text or bytes.fromhex(secret) in text for secret in secrets), path
            assert b"clipped" not in text
    raw = (tmp_path / "a" / "resume" / "unaccounted.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in raw] == list(range(24))
    assert stat.S_IMODE((tmp_path / "a" / "resume" / "unaccounted.jsonl").stat().st_mode) == 0o600


def test_raw_statistics_are_not_kept_unless_asked_for(tmp_path):
    fiberdp.fit(recipe(), out=tmp_path / "a")
    assert not (tmp_path / "a" / "resume" / "unaccounted.jsonl").exists()


def test_without_out_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fiberdp.fit(recipe())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("split", [7, 50, 256])
def test_micro_batches_change_no_result(split):
    torch.set_default_dtype(torch.float64)
    try:
        wide = {name: {"image": part["image"].double(), "label": part["label"]} for name, part in recipe().load(None).items()}
        still = lambda: nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2))  # noqa: E731
        whole, cut = (_weights(replace(recipe(), load=lambda _: wide, build=still), micro_batch_size=size, seed=3) for size in (300, split))
    finally:
        torch.set_default_dtype(torch.float32)
    torch.testing.assert_close(cut, whole, rtol=1e-9, atol=1e-12)


def _weights(chosen, **options):
    held = []
    fiberdp.fit(replace(chosen, build=lambda: held.append(chosen.build()) or held[0]), **options)
    return torch.cat([p.detach().flatten() for p in held[0].parameters()])


# ---- what is refused, before anything is written ----


def refused(match, **options):
    with pytest.raises(ValueError, match=match) as error:
        fiberdp.fit(options.pop("recipe", recipe()), **options)
    assert "\n" not in str(error.value)


def test_an_out_that_holds_another_run_is_refused(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "notes.txt").write_text("mine")
    refused("not empty", out=tmp_path / "a")
    assert [p.name for p in (tmp_path / "a").iterdir()] == ["notes.txt"]
    refused("is a file", out=tmp_path / "a" / "notes.txt")


def test_resume_of_nothing_is_refused(tmp_path):
    refused("does not exist", out=tmp_path / "a", resume=True)
    refused("resume without --out", resume=True)
    assert not list(tmp_path.iterdir())


@pytest.fixture
def broken(tmp_path):
    with pytest.raises(Crash):
        fiberdp.fit(recipe(), seed=7, out=tmp_path / "a", reporter=CrashAfter(9))
    return tmp_path / "a"


@pytest.mark.parametrize(
    ("options", "where"),
    [
        ({"epsilon": 2.0}, "plan.noise_multiplier"),
        ({"delta": 1e-6}, "plan.noise_multiplier"),
        ({"clip_norm": 2.0}, "plan.clip.clip_norm"),
        ({"batch_size": 60}, "plan.batch_size"),
        ({"epochs": 5}, "plan.noise_multiplier"),
        ({"method": "disk"}, "method"),
        ({"options": {"omega": 0.5}}, "plan.method.filter.omega"),
        ({"options": {"lr": 0.5}}, "plan.method.update.lr"),
        ({"seed": 8}, "seed"),
        ({"sampling": "shuffle"}, "plan.sampling"),
        ({"engine": "loop"}, "engine"),
    ],
)
def test_resume_with_another_plan_is_refused(broken, options, where):
    before = {p: p.read_bytes() for p in broken.rglob("*") if p.is_file()}
    refused(f"resume with .*{'' if '.' in where else where}", **{"seed": 7, "out": broken, "resume": True} | options)
    assert {p: p.read_bytes() for p in broken.rglob("*") if p.is_file()} == before


def test_resume_on_other_data_is_refused(broken):
    other = {name: {"image": part["image"] + (name == "train"), "label": part["label"]} for name, part in recipe().load(None).items()}
    refused("training data changed", recipe=replace(recipe(), load=lambda _: other), seed=7, out=broken, resume=True)


def test_damaged_checkpoint_is_refused(broken):
    path = broken / "resume" / "checkpoint.safetensors"
    path.write_bytes(path.read_bytes()[:-40])
    refused("cannot be read", seed=7, out=broken, resume=True)


def test_shortened_ledger_is_refused(broken):
    lines = (broken / "ledger.jsonl").read_text().splitlines(keepends=True)
    (broken / "ledger.jsonl").write_text("".join(lines[:4]))  # the terms and three steps
    refused("every step before it must be charged", seed=7, out=broken, resume=True)


def test_finished_run_is_not_resumed(tmp_path):
    fiberdp.fit(recipe(), seed=7, out=tmp_path / "a")
    refused("finished run", seed=7, out=tmp_path / "a", resume=True)


def test_receipt_that_fails_leaves_nothing_behind(tmp_path, monkeypatch):
    from fiberdp.mechanisms import Gaussian

    real = Gaussian.release

    def too_little(self, clipped, stream, step):
        return real(replace(self, noise_multiplier=0.05 * self.noise_multiplier), clipped, stream, step)

    monkeypatch.setattr(Gaussian, "release", too_little)
    refused("noise receipt", out=tmp_path / "a")
    assert not list(tmp_path.iterdir())


def test_recipe_parts_that_cannot_be_trained_are_refused(tmp_path):
    norm = replace(recipe(), build=lambda: nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)))
    refused("BatchNorm1d in training mode", recipe=norm, out=tmp_path / "a")
    mean = replace(recipe(), loss=lambda m, b: nn.functional.cross_entropy(m(b["image"]), b["label"]))
    refused("one loss per example", recipe=mean, out=tmp_path / "a")
    whole = replace(recipe(), build=lambda: nn.Sequential(nn.Linear(6, 2), nn.Linear(2, 2).double()))
    refused("one vector", recipe=whole, out=tmp_path / "a")
    assert not list(tmp_path.iterdir())


# ---- the same with real processes ----


def command(out: Path, *more: str) -> list[str]:
    return [
        sys.executable,
        "-m",
        "fiberdp",
        "train",
        "digits",
        "--method",
        "fiber",
        "--seed",
        "0",
        "--epochs",
        "12",
        "--out",
        str(out),
        *more,
    ]


def test_kill_9_in_mid_run_then_resume_gives_the_same_weights_ledger_and_epsilon(tmp_path):
    """Real processes of the command line: one runs through, one is killed in the middle of its steps and resumed."""
    pytest.importorskip("sklearn")
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    whole = json.loads(subprocess.run(command(tmp_path / "whole", "--json"), check=True, capture_output=True, env=env).stdout)

    process = subprocess.Popen(command(tmp_path / "broken"), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=env)
    ledger, deadline = tmp_path / "broken" / "ledger.jsonl", time.monotonic() + 120
    while not (ledger.exists() and ledger.read_bytes().count(b"\n") >= 24):
        assert process.poll() is None, "the run ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "broken" / "record.json").exists()

    again = subprocess.run(command(tmp_path / "broken", "--resume", "--json"), check=True, capture_output=True, env=env)
    resumed = json.loads(again.stdout)
    assert contents(tmp_path / "broken") == contents(tmp_path / "whole")
    assert resumed["privacy"] == whole["privacy"]
    assert resumed["result"] == whole["result"]
