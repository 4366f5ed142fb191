"""Every example as it is, once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class NoAugmentation:
    """One copy, unchanged; it needs no draws."""

    name: ClassVar[str] = "none"
    multiplicity: ClassVar[int] = 1
    draws: ClassVar[int] = 0

    def apply(self, batch: Any, uniforms: Tensor) -> Any:
        return batch
