"""Put the tables of the committed records into docs/replication.md: no figure of ours in it is typed by hand.

    python scripts/replication.py            print the page as it should be
    python scripts/replication.py --write    write it

A table stands between `<!-- results/NAME -->` and `<!-- end -->`, NAME being a folder that scripts/keep_results.py wrote.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from fiberdp import ablation, comparison
from fiberdp.record import markdown_table

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "replication.md"
BLOCK = re.compile(r"<!-- (results/[\w/.-]+) -->\n.*?<!-- end -->", re.DOTALL)


def table(folder: Path) -> str:
    """The table of a comparison or an ablation, as its command prints it."""
    if (folder / "comparison.json").exists():
        found = json.loads((folder / "comparison.json").read_text())
        return markdown_table(comparison.COLUMNS, comparison.lines(found))
    found = json.loads((folder / "ablation.json").read_text())
    return markdown_table((*found["axes"], *ablation.COLUMNS), ablation.lines(found))


def page(text: str) -> str:
    """The page with every table made anew."""
    return BLOCK.sub(lambda block: f"<!-- {block[1]} -->\n{table(ROOT / block[1])}\n<!-- end -->", text)


if __name__ == "__main__":
    made = page(PAGE.read_text())
    if "--write" in sys.argv[1:]:
        PAGE.write_text(made)
    else:
        print(made, end="")
