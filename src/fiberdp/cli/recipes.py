"""fiberdp recipes: the list."""

from __future__ import annotations

from typing import Annotated

import typer


def recipes(json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False) -> None:
    """List the recipes: task, model, data, where the paper's figure stands, minutes on 2 CPU cores."""
    from fiberdp.recipes import RECIPES
    from fiberdp.record import to_text

    rows = [
        {
            name: getattr(recipe, name)
            for name in ("name", "task", "model", "data", "epsilon", "batch_size", "epochs", "paper", "cpu_minutes")
        }
        for recipe in (make() for make in RECIPES.values())
    ]
    if json:
        print(to_text({"recipes": rows}))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("recipe", "task", "model", "data", "paper", "minutes"):
        table.add_column(name, no_wrap=name == "recipe")  # to be typed as it stands
    for row in rows:
        table.add_row(
            row["name"],
            row["task"],
            row["model"],
            row["data"],
            row["paper"],
            "-" if row["cpu_minutes"] is None else f"{row['cpu_minutes']:g}",
        )
    console = Console()
    console.print(table)
    console.print("\nmodel: with its trainable parameters.  minutes: one run of fiber on 2 CPU cores.", style="dim")
