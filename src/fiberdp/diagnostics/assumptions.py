"""Do the correction's assumptions hold in training?  Signal and noise apart (paper, section 5.4 and appendix E.4; Tables 7 and 11).

Subtracting A sigma_w^2 from the second moment is exact if signal and noise are uncorrelated (Proposition C.3):

    E[g~^2] = E[s^2] + E[n^2] + 2 E[s n]

Both are seen through fixed random directions u, over the steps after a warm-up:

    x_t = u' g~_t                the filtered gradient, as it reached the moments
    n_t = filter of u' w_t       w_t is the noise that was really added, made again from the run's own keys
    s_t = x_t - n_t              everything else

    rho_sn            correlation of s and n
    cross_term_ratio  |mean(s n)| / mean(n^2)
    cv                std / mean of the variance of x over sliding windows: local stationarity

Each has a floor that sampling alone gives: uncorrelated s and n of T steps give a cross-term ratio of the order of
std(s)/(std(n) sqrt(T)), and a stationary x has a cv above 0, which `cv_of_noise` shows: that of n, which is stationary by construction,
over the same windows.  `cross_term` is the signed mean over directions and seeds, where the floor averages out.

It reads the noise: the output is for whoever holds the data, and not for release.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from fiberdp import _validate
from fiberdp._random import Keys
from fiberdp.diagnostics.folder import BLUE, GREEN, ORANGE, Advance, Table, unheard
from fiberdp.diagnostics.runs import Projections, Watch, fiber, subject
from fiberdp.recipes import Recipe

LARGE = 0.25
"""A cross term of a quarter of E[n^2] leaves 2 x 0.25 E[n^2] in, or takes as much too much: the correction is off by half of itself."""

WINDOW = 100  # steps, of the sliding variance; at most a quarter of the steps after the warm-up
PAPER = {"rho_sn": 0.1404, "cross_term_ratio": 0.1505, "cv": 0.0313}

TEXT = (
    "The filtered gradient of real runs, seen through random directions and taken apart into the filtered noise (made again from the run's "
    "own keys) and the rest, the signal. The correction of the second moment is exact where the two are uncorrelated. The paper's figures "
    "are of one run and one direction on CIFAR-10. **This reads the noise: it is for whoever holds the data, and not for release.**"
)


def assumptions(
    *,
    recipe: str | Recipe = "digits",
    steps: int = 400,
    epsilon: float | None = None,
    omega: float | None = None,
    eps_v: float | None = None,
    seeds: int = 3,
    projections: int = 16,
    seed: int = 0,
    data: str | None = None,
    advance: Advance = unheard,
) -> dict[str, Any]:
    """Run the method fiber `seeds` times.  omega, eps_v: the recipe's if None.

    Returns rho_sn, cross_term_ratio, cv, each {mean, std} over directions and seeds; cross_term {mean, standard_error}, signed;
    cv_of_noise; noise_share, mean(n^2)/mean(x^2); rows, the same per seed; warnings; settings; and windows, the variances over time of
    direction 0.
    Raises ValueError for bad input.
    """
    _validate.count("steps", steps, low=32, why="An eighth is warm-up, and variances are taken over windows of the rest.")
    _validate.count("seeds", seeds, why="Each is a run.")
    given = {name: value for name, value in {"omega": omega, "eps_v": eps_v}.items() if value is not None}
    it = subject(recipe, fiber(recipe, **given), steps=steps, epsilon=epsilon, data=data)
    warm_up = steps // 8
    window = min(WINDOW, (steps - warm_up) // 4)
    rows, curves = [], []
    for i in range(seeds):
        x, n = _apart(it.make(Keys.seeded(seed + i)), projections, seed + i, lambda done, i=i: advance(i * steps + done, seeds * steps))
        rows.append({"seed": seed + i} | statistics(x[warm_up:], n[warm_up:], window))
        curves.append({"x": _variances(x[warm_up:, :1], window)[:, 0].tolist(), "n": _variances(n[warm_up:, :1], window)[:, 0].tolist()})
    found: dict[str, Any] = {
        name: {"mean": float(np.mean(values)), "std": float(np.std(values))}
        for name in PAPER
        for values in [np.array([value for row in rows for value in row["each"][name]])]
    }
    signed = np.array([value for row in rows for value in row["each"]["cross_term"]])
    ratio = found["cross_term_ratio"]["mean"]
    return found | {
        "cross_term": {"mean": float(signed.mean()), "standard_error": float(signed.std(ddof=1) / len(signed) ** 0.5)},
        "cv_of_noise": float(np.mean([row["cv_of_noise"] for row in rows])),
        "noise_share": float(np.mean([row["noise_share"] for row in rows])),
        "rows": rows,
        "warnings": [_advice(ratio)] if ratio > LARGE else [],
        "settings": {
            "recipe": it.recipe.name, "epsilon": it.plan.epsilon, "omega": it.plan.method.filter.omega, "steps": steps, "warm_up": warm_up,
            "window": window, "seeds": seeds, "projections": projections, "seed": seed,
        },
        "windows": {"first": warm_up + window, "rows": curves},
        "not_for_release": "computed from the noise itself: with it, noise could be taken off the releases",
    }  # fmt: skip


def statistics(x: np.ndarray, n: np.ndarray, window: int) -> dict[str, Any]:
    """Of x and n, [T, P]: rho_sn, cross_term_ratio, cv as {mean, std} over directions, `each` of them, cv_of_noise and noise_share."""
    s = x - n
    cross = (s * n).mean(0) / (n * n).mean(0)
    centred_s, centred_n = s - s.mean(0), n - n.mean(0)
    variances, of_noise = _variances(x, window), _variances(n, window)
    each = {
        "rho_sn": (centred_s * centred_n).sum(0) / np.sqrt((centred_s**2).sum(0) * (centred_n**2).sum(0)),
        "cross_term_ratio": np.abs(cross),
        "cv": variances.std(0) / variances.mean(0),
        "cross_term": cross,
    }
    return {
        **{name: {"mean": float(each[name].mean()), "std": float(each[name].std())} for name in PAPER},
        "cv_of_noise": float((of_noise.std(0) / of_noise.mean(0)).mean()),
        "noise_share": float((n * n).mean() / (x * x).mean()),
        "each": {name: values.tolist() for name, values in each.items()},
    }


def _apart(run: Any, projections: int, seed: int, advance: Any) -> tuple[np.ndarray, np.ndarray]:
    """(x, n), each [T, P]."""
    watch = Watch(run, Projections(run.flat.numel, projections, seed=seed))
    memory = run.plan.mechanism.init(run.flat.theta)
    filter, state, x, n = run.optimizer.filter, None, [], []
    for t in range(run.plan.steps):
        watch.step()
        y = watch.u(run.pipeline.secret_noise(t, memory))
        n_t, state = filter.update(y, filter.init(y) if state is None else state, t)
        x.append(watch.g_tilde)
        n.append(n_t)
        advance(t + 1)
    return torch.stack(x).numpy(), torch.stack(n).numpy()


def _variances(x: np.ndarray, window: int) -> np.ndarray:
    """Variance of each column over every window of that many rows."""
    sums = np.cumsum(np.stack([x, x * x], 1), 0)
    mean, square = np.moveaxis(np.concatenate([sums[window - 1 : window], sums[window:] - sums[:-window]]) / window, 1, 0)
    return square - mean**2


def _advice(ratio: float) -> str:
    return (
        f"the mean cross-term ratio is {ratio:.3g}, above {LARGE}: signal and noise are correlated, so that the correction of the second "
        "moment is off by half of itself or more. Reduce omega, raise eps_v, or test with layerwise clipping."
    )


def tables(found: dict[str, Any]) -> list[Table]:
    names = {"rho_sn": "ρ(s, n)", "cross_term_ratio": "cross-term ratio", "cv": "coefficient of variation"}
    settings = found["settings"]
    rows = [
        (label, f"{PAPER[name]:.4f}", _pair(found[name]), *(f"{r[name]['mean']:.4f}" for r in found["rows"]))
        for name, label in names.items()
    ]
    blank, cross = ("",) * len(found["rows"]), found["cross_term"]
    rows += [
        ("cross term, signed", "–", f"{cross['mean']:+.4f} ± {cross['standard_error']:.4f} (SE)", *blank),
        ("coefficient of variation of n alone", "–", f"{found['cv_of_noise']:.4f}", *(f"{r['cv_of_noise']:.4f}" for r in found["rows"])),
        ("share of noise, E[n²]/E[x²]", "–", f"{found['noise_share']:.4f}", *(f"{r['noise_share']:.4f}" for r in found["rows"])),
        ("ω; T; warm-up", "0.9; 800; 100", f"{settings['omega']:g}; {settings['steps']}; {settings['warm_up']}", *blank),
    ]
    title = f"Proxies for the correction's assumptions (Tables 7 and 11): mean ± std over {settings['projections']} directions and seeds"
    return [Table(title, ("metric", "paper", "here", *(f"seed {row['seed']}" for row in found["rows"])), rows)]


def _pair(value: dict[str, float]) -> str:
    return f"{value['mean']:.4f} ± {value['std']:.4f}"


def draw(found: dict[str, Any], figure: Any) -> None:
    """The cross terms of every direction, and the variance of x over time."""
    figure.set_size_inches(9.2, 3.9)
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.25))
    signed = [row["each"]["cross_term"] for row in found["rows"]]
    left.axvspan(-LARGE, LARGE, color="#f2f2f2", lw=0, label=f"no warning within ±{LARGE}")
    spread = np.linspace(-0.25, 0.25, max(map(len, signed)))
    for i, values in enumerate(signed):
        left.plot(values, i + spread[: len(values)], "o", ms=4, color=BLUE, alpha=0.7, mew=0)
    left.axvline(found["cross_term"]["mean"], color=BLUE, lw=1.0, label=f"mean {found['cross_term']['mean']:+.4f}")
    for sign in (1, -1):
        left.axvline(sign * PAPER["cross_term_ratio"], color=ORANGE, ls="--", label="paper, |one direction|" if sign > 0 else None)
    left.set(xlabel="cross term mean(s n) / mean(n²)", title="Each direction", yticks=range(len(signed)), ylim=(-0.5, len(signed) - 0.5))
    left.set_yticklabels([f"seed {row['seed']}" for row in found["rows"]])
    left.grid(False)
    reach = 1.15 * max(LARGE, *(abs(v) for values in signed for v in values))
    left.set_xlim(-reach, reach)
    left.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=3, fontsize=7, handlelength=1.4, columnspacing=1.0)
    colours = (BLUE, ORANGE, GREEN)
    for i, curve in enumerate(found["windows"]["rows"][:3]):
        t = found["windows"]["first"] + np.arange(len(curve["x"]))
        right.plot(t, curve["x"], color=colours[i], label=f"x, seed {found['rows'][i]['seed']}")
        right.plot(t, curve["n"], color=colours[i], ls=":", lw=1.1, label="its noise n")
    window = found["settings"]["window"]
    right.set(
        xlabel="step t", ylabel="variance, gradient units²", title=f"Variance of the {window} steps before t, direction 0", ylim=(0, None)
    )
    right.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
    right.legend(ncols=3, fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.2))
