"""Keep what a comparison or an ablation showed: python scripts/keep_results.py RUNS results/NAME

RUNS        what `fiberdp compare --out` or `fiberdp ablate --out` wrote
results/    its tables; records.jsonl, one record of a run a line, without the single checks of its receipt (their number and worst
            deviation stay); sweeps.jsonl, one sweep a line.  Left behind: keys, weights, and ledgers, of which a record has the last
            link of the chain: runs of a seed can be made again, bit by bit.  A comparison is joined with what results/ holds of the
            same settings: a table of several epsilons may be made on several days.

--back      the other way: a folder RUNS in which `fiberdp compare --out RUNS --tuned RUNS/sweeps/…/sweep.json` finds what is done
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

from fiberdp.comparison import markdown, table
from fiberdp.record import to_text


def kept(path: Path) -> dict[str, Any]:
    record = json.loads(path.read_text())
    checks = record["receipt"].pop("checks")
    assert all(check["passed"] for check in checks), path
    worst = max(abs(check["deviation"]) for check in checks)
    record["receipt"] |= {"number_of_checks": len(checks), "largest_deviation": worst}
    return {"name": path.parent.name} | record


def write_lines(path: Path, rows: list[dict[str, Any]], key: str) -> None:
    """`rows` beside those of the file, in whose place those of the same `key` step; in the order of `key`."""
    before = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    all_rows = {row[key]: row for row in (*before, *rows)}
    if all_rows:
        path.write_text("".join(json.dumps(all_rows[name], ensure_ascii=False) + "\n" for name in sorted(all_rows)))


def joined(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """Two results of `fiberdp.compare`, of the same settings; the later one's rows step in the place of the earlier's."""
    assert before["settings"] == now["settings"], (before["settings"], now["settings"])

    def rows(name: str) -> list[dict[str, Any]]:
        found = {(row["method"], row["epsilon"]): row for row in (*before[name], *now[name])}
        return sorted(found.values(), key=lambda row: row["epsilon"])  # stable: methods stay in their order

    trials = {row["trials"] for row in rows("rows")}
    assert len(trials) == 1, trials
    return now | {"rows": rows("rows"), "differences": rows("differences"), "warnings": []}


def keep_comparison(found: dict[str, Any], results: Path) -> None:
    path = results / "comparison.json"
    if path.exists():
        found = joined(json.loads(path.read_text()), found)
    path.write_text(to_text(found))
    (results / "comparison.md").write_text(markdown(found))
    (results / "comparison.csv").write_text(table(found))


def put_back(results: Path, runs: Path) -> None:
    runs.mkdir(parents=True)  # nothing that is there is overwritten
    shutil.copy(results / "settings.json", runs / "settings.json")
    for kind, key, name in (("runs", "name", "record.json"), ("sweeps", "study", "sweep.json")):
        path = results / ("records.jsonl" if kind == "runs" else "sweeps.jsonl")
        for line in path.read_text().splitlines() if path.exists() else ():
            folder = runs / kind / json.loads(line)[key]
            folder.mkdir(parents=True)
            (folder / name).write_text(line)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path)
    parser.add_argument("results", type=Path)
    parser.add_argument("--back", action="store_true")
    given = parser.parse_args()
    if given.back:
        put_back(given.results, given.runs)
        return
    given.results.mkdir(parents=True, exist_ok=True)
    for pattern in ("ablation.*", "settings.json"):
        for path in given.runs.glob(pattern):
            shutil.copy(path, given.results / path.name)
    if (given.runs / "comparison.json").exists():
        keep_comparison(json.loads((given.runs / "comparison.json").read_text()), given.results)
    write_lines(given.results / "records.jsonl", [kept(path) for path in sorted(given.runs.glob("runs/*/record.json"))], "name")
    sweeps = [json.loads(path.read_text()) for path in sorted(given.runs.glob("sweeps/*/sweep.json"))]
    write_lines(given.results / "sweeps.jsonl", sweeps, "study")
    print(f"{given.results}: {len(list(given.runs.glob('runs/*/record.json')))} runs, {len(sweeps)} sweeps")


if __name__ == "__main__":
    main()
