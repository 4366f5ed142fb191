"""The figures of the documentation, drawn from the library's own functions; the colours are the page's (fiberdp.report.svg).

    python scripts/docs_figures.py OUT     write NAME.svg of each, to look at

`FIGURES` maps a name to a function that returns the SVG; scripts/docs_hooks.py puts them into the pages.
"""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

import fiberdp
from fiberdp._random import Keys
from fiberdp.accounting import epsilon
from fiberdp.filters import EMA, Innovation, LowPass
from fiberdp.linear import NoiseVariance
from fiberdp.moments import Exact
from fiberdp.moments.calibration import relative_std
from fiberdp.optim import AdamW, Constant, Optimizer
from fiberdp.report.svg import CARD, DASHES, INK, MARKERS, MUTED, SERIES, dashes, drawn
from fiberdp.report.tradeoff import detection
from fiberdp.sampling import sampler
from fiberdp.types import Noise, Release

WIDE, HIGH = 6.6, 3.0


def _line(axes: Any, i: int, x: Any, y: Any, label: str, *, marks: int = 0, **more: Any) -> None:
    """Neighbours differ in colour, dash and marker."""
    every = max(1, len(x) // marks) if marks else None
    axes.plot(
        x, y, color=SERIES[i], linestyle=dashes(DASHES[i]), marker=MARKERS[i] if marks else "", markevery=every, markersize=4.5,
        markeredgecolor=CARD, markeredgewidth=0.5, label=label, **more,
    )  # fmt: skip


def _dots(axes: Any, i: int, x: Any, y: Any, label: str | None = None, marker: str | None = None) -> None:
    """What was measured, beside what is computed."""
    look = {"markersize": 5.5, "markeredgecolor": CARD, "markeredgewidth": 0.5, "linestyle": ""}
    axes.plot(x, y, marker=marker or MARKERS[i], color=SERIES[i], label=label, **look)


def _legend(axes: Any, **where: Any) -> None:
    axes.legend(frameon=False, labelcolor=INK, handlelength=2.8, **where)
    axes.tick_params(pad=6)


def gate_tradeoff() -> str:
    """What a test with all releases can find, at four budgets."""
    rates = np.linspace(0, 0.25, 101)

    def draw(axes: Any) -> None:
        axes.plot([0, 25], [0, 25], color=MUTED, linewidth=1.0, linestyle=dashes("2 2"), label="a blind guess")
        for i, eps in enumerate((0.5, 1.0, 2.0, 4.0)):
            _line(axes, i, 100 * rates, [100 * detection(eps, 1e-5, rate) for rate in rates], f"ε = {eps:g}", marks=6)
        axes.set(xlim=(0, 25), ylim=(0, 101), xlabel="false alarms accepted, %")
        axes.set_title("examples found at most, %", loc="left", color=MUTED)
        _legend(axes, loc="center left", bbox_to_anchor=(1.01, 0.5))

    return drawn(draw, "gate-tradeoff", width=WIDE, height=HIGH)


def receipt_faults() -> str:
    """std of the noise that comes out over the std that is charged, of honest noise and of four faults, by the receipt's own statistic."""
    faults = {"honest": 1.0, "10 % too little": 0.9, "weighted by a = 0.95": 0.95, "weighted by 1 − a = 0.05": 0.05, "√2 too much": 2**0.5}
    samples = 50_540  # of the recipe digits
    stream = Keys.seeded(7).stream("receipt")

    def draw(axes: Any) -> None:
        for i, scale in enumerate(faults.values()):
            ratio = float(scale * stream.normal(i, 0, samples).double().pow(2).mean().sqrt())
            passed = abs(ratio - 1) * (2 * samples) ** 0.5 < 5
            axes.plot([ratio], [i], marker="o" if passed else "X", markersize=8, color=SERIES[2] if passed else SERIES[7], linestyle="")
            left = ratio > 1.2
            told = f"{ratio:.4f}  {'passes' if passed else 'refused'}"
            side = {"ha": "right" if left else "left", "va": "center", "color": INK, "xytext": (-9 if left else 9, 0)}
            axes.annotate(told, (ratio, i), textcoords="offset points", **side)
        axes.axvline(1.0, color=MUTED, linewidth=1.0, linestyle=dashes("2 2"))
        axes.set_yticks(range(len(faults)), list(faults), color=INK)
        axes.set(xlim=(0, 1.5), ylim=(len(faults) - 0.4, -0.6), xlabel="std of the noise that comes out / std that is charged")
        axes.grid(False)

    return drawn(draw, "receipt-faults", width=WIDE, height=2.6)


def clip_geometry() -> str:
    """One example's two gradients, mixed with weights −0.4 and 1.4, clipped once and clipped apart."""
    a, C = 1.4, 1.0
    at_theta, ahead = np.array([-0.75, -1.15]), np.array([1.45, 0.35])

    def clipped(u: np.ndarray) -> np.ndarray:
        return u * min(1, C / float(np.linalg.norm(u)))

    def draw(axes: Any) -> None:
        angle = np.linspace(0, 2 * np.pi, 200)
        axes.fill(np.cos(angle), np.sin(angle), facecolor=SERIES[0], alpha=0.10, edgecolor="none")
        axes.plot(np.cos(angle), np.sin(angle), color=MUTED, linewidth=1.0)
        once, apart = clipped(a * ahead + (1 - a) * at_theta), a * clipped(ahead) + (1 - a) * clipped(at_theta)
        arrow = {"shrinkA": 0, "shrinkB": 0, "arrowstyle": "-|>"}
        for u, name, colour, up in ((once, "clipped once", SERIES[2], 48), (apart, "clipped apart", SERIES[7], 2)):
            axes.annotate("", u, (0, 0), arrowprops=arrow | {"color": colour, "linewidth": 2.2})
            told = f"{name}: norm {np.linalg.norm(u):.2f} C"
            axes.annotate(told, u, xytext=(10 if up < 10 else -40, up), textcoords="offset points", color=colour, va="center")
        for u, name, side in ((at_theta, "∇f(θ)", "right"), (ahead, "∇f(θ + γd)", "left")):
            axes.annotate("", u, (0, 0), arrowprops=arrow | {"color": MUTED, "linewidth": 1.2, "linestyle": "dashed"})
            beside = -8 if side == "right" else 8
            axes.annotate(name, u, xytext=(beside, -3), textcoords="offset points", color=INK, ha=side, va="center")
        axes.text(-0.98, 0.42, "‖u‖ ≤ C", color=MUTED, ha="right")
        axes.set(xlim=(-2.3, 3.1), ylim=(-1.4, 1.3), aspect="equal")
        axes.axis("off")

    return drawn(draw, "clip-geometry", width=WIDE, height=3.3)


def clip_sensitivity() -> str:
    """The most that one example moves the sum, over a: by formula, and the worst of random pairs of gradients."""
    grid = np.linspace(0, 2, 81)
    generator = np.random.default_rng(0)
    pairs = generator.standard_normal((2, 400, 2)) * 3
    pairs[1, :40] = -pairs[0, :40] * generator.uniform(0.5, 2, (40, 1))  # opposed, the worst case
    norm = np.linalg.norm

    def worst(a: float) -> tuple[float, float]:
        mixed = a * pairs[0] + (1 - a) * pairs[1]
        once = norm(mixed * np.minimum(1, 1 / norm(mixed, axis=1))[:, None], axis=1).max()
        each = [g * np.minimum(1, 1 / norm(g, axis=1))[:, None] for g in pairs]
        return float(once), float(norm(a * each[0] + (1 - a) * each[1], axis=1).max())

    def draw(axes: Any) -> None:
        _line(axes, 2, grid, np.ones_like(grid), "clipped once: C")
        _line(axes, 1, grid, np.abs(grid) + np.abs(1 - grid), "clipped apart: (|a| + |1 − a|) C")
        some = np.linspace(0, 2, 11)
        found = np.array([worst(a) for a in some])
        for column, i in ((0, 2), (1, 1)):
            _dots(axes, i, some, found[:, column])
        axes.set(xlim=(-0.03, 2.03), ylim=(0, 3.15), xlabel="a, weight of the look-ahead gradient")
        axes.set_title("sensitivity of the sum, in C; dots: the worst of 400 pairs", loc="left", color=MUTED)
        _legend(axes, loc="upper left")

    return drawn(draw, "clip-sensitivity", width=WIDE, height=HIGH)


def filter_gain() -> str:
    """A over the gain: formulas, and what the filters do to white noise."""
    gains = np.linspace(0.02, 1, 99)
    noise = Keys.seeded(3).stream("noise").normal(0, 0, 300_000).view(300, 1000)

    def measured(filter: Any) -> float:
        return float(torch.stack(_outputs(filter, noise)[150:]).var())

    def draw(axes: Any) -> None:
        _line(axes, 0, gains, [Innovation(omega=w).noise_gain() for w in gains], "innovation: (2 − ω)/(4 − 3ω)")
        _line(axes, 1, gains, [EMA(kappa=k).noise_gain() for k in gains], "EMA: κ/(2 − κ)")
        some = (0.1, 0.3, 0.5, 0.7, 0.9, 1.0)
        for i, make in enumerate((lambda w: Innovation(omega=w), lambda k: EMA(kappa=k))):
            _dots(axes, i, some, [measured(make(x)) for x in some])
        axes.set(xlim=(0, 1.02), ylim=(0, 1.05), xlabel="gain of the filter, ω or κ")
        axes.set_title("noise gain A; dots: measured on white noise", loc="left", color=MUTED)
        _legend(axes, loc="upper left")

    return drawn(draw, "filter-gain", width=WIDE, height=HIGH)


def _outputs(filter: Any, inputs: Any) -> list[Any]:
    state, out = filter.init(inputs[0]), []
    for t, g in enumerate(inputs):
        g_tilde, state = filter.update(g, state, t)
        out.append(g_tilde)
    return out


SHOWN = (
    ("innovation, ω = 0.9", Innovation(omega=0.9)),
    ("innovation, ω = 0.3", Innovation(omega=0.3)),
    ("EMA, κ = 0.7", EMA(kappa=0.7)),
    ("low-pass, a = (1, −0.9)", LowPass(b=(0.1,), a=(1.0, -0.9))),
)


def filter_impulse() -> str:
    """Impulse responses: what one release is worth j steps later."""

    def draw(axes: Any) -> None:
        for i, (name, filter) in enumerate(SHOWN):
            _line(axes, i, np.arange(16), filter.impulse_response(16), f"{name}: Σh² = {filter.noise_gain():.3f}", marks=16)
        axes.axhline(0, color=MUTED, linewidth=0.8)
        axes.set(xlim=(-0.3, 15.3), xlabel="j, steps after the release")
        axes.set_title("impulse response h_j", loc="left", color=MUTED)
        _legend(axes, loc="upper right")

    return drawn(draw, "filter-impulse", width=WIDE, height=HIGH)


def filter_drift() -> str:
    """A gradient that drifts steadily, and what each filter makes of it."""
    t = np.arange(40)
    signal = torch.tensor(np.minimum(t, 25), dtype=torch.float64)

    def draw(axes: Any) -> None:
        axes.plot(t, signal, color=MUTED, linewidth=1.2, linestyle=dashes("2 2"), label="the gradient")
        for i, (name, filter) in enumerate(SHOWN):
            shown = [float(x) for x in _outputs(filter, signal.view(-1, 1))]
            _line(axes, i, t, shown, name, marks=10)
        axes.set(xlim=(0, 39), xlabel="t, step")
        axes.set_title("filtered gradient", loc="left", color=MUTED)
        _legend(axes, loc="lower right")

    return drawn(draw, "filter-drift", width=WIDE, height=HIGH)


def _behind(filter: Any, size: int, steps: int) -> Optimizer:
    """AdamW with β₂ = 0.999 and the exact calibration behind a filter."""
    rule = AdamW(lr=1e-9, betas=(0.9, 0.999))
    return Optimizer(torch.zeros(size), filter=filter, calibration=Exact(), update=rule, schedule=Constant(), steps=steps)


def calibration_phi() -> str:
    """E[v̂_t] under noise alone, and what each calibration subtracts; ω = 0.3, so that the filter takes long to settle."""
    filter, beta2, steps = Innovation(omega=0.3), 0.999, 60
    t = np.arange(steps)
    variance, P, exact = NoiseVariance(), 0.0, []
    for now in t:
        P = beta2 * P + (1 - beta2) * variance.update(filter.system(int(now)), Noise(1.0))
        exact.append(P / (1 - beta2 ** (now + 1)))
    noise = Keys.seeded(5).stream("noise")
    optimizer = _behind(filter, 20_000, steps)
    seen = []
    for now in t:
        optimizer.step(Release(noise.normal(int(now), 0, 20_000), Noise(1.0)))
        seen.append(float(optimizer.moments["v"].double().mean() / (1 - beta2 ** (now + 1))))

    def draw(axes: Any) -> None:
        _line(axes, 1, t, np.ones(steps), "raw: σ_w²")
        _line(axes, 3, t, np.full(steps, filter.noise_gain()), f"steady: A σ_w², A = {filter.noise_gain():.3f}")
        _line(axes, 0, t, exact, "exact")
        _dots(axes, 2, t[::5], np.array(seen)[::5], "mean of v̂ over 20,000 coordinates", marker="o")
        axes.set(xlim=(0, steps - 1), ylim=(0, 1.08), xlabel="t, step")
        axes.set_title("v̂ under noise alone, and what is subtracted, in σ_w²", loc="left", color=MUTED)
        _legend(axes, loc="lower right")

    return drawn(draw, "calibration-phi", width=WIDE, height=HIGH)


@cache
def second_moments(steps: int = 2000, size: int = 20_000) -> tuple[Any, float]:
    """v̂ of pure noise behind the innovation filter, and φ."""
    noise, optimizer = Keys.seeded(6).stream("noise"), _behind(Innovation(), size, steps)
    for t in range(steps):
        optimizer.step(Release(noise.normal(t, 0, size), Noise(1.0)))
    return (optimizer.moments["v"].double() / (1 - 0.999**steps)).numpy(), float(optimizer._corrections[0].phi)


def calibration_floor() -> str:
    """How v̂ − φ scatters under pure noise, and where the floors stand."""
    v_hat, phi = second_moments()
    excess, std = v_hat / phi - 1, relative_std(0.999, 1999)
    below = float((excess < 0).mean())

    def draw(axes: Any) -> None:
        counts, edges = np.histogram(excess, bins=60, range=(-0.16, 0.16))
        middle, width = (edges[1:] + edges[:-1]) / 2, edges[1] - edges[0]
        axes.bar(middle, counts, width * 0.92, color=[SERIES[1] if x < 0 else SERIES[0] for x in middle])
        top = counts.max()
        for at, label, i in ((0.0, "1e-8", 0), (std, "auto: 1 std", 1), (3 * std, "3 std", 2)):
            axes.axvline(at, color=INK, linewidth=1.1, linestyle=dashes(DASHES[i]))
            axes.annotate(label, (at, top * (1.14 - 0.09 * i)), xytext=(4, 0), textcoords="offset points", color=INK, va="center")
        axes.set(xlim=(-0.165, 0.2), ylim=(0, top * 1.22), xlabel="(v̂ − φ)/φ, one number a coordinate")
        axes.set_title(f"20,000 coordinates of noise: {100 * below:.0f} % lie below φ and end at the floor", loc="left", color=MUTED)

    return drawn(draw, "calibration-floor", width=WIDE, height=HIGH)


def ghost_cost() -> str:
    """Multiply-adds of the two ways to a norm, over the number of positions."""
    s, p, q = np.unique(np.logspace(0, 12, 60, base=2).astype(int)), 768, 768

    def draw(axes: Any) -> None:
        for i, points in enumerate((1, 2)):
            pairs = points * (points + 1) / 2
            _line(axes, 2 * i, s, pairs * s**2 * (p + q), f"from the factors, {points} point{'s' * (points > 1)}: {pairs:.0f} s²(p + q)")
            _line(axes, 2 * i + 1, s, points * s * p * q, f"formed, {points} point{'s' * (points > 1)}: {points} s p q")
        axes.set(xscale="log", yscale="log", xlabel="s, positions an example (tokens, pixels)", xlim=(1, 4096))
        axes.set_title("multiply-adds an example, p = q = 768", loc="left", color=MUTED)
        _legend(axes, loc="upper left")

    return drawn(draw, "ghost-cost", width=WIDE, height=HIGH)


def accounting_sigma() -> str:
    """ε over σ by sampler and accountant; the paper's CIFAR-10 numbers."""
    N, B, T, delta = 50_000, 5_000, 800, 6.78e-6
    sigma = np.logspace(np.log10(2), np.log10(40), 7)
    ways = (
        ("Poisson, PLD", "poisson", "pld"),
        ("Poisson, RDP", "poisson", "rdp"),
        ("Poisson, RDP, classic conversion", "poisson", "rdp-classic"),
        ("fixed size, RDP (replace one)", "fixed_size", "rdp"),
        ("shuffled, PLD (no amplification)", "shuffle", "pld"),
    )

    def draw(axes: Any) -> None:
        for i, (label, name, accountant) in enumerate(ways):
            drawer = sampler(name, N, B)
            charges = [drawer.charge(float(s), T) for s in sigma]
            spent = [epsilon(charge, delta, relation=drawer.relation, accountant=accountant) for charge in charges]
            _line(axes, i, sigma, spent, label, marks=5)
        axes.set(xscale="log", yscale="log", xlim=(2, 40), ylim=(0.2, 60), xlabel="σ, noise multiplier")
        axes.set_xticks([2, 5, 10, 20, 40], ["2", "5", "10", "20", "40"])
        axes.set_yticks([0.25, 0.5, 1, 2, 4, 8, 16, 32], ["0.25", "0.5", "1", "2", "4", "8", "16", "32"])
        axes.minorticks_off()
        axes.set_title("ε of 800 steps at B = 5,000 of N = 50,000", loc="left", color=MUTED)
        _legend(axes, loc="upper right")

    return drawn(draw, "accounting-sigma", width=WIDE, height=3.4)


def accounting_steps() -> str:
    """How ε grows along a run."""
    plan = fiberdp.plan(method="fiber", num_examples=50_000, batch_size=5_000, steps=800, epsilon=1.0, delta=6.78e-6, clip_norm=1.0)
    steps = np.unique(np.linspace(1, 800, 12).astype(int))

    def draw(axes: Any) -> None:
        spent = [plan.price(plan.sampler.charge(plan.noise_multiplier, int(t))) for t in steps]
        _line(axes, 0, steps, spent, "ε of the first t steps", marks=12)
        axes.plot(steps, [spent[-1] * (t / 800) ** 0.5 for t in steps], color=MUTED, linewidth=1.0, linestyle=dashes("2 2"), label="∝ √t")
        axes.set(xlim=(0, 805), ylim=(0, 1.05), xlabel="t, steps taken")
        axes.set_title(f"ε so far, σ = {plan.noise_multiplier:.2f}", loc="left", color=MUTED)
        _legend(axes, loc="lower right")

    return drawn(draw, "accounting-steps", width=WIDE, height=2.6)


FIGURES = {
    "gate-tradeoff": gate_tradeoff,
    "receipt-faults": receipt_faults,
    "clip-geometry": clip_geometry,
    "clip-sensitivity": clip_sensitivity,
    "filter-gain": filter_gain,
    "filter-impulse": filter_impulse,
    "filter-drift": filter_drift,
    "calibration-phi": calibration_phi,
    "calibration-floor": calibration_floor,
    "ghost-cost": ghost_cost,
    "accounting-sigma": accounting_sigma,
    "accounting-steps": accounting_steps,
}

if __name__ == "__main__":
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    for name, make in FIGURES.items():
        (out / f"{name}.svg").write_text(make())
