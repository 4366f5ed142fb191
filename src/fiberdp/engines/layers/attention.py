"""MultiheadAttention: its packed projection and its output projection are products like any other, with attention between them.

torch runs the whole layer as one function, so it is written out here: projections under capture, the core by torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from fiberdp.engines.capture import Capture, Record, Ref
from fiberdp.engines.layers.linear import features, product_parts
from fiberdp.engines.parts import Dense, Part
from fiberdp.engines.tracing import Batched

if TYPE_CHECKING:
    from fiberdp.engines.layers.plan import Refs
    from fiberdp.engines.tracing import Call

FUNCTIONS = (F.multi_head_attention_forward,)


@dataclass
class Attention:
    """weights: of the packed projection [3E, E], its bias, the output projection and its bias; None where frozen or absent."""

    rule: ClassVar[str] = "attention"
    function: Callable[..., Any]
    refs: tuple[Ref, ...]
    weights: tuple[Ref | None, ...]
    batched: Batched
    same: bool
    reads: tuple[Ref, ...] = ()

    def run(self, capture: Capture, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
        a = _bind(*args, **kwargs)
        if self.same:
            projected = capture.watch(F.linear(a.query, a.in_weight, a.in_bias))
            q, k, v = projected.chunk(3, -1)
        else:
            ws, bs = a.in_weight.chunk(3), (a.in_bias.chunk(3) if a.in_bias is not None else (None,) * 3)
            q, k, v = (capture.watch(F.linear(x, w, b)) for x, w, b in zip((a.query, a.key, a.value), ws, bs))
        mixed, weights = _core(q, k, v, a)
        # the core's result depends on parameters, so nothing here is fixed
        capture.keep(*([a.query] if self.same else [a.query, a.key, a.value]), mixed)
        return capture.watch(F.linear(mixed, a.out_weight, a.out_bias)), weights

    def parts(self, records: Sequence[Record], examples: int) -> list[tuple[Ref, Part]]:
        used = [record for record in records if record.gradients[-1] is not None]
        if not used:
            return []
        in_weight, in_bias, out_weight, out_bias = self.weights

        def products(i: int, weight: Ref | None, bias: Ref | None) -> list[tuple[Ref, Part]]:
            outputs = [(record.weight, features(self.batched, record.gradients[i], examples)) for record in used]  # pyright: ignore
            inputs = [features(self.batched, record.inputs[i], examples).to(outputs[0][1].dtype) for record in used]
            return product_parts(weight, bias, inputs, outputs)

        found = products(-1, out_weight, out_bias)
        if self.same:
            return found + products(0, in_weight, in_bias)
        thirds = [dict(products(i, in_weight, in_bias)) for i in range(3)]
        return found + [
            (ref, Dense(torch.cat([third[ref].dense().gradient for third in thirds], 1))) for ref in (in_weight, in_bias) if ref
        ]


@dataclass
class _Arguments:
    query: Tensor
    key: Tensor
    value: Tensor
    heads: int
    in_weight: Tensor
    in_bias: Tensor | None
    out_weight: Tensor
    out_bias: Tensor | None
    dropout: float
    key_padding_mask: Tensor | None
    attn_mask: Tensor | None
    need_weights: bool
    average: bool
    causal: bool
    plain: bool


def match(call: Call, refs: Refs) -> Attention | None:
    a = _bind(*call.args, **call.kwargs)
    where = call.where(a.query)
    if not a.plain or not where or where.dim != 1 or a.query.dim() != 3 or call.where(a.key) != where or call.where(a.value) != where:
        return None
    weights = tuple(map(refs.of, (a.in_weight, a.in_bias, a.out_weight, a.out_bias)))
    same = a.query is a.key is a.value
    return Attention(call.function, tuple(ref for ref in weights if ref), weights, where, same)


def _core(q: Tensor, k: Tensor, v: Tensor, a: _Arguments) -> tuple[Tensor, Tensor | None]:
    """softmax(q k^T / sqrt(e) + masks) v, [L, N, E], and the attention weights where they are asked for."""
    (length, n, width), source = q.shape, k.shape[0]
    q, k, v = (x.view(x.shape[0], n, a.heads, -1).permute(1, 2, 0, 3) for x in (q, k, v))  # [N, H, L, E/H]
    mask = None
    if a.attn_mask is not None:
        mask = _additive(a.attn_mask, q.dtype)
        mask = mask.view(n, a.heads, length, source) if mask.dim() == 3 else mask
    if a.key_padding_mask is not None:
        padding = _additive(a.key_padding_mask, q.dtype).view(n, 1, 1, source)
        mask = padding if mask is None else mask + padding
    if not a.need_weights:
        causal = a.causal and a.key_padding_mask is None
        out = F.scaled_dot_product_attention(q, k, v, None if causal else mask, a.dropout, causal)
        return out.permute(2, 0, 1, 3).reshape(length, n, width), None
    scores = (q / math.sqrt(q.shape[-1])) @ k.transpose(-1, -2)
    weights = F.dropout((scores if mask is None else scores + mask).softmax(-1), a.dropout, a.dropout > 0)
    return (weights @ v).permute(2, 0, 1, 3).reshape(length, n, width), weights.mean(1) if a.average else weights


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, -math.inf) if mask.dtype == torch.bool else mask.to(dtype)


def _bind(
    query: Tensor, key: Tensor, value: Tensor, embed_dim_to_check: int, num_heads: int, in_proj_weight: Any, in_proj_bias: Any,
    bias_k: Any, bias_v: Any, add_zero_attn: bool, dropout_p: float, out_proj_weight: Tensor, out_proj_bias: Any, training: bool = True,
    key_padding_mask: Any = None, need_weights: bool = True, attn_mask: Any = None, use_separate_proj_weight: bool = False,
    q_proj_weight: Any = None, k_proj_weight: Any = None, v_proj_weight: Any = None, static_k: Any = None, static_v: Any = None,
    average_attn_weights: bool = True, is_causal: bool = False,
) -> _Arguments:  # fmt: skip
    rest = (bias_k, bias_v, q_proj_weight, k_proj_weight, v_proj_weight, static_k, static_v)
    plain = not use_separate_proj_weight and not add_zero_attn and all(x is None for x in rest)
    return _Arguments(
        query, key, value, num_heads, in_proj_weight, in_proj_bias, out_proj_weight, out_proj_bias, dropout_p if training else 0.0,
        key_padding_mask, attn_mask, need_weights, average_attn_weights, is_causal, plain,
    )  # fmt: skip
