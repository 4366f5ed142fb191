"""epsilon: what a run costs, by the accountant and the neighbouring relation that are named beside it.

    relation             two data sets differ in      one example moves the clipped sum by at most
    add_or_remove_one    one example more or less     C
    zero_out             one example made blank       C
    replace_one          one example for another      2C

    mechanism on           relations it is priced under
    everyone               all three
    a Poisson sample       add_or_remove_one, zero_out
    a subset of fixed size replace_one

The noise multiplier of an event is std / C for every relation.  dp_accounting's Renyi formulas take std over the
whole sensitivity, so under replace_one ours pass them sigma / 2: without it, a full batch would be charged mu = 1 / sigma
where an example can move the sum by 2C.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from fiberdp._validate import choice, interval
from fiberdp.accounting import pld, renyi
from fiberdp.accounting.events import Mechanism, mechanisms

if TYPE_CHECKING:
    from dp_accounting import DpEvent

ACCOUNTANTS = ("pld", "rdp", "rdp-classic")
RELATIONS = ("add_or_remove_one", "replace_one", "zero_out")

_PRICED = {
    "none": RELATIONS,
    "poisson": ("add_or_remove_one", "zero_out"),
    "without_replacement": ("replace_one",),
}
_NO_NOISE, _ALL_NOISE = 1e-6, 1e9  # sigma below has epsilon above 1e11; sigma above is priced as if it were 1e9


def epsilon(event: DpEvent, delta: float, *, relation: str, accountant: str = "pld") -> float:
    """The smallest epsilon this accountant can show: the event is (epsilon, delta)-DP under `relation`.

    accountant: "pld" (tight), "rdp" or "rdp-classic" (the paper's orders, improved and classic conversion).

    Guarantee: never below the true value, never negative, never NaN.  `inf` means that nothing is promised.
    Edge cases: no event costs 0; sigma = 0 or delta = 0 costs inf.
    Raises ValueError for an unknown event, accountant or relation, for a mechanism that is not priced under the
    relation (see the table above), and for a delta outside [0, 1).

    A full batch with sigma = 10, 100 times, is one Gaussian with mu = 1, or 2 if an example is replaced:

    >>> from dp_accounting import GaussianDpEvent, SelfComposedDpEvent
    >>> event = SelfComposedDpEvent(GaussianDpEvent(10.0), 100)
    >>> round(epsilon(event, 1e-5, relation="add_or_remove_one"), 6)
    4.377178
    >>> round(epsilon(event, 1e-5, relation="replace_one"), 6)
    9.997256
    """
    choice("accountant", accountant, ACCOUNTANTS)
    choice("relation", relation, RELATIONS)
    interval("delta", delta, 0, 1, open_high=True, why="It is the probability that the bound epsilon may fail.")
    charges = mechanisms(event)
    for m in charges:
        if relation not in _PRICED[m.sampling]:
            raise ValueError(
                f"relation={relation!r}: a {m.sampling.replace('_', ' ')} sample is priced under "
                f"{' or '.join(_PRICED[m.sampling])}. Its amplification is proved for no other pair of data sets. "
                "Use the relation of the sampler."
            )
    if not charges:
        return 0.0
    if delta == 0 or any(m.noise_multiplier < _NO_NOISE for m in charges):
        return float("inf")
    capped: Counter[Mechanism] = Counter()
    for m, n in charges.items():
        capped[m._replace(noise_multiplier=min(m.noise_multiplier, _ALL_NOISE))] += n
    sensitivity = 2.0 if relation == "replace_one" else 1.0
    if accountant == "pld":
        eps = pld.epsilon(capped, sensitivity, delta)
    else:
        conversion = "improved" if accountant == "rdp" else "classic"
        eps = renyi.epsilon(capped, sensitivity, delta, conversion=conversion)
    assert eps >= 0, f"accountant {accountant} returned {eps}"  # fails for NaN too
    return eps
