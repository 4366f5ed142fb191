"""E18 (ACC): full batch, sigma = 10, T = 100, delta = 1e-5: 4.377178 add/remove (mu = 1), 9.997256 replace-one (mu = 2).

Origin: CASES.md.  Second route: the Gaussian trade-off in closed form (Balle, Wang 2018), evaluated here with scipy.
"""

from __future__ import annotations

import math

import pytest
from dp_accounting import GaussianDpEvent, SelfComposedDpEvent
from scipy.stats import norm

from fiberdp.accounting import epsilon
from fiberdp.sampling import FixedSize, Poisson
from fiberdp.statement import account

RIGHT = {"add_or_remove_one": (1.0, 4.377178), "zero_out": (1.0, 4.377178), "replace_one": (2.0, 9.997256)}


@pytest.mark.parametrize("relation", RIGHT)
def test_full_batch_is_one_gaussian_of_the_relations_mu(relation):
    mu, right = RIGHT[relation]
    eps = epsilon(SelfComposedDpEvent(GaussianDpEvent(10.0), 100), 1e-5, relation=relation)
    assert eps == pytest.approx(right, rel=1e-6)
    assert norm.cdf(mu / 2 - eps / mu) - math.exp(eps) * norm.cdf(-mu / 2 - eps / mu) == pytest.approx(1e-5, rel=1e-6)


@pytest.mark.parametrize("accountant", ["rdp", "rdp-classic"])
def test_renyi_accountants_double_mu_too(accountant):
    """dp_accounting's own Renyi accountant charges alpha / 2 sigma^2 under both relations: 4.7285 for replace-one, below 9.997."""
    event = SelfComposedDpEvent(GaussianDpEvent(10.0), 100)
    twice = SelfComposedDpEvent(GaussianDpEvent(5.0), 100)
    replaced = epsilon(event, 1e-5, relation="replace_one", accountant=accountant)
    assert replaced == epsilon(twice, 1e-5, relation="add_or_remove_one", accountant=accountant) > 9.997256


def test_a_full_batch_sampler_costs_what_no_sampling_costs_and_the_statement_names_the_relation():
    sizes = {"num_examples": 7, "batch_size": 7}
    for sampler, relation in ((Poisson(**sizes), "add_or_remove_one"), (FixedSize(**sizes), "replace_one")):
        stated = account(**sizes, steps=100, delta=1e-5, noise_multiplier=10.0, sampling=sampler.name, accountant="pld")
        assert stated["relation"] == sampler.relation == relation
        assert stated["epsilon"] == pytest.approx(RIGHT[relation][1], rel=1e-6)
