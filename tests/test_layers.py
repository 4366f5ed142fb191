"""Every layer rule of engine ghost, on drawn shapes, against one example at a time: to 1e-10 in float64, 1e-5 in float32."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fiberdp import _tree
from fiberdp.clipping import Flat
from fiberdp.engines import ENGINES, GhostEngine, Loss
from fiberdp.flat import FlatParameters
from fiberdp.types import Probe

DRAWS = 5
PROBES = {
    "one": [Probe(1.0, 0.0)],
    "two": [Probe(0.05, 0.0), Probe(0.95, 0.7)],
    "two, extrapolating": [Probe(-0.7, 0.0), Probe(1.7, 0.4)],
    "three": [Probe(0.5, 0.0), Probe(-0.25, 0.3), Probe(0.75, 1.1)],
}


class Model(nn.Module):
    """parts: submodules, parameters or buffers by name.  fn(self, x) -> Tensor[b, ...]."""

    def __init__(self, fn: Callable[[Any, Tensor], Tensor], **parts: Any) -> None:
        super().__init__()
        self.fn = fn
        for name, part in parts.items():
            self.register_buffer(name, part) if isinstance(part, Tensor) and not isinstance(part, nn.Parameter) else setattr(
                self, name, part
            )

    def forward(self, x: Tensor) -> Tensor:
        return self.fn(self, x)


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape))


class Conv1D(nn.Module):
    """As in transformers: weight [in, out], addmm on the flattened view."""

    def __init__(self, n_in: int, n_out: int) -> None:
        super().__init__()
        self.weight, self.bias = parameter(n_in, n_out), parameter(n_out)

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(*x.shape[:-1], -1)


def loss_fn(model: nn.Module, batch: Any) -> Tensor:
    """Smooth, different for each example, and weighted by the example's own weight."""
    return batch["w"] * model(batch["x"]).flatten(1).sin().mean(1)


# Each case: a draw r -> (model, shape of one example's x, or (shape, tokens) for ids below `tokens`).

CASES: dict[str, Callable[[random.Random], tuple[nn.Module, Any]]] = {}
FALLBACK = set()  # cases in which at least one call has no rule of its own
VMAP_CANNOT = {"lstm", "gru"}  # torch has no batching rule


def case(fn: Callable[[random.Random], tuple[nn.Module, Any]]) -> Callable[[random.Random], tuple[nn.Module, Any]]:
    CASES[fn.__name__] = fn
    return fn


def fallback(fn: Callable[[random.Random], tuple[nn.Module, Any]]) -> Callable[[random.Random], tuple[nn.Module, Any]]:
    FALLBACK.add(fn.__name__)
    return case(fn)


@case
def linear(r):
    p, q = r.randint(1, 6), r.randint(1, 6)
    lead = tuple(r.randint(1, 4) for _ in range(r.choice([0, 1, 2])))
    return nn.Sequential(nn.Linear(p, q, bias=r.random() < 0.6), nn.Tanh(), nn.Linear(q, 3, bias=r.random() < 0.5)), (*lead, p)


def _conv(r, dims):
    groups = r.choice([1, 1, 2, 3])
    c, out = groups * r.randint(1, 2), groups * r.randint(1, 2)
    kernel = tuple(r.randint(1, 3) for _ in range(dims))
    dilation = tuple(r.randint(1, 2) for _ in range(dims))
    padding: Any = r.choice(["same", "valid", tuple(r.randint(0, 2) for _ in range(dims))])
    stride = (1,) * dims if padding == "same" else tuple(r.randint(1, 3) for _ in range(dims))
    kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
    first = kind(2, c, 1, bias=r.random() < 0.5)
    second = kind(c, out, kernel, stride=stride, padding=padding, dilation=dilation, groups=groups, bias=r.random() < 0.6)
    return nn.Sequential(first, nn.Tanh(), second), (2, *(r.randint(5, 7) for _ in range(dims)))


@case
def conv1d(r):
    return _conv(r, 1)


@case
def conv_same_and_dilated(r):
    """padding="same" is then dilation (k - 1) / 2 on each side."""
    groups = r.choice([1, 2])
    second = nn.Conv2d(2, 2, (3, r.choice([1, 3])), padding="same", dilation=(2, r.choice([1, 2])), groups=groups)
    return nn.Sequential(nn.Conv2d(2, 2, 1), nn.Tanh(), second), (2, r.randint(4, 6), r.randint(4, 6))


@case
def conv2d(r):
    return _conv(r, 2)


@case
def conv3d(r):
    return _conv(r, 3)


@case
def embedding(r):
    vocabulary, width = r.randint(2, 6), r.randint(1, 4)
    layer = nn.Embedding(vocabulary, width, padding_idx=r.choice([None, 0, -1, vocabulary - 1]))
    return nn.Sequential(layer, nn.Tanh(), nn.Linear(width, 2)), (tuple(r.randint(2, 6) for _ in range(r.choice([1, 1, 2]))), vocabulary)


@case
def layer_norm(r):
    shape = tuple(r.randint(3, 5) for _ in range(r.choice([1, 2])))
    affine = r.random() < 0.8
    lead = tuple(r.randint(1, 3) for _ in range(r.choice([0, 1, 2])))
    norm = nn.LayerNorm(shape, elementwise_affine=affine, bias=r.random() < 0.5)
    return Model(lambda m, x: m.norm((x * m.scale).tanh()) ** 2, norm=norm, scale=parameter(1)), (*lead, *shape)


@case
def rms_norm(r):
    width = r.randint(2, 5)
    lead = tuple(r.randint(1, 3) for _ in range(r.choice([0, 1, 2])))
    return nn.Sequential(nn.Linear(width, width), nn.RMSNorm(width, eps=r.choice([None, 1e-3]))), (*lead, width)


@case
def group_norm(r):
    groups = r.choice([1, 2, 3])
    c = groups * r.randint(1, 2)
    spatial = tuple(r.randint(2, 4) for _ in range(r.choice([1, 2])))
    conv = (nn.Conv1d, nn.Conv2d)[len(spatial) - 1]
    return nn.Sequential(conv(2, c, 1), nn.GroupNorm(groups, c), nn.Tanh()), (2, *spatial)


@case
def group_norm_of_vectors(r):
    return nn.Sequential(nn.Linear(3, 8), nn.GroupNorm(2, 8), nn.Tanh()), (3,)


@case
def instance_norm(r):
    c = r.randint(1, 3)
    return nn.Sequential(nn.Conv2d(2, c, 1), nn.InstanceNorm2d(c, affine=True), nn.Tanh()), (2, r.randint(2, 4), r.randint(2, 4))


@case
def frozen_batch_norm(r):
    c = r.randint(1, 3)
    norm = nn.BatchNorm2d(c)
    norm.running_mean, norm.running_var = torch.randn(c), torch.rand(c) + 0.5
    return nn.Sequential(nn.Conv2d(2, c, 2), norm, nn.Tanh()).eval(), (2, r.randint(2, 4), r.randint(2, 4))


@case
def conv1d_of_transformers(r):
    p, q = r.randint(1, 5), r.randint(1, 5)
    return nn.Sequential(Conv1D(p, q), nn.Tanh(), Conv1D(q, 3)), (r.randint(1, 4), p)


def _masks(r, heads, length, source, n_from):
    """attn_mask and key_padding_mask of random kinds; no row is masked as a whole."""
    attn = r.choice([None, "bool", "float"])
    mask = None
    if attn:
        hidden = torch.rand(length, source) < 0.4
        hidden[:, 0] = False
        mask = hidden if attn == "bool" else torch.randn(length, source).masked_fill(hidden, -math.inf)
    return mask, r.random() < 0.5


def _attention(r, cross, **options):
    heads, width, length = r.choice([1, 2]), 4, r.randint(2, 4)
    batch_first, weights = r.random() < 0.5, r.random() < 0.5
    layer = nn.MultiheadAttention(width, heads, batch_first=batch_first, bias=r.random() < 0.7, **options)
    source = length + 1 if cross else length
    mask, padded = _masks(r, heads, length, source, None)

    def forward(m, x):  # [b, T, E]
        x = m.first(x)
        memory = torch.cat([x, 2 * x[:, :1]], 1).cos() if cross else x
        padding = None
        if padded:  # each example its own: where its input is small, but never the first token
            padding = memory.detach()[..., 0].abs() < 0.5
            padding = torch.cat([torch.zeros_like(padding[:, :1]), padding[:, 1:]], 1)
            if m.mask is not None and m.mask.dtype != torch.bool:
                padding = torch.zeros_like(padding, dtype=x.dtype).masked_fill(padding, -math.inf)
        q, k = (x, memory) if batch_first else (x.transpose(0, 1), memory.transpose(0, 1))
        out, attended = m.layer(q, k if cross else q, k if cross else q, attn_mask=m.mask, key_padding_mask=padding, need_weights=weights)
        out = out if batch_first else out.transpose(0, 1)
        return torch.cat([out.flatten(1), attended.flatten(1)], 1) if weights else out

    return Model(forward, first=nn.Linear(width, width), layer=layer, mask=mask), (length, width)


@case
def self_attention(r):
    return _attention(r, cross=False)


@case
def cross_attention(r):
    return _attention(r, cross=True)


@fallback
def attention_with_bias_kv(r):
    return _attention(r, cross=r.random() < 0.5, add_bias_kv=True)


@fallback
def attention_with_own_key_width(r):
    layer = nn.MultiheadAttention(4, 2, batch_first=True, kdim=3, vdim=5)
    return Model(lambda m, x: m.layer(x, x[..., :3], torch.cat([x, x[..., :1]], -1))[0], layer=layer), (r.randint(2, 4), 4)


def _encoder(r):
    layer = nn.TransformerEncoderLayer(4, r.choice([1, 2]), 6, dropout=0.0, batch_first=r.random() < 0.5, norm_first=r.random() < 0.5)
    length = r.randint(1, 4)

    def forward(m, x):
        if m.layer.self_attn.batch_first:
            return m.layer(x)
        return m.layer(x.transpose(0, 1)).transpose(0, 1)

    return Model(forward, layer=layer), (length, 4)


@case
def encoder_layer_training(r):
    return _encoder(r)


@case
def encoder_layer_evaluating(r):
    model, shape = _encoder(r)
    return model.eval(), shape


@case
def position_embedding(r):
    t = r.randint(1, 4)
    form = r.choice([(t, 3), (1, t, 3)])
    return Model(lambda m, x: m.last((m.first(x) + m.pos).tanh()), first=nn.Linear(2, 3), pos=parameter(*form), last=nn.Linear(3, 2)), (
        t,
        2,
    )


@case
def position_embedding_looked_up(r):
    """As in GPT-2: a table read at arange(T), the same for all examples."""
    t = r.randint(1, 4)
    return Model(lambda m, x: m.last((x + m.table(torch.arange(t))).tanh()), table=nn.Embedding(t + 1, 3), last=nn.Linear(3, 2)), (t, 3)


@case
def weight_cast_on_use(r):
    """weight.to(x.dtype) returns the parameter itself where nothing is to be done."""
    return Model(
        lambda m, x: F.linear(F.linear(x, m.w.to(x.dtype)).tanh(), m.w.contiguous(), m.b.to(x.dtype)), w=parameter(3, 3), b=parameter(3)
    ), (3,)


@fallback
def bias_of_one_entry(r):
    return Model(lambda m, x: F.linear(x, m.w, m.b).tanh(), w=parameter(4, 3), b=parameter(1)), (3,)


@case
def sliced_position_embedding(r):
    t = r.randint(1, 4)
    return Model(lambda m, x: m.last((x + m.pos[:, : x.shape[1]]).tanh()), pos=parameter(1, t + 2, 3), last=nn.Linear(3, 2)), (t, 3)


@case
def class_token(r):
    t = r.randint(1, 3)

    def forward(m, x):
        return m.last(torch.cat([m.token.expand(x.shape[0], -1, -1), m.first(x)], 1) + m.pos).tanh().cumsum(1)

    return Model(forward, first=nn.Linear(2, 3), token=parameter(1, 1, 3), pos=parameter(1, t + 1, 3), last=nn.Linear(3, 2)), (t, 2)


@case
def repeated_class_token(r):
    def forward(m, x):
        return m.last(torch.cat([m.token.repeat(len(x), 1, 1), x], 1).tanh()).cumsum(1).square()

    return Model(forward, token=parameter(1, 2, 3), last=nn.Linear(3, 2)), (r.randint(1, 3), 3)


@case
def layer_scale(r):
    def forward(m, x):
        return x + m.gamma * m.layer(x) - x / (m.scalar * m.scalar + 1)

    return Model(forward, layer=nn.Linear(3, 3), gamma=parameter(3), scalar=parameter()), (*[r.randint(1, 3)] * r.choice([0, 1]), 3)


@case
def tied_linear(r):
    first, second = nn.Linear(3, 3), nn.Linear(3, 3, bias=False)
    second.weight = first.weight
    return nn.Sequential(first, nn.Tanh(), second), (*[r.randint(1, 4)] * r.choice([0, 1]), 3)


@case
def tied_embedding_and_head(r):
    vocabulary = r.randint(3, 6)
    layer, head = nn.Embedding(vocabulary, 4, padding_idx=r.choice([None, 0])), nn.Linear(4, vocabulary, bias=False)
    head.weight = layer.weight
    return nn.Sequential(layer, nn.Linear(4, 4), nn.Tanh(), head), ((r.randint(1, 5),), vocabulary)


@case
def tied_by_transpose(r):
    def forward(m, x):
        h = F.linear(x, m.w).tanh()
        return h @ m.w if m.plain else torch.matmul(h, m.w.t().t())

    model = Model(forward, w=parameter(4, 3))
    model.plain = r.random() < 0.5
    return model, (*[r.randint(1, 4)] * r.choice([0, 1]), 3)


@case
def transposed_product(r):
    turn = r.choice([Tensor.t, lambda w: w.T, lambda w: w.mT, lambda w: w.transpose(0, 1)])
    return Model(lambda m, x: (x @ turn(m.w)).tanh() @ m.v, w=parameter(4, 3), v=parameter(4, 2)), (
        *[r.randint(1, 4)] * r.choice([0, 1]),
        3,
    )


@case
def weight_norm(r):
    layer = nn.utils.parametrizations.weight_norm(r.choice([nn.Linear(3, 4), nn.Linear(3, 4, bias=False)]))
    return nn.Sequential(nn.Linear(3, 3), nn.Tanh(), layer), (*[r.randint(1, 4)] * r.choice([0, 1]), 3)


@case
def weight_norm_of_a_convolution(r):
    return nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Conv1d(2, 3, 2)), nn.Tanh()), (2, r.randint(3, 5))


@case
def low_rank_weight(r):
    """W + B A merged into one weight: derived from three parameters."""
    return Model(lambda m, x: F.linear(x, m.w + m.b @ m.a).tanh(), w=parameter(4, 3), a=parameter(2, 3), b=parameter(4, 2)), (
        r.randint(1, 3),
        3,
    )


@fallback
def bilinear(r):
    return Model(lambda m, x: m.layer(x, x.sin()), layer=nn.Bilinear(3, 3, 2)), (3,)


def _recurrent(r, kind):
    layer = kind(3, 2, num_layers=r.choice([1, 2]), batch_first=True, bidirectional=r.random() < 0.3)
    return Model(
        lambda m, x: m.last(m.layer(m.first(x))[0]), first=nn.Linear(3, 3), layer=layer, last=nn.Linear(2 * (1 + layer.bidirectional), 2)
    ), (
        r.randint(1, 4),
        3,
    )


@fallback
def lstm(r):
    return _recurrent(r, nn.LSTM)


@fallback
def gru(r):
    return _recurrent(r, nn.GRU)


@fallback
def einsum(r):
    return Model(lambda m, x: torch.einsum("bti,ijk->btjk", x, m.w).tanh(), w=parameter(3, 2, 2)), (r.randint(1, 3), 3)


@fallback
def transposed_convolution(r):
    return nn.Sequential(nn.Conv2d(2, 3, 1), nn.ConvTranspose2d(3, 2, 2, stride=r.choice([1, 2])), nn.Tanh()), (2, 3, r.randint(2, 3))


@fallback
def grouped_product(r):
    """Heads side by side: [b, h, t, i] @ [h, i, j]."""
    return Model(lambda m, x: torch.matmul(x, m.w).tanh(), w=parameter(2, 3, 2)), (2, r.randint(1, 3), 3)


@fallback
def prelu_a_channel(r):
    return nn.Sequential(nn.Conv1d(2, 3, 1), nn.PReLU(3)), (2, r.randint(2, 4))


@fallback
def prelu(r):
    return nn.Sequential(nn.Linear(3, 4), nn.PReLU(), nn.Linear(4, 2)), (*[r.randint(1, 3)] * r.choice([0, 1]), 3)


@case
def frozen_weight(r):
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Conv1d(4, 2, 1) if r.random() < 0.5 else nn.Identity())
    model[0].weight.requires_grad_(False)
    return Model(lambda m, x: m.rest[2](m.rest[:2](x).transpose(1, 2)), rest=model), (r.randint(1, 3), 3)


@case
def frozen_bias(r):
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 2))
    model[r.choice([0, 1])].bias.requires_grad_(False)
    return model, (3,)


@case
def unused_parameter(r):
    return Model(lambda m, x: m.layer(x), layer=nn.Linear(3, 2), spare=nn.Linear(2, 2)), (3,)


@case
def used_in_vain(r):
    """A result that the loss does not read, and one behind detach."""
    return Model(
        lambda m, x: (m.spare(x), m.layer(x) + m.cut(x).detach())[1], layer=nn.Linear(3, 2), spare=nn.Linear(3, 2), cut=nn.Linear(3, 2)
    ), (3,)


@case
def in_place_relu(r):
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 2)), (
        *[r.randint(1, 3)] * r.choice([0, 1]),
        3,
    )


@case
def in_place_after_everything(r):
    """Views of layers' results (chunks, 3-D products) and results themselves, changed in place."""

    def forward(m, x):
        h = m.norm(m.first(x).tanh_()).mul_(2)
        h = m.second(h.relu_()).add_(m.pos)
        a, b = h[..., :3], h[..., 3:]
        return a.sigmoid_() * m.token.expand(len(x), -1, -1) * b.tanh()

    parts = {"first": nn.Linear(3, 4), "norm": nn.LayerNorm(4), "second": nn.Linear(4, 6), "pos": parameter(6), "token": parameter(1, 1, 3)}
    return Model(forward, **parts), (r.randint(1, 3), 3)


@case
def used_twice(r):
    return Model(lambda m, x: m.last((m.layer(x).tanh() + m.layer(x.cos())).tanh()), layer=nn.Linear(3, 3), last=nn.Linear(3, 2)), (
        *[r.randint(1, 3)] * r.choice([0, 1]),
        3,
    )


@case
def embedding_used_twice(r):
    return Model(lambda m, x: m.e(x) * m.e(x.flip(1)).sin(), e=nn.Embedding(4, 3, padding_idx=1)), ((r.randint(2, 4),), 4)


@case
def convolution_used_twice(r):
    return Model(lambda m, x: m.c(m.c(x).tanh()), c=nn.Conv1d(2, 2, 3, padding=1)), (2, r.randint(3, 5))


@case
def token_major(r):
    """[T, b, D] inside, with T = b among the draws."""
    t = r.choice([2, 3])
    model = nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3), nn.Tanh(), nn.Linear(3, 3), nn.RMSNorm(3))
    return Model(lambda m, x: m.rest(x.transpose(0, 1)).transpose(0, 1) + m.pos, rest=model, pos=parameter(t, 1)), (t, 2)


@case
def flattened(r):
    def forward(m, x):
        b, t, _ = x.shape
        return m.rest(x.reshape(b * t, -1)).view(b, t, -1)

    layers = nn.Linear(2, 3), nn.LayerNorm(3), nn.Tanh(), nn.GroupNorm(1, 3), nn.Linear(3, 3)
    return Model(forward, rest=nn.Sequential(*layers)), (r.choice([2, 3]), 2)


@case
def flattened_images(r):
    """[b, T, C, H, W] as b T images."""
    return Model(lambda m, x: m.c(x.flatten(0, 1)).tanh().unflatten(0, x.shape[:2]), c=nn.Conv2d(2, 2, 2, groups=2)), (
        r.choice([2, 3]),
        2,
        3,
        3,
    )


@case
def stop_gradient_between_layers(r):
    """The second layer's input needs no gradient and still differs from point to point."""
    kind = nn.Linear(3, 2) if r.random() < 0.5 else nn.Conv1d(3, 2, 1)
    return Model(lambda m, x: m.a(x).tanh().sum() * 0 + m.b(m.a(x).detach()), a=nn.Linear(3, 3), b=kind), (3, 3)


@case
def ids_that_depend_on_parameters(r):
    """A codebook read where a layer says."""
    return Model(lambda m, x: m.book(m.a(x).argmax(-1)) * m.a(x)[..., :1], a=nn.Linear(3, 4), book=nn.Embedding(4, 2)), (r.randint(1, 4), 3)


def build(name: str, draw: int, dtype: torch.dtype = torch.float64):
    """flat, a maker of batches, and a direction d."""
    torch.manual_seed(draw)
    model, shape = CASES[name](random.Random(f"{name} {draw}"))
    model = model.to(dtype)
    flat = FlatParameters(model)

    def batch(examples: int):
        generator = torch.Generator().manual_seed(100 * draw + examples)
        if isinstance(shape[0], tuple):
            x = torch.randint(0, shape[1], (examples, *shape[0]), generator=generator)
        else:
            x = torch.randn(examples, *shape, generator=generator, dtype=torch.float64).to(dtype)
        return {"x": x, "w": (torch.rand(examples, generator=generator, dtype=torch.float64) * 3 + 0.1).to(dtype)}

    return flat, batch, torch.randn(flat.numel, dtype=torch.float64, generator=torch.Generator().manual_seed(draw)).to(dtype) * 0.5


def clipped(engine, flat, batch, d, probes, clip, multiplicity=1):
    return ENGINES[engine](flat, Loss(flat.module, loss_fn, multiplicity)).clipped_sum(probes, d, batch, clip, seed=3).total


def typical_norm(flat, batch, d, probes) -> float:
    norms: list[Tensor] = []
    oracle = ENGINES["loop"](flat, Loss(flat.module, loss_fn))
    oracle.clipped_sum(probes, d, batch, Flat(clip_norm=math.inf), seed=3, tap=lambda losses, n: norms.append(n))
    return max(float(torch.cat(norms).median()), 1e-3)


def assert_close(flat, ours: Tensor, oracle: Tensor, tolerance: float) -> None:
    """Of each parameter, |ours - oracle| <= tolerance |oracle| (and of what is zero but for rounding: of the whole)."""
    whole = float(oracle.double().norm())
    for name, right in flat.views(oracle.double()).items():
        error = float((flat.views(ours.double())[name] - right).norm())
        assert error <= tolerance * max(float(right.norm()), 0.05 * whole), (name, error / float(right.norm()), float(right.norm()) / whole)


def engines(name):
    return [engine for engine in ENGINES if engine != "loop" and not (engine == "vmap" and name in VMAP_CANNOT)]


@pytest.mark.parametrize("draw", range(DRAWS))
@pytest.mark.parametrize("name", CASES)
def test_rule_gives_the_oracles_sum_in_float64(name, draw):
    flat, batch, d = build(name, draw)
    clip = Flat(clip_norm=typical_norm(flat, batch(4), d, PROBES["two"]))  # clips some, not all
    for examples, probes in [(1, "two"), (2 + draw % 3, [*PROBES][draw % 4]), (3, "two, extrapolating")]:
        data, points = batch(examples), PROBES[probes]
        oracle = clipped("loop", flat, data, d, points, clip)
        assert oracle.norm() > 0
        for engine in engines(name):
            assert_close(flat, clipped(engine, flat, data, d, points, clip), oracle, 1e-10)


@pytest.mark.parametrize("draw", range(2))
@pytest.mark.parametrize("name", CASES)
def test_rule_gives_the_oracles_sum_in_float32(name, draw):
    flat, batch, d = build(name, draw, torch.float32)
    wide = FlatParameters(copy.deepcopy(flat.module).double())
    data = batch(3)
    data64 = {key: value.double() if value.is_floating_point() else value for key, value in data.items()}
    clip = Flat(clip_norm=typical_norm(wide, data64, d.double(), PROBES["two"]))
    for probes in ("one", "two, extrapolating"):
        oracle = clipped("loop", wide, data64, d.double(), PROBES[probes], clip)
        for engine in engines(name):
            assert_close(flat, clipped(engine, flat, data, d, PROBES[probes], clip), oracle, 1e-5)


@pytest.mark.parametrize("name", CASES)
def test_an_empty_batch_gives_zeros_before_and_after_a_full_one(name):
    flat, batch, d = build(name, 0)
    for engine in engines(name):
        one = ENGINES[engine](flat, Loss(flat.module, loss_fn))
        for _ in range(2):
            empty = one.clipped_sum(PROBES["two"], d, batch(0), Flat(clip_norm=1.0), seed=0)
            assert torch.equal(empty.total, torch.zeros_like(flat.theta))
            assert empty.sensitivity == 1.0
            one.clipped_sum(PROBES["two"], d, batch(2), Flat(clip_norm=1.0), seed=0)


@pytest.mark.parametrize("name", CASES)
def test_copies_of_one_example_are_one_example(name):
    """Multiplicity 3: every leaf [b, 3, ...], one clip for the mean of three losses."""
    flat, batch, d = build(name, 1)
    data = _tree.map_leaves(lambda leaf: leaf.unflatten(0, (2, 3)), batch(6))
    clip = Flat(clip_norm=0.5 * typical_norm(flat, batch(6), d, PROBES["two"]))
    oracle = clipped("loop", flat, data, d, PROBES["two"], clip, multiplicity=3)
    for engine in engines(name):
        assert_close(flat, clipped(engine, flat, data, d, PROBES["two"], clip, multiplicity=3), oracle, 1e-10)


@pytest.mark.parametrize("name", CASES)
def test_the_fallback_serves_what_has_no_rule_and_nothing_else(name):
    flat, batch, _ = build(name, 0)
    rules = {site.rule for site in GhostEngine(flat, Loss(flat.module, loss_fn)).prepare(batch(1))}
    assert bool(rules & {"vmap", "loop"}) == (name in FALLBACK), rules
