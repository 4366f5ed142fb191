"""Which filter follows which drift: synthetic gradients under noise (paper, appendix E.3; Tables 6 and 10, Figures 10 and 11).

    g_t = s_t + w_t,   w_t ~ N(0, sigma_w^2 I_d),   t < T                                              (eq. 78)
    SNR = scale^2 / sigma_w^2                                                                            (eq. 79)
    MSE = 1/T Sum_t || g~_t - s_t ||^2                                                                   (eq. 80)
    improvement = 100 (MSE_ema - MSE_filter) / MSE_ema, percent                                          (eq. 81)

    constant velocity, CV   r_t = r_{t-1} + 0.01 v z_t,   s_t = s_{t-1} + r_t,   r_{-1} = v n,   v = scale sqrt(2.55)
    random walk, RW         s_t = s_{t-1} + v z_t,                                               v = scale sqrt(0.00263)

n, z_t ~ N(0, I_d), s_{-1} = 0; seven scales 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1, and sigma_w = 0.5 / epsilon.

The paper does not give its generator: these constants are our inference from its Table 10, and how far they reproduce it is printed
beside it.

- The baseline.  When noise is all there is, the improvement is 100 (1 - A(omega)/A(kappa)).  RW's improvements at small epsilon fall
  towards -1508 %, a ratio of 16.08, which is innovation(0.9)'s 0.846154 over 1/19 = A of an EMA with kappa = 0.1 (and of no other on a grid
  of tenths).  With DiSK's default 0.7 the worst possible were -57 %.  It starts at zero: from g_0, its error of the first steps would raise
  RW's averages by some 260 points above the paper's.
- The noise.  A drift shows against noise through x = v^2 / sigma_w^2 alone.  Solving each "best" entry for x gives a factor of 4 for every
  doubling of epsilon, under both models: sigma_w is proportional to 1/epsilon.  Only the product of its constant and the scales is
  determined; 0.5 puts scale^2 / sigma_w^2 at 0.04 for scale 0.05 and epsilon 2.
- The velocities.  2.55 and 0.00263 are the x that the "best" columns give for the largest scale.
- The scales.  CV wins 3, 4, 5, 6, 7 of 7: one more configuration crosses break-even per doubling of epsilon, so neighbouring scales in the
  middle differ by about 2; the averages fix the rest.  The perturbation of the velocity, the length T and d are free choices.
"""

from __future__ import annotations

import math
from dataclasses import MISSING, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fiberdp import _validate
from fiberdp.diagnostics.folder import BLUE, GREEN, ORANGE, Advance, Table, unheard
from fiberdp.filters import EMA, FILTERS, Innovation
from fiberdp.types import Noise

SCALES = (0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1.0)
EPSILONS = (0.5, 1.0, 2.0, 4.0, 8.0)
MODELS = ("CV", "RW")
NOISE = 0.5  # sigma_w = NOISE / epsilon
VELOCITY = {"CV": math.sqrt(2.55), "RW": math.sqrt(0.00263)}
PERTURBATION = 0.01  # of the velocity, per step
BASELINE = "ema"
RIVALS = ("ema", "ema-0.7", "innovation")  # what a filter must match: the better of the EMA, DiSK's default and FiBeR
SHOWN = {"model": "CV", "scale": 0.05, "epsilon": 2.0}  # Figure 11's run: SNR 0.04, the nearest to its 0.05
TRACED = ("ema", "innovation", "kalman_auto")

PAPER = {  # Table 10: (wins, best, average); Table 6 is its wins at epsilon 2, 4, 8
    ("CV", 0.5): (3, 99.59, -388.59), ("CV", 1.0): (4, 99.90, -189.32), ("CV", 2.0): (5, 99.97, -26.14),
    ("CV", 4.0): (6, 99.99, 59.91), ("CV", 8.0): (7, 100.00, 89.23),
    ("RW", 0.5): (0, -1225.59, -1466.996), ("RW", 1.0): (0, -781.19, -1396.070), ("RW", 2.0): (0, -277.68, -1297.283),
    ("RW", 4.0): (0, -15.40, -1180.544), ("RW", 8.0): (1, 69.15, -1014.144),
}  # fmt: skip

TEXT = (
    "Synthetic gradients that drift with constant velocity (CV) or as a random walk (RW), under Gaussian noise of std 0.5/ε, seven "
    "configurations each (signal scales). Improvement is of the mean squared error over an EMA with κ = 0.1, in percent. The paper does "
    "not give its generator: the constants are inferred from its Table 10 (`diagnostics/drift.py` says how). *Ties or beats better*: in "
    "how many of the seven the error is at most that of the better of EMA(0.1), EMA(0.7) and innovation(0.9), plus two standard errors "
    "of their difference over coordinates."
)


def lineup() -> tuple[dict[str, Any], dict[str, str]]:
    """(name -> filter, name -> why it is left out): the baseline, DiSK's default, and every filter of the registry at its own defaults."""
    filters: dict[str, Any] = {BASELINE: EMA(kappa=0.1, init_at="zero"), "ema-0.7": EMA(kappa=0.7), "innovation": Innovation(omega=0.9)}
    left_out = {}
    for name, cls in FILTERS.items():
        needed = [f.name for f in fields(cls) if f.default is MISSING and f.default_factory is MISSING]
        if needed:
            left_out[name] = f"needs {', '.join(needed)}, which have no default"
        elif name not in filters:
            filters[name] = cls()
    return filters, left_out


def signal(model: str, scale: float, steps: int, dimension: int, generator: torch.Generator) -> Tensor:
    """s: [T, d]."""
    v = scale * VELOCITY[model]
    if model == "RW":
        return torch.randn(steps, dimension, generator=generator).mul_(v).cumsum(0)
    velocity = torch.randn(steps, dimension, generator=generator).mul_(PERTURBATION * v).cumsum(0)
    return velocity.add_(torch.randn(dimension, generator=generator), alpha=v).cumsum(0)


def snr(scale: float, epsilon: float) -> float:
    """scale^2 / sigma_w^2."""
    return (scale * epsilon / NOISE) ** 2


def errors(filter: Any, s: Tensor, g: Tensor, noise: list[float], trace: int | None = None) -> tuple[Tensor, list[float] | None]:
    """(MSE of each coordinate, Tensor[n, d]; the error's norm at each step of configuration `trace`).

    s, g: [T, n, d], n configurations side by side; noise: the sigma_w of each.  A filter that learns is taught each by itself.
    """
    if filter.learns:
        apart = [_taught(filter, s[:, i], g[:, i], std) for i, std in enumerate(noise)]
        return torch.stack([square.mean(0) for square in apart]), None if trace is None else apart[trace].sum(1).sqrt().tolist()
    state = filter.init(g[0])
    total, norms = torch.zeros_like(g[0]), []
    for t in range(len(g)):
        g_tilde, state = filter.update(g[t], state, t)
        square = (g_tilde - s[t]).square_()
        total += square
        if trace is not None:
            norms.append(float(square[trace].sum().sqrt()))
    return total / len(g), norms or None


def _taught(filter: Any, s: Tensor, g: Tensor, std: float) -> Tensor:
    """Squared error [T, d] of a filter whose gains follow from what it saw before."""
    state, memory, noise = filter.init(g[0]), filter.begin(g.shape[1]), Noise(std)
    square = torch.empty_like(s)
    for t in range(len(g)):
        g_tilde, state = filter.tuned(memory).update(g[t], state, t)
        memory = filter.learn(memory, g[t], noise, t)
        torch.sub(g_tilde, s[t], out=square[t])
    return square.square_()


def drift(
    *, steps: int = 500, dimension: int = 256, seed: int = 0, filters: dict[str, Any] | None = None, advance: Advance = unheard
) -> dict[str, Any]:
    """Every filter on the same draws.  filters: others than `lineup()`'s, which must hold the three of RIVALS.

    Returns settings, rows [{model, epsilon, filter, wins, configurations, best, average, median, ties_or_beats_better}],
    improvements [{model, epsilon, filter, scale, snr, improvement}] and trace {model, scale, epsilon, snr, error: {filter: [T numbers]}}.
    Raises ValueError for steps below 3, or a dimension below 2.
    """
    _validate.count("steps", steps, low=3, why="A drift shows over time.")
    _validate.count("dimension", dimension, low=2, why="The error's standard error comes from its spread over coordinates.")
    _validate.count("seed", seed, low=0, why="It is where the draws start from.")
    chosen, left_out = lineup() if filters is None else (filters, {})
    rows, improvements, trace = [], [], {}
    cells = [(epsilon, scale) for epsilon in EPSILONS for scale in SCALES]
    std = [NOISE / epsilon for epsilon, _ in cells]
    for m, model in enumerate(MODELS):
        generator = torch.Generator().manual_seed(seed * len(MODELS) + m)
        s = torch.stack([signal(model, scale, steps, dimension, generator) for _, scale in cells], 1)
        g = torch.randn(s.shape, generator=generator).mul_(torch.tensor(std)[:, None]).add_(s)
        shown = cells.index((SHOWN["epsilon"], SHOWN["scale"])) if model == SHOWN["model"] else None
        mse = {}
        for i, (name, filter) in enumerate(chosen.items()):
            mse[name], norms = errors(filter, s, g, std, shown if name in TRACED else None)
            if norms:
                trace[name] = norms
            advance(m * len(chosen) + i + 1, len(MODELS) * len(chosen))
        for e, epsilon in enumerate(EPSILONS):
            these = slice(e * len(SCALES), (e + 1) * len(SCALES))
            part = {name: x[these].double() for name, x in mse.items()}
            for name in chosen:
                gained = (100 * (1 - part[name].sum(1) / part[BASELINE].sum(1))).tolist()
                rows.append(_row(model, epsilon, name, gained, part))
                improvements += [
                    {"model": model, "epsilon": epsilon, "filter": name, "scale": scale, "snr": snr(scale, epsilon), "improvement": x}
                    for scale, x in zip(SCALES, gained)
                ]
    return {
        "settings": {"steps": steps, "dimension": dimension, "seed": seed, "noise": f"{NOISE}/epsilon", "baseline": repr(chosen[BASELINE])},
        "filters": {name: repr(filter) for name, filter in chosen.items()},
        "left_out": left_out,
        "rows": rows,
        "improvements": improvements,
        "trace": SHOWN | {"snr": snr(SHOWN["scale"], SHOWN["epsilon"]), "error": trace},
    }


def _row(model: str, epsilon: float, name: str, gained: list[float], mse: dict[str, Tensor]) -> dict[str, Any]:
    return {
        "model": model, "epsilon": epsilon, "filter": name, "wins": sum(x > 0 for x in gained), "configurations": len(gained),
        "best": max(gained), "average": float(np.mean(gained)), "median": float(np.median(gained)),
        "ties_or_beats_better": sum(_matches(mse[name][i], [mse[rival][i] for rival in RIVALS]) for i in range(len(gained))),
    }  # fmt: skip


def _matches(own: Tensor, rivals: list[Tensor]) -> bool:
    """Whether the mean of `own` is at most that of the better rival, plus two standard errors of their difference over coordinates."""
    difference = own - min(rivals, key=lambda x: float(x.sum()))
    return float(difference.mean()) <= 2 * float(difference.std()) / math.sqrt(len(difference))


def tables(found: dict[str, Any]) -> list[Table]:
    rows = {(row["model"], row["epsilon"], row["filter"]): row for row in found["rows"]}
    names = list(found["filters"])
    beside = [
        (
            model, f"{epsilon:g}", f"{paper[0]}/7", f"{own['wins']}/{own['configurations']}", f"{paper[1]:.2f}", f"{own['best']:.2f}",
            f"{paper[2]:.1f}", f"{own['average']:.1f}", f"{own['median']:.1f}",
        )
        for (model, epsilon), paper in PAPER.items()
        for own in [rows[model, epsilon, "innovation"]]
    ]  # fmt: skip
    every = []
    for model in MODELS:
        for name in names:
            cells = [rows[model, epsilon, name] for epsilon in EPSILONS]
            median = np.median([cell["median"] for cell in cells])
            every.append((name, *(f"{cell['wins']} ({cell['ties_or_beats_better']})" for cell in cells), f"{median:.0f}"))
    half = len(every) // len(MODELS)
    columns = ("filter", *(f"ε = {epsilon:g}" for epsilon in EPSILONS), "median %")
    return [
        Table(
            "Innovation filter (0.9) over EMA (0.1): Tables 6 and 10 beside ours",
            ("model", "ε", "wins, paper", "wins", "best %, paper", "best %", "average %, paper", "average %", "median %"),
            beside,
        ),
        *(
            Table(f"{model}: wins of 7 (ties or beats better, of 7), and the median improvement", columns, every[m * half : (m + 1) * half])
            for m, model in enumerate(MODELS)
        ),
    ]


def draw(found: dict[str, Any], figure: Any) -> None:
    """Figure 10 (improvements, clipped to [-200 %, 100 %]) for two filters, and Figure 11 (error over time)."""
    figure.set_size_inches(10.5, 7.2)
    left, right = figure.subfigures(1, 2, width_ratios=(1.75, 1))
    shown = [name for name in ("innovation", "kalman_auto") if name in found["filters"]]
    axes = left.subplots(len(MODELS), len(shown), sharex=True, sharey=True, squeeze=False)
    image = None
    for i, model in enumerate(MODELS):
        for j, name in enumerate(shown):
            cells = {(c["scale"], c["epsilon"]): c for c in found["improvements"] if (c["model"], c["filter"]) == (model, name)}
            values = np.array([[cells[scale, epsilon]["improvement"] for epsilon in EPSILONS] for scale in SCALES])
            axis = axes[i, j]
            image = axis.imshow(np.clip(values, -200, 100), cmap=_diverging(), norm=_around_zero(), aspect="auto")
            for y, row in enumerate(values):
                for x, value in enumerate(row):
                    colour = "white" if value < -75 or value > 35 else "black"
                    axis.text(
                        x,
                        y,
                        "≤−200" if value <= -200 else f"{value:.0f}".replace("-", "−"),
                        ha="center",
                        va="center",
                        color=colour,
                        fontsize=8,
                    )
            axis.set(title=f"{model}: {name}", xticks=range(len(EPSILONS)), yticks=range(len(SCALES)))
            axis.set_xticklabels([f"{epsilon:g}" for epsilon in EPSILONS])
            axis.set_yticklabels([f"{snr(scale, 1):.2g}" for scale in SCALES])
            axis.grid(False)
            axis.set_xlabel("ε" if i == len(MODELS) - 1 else "")
            axis.set_ylabel("SNR at ε = 1 (grows as ε²)" if j == 0 else "")
    left.colorbar(image, ax=axes, shrink=0.6, label="improvement over EMA (0.1), %, clipped to [−200, 100]", location="bottom", aspect=40)
    axis, trace = right.subplots(), found["trace"]
    for name, colour in zip(TRACED, (ORANGE, BLUE, GREEN)):
        error = trace["error"].get(name)
        if error:
            axis.plot(error, color=colour)
            middle = error[len(error) // 3 :]
            axis.text(len(error), max(middle) * 1.04, "ema (0.1)" if name == "ema" else name, color=colour, ha="right", va="bottom")
    axis.set(title=f"{trace['model']} at SNR {trace['snr']:.2g} (ε = {trace['epsilon']:g})", xlabel="step t", ylabel="error ‖g̃ₜ − sₜ‖")
    axis.set_yscale("log")
    axis.yaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_minor_formatter("{x:g}")
    axis.tick_params(which="minor", labelsize=7)


def _diverging() -> Any:
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("orange-blue", ["#8a3800", ORANGE, "#f7f7f7", BLUE, "#003f66"])


def _around_zero() -> Any:
    from matplotlib.colors import TwoSlopeNorm

    return TwoSlopeNorm(0, -200, 100)
