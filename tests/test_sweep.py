"""fiberdp sweep: a staged search with an equal budget, kept in a database that several processes may share."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import fiberdp
from fiberdp.cli import main
from fiberdp.comparison import compare
from fiberdp.methods import METHODS
from fiberdp.recipes import recipe_named
from fiberdp.sweeping import LR_ADAMW, LR_SGD, START, _best, stages, sweep

optuna = pytest.importorskip("optuna", reason="a sweep needs the recipes extra")


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("trials", [4, 20, 100])
def test_every_method_gets_the_same_number_of_trials_in_stages_that_fit_it(name, trials):
    """Table 9's grids, within a <= 1; what a method has not is not searched; every option is one of its own."""
    method, found = METHODS[name], stages(METHODS[name], trials, 100)
    assert sum(stage.trials for stage in found) == trials
    assert found[0].name == "base"
    first, ends = found[0].lr
    assert ends == (LR_SGD if method.update.name == "sgd" else LR_ADAMW)
    assert first[0] == method.update.lr
    assert all(ends[0] <= lr <= ends[1] for lr in first)
    assert all(1 <= stage.trials <= len(stage.grid) for stage in found[1:])
    geometry = next((stage for stage in found if stage.name == "geometry"), None)
    assert (geometry is None) == (method.observation.name == "one_point")
    for stage in found:
        for options in stage.grid:
            tuned = fiberdp.method(name, **options)
            assert stage.name == "base" or tuned != method  # the default is the base stage's


@pytest.fixture(scope="module")
def searched(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sweep") / "out"
    return folder, sweep("digits", method="fiber", trials=4, epsilon=2.0, steps=3, out=folder, workers=2)


def test_the_best_of_the_trials_wins_and_every_trial_is_told(searched):
    folder, found = searched
    assert Counter(t["stage"] for t in found["trials"]) == {"base": 2, "geometry": 1, "filter": 1}
    assert found["best"]["heldout"] == max(t["heldout"] for t in found["trials"])
    assert found["best"]["options"] in [t["options"] for t in found["trials"]]
    assert all(t["epsilon"] <= 2.0 and abs(t["std_ratio"] - 1) < 0.05 for t in found["trials"])
    assert json.loads((folder / "sweep.json").read_text())["trials"] == found["trials"]
    assert "| filter |" in (folder / "sweep.md").read_text()


def test_a_stage_keeps_the_best_of_those_before_it(searched):
    _, found = searched
    by_stage = {name: [t for t in found["trials"] if t["stage"] == name] for name in ("base", "geometry", "filter")}
    best = max(by_stage["base"], key=lambda t: t["heldout"])
    (geometry,) = by_stage["geometry"]
    assert geometry["options"]["lr"] == best["options"]["lr"]
    assert set(geometry["options"]) == {"lr", "kappa", "gamma"}
    best = max(best, geometry, key=lambda t: t["heldout"])
    (filter,) = by_stage["filter"]
    assert {k: v for k, v in filter["options"].items() if k != "omega"} == best["options"]


def test_a_trial_is_a_run_of_fit_that_never_sees_the_test_rows(searched):
    _, found = searched
    trial = found["trials"][0]
    record = fiberdp.fit("digits", method="fiber", options=trial["options"], epsilon=2.0, steps=3, seed=100, test=False)
    assert record["result"]["test"] is None
    assert record["result"]["heldout"] == trial["heldout"]


def test_a_second_call_goes_on_and_gives_back_what_a_dead_process_held(searched, tmp_path):
    """One more trial of the base stage stands as running under a process that is gone: it is failed, not waited for."""
    folder, found = searched
    study = optuna.load_study(study_name=found["study"], storage=f"sqlite:///{folder}/sweep.db")
    gone = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True, check=True).stdout
    trial = study.ask()
    trial.set_user_attr("owner", f"{os.uname().nodename}:{gone.strip()}")
    trial.set_user_attr("stage", "base")
    trial.set_user_attr("options", {})
    again = sweep("digits", method="fiber", trials=4, epsilon=2.0, steps=3, out=folder, workers=1)
    assert again["trials"] == found["trials"]
    states = Counter(t.state.name for t in optuna.load_study(study_name=found["study"], storage=f"sqlite:///{folder}/sweep.db").trials)
    assert states == {"COMPLETE": 4, "FAIL": 1}


@contextmanager
def server() -> Iterator[str]:
    """A PostgreSQL server of its own on a socket in a new folder; root may run none, and leaves it to nobody."""
    programs = sorted(Path("/usr/lib/postgresql").glob("*/bin"))
    if not programs:
        pytest.skip("no PostgreSQL server is installed")
    place = Path(tempfile.mkdtemp())  # not tmp_path: the path of a socket may have 107 characters
    place.chmod(0o777)
    user = {"user": "nobody"} if os.geteuid() == 0 else {}
    data, options = place / "data", f"-c listen_addresses= -c unix_socket_directories={place} -c fsync=off"

    def run(program: str, *arguments: object) -> None:
        subprocess.run([programs[-1] / program, "-D", data, *arguments], check=True, stdout=subprocess.DEVNULL, **user)

    try:
        run("initdb", "-A", "trust", "-U", "tester")
        run("pg_ctl", "-w", "-l", place / "log", "-o", options, "start")
        yield f"postgresql+psycopg://tester@/postgres?host={place}"
        run("pg_ctl", "-m", "immediate", "stop")
    finally:
        shutil.rmtree(place)


def test_a_stage_that_is_taken_up_again_does_not_look_at_later_ones(searched):
    """After all stages have ended, the best of the base stage alone has no kappa and no omega."""
    folder, found = searched
    study = optuna.load_study(study_name=found["study"], storage=f"sqlite:///{folder}/sweep.db")
    assert set(_best(study, ["base"])) == {"lr"}
    assert set(_best(study, ["base", "geometry"])) <= {"lr", "kappa", "gamma"}
    assert _best(study, ["base", "geometry", "filter"]) == found["best"]["options"]


def share(storage: str) -> None:
    """Two processes at once: together they make one budget, and no trial twice."""
    line = [sys.executable, "-m", "fiberdp", "sweep", "digits", "--method", "dp-sgd", "--trials", "4", "--steps", "2", "--workers", "1"]
    both = [subprocess.Popen([*line, "--storage", storage, "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE) for _ in range(2)]
    told = [process.communicate(timeout=300) for process in both]
    assert [process.returncode for process in both] == [0, 0], told
    (study,) = optuna.get_all_study_summaries(storage)
    trials = optuna.load_study(study_name=study.study_name, storage=storage).trials
    assert 4 <= len([t for t in trials if t.state.name == "COMPLETE"]) <= 5  # both may take the last one
    assert len({t.params["lr"] for t in trials}) == len(trials)


def test_two_processes_share_a_sqlite_file(tmp_path):
    share(f"sqlite:///{tmp_path}/shared.db")


def test_two_processes_share_a_postgresql_server():
    pytest.importorskip("psycopg", reason="psycopg is not installed")
    with server() as url:
        share(url)


def test_compare_takes_what_a_sweep_found(searched):
    _, found = searched
    result = compare("digits", methods=["fiber"], epsilons=[2.0], seeds=1, steps=3, tuned=[found], workers=1)
    assert result["rows"][0]["trials"] == 4
    options = found["best"]["options"]
    alone = fiberdp.fit("digits", method="fiber", options=options, epsilon=2.0, steps=3, seed=0)
    assert result["rows"][0]["accuracies"] == [alone["result"]["test"]]
    with pytest.raises(ValueError, match="tuned: a sweep of digits, fiber at epsilon 2") as error:
        compare("digits", methods=["dp-sgd"], epsilons=[2.0], seeds=1, steps=3, tuned=[found])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("--method nope", "nope"), ("--trials 3", "trials=3"), ("--epsilon -1", "epsilon"), ("--storage nonsense", "storage 'nonsense'"),
        ("--storage postgresql://127.0.0.1:1/x", "storage 'postgresql"), ("--workers 0", "workers=0"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line_and_exit_2(arguments, named, capsys, tmp_path):
    assert main(["sweep", "digits", "--steps", "1", *arguments.split()]) == 2
    told = capsys.readouterr()
    assert (told.out, told.err.count("\n")) == ("", 1)
    assert named in told.err


def test_other_settings_are_another_study(searched):
    folder, _ = searched
    with pytest.raises(ValueError, match=r"steps=4.* was begun with 3"):
        sweep("digits", method="fiber", trials=4, epsilon=2.0, steps=4, out=folder)


def test_without_optuna_it_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "optuna", None)
    assert main(["sweep", "digits", "--steps", "1"]) == 2
    assert "pip install fiberdp[recipes]" in capsys.readouterr().err


def test_no_more_bands_than_batches_of_a_pass():
    """Examples would be used twice within the noise's memory; the method's own number comes first if it is possible."""
    (few,), (many,) = (stages(METHODS["mf-dp-ftrl"], 4, most) for most in (9, 100))
    assert [options["bands"] for options in few.grid] == [8, 1, 2, 4]
    assert [options["bands"] for options in many.grid] == [8, 1, 2, 4, 16]


def test_a_search_begins_at_the_recipes_rate(searched):
    _, found = searched
    start = recipe_named("digits").options["fiber"]["lr"]
    base = [t["options"]["lr"] for t in found["trials"] if t["stage"] == "base"]
    assert base == pytest.approx([factor * start for factor in START[: len(base)]])
