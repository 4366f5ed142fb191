"""epsilon: what a run costs, by dp_accounting, with the accountant and the neighbouring relation named beside it.

    relation             two data sets differ in      one example moves the clipped sum by at most
    add_or_remove_one    one example more or less     C
    zero_out             one example made blank       C
    replace_one          one example for another      2C

    mechanism on             relations                      accountants
    everyone                 all three                      pld (here exact: one Gaussian), rdp, rdp-classic
    a Poisson sample         add_or_remove_one, zero_out    pld, rdp, rdp-classic
    a subset of fixed size   replace_one                    rdp, rdp-classic

The noise multiplier of an event is std / C for every relation.  dp_accounting's Renyi formulas take std over the whole
sensitivity, so under replace_one they are given sigma / 2: without it a full batch would be charged mu = 1/sigma where an
example can move the sum by 2C.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from fiberdp import _validate
from fiberdp.accounting.events import Mechanism, mechanisms
from fiberdp.accounting.renyi import poisson_gaussian

if TYPE_CHECKING:
    from dp_accounting import DpEvent

ACCOUNTANTS = ("pld", "rdp", "rdp-classic")
RELATIONS = ("add_or_remove_one", "replace_one", "zero_out")
ORDERS: tuple[float, ...] = (*(k / 10 for k in range(11, 101)), *range(12, 64))
"""The paper's Renyi orders: 1.1, 1.2, …, 10.0, 12, 13, …, 63 (appendix E.2)."""

LARGE_ORDERS: tuple[float, ...] = (64, 80, 96, 128, 160, 192, 256, 320, 384, 512, 640, 768, 1024)
"""Beyond them, for a small epsilon or delta; not with the paper's conversion, which is given as the paper has it."""

LEAST_PLD_DELTA = 1e-10
"""Loss distributions are cut off where their mass is about 1e-15 in all: below this delta the Renyi bound is used, which is not."""

_PRICED = {"none": RELATIONS, "poisson": ("add_or_remove_one", "zero_out"), "without_replacement": ("replace_one",)}
_LITTLE_NOISE, _MUCH_NOISE, _TINY_SAMPLE = 0.15, 1e6, 1e-9

Charges = frozenset[tuple[Mechanism, int]]


def epsilon(event: DpEvent, delta: float, *, relation: str, accountant: str = "pld") -> float:
    """The smallest epsilon this accountant can show: the event is (epsilon, delta)-DP under `relation`.

    accountant: "pld" (tight; the Renyi bound where a loss distribution cannot answer: a tiny delta, hardly any noise), "rdp" (the
    paper's orders and larger ones, dp_accounting's improved conversion) or "rdp-classic" (the paper's orders and conversion, epsilon =
    min over alpha of RDP(alpha) + log(1/delta)/(alpha - 1)).

    Guarantee: never negative, never NaN; inf promises nothing.
    Edge cases: no event costs 0; sigma = 0 or delta = 0 costs inf.
    Raises ValueError for an unknown event, accountant or relation, for a mechanism that is not priced by the accountant or under
    the relation (table above), and for a delta outside [0, 1).

    A full batch with sigma = 10, 100 times, is one Gaussian with mu = 1, or 2 if an example is replaced:

    >>> from dp_accounting import GaussianDpEvent, SelfComposedDpEvent
    >>> event = SelfComposedDpEvent(GaussianDpEvent(10.0), 100)
    >>> [round(epsilon(event, 1e-5, relation=relation), 6) for relation in ("add_or_remove_one", "replace_one")]
    [4.377178, 9.997256]
    """
    _validate.choice("accountant", accountant, ACCOUNTANTS)
    _validate.choice("relation", relation, RELATIONS)
    _validate.interval("delta", delta, 0, 1, open_high=True, why="It is the probability that the bound epsilon may fail.")
    charges = mechanisms(event)
    for m in charges:
        sample = m.sampling.replace("_", " ")
        if relation not in _PRICED[m.sampling]:
            raise ValueError(
                f"relation={relation!r}: a {sample} sample is priced under {' or '.join(_PRICED[m.sampling])}, because its "
                "amplification is proved for no other pair of data sets. Use the relation of the sampler."
            )
        if accountant == "pld" and m.sampling == "without_replacement":
            raise ValueError(
                f"accountant='pld': a {sample} sample is priced by rdp or rdp-classic, because dp_accounting has no loss distribution "
                "for it. Use accountant='rdp', or Poisson sampling, which needs less noise."
            )
    if not charges:
        return 0.0
    if delta == 0 or any(m.noise_multiplier < 1e-6 for m in charges):  # below that epsilon exceeds 1e11
        return math.inf
    found = _price(frozenset(charges.items()), delta, relation == "replace_one", accountant)
    assert found >= 0, f"accountant {accountant} returned {found}"  # fails for NaN too
    return found


@lru_cache(maxsize=512)
def _price(charges: Charges, delta: float, replace: bool, accountant: str) -> float:
    # much noise is priced as if it were a little less, so that no formula underflows
    capped = [(m._replace(noise_multiplier=min(m.noise_multiplier, _MUCH_NOISE)), n) for m, n in charges]
    if accountant != "pld":
        return _rdp(capped, delta, replace, classic=accountant == "rdp-classic")
    if all(m.sampling == "none" for m, _ in capped):
        return _gaussian(capped, delta, replace)
    if min(m.noise_multiplier for m, _ in capped) < _LITTLE_NOISE or delta < LEAST_PLD_DELTA:
        # each is a valid bound; a loss distribution would need millions of points, or mass that it has cut off
        return min(_rdp(capped, delta, replace, classic=False), _gaussian(capped, delta, replace))
    # 1 - 1/q + x/q loses the digits of x for a tiny q, which is priced as if it were larger
    return _pld([(m._replace(probability=max(m.probability, _TINY_SAMPLE)), n) for m, n in capped], delta, replace)


def _gaussian(charges: list[tuple[Mechanism, int]], delta: float, replace: bool) -> float:
    """All of it as one Gaussian with mu^2 = sum mu_i^2, sampling left out: exact without sampling, else a valid upper bound."""
    from dp_accounting import get_epsilon_gaussian

    mu = (2 if replace else 1) * math.sqrt(sum(n / m.noise_multiplier**2 for m, n in charges))
    with np.errstate(divide="ignore"):  # it takes log(0), rightly, where the divergence is below double precision
        found = float(get_epsilon_gaussian(1 / mu, delta, tol=1e-12))
    return found + 1e-12 if found > 0 else 0.0  # its root may be 1e-12 too low


def _pld(charges: list[tuple[Mechanism, int]], delta: float, replace: bool) -> float:
    import dp_accounting as dp
    from dp_accounting.pld import PLDAccountant

    # zero_out too: a blank example contributes what an absent one does, nothing
    relation = dp.NeighboringRelation.REPLACE_ONE if replace else dp.NeighboringRelation.ADD_OR_REMOVE_ONE
    accountant = PLDAccountant(relation, value_discretization_interval=_grid(charges, 2 if replace else 1))
    for m, times in sorted(charges):
        accountant.compose(_event(m, m.noise_multiplier), times)
    return max(0.0, float(accountant.get_epsilon(delta)))


def _grid(charges: list[tuple[Mechanism, int]], sensitivity: float) -> float:
    """Spacing of the privacy losses: 1e-4, but between 0.5 % and 10 % of the smallest standard deviation of a step's loss, q mu.

    Pessimistic rounding inflates a loss that is smaller than the grid (at sigma = 77 and q = 0.01 by 5 %); a finer one than
    0.5 % changes epsilon by less than 1e-5 of itself.  Bounded below so that no distribution needs more than about 2^18 points, and
    2^17 where losses are large (sigma < 0.72), which changes epsilon by less than 3e-6 of itself.
    """
    deviation = min(m.probability * sensitivity / m.noise_multiplier for m, _ in charges)
    widest = max(sensitivity / m.noise_multiplier * (10 + sensitivity / m.noise_multiplier / 2) for m, _ in charges)
    return max(0.005 * deviation, min(1e-4, 0.1 * deviation), widest / (2**16 if widest > 15 else 2**17))


def _rdp(charges: list[tuple[Mechanism, int]], delta: float, replace: bool, *, classic: bool) -> float:
    from dp_accounting.rdp.rdp_privacy_accountant import compute_epsilon

    orders = ORDERS if classic else (*ORDERS, *LARGE_ORDERS)
    rdp = np.sum([times * _divergences(m, orders, 2 if replace else 1) for m, times in sorted(charges)], axis=0).tolist()
    improved = float(compute_epsilon(orders, rdp, delta)[0])
    if not classic or improved == 0:  # 0 only where total variation alone shows (0, delta)
        return improved
    return min(float(each) + math.log(1 / delta) / (order - 1) for order, each in zip(orders, rdp, strict=True))


@lru_cache(maxsize=128)
def _divergences(m: Mechanism, orders: tuple[float, ...], sensitivity: int) -> np.ndarray:
    """RDP of one release at each order; inf where it is not known."""
    sigma = m.noise_multiplier / sensitivity
    if m.sampling == "none":
        return poisson_gaussian(orders, 1.0, sigma)
    if m.sampling == "poisson":
        ours = poisson_gaussian(orders, m.probability, sigma)
        # between whole orders a series may be closer than the chord; at whole orders ours is exact, and theirs loses digits for a tiny q
        return np.array(
            [own if order == int(order) else min(own, series) for order, own, series in zip(orders, ours, _series(m, orders, sigma))]
        )
    return _series(m, orders, sigma)


def _series(m: Mechanism, orders: tuple[float, ...], sigma: float) -> np.ndarray:
    """The same by dp_accounting."""
    import dp_accounting as dp
    from dp_accounting.rdp import RdpAccountant

    replace = m.sampling == "without_replacement"
    accountant = RdpAccountant(orders, dp.NeighboringRelation.REPLACE_ONE if replace else dp.NeighboringRelation.ADD_OR_REMOVE_ONE)
    with _without_warnings(), np.errstate(all="ignore"):
        accountant.compose(_event(m, sigma))
    return np.array(accountant.rdp, dtype=float)


@contextmanager
def _without_warnings() -> Iterator[None]:
    """dp_accounting warns of each Renyi order that it leaves out for numerical reasons; that can only loosen the bound."""
    logger = logging.getLogger("absl")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def _event(m: Mechanism, sigma: float) -> DpEvent:
    import dp_accounting as dp

    gaussian = dp.GaussianDpEvent(sigma)
    if m.sampling == "poisson":
        return dp.PoissonSampledDpEvent(m.probability, gaussian)
    if m.sampling == "without_replacement":
        return dp.SampledWithoutReplacementDpEvent(m.population, m.sample, gaussian)
    return gaussian
