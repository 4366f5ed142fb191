"""Every engine: the exact clipped sum, and a sensitivity that no example can break."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import fiberdp
from fiberdp import _tree
from fiberdp.clipping import CLIPS, Flat
from fiberdp.engines import ENGINES, GhostEngine, Loss, check_loss, check_model
from fiberdp.engines.loop import LoopEngine
from fiberdp.engines.sums import squared_norms
from fiberdp.flat import FlatParameters
from fiberdp.types import Probe

PROBES = {
    "one": [Probe(1.0, 0.0)],
    "look-ahead": [Probe(1.0, 2 / 3)],
    "two": [Probe(0.05, 0.0), Probe(0.95, 0.7)],
    "two, extrapolating": [Probe(-0.7, 0.0), Probe(1.7, 0.4)],
    "three": [Probe(0.5, 0.0), Probe(-0.25, 0.3), Probe(0.75, 1.1)],
}


class Tied(nn.Module):
    """An embedding and an output layer that share one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.hidden = nn.Linear(4, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.hidden(self.embedding(ids))))


class Untied(Tied):
    """The same with a weight each."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = nn.Parameter(torch.randn(7, 4))


def cross_entropy(model, batch):
    logits = model(batch["x"])
    if logits.dim() == 3:  # tokens: mean over those of one example
        return nn.functional.cross_entropy(logits.transpose(1, 2), batch["y"], reduction="none").mean(1)
    return nn.functional.cross_entropy(logits, batch["y"], reduction="none")


def mlp():
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.LayerNorm(6), nn.Linear(6, 3)), (5,), 3


def cnn():
    layers = nn.Conv2d(2, 4, 3, stride=2, padding=1), nn.GroupNorm(2, 4), nn.Tanh(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16, 3)
    return nn.Sequential(*layers), (2, 8, 8), 3


def frozen():
    model = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 3))
    model[0].weight.requires_grad_(False)
    return model, (5,), 3


MODELS = {"mlp": mlp, "cnn": cnn, "frozen": frozen}


def problem(kind: str, examples: int, dtype=torch.float64):
    torch.manual_seed(1)
    if kind in ("tied", "untied"):
        model, batch = (
            Tied() if kind == "tied" else Untied(),
            {"x": torch.randint(0, 7, (examples, 3)), "y": torch.randint(0, 7, (examples, 3))},
        )
    else:
        model, shape, classes = MODELS[kind]()
        batch = {"x": torch.randn(examples, *shape, dtype=dtype), "y": torch.randint(0, classes, (examples,))}
    flat = FlatParameters(model.to(dtype))
    d = torch.randn_like(flat.theta)
    return flat, Loss(model, cross_entropy), batch, d


def clipped(engine: str, flat, loss, batch, d, probes, clip):
    return ENGINES[engine](flat, loss).clipped_sum(probes, d, batch, clip, seed=3)


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("probes", PROBES)
@pytest.mark.parametrize("kind", [*MODELS, "tied"])
@pytest.mark.parametrize("engine", [name for name in ENGINES if name != "loop"])
def test_engine_gives_the_oracles_clipped_sum(engine, kind, probes, clip):
    flat, loss, batch, d = problem(kind, examples=9)
    rule = CLIPS[clip](clip_norm=0.5)
    ours = clipped(engine, flat, loss, batch, d, PROBES[probes], rule)
    oracle = clipped("loop", flat, loss, batch, d, PROBES[probes], rule)
    assert ours.sensitivity == oracle.sensitivity == 0.5
    torch.testing.assert_close(ours.total, oracle.total, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", [*MODELS, "tied", "untied"])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_sum_is_added_to_what_is_handed_in_and_owes_nothing_to_what_memory_held(engine, kind, monkeypatch):
    """Without `out` the total may start from memory of any content: here NaN."""
    flat, loss, batch, d = problem(kind, examples=5)
    rule = Flat(clip_norm=0.5)
    alone = clipped(engine, flat, loss, batch, d, PROBES["two"], rule).total
    start = torch.randn_like(flat.theta)
    found = ENGINES[engine](flat, loss).clipped_sum(PROBES["two"], d, batch, rule, seed=3, out=start.clone())
    torch.testing.assert_close(found.total, start + alone, rtol=1e-12, atol=1e-12)
    real = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: real(*a, **k).fill_(math.nan) if a[0].is_floating_point() else real(*a, **k))
    assert torch.equal(clipped(engine, flat, loss, batch, d, PROBES["two"], rule).total, alone)


def test_the_oracle_itself_against_plain_autograd():
    """A second route: backward() on one example at a time, combined and clipped by hand."""
    flat, loss, batch, d = problem("mlp", examples=4)
    theta, expected = flat.theta.clone(), torch.zeros_like(flat.theta)
    for i in range(4):
        u = torch.zeros_like(theta)
        for weight, lookahead in [(0.05, 0.0), (0.95, 0.7)]:
            flat.theta.copy_(theta + lookahead * d)
            flat.module.zero_grad()
            cross_entropy(flat.module, _tree.take(batch, slice(i, i + 1))).sum().backward()
            u += weight * torch.cat([p.grad.reshape(-1) for p in flat.module.parameters()])
        expected += u * min(1.0, 0.5 / float(u.norm()))
    flat.theta.copy_(theta)
    ours = LoopEngine(flat, loss).clipped_sum(PROBES["two"], d, batch, Flat(clip_norm=0.5), seed=0).total
    torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("engine", ENGINES)
def test_engine_in_float32(engine):
    flat, loss, batch, d = problem("cnn", examples=6, dtype=torch.float32)
    wide = problem("cnn", examples=6)
    wide[0].theta.copy_(flat.theta)
    batch64 = {"x": batch["x"].double(), "y": batch["y"]}
    ours = clipped(engine, flat, loss, batch, d, PROBES["two"], Flat(clip_norm=0.5)).total
    oracle = clipped("loop", *wide[:2], batch64, d.double(), PROBES["two"], Flat(clip_norm=0.5)).total
    assert float((ours.double() - oracle).norm() / oracle.norm()) < 1e-5


@pytest.mark.parametrize("probes", PROBES)
@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("engine", ENGINES)
def test_sensitivity_is_at_most_C_for_any_example_clip_and_probes(engine, clip, probes):
    """Adding one example, however extreme, moves the sum by at most C (float32, no tolerance: see NORM_SLACK)."""
    flat, loss, batch, d = problem("mlp", examples=5, dtype=torch.float32)
    rule = CLIPS[clip](clip_norm=0.37)
    without = clipped(engine, flat, loss, batch, d, PROBES[probes], rule).total.double()
    hostile = [torch.randn(5) * scale for scale in (1e-30, 1.0, 1e3, 1e30)] + [torch.full((5,), math.nan), torch.full((5,), math.inf)]
    for x in hostile:
        more = {"x": torch.cat([batch["x"], x[None]]), "y": torch.cat([batch["y"], torch.tensor([2])])}
        moved = (clipped(engine, flat, loss, more, d, PROBES[probes], rule).total.double() - without).norm()
        # the two sums are each rounded to float32: 1e-6 of their size
        assert float(moved) <= 0.37 + 1e-6 * float(without.norm()), (float(x[0]), float(moved))


def test_clipping_each_point_apart_would_break_the_sensitivity():
    """The test above has power: at a > 1 the sum of separately clipped points exceeds C (CASES E40 d)."""
    flat, loss, batch, d = problem("mlp", examples=1, dtype=torch.float64)
    batch = {"x": batch["x"] * 1e3, "y": batch["y"]}
    a, rule = 5.0, Flat(clip_norm=0.37)
    apart = sum(w * clipped("loop", flat, loss, batch, d, [Probe(1.0, look)], rule).total for w, look in [(1 - a, 0.0), (a, 3.0)])
    assert float(apart.norm()) > 1.5 * 0.37
    together = clipped("loop", flat, loss, batch, d, [Probe(1 - a, 0.0), Probe(a, 3.0)], rule).total
    assert float(together.norm()) <= 0.37


@pytest.mark.parametrize("size", [1, 10, 4095, 4096, 4097, 230_400, 10_000_000])
def test_norms_are_never_underestimated(size):
    """float32 norms within 1e-6 of float64 at any size; one-sidedness is covered by NORM_SLACK = 2^-20."""
    g = torch.randn(1, size, generator=torch.Generator().manual_seed(size)) * 0.01 + 0.01
    error = float((squared_norms(g) / g.double().square().sum(1)).sqrt() - 1)
    assert abs(error) < 9e-7


def test_naive_float32_dot_product_fails_that_bound():
    """The power of the test above: a plain sequential float32 sum of 10M squares is off by far more than 1e-6."""
    g = torch.randn(10_000_000, generator=torch.Generator().manual_seed(0)) * 0.01 + 0.01
    naive = torch.bmm(g[None, None], g[None, :, None]).double()
    assert abs(float((naive / g.double().square().sum()).sqrt() - 1)) > 1e-5


@pytest.mark.parametrize("engine", ENGINES)
def test_first_step_evaluates_one_point(engine):
    """d_{-1} = 0: with d None, two probes give the one-point sum (weights sum to 1)."""
    flat, loss, batch, _ = problem("mlp", examples=4)
    two = clipped(engine, flat, loss, batch, None, PROBES["two"], Flat(clip_norm=0.5)).total
    one = clipped(engine, flat, loss, batch, None, PROBES["one"], Flat(clip_norm=0.5)).total
    torch.testing.assert_close(two, one, rtol=1e-12, atol=0)


@pytest.mark.parametrize("engine", ENGINES)
def test_engine_leaves_theta_gradients_and_random_state_alone(engine):
    flat, loss, batch, d = problem("mlp", examples=4)
    theta, state = flat.theta.clone(), torch.get_rng_state()
    clipped(engine, flat, loss, batch, d, PROBES["two"], Flat(clip_norm=0.5))
    assert torch.equal(flat.theta, theta)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None for p in flat.module.parameters())


@pytest.mark.parametrize("engine", ENGINES)
def test_both_points_of_an_example_see_the_same_dropout(engine):
    """With d = 0 (a vector, not None) both points are evaluated; weights 2 and -1 must give the one-point gradient exactly."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 64), nn.Dropout(0.5), nn.Linear(64, 3)).double()
    flat = FlatParameters(model)
    batch = {"x": torch.randn(6, 5, dtype=torch.float64), "y": torch.randint(0, 3, (6,))}
    loss, zero = Loss(model, cross_entropy), torch.zeros_like(flat.theta)
    clip = Flat(clip_norm=math.inf)
    mixed = clipped(engine, flat, loss, batch, zero, [Probe(-1.0, 0.0), Probe(2.0, 0.5)], clip).total
    one = clipped(engine, flat, loss, batch, zero, [Probe(1.0, 0.0)], clip).total
    torch.testing.assert_close(mixed, one, rtol=1e-10, atol=1e-12)
    model[1].eval()
    assert not torch.allclose(one, clipped(engine, flat, loss, batch, zero, [Probe(1.0, 0.0)], clip).total)


def test_micro_batch_size_follows_the_memory_budget():
    flat, loss, batch, _ = problem("cnn", examples=1, dtype=torch.float32)
    sizes = [ENGINES["vmap"](flat, loss, memory_budget=b).micro_batch_size(batch, 2, 256) for b in (1, 2**16, 2**18, 2**30)]
    assert sizes[0] == 1
    assert sizes[-1] == 256
    assert sizes == sorted(sizes)
    assert len(set(sizes)) > 2


def test_ghost_splits_a_batch_evenly_within_its_budget(monkeypatch):
    flat, loss, batch, _ = problem("cnn", examples=1, dtype=torch.float32)
    budgets = (1, 2**15, 2**17, 2**30)
    one, two = ([ENGINES["ghost"](flat, loss, memory_budget=b).micro_batch_size(batch, points, 250) for b in budgets] for points in (1, 2))
    for sizes in (one, two):
        assert (sizes[0], sizes[-1]) == (1, 250)
        assert sizes == sorted(sizes)
        assert len(set(sizes)) > 2
    assert all(a >= b for a, b in zip(one, two))
    assert one != two
    free = ENGINES["ghost"](flat, loss)
    assert free.micro_batch_size(batch, 2, 1000) == 1000  # 8 MiB hold them
    assert free.micro_batch_size(batch, 2, 3) == 3
    monkeypatch.setattr("fiberdp.engines.ghost.SMALL", 0)
    assert free.micro_batch_size(batch, 2, 1000) == 250  # four parts of at most 256


def test_a_micro_batch_size_that_is_given_leaves_the_memory_budget_as_it_is():
    """What is materialised, and so the last bits, depends on the budget: a resumed run, which gives its size, must have the same."""
    plan = fiberdp.plan(
        method=fiberdp.method("fiber"), num_examples=64, batch_size=16, steps=1, noise_multiplier=1.0, delta=1e-3, clip_norm=1.0
    )
    data = {"x": torch.randn(64, 5), "y": torch.randint(0, 3, (64,))}
    engines = [plan.private(mlp()[0], cross_entropy, data, micro_batch_size=size).pipeline.engine for size in (None, 4)]
    assert engines[0].memory_budget == engines[1].memory_budget != GhostEngine(engines[0].flat, engines[0].loss).memory_budget


def test_batch_norm_in_training_mode_is_refused_and_frozen_is_exact():
    """CASES E11 a, b."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()
    with pytest.raises(ValueError, match="layer 1 is BatchNorm1d in training mode"):
        check_model(model)
    model(torch.randn(50, 4, dtype=torch.float64))  # move the running statistics
    model.eval()
    check_model(model)
    flat = FlatParameters(model)
    batch = {"x": torch.randn(5, 4, dtype=torch.float64), "y": torch.randint(0, 2, (5,))}
    both = [clipped(name, flat, Loss(model, cross_entropy), batch, None, PROBES["one"], Flat(clip_norm=1.0)).total for name in ENGINES]
    for other in both[1:]:
        torch.testing.assert_close(other, both[0], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("loss_fn", "said"),
    [
        (lambda m, b: nn.functional.cross_entropy(m(b["x"]), b["y"]), r"shape \(\) for 2 examples"),
        (lambda m, b: m(b["x"]), r"shape \(2, 3\) for 2 examples"),
        (lambda m, b: 1.0, "float for 2 examples"),
    ],
)
def test_a_loss_that_is_not_one_number_an_example_is_refused(loss_fn, said):
    flat, _, batch, _ = problem("mlp", examples=1)
    with pytest.raises(ValueError, match=said):
        check_loss(Loss(flat.module, loss_fn), flat.views(flat.theta), batch)


def test_what_vmap_cannot_vectorise_is_refused_in_one_line():
    class Branch(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(5, 3)

        def forward(self, x):
            return self.layer(x) if x.sum() > 0 else self.layer(-x)

    model = Branch().double()
    batch = {"x": torch.randn(3, 5, dtype=torch.float64), "y": torch.randint(0, 3, (3,))}
    with pytest.raises(ValueError, match="engine='loop'") as error:
        clipped("vmap", FlatParameters(model), Loss(model, cross_entropy), batch, None, PROBES["one"], Flat(clip_norm=1.0))
    assert "\n" not in str(error.value)
    clipped("loop", FlatParameters(model), Loss(model, cross_entropy), batch, None, PROBES["one"], Flat(clip_norm=1.0))


def test_text_fields_are_refused_by_vmap_and_served_by_loop():
    model = nn.Linear(2, 1).double()
    batch = {"x": torch.randn(2, 2, dtype=torch.float64), "text": ["a", "bbb"]}

    def loss_fn(m, b):
        return m(b["x"]).squeeze(1) * len(b["text"][0])

    flat = FlatParameters(model)
    with pytest.raises(ValueError, match="not a tensor"):
        clipped("vmap", flat, Loss(model, loss_fn), batch, None, PROBES["one"], Flat(clip_norm=math.inf))
    total = clipped("loop", flat, Loss(model, loss_fn), batch, None, PROBES["one"], Flat(clip_norm=math.inf)).total
    torch.testing.assert_close(total[:2], batch["x"][0] + 3 * batch["x"][1])
    unread = clipped("vmap", flat, Loss(model, lambda m, b: m(b["x"]).squeeze(1)), batch, None, PROBES["one"], Flat(clip_norm=math.inf))
    torch.testing.assert_close(unread.total[:2], batch["x"].sum(0))
