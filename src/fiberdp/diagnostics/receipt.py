"""The noise receipt: proof, before step 0, that the noise which will be added is the noise that is charged.

The run's own pipeline is driven on blank examples with every loss multiplied by 0, so that what it releases is noise alone.
That noise is compared with what the ledger charges:

    | check       | statistic                                                   | a fault it catches                       |
    |-------------|-------------------------------------------------------------|------------------------------------------|
    | std         | root mean square over std charged                           | noise scaled by 1-a, by B, by sqrt(k)    |
    | mean        | mean over its standard error                                | a gradient that is not zero              |
    | kurtosis    | fourth moment (3 for a Gaussian)                            | noise that is not Gaussian               |
    | lag-1       | correlation of one step with the next                       | noise reused between steps               |
    | neighbours  | correlation of one coordinate with the next                 | one number spread over many coordinates  |
    | tensor std  | root mean square of each tensor                             | a tensor without noise, or with too much |
    | tensors     | correlation between tensors                                 | one seed used for two tensors            |

Correlated noise is whitened first: x_t is the release over the std charged at t, and from the noising filter that the plan declares

    z_t = ( Sum_j a_j x_{t-j} - Sum_{j>=1} b_j z_{t-j} ) / b_0

must be white, so the checks are made on z, with one more family: lag-k, the correlation of steps k apart, for k up to the bands.

Exact distributions are used where samples are few (chi^2 for variances, Student's t for correlations) and turned into
normal-equivalent standard errors.  A family of m checks is held to the limit that keeps its false-alarm rate at that of one check
at 5 standard errors (6e-7).  It touches no data, so it costs no privacy.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations, pairwise
from typing import Any

import torch
from scipy import stats
from torch import Tensor

from fiberdp.types import Noise

LIMIT = 5.0
LARGEST_DEVIATION = 35.0  # what is printed when the probability underflows


class ReceiptError(ValueError):
    """The noise that reaches the optimizer is not the noise that is charged."""


@dataclass(frozen=True)
class Check:
    """One comparison.  deviation and limit in (normal-equivalent) standard errors."""

    name: str
    value: float
    expected: float
    standard_error: float
    deviation: float
    limit: float = LIMIT

    @property
    def passed(self) -> bool:
        return abs(self.deviation) <= self.limit


@dataclass(frozen=True)
class Receipt:
    """std_ratio: std of the released noise over the std charged, with its standard error; lag1_correlation: between steps."""

    std_charged: float
    std_ratio: float
    standard_error: float
    lag1_correlation: float
    steps: int
    samples: int
    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"passed": self.passed, "checks": [asdict(c) | {"passed": c.passed} for c in self.checks]}

    def require(self) -> Receipt:
        """Return self, or raise ReceiptError naming the worst check."""
        if not self.passed:
            worst = max((c for c in self.checks if not c.passed), key=lambda c: abs(c.deviation))
            raise ReceiptError(
                f"noise receipt: {worst.name} is {worst.value:.4g}, must be {worst.expected:.4g} within "
                f"{worst.limit:.1f} standard errors of {worst.standard_error:.2g} (it is {abs(worst.deviation):.1f} off), because the "
                "noise added must be the noise charged. "
                "The run is refused: check the engine and mechanism that were plugged in."
            )
        return self


def receipt_steps(numel: int) -> int:
    """How many steps are driven: at least 4, and enough for 50,000 samples of small models (std to 0.3 %), at most 64."""
    return min(64, max(4, math.ceil(50_000 / numel)))


def noise_receipt(
    release: Callable[[int], Tensor],
    *,
    std: float,
    tensors: Sequence[tuple[str, slice]],
    steps: int,
    charged: Callable[[int], Noise] | None = None,
    parts: Sequence[tuple[str, slice]] = (),
) -> Receipt:
    """Drive `release(step) -> Tensor[d]` (noise alone) for `steps` steps and compare with `std`, the std charged per coordinate.

    tensors: (name, where in the vector); parts: likewise, what each of several processes releases, of which any two are compared.
    std = 0 (a run without noise) is proved by all values being exactly 0.
    charged: for correlated noise, the noise that each step is charged for; std is then that of the white noise it is made of, at step 0.
    It is driven for at least bands + 2 steps, so that every coefficient of the noising filter shows.
    """
    whiten = _Whitening(charged) if charged and std else None
    steps = max(steps, whiten.bands + 2) if whiten else steps
    lags = {k: _Correlation() for k in range(2, 1 + min(whiten.bands, steps - 1))} if whiten else {}
    rms, mean, fourth, lag, neighbours = _Moment(2), _Moment(1), _Moment(4), _Correlation(), _Correlation()
    squares = {name: _Moment(2) for name, _ in (*tensors, *parts)}
    by_size = sorted(tensors, key=lambda t: t[1].stop - t[1].start)
    pairs = {(a[0], b[0]): (a[1], b[1], _Correlation()) for order in (tensors, by_size) for a, b in pairwise(order)}
    pairs |= {(a[0], b[0]): (a[1], b[1], _Correlation()) for a, b in combinations(parts, 2)}
    previous: Tensor | None = None
    for step in range(steps):
        x = release(step).detach().double()
        x = whiten(x, step) if whiten else x.div_(std or 1.0)
        for moment in (rms, mean, fourth):
            moment.add(x)
        neighbours.add(x[:-1], x[1:])
        if previous is not None:
            lag.add(previous, x)
        for k, correlation in lags.items():
            if whiten and k <= step:
                correlation.add(whiten.z[k - 1].double(), x)
        for name, where in (*tensors, *parts):
            squares[name].add(x[where])
        for a, b, correlation in pairs.values():
            shorter = min(a.stop - a.start, b.stop - b.start)
            correlation.add(x[a][:shorter], x[b][:shorter])
        previous = x
        if whiten:
            whiten.keep(x)
    n = rms.count
    if std == 0:
        checks = [Check("std", math.sqrt(rms.mean), 0.0, 0.0, 0.0 if rms.mean == 0 else LARGEST_DEVIATION)]
        return Receipt(0.0, 1.0 if rms.mean == 0 else math.inf, 0.0, 0.0, steps, n, tuple(checks))
    checks = [
        _variance("std", rms),
        Check("mean", mean.mean, 0.0, n**-0.5, mean.mean * n**0.5),
        # the fourth moment of few samples is far from normal: below 10,000 it would refuse good noise
        *([Check("kurtosis", fourth.mean, 3.0, (96 / n) ** 0.5, (fourth.mean - 3) / (96 / n) ** 0.5)] if n >= 10_000 else []),
        *_correlations({"lag-1 correlation": lag}),
        *_correlations({f"lag-{k} correlation": c for k, c in lags.items()}),
        *_correlations({"correlation of neighbouring coordinates": neighbours}),
        *_family(_variance(f"std of {name}", moment) for name, moment in squares.items()),
        *_correlations({f"correlation of {a} with {b}": c for (a, b), (_, _, c) in pairs.items()}),
    ]
    first = checks[0]
    return Receipt(std, first.value, first.standard_error, lag.value, steps, n, tuple(checks))


class _Whitening:
    """The inverse of the noising filter, a step at a time.  x, z: what came before, the latest first, in float32."""

    def __init__(self, charged: Callable[[int], Noise]) -> None:
        noise = charged(0)
        self.charged, self.a, self.b = charged, noise.a, noise.b
        self.bands = max(len(noise.a), len(noise.b))
        self.x: deque[Tensor] = deque(maxlen=len(noise.a) - 1)
        self.z: deque[Tensor] = deque(maxlen=self.bands)

    def __call__(self, w: Tensor, step: int) -> Tensor:
        x = w.div_(self.charged(step).std)
        z = x * self.a[0]
        for a_j, x_j in zip(self.a[1:], self.x, strict=False):
            z.add_(x_j, alpha=a_j)
        for b_j, z_j in zip(self.b[1:], self.z, strict=False):
            z.sub_(z_j, alpha=b_j)
        self.x.appendleft(x.float())
        return z.div_(self.b[0])

    def keep(self, z: Tensor) -> None:
        self.z.appendleft(z.float())


class _Moment:
    """Running mean of x^power."""

    def __init__(self, power: int) -> None:
        self.power, self.count, self.sum = power, 0, 0.0

    def add(self, x: Tensor) -> None:
        self.count += x.numel()
        self.sum += float(x.pow(self.power).sum())

    @property
    def mean(self) -> float:
        return self.sum / self.count


class _Correlation:
    """Running correlation of two series of mean 0."""

    def __init__(self) -> None:
        self.count, self.xy, self.xx, self.yy = 0, 0.0, 0.0, 0.0

    def add(self, x: Tensor, y: Tensor) -> None:
        self.count += x.numel()
        self.xy += float(torch.dot(x, y))
        self.xx += float(torch.dot(x, x))
        self.yy += float(torch.dot(y, y))

    @property
    def value(self) -> float:
        norm = math.sqrt(self.xx * self.yy)
        return self.xy / norm if norm else 0.0


def _variance(name: str, moment: _Moment) -> Check:
    """n * mean square ~ chi^2_n."""
    n, statistic = moment.count, moment.sum
    above = statistic > n
    p = stats.chi2.sf(statistic, n) if above else stats.chi2.cdf(statistic, n)
    return Check(name, math.sqrt(moment.mean), 1.0, (2 * n) ** -0.5, _deviations(float(p)) * (1 if above else -1))


def _correlations(found: dict[str, _Correlation]) -> list[Check]:
    """r sqrt((n-1)/(1-r^2)) ~ Student t_{n-1} for independent Gaussians of mean 0."""
    checks = []
    for name, c in found.items():
        if c.count >= 3:
            r = c.value
            t = abs(r) * math.sqrt((c.count - 1) / max(1 - r * r, 1e-30))
            checks.append(Check(name, r, 0.0, c.count**-0.5, math.copysign(_deviations(float(stats.t.sf(t, c.count - 1))), r)))
    return _family(checks)


def _deviations(p: float) -> float:
    """How many standard errors a normal variable would be off with this one-sided probability."""
    return max(0.0, float(stats.norm.isf(p))) if p > stats.norm.sf(LARGEST_DEVIATION) else LARGEST_DEVIATION


def _family(checks: Iterable[Check]) -> list[Check]:
    """Give m checks the limit at which their false-alarm rate together is that of one at 5 standard errors."""
    checks = list(checks)
    limit = float(stats.norm.isf(stats.norm.sf(LIMIT) / max(1, len(checks))))
    return [Check(c.name, c.value, c.expected, c.standard_error, c.deviation, limit) for c in checks]
