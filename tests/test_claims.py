"""docs/claims.md names tests that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent
PAGE = ROOT.parent / "docs" / "claims.md"
NAMED = re.findall(r"`([\w/]+\.py)::(\w+)`", PAGE.read_text())


def test_the_page_names_tests():
    assert len(NAMED) > 40


@pytest.mark.parametrize(("file", "name"), sorted(set(NAMED)))
def test_the_test_that_a_claim_names_exists(file, name):
    path = ROOT / file
    assert path.exists(), f"docs/claims.md names {file}, which does not exist"
    defined = {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}
    assert name in defined, f"docs/claims.md names {file}::{name}, which does not exist"
