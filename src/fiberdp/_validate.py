"""One way to refuse bad input: a ValueError of one line that says what was given, what is allowed, why, what to do."""

from __future__ import annotations

import math


def positive(name: str, value: float, *, why: str) -> float:
    """Return `value` if it is a finite number above 0, else raise ValueError."""
    if not isinstance(value, (int, float)) or not math.isfinite(value) or value <= 0:
        raise ValueError(f"{name}={value!r}: must be a finite number above 0. {why}")
    return value


def interval(name: str, value: float, low: float, high: float, *, open_low: bool = False, open_high: bool = False, why: str) -> float:
    """Return `value` if it lies between low and high (closed unless said otherwise), else raise ValueError."""
    inside = (
        isinstance(value, (int, float)) and (low < value if open_low else low <= value) and (value < high if open_high else value <= high)
    )
    if not inside:
        bounds = f"{'(' if open_low else '['}{low:g}, {high:g}{')' if open_high else ']'}"
        raise ValueError(f"{name}={value!r}: must lie in {bounds}. {why}")
    return value


def count(name: str, value: int, *, low: int = 1, why: str) -> int:
    """Return `value` if it is a whole number of at least `low`, else raise ValueError."""
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ValueError(f"{name}={value!r}: must be a whole number of at least {low}. {why}")
    return value


def choice(name: str, value: str, allowed: list[str] | tuple[str, ...], *, why: str = "") -> str:
    """Return `value` if it is one of `allowed`, else raise ValueError naming them all."""
    if value not in allowed:
        raise ValueError(f"{name}={value!r}: must be one of {', '.join(allowed)}.{' ' + why if why else ''}")
    return value
