"""What the optimizer asks of the parts it is made of; any object with these methods will do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Protocol

from torch import Tensor

from fiberdp.types import Noise

Scalars = dict[str, Any]
"""A calibration's state: a few numbers, the same for every coordinate of a group (and P, a vector, where gradients are scaled)."""


class Filter(Protocol):
    recursion: ClassVar[Callable[..., tuple[Tensor, dict[str, Tensor]]]]

    @property
    def learns(self) -> bool: ...
    def init(self, g: Tensor) -> dict[str, Tensor]: ...
    def gains(self, t: int | None) -> tuple[Any, ...]: ...
    def system(self, t: int | None) -> Any: ...


class Calibration(Protocol):
    @property
    def state_names(self) -> tuple[str, ...]: ...
    def correction(
        self, noise: Noise, system: Any, settled: Any, t: int, beta2: float, state: Scalars, spread: Tensor | None = None
    ) -> tuple[Any, Scalars]: ...


class Update(Protocol):
    state_names: ClassVar[tuple[str, ...]]

    @property
    def lr(self) -> float: ...
    def coefficients(self, t: int, lr: float) -> tuple[float, ...]: ...
    @property
    def update(self) -> Callable[..., None]: ...


class Schedule(Protocol):
    def factor(self, t: int, steps: int) -> float: ...


class Scaling(Protocol):
    def init(self, theta: Tensor) -> dict[str, Tensor]: ...
    def update(self, g: Tensor, state: dict[str, Tensor]) -> None: ...
    def scale(self, state: dict[str, Tensor]) -> Tensor | None: ...


class Averaging(Protocol):
    def init(self, theta: Tensor) -> dict[str, Tensor]: ...
    def weight(self, t: int) -> float: ...
    def update(self, theta: Tensor, state: dict[str, Tensor], weight: float) -> None: ...
    def average(self, state: dict[str, Tensor]) -> Tensor | None: ...
