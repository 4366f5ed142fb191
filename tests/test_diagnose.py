"""fiberdp diagnose: what it measures is there, what is planted is found, bad input is one line and leaves nothing."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn

import fiberdp
from fiberdp._random import Keys
from fiberdp.cli import main
from fiberdp.diagnostics import assumptions, attenuation, clamp, drift
from fiberdp.diagnostics.runs import Replica, subject
from fiberdp.filters import EMA, AlphaBeta, Innovation, Kalman, KalmanAuto, LowPass
from fiberdp.linear import NoiseVariance
from fiberdp.mechanisms import Banded
from fiberdp.pipeline import Pipeline
from fiberdp.recipes.recipe import Recipe, classification_loss


def rows(n, seed):
    generator = torch.Generator().manual_seed(seed)
    image = torch.randn(n, 6, generator=generator)
    return {"image": image, "label": (image[:, 0] > 0).long()}


def tiny(loss=classification_loss) -> Recipe:
    data = {"train": rows(300, 1), "heldout": rows(50, 2), "test": rows(50, 3)}
    return Recipe(
        name="tiny", task="", model="", data="", paper="", cpu_minutes=0, epsilon=1.0, clip_norm=1.0, batch_size=50, epochs=4,
        num_examples=300, options={"fiber": {"lr": 0.002}}, load=lambda data_dir: data, loss=loss,
        build=lambda: nn.Sequential(nn.Linear(6, 32), nn.Dropout(0.2), nn.Tanh(), nn.Linear(32, 2)),
    )  # fmt: skip


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    code = main(arguments)
    out, err = capsys.readouterr()
    return code, out, err


# drift


@dataclass(frozen=True, kw_only=True)
class Reversed(EMA):
    """The gain given to the wrong term."""

    def gains(self, t):
        return (1 - self.kappa,) if t else (1.0,)


@pytest.fixture(scope="module")
def drifted():
    torch.set_num_threads(1)
    filters, _ = drift.lineup()
    filters = {name: filters[name] for name in drift.RIVALS} | {
        "again": EMA(kappa=0.7),
        "reversed": Reversed(kappa=0.7),
        "kalman": Kalman(),
    }
    return drift.drift(dimension=512, filters=filters)


def test_drift_reproduces_tables_6_and_10(drifted):
    """All wins; best to 0.2 points (CV), 10 % or 6 points (RW); averages to 20 points or 10 %: the inference, not the paper's draws."""
    for row in drifted["rows"]:
        if row["filter"] == "innovation":
            wins, best, average = drift.PAPER[row["model"], row["epsilon"]]
            assert row["wins"] == wins
            assert (
                row["best"] == pytest.approx(best, abs=0.2) if row["model"] == "CV" else row["best"] == pytest.approx(best, rel=0.1, abs=6)
            )
            assert row["average"] == pytest.approx(average, rel=0.1, abs=20)


def test_drift_floor_is_the_ratio_of_the_two_noise_gains(drifted):
    """100 (1 - A(0.9)/A(0.1)) = -1508 % where noise is all there is; the MSE of 512 coordinates, 500 steps is known to about 1 %."""
    least = [c["improvement"] for c in drifted["improvements"] if (c["model"], c["filter"], c["epsilon"]) == ("RW", "innovation", 0.5)]
    assert np.min(least) == pytest.approx(100 * (1 - (1.1 / 1.3) / (0.1 / 1.9)), rel=0.03)


def test_drift_counts_ties_and_finds_a_filter_with_its_gain_reversed(drifted):
    """Under another name the same filter ties as often; reversed, it lags (7/3)/(3/7) times as far."""
    by = {(row["model"], row["epsilon"], row["filter"]): row for row in drifted["rows"]}
    for model, epsilon, _ in by:
        assert by[model, epsilon, "again"] == by[model, epsilon, "ema-0.7"] | {"filter": "again"}
    left = {(c["filter"], c["scale"]): 100 - c["improvement"] for c in drifted["improvements"] if (c["model"], c["epsilon"]) == ("CV", 8.0)}
    for scale in (0.1, 0.5, 1.0):
        assert left["reversed", scale] > 10 * left["again", scale]
    assert by["CV", 8.0, "reversed"]["ties_or_beats_better"] < by["CV", 8.0, "again"]["ties_or_beats_better"]
    assert all(row["wins"] == 0 == row["best"] for row in drifted["rows"] if row["filter"] == "ema")


def test_drift_error_is_the_mean_square_of_eq_80():
    s, noise = torch.randn(9, 2, 5), [0.1, 0.2]
    g = s + torch.randn(9, 2, 5)
    found, norms = drift.errors(fiberdp.filters.Identity(), s, g, noise, 1)
    assert torch.allclose(found, ((g - s) ** 2).mean(0))
    assert norms == pytest.approx((g - s)[:, 1].norm(dim=1).tolist())


def test_drift_line_up_is_the_registry():
    filters, left_out = drift.lineup()
    assert set(fiberdp.filters.FILTERS) <= set(filters) | set(left_out)
    assert "M" in left_out["lti"]


@pytest.mark.slow
def test_drift_kalman_auto_matches_the_better_rival_and_the_command_writes_its_files(capsys, tmp_path):
    """At least 6 of 7 configurations in each of the ten cells; half the steps and an eighth of the coordinates of the default."""
    pytest.importorskip("matplotlib")
    code, out, err = run(capsys, *f"diagnose drift --steps 250 --dimension 32 --json --out {tmp_path}/d".split())
    found = json.loads(out)
    assert (code, err) == (0, "")
    assert {path.name for path in (tmp_path / "d").iterdir()} == {"drift.json", "drift.md", "drift.png"}
    assert len(found["rows"]) == 10 * len(found["filters"])
    assert all({"model", "epsilon", "filter", "wins", "configurations", "best", "average", "median"} <= row.keys() for row in found["rows"])
    assert all(row["ties_or_beats_better"] >= 6 for row in found["rows"] if row["filter"] == "kalman_auto")
    page = (tmp_path / "d" / "drift.md").read_text()
    assert "-1225.59" in page
    assert json.loads((tmp_path / "d" / "drift.json").read_text())["rows"] == found["rows"]


# attenuation: 34 directions, 150 steps; SE of rho is 0.002 to 0.02, and the planted faults are 5 of them or more away

FILTERS = {
    "innovation 0.3": (Innovation(omega=0.3), None, 17 / 31),
    "innovation 0.6": (Innovation(omega=0.6), None, 7 / 11),
    "innovation 0.9": (Innovation(omega=0.9), None, 11 / 13),
    "ema 0.7": (EMA(kappa=0.7), None, 7 / 13),
    "low-pass": (LowPass(b=(0.1,), a=(1.0, -0.9)), None, 1 / 19),
    "banded": (Innovation(omega=0.9), Banded(bands=4), None),
}


@pytest.mark.parametrize("case", FILTERS)
def test_attenuation_measured_in_training_is_the_declared_one_figure_6(case):
    """4 standard errors: a false alarm in 16,000, were they normal; seeds are fixed."""
    filter, mechanism, A = FILTERS[case]
    warm_up = attenuation.settling(filter)
    found = attenuation.attenuation(recipe=tiny(), filter=filter, mechanism=mechanism, steps=warm_up + 150, projections=128)
    assert abs(found["deviation"]) < 4
    assert found["deviation"] == (found["rho"] - found["A"]) / found["standard_error"]
    assert A is None or found["A"] == pytest.approx(A, rel=1e-9)
    assert found["noise_share"] == pytest.approx(1, abs=0.06)
    assert found.keys() >= {"filter", "mechanism", "rho", "A", "standard_error", "noise_share", "projections", "steps"}


def test_attenuation_of_banded_noise_is_not_that_of_white_noise():
    """Sum (h*k)^2 / Sum k^2, by convolution."""
    noise = subject(
        tiny(), fiberdp.Method(mechanism=Banded(bands=4), update=fiberdp.method("fiber").update), steps=80, epsilon=None, data=None
    )
    noise = noise.plan.charged_noise(0)
    k, h = np.array(noise.impulse_response(400)), Innovation().system(None).impulse_response(400)
    found = attenuation.attenuation(recipe=tiny(), mechanism=Banded(bands=4), steps=80, projections=16)
    assert found["A"] == pytest.approx(np.sum(np.convolve(h, k)[:400] ** 2) / np.sum(k**2), rel=1e-6)
    assert abs(found["A"] - 11 / 13) > 0.05


@pytest.mark.parametrize(("ran", "said"), [(Innovation(), Innovation(omega=0.75)), (EMA(kappa=0.7), EMA(kappa=0.6)), (Innovation(), EMA())])
def test_attenuation_finds_a_filter_that_is_not_the_declared_one(ran, said):
    """A differs by 0.12 or more, SE is about 0.003: 5 standard errors with a power of nearly 1."""
    found = attenuation.attenuation(recipe=tiny(), filter=ran, declared=said, steps=170, projections=128)
    assert abs(found["deviation"]) > 5
    assert not found["passed"]
    assert len(found["warnings"]) == 1


def test_attenuation_of_a_filter_that_learns_uses_the_gains_that_were_used():
    found = attenuation.attenuation(recipe=tiny(), filter=KalmanAuto(samples=64), steps=250, epsilon=0.5, projections=128)
    assert abs(found["deviation"]) < 4
    assert found["gains_differ"]


def test_attenuation_standard_error_is_the_spread_of_the_ratio():
    """2,000 repetitions of 50 pairs: the mean SE^2 is the variance of the ratio to 10 % (its own relative error is 3 %)."""
    rng = np.random.default_rng(0)
    values = []
    for _ in range(2000):
        x = rng.chisquare(40, 50)
        values.append(attenuation.ratio(0.5 * x + rng.normal(0, 2, 50), x))
    rho, se = np.array(values).T
    assert np.mean(se**2) == pytest.approx(rho.var(), rel=0.1)
    assert rho.mean() == pytest.approx(0.5, abs=0.002)


def test_settling_is_when_the_exact_variance_has_settled():
    for filter in (Innovation(omega=0.05), LowPass(), AlphaBeta()):
        warm_up, variance, A = attenuation.settling(filter), NoiseVariance(), filter.system(None).noise_gain()
        after = [variance.update(filter.system(t), fiberdp.types.Noise(1.0)) / A for t in range(warm_up + 300)][warm_up:]
        assert np.abs(np.array(after) - 1).max() <= 0.01


def test_replicas_share_everything_but_the_noise():
    keys = Keys.seeded(0)
    other = Replica(keys.key, keys.kind, Keys.seeded(1))
    for name in ("data", "model", "augmentation"):
        assert torch.equal(keys.stream(name).bits(3, 0, 8), other.stream(name).bits(3, 0, 8))
    assert not torch.equal(keys.stream("noise").bits(3, 0, 8), other.stream("noise").bits(3, 0, 8))


# assumptions


def test_assumptions_of_a_run_in_which_noise_rules_hold_proposition_c_3():
    found = assumptions.assumptions(recipe=tiny(), steps=120, seeds=2, projections=8)
    assert [row["seed"] for row in found["rows"]] == [0, 1]
    for name in ("rho_sn", "cross_term_ratio", "cv"):
        assert found[name].keys() == {"mean", "std"}
    assert found["cross_term_ratio"]["mean"] < 0.1
    assert found["noise_share"] == pytest.approx(1, abs=0.1)
    assert found["warnings"] == []
    assert "noise" in found["not_for_release"]


def test_assumptions_warn_where_the_noise_is_not_the_one_that_was_added(monkeypatch):
    """Noise of another stream: s holds -n, and the cross term is -1 in expectation, +- 0.15 for 105 steps."""

    def other(self, step, memory):
        return self.keys.stream("audit").normal(step, 0, self.flat.numel) * self.plan.charged_noise(step).std

    monkeypatch.setattr(Pipeline, "secret_noise", other)
    found = assumptions.assumptions(recipe=tiny(), steps=120, seeds=1, projections=8)
    assert found["cross_term"]["mean"] < -0.7
    (warning,) = found["warnings"]
    assert "Reduce omega, raise eps_v" in warning


def test_assumptions_statistics_by_hand():
    """s = n/5 + independent: cross term 0.2, correlation 0.2/sqrt(0.04 + 1); 100,000 steps, so to 0.01 within 3 standard errors."""
    rng = np.random.default_rng(1)
    n = rng.normal(size=(100_000, 2))
    found = assumptions.statistics(n + 0.2 * n + rng.normal(size=n.shape), n, 1000)
    assert found["cross_term_ratio"]["mean"] == pytest.approx(0.2, abs=0.01)
    assert found["rho_sn"]["mean"] == pytest.approx(0.2 / 1.04**0.5, abs=0.01)
    assert found["cv"]["mean"] == pytest.approx((2 / 1000) ** 0.5, rel=0.2)


@pytest.mark.parametrize("name", ["fiber", "mf-dp-ftrl"])
def test_secret_noise_is_what_the_release_carries(name):
    """Losses times 0: the release is noise alone, white or correlated, bit for bit."""
    method = fiberdp.method(name, **({"bands": 4} if name == "mf-dp-ftrl" else {}))
    run = subject(tiny(lambda m, b: 0 * classification_loss(m, b)), method, steps=8, epsilon=None, data=None).make(Keys.seeded(0))
    memory, heard = run.plan.mechanism.init(run.flat.theta), []
    run.heard = lambda release: heard.append(release.value.clone())
    for step in run:
        assert torch.equal(run.pipeline.secret_noise(step.step, memory), heard[-1])
    assert heard[0].abs().max() > 0


# clamp


def test_clamp_mass_rises_to_one_with_the_floor_figure_13():
    found = clamp.clamp(recipe=tiny(), steps=16, floors=(1e-8, 1e3, "auto"))
    assert [row["eps_v"] for row in found["rows"]] == [1e-8, 1e3, "auto"]
    assert all(row.keys() == {"eps_v", "clamp_mass", "final", "heldout"} for row in found["rows"])
    assert found["rows"][0]["clamp_mass"] < 1
    assert found["rows"][1]["clamp_mass"] == found["rows"][1]["final"] == 1
    assert found["rows"][0]["clamp_mass"] == pytest.approx(np.mean(found["series"]["1e-08"][2:]))


def test_metrics_and_record_hold_the_clamp_mass_and_its_warning(tmp_path):
    record = fiberdp.fit(tiny(), method="fiber", options={"eps_v": 1e3}, steps=6, seed=0, out=tmp_path / "d")
    lines = [json.loads(line) for line in (tmp_path / "d" / "metrics.jsonl").read_text().splitlines()]
    assert record["clamp_mass"] == lines[-1]["clamp_mass"] == 1
    (warning,) = record["warnings"]
    assert "clamp mass 1.00" in warning
    assert "\n" not in warning
    without = fiberdp.fit(tiny(), method="dp-adamw", steps=6, seed=0)
    assert (without["clamp_mass"], without["warnings"]) == (None, [])


def test_train_prints_the_warning_on_stderr(capsys):
    pytest.importorskip("sklearn")
    code, out, err = run(capsys, "train", "digits", "--eps-v", "1000", "--seed", "0", "--steps", "3", "--json")
    assert code == 0
    assert err.startswith("fiberdp: warning: clamp mass 1.00")
    assert json.loads(out)["warnings"]


# the command line


@pytest.mark.parametrize(
    ("name", "options", "keys"),
    [
        ("attenuation", "--omega 0.6 --steps 60 --projections 16", {"filter", "rho", "A", "standard_error", "noise_share"}),
        ("assumptions", "--steps 40 --seeds 1 --projections 4", {"rho_sn", "cross_term_ratio", "cv", "rows", "warnings"}),
        ("clamp", "--steps 3", {"rows"}),
    ],
)  # fmt: skip
def test_diagnose_prints_json_and_writes_three_files(capsys, tmp_path, name, options, keys):
    pytest.importorskip("sklearn")
    pytest.importorskip("matplotlib")
    code, out, _ = run(capsys, *f"diagnose {name} {options} --json --out {tmp_path}/d".split())
    found = json.loads(out)
    assert code == 0
    assert found.keys() >= keys
    assert {path.name for path in (tmp_path / "d").iterdir()} == {f"{name}.json", f"{name}.md", f"{name}.png"}
    assert f"![{name}]({name}.png)" in (tmp_path / "d" / f"{name}.md").read_text()
    assert (tmp_path / "d" / f"{name}.png").stat().st_size > 10_000


def test_diagnose_for_people_shows_the_papers_numbers(capsys):
    pytest.importorskip("sklearn")
    code, out, err = run(capsys, "diagnose", "clamp", "--steps", "3")
    assert (code, err) == (0, "")
    assert "< 0.01" in out
    assert "> 0.8" in out


BAD = {
    "filter": ("attenuation --filter nope", "filter='nope'"),
    "option of another filter": ("attenuation --filter ema --omega 0.5", "filter ema has no option omega"),
    "filter of matrices": ("attenuation --filter lti", "filter lti without M"),
    "omega": ("attenuation --omega 0", "omega=0.0"),
    "mechanism": ("attenuation --mechanism nope", "mechanism='nope'"),
    "bands of white noise": ("attenuation --bands 3", "bands=3"),
    "too many bands": ("attenuation --mechanism banded --bands 50", "bands=50"),
    "too few steps": ("attenuation --steps 30", "steps=30"),
    "one direction": ("attenuation --projections 1", "projections=1"),
    "recipe": ("clamp --recipe nope", "recipe='nope'"),
    "epsilon": ("clamp --epsilon 0", "epsilon=0.0"),
    "one step": ("clamp --steps 1", "steps=1"),
    "seeds": ("assumptions --seeds 0", "seeds=0"),
    "short": ("assumptions --steps 8", "steps=8"),
    "eps_v": ("assumptions --eps-v=-1", "eps_v=-1.0"),
    "drift steps": ("drift --steps 1", "steps=1"),
    "drift dimension": ("drift --dimension 1", "dimension=1"),
    "drift seed": ("drift --seed=-1", "seed=-1"),
    "unknown": ("nonsense", "nonsense"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_of_diagnose_is_one_line_exit_2_nothing_written(capsys, tmp_path, monkeypatch, case):
    pytest.importorskip("sklearn")
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    line, named = BAD[case]
    code, out, err = run(capsys, "diagnose", *line.split(), *([] if case == "unknown" else ["--out", "d"]))
    assert (code, out) == (2, "")
    assert err.startswith("fiberdp: ")
    assert err.count("\n") == 1
    assert named in err
    assert not list(tmp_path.iterdir())


def test_diagnose_refuses_a_folder_that_holds_something_and_one_that_is_a_file(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    (tmp_path / "kept").write_text("kept")
    for out_option in (tmp_path, tmp_path / "kept"):
        code, out, err = run(capsys, "diagnose", "drift", "--out", str(out_option))
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert "new or empty folder" in err
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_without_matplotlib_only_out_is_refused(capsys, tmp_path, monkeypatch):
    pytest.importorskip("sklearn")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, out, err = run(capsys, "diagnose", "clamp", "--steps", "2", "--out", str(tmp_path / "d"))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "pip install fiberdp[recipes]" in err
    assert not list(tmp_path.iterdir())
    assert run(capsys, "diagnose", "clamp", "--steps", "2", "--json")[0] == 0
