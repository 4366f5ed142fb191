"""Does a filter let through the noise it says it does?  Measured in real training (paper, section 5.3, Figure 6).

Two runs with the same initial model, batches and masks, and independent noise.  Delta is their difference, u_1 … u_P are fixed orthonormal
directions, and after the warm-up

    rho  = Var(u' Delta g~) / Var(u' Delta g)                      measured
    A    = Sum_j (h * k)_j^2 / Sum_j k_j^2                         declared; h, k: responses of filter and noising filter; white: Sum h_j^2
    r    = Var(u' Delta g) / (2 sigma_w^2 Sum_j k_j^2)             near 1 where Delta g is noise

The runs are exchangeable, so Delta has mean 0 and Var is the mean square.  Once they part, Delta g holds a difference of clipped gradients
as well: r - 1 is its share.  It moves slowly, so a filter passes it on whole, and where r - 1 is not small beside A, rho lies above A by up
to r - 1; a smaller epsilon makes it smaller.

Standard error: steps are correlated (the filter sees to that), directions are not.  So each direction's mean squares over time, y_p of
Delta g~ and x_p of Delta g, are one sample, and rho = Sum y_p / Sum x_p is a ratio estimate with

    SE^2 = Sum_p (y_p - rho x_p)^2 / (P (P - 1) mean(x)^2)

A filter that learns has other gains in each run (`gains_differ`); A is then averaged over the gains that were used.
"""

from __future__ import annotations

import math
from dataclasses import MISSING, asdict, fields, replace
from typing import Any

import numpy as np
import torch

from fiberdp import _validate
from fiberdp._random import Keys
from fiberdp.diagnostics.folder import BLUE, GREY, ORANGE, Advance, Table, unheard
from fiberdp.diagnostics.runs import Projections, Replica, Watch, fiber, subject
from fiberdp.filters import FILTERS, Filter, Identity, Innovation
from fiberdp.linear import WHITE, NoiseVariance
from fiberdp.mechanisms import MECHANISMS, Banded, White
from fiberdp.recipes import Recipe
from fiberdp.types import Noise

LIMIT = 3.0  # standard errors
SETTLED = 0.01  # the filter has settled when A_t stays this close to A, relative
SHORTEST, LEARNING, LONGEST = 20, 100, 20_000  # warm-up steps: least, of a filter that learns, most that is looked for
MEASURED = 300  # steps after the warm-up, unless told otherwise
EPSILON = (
    0.5  # unless told otherwise: less than a recipe's, so that the runs' difference is noise (r near 1) for a filter with a small A too
)
WINDOW = 25  # steps, of the figure

TEXT = (
    "Two runs with the same initial model and batches and independent noise: the variance of the difference of their filtered gradients "
    "over that of their gradients (ρ), beside the noise gain A that the filter declares. r, the variance of the difference over that of "
    "the noise alone, is near 1 where the difference is noise. Standard errors treat each random direction's average over time as one "
    "sample. The keys are seeded and both runs see the data: this is for whoever holds the data, not for release."
)


def filter_named(name: str, **options: Any) -> Filter:
    """A filter of the registry by name.  Raises ValueError for an option that it does not have, or one it needs."""
    cls = FILTERS[_validate.choice("filter", name, tuple(FILTERS))]
    known = {f.name: f for f in fields(cls)}
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise ValueError(
            f"filter {name} has no option {', '.join(unknown)}: it has {', '.join(known) or 'none'}. An ignored option would mislead; "
            "remove it."
        )
    needed = [f.name for f in known.values() if f.default is MISSING and f.default_factory is MISSING and f.name not in options]
    if needed:
        raise ValueError(
            f"filter {name} without {', '.join(needed)}: they must be given, because they have no default. Use "
            "fiberdp.diagnostics.attenuation.attenuation(filter=…) from Python."
        )
    return cls(**options)


def mechanism_named(name: str, bands: int | None) -> Any:
    cls = MECHANISMS[_validate.choice("mechanism", name, tuple(MECHANISMS))]
    if cls is Banded:
        return Banded(bands=4 if bands is None else bands)
    if bands is not None:
        raise ValueError(f"bands={bands} with mechanism={name!r}: white noise has none. Leave bands out, or use banded.")
    return cls()


def settling(filter: Any, noise: Noise = WHITE) -> int:
    """Steps until the exact A_t stays within SETTLED of A; at least SHORTEST, and LEARNING for a filter that learns."""
    if filter.learns:
        return LEARNING
    variance, A, last = NoiseVariance(), filter.system(None).noise_gain(noise), 0
    for t in range(LONGEST):
        if abs(variance.update(filter.system(t), noise) / A - 1) > SETTLED:
            last = t + 1
        elif t > 2 * last + 200:
            break
    return max(SHORTEST, last)


def attenuation(
    *,
    recipe: str | Recipe = "digits",
    filter: Any = None,
    mechanism: Any = None,
    declared: Any = None,
    steps: int | None = None,
    epsilon: float | None = None,
    projections: int = 256,
    seed: int = 0,
    data: str | None = None,
    advance: Advance = unheard,
) -> dict[str, Any]:
    """rho beside A for one filter and mechanism, in the method fiber otherwise.

    filter: innovation(0.9) if None.  mechanism: White() or Banded(…).  steps: of training, the warm-up included; by default the warm-up
    and 300.  epsilon: 0.5 if None.  declared: the filter that A is computed from, if not the one that runs (a planted fault, which
    must be rejected).

    Returns filter, options, mechanism, rho, A, standard_error, deviation ((rho - A) / SE), passed (|deviation| < 3), noise_share (r),
    projections, steps, warm_up, gains_differ, warnings, settings, and series {rho, A, r}: over a sliding window.
    Raises ValueError for bad input, and for fewer steps than the filter needs to settle.
    """
    ran = Innovation() if filter is None else filter
    said = ran if declared is None else declared
    method = replace(fiber(recipe), name=f"fiber with {ran.name}", filter=ran, mechanism=mechanism or White())
    warm_up = settling(ran)
    total = warm_up + MEASURED if steps is None else _validate.count("steps", steps, why="It is how many releases are measured.")
    if total <= warm_up + WINDOW:
        raise ValueError(
            f"steps={total}: must be above {warm_up + WINDOW}, because the filter {ran.name} needs {warm_up} steps to settle and "
            f"{WINDOW} are measured at least. Give more steps."
        )
    it = subject(recipe, method, steps=total, epsilon=EPSILON if epsilon is None else epsilon, data=data)
    keys = Keys.seeded(seed)
    runs = [it.make(k) for k in (keys, Replica(keys.key, keys.kind, Keys.seeded(seed + 2**31)))]
    u = Projections(runs[0].flat.numel, projections, seed=seed)
    watches = [Watch(run, u) for run in runs]
    expected = [_Expected(run.optimizer, said) for run in runs]
    raw, x, y, through, added = NoiseVariance(), [], [], [], []
    gains_differ = False
    for t in range(total):
        systems = [e.systems(t) for e in expected]
        gains_differ |= ran.learns and systems[0] != systems[1]
        for watch in watches:
            watch.step()
        a, b = watches
        x.append((a.g - b.g).square_())
        y.append((a.g_tilde - b.g_tilde).square_())
        added.append(2 * raw.update(Identity().system(t), a.noise))
        through.append(sum(e.variance(s, a.noise, t) for e, s in zip(expected, systems)))
        advance(t + 1, total)
    X, Y = torch.stack(x).numpy(), torch.stack(y).numpy()
    noise = watches[0].noise
    used = sum(through[warm_up:]) / sum(added[warm_up:])
    A = used if said.learns else said.system(None).noise_gain(noise) / Identity().system(None).noise_gain(noise)
    rho, standard_error = ratio(Y[warm_up:].mean(0), X[warm_up:].mean(0))
    share = float(X[warm_up:].mean() / np.mean(added[warm_up:]))
    return {
        "filter": ran.name,
        "options": asdict(ran),
        "mechanism": method.mechanism.name,
        "rho": rho,
        "A": A,
        "standard_error": standard_error,
        "deviation": (rho - A) / standard_error,
        "passed": abs(rho - A) < LIMIT * standard_error,
        "noise_share": share,
        "projections": u.count,
        "steps": total,
        "warm_up": warm_up,
        "gains_differ": gains_differ,
        "warnings": _warnings(rho - A, LIMIT * standard_error, share - 1),
        "settings": {
            "recipe": it.recipe.name, "epsilon": it.plan.epsilon, "noise_multiplier": it.plan.noise_multiplier, "steps": total,
            "warm_up": warm_up, "projections": u.count, "seed": seed, "bands": getattr(method.mechanism, "bands", None),
        },
        "series": {
            "window": WINDOW, "rho": (_sliding(Y) / _sliding(X)).tolist(), "A": (_mean(through) / _mean(added)).tolist(),
            "r": (_sliding(X) / _mean(added)).tolist(),
        },
    }  # fmt: skip


def ratio(y: np.ndarray, x: np.ndarray) -> tuple[float, float]:
    """(Sum y / Sum x, its standard error) for independent pairs.

    >>> ratio(np.array([2.0, 4.0]), np.array([1.0, 2.0]))
    (2.0, 0.0)
    """
    value = float(y.sum() / x.sum())
    return value, float(math.sqrt(np.sum((y - value * x) ** 2) / (len(x) * (len(x) - 1))) / x.mean())


def _warnings(off: float, allowed: float, signal: float) -> list[str]:
    if abs(off) < allowed:
        return []
    if 0 < off < signal:
        return [
            f"rho is {off:.4f} above A, more than {LIMIT:g} standard errors, and the runs' gradients differ by {signal:.4f} of the noise's "
            "variance: a slow difference passes where noise does not, so it may be all there is. Give a smaller --epsilon."
        ]
    return [f"rho is {off:+.4f} off A, more than {LIMIT:g} standard errors: this filter does not let through the noise that it declares."]


class _Expected:
    """Variance of the filtered noise on an average coordinate of one run, with the gains that it used."""

    def __init__(self, optimizer: Any, filter: Any) -> None:
        self.optimizer, self.filter = optimizer, filter
        self.of_group = [NoiseVariance() for _ in optimizer.groups]

    def systems(self, t: int) -> list[Any]:
        """The filter of step t in each group, known before the release."""
        learned = self.optimizer.learned if self.filter.learns else []
        return [self.filter.tuned(memory) for memory in learned] or [self.filter] * len(self.of_group)

    def variance(self, systems: list[Any], noise: Noise, t: int) -> float:
        d = len(self.optimizer.theta)
        sizes = [group.stop - group.start for group in self.optimizer.groups]
        return sum(n / d * v.update(s.system(t), noise) for n, v, s in zip(sizes, self.of_group, systems))


def _mean(values: Any) -> np.ndarray:
    """Means over WINDOW steps, the last of which is t."""
    return np.convolve(values, np.full(WINDOW, 1 / WINDOW), "valid")


def _sliding(squares: np.ndarray) -> np.ndarray:
    return _mean(squares.mean(1))


def tables(found: dict[str, Any]) -> list[Table]:
    options = ", ".join(f"{key} {value}" for key, value in found["options"].items())
    row = (
        f"{found['filter']} ({options})" if options else found["filter"], found["mechanism"], f"{found['rho']:.4f}", f"{found['A']:.4f}",
        f"{found['standard_error']:.4f}", f"{found['deviation']:+.2f}", "yes" if found["passed"] else "NO", f"{found['noise_share']:.4f}",
    )  # fmt: skip
    note = "; the replicas' gains differ, and A is the mean over those used" if found["gains_differ"] else ""
    return [
        Table(
            f"Noise that the filter lets through, measured and declared (Figure 6; the paper: ρ matches A, r near 1){note}",
            ("filter", "noise", "ρ", "A", "SE of ρ", "(ρ − A)/SE", "within 3", "r"),
            [row],
        )
    ]


def draw(found: dict[str, Any], figure: Any) -> None:
    """Figure 6: rho_t over time beside A, and r_t below."""
    figure.set_size_inches(7.2, 4.6)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(2.2, 1))
    series, error = found["series"], found["standard_error"]
    t = np.arange(len(series["rho"])) + series["window"] - 1
    above.axvspan(0, found["warm_up"], color="#f2f2f2", lw=0)
    above.axhspan(found["rho"] - LIMIT * error, found["rho"] + LIMIT * error, color=BLUE, alpha=0.15, lw=0, label="ρ ± 3 SE, after warm-up")
    above.plot(t, series["rho"], color=BLUE, label=f"ρₜ, mean of {series['window']} steps")
    above.plot(t, series["A"], color=ORANGE, ls="--", label=f"Aₜ, declared (A = {found['A']:.4f})")
    above.set(ylabel="ρ", title=f"{found['filter']}, {found['mechanism']} noise: ρ = {found['rho']:.4f} ± {error:.4f}")
    settled = [value for name in ("rho", "A") for at, value in zip(t, series[name]) if at >= found["warm_up"]]
    low, high = min(settled), max(settled)  # the start is left to run off the axis
    above.set_ylim(low - 0.15 * (high - low), high + 0.55 * (high - low))
    above.legend(loc="upper right", ncols=3, fontsize=8)
    below.axvspan(0, found["warm_up"], color="#f2f2f2", lw=0)
    below.plot(t, series["r"], color=GREY)
    below.axhline(1, color="black", lw=0.8, ls=":")
    below.set(xlabel="step t (grey: warm-up)", ylabel="r", xlim=(0, found["steps"]))
    spread = max(0.1, *(abs(r - 1) for r in series["r"]))
    below.set_ylim(1 - 1.2 * spread, 1 + 1.2 * spread)
