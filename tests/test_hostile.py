"""Hostile examples in whole networks: they contribute nothing, or at most C, and change nothing of what the others contribute."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fiberdp
from fiberdp.clipping import CLIPS
from fiberdp.engines import ENGINES, Loss
from fiberdp.flat import FlatParameters
from fiberdp.types import Probe

C = 0.5
PAD = 0
every_engine = pytest.mark.parametrize("engine", ENGINES)
every_clip = pytest.mark.parametrize("clip", CLIPS)


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(), nn.Conv2d(8, 8, 3, stride=2))
        self.scale = nn.Parameter(torch.ones(8))
        self.head = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x).mean((2, 3)) * self.scale)


class Texts(nn.Module):
    """An encoder of padded text: padding is neither attended to nor averaged."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 8, padding_idx=PAD)
        self.positions = nn.Parameter(0.1 * torch.randn(6, 8))
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, ids: Tensor) -> Tensor:
        there = ids != PAD
        hidden = self.encoder(self.embedding(ids) + self.positions[: ids.shape[1]], src_key_padding_mask=~there)
        return self.head((hidden * there[..., None]).sum(1) / there.sum(1, keepdim=True))


def image_loss(model, batch):
    return F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")


def images(n):
    generator = torch.Generator().manual_seed(n)
    return {"x": torch.randn(n, 3, 8, 8, generator=generator), "y": torch.randint(0, 4, (n,), generator=generator)}


def texts(lengths, width=6):
    generator = torch.Generator().manual_seed(7)
    ids = torch.full((len(lengths), width), PAD)
    for row, length in zip(ids, lengths):
        row[:length] = torch.randint(1, 20, (6,), generator=generator)[:length]
    return {"x": ids, "y": torch.arange(len(lengths)) % 3}


def clipped(engine, model, batch, clip="flat", seen=None, dtype=torch.float32):
    """[d]: the clipped sum over two points; `seen` takes the losses and norms."""
    torch.manual_seed(0)
    flat = FlatParameters(model().to(dtype))
    worker = ENGINES[engine](flat, Loss(flat.module, image_loss))
    d = 0.1 * torch.randn(flat.numel).to(dtype)
    tap = None if seen is None else lambda losses, norms: seen.append((losses, norms))
    return worker.clipped_sum([Probe(-0.4, 0.0), Probe(1.4, 0.7)], d, batch, CLIPS[clip](clip_norm=C), seed=0, tap=tap).total


def rows(batch, *which):
    return {name: leaf[list(which)] for name, leaf in batch.items()}


def without(batch, row):
    return rows(batch, *(i for i in range(len(batch["y"])) if i != row))


NOT_FINITE = {
    "a NaN pixel": lambda x: x.index_put((torch.tensor(0), torch.tensor(2), torch.tensor(5)), torch.tensor(math.nan)),
    "an infinite pixel": lambda x: x.index_put((torch.tensor(1), torch.tensor(0), torch.tensor(0)), torch.tensor(-math.inf)),
    "all NaN": lambda x: torch.full_like(x, math.nan),
    "too large for float32": lambda x: 1e38 * x.sign(),
}
FINITE = {
    "huge": lambda x: 1e15 * x,
    "denormal": lambda x: 1e-42 * x.sign(),
    "zero": lambda x: 0 * x,
    "one outlier": lambda x: x.index_put((torch.tensor(1), torch.tensor(0), torch.tensor(0)), torch.tensor(1e18)),
}


@every_clip
@every_engine
@pytest.mark.parametrize("kind", NOT_FINITE)
def test_what_is_not_finite_contributes_exactly_nothing(kind, engine, clip):
    """Second of three: the sum is that of the other two, and only the tap, which is unaccounted, knows."""
    batch, seen = images(3), []
    batch["x"][1] = NOT_FINITE[kind](batch["x"][1])
    total = clipped(engine, Images, batch, clip, seen=seen)
    right = clipped(engine, Images, without(batch, 1), clip)
    assert total.isfinite().all()
    assert right.norm() > C / 10
    assert (total - right).norm() <= 1e-6 * right.norm()
    assert sum(int((~norms.isfinite()).sum()) for _, norms in seen) == 1


@every_clip
@every_engine
@pytest.mark.parametrize("kind", FINITE)
def test_what_is_extreme_contributes_at_most_C_and_leaves_the_others_alone(kind, engine, clip):
    batch = images(3)
    batch["x"][1] = FINITE[kind](batch["x"][1])
    total = clipped(engine, Images, batch, clip)
    right = clipped(engine, Images, without(batch, 1), clip)
    own = clipped(engine, Images, rows(batch, 1), clip)
    assert total.isfinite().all()
    assert (total - right).norm() <= C * (1 + 1e-5)
    assert (total - right - own).norm() <= 2e-6 * (right.norm() + own.norm())
    assert own.norm() > 0


@every_engine
def test_extreme_gradients_are_those_of_the_oracle(engine):
    """In float64: in float32 the means of a normalisation over 1e15 keep no digit that two ways of adding would agree on."""
    for kind, change in FINITE.items():
        batch = images(2)
        batch["x"] = torch.stack([change(batch["x"][0]), batch["x"][1]]).double()
        found, right = (clipped(name, Images, batch, dtype=torch.float64) for name in (engine, "loop"))
        assert (found - right).norm() <= 1e-9 * right.norm(), kind


@every_engine
def test_padding_changes_nothing(engine):
    """Ragged text: lengths 6, 1 and 3 as one padded batch, as three batches of one, and padded less."""
    batch = texts((6, 1, 3))
    together = clipped(engine, Texts, batch)
    apart = sum(clipped(engine, Texts, rows(batch, i)) for i in range(3))
    assert (together - apart).norm() <= 2e-6 * together.norm()
    short = {"x": batch["x"][[1, 2], :3], "y": batch["y"][[1, 2]]}
    assert (clipped(engine, Texts, short) - clipped(engine, Texts, rows(batch, 1, 2))).norm() <= 2e-6 * together.norm()


@every_engine
def test_text_of_padding_alone_contributes_nothing(engine):
    """Its mean is 0/0 and its attention a softmax over nothing: NaN, so it is left out."""
    batch = texts((6, 0, 3))
    total, right = clipped(engine, Texts, batch), clipped(engine, Texts, without(batch, 1))
    assert total.isfinite().all()
    assert (total - right).norm() <= 1e-6 * right.norm() > 0


@every_engine
def test_a_batch_of_one_and_of_none(engine):
    for model, batch in ((Images, images(1)), (Texts, texts((4,)))):
        one, right = clipped(engine, model, batch), clipped("loop", model, batch)
        assert (one - right).norm() <= 1e-5 * right.norm()
        assert 0 < one.norm() <= C * (1 + 1e-6)
        empty = clipped(engine, model, rows(batch))
        assert not empty.any()
        assert len(empty) == len(one)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_trainable_parameters_of_half_precision_are_refused_and_frozen_ones_serve(dtype):
    """A frozen half-precision base with float32 adapters: norms and sums are float32, and those of a float32 copy of the same weights."""

    class Adapted(nn.Module):
        def __init__(self, of: torch.dtype) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.base = nn.Linear(12, 6).to(dtype).to(of).requires_grad_(False)
            self.adapter = nn.Linear(12, 6)

        def forward(self, x: Tensor) -> Tensor:
            return self.base(x.to(self.base.weight.dtype)).float() + self.adapter(x)

    batch = {"x": torch.randn(5, 12).to(dtype).float(), "y": torch.arange(5) % 6}
    for engine in ENGINES:
        half, single = (clipped(engine, lambda of=of: Adapted(of), batch) for of in (dtype, torch.float32))
        assert half.dtype == torch.float32
        assert (half - single).norm() <= 0.02 * single.norm()  # what the base's outputs were rounded by
        assert half.norm() <= 5 * C
    with pytest.raises(ValueError, match="half precision undercount") as error:
        FlatParameters(Adapted(dtype).requires_grad_())
    assert "\n" not in str(error.value)


@every_engine
def test_a_run_of_hostile_examples_is_charged_and_noised_like_any_other(engine, monkeypatch):
    """Every example is NaN: the ledger, the number of steps and the noise of the first release are those of clean data."""
    monkeypatch.setattr("fiberdp.trainer.receipt_steps", lambda numel: 4)
    runs = []
    for data in (images(8), images(8) | {"x": torch.full((8, 3, 8, 8), math.nan)}):
        plan = fiberdp.plan(
            method="fiber", num_examples=8, batch_size=2, steps=4, noise_multiplier=1.0, delta=1e-5, clip_norm=1e-6
        )  # fmt: skip
        torch.manual_seed(0)
        run = plan.private(Images(), image_loss, data, keys=fiberdp.Keys.seeded(1), engine=engine)
        first = run.pipeline.release(0, None).value
        assert len(list(run)) == len(run.ledger) == 4
        assert run.flat.theta.isfinite().all()
        runs.append((first, run.ledger.event()))
    (clean, charged), (hostile, same) = runs
    assert charged == same
    std = 1e-6 / 2
    assert float(hostile.std()) == pytest.approx(std, rel=0.1)  # 1,000 coordinates
    assert (clean - hostile).norm() <= 8 * 1e-6 / 2  # what clean examples could add
