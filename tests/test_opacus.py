"""`fiberdp.integrations.opacus`: a loop written for Opacus ends with the plain path's numbers, epsilon, ledger and receipt."""

from __future__ import annotations

import copy
import io
import math
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, WeightedRandomSampler

import fiberdp
from fiberdp.accounting import read_ledger
from fiberdp.diagnostics import ReceiptError
from fiberdp.mechanisms import Gaussian
from fiberdp.optim import Constant
from fiberdp.sampling import Poisson

pytest.importorskip("opacus", reason="opacus is not installed (pip install fiberdp[opacus])")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # that secure mode is off; that a layer's input needs no gradient

from opacus import GradSampleModule, PrivacyEngine  # noqa: E402
from opacus.utils.batch_memory_manager import BatchMemoryManager  # noqa: E402

from fiberdp.integrations.opacus import make_private, make_private_with_epsilon  # noqa: E402
from fiberdp.integrations.opacus.criterion import PrivateLoss  # noqa: E402
from fiberdp.integrations.opacus.hooked import HooksEngine  # noqa: E402
from fiberdp.integrations.opacus.loader import WithEmpty  # noqa: E402

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
    """In float64, where FiBeR's small denominators enlarge no rounding: another micro-batch size moves digits by 4e-6 in float32."""
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


def test_dropout_masks_are_the_plain_paths_and_leave_the_callers_random_state_alone():
    model, optimizer, criterion, loader, user = private("fiber", "ghost", model=net(0.5))
    before = torch.get_rng_state()
    train(model, optimizer, criterion, zip_of(loader))
    assert torch.equal(torch.get_rng_state(), before)
    assert_same(vector(user), vector(plain("fiber", net(0.5)).model))


def zip_of(loader):
    """The batches without the loader, which asks torch for a seed at the start of every pass."""
    return [loader.collate_fn([loader.dataset[i] for i in batch]) for batch in loader.batch_sampler]


@pytest.mark.parametrize("mode", ["hooks", "functorch"])
def test_by_hooks_both_points_see_one_mask(mode):
    """Twice with other random states outside: the same weights; and at a first step (d = 0) both points would be one for one mask only."""
    found = []
    for seed in (1, 2):
        model, optimizer, criterion, loader, user = private("fiber", mode, model=net(0.5))
        torch.manual_seed(seed)
        train(model, optimizer, criterion, loader)
        found.append(vector(user))
    assert torch.equal(*found)
    masks = []
    model, optimizer, criterion, loader, user = private("fiber", mode, model=net(0.5))
    user[4].register_forward_hook(lambda layer, inputs, output: masks.append(output != 0) if len(inputs[0]) and layer.training else None)
    train(model, optimizer, criterion, loader, steps=1)
    masks.clear()
    train(model, optimizer, criterion, loader, steps=1)
    assert len(masks) == 2
    assert torch.equal(*masks)


# BatchMemoryManager, learning rates, epsilon, receipt, empty batches, resume


@pytest.mark.parametrize(("method", "mode"), [("dp-sgd", "hooks"), ("fiber", "ghost"), ("fiber", "hooks"), ("fiber-plus", "functorch")])
def test_batch_memory_manager_changes_nothing(method, mode):
    """E10: the parts of a logical batch have one clipped sum, one draw of noise, one divisor, one charge."""
    engine = PrivacyEngine(accountant="rdp")
    whole, parts = private(method, mode, **wide()), private(method, mode, privacy_engine=engine, **wide())
    train(*whole[:4])
    model, optimizer, criterion, loader, _ = parts
    sizes = []
    with BatchMemoryManager(data_loader=loader, max_physical_batch_size=5, optimizer=optimizer) as split:
        for x, y in split:
            sizes.append(len(x))
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()
    assert max(sizes) <= 5 < B
    assert len(sizes) > 2 * EPOCHS * N // B
    assert_same(vector(parts[4]), vector(whole[4]), tolerance=1e-9)
    assert len(optimizer.ledger) == 6
    assert engine.accountant.history == [(1.0, B / N, 6)]


def test_batch_memory_manager_may_be_left_in_the_middle_of_a_batch():
    """What a broken-off pass left (a flag, the sum of a part) does not count in the next one."""
    model, optimizer, criterion, loader, user = private("fiber", "ghost")
    with BatchMemoryManager(data_loader=loader, max_physical_batch_size=5, optimizer=optimizer) as split:
        for i, (x, y) in enumerate(split):
            criterion(model(x), y).backward()
            if i == 1:
                break
            optimizer.step()
    assert len(optimizer.ledger) == 0
    train(model, optimizer, criterion, loader)
    assert_same(vector(user), vector(plain("fiber").model))


class Vector(nn.Module):
    """f(w; x) = w.x, whose gradient is x."""

    def __init__(self):
        super().__init__()
        self.w = nn.Linear(2, 1, bias=False)
        nn.init.zeros_(self.w.weight)

    def forward(self, x):
        return self.w(x).flatten()


def stepped(mode="ghost", lr=1.0, **options):
    model = Vector()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    loader = DataLoader(TensorDataset(torch.tensor([[0.3, 0.4]])), batch_size=1)
    found = make_private(
        module=model, optimizer=optimizer, data_loader=loader, criterion=lambda output: output, method="dp-sgd", noise_multiplier=0.0,
        target_delta=1e-5, epochs=4, max_grad_norm=1.0, grad_sample_mode=mode, **options,
    )  # fmt: skip
    return *found, model, optimizer


def updates_of(model, optimizer, criterion, loader, user, scheduler):
    found = []
    for _ in range(3):
        for (x,) in loader:
            before = vector(user)
            optimizer.zero_grad()
            criterion(model(x)).backward()
            optimizer.step()
            scheduler.step()
            found.append(before - vector(user))
    return torch.stack(found)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("on", ["returned", "rewrapped", "given"])
def test_a_scheduler_of_torch_halves_the_updates_e34(mode, on):
    model, optimizer, criterion, loader, user, given = stepped(mode)
    if on == "rewrapped":  # by a wrapper that replaces the groups
        optimizer.param_groups = [dict(group) for group in optimizer.param_groups]
    scheduler = torch.optim.lr_scheduler.StepLR(given if on == "given" else optimizer, step_size=1, gamma=0.5)
    updates = updates_of(model, optimizer, criterion, loader, user, scheduler)
    torch.testing.assert_close(updates, torch.tensor([[0.3, 0.4]]) * torch.tensor([[1.0], [0.5], [0.25]]), rtol=1e-6, atol=1e-7)


def test_a_rate_of_zero_moves_nothing_and_is_a_step():
    model, optimizer, criterion, loader, user, _ = stepped()
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: float(step))
    updates = updates_of(model, optimizer, criterion, loader, user, scheduler)
    torch.testing.assert_close(updates, torch.tensor([[0.3, 0.4]]) * torch.tensor([[0.0], [1.0], [2.0]]), rtol=1e-6, atol=1e-7)
    assert len(optimizer.ledger) == 3


@pytest.mark.parametrize(("ours", "theirs"), [("rdp", "rdp"), ("pld", "prv")])
def test_opacus_reads_the_epsilon_that_the_ledger_says(ours, theirs):
    """prv is an upper bound, at most .01 above the loss distribution's.  rdp: the same orders and conversion, but at orders that are not
    whole Opacus computes another bound, here .06 % lower."""
    engine = PrivacyEngine(accountant=theirs)
    model, optimizer, criterion, loader, _ = private(
        "dp-sgd", "ghost", make=make_private_with_epsilon, privacy_engine=engine, target_epsilon=3.0, target_delta=1e-3, epochs=2,
        max_grad_norm=0.5,
    )  # fmt: skip
    assert optimizer.plan.accountant == ours
    for done in (1, 2):
        train(model, optimizer, criterion, loader)
        assert engine.accountant.history == [(optimizer.noise_multiplier, B / N, 6 * done)]
        difference = engine.get_epsilon(1e-3) - optimizer.epsilon
        assert (0 <= difference < 0.011) if theirs == "prv" else (-1e-3 * optimizer.epsilon < difference < 1e-9)
    assert 2.97 < optimizer.epsilon <= 3.0


def test_the_two_rdp_accountants_agree_on_a_history_like_mnists():
    """E26, first row: sigma 1, q .01, T 1000, delta 1e-5."""
    accountant = PrivacyEngine(accountant="rdp").accountant
    accountant.history = [(1.0, 0.01, 1000)]
    plan = fiberdp.plan(
        method="fiber", num_examples=10_000, batch_size=100, steps=1000, noise_multiplier=1.0, delta=1e-5, clip_norm=1.0, accountant="rdp"
    )
    assert plan.epsilon == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-6)
    assert plan.epsilon == pytest.approx(2.10137, abs=1e-5)


@pytest.mark.parametrize(("mode", "factor"), [("hooks", 0.95), ("ghost", 0.95), ("ghost", 1.05)])
def test_the_receipt_stops_the_first_step_if_the_noise_is_off_by_a_twentieth(monkeypatch, mode, factor):
    """50,000 samples: the standard error of the std is .0032, so .05 is 15 of them."""
    monkeypatch.setattr("fiberdp.trainer.receipt_steps", lambda numel: 50_000 // numel)
    right = Gaussian.release
    model, optimizer, criterion, loader, user = private("fiber", mode)
    before = vector(user)

    def scaled(self, clipped, stream, step, state=None):
        kept = clipped.total.clone()
        release = right(self, clipped, stream, step, state)
        return replace(release, value=kept / self.batch_size + (release.value - kept / self.batch_size) * factor)

    monkeypatch.setattr(Gaussian, "release", scaled)
    with pytest.raises(ReceiptError, match="std"):
        train(model, optimizer, criterion, loader, steps=1)
    assert torch.equal(vector(user), before)
    assert len(optimizer.ledger) == 0


def test_the_receipt_drives_the_engine_of_the_run(monkeypatch):
    """A gradient that is there although every loss is multiplied by 0 is caught, and the run's own noise is not used."""
    model, optimizer, criterion, loader, _ = private("dp-sgd", "hooks")
    right = HooksEngine.clipped

    def leaking(self, u, clip, scale, out):
        return right(self, {name: g + 1e-2 for name, g in u.items()}, clip, scale, out)

    train(model, optimizer, criterion, loader, steps=1)
    again, optimizer, criterion, loader, _ = private("dp-sgd", "hooks")
    criterion(again(DATA[0][:1]), DATA[1][:1])  # the set-up has compared the engine with the oracle
    optimizer.zero_grad()
    monkeypatch.setattr(HooksEngine, "clipped", leaking)
    with pytest.raises(ReceiptError, match=r"mean|correlation"):
        optimizer.prove()


@pytest.mark.parametrize("mode", [*MODES, "hooks without criterion"])
def test_empty_batches_are_steps_e19(mode, monkeypatch):
    drawn = Poisson.indices

    def indices(self, stream, step):
        found = drawn(self, stream, step)
        return found[:0] if step in (0, 2) else found

    monkeypatch.setattr(Poisson, "indices", indices)
    bare = "without" in mode
    model, optimizer, criterion, loader, user = private("dp-adamw", mode.split()[0], **({"criterion": None} if bare else {}), **wide())
    sizes = [len(x) for x, _ in loader]
    assert [size == 0 for size in sizes] == [True, False, True, False, False, False]
    train(model, optimizer, criterion, loader)
    assert len(optimizer.ledger) == 6
    assert_same(vector(user), vector(plain("dp-adamw", net(dtype=torch.float64), dataset=WIDE).model), tolerance=1e-9)


def test_an_empty_batch_keeps_the_structure_of_any_collate():
    rows = [{"x": torch.ones(3), "pair": (torch.ones(2, 2), 1), "name": "a"}]
    empty = WithEmpty(torch.utils.data.default_collate, rows)([])
    assert empty["x"].shape == (0, 3)
    assert [leaf.shape for leaf in empty["pair"]] == [(0, 2, 2), (0,)]
    assert empty["name"] == []


@pytest.mark.parametrize(("method", "mode"), [("fiber", "ghost"), ("fiber-lookahead", "hooks"), ("dp-sgd", "hooks")])
def test_a_resumed_run_is_the_run(method, mode, tmp_path):
    """By Opacus's own save_checkpoint and load_checkpoint, with secret keys, in the middle of an epoch."""
    options = {"keys": fiberdp.Keys.secret(), "epochs": 2}
    engine = PrivacyEngine(accountant="rdp")
    model, optimizer, criterion, loader, user = private(method, mode, privacy_engine=engine, **options)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.5)
    train(model, optimizer, criterion, loader, steps=4, scheduler=scheduler)
    engine.save_checkpoint(path=tmp_path / "checkpoint", module=model, optimizer=optimizer)
    plan = copy.deepcopy(optimizer.plan)
    train(model, optimizer, criterion, loader, scheduler=scheduler)
    train(model, optimizer, criterion, loader, scheduler=scheduler)

    fresh = PrivacyEngine(accountant="rdp")
    options["keys"] = fiberdp.Keys.secret()
    again, resumed, criterion, loader, twin = private(method, mode, privacy_engine=fresh, **options)
    scheduler = torch.optim.lr_scheduler.StepLR(resumed, step_size=3, gamma=0.5, last_epoch=-1)
    fresh.load_checkpoint(path=tmp_path / "checkpoint", module=again, optimizer=resumed)
    scheduler.last_epoch = 4
    assert resumed.plan == plan
    for _ in range(2):
        train(again, resumed, criterion, loader, scheduler=scheduler)
    assert len(resumed.ledger) == len(optimizer.ledger) == 12
    assert torch.equal(vector(twin), vector(user))
    assert fresh.accountant.history == engine.accountant.history
    assert resumed.epsilon == optimizer.epsilon == plan.epsilon


def test_a_state_of_another_plan_is_refused_and_a_missing_history_filled_in():
    engine = PrivacyEngine(accountant="rdp")
    model, optimizer, criterion, loader, _ = private(privacy_engine=engine)
    train(model, optimizer, criterion, loader, steps=2)
    stream = io.BytesIO()
    torch.save(optimizer.state_dict(), stream)
    stream.seek(0)
    state = torch.load(stream, weights_only=True)  # plain values and tensors
    with pytest.raises(ValueError, match=r"^optimizer state is of another plan: [^\n]*$"):
        private(noise_multiplier=2.0)[1].load_state_dict(state)
    with pytest.raises(ValueError, match=r"^optimizer state without 'fiberdp'[^\n]*$"):
        private()[1].load_state_dict(torch.optim.SGD(net().parameters(), lr=1.0).state_dict())
    fresh = PrivacyEngine(accountant="rdp")
    private(privacy_engine=fresh)[1].load_state_dict(state)
    assert fresh.accountant.history == [(1.0, B / N, 2)]
    other = PrivacyEngine(accountant="rdp")
    resumed = private(privacy_engine=other)[1]
    other.accountant.step(noise_multiplier=1.0, sample_rate=B / N)
    with pytest.raises(ValueError, match=r"^privacy_engine has 1 steps in its history, the state 2: [^\n]*$"):
        resumed.load_state_dict(state)


def test_the_ledger_is_written_before_the_release(tmp_path):
    model, optimizer, criterion, loader, _ = private("fiber", ledger=str(tmp_path / "ledger.jsonl"))
    seen = []
    optimizer._steps.heard = lambda release: seen.append(len(read_ledger(tmp_path / "ledger.jsonl").events))
    train(model, optimizer, criterion, loader)
    assert all(count > t for t, count in enumerate(seen))
    assert len(seen) == 6
    assert len(read_ledger(tmp_path / "ledger.jsonl").events) == 6


# What is refused, in one line


def line(*starts):
    return pytest.raises(ValueError, match=rf"^{'|^'.join(starts)}[^\n]*\Z")


def refused(**changes):
    """The line of a call that differs from a good one by `changes`."""
    with pytest.raises(ValueError) as caught:
        private(**changes)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("changes", "starts"),
    [
        ({"poisson_sampling": False}, "poisson_sampling=False: must be True"),
        ({"batch_first": False}, "batch_first=False: must be True"),
        ({"wrap_model": False}, "wrap_model=False: must be True"),
        ({"loss_reduction": "sum"}, "loss_reduction='sum': must be 'mean'"),
        ({"rand_on_empty": True}, "rand_on_empty=True: must be False"),
        ({"noise_generator": torch.Generator()}, "noise_generator: "),
        ({"max_grad_norm": [1.0, 1.0]}, "max_grad_norm=[1.0, 1.0]: must be one number"),
        ({"clipping": "adaptive"}, "clip='adaptive': must be one of"),
        ({"mode": "ew"}, "grad_sample_mode='ew': must be one of hooks, functorch, ghost"),
        ({"target_delta": 2.0}, "delta=2.0"),
        ({"epochs": 0}, "epochs=0"),
        ({"noise_multiplier": -1.0}, "noise_multiplier=-1.0"),
        ({"seed": 3}, "keys and seed: only one"),
        ({"target_unclipped_quantile": 0.5}, "no option target_unclipped_quantile"),
    ],
)
def test_options_that_cannot_be_honoured_are_refused(changes, starts):
    assert refused(**changes).startswith(starts)


def test_a_method_that_does_not_exist_and_a_clip_norm_that_bounds_nothing_are_refused():
    model = net()
    assert refused(model=model, method="fiberr", optimizer=torch_optimizer(model)).startswith("method='fiberr': must be one of")
    model, optimizer, criterion, loader, _ = private(max_grad_norm=math.inf)
    with line("clip_norm=inf with noise"):
        train(model, optimizer, criterion, loader)
    assert len(optimizer.ledger) == 0


def test_the_optimizers_rule_must_be_the_methods_and_nothing_of_it_is_ignored():
    def given(make, method="fiber"):
        model = net()
        return refused(model=model, method=method, optimizer=make(model))

    assert given(lambda m: torch.optim.SGD(m.parameters(), lr=0.1)).startswith(
        "optimizer is SGD with method 'fiber', which updates with adamw"
    )
    assert given(lambda m: torch.optim.AdamW(m.parameters()), "dp-sgd").startswith("optimizer is AdamW with method 'dp-sgd'")
    assert given(lambda m: torch.optim.RMSprop(m.parameters())).startswith("optimizer is RMSprop")
    assert given(lambda m: torch.optim.AdamW(m.parameters(), amsgrad=True)).startswith("optimizer has amsgrad")
    assert given(lambda m: torch.optim.Adam(m.parameters(), weight_decay=0.1)).startswith("optimizer has coupled weight_decay")
    assert given(lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, nesterov=True), "dp-sgd").startswith(
        "optimizer has nesterov"
    )
    assert given(lambda m: torch.optim.SGD(m.parameters(), lr=0.1, dampening=0.5), "dp-sgd").startswith("optimizer has dampening")
    model = net()
    groups = [{"params": list(model[:1].parameters())}, {"params": list(model[1:].parameters()), "lr": 0.5}]
    assert refused(model=model, optimizer=torch.optim.SGD(groups, lr=0.1)).startswith("optimizer has 2 param_groups with different numbers")
    assert refused(model=net(), optimizer=torch.optim.SGD(net().parameters(), lr=0.1)).startswith("optimizer holds 8 trainable parameters")
    model = net()
    used = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(DATA[0]).sum().backward()
    used.step()
    assert refused(model=model, optimizer=used).startswith("optimizer has taken steps already")
    model, optimizer, *_ = private("fiber")  # the numbers are the optimizer's
    update = optimizer.plan.method.update
    assert (update.lr, update.weight_decay, update.betas) == (0.01, 0.01, (0.9, 0.999))
    scheduled = replace(fiberdp.method("fiber"), schedule=fiberdp.optim.WarmupCosine(warmup=0.5))
    assert refused(method=scheduled).startswith("method.schedule=")


def test_models_loaders_and_engines_that_cannot_be_trained_privately_are_refused():
    norm = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(36), nn.Linear(36, 4))
    assert refused(model=norm).startswith("layer 1 is BatchNorm1d in training mode")
    assert refused(model=net().eval()).startswith("module: Opacus refuses it: Model needs to be in training mode")
    data = TensorDataset(*DATA)
    weighted = DataLoader(data, batch_size=B, sampler=WeightedRandomSampler(torch.ones(N), N))
    assert refused(loader=weighted).startswith("data_loader draws with WeightedRandomSampler")
    sampled = DataLoader(data, batch_sampler=torch.utils.data.BatchSampler(range(N), B, False))
    assert refused(loader=sampled).startswith("data_loader has a batch sampler of its own")

    class Stream(IterableDataset):
        def __iter__(self):
            return iter(data)

        def __len__(self):
            return N

    assert refused(loader=DataLoader(Stream(), batch_size=B)).startswith("data_loader is over an iterable data set")
    assert refused(loader=DataLoader(data, batch_size=N + 1)).startswith("batch_size=97")
    assert refused(privacy_engine=PrivacyEngine(accountant="gdp")).startswith("privacy_engine has accountant 'gdp'")
    used = PrivacyEngine(accountant="rdp")
    used.accountant.step(noise_multiplier=1.0, sample_rate=0.1)
    assert refused(privacy_engine=used).startswith("privacy_engine has 1 steps in its history")
    assert refused(method="mf-dp-ftrl", privacy_engine=PrivacyEngine(accountant="rdp")).startswith("privacy_engine with noise")
    augmented = replace(fiberdp.method("dp-sgd"), augmentation=fiberdp.augmentation.CropFlip(multiplicity=2))
    assert refused(method=augmented).startswith("method.augmentation=")


def test_correlated_noise_runs_without_opacus_accountant():
    method = fiberdp.method("mf-dp-ftrl", bands=3)
    model, optimizer, criterion, loader, user = private(method, "ghost")
    train(model, optimizer, criterion, loader)
    assert optimizer.receipt.passed
    assert_same(vector(user), vector(plain(method).model))


def test_a_grad_sample_module_is_taken_out_of_its_wrapping():
    model = net()
    optimizer = torch_optimizer(model)
    wrapped, private_optimizer, criterion, loader, _ = private(model=GradSampleModule(model), optimizer=optimizer)
    train(wrapped, private_optimizer, criterion, loader)
    assert isinstance(wrapped, GradSampleModule)
    assert_same(vector(model), vector(plain().model))


@pytest.mark.parametrize("mode", MODES)
def test_wrong_use_of_the_loop_is_refused(mode):
    model, optimizer, criterion, loader, user = private("fiber", mode, **wide())
    (x, y), before = next(iter(loader)), vector(user)
    with line("optimizer.step\\(\\): no training pass since"):
        optimizer.step()
    with line("criterion: no training pass came before it"):
        criterion(torch.zeros(len(y), 4, requires_grad=True), y)
    with line("optimizer.prove\\(\\): no batch was seen yet"):
        optimizer.prove()
    output = model(x)
    with line("model: a second training pass before"):
        model(x)
    with line("criterion: none of its arguments is what the model returned"):
        criterion(output * 2, y)
    with line("optimizer.step\\(\\): no backward pass"):
        optimizer.step()
    loss = criterion(output, y)
    with line("criterion: called twice"):
        criterion(output, y)
    with line("loss: it cannot be added to or multiplied"):
        loss * 2
    with line("loss: it cannot be added to or multiplied"):
        loss + loss
    loss.backward()
    with line("loss.backward\\(\\): this batch has had its backward pass"):
        loss.backward()
    optimizer.zero_grad()
    with line("loss.backward\\(\\): this batch has had"):
        loss.backward()
    loss = criterion(model(x), y)
    x.mul_(2)
    with line("the batch was changed in place"):
        loss.backward()
    optimizer.zero_grad()
    other = WIDE[0][: len(y) + 1], WIDE[1][: len(y) + 1]
    criterion(model(other[0]), other[1]).backward()
    with line("step 0: its batch is not the one"):
        optimizer.step()
    for value in ("noise_multiplier", "max_grad_norm", "expected_batch_size"):
        with line(f"optimizer.{value} cannot be set"):
            setattr(optimizer, value, 1)
    assert torch.equal(vector(user), before)
    assert len(optimizer.ledger) == 0
    train(model, optimizer, criterion, loader)  # and after all that it trains
    assert_same(vector(user), vector(plain("fiber", net(dtype=torch.float64), dataset=WIDE).model), tolerance=1e-9)


def test_in_mode_ghost_a_backward_pass_past_the_criterion_is_refused():
    model, _, _, loader, _ = private("dp-sgd", "ghost")
    x, y = next(iter(loader))
    with line("backward\\(\\): in mode ghost it must start from"):
        nn.functional.cross_entropy(model(x), y).backward()


def test_a_skipped_batch_and_a_step_past_the_plan_are_refused():
    model, optimizer, criterion, loader, _ = private("dp-sgd", "ghost")
    batches = iter(loader)
    sizes = [len(optimizer._batches._draw(t)) for t in range(2)]
    assert sizes[0] != sizes[1]
    next(batches)
    x, y = next(batches)
    criterion(model(x), y).backward()
    with line("step 0: its batch is not the one"):
        optimizer.step()
    train(model, optimizer, criterion, loader)
    assert list(loader) == []
    criterion(model(x), y).backward()
    with line("step 6 of a plan of 6 steps"):
        optimizer.step()


def test_a_model_that_was_moved_or_unfrozen_is_refused():
    model, optimizer, criterion, loader, user = private("dp-sgd", "ghost")
    user.to(torch.float64).to(torch.float32)
    with line("parameter 0.weight no longer lies in theta"):
        model(DATA[0])
    model, optimizer, criterion, loader, user = private("dp-sgd", "hooks")
    train(model, optimizer, criterion, loader, steps=1)
    user[0].bias.requires_grad_(False)
    with line("the set of trainable parameters changed"):
        model(DATA[0])


def test_only_the_rate_may_change_and_for_all_groups_alike():
    model, optimizer, criterion, loader, _ = private("fiber", "ghost")
    torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=6)
    with line("param_groups now have betas="):
        train(model, optimizer, criterion, loader)


@pytest.mark.parametrize("mode", ["hooks", "functorch"])
@pytest.mark.parametrize("method", ["fiber", "fiber-plus"])
def test_other_points_need_a_criterion_or_a_closure(mode, method):
    model, optimizer, _, loader, user = private(method, mode, criterion=None)
    before = vector(user)
    with line(f"optimizer.step\\(\\): method '{method}' evaluates examples at another point"):
        train(model, optimizer, None, loader)
    assert torch.equal(vector(user), before)


def test_a_criterion_that_mixes_examples_or_returns_one_number_is_refused():
    model, optimizer, criterion, loader, _ = private(criterion=lambda output, y: nn.functional.cross_entropy(output, y))
    with line("criterion returned shape \\(\\) for"):
        train(model, optimizer, criterion, loader)
    model, optimizer, criterion, loader, _ = private(criterion=lambda output, y: (output - output.mean(0)).square().sum(1))
    with line("loss_fn gives an example another loss"):
        train(model, optimizer, criterion, loader)


class Unseen(nn.Module):
    """Uses its layer's weight a second time, past the layer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.layer, self.head = nn.Linear(36, 36), nn.Linear(36, 4)

    def forward(self, x):
        return self.head(torch.tanh(self.layer(x.flatten(1))) @ self.layer.weight)


def test_a_use_of_a_weight_that_hooks_do_not_see_is_refused_and_ghost_sees_it():
    model = Unseen()
    wrapped, optimizer, criterion, loader, _ = private(model=model, optimizer=torch_optimizer(model))
    with line("parameter layer.weight: on synthetic examples Opacus's per-example gradients"):
        train(wrapped, optimizer, criterion, loader)
    model = Unseen()
    wrapped, optimizer, criterion, loader, _ = private(model=model, optimizer=torch_optimizer(model), mode="ghost")
    train(wrapped, optimizer, criterion, loader)
    assert_same(vector(model), vector(plain(model=Unseen()).model), vector(Unseen()))


# The criterion


@pytest.mark.parametrize("mode", MODES)
def test_ignored_labels_divide_by_the_valid_ones_of_their_example_e07(mode):
    labels = torch.tensor([[1, -100, -100, -100], [-100, -100, -100, -100], [1, 0, 1, -100]])
    x = torch.randn(3, 4, 3, generator=torch.Generator().manual_seed(7))
    model = nn.Linear(3, 2)
    start = vector(model)

    class Causal(nn.CrossEntropyLoss):
        def forward(self, output, target):
            return super().forward(output.transpose(1, 2), target)

    found = make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0), data_loader=DataLoader(TensorDataset(x, labels), batch_size=3),
        criterion=Causal(), method="dp-sgd", noise_multiplier=0.0, target_delta=1e-5, epochs=1, max_grad_norm=100.0, grad_sample_mode=mode,
    )  # fmt: skip
    wrapped, optimizer, criterion, loader = found
    train(wrapped, optimizer, criterion, loader)
    weight, bias = start[:6].view(2, 3).requires_grad_(), start[6:].requires_grad_()
    rows = [0, 2]  # the loss of the second, alone, is 0/0; its gradient must be 0
    alone = sum(nn.functional.cross_entropy(x[i] @ weight.T + bias, labels[i], ignore_index=-100) for i in rows)
    expected = torch.cat([g.flatten() for g in torch.autograd.grad(alone, (weight, bias))]) / 3
    torch.testing.assert_close(start.detach() - vector(model), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mode", MODES)
def test_evaluation_is_at_the_weights_and_leaves_the_step_alone(mode):
    """Between forward and backward of a look-ahead step, in eval mode: the model at theta, and the criterion a number."""
    model, optimizer, criterion, loader, user = private("fiber-lookahead", mode, **wide())
    train(model, optimizer, criterion, loader, steps=2)
    held = copy.deepcopy(user)
    x, y = next(iter(loader))
    output = model(x)
    model.eval()
    with torch.no_grad():
        assert torch.equal(model(WIDE[0]), held(WIDE[0]))
        assert isinstance(criterion(model(WIDE[0]), WIDE[1]), torch.Tensor)
    model.train()
    loss = criterion(output, y)
    assert isinstance(loss, PrivateLoss)
    assert loss.item() == pytest.approx(float(loss)) == pytest.approx(float(loss.detach()))
    loss.backward()
    optimizer.step()
    train(model, optimizer, criterion, loader)
    assert_same(vector(user), vector(plain("fiber-lookahead", net(dtype=torch.float64), dataset=WIDE).model), tolerance=1e-9)
    assert all(p.grad is None for p in user.parameters())  # no raw gradient is left to be read


def test_nothing_piles_up_on_the_parameters():
    model, optimizer, criterion, loader, user = private("fiber", "hooks")
    train(model, optimizer, criterion, loader, steps=3)
    model(DATA[0])
    optimizer.zero_grad()  # a pass that was not finished
    for p in user.parameters():
        assert p.grad is None
        assert p.grad_sample is None
        assert p._forward_counter == 0
        assert not hasattr(p, "_current_grad_sample")
    assert not any(getattr(layer, "activations", None) for layer in user.modules())


def test_averaged_weights_can_be_had():
    method = replace(fiberdp.method("dp-sgd"), averaging=fiberdp.optim.EMAWeights(decay=0.5))
    model, optimizer, criterion, loader, _ = private(method, "ghost")
    train(model, optimizer, criterion, loader)
    run = plain(method)
    torch.testing.assert_close(optimizer.averaged_state_dict(), run.flat.state_dict(run.optimizer.theta_bar), rtol=1e-6, atol=1e-7)
    assert private()[1].averaged_state_dict() is None


def test_workers_draw_the_same_batches():
    loader = DataLoader(TensorDataset(*DATA), batch_size=B, shuffle=True, num_workers=2)
    model, optimizer, criterion, batches, user = private("dp-sgd", "ghost", loader=loader)
    train(model, optimizer, criterion, batches)
    assert_same(vector(user), vector(plain().model))


@pytest.mark.parametrize("mode", MODES)
def test_a_copy_or_a_file_of_the_module_holds_no_keys(mode):
    model, optimizer, criterion, loader, user = private("fiber", mode)
    train(model, optimizer, criterion, loader, steps=2)
    for module in (model, user):
        stream = io.BytesIO()
        if mode != "functorch":  # Opacus keeps functions there that cannot be written
            torch.save(module, stream)
        assert KEYS.key not in stream.getvalue()
    twin = copy.deepcopy(model)
    assert torch.equal(twin.eval()(WIDE[0].float()), model.eval()(WIDE[0].float()))
    model.train()
    train(model, optimizer, criterion, loader)  # and the copy's pass was not this run's
    assert len(optimizer.ledger) == 6


def test_a_model_that_opacus_refuses_may_be_trained_in_mode_ghost():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(4)
            self.attention, self.head = nn.MultiheadAttention(6, 2, batch_first=True), nn.Linear(36, 4)

        def forward(self, x):
            x = x.squeeze(1)
            return self.head(self.attention(x, x, x, need_weights=False)[0].flatten(1))

    assert refused(model=Attention()).startswith("module: Opacus refuses it: ")
    model = Attention()
    wrapped, optimizer, criterion, loader, _ = private("fiber", "ghost", model=model)
    train(wrapped, optimizer, criterion, loader)
    assert_same(vector(model), vector(plain("fiber", Attention()).model), vector(Attention()))
