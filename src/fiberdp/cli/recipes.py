"""fiberdp recipes: the list, or all of one."""

from __future__ import annotations

from typing import Annotated, Any

import typer


def recipes(
    name: Annotated[str | None, typer.Argument(help="Tell everything about this one.")] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> None:
    """List the recipes: task, model, data, where the paper's figure stands, minutes on 2 CPU cores; or say all of one."""
    from fiberdp.recipes import RECIPES, recipe_named
    from fiberdp.record import to_text

    told = [_told(recipe_named(each)) for each in ([name] if name else RECIPES)]
    if json:
        print(to_text(told[0] if name else {"recipes": told}))
    elif name:
        _one(told[0])
    else:
        _list(told)


def _told(recipe: Any) -> dict[str, Any]:
    plain = (
        "name", "task", "model", "data", "epsilon", "num_examples", "clip_norm", "batch_size", "epochs", "metric", "paper", "cpu_minutes",
    )  # fmt: skip
    return {key: getattr(recipe, key) for key in plain} | {
        "delta": recipe.delta(recipe.num_examples),
        "options": recipe.options,
        "grids": dict(recipe.grids),
        "published": [vars(row) for row in recipe.published],
    }


def _list(told: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("recipe", "model", "paper", "minutes"):
        table.add_column(column, no_wrap=column == "recipe", justify="right" if column == "minutes" else "left")
    for row in told:
        minutes = "-" if row["cpu_minutes"] is None else f"{row['cpu_minutes']:g}"
        table.add_row(row["name"], row["model"], row["paper"], minutes)
    console = Console()
    console.print(table)
    console.print(
        "\nmodel: with its trainable parameters.  minutes: of fiber on 2 CPU cores, -: not run there.  fiberdp recipes NAME says all.",
        style="dim",
    )


def _one(row: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    facts = Table(box=None, pad_edge=False, show_header=False)
    for label, value in (
        ("task", row["task"]),
        ("model", row["model"]),
        ("data", row["data"]),
        ("N", f"{row['num_examples']:,} training rows, the held-out ones not counted"),
        ("delta", f"{row['delta']:.3g}, from N"),
        ("epsilon", f"{row['epsilon']:g}"),
        ("C", f"{row['clip_norm']:g}"),
        ("B", f"{row['batch_size']:,}"),
        ("E", f"{row['epochs']}"),
        ("metric", row["metric"]),
        *((f"grid of {key}", ", ".join(f"{value:g}" for value in values)) for key, values in row["grids"].items()),
        *((f"options of {key}", ", ".join(f"{k} {v}" for k, v in values.items())) for key, values in row["options"].items()),
    ):
        facts.add_row(label, value)
    console = Console(highlight=False)
    console.print(row["name"], style="bold")
    console.print(facts)
    if row["published"]:
        table = Table(box=None, pad_edge=False, header_style="bold")
        for column in ("the paper reports", "epsilon", "", "std", "place"):
            table.add_column(column)
        for figure in row["published"]:
            std = "" if figure["std"] is None else f"{figure['std']:g}"
            table.add_row(figure["method"], f"{figure['epsilon']:g}", f"{figure['value']:g} ({figure['metric']})", std, figure["place"])
        console.print()
        console.print(table)
