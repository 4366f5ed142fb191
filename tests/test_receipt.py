"""The noise receipt: right noise passes, every planted defect is refused."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch
from torch import nn

import fiberdp
from fiberdp.diagnostics.receipt import ReceiptError, noise_receipt, receipt_steps
from fiberdp.types import ClippedSum, Noise, Release

LAYERS = [("a", slice(0, 3000)), ("b", slice(3000, 6000)), ("c", slice(6000, 6010))]


def receipt(make, std=0.25, steps=9):
    generator = torch.Generator().manual_seed(4)
    return noise_receipt(lambda step: make(step, generator), std=std, tensors=LAYERS, steps=steps)


def white(step, generator, std=0.25, n=6010):
    return torch.randn(n, generator=generator) * std


def test_right_noise_passes_and_is_measured():
    """54,090 samples: the standard error of the std is 0.3 %."""
    proof = receipt(white).require()
    assert proof.samples == 54_090
    assert proof.standard_error == pytest.approx((2 * 54_090) ** -0.5)
    assert abs(proof.std_ratio - 1) < 5 * proof.standard_error
    assert abs(proof.lag1_correlation) < 5 / math.sqrt(8 * 6010)
    assert json.loads(json.dumps(proof.to_json()))["passed"] is True


def test_false_alarms_are_rare():
    """400 receipts of right noise, at about 2e-6 a receipt (three single checks, four families, each 6e-7): none is expected to fail."""
    for seed in range(400):
        generator = torch.Generator().manual_seed(seed)
        layers = [("a", slice(0, 40)), ("b", slice(40, 44)), ("c", slice(44, 45))]
        proof = noise_receipt(lambda step, g=generator: torch.randn(45, generator=g), std=1.0, tensors=layers, steps=8)
        assert proof.passed, (seed, proof.checks)


def shared_between_tensors(step, generator):
    x = white(step, generator)
    x[3000:6000] = x[:3000]
    return x


def one_number_a_tensor(step, generator):
    return white(step, generator)[:1].expand(6010).clone()


def reused_between_steps(step, generator):
    return white(step, generator.manual_seed(step // 2))


def one_tensor_without_noise(step, generator):
    x = white(step, generator)
    x[6000:] = 0
    return x


def a_gradient_shows_through(step, generator):
    return white(step, generator) + 0.01


def uniform(step, generator):
    return (torch.rand(6010, generator=generator) - 0.5) * 0.25 * math.sqrt(12)


@pytest.mark.parametrize(
    ("fault", "named"),
    [
        (lambda s, g: white(s, g) * 0.05, "std"),  # the (1 - a) defect at (kappa, gamma) = (0.6, 0.7)
        (lambda s, g: white(s, g) * 0.98, "std"),  # 2 % too little: 6.6 standard errors
        (lambda s, g: white(s, g) * math.sqrt(3), "std"),  # added once per micro-batch
        (lambda s, g: white(s, g) * 1.1, "std"),
        (shared_between_tensors, "correlation of a with b"),
        (one_number_a_tensor, ""),
        (reused_between_steps, "lag-1"),
        (one_tensor_without_noise, "std of c"),
        (a_gradient_shows_through, "mean"),
        (uniform, "kurtosis"),
        (lambda s, g: torch.full((6010,), math.nan), "std"),
        (lambda s, g: torch.zeros(6010), "std"),
    ],
)
def test_wrong_noise_is_refused(fault, named):
    proof = receipt(fault)
    assert not proof.passed
    assert any(named in check.name for check in proof.checks if not check.passed)
    with pytest.raises(ReceiptError, match="The run is refused") as error:
        proof.require()
    assert "\n" not in str(error.value)


def test_the_receipt_sees_no_example():
    """Only the first and the last row are read, for their structure: the receipt is the same, bit for bit, whatever the data hold."""

    class Watched:
        def __init__(self, fill):
            self.fill, self.read = fill, set()

        def __len__(self):
            return 100

        def __getitem__(self, i):
            self.read.add(i)
            return {"x": torch.full((20,), self.fill), "y": 3}

    plan = fiberdp.plan(method="fiber", num_examples=100, batch_size=40, steps=5, noise_multiplier=1.5, delta=1e-3, clip_norm=0.7)
    receipts = []
    for fill in (0.0, 1e6, math.nan):
        torch.manual_seed(0)
        data, model = Watched(fill), nn.Linear(20, 40)
        run = plan.private(
            model,
            lambda m, b: nn.functional.cross_entropy(m(b["x"]), b["y"], reduction="none"),
            data,
            keys=fiberdp.Keys.seeded(1),
        )
        receipts.append(run.prove())
        assert data.read == {0, 99}
    assert receipts[0] == receipts[1] == receipts[2]


def test_a_small_model_is_driven_for_more_steps():
    assert receipt_steps(10**6) == 4
    assert receipt_steps(3610) == 14
    assert receipt_steps(1) == 64


# ---- the same defects planted in a real run: it must refuse to start ----


def problem():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 40), nn.Tanh(), nn.Linear(40, 20), nn.Tanh(), nn.Linear(20, 40))
    data = {"x": torch.randn(200, 20), "y": torch.randint(0, 40, (200,))}

    def loss_fn(m, batch):
        return nn.functional.cross_entropy(m(batch["x"]), batch["y"], reduction="none")

    plan = fiberdp.plan(method="fiber", num_examples=200, batch_size=40, steps=5, noise_multiplier=1.5, delta=1e-3, clip_norm=0.7)
    return plan.private(model, loss_fn, data, keys=fiberdp.Keys.seeded(1), micro_batch_size=10)


class ScaledByOneMinusA:
    """What a two-point code does that adds the noise to the first point before mixing."""

    def __init__(self, right, a):
        self.right, self.a = right, a

    def release(self, clipped, stream, step):
        total = clipped.total.clone()
        noise = self.right.release(ClippedSum(torch.zeros_like(total), clipped.sensitivity), stream, step).value
        return Release(total / self.right.batch_size + (1 - self.a) * noise, self.right.noise(clipped.sensitivity))


class SharedBetweenTensors:
    """Two equally large weights get the same noise."""

    def __init__(self, right):
        self.right = right

    def release(self, clipped, stream, step):
        release = self.right.release(clipped, stream, step)
        release.value[840 + 800 : 840 + 800 + 20] = release.value[800:820]
        release.value[840 : 840 + 800] = release.value[:800]
        return release


class OncePerMicroBatch:
    """An engine that adds the noise itself, so a batch of k micro-batches carries it k times."""

    def __init__(self, right, pipeline):
        self.right, self.pipeline, self.calls = right, pipeline, 0

    def clipped_sum(self, *args, **kwargs):
        clipped = self.right.clipped_sum(*args, **kwargs)
        self.calls += 1
        stream = self.pipeline.keys.stream("audit")
        stream.add_normal_(clipped.total, step=self.calls, scale=1.5 * clipped.sensitivity)
        return clipped


def test_a_right_run_starts():
    run = problem()
    proof = run.prove()
    assert proof.passed
    assert proof.std_charged == pytest.approx(1.5 * 0.7 / 40)
    assert len(list(run)) == 5


def test_run_with_noise_scaled_by_one_minus_a_refuses_to_start():
    run = problem()
    run.pipeline.mechanism = ScaledByOneMinusA(run.pipeline.mechanism, run.plan.method.observation.a)
    assert_refused(run, "std")


def test_run_with_noise_shared_between_tensors_refuses_to_start():
    run = problem()
    run.pipeline.mechanism = SharedBetweenTensors(run.pipeline.mechanism)
    assert_refused(run, "correlation of 0.weight with 2.weight")


def test_run_with_noise_added_once_per_micro_batch_refuses_to_start():
    run = problem()
    run.pipeline.engine = OncePerMicroBatch(run.pipeline.engine, run.pipeline)
    assert_refused(run, "std")


def assert_refused(run, named):
    before = run.flat.theta.clone()
    with pytest.raises(ReceiptError, match="The run is refused"):
        next(iter(run))
    assert any(named in check.name for check in run.receipt.checks if not check.passed)
    assert len(run.ledger) == 0
    assert torch.equal(run.flat.theta, before)


# ---- correlated noise ----


def correlated(strategy, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 40), nn.Tanh(), nn.Linear(40, 20), nn.Tanh(), nn.Linear(20, 40))
    data = {"x": torch.randn(400, 20), "y": torch.randint(0, 40, (400,))}

    def loss_fn(m, batch):
        return nn.functional.cross_entropy(m(batch["x"]), batch["y"], reduction="none")

    method = fiberdp.Method(mechanism=fiberdp.mechanisms.Banded(strategy=strategy, **options), update=fiberdp.optim.SGD(lr=0.1))
    plan = fiberdp.plan(method=method, num_examples=400, batch_size=40, steps=24, noise_multiplier=1.5, delta=1e-3, clip_norm=0.7)
    return plan.private(model, loss_fn, data, keys=fiberdp.Keys.seeded(1), micro_batch_size=10)


class Faulty:
    """The run's own gate with one thing wrong."""

    def __init__(self, right, fault):
        self.right, self.fault = right, fault

    def release(self, clipped, stream, step, state):
        return self.fault(self.right, clipped, stream, step, state)


def sensitivity_left_out(gate, *args):
    return replace(gate, matrix_sensitivity=1.0).release(*args)


def buffer_not_advanced(gate, clipped, stream, step, state):
    state["t"].fill_(step)
    return gate.release(clipped, stream, step, {"w": state["w"].clone(), "t": state["t"]})


def started_afresh(gate, clipped, stream, step, state):
    return gate.release(clipped, stream, step, gate.init(clipped.total) | {"t": torch.tensor(step)})


def coefficients_reversed(gate, *args):
    s = gate.strategy
    return replace(gate, strategy=replace(s, a=(s.a[0], *s.a[:0:-1]), b=(s.b[0], *s.b[:0:-1]))).release(*args)


def last_coefficient_dropped(gate, *args):
    s = gate.strategy
    a, b = ((*part[:-1], 0.0) if len(part) > 1 else part for part in (s.a, s.b))
    return replace(gate, strategy=replace(s, a=a, b=b)).release(*args)


def five_percent_too_little(gate, *args):
    return replace(gate, noise_multiplier=0.95 * gate.noise_multiplier).release(*args)


def white_of_the_same_std(gate, clipped, stream, step, state):
    noise = gate.noise(clipped.sensitivity, step)
    std = noise.std * math.sqrt(sum(k * k for k in noise.impulse_response(step + 1)))
    stream.add_normal_(clipped.total, step=step, scale=std * gate.batch_size)
    return Release(clipped.total.div_(gate.batch_size), noise)


def scale_left_out(gate, *args):
    return replace(gate, strategy=replace(gate.strategy, scale=None)).release(*args)


STRATEGIES = {"bandmf": {"bands": 8}, "bsr": {"bands": 8}, "bisr": {"bands": 8}, "lambda-cgd": {"decay": 0.9}, "blt": {}}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_right_correlated_noise_passes_and_leaves_the_runs_memory_alone(strategy):
    run = correlated(strategy, **STRATEGIES[strategy])
    proof = run.prove()
    gate = run.plan.mechanism
    assert proof.passed
    assert proof.std_charged == pytest.approx(1.5 * 0.7 * gate.matrix_sensitivity * (gate.strategy.scale or [1.0])[0] / 40)
    assert proof.steps >= gate.strategy.order + 3
    lags = [check.name for check in proof.checks if check.name.startswith("lag-")]
    assert lags == [f"lag-{k} correlation" for k in range(1, gate.strategy.order + 2)]
    assert int(run.pipeline.noise_memory["t"]) == 0
    assert not bool(run.pipeline.noise_memory["w"].any())
    assert len(list(run)) == 24


def test_a_large_model_is_driven_for_two_steps_more_than_the_bands():
    x = [torch.randn(60_000, generator=torch.Generator().manual_seed(t)) for t in range(12)]
    noise = Noise(1.0, b=(1.0, -0.5))
    a = noise_receipt(
        lambda t: x[t] - (0.5 * x[t - 1] if t else 0), std=1.0, tensors=[("a", slice(0, 60_000))], steps=3, charged=lambda t: noise
    )
    assert a.passed
    assert a.steps == 4
    filtered = noise_receipt(lambda t: x[t], std=1.0, tensors=[("a", slice(0, 60_000))], steps=3, charged=lambda t: noise)
    assert not filtered.passed


@pytest.mark.parametrize(
    ("strategy", "fault"),
    [
        ("bisr", sensitivity_left_out),
        ("lambda-cgd", sensitivity_left_out),
        ("blt", sensitivity_left_out),
        ("bandmf", buffer_not_advanced),
        ("lambda-cgd", buffer_not_advanced),
        ("blt", buffer_not_advanced),
        ("bisr", started_afresh),
        ("bandmf", coefficients_reversed),
        ("bisr", coefficients_reversed),
        ("bandmf", last_coefficient_dropped),
        ("bandmf", five_percent_too_little),
        ("blt", five_percent_too_little),
        ("bandmf", white_of_the_same_std),
        ("lambda-cgd", scale_left_out),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_wrong_correlated_noise_is_refused(strategy, fault):
    run = correlated(strategy, **STRATEGIES[strategy])
    run.pipeline.mechanism = Faulty(run.pipeline.mechanism, fault)
    assert_refused(run, "")


def test_std_charged_is_read_from_the_ledgers_event(monkeypatch):
    """A plan whose events name more noise than its gate adds is refused: what is charged is what counts."""
    run = problem()
    honest = type(run.plan.sampler).event
    monkeypatch.setattr(type(run.plan.sampler), "event", lambda self, sigma, step: honest(self, 1.1 * sigma, step))
    assert_refused(run, "std")
