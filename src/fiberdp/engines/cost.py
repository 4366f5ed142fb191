"""Gram form or materialised: what each costs beyond the weighted product, and which parameters are worth the memory.

    form          norm                             clipped sum       beyond the weighted product
    Gram          <L L^T, R R^T>, pairs of points  one product       2 b s^2 (p + q) a pair of points
    materialised  Sum_s L_s R_s^T, then its norm   one pass over it  writing and reading b p q numbers twice

Materialising forms the product an example at a time, with as many operations as the weighted product it replaces, so a one-point
step with few positions s is best served by the Gram form and a two-point step, with its three pairs, often by the other.  The compiled
functions (`compiled.py`) form half of the products of a factor with itself, and take norms while they form a gradient.
The constants are from CPU cores of 2020 and later; they decide time and memory, never a result but by rounding, and they are constants
so that the same seed gives the same run.
"""

from __future__ import annotations

from fiberdp.engines.compiled import compiled_gram
from fiberdp.engines.parts import Outer, Part

FLOPS = 140e9  # of a product of two large matrices, all cores
HALF_SPEED = 50  # positions at which batched products reach half of it
COMPILED_GRAM, COMPILED_DENSE = 120e9, 125e9  # of the compiled functions
ROW = 96  # entries of a row that cost as much as ending the sums over it
BANDWIDTH = 20e9  # bytes a second
CALL = 2e-5  # seconds to start a few operations


def gram_seconds(outer: Outer) -> float:
    """Time of the Gram form beyond the weighted product."""
    b, s, q = outer.blocks[0].left.shape
    p, points = outer.blocks[0].right.shape[2], len(outer.blocks)
    if points == 1 and s == 1:
        return 4 * b * (p + q) / BANDWIDTH
    if _compiled(outer):
        return points * points * (b * s * s * (p + q + ROW) / COMPILED_GRAM) + CALL
    pairs = points * (points + 1) / 2
    return pairs * (2 * b * s * s * (p + q) / (FLOPS * s / (s + HALF_SPEED)) + CALL)


def dense_seconds(outer: Outer) -> float:
    """Time of the materialised form beyond the weighted product."""
    b, s, q = outer.blocks[0].left.shape
    products = 2 * len(outer.blocks) * b * s * q * outer.blocks[0].right.shape[2]
    if _compiled(outer) and s > 1:
        return products * (1 / COMPILED_DENSE - 1 / FLOPS) + 2 * dense_bytes(outer) / BANDWIDTH + CALL
    return products * HALF_SPEED / s / FLOPS + 3 * dense_bytes(outer) / BANDWIDTH + CALL


def _compiled(outer: Outer) -> bool:
    left = outer.blocks[0].left
    return compiled_gram(left.dtype, left.device.type) is not None


def dense_bytes(outer: Outer) -> int:
    left, right = outer.blocks[0].left, outer.blocks[0].right
    return len(left) * left.shape[2] * right.shape[2] * left.element_size()


def materialised(parts: dict[str, Part], budget: int) -> set[str]:
    """The parameters to materialise: those that gain time, the most time a byte first, as long as `budget` bytes last."""
    gains = sorted(
        ((gram_seconds(part) - dense_seconds(part)) / dense_bytes(part), name) for name, part in parts.items() if isinstance(part, Outer)
    )
    chosen: set[str] = set()
    for gain, name in reversed(gains):
        size = dense_bytes(parts[name])  # pyright: ignore
        if gain > 0 and size <= budget:
            budget -= size
            chosen.add(name)
    return chosen
