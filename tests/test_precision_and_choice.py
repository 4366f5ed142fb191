"""bf16 and fp16 change gradients and no guarantee; compiled models; what engine="auto" chooses is kept; per-layer clips."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import fiberdp
from fiberdp import _tree, engines
from fiberdp._random import Keys
from fiberdp.clipping import Flat, PerLayer
from fiberdp.engines import ENGINES, Loss
from fiberdp.engines.loss import PRECISIONS
from fiberdp.flat import FlatParameters
from test_engines import PROBES, clipped, problem
from test_run_directory import Crash, CrashAfter, recipe

WHOLE = Flat(clip_norm=math.inf)


def in_half(kind, examples, precision):
    flat, loss, batch, d = problem(kind, examples, torch.float32)
    return flat, Loss(loss.module, loss.loss_fn, precision=precision), batch, d


def one_by_one(batch):
    return [_tree.take(batch, slice(i, i + 1)) for i in range(_tree.rows(batch))]


@pytest.mark.parametrize("probes", ["one", "two"])
@pytest.mark.parametrize("kind", ["mlp", "cnn", "tied"])
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_norms_are_those_of_what_is_summed_and_never_too_small_in_half_precision(precision, engine, kind, probes):
    """One example at a time, unclipped: the sum's norm in float64 is the norm that decides its factor; clipped, it is at most C."""
    flat, loss, batch, d = in_half(kind, 6, precision)
    if (engine, kind) == ("vmap", "mlp"):  # has a LayerNorm
        with pytest.raises(ValueError, match=rf"cannot vectorise this model in {precision} .* Use engine='ghost'"):
            clipped(engine, flat, loss, batch, d, PROBES[probes], WHOLE)
        return
    for example in one_by_one(batch):
        norms = []
        worker = ENGINES[engine](flat, loss)
        total = worker.clipped_sum(PROBES[probes], d, example, WHOLE, seed=0, tap=lambda _, n, norms=norms: norms.append(float(n))).total
        norm = float(total.double().norm())
        assert norm / (1 + 2e-7) <= norms[0] <= norm * (1 + 3e-6)
        bound = norm / 3
        clip = Flat(clip_norm=bound)
        assert float(worker.clipped_sum(PROBES[probes], d, example, clip, seed=0).total.double().norm()) <= bound


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_is_read_and_its_gradients_are_near(precision, engine):
    """Off by more than float32's rounding, and by less than 5 %; sums, and so the state, stay in the parameters' precision."""
    flat, loss, batch, d = in_half("cnn", 8, precision)
    ours = clipped(engine, flat, loss, batch, d, PROBES["two"], Flat(clip_norm=0.5)).total
    exact = clipped(engine, flat, loss.exact, batch, d, PROBES["two"], Flat(clip_norm=0.5)).total
    assert ours.dtype == torch.float32
    assert 1e-5 < float((ours - exact).norm() / exact.norm()) < 0.05


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x):
        return self.layer(x)


def of_size(size, precision, examples=4):
    """The loss (size * a linear layer).sum() an example: the layer's gradient is size * x, its bias's `size`."""
    torch.manual_seed(0)
    module = Scaled()
    batch = {"x": torch.rand(examples, 4) + 0.5, "size": torch.tensor(size).expand(examples).clone()}
    loss = Loss(module, lambda m, b: (m(b["x"]).float() * b["size"][:, None]).sum(1), precision=precision)
    return FlatParameters(module), loss, batch


@pytest.mark.parametrize("engine", ENGINES)
def test_small_gradients_survive_in_fp16(engine, monkeypatch):
    """Output gradients of 2e-9, which float16 rounds to 0 without the scale of the losses: seen here with a scale of 1."""
    flat, loss, batch = of_size(2e-9, "fp16")
    worker = ENGINES[engine](flat, loss)
    exact = ENGINES[engine](flat, loss.exact).clipped_sum(PROBES["one"], None, batch, WHOLE, seed=0).total
    ours = worker.clipped_sum(PROBES["one"], None, batch, WHOLE, seed=0).total
    assert float((ours - exact).norm() / exact.norm()) < 0.05
    monkeypatch.setattr("fiberdp.engines.loss.FP16_SCALE", 1.0)
    lost = worker.clipped_sum(PROBES["one"], None, batch, WHOLE, seed=0).total
    assert float(lost.norm()) < 0.5 * float(exact.norm())


@pytest.mark.parametrize("engine", ENGINES)
def test_an_example_that_overflows_in_fp16_contributes_nothing(engine):
    """An output gradient of 100 is beyond float16 after scaling: that example is silenced, the others are as without it."""
    flat, loss, batch = of_size(0.01, "fp16")
    batch["size"][2] = 100.0
    worker, clip = ENGINES[engine](flat, loss), Flat(clip_norm=1.0)
    whole = worker.clipped_sum(PROBES["one"], None, batch, clip, seed=0).total
    rest = worker.clipped_sum(PROBES["one"], None, {name: leaf[[0, 1, 3]] for name, leaf in batch.items()}, clip, seed=0).total
    assert whole.isfinite().all()
    assert torch.allclose(whole, rest, rtol=1e-6, atol=0)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_compiled_model_trains_like_any_other(engine):
    """torch.compile of the whole and of a part: a warning that says what is compiled, and the same sums."""

    def model():
        torch.manual_seed(3)
        return nn.Sequential(Scaled(), nn.Tanh(), nn.Linear(3, 3))

    def trained(module):
        rows = {"x": torch.linspace(-1, 1, 80).view(20, 4), "label": torch.arange(20) % 3}
        plan = fiberdp.plan(method="fiber", num_examples=20, batch_size=8, steps=3, epsilon=4.0, delta=1e-2, clip_norm=1.0)
        run = plan.private(module, lambda m, b: nn.functional.cross_entropy(m(b["x"]), b["label"], reduction="none"), rows,
                           engine=engine, keys=Keys.seeded(0))  # fmt: skip
        for _ in range(3):
            run.step()
        return torch.cat([p.detach().flatten() for p in module.parameters()])

    seen = []

    def backend(graph, _):
        seen.append(graph)
        return graph.forward

    torch._dynamo.reset()
    right = trained(model())
    whole, part = torch.compile(model(), backend=backend), model()
    part[0].compile(backend=backend)
    for compiled in (whole, part):
        with pytest.warns(UserWarning, match="training runs its layers as they were written"):
            assert torch.equal(trained(compiled), right)
        assert not seen
        compiled(torch.zeros(2, 4))
        assert seen  # outside the engines it is compiled
        seen.clear()


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_run_in_half_precision_trains_and_its_record_says_so(precision, tmp_path):
    record = fiberdp.fit(recipe(), method="fiber", seed=1, precision=precision, steps=3, out=tmp_path / "run")
    assert record["config"]["precision"] == precision
    assert record["receipt"]["passed"]
    exact = fiberdp.fit(recipe(), method="fiber", seed=1, steps=3)
    assert exact["privacy"] == record["privacy"]


def test_an_unknown_precision_is_refused():
    assert tuple(PRECISIONS) == ("float32", "bf16", "fp16")
    with pytest.raises(ValueError, match=r"precision='fp8': must be one of"):
        fiberdp.fit(recipe(), method="fiber", seed=1, precision="fp8", steps=1)


def test_auto_measures_and_says_what_it_chose(tmp_path):
    record = fiberdp.fit(recipe(), method="fiber", seed=1, engine="auto", steps=2)
    assert record["timing"]["engine"] in ("ghost", "vmap")
    assert record["config"]["engine"] == "auto"


@pytest.mark.parametrize("slow", ["ghost", "vmap"])
def test_auto_takes_the_faster_and_not_one_that_refuses(monkeypatch, slow):
    flat, loss, batch, _ = problem("mlp", 4, torch.float32)
    row = _tree.take(batch, slice(0, 1))
    right = {"ghost": "vmap", "vmap": "ghost"}[slow]
    from fiberdp.engines import choice

    monkeypatch.setattr(choice, "_seconds", lambda worker, probes, batch: 2.0 if worker.name == slow else 1.0)
    assert engines.faster(flat, loss, row, PROBES["two"], 4) == right

    def refuses(worker, probes, batch):
        if worker.name == right:
            raise ValueError("cannot")
        return 2.0

    monkeypatch.setattr(choice, "_seconds", refuses)
    assert engines.faster(flat, loss, row, PROBES["two"], 4) == slow


def test_a_resumed_run_keeps_the_engine_that_auto_chose(tmp_path, monkeypatch):
    from fiberdp import trainer

    monkeypatch.setattr(trainer, "faster", lambda *_: "vmap")
    with pytest.raises(Crash):
        fiberdp.fit(recipe(), method="fiber", seed=7, engine="auto", out=tmp_path / "run", reporter=CrashAfter(9))
    monkeypatch.setattr(trainer, "faster", lambda *_: pytest.fail("measured again"))
    record = fiberdp.fit(recipe(), method="fiber", seed=7, engine="auto", out=tmp_path / "run", resume=True)
    assert record["timing"]["engine"] == "vmap"
    assert record["config"]["engine"] == "auto"


@pytest.mark.parametrize("engine", ENGINES)
def test_per_layer_bounds_every_layer_and_so_the_whole(engine):
    """Each layer's part of a single example is at most C / sqrt(L), at least one is at it, and they are scaled apart."""
    flat, loss, batch, d = problem("mlp", 5, torch.float32)
    rule, layers = PerLayer(clip_norm=0.3), {"0": ["0.weight", "0.bias"], "2": ["2.weight", "2.bias"], "3": ["3.weight", "3.bias"]}
    for example in one_by_one(batch):
        total = flat.views(clipped(engine, flat, loss, example, d, PROBES["two"], rule).total)
        whole = flat.views(clipped(engine, flat, loss, example, d, PROBES["two"], WHOLE).total)
        kept = {k: torch.cat([total[n].flatten() for n in names]).double().norm() for k, names in layers.items()}
        own = {k: torch.cat([whole[n].flatten() for n in names]).double().norm() for k, names in layers.items()}
        assert all(float(norm) <= 0.3 / math.sqrt(3) for norm in kept.values())
        assert math.sqrt(sum(float(norm) ** 2 for norm in kept.values())) <= 0.3
        for layer in layers:
            assert float(kept[layer]) == pytest.approx(min(float(own[layer]), 0.3 / math.sqrt(3)), rel=1e-5)


@pytest.mark.parametrize("engine", ENGINES)
def test_per_layer_silences_the_whole_example_when_one_layer_is_not_finite(engine):
    class Apart(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)

        def forward(self, x):
            return self.a(x[:, :1]) + self.b(x[:, 1:])

    from fiberdp.flat import FlatParameters

    model = Apart()
    x = torch.tensor([[1.0, 2.0], [1.0, math.inf], [math.nan, 1.0]])
    flat = FlatParameters(model)
    worker = ENGINES[engine](flat, Loss(model, lambda m, batch: m(batch).flatten()))
    total = worker.clipped_sum(PROBES["one"], None, x, PerLayer(clip_norm=2.0), seed=0).total
    torch.testing.assert_close(total, torch.tensor([1.0, math.sqrt(2)]))


def test_per_layer_needs_a_bound():
    for bound in (0, -1, math.inf, math.nan):
        with pytest.raises(ValueError, match="clip_norm"):
            PerLayer(clip_norm=bound)
