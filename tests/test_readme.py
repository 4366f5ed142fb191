"""README says what is true: its Python runs, its figures are what the commands print, its tables name what exists."""

from __future__ import annotations

import re
from pathlib import Path

import fiberdp
from fiberdp.cli import main

README = (Path(__file__).parent.parent / "README.md").read_text()


def test_the_python_block_runs(capsys):
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    exec(compile(code, "README.md", "exec"), {})
    ratio, statement = capsys.readouterr().out.strip().splitlines()
    assert abs(float(ratio) - 1) < 0.05
    assert statement.endswith("0.0001 add_or_remove_one")
    assert 2.97 < float(statement.split()[0]) <= 3.0


def test_the_account_example_prints_what_it_shows(capsys):
    (shown,) = re.findall(r"```\n\$ fiberdp (account .*?)```", README, re.DOTALL)
    command, _, output = shown.partition("\n")
    assert main(command.split()) == 0
    assert capsys.readouterr().out.split() == output.split()


def test_the_method_table_names_every_method():
    table = README.split("## Methods")[1].split("##")[0]
    named = re.findall(r"`([a-z][a-z-]+)`", " ".join(line.split("|")[1] for line in table.splitlines() if line.startswith("| `")))
    assert set(named) == set(fiberdp.METHODS)


def test_the_files_it_links_exist():
    for link in re.findall(r"\]\(([\w/.]+)\)", README):
        assert (Path(__file__).parent.parent / link).exists(), link
