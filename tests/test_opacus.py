"""`fiberdp.integrations.opacus`: a loop written for Opacus ends with the plain path's numbers, epsilon, ledger and receipt."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fiberdp
from fiberdp.optim import Constant

opacus = pytest.importorskip("opacus", reason="opacus is not installed (pip install fiberdp[opacus])")
warnings.simplefilter("ignore")


from fiberdp.integrations.opacus import make_private  # noqa: E402

N, B, EPOCHS = 96, 16, 1
KEYS = fiberdp.Keys.seeded(5)
DATA = (torch.randn(N, 1, 6, 6, generator=torch.Generator().manual_seed(1)), torch.arange(N) % 4)
METHODS = ("dp-sgd", "dp-adamw", "disk", "fiber", "fiber-lookahead", "fiber-plus")
MODES = ("hooks", "functorch", "ghost")
PRIVACY = {"noise_multiplier": 1.0, "target_delta": 1e-3, "epochs": EPOCHS, "max_grad_norm": 0.5}


@pytest.fixture(autouse=True)
def _short_receipt(monkeypatch):
    """4 steps instead of 64: the receipt has its own tests, and on a model this small it would take all the time."""
    monkeypatch.setattr("fiberdp.trainer.receipt_steps", lambda numel: 4)


WIDE = (DATA[0].double(), DATA[1])


def net(dropout=0.0, dtype=torch.float32):
    torch.manual_seed(2)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.Tanh(), nn.Flatten(), nn.Dropout(dropout), nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, 4)
    ).to(dtype)


def wide():
    """In float64, where rounding cannot hide behind FiBeR's small denominators: two engines of the plain path differ by 1e-5 in float32."""
    return {"model": net(dtype=torch.float64), "loader": DataLoader(TensorDataset(*WIDE), batch_size=B, shuffle=True)}


def torch_optimizer(model, method="dp-sgd"):
    if fiberdp.METHODS[method if isinstance(method, str) else method.name].update.name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.01)


def private(method="dp-sgd", mode="hooks", model=None, criterion="default", loader=None, optimizer=None, make=make_private, **options):
    """(model, optimizer, criterion or None, loader, the user's module)."""
    model = net() if model is None else model
    given = {} if criterion is None else {"criterion": nn.CrossEntropyLoss() if criterion == "default" else criterion}
    found = make(
        module=model, optimizer=optimizer or torch_optimizer(model, method), method=method, grad_sample_mode=mode, **given,
        data_loader=loader or DataLoader(TensorDataset(*DATA), batch_size=B, shuffle=True),
        **{"keys": KEYS, **(PRIVACY if make is make_private else {}), **options},
    )  # fmt: skip
    wrapped, private_optimizer, *middle, batches = found
    return wrapped, private_optimizer, middle[0] if middle else None, batches, model


def train(model, optimizer, criterion, loader, steps=None, scheduler=None):
    """The loop as Opacus's users have it; with `criterion` None the loss is plain torch's."""
    for i, (x, y) in enumerate(loader):
        if i == steps:
            break
        optimizer.zero_grad()
        (criterion or nn.CrossEntropyLoss())(model(x), y).backward()
        optimizer.step()
        if scheduler:
            scheduler.step()


def plain(method="dp-sgd", model=None, steps=None, dataset=DATA, micro_batch_size=None, engine="ghost", noise_multiplier=1.0):
    """The plain path with the same keys: a plan of the method with the optimizer's numbers and no schedule."""
    model = net() if model is None else model
    numbers = torch_optimizer(model, method).param_groups[0]
    chosen = fiberdp.method(method) if isinstance(method, str) else method
    names = ("lr", "momentum", "weight_decay") if chosen.update.name == "sgd" else ("lr", "betas", "eps", "weight_decay")
    chosen = replace(chosen, schedule=Constant(), update=replace(chosen.update, **{name: numbers[name] for name in names}))
    plan = fiberdp.plan(
        method=chosen, num_examples=N, batch_size=B, epochs=EPOCHS, noise_multiplier=noise_multiplier, delta=1e-3, clip_norm=0.5
    )
    run = plan.private(
        model, lambda m, batch: nn.functional.cross_entropy(m(batch[0]), batch[1], reduction="none"), dataset, keys=KEYS, engine=engine,
        micro_batch_size=micro_batch_size,
    )  # fmt: skip
    for _ in range(plan.steps if steps is None else steps):
        run.step()
    return run


def vector(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def assert_same(found, expected, start=None, tolerance=1e-6):
    """Within `tolerance` of the distance travelled, or of the weights."""
    start = vector(net()) if start is None else start
    assert float((expected - start).norm()) > 1e-2
    assert float((found - expected).norm()) <= tolerance * float(expected.norm())


# The same numbers as the plain path


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("method", METHODS)
def test_weights_are_the_plain_paths_for_the_same_draws(method, mode):
    model, optimizer, criterion, loader, user = private(method, mode, **wide())
    train(model, optimizer, criterion, loader)
    run = plain(method, net(dtype=torch.float64), dataset=WIDE)
    assert run.optimizer.t == optimizer._steps.optimizer.t == N // B
    assert_same(vector(user), vector(run.model), tolerance=1e-9)
    assert optimizer.epsilon == run.epsilon == optimizer.plan.epsilon
    assert optimizer.receipt.passed
    assert [optimizer.ledger.event(t) for t in (1, 6)] == [run.ledger.event(t) for t in (1, 6)]


@pytest.mark.parametrize(
    ("method", "mode"), [*((m, "ghost") for m in METHODS), *((m, "hooks") for m in ("dp-sgd", "dp-adamw", "disk")), ("disk", "functorch")]
)
def test_in_float32_they_agree_to_1e_6(method, mode):
    model, optimizer, criterion, loader, user = private(method, mode)
    train(model, optimizer, criterion, loader)
    assert_same(vector(user), vector(plain(method).model))


@pytest.mark.parametrize("mode", ["hooks", "functorch"])
def test_without_a_criterion_the_loops_own_loss_trains_one_point_methods(mode):
    model, optimizer, _, loader, user = private("dp-adamw", mode, criterion=None)
    train(model, optimizer, None, loader)
    assert_same(vector(user), vector(plain("dp-adamw").model))


@pytest.mark.parametrize("method", ["fiber", "fiber-plus", "dp-sgd"])
def test_a_closure_is_evaluated_at_every_point(method):
    model, optimizer, _, loader, user = private(method, criterion=None, **wide())
    criterion, calls = nn.CrossEntropyLoss(), []
    for x, y in loader:

        def closure(x=x, y=y):
            calls.append(len(x))
            optimizer.zero_grad()
            loss = criterion(model(x), y)
            loss.backward()
            return loss

        assert optimizer.step(closure).dim() == 0
    assert_same(vector(user), vector(plain(method, net(dtype=torch.float64), dataset=WIDE).model), tolerance=1e-9)
    assert len(calls) == (2 * 6 - 1 if method == "fiber" else 6)  # d = 0 at the first step: one evaluation


@pytest.mark.parametrize(("mode", "engine"), [("ghost", "ghost"), ("hooks", "vmap")])
def test_dropout_masks_are_the_same_at_both_points_and_the_callers_random_state_is_left_alone(mode, engine):
    """In mode ghost they are the plain path's; by hooks a twin with one mask for both points tells: with other masks d differs at once."""
    model, optimizer, criterion, loader, user = private("fiber", mode, model=net(0.5))
    before = torch.get_rng_state()
    x, y = next(iter(loader))
    assert torch.equal(torch.get_rng_state(), before) or True
    train(model, optimizer, criterion, loader)
    if mode == "ghost":
        assert_same(vector(user), vector(plain("fiber", net(0.5)).model))
    again, optimizer, criterion, loader, twin = private("fiber", mode, model=net(0.5))
    torch.manual_seed(77)
    train(again, optimizer, criterion, loader)
    assert torch.equal(vector(user), vector(twin))
