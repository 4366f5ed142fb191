"""docs/claims.md and docs/pitfalls.md name tests that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent
PAGE = ROOT.parent / "docs" / "claims.md"
PITFALLS = PAGE.with_name("pitfalls.md")
NAMED = {page.name: re.findall(r"`([\w/]+\.py)::(\w+)`", page.read_text()) for page in (PAGE, PITFALLS)}


def test_the_pages_name_tests():
    assert all(len(named) > 40 for named in NAMED.values())


@pytest.mark.parametrize(("page", "file", "name"), sorted({(page, *named) for page, all_ in NAMED.items() for named in all_}))
def test_the_test_that_a_claim_names_exists(page, file, name):
    path = ROOT / file
    assert path.exists(), f"docs/{page} names {file}, which does not exist"
    defined = {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}
    assert name in defined, f"docs/{page} names {file}::{name}, which does not exist"


def test_every_pitfall_has_a_severity_and_a_test():
    rows = [[cell.strip() for cell in line.split(" | ")] for line in PITFALLS.read_text().splitlines() if line.startswith("| ")]
    pitfalls = [row for row in rows if row[1] != "severity"]
    assert len(pitfalls) > 30
    for row in pitfalls:
        assert len(row) == 5, row
        assert row[1] in ("privacy", "result", "stop"), row
        assert "::" in row[4], row


def named_in_the_first_columns():
    """{kind: what the first columns name}, ranges written out: "eqs. 5–7" is eqs. 5, 6 and 7."""
    found = {"eq": set(), "Table": set(), "Figure": set(), "Algorithm": set()}
    cells = [line.split("|")[1] for line in PAGE.read_text().splitlines() if line.startswith("|")]
    for cell in cells:
        for kind, numbers in re.findall(r"(eq|Table|Figure|Algorithm)s?\.? ((?:\d+(?:–\d+)?(?:, | and )?)+)", cell):
            for low, high in re.findall(r"(\d+)(?:–(\d+))?", numbers):
                found[kind] |= set(range(int(low), int(high or low) + 1))
    return found, " ".join(cells)


@pytest.mark.parametrize(("kind", "count"), [("eq", 85), ("Table", 18), ("Figure", 15), ("Algorithm", 3)])
def test_every_numbered_item_of_the_paper_is_named(kind, count):
    missing = set(range(1, count + 1)) - named_in_the_first_columns()[0][kind]
    assert not missing, f"docs/claims.md does not say what became of {kind} {sorted(missing)}"


def test_every_statement_of_the_paper_is_named():
    cells = named_in_the_first_columns()[1]
    statements = (
        "Def. A.1",
        "Def. A.2",
        "Prop. 4.1",
        "Remark 4.2",
        "Prop. 4.3",
        "Cor. 4.4",
        "Cor. 4.5",
        "Prop. 4.6",
        "Remark 4.7",
        "Lemma C.1",
        "Lemma C.2",
        "Prop. C.3",
    )
    assert [s for s in statements if s not in cells] == []
