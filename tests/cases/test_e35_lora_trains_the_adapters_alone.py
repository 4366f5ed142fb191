"""E35 (SUP): a tiny LoRA with A random and B zero, base frozen, AdamW at lr 1e-4: a step moves B by lr, A by noise alone.

Origin: CASES.md (opacus#820, #826).  Wrong: a base that moves or has optimizer state; parameters that the optimizer has as other objects
than the model.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import fiberdp
from fiberdp.engines import ENGINES
from fiberdp.optim import Constant

KEYS, LR, N = fiberdp.Keys.seeded(35), 1e-4, 16
ADAMW = replace(fiberdp.method("dp-adamw", lr=LR, weight_decay=0.0), schedule=Constant())
DATA = {"x": torch.randn(N, 8, generator=torch.Generator().manual_seed(35)), "y": torch.arange(N) % 3}


class LoRA(nn.Module):
    """W x + B A x, W frozen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(35)
        self.base, self.a, self.b = nn.Linear(8, 3), nn.Linear(8, 2, bias=False), nn.Linear(2, 3, bias=False)
        nn.init.zeros_(self.b.weight)
        self.base.requires_grad_(False)

    def forward(self, x):
        return self.base(x) + self.b(self.a(x))


def with_peft() -> nn.Module:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    torch.manual_seed(35)
    return peft.get_peft_model(nn.Sequential(nn.Linear(8, 3)), peft.LoraConfig(r=2, target_modules=["0"]))


MODELS = {"by hand": LoRA, "peft": with_peft}


def loss_fn(model, batch):
    return nn.functional.cross_entropy(model(batch["x"]), batch["y"], reduction="none")


def private(model, engine, sigma):
    plan = fiberdp.plan(method=ADAMW, num_examples=N, batch_size=N, steps=1, noise_multiplier=sigma, delta=1e-3, clip_norm=1.0)
    return plan.private(model, loss_fn, DATA, keys=KEYS, engine=engine)


def role(name, parameter):
    if not parameter.requires_grad:
        return "base"
    return "A" if name in ("a.weight",) or "lora_A" in name else "B"


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("sigma", [0.0, 1.0])
def test_one_step_moves_b_by_lr_and_a_by_its_noise_alone(monkeypatch, kind, engine, sigma):
    model = MODELS[kind]()
    run = private(model, engine, sigma)
    monkeypatch.setattr(run, "prove", lambda: None)  # 22 coordinates: the receipt is proved elsewhere
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    assert run.flat.numel == 22
    run.step()
    moved = {"base": 0.0, "A": 0.0, "B": 0.0}
    for name, p in model.named_parameters():
        moved[role(name, p)] = max(moved[role(name, p)], float((p - before[name]).abs().max()))
    assert moved["base"] == 0
    assert moved["B"] == pytest.approx(LR, rel=1e-3)  # the first step of Adam is lr * sign
    assert moved["A"] == (pytest.approx(LR, rel=1e-3) if sigma else 0)
    assert run.optimizer.d.numel() == 22


@pytest.mark.parametrize("kind", MODELS)
def test_the_optimizer_has_the_models_own_parameters_or_raises(kind):
    model = MODELS[kind]()
    run = private(model, "ghost", 0.0)
    inside = range(run.flat.theta.data_ptr(), run.flat.theta.data_ptr() + 4 * 22)
    assert all(p.data_ptr() in inside for p in model.parameters() if p.requires_grad)
    model.double()  # as model.to(device): storage of its own
    with pytest.raises(ValueError, match="no longer lies in theta"):
        run.step()
    model = MODELS[kind]()
    run = private(model, "ghost", 0.0)
    layer = next(part for name, part in model.named_modules() if name == "b" or name.endswith("lora_B.default"))
    layer.weight = nn.Parameter(layer.weight.detach().clone())  # wrapped again
    with pytest.raises(ValueError, match="replaced objects"):
        run.step()
