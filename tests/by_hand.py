"""One example clipped with plain arithmetic, for comparison."""

from __future__ import annotations

import math

import torch

from fiberdp.clipping import Automatic, Flat, PerLayer


def clipped_by_hand(rule, u, slots):
    """factor u; u: [d]."""
    if isinstance(rule, Flat):
        return u * min(1.0, rule.clip_norm / float(u.norm()))
    if isinstance(rule, Automatic):
        return u * (rule.clip_norm / (float(u.norm()) + rule.stability))
    assert isinstance(rule, PerLayer)
    layers: dict[str, list[slice]] = {}
    for slot in slots:
        layers.setdefault(slot.name.rsplit(".", 1)[0] if "." in slot.name else "", []).append(slice(slot.start, slot.stop))
    out = torch.zeros_like(u)
    for parts in layers.values():
        norm = math.sqrt(sum(float(u[part].square().sum()) for part in parts))
        for part in parts:
            out[part] = u[part] * min(1.0, rule.clip_norm / math.sqrt(len(layers)) / norm)
    return out
