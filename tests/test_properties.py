"""What must hold for any input, tried on inputs that hypothesis draws: the same ones in every run, and nothing is kept of them."""

from __future__ import annotations

import json
import math
import tempfile
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from dp_accounting import (
    ComposedDpEvent,
    GaussianDpEvent,
    NoOpDpEvent,
    PoissonSampledDpEvent,
    SampledWithoutReplacementDpEvent,
    SelfComposedDpEvent,
)
from hypothesis import HealthCheck, Phase, assume, example, given, settings
from hypothesis import strategies as st
from torch import nn

import fiberdp
from fiberdp import _tree
from fiberdp.accounting import ACCOUNTANTS, Ledger, compose, epsilon, from_json, noise_multiplier, read_ledger, to_json
from fiberdp.augmentation import CropFlip
from fiberdp.checkpoint import load_checkpoint, save_checkpoint
from fiberdp.clipping import CLIPS
from fiberdp.engines import ENGINES, Loss
from fiberdp.filters import FILTERS
from fiberdp.flat import FlatParameters
from fiberdp.methods import METHODS, Method
from fiberdp.observation import OnePoint, TwoPoint
from fiberdp.optim import EMAWeights, Optimizer
from fiberdp.planning import Plan
from fiberdp.scaling import SecondMoment
from fiberdp.types import Noise, Probe, Release


def many(count: int, *, slow: bool = False):
    """`count` examples, drawn without chance, with no time limit of their own and no data base.  slow: a failure is reported as found,
    since a search for a smaller one would take minutes."""
    phases = [Phase.explicit, Phase.generate, *([] if slow else [Phase.shrink])]
    return settings(
        max_examples=count, derandomize=True, deadline=None, database=None, phases=phases, suppress_health_check=list(HealthCheck)
    )  # fmt: skip


# Sensitivity -------------------------------------------------------------------------------------------------------------

MAGNITUDES = [0.0, 1e-45, 1e-38, 2.6e-23, 1e-19, 1e-8, 0.3, 1.0, 30.0, 1e8, 1.5e18, 1e30, 3e38, math.nan, math.inf, -math.inf]
ORDINARY = [0.3, 1.0, 30.0]
PROBES = {
    "one": OnePoint().probes(),
    "look-ahead": TwoPoint.look_ahead(kappa=0.6).probes(),
    "two, a < 1": TwoPoint(kappa=0.6, gamma=0.9).probes(),
    "two, a > 1": TwoPoint(kappa=0.3, gamma=0.5, allow_extrapolation=True).probes(),
    "two, a = 9801": TwoPoint(kappa=0.01, gamma=0.0101, allow_extrapolation=True).probes(),
}
ANY = st.lists(st.builds(Probe, st.floats(-1e6, 1e6), st.floats(-3, 3)), min_size=1, max_size=3)
STARTED = st.sampled_from([None, 1.0, 1e-3])  # how long d is; a short one makes large weights of both signs nearly cancel
CLIP_NORMS = st.sampled_from([1e-6, 1e-3, 0.37, 1.0, 1e3])


class Products(nn.Module):
    """f = < a h + tanh(b h), y > over positions, h = x + e[id]: the examples decide both factors of every gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.e, self.a, self.b = nn.Embedding(3, 4), nn.Linear(4, 2, bias=False), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        h = x + self.e(ids)
        return self.a(h) + torch.tanh(self.b(h))


def products(model, batch):
    return (model(batch["x"], batch["ids"]) * batch["y"]).sum((1, 2))


def _workers():
    """Per engine one worker on the same theta, and d: what they prepare once serves all examples.  Small layers are
    materialised by ghost, so there is one that may not."""
    torch.manual_seed(5)
    flat = FlatParameters(Products())
    with torch.no_grad():
        flat.module.e.weight.mul_(1e-30)  # so that a tiny x stays tiny
    found = {name: engine(flat, Loss(flat.module, products)) for name, engine in ENGINES.items()}
    found["ghost, nothing materialised"] = ENGINES["ghost"](flat, Loss(flat.module, products), memory_budget=1)
    return found, torch.randn_like(flat.theta)


@st.composite
def batches(draw):
    """1 to 4 examples of 1 or 3 positions: a direction times a magnitude for each factor, now and then one entry that is hostile."""
    rows, positions = draw(st.integers(1, 4)), draw(st.sampled_from([1, 3]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 5)))
    magnitude = st.sampled_from(draw(st.sampled_from([MAGNITUDES, ORDINARY])))
    batch = {
        "x": torch.randn(rows, positions, 4, generator=generator),
        "y": torch.randn(rows, positions, 2, generator=generator),
        "ids": torch.randint(0, 3, (rows, positions), generator=generator),
    }
    for name in ("x", "y"):
        batch[name] *= torch.tensor([draw(magnitude) for _ in range(rows)])[:, None, None]
        if draw(st.booleans()):
            batch[name][draw(st.integers(0, rows - 1)), 0, 0] = draw(magnitude)
    if rows > 1 and draw(st.booleans()):
        batch = _tree.map_leaves(lambda leaf: torch.cat([leaf[1:2], leaf[1:]]), batch)  # the first two are equal
    return batch


@pytest.fixture(scope="module")
def workers():
    return _workers()


@pytest.mark.parametrize("probes", [*PROBES, "any"])
@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("engine", [*ENGINES, "ghost, nothing materialised"])
def test_one_example_moves_the_clipped_sum_by_at_most_the_sensitivity_and_a_replaced_one_by_twice_that(engine, clip, probes, workers):
    """Every single contribution is <= C (1 + 1e-6); sums of n are rounded n times, to 1e-6 of what they may hold."""

    @many(20)
    @given(batches(), batches(), CLIP_NORMS, ANY if probes == "any" else st.just(PROBES[probes]), STARTED, st.booleans())
    def check(batch, other, clip_norm, where, started, scaled):
        theirs, d = workers
        rule = CLIPS[clip](clip_norm=clip_norm)
        scale = torch.logspace(-3, 3, len(d)) if scaled else None

        def total(rows):
            found = theirs[engine].clipped_sum(where, started and d * started, rows, rule, seed=3, scale=scale)
            assert found.sensitivity == clip_norm
            assert found.total.isfinite().all()
            return found.total.double()

        whole, size = total(batch), len(batch["x"])
        assert float(total(_tree.take(batch, slice(0, 1))).norm()) <= clip_norm * (1 + 1e-6)
        assert float((whole - total(_tree.take(batch, slice(1, None)))).norm()) <= clip_norm * (1 + 1e-6 * size)
        replaced = {name: torch.cat([other[name][:1, : leaf.shape[1]].expand_as(leaf[:1]), leaf[1:]]) for name, leaf in batch.items()}
        assert float((whole - total(replaced)).norm()) <= 2 * clip_norm * (1 + 1e-6 * size)

    check()


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_factor_whose_square_underflows_is_still_clipped(engine, compiled, monkeypatch):
    """x = 2.6e-23 has the square 0 in float32, but the gradient x y with y = 1e18 is not small."""
    if not compiled:
        monkeypatch.setattr("fiberdp.engines.parts.compiled_gram", lambda *_: None)
    for positions in (1, 3):
        layer = nn.Linear(784, 10, bias=False)
        batch = {"x": torch.full((1, positions, 784), 2.6e-23), "y": torch.full((1, positions, 10), 1e18)}
        worker = ENGINES[engine](FlatParameters(layer), Loss(layer, lambda m, b: (m(b["x"]) * b["y"]).sum((1, 2))))
        for clip in CLIPS.values():
            total = worker.clipped_sum([Probe(1.0, 0.0)], None, batch, clip(clip_norm=1e-4), seed=0).total
            assert float(total.double().norm()) <= 1e-4 * (1 + 1e-6)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_factor_below_the_normal_range_is_0_not_rounded_up(engine):
    """A gradient of norm 1e38 clipped to 1e-6 has the factor 1e-44: the nearest float32 numbers are 40 % apart."""
    layer = nn.Linear(1, 1, bias=False)
    worker = ENGINES[engine](FlatParameters(layer), Loss(layer, lambda m, b: m(b["x"]).squeeze(1) * b["y"]))
    for x in torch.linspace(0.9, 1.1, 40):
        batch = {"x": x.view(1, 1) * 1e19, "y": torch.tensor([1e19])}
        for clip in CLIPS.values():
            total = worker.clipped_sum([Probe(1.0, 0.0)], None, batch, clip(clip_norm=1e-6), seed=0).total
            assert abs(float(total)) <= 1e-6 * (1 + 1e-6)


@pytest.mark.parametrize("engine", ENGINES)
def test_automatic_clipping_of_a_tiny_stability_keeps_a_zero_gradient_zero(engine):
    layer = nn.Linear(3, 1, bias=False)
    worker = ENGINES[engine](FlatParameters(layer), Loss(layer, lambda m, b: m(b).squeeze(1)))
    for stability in (1e-30, 1e-300):
        for x in (0.0, 1e-30, 1.0):
            rule = CLIPS["automatic"](clip_norm=1e3, stability=stability)
            total = worker.clipped_sum([Probe(1.0, 0.0)], None, torch.full((1, 3), x), rule, seed=0).total
            assert float(total.double().norm()) <= 1e3 * (1 + 1e-6)
            assert x > 0 or not total.any()


# Epsilon -----------------------------------------------------------------------------------------------------------------


def log_uniform(low: float, high: float):
    return st.floats(math.log(low), math.log(high)).map(math.exp)


SIGMAS, DELTAS = log_uniform(0.02, 200), log_uniform(1e-13, 0.5)
SAMPLED = st.one_of(log_uniform(1e-5, 1), st.just(1.0))
STEPS = log_uniform(1, 5000).map(round)


def poisson(sigma: float, q: float, steps: int):
    return SelfComposedDpEvent(PoissonSampledDpEvent(q, GaussianDpEvent(sigma)), steps)


@pytest.mark.parametrize(("accountant", "count"), [("pld", 12), ("rdp", 60), ("rdp-classic", 60)])
def test_epsilon_never_rises_with_sigma_and_delta_nor_falls_with_q_and_steps(accountant, count):
    """Nor is it negative or NaN.  A loss distribution is rounded up to its grid, which moves with sigma and q: 0.5 % are left for that."""
    slack = 1.005 if accountant == "pld" else 1 + 1e-9

    @many(count, slow=True)
    @given(SIGMAS, SAMPLED, STEPS, DELTAS, st.sampled_from([1.001, 1.1, 3.0]))
    @example(0.149, 0.01, 5, 1e-5, 1.1)  # where pld leaves what it answers by the Renyi bound
    @example(1.0, 0.01, 1000, 0.95e-10, 1.1)
    @example(3.0, 0.95, 20, 1e-6, 1.1)
    def check(sigma, q, steps, delta, more):
        def price(**changed):
            given = {"sigma": sigma, "q": q, "steps": steps, "delta": delta, **changed}
            return epsilon(poisson(given["sigma"], given["q"], given["steps"]), given["delta"], relation="zero_out", accountant=accountant)

        found = price()
        assert 0 <= found <= math.inf
        assert price(sigma=sigma * more) <= found * slack
        assert found <= price(q=min(1.0, q * more)) * slack
        assert found <= price(steps=math.ceil(steps * more)) * slack
        assert price(delta=min(0.9, delta * more)) <= found * slack

    check()


EVENTS = st.one_of(
    st.builds(GaussianDpEvent, SIGMAS),
    st.builds(lambda q, sigma: PoissonSampledDpEvent(q, GaussianDpEvent(sigma)), st.floats(0, 1), SIGMAS),
    st.just(NoOpDpEvent()),
)
RUNS = st.lists(st.one_of(EVENTS, st.builds(SelfComposedDpEvent, EVENTS, st.integers(0, 500))), max_size=6)


@st.composite
def shuffled(draw):
    events = draw(RUNS)
    return events, draw(st.permutations(events))


@many(60)
@given(shuffled(), DELTAS, st.sampled_from(["rdp", "rdp-classic"]))
def test_the_order_of_events_does_not_matter(both, delta, accountant):
    first, second = both
    assert compose(first) == compose(second)
    prices = {
        epsilon(event, delta, relation="add_or_remove_one", accountant=accountant)
        for event in (compose(first), ComposedDpEvent(first), ComposedDpEvent(second), ComposedDpEvent([compose(second), NoOpDpEvent()]))
    }
    assert len(prices) == 1


@many(60)
@given(EVENTS, st.integers(0, 300), st.integers(0, 300), DELTAS)
def test_a_repeated_event_may_be_split(event, some, others, delta):
    whole = SelfComposedDpEvent(event, some + others)
    parts = [SelfComposedDpEvent(event, some), SelfComposedDpEvent(event, others)]
    nested = SelfComposedDpEvent(SelfComposedDpEvent(event, some + others), 1)
    prices = {
        epsilon(e, delta, relation="add_or_remove_one", accountant="rdp") for e in (whole, compose(parts), ComposedDpEvent(parts), nested)
    }
    assert len(prices) == 1
    assert compose([event] * 3 + [event] * 4) == compose([event] * 7)


@many(6, slow=True)
@given(shuffled(), st.sampled_from([1e-9, 1e-5, 1e-2]))
@example(([poisson(1.0, 0.01, 500), poisson(2.0, 0.02, 300)], [poisson(2.0, 0.02, 300), poisson(1.0, 0.01, 500)]), 1e-5)
def test_the_order_of_events_does_not_matter_to_a_loss_distribution(both, delta):
    first, second = (epsilon(ComposedDpEvent(events), delta, relation="add_or_remove_one") for events in both)
    assert first == second


@pytest.mark.parametrize("accountant", ACCOUNTANTS)
def test_calibrated_noise_meets_its_target_and_wastes_at_most_a_hundredth(accountant):
    """With pld Gaussian releases, which are exact and quick.  The Renyi orders show no epsilon below log(1/delta) / (largest - 1)."""
    largest = {"pld": math.inf, "rdp": 1024, "rdp-classic": 63}[accountant]

    @many(40 if accountant == "pld" else 10, slow=True)
    @given(log_uniform(0.05, 30), log_uniform(1e-13, 1e-2), log_uniform(1e-3, 1), STEPS)
    def check(target, delta, q, steps):
        assume(target > 2 * math.log(1 / delta) / (largest - 1))

        def event(sigma):
            return SelfComposedDpEvent(GaussianDpEvent(sigma), steps) if accountant == "pld" else poisson(sigma, q, steps)

        sigma = noise_multiplier(event, target, delta, relation="add_or_remove_one", accountant=accountant)
        assert 0.99 * target <= epsilon(event(sigma), delta, relation="add_or_remove_one", accountant=accountant) <= target

    check()


# Written and read again --------------------------------------------------------------------------------------------------

FLOATS = st.floats(allow_nan=False, allow_infinity=False)
POSITIVE = st.floats(5e-324, 1e300)
ANY_EVENT = st.recursive(
    st.one_of(
        st.builds(GaussianDpEvent, POSITIVE),
        st.builds(lambda q, sigma: PoissonSampledDpEvent(q, GaussianDpEvent(sigma)), st.floats(0, 1), POSITIVE),
        st.builds(lambda n, b, s: SampledWithoutReplacementDpEvent(n + b, b, GaussianDpEvent(s)), st.integers(1), st.integers(0), POSITIVE),
        st.just(NoOpDpEvent()),
    ),
    lambda events: st.one_of(
        st.builds(SelfComposedDpEvent, events, st.integers(0, 10**12)), st.builds(ComposedDpEvent, st.lists(events, max_size=3))
    ),
    max_leaves=5,
)


def through_text(value):
    return json.loads(json.dumps(value))


@many(200)
@given(ANY_EVENT)
def test_an_event_is_read_as_it_was_written(event):
    again = from_json(through_text(to_json(event)))
    assert again == event
    assert json.dumps(to_json(again)) == json.dumps(to_json(event))  # 0.0 and -0.0, 1 and 1.0 are equal but not the same


@st.composite
def methods(draw):
    """A method of the table with options changed, and what none of them has: copies, scaling, an average of the weights."""
    method = METHODS[draw(st.sampled_from(sorted(METHODS)))]
    rate = draw(st.floats(1e-300, 1e300))
    method = replace(method, name=draw(st.text(max_size=8)), update=replace(method.update, lr=rate))
    if draw(st.booleans()):
        method = replace(method, observation=TwoPoint(kappa=draw(st.floats(0.5, 0.999)), gamma=draw(st.floats(1, 50))))
    if draw(st.booleans()):
        method = replace(method, filter=FILTERS["innovation"](omega=draw(st.floats(1e-9, 1))))
    if draw(st.booleans()):
        method = replace(
            method, averaging=EMAWeights(decay=draw(st.floats(0, 0.999))), scaling=SecondMoment(offset=draw(log_uniform(1e-9, 9)))
        )
    if draw(st.booleans()):
        method = replace(method, augmentation=CropFlip(padding=draw(st.integers(0, 9)), flip=draw(st.booleans()), multiplicity=2))
    return method


@many(200)
@given(methods())
def test_a_method_is_read_as_it_was_written(method):
    text = json.dumps(method.to_json())
    again = Method.from_json(json.loads(text))
    assert again == method
    assert json.dumps(again.to_json()) == text
    assert all(type(getattr(again, f.name)) is type(getattr(method, f.name)) for f in fields(Method))


@st.composite
def plans(draw):
    method = draw(methods())
    batch_size = draw(st.integers(1, 100))
    rounds = draw(st.integers(8, 50))  # mf-dp-ftrl has 8 bands
    clip = draw(st.sampled_from(sorted(CLIPS)))
    sampling = draw(st.sampled_from(["poisson", "fixed_size", "shuffle", "cyclic"])) if method.mechanism.sampling == "poisson" else None
    return fiberdp.plan(
        method=method, num_examples=batch_size * rounds + draw(st.integers(0, 5)), batch_size=batch_size, steps=draw(st.integers(1, 10**7)),
        noise_multiplier=draw(st.floats(0, 1e300)), delta=draw(st.floats(5e-324, 1, exclude_max=True)), clip_norm=draw(POSITIVE),
        clip=clip, sampling=sampling, accountant=draw(st.sampled_from(ACCOUNTANTS)),
    )  # fmt: skip


@many(200)
@given(plans())
def test_a_plan_is_read_as_it_was_written(plan):
    text = json.dumps(plan.to_json())
    again = Plan.from_json(json.loads(text))
    assert again == plan
    assert json.dumps(again.to_json()) == text
    assert again.event(0) == plan.event(0)


@many(40)
@given(st.lists(ANY_EVENT, max_size=5), st.floats(5e-324, 1, exclude_max=True), st.booleans())
def test_a_ledger_is_read_as_it_was_written(events, delta, finished):
    terms = {"delta": delta, "relation": "add_or_remove_one", "accountant": "rdp"}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ledger.jsonl"
        with Ledger(path, terms) as ledger:
            for step, event in enumerate(events):
                ledger.spend(step, event)
            chain = ledger.finish() if finished else None
        found, before = read_ledger(path), path.read_bytes()
        assert (found.events, found.terms, found.finished) == (events, terms, finished)
        assert chain is None or found.chain == chain
        with Ledger(path, terms) as again:  # goes on where it ends, and repeats what it holds without writing
            assert len(again) == len(events)
            for step, event in enumerate(events):
                again.spend(step, event)
        assert path.read_bytes() == before


DTYPES = [torch.float32, torch.float64, torch.int64, torch.uint8, torch.bool, torch.bfloat16]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | FLOATS | st.sampled_from([math.inf, -math.inf]) | st.text(),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(st.text(), values, max_size=3),
    max_leaves=6,
)


@st.composite
def tensors(draw):
    """Any bits: NaNs with a payload and -0.0 among them; no elements and no dimensions too."""
    dtype, shape = draw(st.sampled_from(DTYPES)), draw(st.lists(st.integers(0, 3), max_size=3))
    size = math.prod(shape) * dtype.itemsize
    if dtype is torch.bool:
        return torch.tensor(draw(st.lists(st.booleans(), min_size=size, max_size=size)), dtype=torch.bool).view(shape)
    held = bytearray(draw(st.lists(st.sampled_from([0, 1, 0x7F, 0x80, 0xC0, 0xFF]), min_size=size, max_size=size)))
    return (torch.frombuffer(held, dtype=dtype) if size else torch.empty(0, dtype=dtype)).view(shape)


NAMES = st.text(min_size=1, max_size=12).filter(lambda name: name != "__metadata__")


@many(100)
@given(st.dictionaries(NAMES, tensors(), max_size=4), st.dictionaries(st.text(), JSON, max_size=4))
def test_a_checkpoint_is_read_as_it_was_written(held, state):
    with tempfile.TemporaryDirectory() as folder:
        save_checkpoint(Path(folder), held, state)
        again, found = load_checkpoint(Path(folder))
    assert json.dumps(found) == json.dumps(state)
    assert again.keys() == held.keys()
    for name, tensor in held.items():
        assert (again[name].dtype, again[name].shape) == (tensor.dtype, tensor.shape)
        assert bits(again[name]) == bits(tensor)


def bits(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


@many(60)
@given(methods(), st.integers(0, 4), st.integers(0, 2**31))
def test_every_vector_and_number_of_any_methods_state_survives_a_checkpoint(method, steps, seed):
    """By its name: what goes on from the file takes the same steps to the last bit."""
    generator = torch.Generator().manual_seed(seed)

    def fresh():
        parts = {name: getattr(method, name) for name in ("filter", "calibration", "update", "schedule", "averaging", "scaling")}
        return Optimizer(torch.linspace(-1, 1, 6), **parts, steps=8)

    def release(optimizer):
        return Release(torch.randn(6, generator=generator), Noise(0.25), optimizer.scale)

    ours, theirs = fresh(), fresh()
    for _ in range(steps):
        ours.step(release(ours))
    with tempfile.TemporaryDirectory() as folder:
        save_checkpoint(Path(folder), ours.state_dict(), {"step": steps})
        held, state = load_checkpoint(Path(folder))
    theirs.load_state_dict(held, state["step"])
    for more in range(3):
        if more:
            given = release(ours)
            ours.step(given)
            theirs.step(replace(given, value=given.value.clone()))
        assert theirs.lr == ours.lr
        assert theirs.state_dict().keys() == ours.state_dict().keys()
        for name, tensor in ours.state_dict().items():
            assert bits(theirs.state_dict()[name]) == bits(tensor), name
