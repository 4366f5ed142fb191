"""fiberdp compare: the same seeds for every method, intervals that are right, runs that are kept and resumed."""

from __future__ import annotations

import csv
import json
import random
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

import fiberdp
from fiberdp.cli import main
from fiberdp.comparison import compare
from fiberdp.intervals import paired, summary
from fiberdp.recipes import recipe_named

RESULTS = Path(__file__).parent.parent / "results"


def test_interval_by_hand():
    """t_{0.975, 2} = 4.302653: 1, 2, 6 has mean 3, std sqrt(7), half width 4.302653 sqrt(7/3)."""
    found = summary([1.0, 2.0, 6.0])
    assert (found["n"], found["mean"]) == (3, 3.0)
    assert found["std"] == pytest.approx(7**0.5)
    assert found["ci95"] == pytest.approx([3 - 6.572411, 3 + 6.572411], abs=1e-5)
    assert summary([0.5]) == {"n": 1, "mean": 0.5, "std": None, "ci95": None}


def test_an_interval_holds_the_mean_in_95_of_100_draws():
    """2,000 draws of 3 normals; 94.1 to 95.9 % within two standard errors.  A normal quantile in the place of t's gives 81 %."""
    rng, held, narrow = random.Random(0), 0, 0
    for _ in range(2000):
        found = summary([rng.gauss(0.3, 2.0) for _ in range(3)])
        low, high = found["ci95"]
        held += low <= 0.3 <= high
        narrow += abs(found["mean"] - 0.3) <= 1.96 * found["std"] / 3**0.5
    assert 0.941 < held / 2000 < 0.959
    assert narrow / 2000 < 0.85


def test_paired_differences_lose_what_the_runs_share():
    shared = [0.90, 0.95, 0.85]
    found = paired([x + 0.01 for x in shared], shared)
    assert found["mean"] == pytest.approx(0.01)
    assert found["ci95"] == pytest.approx([0.01, 0.01])
    with pytest.raises(ValueError, match="zip"):
        paired([1.0], [1.0, 2.0])


class Heard:
    def __init__(self) -> None:
        self.all = []

    def planned(self, done, total):
        self.all.append(("planned", done, total))

    def began(self, name, steps):
        self.all.append(("began", name, steps))

    def stepped(self, name, step):
        self.all.append(("stepped", name, step))

    def ended(self, name, record):
        self.all.append(("ended", name))


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    folder, heard = tmp_path_factory.mktemp("compared") / "out", Heard()
    result = compare("digits", methods=["fiber", "dp-sgd"], epsilons=[2.0], seeds=2, steps=4, out=folder, workers=2, observer=heard)
    return folder, result, heard


def test_rows_are_those_of_the_runs_and_files_say_the_same(compared):
    folder, result, heard = compared
    assert [(row["method"], row["epsilon"], row["n"]) for row in result["rows"]] == [("fiber", 2.0, 2), ("dp-sgd", 2.0, 2)]
    for row in result["rows"]:
        records = [json.loads((folder / "runs" / f"{row['method']}-eps2-seed{seed}" / "record.json").read_text()) for seed in (0, 1)]
        assert row["accuracies"] == [record["result"]["test"] for record in records]
        assert all(record["receipt"]["passed"] and 1.9 < record["privacy"]["epsilon"] <= 2 for record in records)
        assert {"mean", "std", "ci95", "trials"} <= set(row)
    first, second = result["rows"]
    (difference,) = result["differences"]
    assert difference == {"method": "dp-sgd", "against": "fiber", "epsilon": 2.0} | paired(second["accuracies"], first["accuracies"])
    saved = json.loads((folder / "comparison.json").read_text())
    assert saved["rows"] == result["rows"]
    lines = list(csv.DictReader((folder / "comparison.csv").open()))
    assert [float(line["mean"]) for line in lines] == [row["mean"] for row in result["rows"]]
    assert f"| {100 * first['mean']:.2f} ± {100 * first['std']:.2f} |" in (folder / "comparison.md").read_text()
    assert heard.all[0] == ("planned", 0, 4)
    assert Counter(what for what, *_ in heard.all)["ended"] == 4
    assert ("began", "fiber-eps2-seed0", 4) in heard.all


def test_a_run_of_the_comparison_is_that_of_fit(compared):
    folder, _, _ = compared
    record = json.loads((folder / "runs" / "fiber-eps2-seed1" / "record.json").read_text())
    alone = fiberdp.fit("digits", method="fiber", epsilon=2.0, seed=1, steps=4)
    assert record["result"] == alone["result"]
    assert record["privacy"] == alone["privacy"]


def test_it_goes_on_where_it_stopped_and_takes_more(compared, tmp_path):
    """One run lost its record, as if it had been killed, another was never begun: two are trained, and the table is the same."""
    folder, result, _ = compared
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    (copy / "runs" / "fiber-eps2-seed0" / "record.json").unlink()
    shutil.rmtree(copy / "runs" / "dp-sgd-eps2-seed1")
    heard = Heard()
    again = compare("digits", methods=["fiber", "dp-sgd"], epsilons=[2.0], seeds=2, steps=4, out=copy, workers=1, observer=heard)
    assert again == result
    assert heard.all[0] == ("planned", 2, 4)
    assert {name for what, name, *_ in heard.all if what == "ended"} == {"fiber-eps2-seed0", "dp-sgd-eps2-seed1"}


def test_other_settings_are_another_comparison(compared):
    folder, _, _ = compared
    with pytest.raises(ValueError, match=r"steps=5.* was begun with 4") as error:
        compare("digits", methods=["fiber"], epsilons=[2.0], seeds=1, steps=5, out=folder)
    assert "\n" not in str(error.value)


def test_unequal_tuning_is_told_and_equal_tuning_is_not(compared):
    _, result, _ = compared
    assert result["warnings"] == []  # 7 trials each
    assert [row["trials"] for row in result["rows"]] == [7, 7]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("--methods fiber,nope", "nope"), ("--methods fiber,fiber", "fiber,fiber"), ("--epsilons 1,x", "1,x"), ("--epsilons -1", "-1"),
        ("--seeds 0", "seeds=0"), ("--workers 0", "workers=0"), ("--epochs 1 --steps 2", "epochs=1"), ("--clip-norm 0", "clip_norm"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line_and_exit_2(arguments, named, capsys, tmp_path):
    out = tmp_path / "out"
    assert main(["compare", "digits", "--methods", "fiber", "--out", str(out), *arguments.split()]) == 2
    told = capsys.readouterr()
    assert (told.out, told.err.count("\n")) == ("", 1)
    assert named in told.err
    assert not list(out.glob("runs/*"))


@pytest.mark.parametrize("recipe", ["digits", "mnist-cnn"])
def test_trials_of_a_recipe_are_those_in_the_committed_files(recipe):
    """Every trial on held-out rows: the learning rates of results/*-tuning.jsonl and the search's."""
    tuning = [json.loads(line)["method"] for line in (RESULTS / f"{recipe}-tuning.jsonl").read_text().splitlines()]
    search = RESULTS / ("digits-search.jsonl" if recipe == "digits" else f"search/{recipe}.jsonl")
    specs = [json.loads(line)["spec"].split()[0].replace("fiber-lookahead", "fiber-plus") for line in search.read_text().splitlines()]
    assert recipe_named(recipe).trials == dict(Counter(tuning + specs))


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux's /proc")
def test_workers_end_with_their_parent(tmp_path):
    """A killed comparison leaves no run behind that goes on and holds its folder."""
    line = [sys.executable, "-m", "fiberdp", "compare", "digits", "--methods", "dp-sgd", "--epochs", "5000", "--seeds", "1"]
    process = subprocess.Popen(
        [*line, "--workers", "1", "--out", str(tmp_path / "c")], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    begun = tmp_path / "c" / "runs" / "dp-sgd-eps4-seed0" / "ledger.jsonl"
    children: set[str] = set()
    for _ in range(600):
        if begun.exists():
            children = {pid for task in Path(f"/proc/{process.pid}/task").iterdir() for pid in (task / "children").read_text().split()}
            break
        time.sleep(0.1)
    assert children
    process.kill()
    process.wait()
    for _ in range(100):
        left = [pid for pid in children if Path(f"/proc/{pid}").exists() and " Z " not in Path(f"/proc/{pid}/stat").read_text()]
        if not left:
            break
        time.sleep(0.1)
    assert not left


def test_one_call_tunes_and_compares(tmp_path):
    """With trials, every method is swept first, and trained with what was best on held-out rows."""
    out = tmp_path / "table"
    result = compare("digits", methods=["dp-sgd", "dp-adamw"], epsilons=[2.0], seeds=1, steps=2, trials=4, out=out, workers=2)
    assert [row["trials"] for row in result["rows"]] == [4, 4]
    assert result["warnings"] == []
    for row in result["rows"]:
        found = json.loads((out / "sweeps" / f"{row['method']}-eps2" / "sweep.json").read_text())
        best = max(found["trials"], key=lambda trial: trial["heldout"])["options"]
        record = json.loads((out / "runs" / f"{row['method']}-eps2-seed0" / "record.json").read_text())
        assert record["config"]["plan"]["method"]["update"]["lr"] == best["lr"]
    for wrong in ({"trials": 4}, {"trials": 3, "out": tmp_path / "x"}, {"trials": 4, "tuned": [{}], "out": tmp_path / "x"}):
        with pytest.raises(ValueError, match="trials=") as error:
            compare("digits", methods=["dp-sgd"], epsilons=[2.0], **wrong)
        assert "\n" not in str(error.value)
    assert not (tmp_path / "x").exists()


def test_copies_of_examples_reach_the_runs_of_a_comparison(tmp_path, capsys):
    line = ["compare", "digits", "--methods", "dp-sgd", "--seeds", "1", "--steps", "2", "--multiplicity", "2", "--workers", "1", "--json"]
    assert main([*line, "--out", str(tmp_path / "c")]) == 0
    assert json.loads(capsys.readouterr().out)["settings"]["multiplicity"] == 2
    (path,) = (tmp_path / "c" / "runs").glob("*/record.json")
    assert json.loads(path.read_text())["config"]["plan"]["method"]["augmentation"]["multiplicity"] == 2


def test_settings_that_are_parts_of_the_method_are_no_other_method(tmp_path):
    """Called again, a comparison with each of them finds its runs; a run of another augmentation is still refused."""
    settings = {"multiplicity": 2, "averaging": 0.9, "scaling": 0.5, "exact_noise": True, "steps": 2}
    asked = {"methods": ["dp-adamw"], "epsilons": [2.0], "seeds": 1, "out": tmp_path / "c", "workers": 1, **settings}
    result = compare("digits", **asked)
    heard = Heard()
    assert compare("digits", **asked, observer=heard) == result
    assert heard.all == [("planned", 1, 1)]
    (path,) = (tmp_path / "c" / "runs").glob("*/record.json")
    record = json.loads(path.read_text())
    record["config"]["plan"]["method"]["augmentation"]["multiplicity"] = 3
    path.write_text(json.dumps(record))
    with pytest.raises(ValueError, match="was trained with other options of dp-adamw"):
        compare("digits", **asked)
