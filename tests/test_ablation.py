"""fiberdp ablate: one part at a time, every arm at its own best rate, the same seeds for all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import fiberdp
from fiberdp.ablation import STUDIES, ablate, markdown
from fiberdp.cli import main
from fiberdp.experiment import tuned_method
from fiberdp.filters import Identity
from fiberdp.intervals import paired
from fiberdp.recipes import recipe_named

PAPER = Path(__file__).parent.parent.parent / "shared" / "paper" / "fiber-paper.txt"


def arms(study):
    return STUDIES[study].arms(lambda method, **options: tuned_method(recipe_named("digits"), method, options))


@pytest.mark.parametrize("study", STUDIES)
def test_arms_differ_in_what_the_study_says_alone(study):
    """The reference is an arm; no two arms have one name; of fiber's arms, the axes' options are all that differs."""
    found, planned = arms(study), STUDIES[study]
    assert planned.reference in [arm.options for arm in found]
    assert len({arm.name for arm in found}) == len(found)
    assert len({json.dumps(arm.method.to_json()) for arm in found}) == len(found)
    for arm in found:
        assert set(arm.options) == set(planned.axes)
        if planned.axes != ("method",):
            assert arm.method == tuned_method(recipe_named("digits"), "fiber", arm.options)
    assert all(options.keys() == planned.reference.keys() for options, *_ in planned.paper)


def test_the_convex_region_alone_is_searched_and_omega_reaches_no_filter():
    assert all(arm.method.observation.a <= 1 for study in ("geometry", "gain") for arm in arms(study))
    assert len(arms("geometry")) == 15
    last = arms("omega")[-1]
    assert last.method.filter.noise_gain() == 1.0
    bare = [arm for arm in arms("filter") if "without filter" in arm.options["method"]]
    assert [arm.method.filter for arm in bare] == [Identity(), Identity()]
    assert [arm.method.observation for arm in bare] == [arms("filter")[1].method.observation, arms("filter")[4].method.observation]


def test_figures_of_the_paper_are_the_papers():
    if not PAPER.exists():
        pytest.skip("the paper is not beside the project")
    lines = PAPER.read_text().splitlines()
    assert "0.5\tFiBeR\t65.32\t0.6\t0.7" in lines
    assert ({"method": "fiber-tied"}, 0.5, 65.32, "Table 4") in STUDIES["filter"].paper
    (row,) = [line for line in lines if line.startswith("Test Acc. (%)")]
    assert [f"${value:.2f}$" if "$" in row else f"{value:.2f}" for *_, value, _ in STUDIES["omega"].paper] == row.split("\t")[1:]


@pytest.fixture(scope="module")
def ablated(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ablated") / "out"
    return folder, ablate("digits", "omega", epsilon=2.0, seeds=2, trials=2, steps=3, out=folder, workers=2)


def test_each_arm_has_the_rate_that_was_best_on_held_out_rows(ablated):
    folder, result = ablated
    start = tuned_method(recipe_named("digits"), "fiber", {}).update.lr
    for cell in result["cells"]:
        name = f"omega{cell['options']['omega']}"
        tried = {
            lr: json.loads((folder / "runs" / f"{name}-lr{lr:.3g}-seed100" / "record.json").read_text())["result"]
            for lr in (start, 2 * start)
        }
        assert all(found["test"] is None for found in tried.values())
        assert cell["lr"] == max(tried, key=lambda lr: tried[lr]["heldout"])
        for seed, accuracy in enumerate(cell["accuracies"]):
            record = json.loads((folder / "runs" / f"{name}-lr{cell['lr']:.3g}-seed{seed}" / "record.json").read_text())
            assert record["result"]["test"] == accuracy
            assert record["receipt"]["passed"]


def test_a_run_of_an_arm_is_that_of_fit_and_differences_are_paired(ablated):
    _, result = ablated
    cells = {cell["options"]["omega"]: cell for cell in result["cells"]}
    alone = fiberdp.fit("digits", method="fiber", options={"omega": 0.6, "lr": cells[0.6]["lr"]}, epsilon=2.0, steps=3, seed=1)
    assert cells[0.6]["accuracies"][1] == alone["result"]["test"]
    assert cells[0.9]["difference"]["mean"] == 0
    expected = paired(cells[0.6]["accuracies"], cells[0.9]["accuracies"])
    assert cells[0.6]["difference"] == {"mean": expected["mean"], "ci95": expected["ci95"]}


def test_a_second_call_trains_nothing_and_says_the_same(ablated, monkeypatch):
    folder, result = ablated

    def none_left(jobs, **rest):
        raise AssertionError(list(jobs))

    monkeypatch.setattr("fiberdp.run_folder.records", none_left)
    assert ablate("digits", "omega", epsilon=2.0, seeds=2, trials=2, steps=3, out=folder) == result
    saved = json.loads((folder / "ablation.json").read_text())
    assert saved["cells"] == result["cells"]
    assert (folder / "ablation.md").read_text() == markdown(result)
    assert "| omega 0.9 | 1 | 70.76 | Table 5 |" in markdown(result)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("digits nope", "study"), ("digits omega --seeds 0", "seeds=0"), ("digits omega --trials 8", "trials=8"),
        ("digits omega --epsilon -1", "epsilon"), ("nope omega", "recipe"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line_and_exit_2(arguments, named, capsys):
    assert main(["ablate", *arguments.split(), "--steps", "1"]) == 2
    told = capsys.readouterr()
    assert (told.out, told.err.count("\n")) == ("", 1)
    assert named in told.err


def test_other_settings_are_refused(ablated):
    folder, _ = ablated
    with pytest.raises(ValueError, match=r"study=eps_v.* was begun with omega"):
        ablate("digits", "eps_v", epsilon=2.0, seeds=2, steps=3, out=folder)
