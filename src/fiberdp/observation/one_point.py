"""One gradient per example, at theta (DP-SGD and its descendants)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fiberdp.types import Probe


@dataclass(frozen=True, kw_only=True)
class OnePoint:
    """u_t(xi) = grad f(theta_t; xi)."""

    name: ClassVar[str] = "one_point"

    def probes(self) -> tuple[Probe, ...]:
        return (Probe(1.0, 0.0),)
