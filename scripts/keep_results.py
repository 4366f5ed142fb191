"""Keep what a comparison or an ablation showed: python scripts/keep_results.py RUNS results/NAME

RUNS        what `fiberdp compare --out` or `fiberdp ablate --out` wrote
results/    its tables as they are; records.jsonl, one record of a run a line, without the single checks of its receipt (their number and
            worst deviation stay); sweeps.jsonl, one sweep a line.  Left behind: keys, weights, and ledgers, of which a record has the last
            link of the chain: runs of a seed can be made again, bit by bit.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any


def kept(path: Path) -> dict[str, Any]:
    record = json.loads(path.read_text())
    checks = record["receipt"].pop("checks")
    assert all(check["passed"] for check in checks), path
    worst = max(abs(check["deviation"]) for check in checks)
    record["receipt"] |= {"number_of_checks": len(checks), "largest_deviation": worst}
    return {"name": path.parent.name} | record


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    if rows:
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path)
    parser.add_argument("results", type=Path)
    given = parser.parse_args()
    given.results.mkdir(parents=True, exist_ok=True)
    for pattern in ("comparison.*", "ablation.*", "settings.json"):
        for path in given.runs.glob(pattern):
            shutil.copy(path, given.results / path.name)
    write_lines(given.results / "records.jsonl", [kept(path) for path in sorted(given.runs.glob("runs/*/record.json"))])
    sweeps = [json.loads(path.read_text()) for path in sorted(given.runs.glob("sweeps/*/sweep.json"))]
    write_lines(given.results / "sweeps.jsonl", sweeps)
    print(f"{given.results}: {len(list(given.runs.glob('runs/*/record.json')))} runs, {len(sweeps)} sweeps")


if __name__ == "__main__":
    main()
