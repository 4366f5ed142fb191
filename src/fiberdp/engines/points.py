"""From probes to parameter vectors: what every engine evaluates, with no point evaluated twice."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fiberdp.types import Probe


def points(theta: Tensor, d: Tensor | None, probes: Sequence[Probe]) -> list[tuple[float, Tensor]]:
    """[(weight, theta + lookahead d)], one entry a distinct point, without zero weights (but one if there is nothing else).

    d is None before the first update: d_{-1} = 0, so all points coincide and one evaluation serves.  theta itself is
    never modified (adding gamma d and subtracting it again would drift).

    >>> import torch
    >>> points(torch.zeros(1), None, [Probe(0.25, 0.0), Probe(0.75, 0.5)])
    [(1.0, tensor([0.]))]
    """
    weights: dict[float, float] = {}
    for probe in probes:
        lookahead = 0.0 if d is None else probe.lookahead
        weights[lookahead] = weights.get(lookahead, 0.0) + probe.weight
    return [
        (weight, theta if lookahead == 0 or d is None else theta.add(d, alpha=lookahead))
        for lookahead, weight in weights.items()
        if weight != 0
    ] or [(0.0, theta)]
