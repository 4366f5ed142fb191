"""fiberdp diagnose: what the paper measures beside accuracy, measured here."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

diagnose = typer.Typer(help="Measure drift tracking, noise attenuation, the correction's assumptions, and the floor.", no_args_is_help=True)

Out = Annotated[str | None, typer.Option(help="New folder for a JSON file, a Markdown page and a figure.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]
Seed = Annotated[int, typer.Option(help="Where the random numbers start from.")]


@diagnose.command("drift")
def drift_(
    steps: Annotated[int, typer.Option(help="T, the length of each synthetic run.")] = 500,
    dimension: Annotated[int, typer.Option(help="d, coordinates of each.")] = 256,
    seed: Seed = 0,
    out: Out = None,
    json: Json = False,
) -> None:
    """Which filter follows which drift, on synthetic gradients (Tables 6 and 10, Figures 10 and 11)."""
    from fiberdp.diagnostics import drift

    _run(drift, "drift", out, json, steps=steps, dimension=dimension, seed=seed)


def _run(module: Any, name: str, out: str | None, json: bool, **options: Any) -> None:
    """Check --out, measure, print, write."""
    from fiberdp.cli.progress import counter
    from fiberdp.diagnostics.folder import new_folder, write
    from fiberdp.record import to_text

    folder = new_folder(out)
    with counter(name) as advance:
        found = getattr(module, name)(**options, advance=advance)
    if json:
        print(to_text(found))
    else:
        _show(module.tables(found))
    for warning in found.get("warnings", []):
        print(f"fiberdp: warning: {warning}", file=sys.stderr)
    if folder:
        write(folder, name, found, module)


def _show(tables: list[Any]) -> None:
    from rich import table
    from rich.console import Console

    console = Console()
    for one in tables:
        shown = table.Table(box=None, pad_edge=False, header_style="bold")
        for i, column in enumerate(one.columns):
            shown.add_column(column, justify="right" if i else "left")
        for row in one.rows:
            shown.add_row(*row)
        console.print(one.title, style="bold")
        console.print(shown)
        console.print()
