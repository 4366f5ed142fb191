"""The audit: an attack on one run, and the epsilon that its success rules out (Steinke, Nasr and Jagielski 2023, theorem 5.2).

m canaries are put among the training rows, each present or not by a fair coin.  The attacker sees every release and every parameter, and
gives each canary a score; for the k highest scores it guesses "present", for the k lowest "absent", and abstains on the rest.  If the run
is (epsilon, delta)-DP, then of r = 2k guesses v or more are right with a probability of at most

    beta + 2 m delta alpha,    beta = P[B >= v],    alpha = max_{1 <= i <= v} P[v > B >= v - i] / i,    B ~ Binomial(r, e^eps / (1 + e^eps))

so the largest epsilon for which that is below 1 - confidence is a lower bound on the epsilon of the run, whatever the scores were: a
weak attack gives a low bound, and none gives a false one.

    attack       score of canary i, c_{i,t} its observation at step t, scaled to the clip norm
    sum          Sum_t <g_t - E g_t, c_{i,t}>                 the likelihood ratio's first order, under independent noise
    differences  Sum_k <g_{2k+1} - g_{2k}, c_{i,2k}>^2        finds noise that is drawn twice

E g_t is what the attacker expects to be released: the other rows, which it knows, and every canary by half, each with probability B / N.

A canary that is absent keeps its row with its loss multiplied by 0, so N, the sampling rate and sigma are those of a run with all rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from scipy.stats import binom
from torch import Tensor, nn

from fiberdp import _tree, _validate
from fiberdp._random import Keys
from fiberdp.engines import ENGINES, Loss
from fiberdp.engines.points import points
from fiberdp.planning import Plan
from fiberdp.trainer import Run

ATTACKS = ("sum", "differences")
LOUD = 10.0  # std of a canary's inputs: large, so that its gradient reaches the clip norm
GUESSED = 0.1  # share of the canaries that is guessed, unless told: near the best for epsilon about 1


@dataclass(frozen=True)
class Audit:
    """epsilon_lower: with `confidence`, no right account of the run is smaller.  epsilon_accounted: what its ledger says, at `delta`.

    canaries: m.  guesses: r of them, of which `correct` were right.
    """

    epsilon_lower: float
    confidence: float
    epsilon_accounted: float
    delta: float
    canaries: int
    guesses: int
    correct: int
    attack: str

    @property
    def agrees(self) -> bool:
        return self.epsilon_lower <= self.epsilon_accounted

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"agrees": self.agrees}


def epsilon_lower(*, canaries: int, guesses: int, correct: int, delta: float, confidence: float = 0.95) -> float:
    """The largest epsilon (to 1e-4, from below) that is ruled out, 0 if none is.

    >>> round(epsilon_lower(canaries=1000, guesses=100, correct=100, delta=0.0), 3)
    3.493
    >>> epsilon_lower(canaries=1000, guesses=100, correct=55, delta=1e-5)
    0.0
    """
    _validate.count("canaries", canaries, why="Each is one coin.")
    _validate.count("guesses", guesses, low=0, why="The attacker may abstain.")
    _validate.count("correct", correct, low=0, why="It is how many guesses were right.")
    if not correct <= guesses <= canaries:
        raise ValueError(
            f"correct={correct}, guesses={guesses}, canaries={canaries}: each must be at most the next, because a canary is guessed once."
        )
    _validate.interval("delta", delta, 0, 1, open_high=True, why="It is the probability that the bound epsilon may fail.")
    _validate.interval("confidence", confidence, 0, 1, open_low=True, open_high=True, why="It is how sure the bound is.")
    low, high = 0.0, 40.0
    if _p_value(canaries, guesses, correct, delta, 0.0) >= 1 - confidence:
        return 0.0
    while high - low > 1e-4:
        middle = (low + high) / 2
        if _p_value(canaries, guesses, correct, delta, middle) < 1 - confidence:
            low = middle
        else:
            high = middle
    return low


def _p_value(m: int, r: int, v: int, delta: float, epsilon: float) -> float:
    """How likely v right guesses or more are at most, if the run is (epsilon, delta)-DP."""
    right = 1 / (1 + np.exp(-epsilon))
    beta = float(binom.sf(v - 1, r, right))
    if v == 0 or delta == 0:
        return beta
    below = np.cumsum(binom.pmf(v - np.arange(1, v + 1), r, right))
    return beta + 2 * m * delta * float(np.max(below / np.arange(1, v + 1)))


def audit(
    plan: Plan,
    model: nn.Module,
    loss_fn: Callable[[nn.Module, Any], Tensor],
    dataset: Any,
    canaries: Any,
    *,
    attack: str = "sum",
    guesses: int | None = None,
    confidence: float = 0.95,
    keys: Keys | None = None,
    engine: str = "ghost",
    progress: Callable[[int, int], None] = lambda done, steps: None,
) -> Audit:
    """Train once with canaries among the rows, attack the run, and say what epsilon the attack rules out.

    plan: of as many examples as `dataset` and `canaries` have rows together.  dataset, canaries: trees of tensors with the same structure.
    guesses: r, even; a tenth of the canaries if None, settled before anything is seen.  Everything else as for `fiberdp.Run`, the receipt
    included.  With confidence c, a right run is found to disagree at most with probability 1 - c, and hardly ever in fact, because no
    attack is the best.
    Raises ValueError for bad input.
    """
    _validate.choice("attack", attack, ATTACKS)
    rows, count = _tree.rows(dataset), _tree.rows(canaries)
    guesses = round(GUESSED * count / 2) * 2 if guesses is None else guesses
    if guesses < 2 or guesses % 2 or guesses > count:
        raise ValueError(
            f"guesses={guesses} of {count} canaries: must be even, at least 2 and at most their number, because half of them say present. "
            "Give more canaries."
        )
    if plan.method.augmentation.multiplicity > 1:
        raise ValueError("multiplicity > 1: canaries are not augmented, because the attacker knows them exactly. Leave it out.")
    keys = keys or Keys.secret()
    present = keys.stream("audit").bits(0, 0, count) >> 63 != 0
    whole = {
        "row": _joined(dataset, canaries),
        "present": torch.cat([torch.ones(rows), present.float()]),
    }

    def loss(model: nn.Module, batch: dict[str, Any]) -> Tensor:
        return loss_fn(model, batch["row"]) * batch["present"]

    run = Run(plan, model, loss, whole, keys=keys, engine=engine)
    scores = _attack(run, Loss(model, loss_fn, 1), dataset, canaries, attack, progress)
    order = scores.argsort()
    guessed_absent, guessed_present = order[: guesses // 2], order[len(order) - guesses // 2 :]
    correct = int((~present[guessed_absent]).sum() + present[guessed_present].sum())
    lower = epsilon_lower(canaries=count, guesses=guesses, correct=correct, delta=plan.delta, confidence=confidence)
    return Audit(lower, confidence, run.epsilon, plan.delta, count, guesses, correct, attack)


def _joined(dataset: Any, canaries: Any) -> Any:
    """The rows of both, one after the other."""
    if [x.shape[1:] for x in _tree.leaves(dataset)] != [x.shape[1:] for x in _tree.leaves(canaries)]:
        raise ValueError(
            "canaries: must have the structure and shapes of the data set, because they stand among its rows. Make them alike."
        )
    others = iter(_tree.leaves(canaries))
    return _tree.map_leaves(lambda leaf: torch.cat([leaf, next(others).to(leaf.dtype)]), dataset)


def _attack(run: Run, loss: Loss, dataset: Any, canaries: Any, attack: str, progress: Callable[[int, int], None]) -> Tensor:
    """A score a canary, float64 [m], from the releases and the parameters alone."""
    flat, clip, probes = run.flat, run.plan.clip, run.plan.method.observation.probes()
    worker = ENGINES["ghost"](flat, loss)
    released: list[Tensor] = []
    norms: list[Tensor] = []
    run.heard = lambda release: released.append((release.value if release.scale is None else release.value / release.scale).clone())
    count = _tree.rows(canaries)
    scores, before = torch.zeros(count, dtype=torch.float64), None
    while run.optimizer.t < run.plan.steps:
        theta, d = flat.theta.detach().clone(), None if run.optimizer.d is None else run.optimizer.d.clone()
        expected = worker.clipped_sum(probes, d, canaries, clip, seed=0, tap=lambda losses, found: norms.append(found)).total / 2
        if attack == "sum":
            expected += worker.clipped_sum(probes, d, dataset, clip, seed=0).total
        expected /= run.plan.num_examples
        step = run.step().step
        scale = clip.sensitivity / norms.pop().clamp_min(clip.sensitivity)

        def seen(g: Tensor, theta: Tensor = theta, d: Tensor | None = d, scale: Tensor = scale) -> Tensor:
            """<g, c_i> of every canary: one forward derivative in the direction of g at each point."""
            along = sum(w * _derivative(loss, flat.views(at), flat.views(g), canaries, count) for w, at in points(theta, d, probes))
            return torch.nan_to_num(along.double() * scale, nan=0.0, posinf=0.0, neginf=0.0)  # pyright: ignore

        g = released.pop()
        if attack == "sum":
            scores += seen(g - expected)
        elif step % 2 == 0:
            before = (g, seen)
        elif before is not None:
            scores += before[1](g - before[0]).square()
        progress(step + 1, run.plan.steps)
    return scores


def _derivative(loss: Loss, values: dict[str, Tensor], direction: dict[str, Tensor], batch: Any, rows: int) -> Tensor:
    """d/dh loss_i(values + h direction) at h = 0, for every example i."""
    return torch.func.jvp(lambda at: loss.at(at, batch, rows), (values,), (direction,))[1]


def random_canaries(like: Any, count: int, *, seed: int) -> Any:
    """`count` rows with the structure of `like`: floating-point entries normal with std LOUD, bytes 0 or 255 by a coin, other integers
    from the range that the column has.  No real row looks like them, so only their own gradients say whether they were there.
    """
    generator = torch.Generator().manual_seed(seed)

    def column(leaf: Tensor) -> Tensor:
        shape = (count, *leaf.shape[1:])
        if leaf.is_floating_point():
            return (LOUD * torch.randn(shape, generator=generator)).to(leaf.dtype)
        if leaf.dtype == torch.uint8:
            return torch.randint(0, 2, shape, generator=generator, dtype=torch.uint8) * 255
        return torch.randint(int(leaf.min()), int(leaf.max()) + 1, shape, generator=generator, dtype=leaf.dtype)

    return _tree.map_leaves(column, like)
