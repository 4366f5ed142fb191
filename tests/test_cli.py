"""The command line: what scripts rely on, and bad input that ends in one line, exit code 2, nothing written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import fiberdp
from fiberdp.cli import main


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    code = main(arguments)
    out, err = capsys.readouterr()
    return code, out, err


def test_account_of_cifar10_with_three_accountants(capsys):
    """N = 50k, B = 5k, T = 800, delta = 6.78e-6, epsilon = 1 (METHODS.md section 6): 10.87 PLD, 11.77 and 14.18 RDP."""
    line = "account --num-examples 50000 --batch-size 5000 --steps 800 --delta 6.78e-6 --epsilon 1 --json"
    code, out, err = run(capsys, *line.split())
    found = json.loads(out)
    assert (code, err) == (0, "")
    assert found["noise_multiplier"] == pytest.approx(10.87, abs=0.05)
    assert found["alternatives"]["rdp_improved"]["noise_multiplier"] == pytest.approx(11.77, abs=0.05)
    assert found["alternatives"]["rdp_classic"]["noise_multiplier"] == pytest.approx(14.18, abs=0.05)
    assert (found["relation"], found["accountant"], found["sampling"], found["steps"]) == ("add_or_remove_one", "pld", "poisson", 800)
    assert 0.99 < found["epsilon"] <= 1


def test_account_the_other_way(capsys):
    line = "account --num-examples 50000 --batch-size 5000 --steps 800 --delta 6.78e-6 --noise-multiplier 10.87 --accountant rdp"
    code, out, _ = run(capsys, *line.split())
    assert code == 0
    assert "add-or-remove-one" in out
    assert "rdp_classic" in out


def test_account_of_phases(capsys):
    line = "account --num-examples 10000 --delta 1e-5 --phase 100,500,1 --phase 200,500,2"
    code, out, err = run(capsys, *line.split(), "--json")
    assert (code, err, json.loads(out)["steps"]) == (0, "", 1000)
    code, out, _ = run(capsys, *line.split())
    assert (code, "2 phases: 1000 steps" in out) == (0, True)
    for more, named in (("--phase 1,2", "'1,2'"), ("--steps 3", "--steps"), ("--groups 3", "--groups"), ("--epsilon 1", "--epsilon")):
        code, out, err = run(capsys, *line.split(), *more.split())
        assert (code, out, err.count("\n"), named in err) == (2, "", 1, True)


def test_recipes_lists_every_recipe(capsys):
    code, out, _ = run(capsys, "recipes", "--json")
    rows = json.loads(out)["recipes"]
    assert code == 0
    assert [row["name"] for row in rows] == list(fiberdp.RECIPES)
    assert all({"name", "task", "model", "data", "paper", "cpu_minutes"} <= row.keys() for row in rows)
    assert run(capsys, "recipes")[0] == 0


def test_train_digits_prints_the_record(capsys, tmp_path):
    pytest.importorskip("sklearn")
    code, out, err = run(capsys, *f"train digits --method dp-adamw --seed 0 --steps 5 --out {tmp_path}/d --json".split())
    record = json.loads(out)
    assert (code, err) == (0, "")
    assert json.loads((tmp_path / "d" / "record.json").read_text()) == record
    assert record["privacy"].keys() >= {
        "epsilon", "delta", "relation", "accountant", "noise_multiplier", "sampling", "batch_size", "num_examples", "steps",
    }  # fmt: skip
    assert record["receipt"].keys() >= {"std_ratio", "standard_error", "lag1_correlation", "passed"}
    assert record["result"].keys() >= {"metric", "heldout", "test"}
    assert record["timing"].keys() >= {"seconds", "examples_per_second", "peak_mib"}
    assert abs(record["receipt"]["std_ratio"] - 1) < 5 * record["receipt"]["standard_error"]
    assert record["keys"] == "seeded"


def test_copies_and_averaged_weights_are_options_of_train(capsys):
    pytest.importorskip("sklearn")
    line = "train digits --method dp-sgd --seed 0 --steps 3 --multiplicity 2 --averaging 0.9"
    code, out, _ = run(capsys, *line.split(), "--json")
    record = json.loads(out)
    assert code == 0
    assert record["result"]["averaged"].keys() == {"heldout", "test"}
    method = record["config"]["plan"]["method"]
    assert method["augmentation"] == {"type": "crop_flip", "multiplicity": 2, "padding": 1, "flip": False}
    assert method["averaging"] == {"type": "ema", "decay": 0.9}
    code, out, _ = run(capsys, *line.split())
    assert code == 0
    assert "Averaged weights: test 0." in out


def test_exact_noise_is_an_option_of_train_for_white_noise(capsys):
    code, out, err = run(capsys, "train", "digits", "--steps", "2", "--exact-noise", "--json")
    record = json.loads(out)
    assert (code, err, record["receipt"]["passed"]) == (0, "", True)
    assert record["config"]["plan"]["method"]["mechanism"]["type"] == "gaussian-on-grid"
    code, out, err = run(capsys, "train", "digits", "--steps", "2", "--exact-noise", "--method", "mf-dp-ftrl")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "white" in err


def test_a_run_for_people_says_what_was_proved(capsys):
    pytest.importorskip("sklearn")
    code, out, err = run(capsys, *["train", "digits", "--steps", "3"])
    assert code == 0
    assert "noise proved: std" in err
    assert "-DP, add-or-remove-one, by pld from the ledger of 3 steps" in out
    assert "Nothing was kept" in out


BAD = {
    "epsilon 0": ("train digits --epsilon 0", "epsilon=0.0"),
    "epsilon negative": ("train digits --epsilon=-1", "epsilon=-1.0"),
    "epsilon nan": ("train digits --epsilon nan", "epsilon=nan"),
    "delta 0": ("train digits --delta 0", "delta=0.0"),
    "delta 1": ("train digits --delta 1", "delta=1.0"),
    "B > N": ("train digits --batch-size 100000", "batch_size=100000"),
    "recipe": ("train nope", "recipe='nope'"),
    "method": ("train digits --method nope", "method='nope'"),
    "option": ("train digits --nope", "--nope"),
    "command": ("nope", "nope"),
    "no number": ("train digits --epsilon many", "--epsilon"),
    "a > 1": ("train digits --kappa 0.5 --gamma 0.5", "a=2"),
    "gamma 0": ("train digits --gamma 0", "gamma=0"),
    "omega 0": ("train digits --omega 0", "omega=0.0"),
    "omega above 1": ("train digits --omega 1.01", "omega=1.01"),
    "unread option": ("train digits --method dp-sgd --omega 0.5", "method dp-sgd has no option omega"),
    "clip norm": ("train digits --clip-norm 0", "clip_norm=0.0"),
    "clip": ("train digits --clip soft", "clip='soft'"),
    "epochs and steps": ("train digits --epochs 2 --steps 2", "only one"),
    "multiplicity": ("train digits --multiplicity 0", "multiplicity=0"),
    "averaging": ("train digits --averaging 1", "decay=1.0"),
    "sampling": ("train digits --sampling coin", "sampling='coin'"),
    "accountant": ("train digits --accountant guess", "accountant='guess'"),
    "pld of fixed size": ("train digits --sampling fixed_size --accountant pld", "without replacement"),
    "engine": ("train digits --engine warp", "engine='warp'"),
    "micro-batch": ("train digits --micro-batch-size 0", "micro_batch_size=0"),
    "device": ("train digits --device nowhere", "device='nowhere'"),
    "no data": ("train mnist-cnn --data {tmp}", "parquet"),
    "resume of nothing": ("train digits --resume", "--out"),
    "account, both": ("account --num-examples 9 --batch-size 3 --steps 2 --delta 0.1 --epsilon 1 --noise-multiplier 1", "exactly one"),
    "account, B > N": ("account --num-examples 9 --batch-size 30 --steps 2 --delta 0.1 --epsilon 1", "batch_size=30"),
    "account, delta": ("account --num-examples 9 --batch-size 3 --steps 2 --delta 1 --epsilon 1", "delta=1.0"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_exit_2_nothing_written(capsys, tmp_path, monkeypatch, case):
    pytest.importorskip("sklearn")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FIBERDP_DATA", raising=False)
    line, named = BAD[case]
    out_option = f" --out {tmp_path}/d" if line.startswith("train") and "--resume" not in line else ""
    code, out, err = run(capsys, *(line.format(tmp=tmp_path) + out_option).split())
    assert (code, out) == (2, "")
    assert err.startswith("fiberdp: ")
    assert err.count("\n") == 1
    assert named in err
    assert not list(tmp_path.iterdir())


def test_a_folder_without_the_columns_is_one_line(capsys, tmp_path):
    pq = pytest.importorskip("pyarrow.parquet")
    import pyarrow as pa

    for split in ("train", "test"):
        pq.write_table(pa.table({"picture": [1], "label": [1]}), tmp_path / f"{split}-00000-of-00001.parquet")
    code, _, err = run(capsys, "train", "mnist-cnn", "--data", str(tmp_path), "--out", str(tmp_path / "out"))
    assert code == 2
    assert err.count("\n") == 1
    assert "picture" in err
    assert not (tmp_path / "out").exists()


def test_help_needs_no_torch_and_module_runs():
    env = os.environ | {"PYTHONPROFILEIMPORTTIME": "1"}
    done = subprocess.run([sys.executable, "-m", "fiberdp", "--help"], check=True, capture_output=True, text=True, env=env)
    assert "train" in done.stdout
    assert not any(line.endswith(("| torch", "| dp_accounting")) for line in done.stderr.splitlines())


def test_bad_input_of_a_real_process_exits_with_2():
    done = subprocess.run([sys.executable, "-m", "fiberdp", "train", "nope"], capture_output=True, text=True, check=False, cwd=Path.cwd())
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1


def test_account_prices_rounds_of_cyclic_sampling(capsys):
    """25 groups of N = 50k at B = 500 and 800 steps: 32 rounds at p = .25."""
    numbers = "account --num-examples 50000 --batch-size 500 --steps 800 --delta 1e-6 --epsilon 8 --sampling cyclic --groups 25 --json"
    assert main(numbers.split()) == 0
    statement = json.loads(capsys.readouterr().out)
    assert statement["noise_multiplier"] == pytest.approx(1.2489, abs=1e-4)
    assert (statement["sampling"], statement["groups"], statement["relation"]) == ("cyclic", 25, "add_or_remove_one")


def test_account_refuses_groups_without_cyclic_sampling_and_the_reverse(capsys):
    numbers = "account --num-examples 50000 --batch-size 500 --steps 800 --delta 1e-6 --epsilon 8 --json"
    for more, named in (("--groups 25", "only cyclic sampling has groups"), ("--sampling cyclic", "without groups")):
        assert main([*numbers.split(), *more.split()]) == 2
        assert named in capsys.readouterr().err


def test_train_takes_bands_and_says_how_many_there_can_be(capsys):
    pytest.importorskip("sklearn")
    train = "train digits --method mf-dp-ftrl --steps 4 --json"
    assert main([*train.split(), "--bands", "3"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["config"]["plan"]["method"]["mechanism"]["bands"] == record["config"]["plan"]["groups"] == 3
    assert main([*train.split(), "--bands", "8"]) == 2
    assert "N // B = 5: use at most 5 bands" in capsys.readouterr().err


@pytest.mark.parametrize("command", [[], ["diagnose"]])
def test_a_command_without_its_subcommand_shows_its_help_page(command, capsys):
    assert main(command) == 2
    error = capsys.readouterr().err
    assert error.startswith("Usage: fiberdp")
    assert "\nCommands:\n" in error
