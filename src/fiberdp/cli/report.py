"""fiberdp report: runs as one page."""

from __future__ import annotations

import sys
from typing import Annotated

import typer


def report(
    runs: Annotated[list[str], typer.Argument(metavar="RUN…", help="Run directories, what compare or sweep wrote, or folders of such.")],
    out: Annotated[str | None, typer.Option(help="NAME.html; report.html in RUN if one is given. NAME.md and NAME.csv beside it.")] = None,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Event files in NAME-tensorboard/ too.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Where the files are, and what they are about, as JSON on stdout.")] = False,
) -> None:
    """Write one HTML page about runs: privacy statement, results, noise, cost, and how to run them again."""
    from fiberdp.record import to_text
    from fiberdp.report import report as reported

    found = reported(runs, out=out, tensorboard=tensorboard)
    for warning in found["warnings"]:
        print(f"fiberdp: warning: {warning}", file=sys.stderr)
    if json:
        print(to_text(found))
        return
    more = f" and event files in {found['tensorboard']}" if found["tensorboard"] else ""
    print(f"{found['html']} ({found['bytes'] / 2**20:.1f} MB) is about {found['runs']} runs; beside it Markdown, CSV{more}.")
