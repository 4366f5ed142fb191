"""What no example, exception or unusual model may do to an engine: sensitivity, leftovers, memory, norms, and silent wrong answers."""

from __future__ import annotations

import gc
import math
import os
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fiberdp.clipping import Flat
from fiberdp.engines import ENGINES, GhostEngine, Loss, check_model
from fiberdp.engines.parts import Block, Dense, Outer, Part, Rows, Tied
from fiberdp.flat import FlatParameters
from fiberdp.types import Probe
from test_layers import Model, loss_fn, parameter

TWO = [Probe(-0.7, 0.0), Probe(1.7, 0.4)]
C = 0.37


class Everything(nn.Module):
    """Convolution, norm, attention, raw parameters and products, tied."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.attention = (
            nn.Conv1d(2, 4, 3, padding=1),
            nn.GroupNorm(2, 4),
            nn.MultiheadAttention(4, 2, batch_first=True),
        )
        self.pos, self.token, self.mlp, self.act = parameter(6, 4), parameter(1, 1, 4), nn.Linear(4, 4), nn.PReLU(4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.conv(x)).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.pos
        x = x + self.attention(x, x, x)[0]
        return F.linear(self.act(self.mlp(x).transpose(1, 2)).transpose(1, 2), self.mlp.weight)


def problem(dtype=torch.float32, examples=4):
    torch.manual_seed(2)
    flat = FlatParameters(Everything().to(dtype))
    batch = {"x": torch.randn(examples, 2, 5, dtype=dtype), "w": torch.rand(examples, dtype=dtype) + 5}
    return flat, batch, torch.randn_like(flat.theta) * 0.3


def clipped(engine, flat, batch, d, probes=TWO, clip=C, loss=loss_fn):
    return ENGINES[engine](flat, Loss(flat.module, loss)).clipped_sum(probes, d, batch, Flat(clip_norm=clip), seed=3).total


@pytest.mark.parametrize("engine", ENGINES)
def test_replacing_an_example_moves_the_sum_by_at_most_2C_and_removing_it_by_C(engine):
    flat, batch, d = problem()
    whole = clipped(engine, flat, batch, d).double()
    without = clipped(engine, flat, {key: leaf[1:] for key, leaf in batch.items()}, d).double()
    rounding = 1e-6 * float(whole.norm())
    assert C * 0.9 < float((whole - without).norm()) <= C + rounding  # the example was clipped, so the bound is nearly met
    for value in (0.0, 1e-30, 1e10, 1e30, 3e38, math.nan, math.inf, -math.inf):
        for key in ("x", "w"):
            other = {name: leaf.clone() for name, leaf in batch.items()}
            other[key][0] = value
            changed = clipped(engine, flat, other, d).double()
            assert changed.isfinite().all()
            assert float((changed - whole).norm()) <= 2 * C + rounding, (key, value)
            assert float((changed - without).norm()) <= C + rounding, (key, value)
            if math.isnan(value):
                torch.testing.assert_close(changed, without, rtol=1e-5, atol=1e-6)  # it contributes 0


def _state(module: nn.Module) -> list[Any]:
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return [
        (name, sorted(vars(m)), [dict(getattr(m, hook)) for hook in hooks], sorted(m._parameters), m.training)
        for name, m in module.named_modules()
    ] + [(name, id(p), p.data_ptr(), p.requires_grad, p.grad, p._backward_hooks, sorted(vars(p))) for name, p in module.named_parameters()]


@pytest.mark.parametrize("engine", ENGINES)
def test_nothing_is_left_on_the_module_after_an_exception(engine):
    flat, batch, d = problem()
    before, theta, state = _state(flat.module), flat.theta.clone(), torch.get_rng_state()
    calls = []

    def fails(model, batch):
        losses = loss_fn(model, batch)
        calls.append(1)
        if len(calls) > threshold:
            raise KeyError("the user's own")
        return losses

    for threshold in range(6):
        calls.clear()
        try:
            clipped(engine, flat, batch, d, loss=fails)
        except KeyError:
            assert len(calls) == threshold + 1
        assert _state(flat.module) == before
        assert torch.equal(flat.theta, theta)
        assert torch.equal(torch.get_rng_state(), state)
        flat.check()
    total = clipped(engine, flat, batch, d)
    assert not total.requires_grad
    assert not flat.theta.requires_grad
    assert _state(flat.module) == before


def _resident() -> float:
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="resident memory is read from /proc")
def test_resident_memory_of_ghost_is_flat_over_200_calls():
    flat, batch, d = problem(examples=16)
    engine = GhostEngine(flat, Loss(flat.module, loss_fn))
    sizes = []
    for step in range(250):
        engine.clipped_sum(TWO, d, batch, Flat(clip_norm=C), seed=step)
        if step in (49, 249):
            sizes.append(_resident())
    assert sizes[1] - sizes[0] < 4, sizes


# ---- norms ----


def _error(part: Part, exact: Tensor) -> float:
    return float((part.squared_norms() / exact).sqrt().sub(1).abs().max())


def _factors(s, q, p, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(1, s, size, generator=generator) * 0.01 + 0.01 for size in (q, p)]


@pytest.mark.parametrize("s", [1, 4, 64])
def test_gram_norm_of_ten_million_entries_is_right_to_1e_6_and_never_below(s):
    left, right = _factors(s, 3200, 3200)
    exact = (torch.bmm(left.double(), left.double().mT) * torch.bmm(right.double(), right.double().mT)).sum((1, 2))
    ratio = float((Outer([Block(1.0, left, right)]).squared_norms() / exact).sqrt())
    assert 1 - 2.0**-21 <= ratio <= 1 + 1e-6  # NORM_SLACK = 2^-20 on top makes it never below


def test_dense_and_row_norms_of_ten_million_entries_are_right_to_1e_6():
    g = torch.randn(10_240_000, generator=torch.Generator().manual_seed(1)) * 0.01 + 0.01
    exact = g.double().square().sum()[None]
    assert _error(Dense(g.view(1, 3200, 3200)), exact) < 9e-7
    assert _error(Rows(torch.zeros(3200).long(), torch.arange(3200), g.view(3200, 3200), 1, torch.Size((3200, 3200))), exact) < 9e-7


def test_a_plain_float32_dot_product_is_rejected_by_that_bound():
    """The power of the two tests above."""
    g = torch.randn(2_400_000, generator=torch.Generator().manual_seed(1)) * 0.01 + 0.01
    naive = torch.bmm(g[None, None], g[None, :, None]).double()  # one accumulator after the other
    assert float((naive / g.double().square().sum()).sqrt()) < 1 - 1e-5
    left, right = _factors(64, 200_000, 8)
    exact = (torch.bmm(left.double(), left.double().mT) * torch.bmm(right.double(), right.double().mT)).sum((1, 2))
    assert _error(Outer([Block(1.0, left, right)]), exact) < 1e-6


@pytest.mark.parametrize("closeness", [1.0, 1e-2, 1e-4, 1e-6, 0.0])
def test_gram_norm_of_tokens_that_cancel_is_never_below(closeness):
    """Token pairs with opposite gradients, and points of opposite weight: the norm is a small difference of large numbers."""
    generator = torch.Generator().manual_seed(3)
    left, right = torch.randn(50, 8, 40, generator=generator), torch.randn(50, 8, 30, generator=generator)
    near = right + closeness * torch.randn(50, 8, 30, generator=generator)
    tokens = [Block(1.0, torch.cat([left, -left], 1), torch.cat([right, near], 1))]
    points = [Block(-1.0, left, right), Block(1.0, left, near)]
    exact = torch.bmm(left.double().mT, near.double() - right.double()).square().sum((1, 2))
    for blocks in (tokens, points):
        ours = Outer(blocks).squared_norms()
        assert bool((ours.sqrt() >= exact.sqrt() * (1 - 2.0**-21)).all())
        assert closeness < 1 or _error(Outer(blocks), exact) < 1e-5


def test_norm_of_an_embedding_that_cancels_its_tied_output_layer_is_never_below():
    generator = torch.Generator().manual_seed(4)
    left = F.one_hot(torch.arange(3), 5).float()[None].repeat(20, 1, 1)
    right = torch.randn(20, 3, 6, generator=generator)
    for closeness in (1e-2, 1e-5, 0.0):
        rows = -right + closeness * torch.randn(20, 3, 6, generator=generator)
        table = Rows.merged(torch.arange(3).expand(20, 3), rows, torch.Size((5, 6)), None)
        exact = (rows.double() + right.double()).square().sum((1, 2))
        assert bool((Tied(table, Outer([Block(1.0, left, right)])).squared_norms() >= exact * (1 - 2.0**-20)).all())


# ---- what would be silently wrong is refused ----


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g @ w.t(), x.flatten(0, -2).t() @ g.flatten(0, -2)


def _written(m, x):
    h = x.clone()
    h[:, 0] = m.p
    return m.layer(h)


def _selected(m, x):
    kept = x[..., 0] > 0
    return torch.zeros_like(x).masked_scatter(kept[..., None], m.layer(x[kept]))


def _token_major(m, x):
    return m.layer(x.transpose(0, 1).reshape(-1, 2)).tanh().view(3, -1, 2).transpose(0, 1)


REFUSED = {
    "an autograd Function": (lambda m, x: m.layer(_Product.apply(x, m.w)), "w is used inside .* an autograd Function"),
    "a scripted module": (lambda m, x: m.layer(m.script(x)), "script.bias, script.weight is used inside a scripted module"),
    "a write": (_written, r"p is written into another tensor"),
    "torch.func": (lambda m, x: torch.func.vmap(lambda row: F.linear(row, m.w))(x), "runs inside torch.func"),
    "two dimensions of examples": (lambda m, x: (torch.eye(len(x)) * m.scalar) @ x[:, 0], "no one dimension holds the examples where mul"),
    "a selection by value": (_selected, "no dimension holds the examples"),
    "tokens before examples": (_token_major, "one example's loss reaches another's"),
    "views side by side": (lambda m, x: torch.cat(m.layer(torch.cat([x, x.cos()])).chunk(2), 1), "one example's loss reaches another's"),
    "a mean over the batch": (lambda m, x: m.layer(x) - m.layer(x).mean(0), "one example's loss reaches another's"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_ghost_refuses_what_it_cannot_tell_apart(kind):
    fn, said = REFUSED[kind]
    parts = {"layer": nn.Linear(2, 2), "w": parameter(2, 2), "p": parameter(2), "scalar": parameter(1)}
    if kind == "a scripted module":
        parts["script"] = torch.jit.trace(nn.Linear(2, 2), torch.zeros(1, 2))
    flat = FlatParameters(Model(fn, **parts))
    with pytest.raises(ValueError, match=said):
        clipped("ghost", flat, {"x": torch.randn(4, 3, 2), "w": torch.ones(4)}, None)


def test_ghost_refuses_another_layer_in_the_place_of_the_one_at_set_up():
    """The same function on another parameter: credited to the wrong one, had the function alone been compared."""
    flat = FlatParameters(Model(lambda m, x: (m.a if float(x.sum()) == 0 else m.b)(x), a=nn.Linear(2, 2), b=nn.Linear(2, 2)))
    engine = GhostEngine(flat, Loss(flat.module, loss_fn))
    with pytest.raises(ValueError, match="the model ran linear on a parameter where it ran linear at set-up"):
        engine.clipped_sum(TWO, None, {"x": torch.randn(4, 3, 2), "w": torch.ones(4)}, Flat(clip_norm=1.0), seed=0)


@pytest.mark.parametrize("layer", [lambda x: x, lambda x: x * 1.0], ids=["data", "activations"])
def test_sequences_may_be_longer_than_at_set_up_though_flattened(layer):
    def forward(m, x):
        return (m.rest(layer(x).reshape(-1, 2)) * m.scale).tanh().view(len(x), -1, 2).sum(1)

    flat = FlatParameters(Model(forward, rest=nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2), nn.PReLU(2)), scale=parameter(2)).double())
    engine = GhostEngine(flat, Loss(flat.module, loss_fn))
    for length in (2, 4, 1, 3):
        batch = {"x": torch.randn(3, length, 2, dtype=torch.float64), "w": torch.ones(3, dtype=torch.float64)}
        ours = engine.clipped_sum(TWO, None, batch, Flat(clip_norm=0.1), seed=3).total
        torch.testing.assert_close(ours, clipped("loop", flat, batch, None, clip=0.1), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("option", "said"), [({"max_norm": 1.0}, "max_norm"), ({"scale_grad_by_freq": True}, "scale_grad_by_freq")])
@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_embeddings_that_change_with_the_batch_are_refused(kind, option, said):
    with pytest.raises(ValueError, match=said):
        check_model(nn.Sequential(kind(4, 2, **option)))
