"""The plan joins what must agree, meets its target, and refuses what does not fit."""

from __future__ import annotations

import json
import math
from collections import UserDict

import pytest
import torch
from torch import nn

import fiberdp
from fiberdp.accounting import compose, epsilon
from fiberdp.methods import METHODS
from fiberdp.sampling import SAMPLERS


def make(**changed):
    given = {"method": "fiber", "num_examples": 1000, "batch_size": 100, "epochs": 3, "epsilon": 2.0, "delta": 1e-4, "clip_norm": 0.5}
    return fiberdp.plan(**{**given, **changed})


@pytest.mark.parametrize("accountant", ["pld", "rdp", "rdp-classic"])
@pytest.mark.parametrize("sampling", SAMPLERS)
def test_calibrated_plan_spends_at_most_the_target_and_at_least_99_percent_of_it(sampling, accountant):
    if (sampling, accountant) == ("fixed_size", "pld"):
        pytest.skip("dp_accounting has no loss distribution for fixed-size sampling")
    plan = make(sampling=sampling, accountant=accountant)
    assert 0.99 * 2.0 <= plan.epsilon <= 2.0
    steps = compose(plan.event(step) for step in range(plan.steps))
    assert plan.epsilon == epsilon(steps, 1e-4, relation=plan.relation, accountant=accountant)


def test_less_noise_than_calibrated_would_exceed_the_target():
    plan = make()
    assert make(epsilon=None, noise_multiplier=plan.noise_multiplier * 0.99).epsilon > 2.0


@pytest.mark.parametrize("sampling", SAMPLERS)
@pytest.mark.parametrize("method", METHODS)
def test_plan_round_trips_through_json(method, sampling):
    if method == "mf-dp-ftrl" and sampling != "cyclic":
        pytest.skip("correlated noise needs cyclic sampling")
    plan = make(method=method, sampling=sampling, epsilon=None, noise_multiplier=1.5, clip="automatic")
    assert fiberdp.Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


def test_noise_of_the_mechanism_is_the_noise_of_the_event():
    plan = make()
    assert plan.mechanism.noise_multiplier == plan.event(0).event.noise_multiplier
    assert plan.mechanism.noise(plan.clip.sensitivity).std == pytest.approx(plan.noise_multiplier * 0.5 / 100)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"epsilon": 0}, "epsilon=0"),
        ({"epsilon": math.inf}, "epsilon=inf"),
        ({"delta": 0}, "delta=0"),
        ({"delta": 1.0}, "delta=1.0"),
        ({"batch_size": 1001}, "batch_size=1001"),
        ({"clip_norm": 0}, "clip_norm=0"),
        ({"clip": "soft"}, "clip='soft'"),
        ({"method": "sgd"}, "method='sgd'"),
        ({"epochs": None}, "exactly one"),
        ({"steps": 5}, "exactly one"),
        ({"epochs": 0}, "epochs=0"),
        ({"noise_multiplier": 1.0}, "exactly one"),
        ({"epsilon": None}, "exactly one"),
        ({"epsilon": None, "noise_multiplier": -1.0}, "noise_multiplier=-1.0"),
        ({"sampling": "coin"}, "sampling='coin'"),
        ({"accountant": "gdp"}, "accountant='gdp'"),
        ({"sampling": "fixed_size", "accountant": "pld"}, "accountant='pld'"),
        ({"sampling": "shuffle", "relation": "add_or_remove_one"}, "'zero_out'"),
        ({"relation": "replace_one"}, "'add_or_remove_one'"),
        ({"groups": 2}, "only cyclic sampling has groups"),
        ({"sampling": "cyclic", "groups": 11}, "groups=11"),
        *[({"method": "mf-dp-ftrl", "sampling": s}, "needs cyclic sampling") for s in ("poisson", "fixed_size", "shuffle")],
        ({"method": "mf-dp-ftrl", "sampling": "cyclic", "groups": 7}, "bands=8 with groups=7"),
        ({"method": fiberdp.method("mf-dp-ftrl", bands=11)}, "N // B = 10: use at most 10 bands"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(changed, named):
    with pytest.raises(ValueError, match=named) as error:
        make(**changed)
    assert "\n" not in str(error.value)


def correlated(strategy, **options):
    return fiberdp.Method(mechanism=fiberdp.mechanisms.Banded(strategy=strategy, **options), update=fiberdp.optim.SGD(lr=0.1))


@pytest.mark.parametrize(("strategy", "groups"), [("bandmf", 8), ("bsr", 8), ("bisr", 10), ("lambda-cgd", 10), ("blt", 10)])
def test_correlated_plan_is_calibrated_charged_and_round_trips(strategy, groups):
    plan = make(method=correlated(strategy))
    assert (plan.sampler.name, plan.sampler.groups) == ("cyclic", groups)
    assert 0.99 * 2.0 <= plan.epsilon <= 2.0
    assert plan.price(compose(plan.event(step) for step in range(plan.steps))) == plan.epsilon
    again = fiberdp.Plan.from_json(json.loads(json.dumps(plan.to_json())))
    assert again == plan
    assert again.mechanism == plan.mechanism


def test_a_banded_matrix_is_amplified_and_another_is_one_gaussian_over_the_run():
    """30 steps, 8 groups: 4 rounds at p = .8 and columns of norm 1; or one Gaussian for all 3 uses of a pattern 10 apart."""
    banded, whole = (make(method=correlated(s), epsilon=None, noise_multiplier=3.0) for s in ("bandmf", "bisr"))
    assert banded.epsilon == epsilon(banded.sampler.charge(3.0, 30), 1e-4, relation="add_or_remove_one")
    assert banded.mechanism.matrix_sensitivity == pytest.approx(1.0)
    assert [type(whole.event(step)).__name__ for step in range(3)] == ["GaussianDpEvent", "NoOpDpEvent", "NoOpDpEvent"]
    used = whole.mechanism.strategy.matrix()[:, ::10].sum(1)
    assert whole.mechanism.matrix_sensitivity == pytest.approx(float(used @ used) ** 0.5)


def test_published_order_of_magnitude_25_bands_of_cifar_10():
    """N = 50k, n = 800, B = 500, epsilon = 8: published sigma about 1.249.  PLD at delta = 1e-6: 1.2489; RDP at N^-1.1: 1.2486."""
    given = {"method": fiberdp.method("mf-dp-ftrl", bands=25), "num_examples": 50_000, "batch_size": 500, "epochs": None, "steps": 800}
    sigma = {(a, d): make(**given, epsilon=8.0, delta=d, accountant=a).noise_multiplier
             for a, d in (("pld", 1e-5), ("pld", 1e-6), ("rdp", 50_000**-1.1))}  # fmt: skip
    assert list(sigma.values()) == pytest.approx([1.1514, 1.2489, 1.2486], abs=1e-4)


def test_epsilon_delta_and_clip_norm_have_no_default():
    with pytest.raises(TypeError, match="delta"):
        fiberdp.plan(method="fiber", num_examples=10, batch_size=1, epochs=1, epsilon=1.0, clip_norm=1.0)
    with pytest.raises(TypeError, match="clip_norm"):
        fiberdp.plan(method="fiber", num_examples=10, batch_size=1, epochs=1, epsilon=1.0, delta=0.1)


def loss_fn(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


def data(n=1000):
    return torch.utils.data.TensorDataset(torch.randn(n, 4), torch.randint(0, 2, (n,)))


def test_a_data_set_of_another_size_is_refused():
    with pytest.raises(ValueError, match="the data set has 999 examples, the plan 1000"):
        make().private(nn.Linear(4, 2), loss_fn, data(999))


def test_a_data_loader_is_refused_because_it_draws_its_own_batches():
    with pytest.raises(ValueError, match="DataLoader"):
        make().private(nn.Linear(4, 2), loss_fn, torch.utils.data.DataLoader(data(), batch_size=100, shuffle=True))


def test_a_run_ends_with_its_plan():
    run = make(epochs=None, steps=2).private(nn.Linear(4, 2), loss_fn, data())
    assert [step.step for step in run] == [0, 1]
    assert 0 < run.epsilon <= 2.0
    with pytest.raises(ValueError, match="a run ends with its plan"):
        run.step()


def test_noise_with_an_infinite_clip_norm_is_refused():
    with pytest.raises(ValueError, match="clip_norm=inf with noise"):
        list(make(clip_norm=math.inf, epsilon=None, noise_multiplier=1.0).private(nn.Linear(4, 2), loss_fn, data()))


def test_without_noise_epsilon_is_infinite_and_the_run_is_torch_adamw():
    """Limits as tests: C = inf, sigma = 0, no filter, full batch is AdamW on the mean loss (float64, 1e-12)."""
    torch.manual_seed(0)
    ours, theirs = nn.Linear(4, 2).double(), nn.Linear(4, 2).double()
    theirs.load_state_dict(ours.state_dict())
    x, y = torch.randn(50, 4, dtype=torch.float64), torch.randint(0, 2, (50,))
    method = fiberdp.Method(update=fiberdp.optim.AdamW(lr=0.01, weight_decay=0.1), schedule=fiberdp.optim.Constant())
    plan = fiberdp.plan(
        method=method, num_examples=50, batch_size=50, steps=30, noise_multiplier=0.0, delta=1e-3, clip_norm=math.inf
    )  # fmt: skip
    run = plan.private(ours, loss_fn, (x, y))
    assert plan.epsilon == math.inf
    optimizer = torch.optim.AdamW(theirs.parameters(), lr=0.01, weight_decay=0.1)
    for _ in run:
        optimizer.zero_grad()
        nn.functional.cross_entropy(theirs(x), y).backward()
        optimizer.step()
    torch.testing.assert_close(torch.cat([p.flatten() for p in ours.parameters()]), torch.cat([p.flatten() for p in theirs.parameters()]))
    assert run.epsilon == math.inf


@pytest.mark.parametrize(("engine", "evaluation"), [("vmap", "_gradient"), ("ghost", "_evaluate")])
def test_look_ahead_takes_one_evaluation_a_step(engine, evaluation):
    """fiber-lookahead calls the per-example gradient once a step, fiber twice from the second step on."""
    calls = {}
    for name in ("fiber", "fiber-lookahead"):
        run = make(method=name, epochs=None, steps=4).private(nn.Linear(4, 2), loss_fn, data(), engine=engine, micro_batch_size=1000)
        run.prove()
        real, calls[name] = getattr(run.pipeline.engine, evaluation), 0

        def counted(*args, real=real, name=name):
            calls[name] += 1
            return real(*args)

        setattr(run.pipeline.engine, evaluation, counted)
        list(run)
    assert calls == {"fiber": 1 + 3 * 2, "fiber-lookahead": 4}


def encoded():
    """What transformers' tokenizers return: a mapping that is no dict."""
    return UserDict({"x": torch.randn(1000, 4), "y": torch.randint(0, 2, (1000,))})


@pytest.mark.parametrize(
    "dataset",
    [
        encoded(),
        dict(encoded()),
        {"x": torch.randn(1000, 4).numpy(), "y": torch.randint(0, 2, (1000,)).numpy()},
    ],
)
def test_a_mapping_of_tensors_or_arrays_is_a_data_set(dataset):
    run = make(epochs=None, steps=2).private(
        nn.Linear(4, 2), lambda m, b: nn.functional.cross_entropy(m(b["x"]), b["y"], reduction="none"), dataset
    )
    assert len(list(run)) == 2


def test_a_mapping_with_a_list_field_is_refused_for_what_it_is():
    with pytest.raises(ValueError, match="fields that are not tensors"):
        make().private(nn.Linear(4, 2), loss_fn, {"x": torch.randn(1000, 4), "text": ["a"] * 1000})


def test_torchs_own_collate_of_pairs_works():
    rows = [(torch.randn(4), i % 2) for i in range(1000)]
    plan = make(epochs=None, steps=2)
    run = plan.private(nn.Linear(4, 2), loss_fn, rows, collate=torch.utils.data.default_collate)
    assert len(list(run)) == 2


def test_what_the_engine_cannot_do_is_refused_at_set_up():
    rows = [{"x": torch.randn(4), "text": "a"} for _ in range(1000)]
    with pytest.raises(ValueError, match="not a tensor"):
        make().private(nn.Linear(4, 1), lambda m, b: m(b["x"]).squeeze(1) * len(b["text"][0]), rows, engine="vmap")
