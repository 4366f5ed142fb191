"""One line a run as CSV, every number with all its digits."""

from __future__ import annotations

import csv
import io

from fiberdp.report.reading import Found

COLUMNS = (
    "run", "recipe", "method", "epsilon", "delta", "relation", "accountant", "sampling", "noise_multiplier", "batch_size", "num_examples",
    "steps", "keys", "seed", "std_ratio", "standard_error", "receipt_passed", "metric", "heldout", "test", "clamp_mass", "seconds",
    "examples_per_second", "peak_mib", "fiberdp", "torch", "commit",
)  # fmt: skip


def table(found: Found) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n", extrasaction="ignore")
    writer.writeheader()
    for run in found.runs:
        r = run.record
        flat = (
            {"run": run.name, "receipt_passed": r["receipt"]["passed"]}
            | r
            | r["privacy"]
            | r["receipt"]
            | r["result"]
            | r["timing"]
            | r["versions"]
        )
        writer.writerow({name: _inert(flat.get(name)) for name in COLUMNS})
    return text.getvalue()


def _inert(value: object) -> object:
    """A text that a spreadsheet would take for a formula is quoted for it."""
    return f"'{value}" if isinstance(value, str) and value[:1] in ("=", "+", "-", "@") else value
