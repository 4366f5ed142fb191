"""fiberdp.integrations.accelerate: an Accelerator on the CPU, and what it would put around a model."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn

import fiberdp

accelerate = pytest.importorskip("accelerate", reason="needs the transformers extra")

from fiberdp.integrations.accelerate import private  # noqa: E402

KEYS = fiberdp.Keys.seeded(3)
DATA = {"x": torch.randn(40, 30, generator=torch.Generator().manual_seed(0)), "y": torch.arange(40) % 4}


@pytest.fixture(autouse=True)
def fresh():
    """Accelerate keeps its state for the process."""
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(30, 60), nn.Tanh(), nn.Linear(60, 4))


def loss_fn(model, batch):
    return nn.functional.cross_entropy(model(batch["x"]).float(), batch["y"], reduction="none")


def plan():
    return fiberdp.plan(method="fiber", num_examples=40, batch_size=10, steps=3, noise_multiplier=1.0, delta=1e-3, clip_norm=1.0)


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("prepared", [False, True])
def test_the_run_is_plan_privates_and_nothing_stays_around_the_model(precision, prepared):
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision=precision)
    mine = model()
    run = private(accelerator, plan(), accelerator.prepare(mine) if prepared else mine, loss_fn, DATA, keys=KEYS)
    list(run)
    assert run.model is mine
    assert "forward" not in vars(mine)
    same = plan().private(model(), loss_fn, DATA, keys=KEYS, precision={"no": "float32", "bf16": "bf16"}[precision])
    list(same)
    assert torch.equal(run.flat.theta, same.flat.theta)
    assert run.epsilon == same.epsilon


def test_the_pages_loop_runs():
    page = (Path(__file__).parent.parent / "docs" / "from-transformers.md").read_text()
    (code,) = (block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "accelerate import private" in block)
    names = {"model": model(), "plan": plan(), "loss_fn": loss_fn, "dataset": DATA}
    exec(compile(code, "from-transformers.md", "exec"), names)
    assert len(names["run"].ledger) == 3


def test_fp16_is_the_engines(monkeypatch):
    """The Accelerator takes it with a GPU alone; what it says is read all the same."""
    accelerator = accelerate.Accelerator(cpu=True)
    monkeypatch.setattr(accelerate.Accelerator, "mixed_precision", "fp16")
    run = private(accelerator, plan(), model(), loss_fn, DATA, keys=KEYS)
    assert run.pipeline.engine.loss.precision == "fp16"
    list(run)
    assert run.flat.theta.isfinite().all()


def test_what_it_would_wrap_or_nothing_would_read_is_refused(monkeypatch):
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=4)
    with pytest.raises(ValueError, match=r"gradient_accumulation_steps=4\): nothing would read it"):
        private(accelerator, plan(), model(), loss_fn, DATA)
    fresh_one = accelerate.Accelerator(cpu=True)
    with pytest.raises(ValueError, match="precision: it is the Accelerator's"):
        private(fresh_one, plan(), model(), loss_fn, DATA, precision="bf16")
    loader = fresh_one.prepare(torch.utils.data.DataLoader(torch.utils.data.TensorDataset(DATA["x"], DATA["y"]), batch_size=10))
    with pytest.raises(ValueError, match="the plan's sampler must draw the batches"):
        private(fresh_one, plan(), model(), loss_fn, loader)
    monkeypatch.setattr(accelerate.Accelerator, "num_processes", 2)
    with pytest.raises(ValueError, match="Accelerator with 2 processes, NO: a private run has one process"):
        private(fresh_one, plan(), model(), loss_fn, DATA)
    monkeypatch.undo()
    monkeypatch.setattr(accelerate.Accelerator, "mixed_precision", "fp8")
    with pytest.raises(ValueError, match=r"mixed_precision='fp8'\): must be one of no, bf16, fp16"):
        private(fresh_one, plan(), model(), loss_fn, DATA)
