"""fiberdp bench --recipe: what a method costs beside what it brings (Tables 12 and 13)."""

from __future__ import annotations

import json

import pytest

from fiberdp.bench import resources as module
from fiberdp.bench.clock import Timing
from fiberdp.bench.resources import evaluations, resources
from fiberdp.cli import main
from fiberdp.methods import METHODS

COMPARISON = {
    "settings": {"recipe": "digits"},
    "rows": [{"method": "dp-adamw", "epsilon": 1.0, "mean": 0.4857}, {"method": "fiber", "epsilon": 1.0, "mean": 0.7087}],
}


def timed(functions, rounds, progress):
    """Every method takes its step; the times are those of the paper's Table 12 at epsilon = 1."""
    for step in functions.values():
        step()
    seconds = {"dp-adamw": 369.1, "fiber": 659.4}
    return {name: Timing(seconds[name], seconds[name] / 369.1, 0.0) for name in functions}


def test_efficiency_is_that_of_table_13_from_the_figures_of_table_12(monkeypatch):
    """Table 13: DP-AdamW 48.57 % in 369.1 s, FiBeR 70.87 % in 659.4 s: 1.786x, +22.30 points, 28.37 points a unit of overhead."""
    monkeypatch.setattr(module, "interleaved", timed)
    told = resources("digits", ["dp-adamw", "fiber"], accuracies=COMPARISON, rounds=1, memory=False)
    baseline, fiber = told["rows"]
    assert told["baseline"] == "dp-adamw"
    assert fiber["overhead"] == pytest.approx(1.786, abs=1e-3)
    (result,) = fiber["results"]
    assert result["gain"] == pytest.approx(22.30)
    assert result["efficiency"] == pytest.approx(28.37, abs=0.02)
    assert baseline["results"] == [{"epsilon": 1.0, "accuracy": 0.4857, "gain": 0.0, "efficiency": None}]
    assert (fiber["batch_size"], fiber["steps"]) == (256, 150)
    assert fiber["examples_per_second"] == pytest.approx(256 / 659.4)
    assert fiber["run_seconds"] == pytest.approx(150 * 659.4)


def test_every_method_says_at_how_many_points_it_evaluates():
    found = {name: evaluations(name) for name in METHODS}
    assert {name for name, at in found.items() if at == "one point"} == {"dp-sgd", "dp-adamw", "dp-adambc", "doppler", "mf-dp-ftrl"}
    assert {name for name, at in found.items() if at == "look-ahead"} == {"fiber-lookahead", "fiber-plus"}


def test_on_the_command_line_with_memory_and_the_accuracies(tmp_path, capsys):
    (tmp_path / "comparison.json").write_text(json.dumps(COMPARISON))
    line = ["bench", "--recipe", "digits", "--methods", "dp-adamw,fiber", "--rounds", "1", "--out", str(tmp_path / "r.json")]
    assert main([*line, "--accuracies", str(tmp_path / "comparison.json")]) == 0
    told = capsys.readouterr().out
    assert "two points" in told
    assert "+22.30" in told
    saved = json.loads((tmp_path / "r.json").read_text())
    assert all(row["step_seconds"] > 0 and row["overhead"] > 0 for row in saved["rows"])
    if module.RESET.exists():
        assert all(0 < row["peak_mib"] < 500 for row in saved["rows"])


@pytest.mark.parametrize(
    ("arguments", "named"), [("nope", "recipe"), ("digits --methods fiber,nope", "nope"), ("mnist-cnn --accuracies C", "of digits")]
)
def test_bad_input_is_one_line_and_exit_2(arguments, named, tmp_path, capsys):
    (tmp_path / "comparison.json").write_text(json.dumps(COMPARISON))
    assert main(["bench", "--recipe", *arguments.replace("C", str(tmp_path / "comparison.json")).split()]) == 2
    told = capsys.readouterr()
    assert (told.out, told.err.count("\n")) == ("", 1)
    assert named in told.err
