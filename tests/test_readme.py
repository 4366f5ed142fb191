"""README says what is true: its Python runs, its figures are what the commands print, its tables name what exists."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import fiberdp
from blocks import blocks, run_console, run_python
from fiberdp.accounting import read_ledger
from fiberdp.filters import FILTERS
from loading import script

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_the_python_block_runs():
    (block,) = [block for block in blocks(README) if block.language == "python"]
    ratio, statement = run_python(block.body, {}, f"README.md:{block.line}").strip().splitlines()
    assert abs(float(ratio) - 1) < 0.05
    assert statement.endswith("0.0001 add_or_remove_one")
    assert 2.97 < float(statement.split()[0]) <= 3.0


def test_the_account_examples_print_what_they_show():
    examples = [block for block in blocks(README) if block.body.startswith("$ fiberdp account --num")]
    assert len(examples) == 2
    for block in examples:
        run_console(block.body, f"README.md:{block.line}")


def test_the_method_table_names_every_method():
    table = README.split("## Methods")[1].split("##")[0]
    named = re.findall(r"`([a-z][a-z-]+)`", " ".join(line.split("|")[1] for line in table.splitlines() if line.startswith("| `")))
    assert set(named) == set(fiberdp.METHODS)


def test_the_filter_table_names_every_filter_with_its_noise_gain():
    rows = [line.split("|") for line in README.split("### Filters")[1].split("\n#")[0].splitlines() if line.startswith("| `")]
    assert {row[1].strip(" `") for row in rows} == set(FILTERS)
    for row in rows:
        name, gain = row[1].strip(" `"), re.match(r"\d\.?\d*", row[3].strip())
        if gain:
            assert float(gain.group()) == pytest.approx(FILTERS[name]().noise_gain(), abs=5e-4)


def test_the_files_it_links_exist():
    for link in re.findall(r"\]\(([\w/.-]+)\)", README):
        assert (ROOT / link).exists(), link


def test_the_results_table_is_the_one_the_records_give():
    made = script("results_table")
    assert made.table("mnist-cnn") == README.split(made.BEGIN)[1].split(made.END)[0].strip()


def test_the_tables_of_the_replication_page_are_those_of_the_records():
    """Every block is made anew from its record, and every record that the page links exists."""
    made, text = script("replication"), (ROOT / "docs" / "replication.md").read_text()
    assert made.page(text) == text
    assert len(made.BLOCK.findall(text)) >= 3
    for link in re.findall(r"\]\((\.\./[\w/.-]+)", text):
        assert (ROOT / "docs" / link).exists(), link


def test_every_kept_run_was_proved_and_within_its_budget():
    for path in (ROOT / "results").glob("*/records.jsonl"):
        for record in map(json.loads, path.read_text().splitlines()):
            assert record["receipt"]["passed"]
            assert record["receipt"]["largest_deviation"] < 7  # the limit of the widest family of checks
            assert abs(record["receipt"]["std_ratio"] - 1) < 5 * record["receipt"]["standard_error"]
            assert record["privacy"]["steps"] == record["config"]["plan"]["steps"]
            assert record["privacy"]["epsilon"] <= float(re.search(r"eps([\d.]+)|$", record["name"])[1] or "inf")


def test_every_committed_result_is_proved_and_charged_by_its_own_ledger():
    for path in (ROOT / "results").glob("*/*/record.json"):
        record = json.loads(path.read_text())
        privacy = record["privacy"]
        ledger = read_ledger(path.with_name("ledger.jsonl")).event()
        spent = fiberdp.accounting.epsilon(ledger, privacy["delta"], relation=privacy["relation"], accountant=privacy["accountant"])
        assert spent == pytest.approx(privacy["epsilon"], rel=1e-9)
        assert record["receipt"]["passed"]
        assert abs(record["receipt"]["std_ratio"] - 1) < 5 * record["receipt"]["standard_error"]
        assert record["keys"] == "secret"


def test_the_search_table_is_made_from_its_trials():
    module = script("search_table")
    assert module.PAGE.read_text() == module.page()
    trials = sum(len(path.read_text().splitlines()) for path in module.ROOT.glob("*.jsonl"))
    assert f"was {trials} trials of 8 epochs" in README
