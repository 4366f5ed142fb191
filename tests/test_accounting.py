"""Claims of the accountants: right values, valid bounds, refusals; and calibration from the safe side."""

from __future__ import annotations

import math

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
from dp_accounting.rdp import RdpAccountant
from scipy.optimize import brentq
from scipy.stats import norm

from fiberdp.accounting import ACCOUNTANTS, epsilon, noise_multiplier
from fiberdp.accounting.accountant import ORDERS
from fiberdp.statement import account, account_phases

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
    for target, right in list(zip(TARGETS, METHODS_6_FIXED_SIZE))[1::3]:
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


def test_pld_of_almost_no_sampling_is_the_exact_gaussian():
    """dp_accounting's grid and Fourier transform against the closed form: q = 1 - 1e-9 goes through both."""
    exact = price(SelfComposedDpEvent(GaussianDpEvent(3.0), 20), 1e-6)
    assert exact <= price(poisson(3.0, 1 - 1e-9, 20), 1e-6) <= exact * (1 + 1e-4)


def test_hardly_any_noise_is_priced_by_a_valid_bound():
    """Below sigma = 0.15 a loss distribution would need millions of points: Renyi, or one Gaussian with sampling left out."""
    bound = price(poisson(0.1, 0.01, 5), 1e-5)
    assert bound <= price(SelfComposedDpEvent(GaussianDpEvent(0.1), 5), 1e-5)
    assert bound == price(poisson(0.1, 0.01, 5), 1e-5, "rdp")
    assert bound > price(poisson(0.15, 0.01, 5), 1e-5)


@pytest.mark.parametrize("delta", [1e-300, 1e-30, 1e-12, 1e-11])
def test_a_tiny_delta_is_priced_by_renyi_divergences(delta):
    """Loss distributions are cut off at a mass of 1e-15: at delta = 1e-11 dp_accounting's is too small by more than its grid.

    Checked against the exact Gaussian, to which sampling nearly everyone comes as near as one likes.
    """
    exact = price(SelfComposedDpEvent(GaussianDpEvent(3.0), 20), delta)
    bound = price(poisson(3.0, 1 - 1e-12, 20), delta)
    assert exact <= bound * (1 + 1e-9)
    assert bound < 1.3 * exact
    assert bound < math.inf


def test_epsilon_does_not_jump_down_where_the_bound_changes():
    deltas = [3e-10, 1.01e-10, 0.99e-10, 3e-11]
    found = [price(poisson(1.0, 0.01, 1000), delta) for delta in deltas]
    assert found == sorted(found)


def test_the_orders_and_the_classic_conversion_are_the_papers():
    """A second route to rdp-classic: alpha / 2 sigma^2 of unsampled Gaussians, minimised over the paper's orders by hand."""
    paper = [round(1 + k / 10, 1) for k in range(1, 91)] + list(range(12, 64))
    assert paper == list(ORDERS)
    by_hand = min(50 * a / (2 * 8.0**2) + math.log(1e5) / (a - 1) for a in paper)
    assert price(SelfComposedDpEvent(GaussianDpEvent(8.0), 50), 1e-5, "rdp-classic") == pytest.approx(by_hand, rel=1e-12)


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
    """dp_accounting's theorem 27 takes std over the sensitivity 2C: read as std / C it would claim less than is lost."""
    exact = worst_case_of_a_subset(sigma, q, 1e-5)
    event = fixed(sigma, q, 1)
    assert exact < price(event, 1e-5, "rdp", "replace_one") < price(event, 1e-5, "rdp-classic", "replace_one")
    naive = RdpAccountant(ORDERS, NeighboringRelation.REPLACE_ONE).compose(event).get_epsilon(1e-5)
    assert naive < exact


@pytest.mark.parametrize("sigma", [20.0, 3.78, 2.0])
def test_fixed_size_composition_is_never_cheaper_than_repeating_that_pair(sigma):
    """800 steps on the same pair are a Poisson-sampled Gaussian of sigma / 2, priced by pld."""
    lower = price(poisson(sigma / 2, 0.1, 800), 6.78e-6)
    assert price(fixed(sigma, 0.1, 800), 6.78e-6, "rdp", "replace_one") > lower


@pytest.mark.parametrize("accountant", ACCOUNTANTS)
def test_more_steps_a_larger_sample_and_less_noise_never_cost_less(accountant):
    for make, relation in ((poisson, "add_or_remove_one"), (fixed, "replace_one")):
        if make is fixed and accountant == "pld":
            continue
        base = price(make(4.0, 0.2, 20), 1e-6, accountant, relation)
        assert base < price(make(4.0, 0.2, 21), 1e-6, accountant, relation)
        assert base < price(make(4.0, 0.21, 20), 1e-6, accountant, relation)
        assert base < price(make(3.99, 0.2, 20), 1e-6, accountant, relation)


def test_sampling_never_costs_more_than_taking_everyone():
    everyone = SelfComposedDpEvent(GaussianDpEvent(5.0), 50)
    for accountant in ACCOUNTANTS:
        assert price(poisson(5.0, 0.99, 50), 1e-6, accountant) <= price(everyone, 1e-6, accountant)
        assert price(poisson(5.0, 1.0, 50), 1e-6, accountant) == price(everyone, 1e-6, accountant)
        assert price(fixed(5.0, 1.0, 50), 1e-6, accountant, "replace_one") == price(everyone, 1e-6, accountant, "replace_one")


def test_pld_of_a_fixed_size_sample_is_refused_in_one_line():
    with pytest.raises(ValueError, match=r"^accountant='pld': a without replacement sample [^\n]*$"):
        price(fixed(5.0, 0.5, 50), 1e-6, "pld", "replace_one")


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
    events = [(poisson(sigma, 0.01, 50), "zero_out"), (GaussianDpEvent(sigma), "replace_one")]
    if accountant != "pld":
        events.append((fixed(sigma, 0.01, 50), "replace_one"))
    for event, relation in events:
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
    with pytest.raises(ValueError, match=r"^epsilon=0\.01: the rdp-classic accountant shows nothing between [^\n]*$"):
        noise_multiplier(lambda s: poisson(s, 0.01, 1000), 0.01, 1e-5, relation="add_or_remove_one", accountant="rdp-classic")


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


def test_statement_of_fixed_size_is_by_rdp_and_in_units_of_C():
    stated = account(**CIFAR10, epsilon=1, sampling="fixed_size")
    assert (stated["relation"], stated["accountant"]) == ("replace_one", "rdp")
    assert stated["noise_multiplier"] == pytest.approx(2 * 23.78, rel=5e-3)
    assert set(stated["alternatives"]) == {"rdp_improved", "rdp_classic"}


def test_an_alternative_that_cannot_reach_the_target_is_left_out():
    stated = account(num_examples=1000, batch_size=10, steps=10, delta=1e-5, epsilon=0.01)
    assert set(stated["alternatives"]) == {"rdp_improved"}  # the paper's orders end too early


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


def test_phases_of_e26_are_one_statement():
    """CASES E26: 500 steps at q = 0.01 with sigma 1, then 500 at q = 0.02 with sigma 2."""
    phases = [(100, 500, 1.0), (200, 500, 2.0)]
    stated = account_phases(phases, num_examples=10_000, delta=1e-5)
    assert stated["epsilon"] == pytest.approx(1.61508, rel=1e-5)
    assert stated["alternatives"]["rdp_improved"]["epsilon"] == pytest.approx(1.89461, rel=1e-5)
    assert stated == {**account_phases(phases[::-1], num_examples=10_000, delta=1e-5), "phases": stated["phases"]}
    assert (stated["steps"], stated["relation"]) == (1000, "add_or_remove_one")
    one = account(num_examples=10_000, batch_size=100, steps=500, delta=1e-5, noise_multiplier=1.0)
    assert account_phases(phases[:1], num_examples=10_000, delta=1e-5)["epsilon"] == one["epsilon"]


def test_a_pass_that_a_phase_does_not_finish_is_paid_in_full():
    """10 batches a pass of shuffled data: 15 + 1 steps are 3 passes, and no fourth."""
    stated = account_phases([(100, 15, 3.0), (100, 1, 3.0)], num_examples=1000, delta=1e-5, sampling="shuffle")
    whole = account(num_examples=1000, batch_size=100, steps=30, delta=1e-5, noise_multiplier=3.0, sampling="shuffle")
    assert stated["epsilon"] == whole["epsilon"]


@pytest.mark.parametrize(
    ("phases", "named"),
    [
        ([], "phases=0"),
        ([(0, 1, 1.0)], "batch_size"),
        ([(1, 0, 1.0)], "steps"),
        ([(1, 1, 0.0)], "noise_multiplier"),
        ([(11, 1, 1.0)], "11"),
    ],
)
def test_impossible_phases_are_refused_in_one_line(phases, named):
    with pytest.raises(ValueError, match=named) as error:
        account_phases(phases, num_examples=10, delta=1e-5)
    assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="sampling"):
        account_phases([(1, 1, 1.0)], num_examples=10, delta=1e-5, sampling="cyclic")


@pytest.mark.parametrize("accountant", ACCOUNTANTS)
@pytest.mark.parametrize("q", [5e-324, 2.2e-309, 1e-200, 1e-31, 1e-16])
def test_a_tiny_sample_gives_a_number_alone_and_beside_others(q, accountant):
    """1/q is infinite for the smallest two, where dp_accounting's loss distribution raises."""
    large = poisson(1.0, 0.01, 10)
    alone, beside, without = (
        price(event, 1e-5, accountant) for event in (poisson(1.0, q, 10), ComposedDpEvent([poisson(1.0, q, 10), large]), large)
    )
    assert 0 <= alone <= beside
    assert beside == pytest.approx(without, rel=1e-3)
