"""The least noise that meets a target: sigma such that epsilon(sigma) <= epsilon, from the side that is safe."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fiberdp._validate import interval, positive
from fiberdp.accounting.accountant import epsilon as price

if TYPE_CHECKING:
    from dp_accounting import DpEvent

_LOW, _HIGH = 1e-6, 1e9  # sigma outside is no privacy, or no signal
_TOLERANCE = 1e-7  # relative, in sigma and in epsilon


def noise_multiplier(
    make_event: Callable[[float], DpEvent],
    epsilon: float,
    delta: float,
    *,
    relation: str,
    accountant: str = "pld",
) -> float:
    """The smallest sigma, to 1e-7 relative, whose `make_event(sigma)` is (epsilon, delta)-DP.

    Guarantee: the accountant's own epsilon at the returned sigma lies in [0.99 epsilon, epsilon].
    Raises ValueError if epsilon is not a finite number above 0, delta is not in (0, 1), no sigma meets the target
    (the paper's Renyi orders end at 63, so they cannot show a small epsilon), or the event does not depend on sigma.
    Source: the root of log epsilon(log sigma) - log target by Brent's method, which is nearly a straight line.

    One full-batch release, Balle and Wang 2018; the textbook sqrt(2 log(1.25 / delta)) / epsilon gives 4.8448:

    >>> from dp_accounting import GaussianDpEvent
    >>> round(noise_multiplier(GaussianDpEvent, 1.0, 1e-5, relation="add_or_remove_one"), 5)
    3.73063
    """
    positive("epsilon", epsilon, why="It is the privacy budget. Raise it, or account for a given noise_multiplier.")
    interval("delta", delta, 0, 1, open_low=True, open_high=True, why="No Gaussian noise reaches delta = 0.")
    from scipy.optimize import brentq

    known: dict[float, float] = {}

    def gap(log_sigma: float) -> float:
        """log epsilon(sigma) - log target, held within what Brent's method can interpolate."""
        if log_sigma not in known:
            known[log_sigma] = price(make_event(math.exp(log_sigma)), delta, relation=relation, accountant=accountant)
        eps = known[log_sigma]
        if aim * (1 - _TOLERANCE) <= eps <= epsilon:  # nothing better is asked for, and an evaluation may take a second
            return 0.0
        return math.log(min(max(eps / aim, 1e-12), 1e12))

    aim = epsilon * (1 - _TOLERANCE / 2)
    low, high = _bracket(gap, epsilon, _start(make_event, epsilon, delta, relation) if accountant == "pld" else 0.0)
    root: Any = high if gap(high) == 0 else brentq(gap, low, high, xtol=_TOLERANCE)
    x = float(root)
    step = _TOLERANCE
    while gap(x) > 0:  # the root may be approached from either side
        x, step = x + step, 2 * step
    if known[x] < 0.99 * epsilon:
        least = min(eps for eps in known.values() if eps > epsilon)
        raise ValueError(
            f"epsilon={epsilon}: the {accountant} accountant shows nothing between {known[x]:.3g} and {least:.3g} at "
            f"delta={delta}. The target lies in a gap of its bound: its Renyi orders end too low for a small epsilon. "
            'Use accountant="pld" for a small epsilon, or another epsilon.'
        )
    return math.exp(x)


def _start(make_event: Callable[[float], DpEvent], epsilon: float, delta: float, relation: str) -> float:
    """log sigma of the Renyi bound: a little too much noise, and found in a fraction of the time that one loss distribution takes."""
    try:
        return math.log(noise_multiplier(make_event, epsilon, delta, relation=relation, accountant="rdp"))
    except ValueError:
        return 0.0


def _bracket(gap: Callable[[float], float], epsilon: float, start: float) -> tuple[float, float]:
    """(low, high) in log sigma with gap(low) > 0 >= gap(high), from steps that assume epsilon ~ 1 / sigma."""
    low = high = start
    if gap(start) > 0:
        while gap(high) > 0:
            low, high = high, min(high + max(gap(high), 0.2) + 0.1, math.log(_HIGH))
            if low == high:
                raise ValueError(
                    f"epsilon={epsilon}: no noise_multiplier up to {_HIGH:g} meets it. Part of the cost does not shrink "
                    "with the noise, or the target is too small. Raise epsilon or delta."
                )
        return low, high
    while gap(low) <= 0:
        low, high = max(low - min(-gap(low) if gap(low) > -0.3 else max(-gap(low) / 2, 0.2) + 0.1, 1.5) - 0.01, math.log(_LOW)), low
        if low == high:
            raise ValueError(
                f"epsilon={epsilon}: every noise_multiplier meets it, down to {_LOW:g}. The event releases nothing that "
                "needs noise, or the target is no privacy at all. Lower epsilon."
            )
    return low, high
