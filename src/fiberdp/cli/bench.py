"""fiberdp bench: what a step costs beside torch's own."""

from __future__ import annotations

import sys
from typing import Annotated

import typer


def bench(
    models: Annotated[str, typer.Option(help="Comma-separated: update.")] = "update",
    elements: Annotated[int, typer.Option(help="Length of the vector of model update.")] = 20_000_000,
    rounds: Annotated[int, typer.Option(help="How often everything is timed.")] = 7,
    json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> None:
    """Time the update beside torch's fused AdamW: one process, interleaved, medians, ratios."""
    from fiberdp.bench import bench as measured
    from fiberdp.cli.allocator import keep_freed_memory
    from fiberdp.record import to_text

    keep_freed_memory()
    found = measured(
        tuple(models.split(",")), elements=elements, rounds=rounds, progress=lambda line: print(line, file=sys.stderr, flush=True)
    )
    if json:
        print(to_text(found))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("model", "variant", "ms", "ns an element", "ratio", "+-"):
        table.add_column(name, justify="left" if name in ("model", "variant") else "right")
    for row in found["rows"]:
        nanoseconds = 1e9 * row["seconds"] / found["elements"]
        table.add_row(
            row["model"], row["variant"], f"{1e3 * row['seconds']:.1f}", f"{nanoseconds:.2f}", f"{row['ratio']:.2f}", f"{row['spread']:.2f}"
        )
    console = Console()
    console.print(table)
    console.print(
        f"\n{found['elements']:,} floats, {found['threads']} threads, medians of {found['rounds']} interleaved rounds.", style="dim"
    )
