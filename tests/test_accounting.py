"""Claims of the accountants: right values, valid bounds, refusals; and calibration from the safe side."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from dp_accounting import (
    ComposedDpEvent,
    GaussianDpEvent,
    LaplaceDpEvent,
    NeighboringRelation,
    NoOpDpEvent,
    PoissonSampledDpEvent,
    SampledWithoutReplacementDpEvent,
    SelfComposedDpEvent,
    get_sigma_gaussian,
)
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant
from scipy.optimize import brentq
from scipy.stats import norm

from fiberdp.accounting import ACCOUNTANTS, account, epsilon, noise_multiplier, pld, renyi
from fiberdp.accounting.events import Mechanism

pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")


def poisson(sigma: float, q: float, steps: int):
    return SelfComposedDpEvent(PoissonSampledDpEvent(q, GaussianDpEvent(sigma)), steps)


def fixed(sigma: float, q: float, steps: int):
    return SelfComposedDpEvent(SampledWithoutReplacementDpEvent(10_000, round(q * 10_000), GaussianDpEvent(sigma)), steps)


def price(event, delta: float, accountant: str = "pld", relation: str = "add_or_remove_one") -> float:
    return epsilon(event, delta, relation=relation, accountant=accountant)


# Published values -----------------------------------------------------------------------------------------------------

CIFAR10 = {"num_examples": 50_000, "batch_size": 5_000, "steps": 800, "delta": 6.78e-6}
METHODS_6 = {  # METHODS.md section 6, sigma for epsilon = .5, 1, 2, 4, 8
    "rdp-classic": (27.97, 14.18, 7.285, 3.849, 2.148),
    "rdp": (22.26, 11.77, 6.303, 3.458, 2.001),
    "pld": (20.47, 10.87, 5.852, 3.238, 1.892),
}
METHODS_6_FIXED_SIZE = (45.16, 23.78, 12.63, 6.80, 3.78)
TARGETS = (0.5, 1.0, 2.0, 4.0, 8.0)


@pytest.mark.parametrize("accountant", ACCOUNTANTS)
def test_sigma_of_cifar10_for_every_epsilon_methods_section_6(accountant):
    for target, right in zip(TARGETS, METHODS_6[accountant]):
        sigma = noise_multiplier(lambda s: poisson(s, 0.1, 800), target, 6.78e-6, relation="add_or_remove_one", accountant=accountant)
        assert sigma == pytest.approx(right, rel=5e-3)
        assert 0.99 * target <= price(poisson(sigma, 0.1, 800), 6.78e-6, accountant) <= target


def test_fixed_size_row_of_methods_section_6_is_in_units_of_the_replace_one_sensitivity():
    """The row is dp_accounting's theorem 27 with std over the sensitivity of the relation, 2C.  Ours is std / C: twice it."""
    for target, right in zip(TARGETS, METHODS_6_FIXED_SIZE):
        sigma = noise_multiplier(lambda s: fixed(s, 0.1, 800), target, 6.78e-6, relation="replace_one", accountant="rdp")
        assert sigma / 2 == pytest.approx(right, rel=5e-3)


E26 = [  # CASES E26: sigma, q, T, delta, PLD, RDP
    (1.0, 0.01, 1000, 1e-5, 1.82824, 2.10137),
    (1.1, 0.004, 5000, 1e-5, 1.27101, 1.40905),
    (1.3, 1 / 60, 900, 1e-5, 1.89153, 2.08472),
    (1.54, 0.02048, 1464, 1e-5, 2.38630, 2.60825),
    (3.0, 0.2, 50, 1 / 48000, 1.96081, 2.16904),
    (1.0, 0.2, 10, 1e-5, 4.98421, 5.7537),
    (0.3, 0.01, 1000, 1e-5, 69.816, 79.40),
    (0.5, 0.01, 1000, 1e-5, 13.36083, 15.47213),
    (0.8, 0.004, 2000, 1e-6, 2.03665, 2.63697),
    (2.0, 0.05, 500, 1e-6, 2.87263, 3.10187),
    (4.0, 0.5, 200, 1e-5, 8.81943, 9.67342),
    (10.0, 1.0, 100, 1e-5, 4.37718, 4.72851),
]


@pytest.mark.parametrize(("sigma", "q", "steps", "delta", "near_exact", "renyi_bound"), E26)
def test_reference_table_e26(sigma, q, steps, delta, near_exact, renyi_bound):
    event = poisson(sigma, q, steps)
    assert price(event, delta) == pytest.approx(near_exact, rel=2e-5)
    assert near_exact <= price(event, delta, "rdp") <= renyi_bound + 0.01
    assert price(event, delta, "rdp") < price(event, delta, "rdp-classic")


@pytest.mark.parametrize(("accountant", "right"), [("pld", 1.61508), ("rdp", 1.89461)])
def test_the_order_of_phases_does_not_matter_e26(accountant, right):
    phases = [poisson(1.0, 0.01, 500), poisson(2.0, 0.02, 500)]
    forwards, backwards = (price(ComposedDpEvent(p), 1e-5, accountant) for p in (phases, phases[::-1]))
    assert forwards == pytest.approx(right, rel=1e-5)
    assert forwards == pytest.approx(backwards, rel=1e-12)


def test_single_steps_e27():
    """sigma 1, q .00105, T 1: total variation q (2 Phi(.5) - 1) = 4.0207e-4 <= 1e-3, so 0 is right.  Origin: CASES E27."""
    assert [price(poisson(10.0, 0.01, 1), 0.5, a) for a in ACCOUNTANTS] == [0, 0, 0]
    assert price(poisson(1.0, 0.00105, 1), 1e-3) == 0
    assert price(poisson(1.0, 0.00105, 1), 1e-3, "rdp") == pytest.approx(0.2548, rel=1e-3)
    assert 4.0548e-4 <= price(poisson(1.0, 0.00105, 1), 3e-4) <= 4.07e-4
    assert price(poisson(1.0, 0.00105, 1), 1e-5) == pytest.approx(9.7762e-3, rel=1e-4)


@pytest.mark.parametrize(
    ("target", "right", "accountant"),
    [(1, 1.41471, "pld"), (0.1, 9.80440, "pld"), (0.01, 77.17, "pld"), (50, 0.34726, "rdp"), (1, 1.51312, "rdp")],
)
def test_calibration_round_trip_e31(target, right, accountant):
    """CASES E31, q .01, T 1000, delta 1e-5; its sigmas are good to 3e-3, the round trip is the claim."""
    sigma = noise_multiplier(lambda s: poisson(s, 0.01, 1000), target, 1e-5, relation="add_or_remove_one", accountant=accountant)
    assert sigma == pytest.approx(right, rel=3e-3)
    assert 0.99 * target <= price(poisson(sigma, 0.01, 1000), 1e-5, accountant) <= target


@pytest.mark.parametrize(("target", "right"), [(1.0, 3.730632), (0.01, 243.7854)])
def test_calibration_of_one_release_is_the_exact_gaussian_e31(target, right):
    sigma = noise_multiplier(GaussianDpEvent, target, 1e-5, relation="add_or_remove_one")
    assert sigma == pytest.approx(right, rel=1e-6)
    assert sigma == pytest.approx(get_sigma_gaussian(target, 1e-5), rel=1e-6)


# Second routes ---------------------------------------------------------------------------------------------------------


def test_pld_agrees_with_dp_accounting_on_its_own_grid():
    theirs = PLDAccountant(value_discretization_interval=1e-4)
    theirs.compose(poisson(3.0, 0.1, 300)).compose(GaussianDpEvent(4.0), 3)
    ours = price(ComposedDpEvent([poisson(3.0, 0.1, 300), SelfComposedDpEvent(GaussianDpEvent(4.0), 3)]), 1e-6)
    assert ours == pytest.approx(theirs.get_epsilon(1e-6), rel=1e-5)


def test_pld_of_almost_no_sampling_is_the_exact_gaussian():
    """The grid and the Fourier transform against the closed form: q = 1 - 1e-9 goes through both."""
    exact = price(SelfComposedDpEvent(GaussianDpEvent(3.0), 20), 1e-6)
    assert exact <= price(poisson(3.0, 1 - 1e-9, 20), 1e-6) <= exact * (1 + 1e-5)


@pytest.mark.parametrize("delta", [1e-5, 1e-9])
def test_pld_never_falls_below_the_exact_value_over_many_steps(delta):
    """10**4 steps: the Fourier transform's rounding alone would report too little at a small delta."""
    exact = price(SelfComposedDpEvent(GaussianDpEvent(100.0), 10_000), delta)
    gaussian = Counter({Mechanism("poisson", 1 - 1e-12, 100.0): 10_000})
    assert exact <= pld.epsilon(gaussian, 1.0, delta) <= exact * 1.001


def test_pld_refuses_a_delta_below_its_rounding():
    with pytest.raises(ValueError, match=r"^delta=1e-13: must be at least [^\n]*$"):
        price(poisson(1.0, 0.01, 1000), 1e-13)
    assert price(poisson(1.0, 0.01, 1000), 1e-13, "rdp") > 0


@pytest.mark.parametrize(("q", "s"), [(1e-6, 1.0), (1e-6, 4.0), (0.01, 1.0), (0.3, 0.5), (0.9, 3.0), (0.1, 20.0)])
def test_renyi_of_whole_orders_is_the_binomial_sum(q, s):
    """E30's closed form, (alpha - 1) RDP = log1p(sum_i C(alpha, i) q^i (1-q)^(alpha-i) expm1(i(i-1)/2s^2)), to 1e-9."""
    for a in (2, 3, 12):
        terms = (math.comb(a, i) * q**i * (1 - q) ** (a - i) * math.expm1(i * (i - 1) / (2 * s**2)) for i in range(2, a + 1))
        assert renyi.poisson(q, s, [a])[0] == pytest.approx(math.log1p(math.fsum(terms)) / (a - 1), rel=1e-9)


def test_renyi_of_fractional_orders_has_40_digit_values():
    """Origin: mpmath 1.3, quad with 40 digits of E[(1 - q + q r)^alpha]; dp_accounting 0.6 gives 4.53e-4 for the first."""
    golden = [
        (0.1, 11.77, 1.1, 3.98205544439827e-5),
        (0.1, 11.77, 2.5, 9.05840284736886e-5),
        (0.01, 1.0, 1.5, 1.2725374332745e-4),
        (0.9, 3.0, 9.9, 0.478804394084556),
        (0.5, 2.0, 1.1, 0.0356276298505518),
        (0.2, 0.3, 1.1, 1.00143681872184),
        (0.01, 0.1, 1.1, 9.29367753970507),
    ]
    for q, s, a, right in golden:
        assert renyi.poisson(q, s, [a])[0] == pytest.approx(right, rel=1e-11)


def test_renyi_of_large_orders_does_not_overflow_e30():
    got = [renyi.poisson(q, s, [a])[0] for s, q, a in ((0.2, 0.01, 256), (0.1, 0.01, 64), (0.05, 1e-4, 1024))]
    assert got == pytest.approx([3195.37677032, 3195.32173187, 204790.780656], rel=1e-11)


@pytest.mark.parametrize(("q", "s"), [(0.1, 11.77), (0.01, 0.5), (0.9, 3.0)])
def test_renyi_without_replacement_is_theorem_27(q, s):
    """Against dp_accounting 0.6, which takes forward differences where we integrate."""
    theirs = RdpAccountant(renyi.ORDERS, NeighboringRelation.REPLACE_ONE).compose(fixed(s, q, 1)).rdp
    np.testing.assert_allclose(renyi.without_replacement(q, s, renyi.ORDERS), theirs, rtol=1e-9)


def test_the_orders_are_the_papers():
    paper = [round(1 + k / 10, 1) for k in range(1, 91)] + list(range(12, 64))
    assert paper == list(renyi.ORDERS)


# Bounds that must hold ---------------------------------------------------------------------------------------------------


def worst_case_of_a_subset(sigma: float, q: float, delta: float) -> float:
    """epsilon of one step on this pair, exactly: everyone's clipped gradient is -C, but one is +C in one data set.

    A subset with that example sums to 2C more, so the release is N(0) against (1-q) N(0) + q N(2C): the integral of
    (mixture - e^eps N(0))+ runs over x beyond the point where the ratio is e^eps.
    """
    mu = 2 / sigma

    def gap(eps: float) -> float:
        x = math.log1p(math.expm1(eps) / q) / mu + mu / 2
        return (1 - q) * norm.sf(x) + q * norm.sf(x - mu) - math.exp(eps) * norm.sf(x) - delta

    return brentq(gap, 1e-9, 60, xtol=1e-12)


@pytest.mark.parametrize(("sigma", "q"), [(4.0, 0.5), (2.0, 0.5), (1.0, 0.1), (10.0, 0.3)])
def test_fixed_size_is_never_cheaper_than_its_worst_pair_of_data_sets(sigma, q):
    """pld is exact for one step; rdp is above; theorem 27 with std / C for std / 2C would claim half of what is lost."""
    exact = worst_case_of_a_subset(sigma, q, 1e-5)
    event = fixed(sigma, q, 1)
    assert price(event, 1e-5, "pld", "replace_one") == pytest.approx(exact, rel=1e-4)
    assert price(event, 1e-5, "pld", "replace_one") >= exact - 1e-9
    assert exact < price(event, 1e-5, "rdp", "replace_one") < price(event, 1e-5, "rdp-classic", "replace_one")
    naive = RdpAccountant(renyi.ORDERS, NeighboringRelation.REPLACE_ONE).compose(event).get_epsilon(1e-5)
    assert naive < exact


@pytest.mark.parametrize("sigma", [20.0, 3.78, 2.0])
def test_fixed_size_composition_is_never_cheaper_than_repeating_that_pair(sigma):
    """800 steps on the same pair are a Poisson-sampled Gaussian of sigma / 2, priced by the other branch of pld."""
    lower = price(poisson(sigma / 2, 0.1, 800), 6.78e-6)
    assert price(fixed(sigma, 0.1, 800), 6.78e-6, "pld", "replace_one") > lower
    assert price(fixed(sigma, 0.1, 800), 6.78e-6, "rdp", "replace_one") > lower


@pytest.mark.parametrize("accountant", ACCOUNTANTS)
def test_more_steps_a_larger_sample_and_less_noise_never_cost_less(accountant):
    for make, relation in ((poisson, "add_or_remove_one"), (fixed, "replace_one")):
        base = price(make(4.0, 0.2, 20), 1e-6, accountant, relation)
        assert base < price(make(4.0, 0.2, 21), 1e-6, accountant, relation)
        assert base < price(make(4.0, 0.21, 20), 1e-6, accountant, relation)
        assert base < price(make(3.99, 0.2, 20), 1e-6, accountant, relation)


def test_sampling_never_costs_more_than_taking_everyone():
    everyone = price(SelfComposedDpEvent(GaussianDpEvent(5.0), 50), 1e-6, "pld", "replace_one")
    assert price(fixed(5.0, 0.99, 50), 1e-6, "pld", "replace_one") <= everyone
    assert price(fixed(5.0, 1.0, 50), 1e-6, "pld", "replace_one") == everyone


# Edges and refusals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accountant", ACCOUNTANTS)
def test_edges_e29(accountant):
    assert price(NoOpDpEvent(), 1e-5, accountant) == 0
    assert price(poisson(1.0, 0.01, 0), 0.0, accountant) == 0
    assert price(poisson(0.0, 0.0, 10), 1e-5, accountant) == 0
    assert price(poisson(0.0, 0.01, 10), 1e-5, accountant) == math.inf
    assert price(GaussianDpEvent(0.0), 1e-5, accountant) == math.inf
    assert price(GaussianDpEvent(1.0), 0.0, accountant) == math.inf


@pytest.mark.parametrize("accountant", ACCOUNTANTS)
@pytest.mark.parametrize("sigma", [1e-300, 1e-7, 1e-5, 1e-2, 1e3, 1e7, 1e300])
def test_extreme_noise_gives_a_number_and_no_warning(accountant, sigma):
    for event, relation in ((poisson(sigma, 0.01, 50), "zero_out"), (fixed(sigma, 0.01, 50), "replace_one"),
                            (GaussianDpEvent(sigma), "replace_one")):  # fmt: skip
        assert 0 <= price(event, 1e-6, accountant, relation) <= math.inf


@pytest.mark.parametrize("delta", [-1e-9, 1.0, 2.0, math.nan, "x", None])
def test_delta_outside_is_refused(delta):
    with pytest.raises(ValueError, match=r"^delta=[^\n]*$"):
        price(GaussianDpEvent(1.0), delta)


@pytest.mark.parametrize(
    "event",
    [
        GaussianDpEvent(-1.0),
        GaussianDpEvent(math.nan),
        GaussianDpEvent(math.inf),
        poisson(1.0, -0.1, 1),
        poisson(1.0, 1.1, 1),
        SelfComposedDpEvent(GaussianDpEvent(1.0), -1),
        SelfComposedDpEvent(GaussianDpEvent(1.0), 1.5),  # type: ignore[arg-type]
        SampledWithoutReplacementDpEvent(10, 11, GaussianDpEvent(1.0)),
        LaplaceDpEvent(1.0),
        PoissonSampledDpEvent(0.1, LaplaceDpEvent(1.0)),
        PoissonSampledDpEvent(0.1, PoissonSampledDpEvent(0.1, GaussianDpEvent(1.0))),
        "an event",
    ],
    ids=str,
)
@pytest.mark.parametrize("accountant", ACCOUNTANTS)
def test_an_event_without_a_meaning_is_refused_in_one_line(event, accountant):
    with pytest.raises(ValueError, match=r"^[^\n]+$"):
        price(event, 1e-5, accountant)


@pytest.mark.parametrize("accountant", ACCOUNTANTS)
def test_a_sampler_is_priced_only_under_the_relation_its_amplification_is_proved_for(accountant):
    for event, relation in ((poisson(1.0, 0.1, 2), "replace_one"), (fixed(1.0, 0.1, 2), "add_or_remove_one"),
                            (fixed(1.0, 0.1, 2), "zero_out")):  # fmt: skip
        with pytest.raises(ValueError, match=r"^relation='\w+': a [^\n]* sample is priced under [^\n]*$"):
            price(event, 1e-5, accountant, relation)


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="accountant='gdp'"):
        price(GaussianDpEvent(1.0), 1e-5, "gdp")
    with pytest.raises(ValueError, match="relation='user'"):
        price(GaussianDpEvent(1.0), 1e-5, "pld", "user")


def test_a_target_below_the_renyi_orders_is_refused_not_met_by_absurd_noise():
    with pytest.raises(ValueError, match=r"^epsilon=0\.01: the rdp accountant shows nothing between 0 and 0\.10[^\n]*$"):
        noise_multiplier(lambda s: poisson(s, 0.01, 1000), 0.01, 1e-5, relation="add_or_remove_one", accountant="rdp")


def test_a_target_that_noise_cannot_change_is_refused():
    with pytest.raises(ValueError, match=r"^epsilon=1\.0: no noise_multiplier up to [^\n]*$"):
        noise_multiplier(lambda s: GaussianDpEvent(0.5), 1.0, 1e-5, relation="add_or_remove_one")
    with pytest.raises(ValueError, match=r"^epsilon=1\.0: every noise_multiplier meets it[^\n]*$"):
        noise_multiplier(lambda s: NoOpDpEvent(), 1.0, 1e-5, relation="add_or_remove_one")


@pytest.mark.parametrize(("target", "delta"), [(0, 1e-5), (-1, 1e-5), (math.inf, 1e-5), (math.nan, 1e-5), (1, 0), (1, 1)])
def test_targets_out_of_range_are_refused(target, delta):
    with pytest.raises(ValueError, match=r"^(epsilon|delta)=[^\n]*$"):
        noise_multiplier(GaussianDpEvent, target, delta, relation="add_or_remove_one")


# The statement -----------------------------------------------------------------------------------------------------------


def test_statement_of_cifar10():
    stated = account(**CIFAR10, epsilon=1)
    assert set(stated) >= {"noise_multiplier", "epsilon", "delta", "relation", "accountant", "sampling", "steps", "alternatives"}
    assert (stated["relation"], stated["accountant"], stated["sampling"]) == ("add_or_remove_one", "pld", "poisson")
    assert stated["noise_multiplier"] == pytest.approx(10.87, rel=5e-3)
    assert set(stated["alternatives"]) == {"rdp_improved", "rdp_classic"}
    assert stated["alternatives"]["rdp_classic"]["noise_multiplier"] == pytest.approx(14.18, rel=5e-3)
    back = account(**CIFAR10, noise_multiplier=stated["noise_multiplier"], accountant="rdp")
    assert back["alternatives"]["pld"]["epsilon"] == stated["epsilon"] <= 1
    assert back["alternatives"]["rdp_improved"] == {k: back[k] for k in ("noise_multiplier", "epsilon")}
    assert back["epsilon"] > 1


def test_statement_of_fixed_size_needs_about_twice_the_noise_of_poisson():
    stated = account(**CIFAR10, epsilon=1, sampling="fixed_size")
    assert stated["relation"] == "replace_one"
    assert 2 * 10.87 < stated["noise_multiplier"] < 2.1 * 10.87
    assert stated["alternatives"]["rdp_improved"]["noise_multiplier"] == pytest.approx(2 * 23.78, rel=5e-3)


def test_an_alternative_that_cannot_reach_the_target_is_left_out():
    stated = account(num_examples=1000, batch_size=10, steps=10, delta=1e-5, epsilon=0.01)
    assert stated["alternatives"] == {}


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"epsilon": None}, "epsilon and noise_multiplier: neither"),
        ({"noise_multiplier": 1.0}, "epsilon and noise_multiplier: both"),
        ({"epsilon": 0}, "epsilon=0"),
        ({"epsilon": None, "noise_multiplier": 0.0}, "noise_multiplier=0.0"),
        ({"epsilon": None, "noise_multiplier": math.inf}, "noise_multiplier=inf"),
        ({"delta": 0}, "delta=0"),
        ({"delta": 1}, "delta=1"),
        ({"steps": 0}, "steps=0"),
        ({"steps": 2.5}, "steps=2.5"),
        ({"batch_size": 60_000}, "batch_size=60000"),
        ({"num_examples": 0}, "num_examples=0"),
        ({"sampling": "bernoulli"}, "sampling='bernoulli'"),
        ({"accountant": "gdp"}, "accountant='gdp'"),
    ],
)
def test_bad_statements_are_refused_in_one_line_that_names_what_was_given(changed, named):
    with pytest.raises(ValueError, match=rf"^{named}[^\n]*$"):
        account(**{**CIFAR10, "epsilon": 1, **changed})
