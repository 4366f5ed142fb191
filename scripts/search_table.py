"""results/search/README.md from the trials: what was tried, what it gave.

python scripts/search_table.py [--write]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent / "results" / "search"
PAGE = ROOT / "README.md"
HEAD = """# The search for fiber-plus

Every trial of `scripts/search.py`, failures included: {epochs} epochs at ε = 1, B = 2,000, C = 1, one seed, accuracy in percent on
the 5,000 held-out training rows (never on test). The noise of every run was proved before its first step. The number of rows
alone gives one accuracy a standard error of about 0.5 points (Fashion-MNIST) and 0.25 (MNIST), so neighbours in this table are
not told apart by it. Made by `scripts/search_table.py`.

A composition is a method of the table with parts and options replaced.

"""


def page() -> str:
    tasks = sorted(path.stem for path in ROOT.glob("*.jsonl"))
    found: dict[str, dict[str, float]] = {}
    epochs = set()
    for task in tasks:
        for line in (ROOT / f"{task}.jsonl").read_text().splitlines():
            row = json.loads(line)
            assert row["passed"], row
            epochs.add(row["epochs"])
            found.setdefault(row["spec"], {})[task] = row["heldout"]
    (only,) = epochs
    lines = [f"| composition | {' | '.join(tasks)} |", "|---|" + "---|" * len(tasks)]
    for spec, by_task in sorted(found.items(), key=lambda item: -item[1].get(tasks[0], item[1].get(tasks[-1], 0) - 1)):
        cells = [f"{100 * by_task[task]:.2f}" if task in by_task else "–" for task in tasks]
        lines.append(f"| `{spec}` | {' | '.join(cells)} |")
    return HEAD.format(epochs=only) + "\n".join(lines) + "\n"


if __name__ == "__main__":
    if "--write" in sys.argv:
        PAGE.write_text(page())
    else:
        print(page(), end="")
