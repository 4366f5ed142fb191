"""The documentation says what is true: every block of every page runs and prints what is shown; pages name what exists."""

from __future__ import annotations

from pathlib import Path

import pytest

from blocks import run_page

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))


@pytest.mark.parametrize("page", PAGES)
def test_every_block_of_the_page_runs_and_prints_what_is_shown(page, tmp_path):
    left_out = run_page(DOCS / page, tmp_path)
    if left_out:
        pytest.skip("; ".join(left_out))
