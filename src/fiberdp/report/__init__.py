"""Records -> one self-contained HTML page, with Markdown and CSV beside it.

    reading    folders, checked                    privacy, figures, grids, beside, rerun    what can be said of them
    sections   the order in which it is said       page, markdown, table, tensorboard        how it is written down

A report reads records and computes nothing that they do not say, but intervals and the noise gain of their filters.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fiberdp._disk import make_folder, write_atomically
from fiberdp.report.document import Document
from fiberdp.report.markdown import markdown
from fiberdp.report.page import MARK, html
from fiberdp.report.reading import Found, read
from fiberdp.report.sections import document, warnings
from fiberdp.report.svg import require_matplotlib
from fiberdp.report.table import table


def report(runs: Sequence[str | Path], *, out: str | Path | None = None, tensorboard: bool = False) -> dict[str, Any]:
    """Write the page of these folders (`reading.read`), and beside it NAME.md, NAME.csv and, if asked for, NAME-tensorboard/.

    out: NAME.html; report.html in the folder if exactly one is given.  A report there is replaced, anything else is not.
    Returns JSON values: html, markdown, csv, tensorboard (paths), runs, comparisons, sweeps, ablations, unfinished and
    receipts_passed (counts), bytes (of the page), warnings.
    Raises ValueError in one line for bad input, ImportError without matplotlib or tensorboard; then nothing is written.
    """
    path = _place(runs, out)
    beside = {"markdown": path.with_suffix(".md"), "csv": path.with_suffix(".csv")}
    events = path.with_name(f"{path.stem}-tensorboard") if tensorboard else None
    require_matplotlib()
    found = read(runs)
    _refuse_foreign(path, beside.values())
    if events is not None:
        from fiberdp.report.tensorboard import refuse_foreign, require_tensorboard

        require_tensorboard()
        refuse_foreign(events)
    made = document(found)
    texts = {beside["markdown"]: markdown(made), beside["csv"]: table(found), path: html(made)}
    make_folder(path.parent)
    if events is not None:
        from fiberdp.report.tensorboard import write_events

        write_events(found, events)
    for where, text in texts.items():  # the page last: where it is, the rest is
        write_atomically(where, text)
    return {
        "html": str(path), **{name: str(where) for name, where in beside.items()}, "tensorboard": None if events is None else str(events),
        "runs": len(found.runs), "comparisons": len(found.comparisons), "sweeps": len(found.sweeps), "ablations": len(found.ablations),
        "unfinished": len(found.unfinished), "receipts_passed": sum(run.record["receipt"]["passed"] for run in found.runs),
        "bytes": len(texts[path].encode()), "warnings": warnings(found),
    }  # fmt: skip


def _place(runs: Sequence[str | Path], out: str | Path | None) -> Path:
    if out is None:
        if len(runs) != 1:
            raise ValueError(
                f"report of {len(runs)} folders without --out: the page's name must be given, because only one folder has a place of its "
                "own for it. Give --out NAME.html."
            )
        return Path(runs[0]) / "report.html"
    path = Path(out)
    if path.suffix != ".html" or path.is_dir():
        raise ValueError(
            f"--out {path}: it must be a file that ends in .html, because NAME.md and NAME.csv are written beside it. Give --out NAME.html."
        )
    nearest = next((above for above in path.absolute().parents if above.exists()), None)
    if nearest is not None and not nearest.is_dir():
        raise ValueError(
            f"--out {path}: {nearest} is a file: the page must be in a folder, which is made if it is not there. Choose another."
        )
    return path


def _refuse_foreign(path: Path, beside: Any) -> None:
    """Only a report is replaced."""
    ours = path.exists() and f'content="{MARK}' in path.read_text(encoding="utf-8", errors="replace")[:2000]
    for where in () if ours else (path, *beside):
        if where.exists():
            raise ValueError(f"--out {path}: {where} is no report: nothing but a report is overwritten. Choose another name, or remove it.")


__all__ = ["Document", "Found", "document", "html", "markdown", "read", "report"]
