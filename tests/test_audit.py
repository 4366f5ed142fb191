"""The audit stays below the account of a right run and above it for each planted defect.

Defects are planted here, with the package's own proofs (receipt, engine against oracle) switched off: the audit must find them alone.
"""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import fiberdp
from fiberdp import trainer
from fiberdp._random import Keys, Stream
from fiberdp.cli import main
from fiberdp.diagnostics.audit import audit, epsilon_lower, random_canaries
from fiberdp.engines import ghost
from fiberdp.mechanisms import Gaussian
from fiberdp.sampling import Poisson
from fiberdp.types import ClippedSum, Probe

M, N, OTHER = 1000, 200, 20  # canaries, other rows, coordinates that the other rows use


class Lines(nn.Module):
    """One or two rows of weights, one coordinate a canary: <g_t, c_i> holds no other canary."""

    def __init__(self, layers: int = 1) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(M + OTHER, 1, bias=False) for _ in range(layers)])

    def forward(self, x):
        return sum(layer(x) for layer in self.layers).squeeze(-1)


def linear(model, batch):
    return model(batch["x"])


def wave(model, batch):
    """Its gradient has a sign of its own at every point: built against points that are clipped apart."""
    return torch.sin(1e4 * model(batch["x"]))


def audited(loss=linear, *, method="dp-sgd", options=None, size=1.0, q=0.2, layers=1, attack="sum", seed=0, **choices):
    """size: the norm of a canary's input.  epsilon = 1, C = 1, 50 steps."""
    torch.manual_seed(seed)
    others = {"x": torch.cat([torch.zeros(N, M), torch.randn(N, OTHER)], 1).double()}
    canaries = {"x": torch.cat([size * torch.eye(M), torch.zeros(M, OTHER)], 1).double()}
    chosen = fiberdp.method(method, lr=0.01, **(options or {}))
    agreed = fiberdp.plan(
        method=chosen, num_examples=N + M, batch_size=round(q * (N + M)), steps=50, epsilon=1.0, delta=1e-8, clip_norm=1.0, **choices
    )
    return audit(agreed, Lines(layers).double(), loss, others, canaries, attack=attack, keys=Keys.seeded(seed))


@pytest.fixture
def unproved(monkeypatch):
    monkeypatch.setattr(trainer.Run, "prove", lambda run: None)
    monkeypatch.setattr(trainer, "prove", lambda *arguments: None)
    return monkeypatch


@pytest.mark.parametrize("loss", [linear, wave])
@pytest.mark.parametrize(
    ("method", "options"), [("dp-sgd", {}), ("fiber", {}), ("disk", {}), ("dp-adamw", {}), ("doppler", {}), ("mf-dp-ftrl", {"bands": 4})]
)
def test_a_right_run_stays_below_its_account(method, options, loss):
    found = audited(loss, method=method, options=options)
    assert found.agrees
    assert found.epsilon_accounted == pytest.approx(1, rel=1e-3)
    assert (found.canaries, found.guesses) == (M, 100)


def test_noise_scaled_by_one_minus_a(unproved):
    """a = 0.9.  Any canary serves."""
    release = Gaussian.release

    def less(self, *arguments):
        return release(replace(self, noise_multiplier=0.1 * self.noise_multiplier), *arguments)

    unproved.setattr(Gaussian, "release", less)
    found = audited()
    assert found.epsilon_lower > found.epsilon_accounted


def test_clip_skipped_for_one_layer(unproved):
    """Canaries with large inputs: their gradient is 50 C in each of two layers."""
    factors_of = ghost.clip_factors

    def skipping(squares, names, clip, dtype):
        factors, norms = factors_of(squares, names, clip, dtype)
        factors[list(names).index("layers.1.weight")] = 1.0
        return factors, norms

    assert audited(size=50.0, layers=2).agrees
    unproved.setattr(ghost, "clip_factors", skipping)
    found = audited(size=50.0, layers=2)
    assert found.epsilon_lower > found.epsilon_accounted


def test_each_point_clipped_apart_at_a_above_one(unproved):
    """a = 18: the sensitivity is 35 C for an example whose gradients at the two points have opposite signs, as `wave`'s often have."""
    options = {"kappa": 0.1, "gamma": 0.5, "allow_extrapolation": True}
    whole = ghost.GhostEngine.clipped_sum

    def apart(self, probes, d, batch, clip, *, out=None, **rest):
        if d is None or rest.get("tap") is not None:  # the attacker's own computation is right
            return whole(self, probes, d, batch, clip, out=out, **rest)
        total = torch.zeros_like(self.flat.theta) if out is None else out
        for probe in probes:
            total += probe.weight * whole(self, [Probe(1.0, probe.lookahead)], d, batch, clip, **rest).total
        return ClippedSum(total, clip.sensitivity)

    assert audited(wave, method="fiber", options=options).agrees
    unproved.setattr(ghost.GhostEngine, "clipped_sum", apart)
    found = audited(wave, method="fiber", options=options)
    assert found.epsilon_lower > found.epsilon_accounted


def test_noise_seeded_twice_the_same(unproved):
    """Steps 2k and 2k + 1 draw one vector.  Any canary serves; the attack takes differences, in which that noise is gone."""
    draw = Stream.add_normal_

    def twice(self, out, *, step, **rest):
        return draw(self, out, step=step - step % 2, **rest)

    assert audited(attack="differences").agrees
    unproved.setattr(Stream, "add_normal_", twice)
    found = audited(attack="differences")
    assert found.epsilon_lower > found.epsilon_accounted


def test_one_example_used_in_every_batch(unproved):
    """Every canary is such an example, so that one run shows it: charged at q = 0.05, used at every step."""
    indices = Poisson.indices

    def always(self, *arguments):
        return torch.cat([torch.arange(N, N + M), indices(self, *arguments)]).unique()

    assert audited(q=0.05).agrees
    unproved.setattr(Poisson, "indices", always)
    found = audited(q=0.05)
    assert found.epsilon_lower > found.epsilon_accounted


def test_a_recipe_is_audited_above_a_fifth_and_below_what_it_is_charged(capsys):
    """digits at epsilon = 1, 10,000 canaries: in simulations with the ideal score 0.29 to 0.48 (10 and 90 %)."""
    pytest.importorskip("sklearn")
    assert main(["audit", "digits", "--epsilon", "1", "--seed", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["epsilon_accounted"] == pytest.approx(1, rel=1e-3)
    assert 0.2 < found["epsilon_lower"] < 1
    assert found["canaries"] >= 1000


def test_the_bound_fails_as_rarely_as_it_says_and_is_not_idle():
    """Randomised response with epsilon = 1, the hardest case: of 1,000 draws at most 5 % + 3 SE exceed 1, and the median is above 0.7."""
    rng = np.random.default_rng(0)
    right = rng.binomial(500, 1 / (1 + np.exp(-1)), 1000)
    bounds = {v: epsilon_lower(canaries=500, guesses=500, correct=int(v), delta=0.0) for v in set(right)}
    found = np.array([bounds[v] for v in right])
    assert (found > 1).mean() < 0.05 + 3 * np.sqrt(0.05 * 0.95 / 1000)
    assert np.median(found) > 0.7


def test_delta_lowers_the_bound_and_more_right_guesses_raise_it():
    bounds = [epsilon_lower(canaries=1000, guesses=100, correct=80, delta=delta) for delta in (0.0, 1e-7, 1e-5, 1e-3)]
    assert bounds == sorted(bounds, reverse=True)
    assert bounds[0] > bounds[2] > bounds[3] == 0
    by_correct = [epsilon_lower(canaries=1000, guesses=100, correct=v, delta=1e-8) for v in range(50, 101)]
    assert by_correct == sorted(by_correct)
    assert by_correct[-1] > 3


def test_canaries_are_coins_of_their_own_stream_and_half_are_there():
    present = Keys.seeded(0).stream("audit").bits(0, 0, 10_000) >> 63 != 0
    assert 4800 < int(present.sum()) < 5200


def test_canaries_have_the_structure_of_the_rows():
    like = {"image": torch.zeros(5, 1, 4, 4, dtype=torch.uint8), "x": torch.zeros(5, 3), "label": torch.tensor([0, 4, 2, 9, 1])}
    made = random_canaries(like, 400, seed=0)
    assert {k: v.dtype for k, v in made.items()} == {k: v.dtype for k, v in like.items()}
    assert set(made["image"].unique().tolist()) == {0, 255}
    assert set(made["label"].tolist()) == set(range(10))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["digits", "--canaries", "3"], "canaries"),
        (["digits", "--guesses", "7"], "must be even"),
        (["digits", "--attack", "x"], "sum, differences"),
        (["digits", "--confidence", "1"], "confidence"),
        (["nothing"], "recipe"),
    ],
)
def test_bad_input_is_one_line(arguments, message, capsys):
    pytest.importorskip("sklearn")
    assert main(["audit", *arguments]) == 2
    out, err = capsys.readouterr()
    assert message in err
    assert out == ""
    assert err.count("\n") == 1


def test_a_finished_run_is_audited_with_its_own_sigma(tmp_path, capsys):
    pytest.importorskip("sklearn")
    assert main(["train", "digits", "--steps", "4", "--out", str(tmp_path / "run"), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert main(["audit", str(tmp_path / "run"), "--canaries", "100", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    privacy = record["privacy"]
    charged = fiberdp.account(
        num_examples=1400, batch_size=276, steps=4, delta=found["delta"], noise_multiplier=privacy["noise_multiplier"]
    )
    assert found["epsilon_accounted"] == pytest.approx(charged["epsilon"], rel=1e-6)
    assert main(["audit", str(tmp_path / "run"), "--epsilon", "1"]) == 2
    assert "is a run" in capsys.readouterr().err
