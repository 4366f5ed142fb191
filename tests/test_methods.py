"""The named methods are the compositions of METHODS.md section 4; options reach the right part; nothing is guessed or ignored."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from fiberdp.filters import EMA, FILTERS, Identity, Innovation, LowPass
from fiberdp.mechanisms import MECHANISMS, Banded, White
from fiberdp.methods import METHODS, PARTS, Method, method
from fiberdp.moments import CALIBRATIONS, Exact, NoCorrection, Raw, Steady
from fiberdp.observation import OBSERVATIONS, OnePoint, TwoPoint
from fiberdp.optim import SCHEDULES, SGD, UPDATES, AdamW, Constant, WarmupCosine
from fiberdp.types import Probe

FIBER, DISK = TwoPoint(kappa=0.6, gamma=0.7), TwoPoint(kappa=0.7, gamma=0.5)
AHEAD = TwoPoint(kappa=0.6, gamma=(1 - 0.6) / 0.6)

# METHODS.md section 4, by value: observation, filter, update, calibration
TABLE = {
    "dp-sgd": (OnePoint(), Identity(), SGD, NoCorrection()),
    "dp-adamw": (OnePoint(), Identity(), AdamW, NoCorrection()),
    "dp-adambc": (OnePoint(), Identity(), AdamW, Raw(eps_v=1e-8)),
    "disk": (DISK, EMA(kappa=0.7, init_at="first"), AdamW, NoCorrection()),
    "disk-corr": (DISK, EMA(kappa=0.7, init_at="first"), AdamW, Steady(eps_v=1e-8)),
    "fiber": (FIBER, Innovation(omega=0.9), AdamW, Steady(eps_v=1e-8)),
    "fiber-nocorr": (FIBER, Innovation(omega=0.9), AdamW, NoCorrection()),
    "fiber-bccorr": (FIBER, Innovation(omega=0.9), AdamW, Raw(eps_v=1e-8)),
    "fiber-tied": (FIBER, Innovation(omega=0.6), AdamW, NoCorrection()),
    "doppler": (OnePoint(), LowPass(), AdamW, NoCorrection()),
    "mf-dp-ftrl": (OnePoint(), Identity(), SGD, NoCorrection()),
    "fiber-plus": (
        TwoPoint(kappa=0.4, gamma=(1 - 0.4) / 0.4),
        Innovation(omega=0.9),
        AdamW,
        Exact(eps_v="auto", eps_v_scale=10.0),
    ),
    "fiber-lookahead": (AHEAD, Innovation(omega=0.9), AdamW, Exact(eps_v=1e-8)),
}
every_method = pytest.mark.parametrize("name", METHODS)


def refused(*needles):
    """A ValueError of one line that names each of these."""
    return pytest.raises(ValueError, match=r"\A(?=.*" + ")(?=.*".join(needles) + r").*\Z")


# The table


def test_every_method_stands_in_the_table():
    assert set(TABLE) == set(METHODS)
    assert all(name == m.name for name, m in METHODS.items())


@every_method
def test_method_is_the_composition_of_methods_section_4(name):
    m, (observation, filter, update, calibration) = METHODS[name], TABLE[name]
    assert (m.observation, m.filter, m.calibration) == (observation, filter, calibration)
    assert isinstance(m.update, update)
    assert m.mechanism == (Banded(strategy="bandmf", bands=8) if name == "mf-dp-ftrl" else White())
    assert m.update.weight_decay == 0
    assert m.schedule == WarmupCosine(warmup=1 / 20)
    if update is AdamW:
        assert (m.update.betas, m.update.eps) == ((0.9, 0.999), 1e-8)


def test_names_in_json_are_the_papers_words():
    assert list(OBSERVATIONS) == ["one_point", "two_point"]
    assert {"identity", "ema", "innovation"} <= set(FILTERS)
    assert list(MECHANISMS) == ["gaussian", "gaussian-on-grid", "banded"]
    assert list(CALIBRATIONS) == ["none", "raw", "steady", "exact"]
    assert set(UPDATES) == {"adamw", "sgd"}
    assert set(SCHEDULES) == {"warmup_cosine", "warmup_linear", "warmup_constant", "constant"}


# The observation


def test_fiber_weighs_the_look_ahead_gradient_by_20_over_21_eq_2():
    assert METHODS["fiber"].observation.a == pytest.approx(20 / 21)
    assert METHODS["disk"].observation.a == pytest.approx(6 / 7)
    assert OnePoint().probes() == (Probe(1.0, 0.0),)


@pytest.mark.parametrize(("kappa", "gamma"), [(0.6, 0.7), (0.7, 0.5), (0.9, 1.0), (0.5, 3.0), (0.999, 0.01)])
def test_two_point_probes_are_1_minus_a_at_theta_and_a_ahead_eq_2(kappa, gamma):
    a = (1 - kappa) / (kappa * gamma)
    here, ahead = TwoPoint(kappa=kappa, gamma=gamma).probes()
    assert (here.weight, here.lookahead) == (pytest.approx(1 - a), 0.0)
    assert (ahead.weight, ahead.lookahead) == (pytest.approx(a), gamma)


def test_look_ahead_is_one_probe_of_weight_exactly_1_for_every_kappa():
    for kappa in [*np.linspace(0.001, 0.999, 999), *np.random.default_rng(0).random(2000)]:
        kappa = float(kappa)
        (probe,) = TwoPoint.look_ahead(kappa=kappa).probes()
        assert probe == Probe(1.0, (1 - kappa) / kappa)
        assert TwoPoint(kappa=kappa, gamma=(1 - kappa) / kappa).probes() == (probe,)


def test_a_beyond_1_is_refused_unless_allowed_paper_e_5():
    with refused("kappa=0.7", "gamma=0.4", "a=1.071", r"\[0, 1\]", "gamma>=0.4286"):
        TwoPoint(kappa=0.7, gamma=0.4)
    here, ahead = TwoPoint(kappa=0.7, gamma=0.4, allow_extrapolation=True).probes()
    assert here.weight == pytest.approx(-1 / 14)
    assert here.weight + ahead.weight == pytest.approx(1)
    assert method("disk", gamma=0.4, allow_extrapolation=True).observation.a > 1


def test_convex_region_is_gamma_at_least_1_minus_kappa_over_kappa_paper_e_5():
    for kappa in np.linspace(0.01, 0.99, 99):
        limit = float((1 - kappa) / kappa)
        assert 0 < TwoPoint(kappa=float(kappa), gamma=limit * 1.001).a < 1
        with pytest.raises(ValueError, match="a must lie in"):
            TwoPoint(kappa=float(kappa), gamma=limit * 0.999)


def test_gamma_0_is_refused_and_the_look_ahead_named():
    with refused("gamma=0", "infinite", "one_point", "0.6667"):
        TwoPoint(kappa=0.6, gamma=0)


@pytest.mark.parametrize("gamma", [-0.7, float("nan"), float("inf"), "0.7"])
def test_gamma_that_is_no_positive_number_is_refused(gamma):
    with refused("gamma=", "above 0"):
        TwoPoint(kappa=0.6, gamma=gamma)


@pytest.mark.parametrize("kappa", [0, 1, -0.6, 1.2, float("nan"), "0.6"])
def test_kappa_outside_0_to_1_is_refused(kappa):
    with refused("kappa=", r"\(0, 1\)"):
        TwoPoint(kappa=kappa)
    with refused("kappa=", r"\(0, 1\)"):
        TwoPoint.look_ahead(kappa=kappa)


# Options


def test_options_reach_their_part_and_leave_the_table_alone():
    m = method("fiber", kappa=0.7, gamma=0.5, omega=0.3, lr=0.01, betas=(0.8, 0.99), eps=1e-6, weight_decay=0.1, eps_v=1e-6, warmup=0.2)
    assert m == Method(
        name="fiber",
        observation=TwoPoint(kappa=0.7, gamma=0.5),
        filter=Innovation(omega=0.3),
        calibration=Steady(eps_v=1e-6),
        update=AdamW(lr=0.01, betas=(0.8, 0.99), eps=1e-6, weight_decay=0.1),
        schedule=WarmupCosine(warmup=0.2),
    )
    assert METHODS["fiber"].filter == Innovation(omega=0.9)
    assert method("dp-sgd", momentum=0.5).update == replace(METHODS["dp-sgd"].update, momentum=0.5)


def test_kappa_of_fiber_is_the_geometrys_and_not_the_filters_remark_4_2():
    assert method("fiber", kappa=0.7).filter == Innovation(omega=0.9)
    assert method("fiber", omega=0.5).observation == FIBER


def test_kappa_of_disk_is_both_the_geometrys_and_the_filters_remark_4_2():
    m = method("disk", kappa=0.8)
    assert m.observation.kappa == m.filter.kappa == 0.8


@pytest.mark.parametrize("kappa", [0.3, 0.5, 0.6, 0.9])
def test_look_ahead_fiber_stays_a_look_ahead_when_kappa_changes(kappa):
    assert method("fiber-lookahead", kappa=kappa).observation.probes() == (Probe(1.0, (1 - kappa) / kappa),)


@every_method
def test_without_options_a_method_is_the_tables(name):
    assert method(name) == METHODS[name]


# Refusals


@pytest.mark.parametrize("name", ["fibre", "FIBER", "", None])
def test_unknown_method_is_refused_and_the_methods_are_named(name):
    with refused(f"method={name!r}", *METHODS):
        method(name)


@pytest.mark.parametrize(
    ("name", "options", "has"),
    [
        ("fiber", {"omga": 0.5}, ["omega", "kappa", "gamma", "eps_v"]),
        ("fiber", {"momentum": 0.9}, ["betas"]),
        ("dp-sgd", {"betas": (0.9, 0.99)}, ["momentum", "lr"]),
        ("dp-sgd", {"eps_v": 1e-8}, ["momentum"]),
        ("disk", {"omega": 0.5}, ["kappa"]),
        ("fiber-nocorr", {"eps_v": 1e-8}, ["omega"]),
        ("fiber", {"bands": 4}, ["omega"]),
        ("dp-adamw", {"gamma": 0.7, "kappa": 0.6}, ["betas"]),
    ],
)
def test_an_option_that_nothing_reads_is_refused_and_the_options_are_named(name, options, has):
    with refused(name, *options, *has):
        method(name, **options)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("fiber", {"omega": 0}),
        ("fiber", {"omega": 1.01}),
        ("fiber", {"omega": -0.5}),
        ("fiber", {"omega": float("nan")}),
        ("fiber", {"kappa": 1.0}),
        ("fiber", {"gamma": 0}),
        ("fiber", {"gamma": 0.1}),
        ("fiber", {"eps_v": -1.0}),
        ("fiber", {"lr": 0}),
        ("fiber", {"betas": (0.9, 1.0)}),
        ("fiber", {"warmup": 1.0}),
        ("disk", {"init_at": "middle"}),
        ("dp-sgd", {"momentum": 1.0}),
        ("mf-dp-ftrl", {"bands": 0}),
    ],
    ids=str,
)
def test_a_value_out_of_range_is_refused_by_name(name, options):
    ((option, value),) = options.items()
    with refused(option, f"{value:g}" if isinstance(value, float) and not math.isnan(value) else ""):
        method(name, **options)


# JSON


@every_method
def test_method_round_trips_through_json(name):
    changed = method(name, lr=0.0123, weight_decay=0.1, warmup=0.25)
    for m in (METHODS[name], changed, replace(changed, schedule=Constant(), name="mine")):
        text = json.dumps(m.to_json())
        assert Method.from_json(json.loads(text)) == m
        assert json.dumps(Method.from_json(json.loads(text)).to_json()) == text


def test_json_names_every_part_and_setting():
    config = METHODS["fiber"].to_json()
    assert list(config) == ["name", *PARTS]
    assert config["observation"] == {"type": "two_point", "kappa": 0.6, "gamma": 0.7, "allow_extrapolation": False}
    assert config["filter"] == {"type": "innovation", "omega": 0.9}
    assert config["calibration"] == {"type": "steady", "eps_v": 1e-8, "eps_v_scale": 1.0}


@every_method
def test_methods_are_frozen_values(name):
    with pytest.raises(AttributeError):
        METHODS[name].filter = Identity()
    with pytest.raises(AttributeError):
        METHODS[name].filter.omega = 0.1
    assert len({METHODS[name], method(name)}) == 1


@pytest.mark.parametrize("part", PARTS)
def test_unknown_part_or_setting_in_json_is_refused(part):
    config = METHODS["fiber"].to_json()
    with refused(f"{part}.type='nonsense'", *PARTS[part]):
        Method.from_json(config | {part: config[part] | {"type": "nonsense"}})
    with refused(part, "surplus", "remove it"):
        Method.from_json(config | {part: config[part] | {"surplus": 1}})
    with refused("surplus", *PARTS):
        Method.from_json(config | {"surplus": {}})


def test_values_in_json_are_checked_like_any_other():
    config = METHODS["fiber"].to_json()
    with refused("omega=2", r"\(0, 1\]"):
        Method.from_json(config | {"filter": {"type": "innovation", "omega": 2}})
    with refused("calibration='steady'", "sgd", "AdamW"):
        Method.from_json(config | {"update": {"type": "sgd", "lr": 0.1}})


@pytest.mark.parametrize("part", ["name", *PARTS])
def test_a_missing_part_in_json_is_refused(part):
    config = METHODS["fiber"].to_json()
    with refused(part):
        Method.from_json({key: value for key, value in config.items() if key != part})


@pytest.mark.parametrize("betas", [(0.9,), (0.9, 0.99, 0.999), 0.9])
def test_betas_that_are_no_pair_are_refused(betas):
    with refused("betas"):
        method("fiber", betas=betas)


def test_allow_extrapolation_must_be_true_or_false():
    with refused("allow_extrapolation"):
        TwoPoint(kappa=0.6, gamma=0.1, allow_extrapolation="false")


def test_look_ahead_has_no_gamma_of_its_own():
    with refused("fiber-lookahead", "gamma"):
        method("fiber-lookahead", gamma=0.7)


@pytest.mark.parametrize("part", ["innovation", Innovation])
def test_a_part_must_be_a_value(part):
    with refused("filter", "Identity"):
        Method(filter=part, update=AdamW(lr=0.1))
