"""fiberdp compare: methods side by side on a recipe."""

from __future__ import annotations

import sys
from typing import Annotated

import typer


def compare(
    recipe: Annotated[str, typer.Argument(help="A name from `fiberdp recipes`.")],
    methods: Annotated[str, typer.Option(help="Comma-separated; the others are compared with the first.")] = "fiber,disk,dp-adamw,dp-sgd",
    epsilons: Annotated[str | None, typer.Option(help="Comma-separated budgets; the recipe's if left out.")] = None,
    seeds: Annotated[int, typer.Option(help="Runs of each method at each epsilon, with keys of seeds 0, 1, …")] = 3,
    out: Annotated[str | None, typer.Option(help="Folder that keeps the runs; called again, it goes on.")] = None,
    tuned: Annotated[
        list[str] | None, typer.Option(help="sweep.json of a method at an epsilon: its best options in the place of the recipe's.")
    ] = None,
    trials: Annotated[
        int | None, typer.Option(help="Sweep every method at every epsilon first, with so many trials: one command for a whole table.")
    ] = None,
    epochs: Annotated[int | None, typer.Option(help="Passes over the data.")] = None,
    steps: Annotated[int | None, typer.Option(help="Releases, instead of epochs.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="B, the expected batch size.")] = None,
    clip_norm: Annotated[float | None, typer.Option(help="C, the bound on one example's contribution.")] = None,
    multiplicity: Annotated[
        int | None, typer.Option(help="Augmented copies an example, averaged before the clip; none if left out.")
    ] = None,
    data: Annotated[str | None, typer.Option(help="Folder of Parquet files in the hub's layout (or FIBERDP_DATA).")] = None,
    engine: Annotated[str | None, typer.Option(help="ghost, vmap or loop.")] = None,
    micro_batch_size: Annotated[int | None, typer.Option(help="Examples in memory at a time; changes no epsilon.")] = None,
    workers: Annotated[int | None, typer.Option(help="Processes at a time; one a core if left out.")] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> None:
    """Train a recipe by several methods with the same seeds; means, intervals and paired differences of test accuracy."""
    from fiberdp.cli.progress import runs
    from fiberdp.comparison import COLUMNS, lines
    from fiberdp.comparison import compare as compared
    from fiberdp.recipes import recipe_named
    from fiberdp.record import to_text

    settings = {
        "epochs": epochs, "steps": steps, "batch_size": batch_size, "clip_norm": clip_norm, "multiplicity": multiplicity,
        "data": data, "engine": engine,
        "micro_batch_size": micro_batch_size,
    }  # fmt: skip
    with runs(quiet=json) as observer:
        result = compared(
            recipe, methods=methods.split(","), epsilons=[recipe_named(recipe).epsilon] if epsilons is None else _numbers(epsilons),
            seeds=seeds, out=out, tuned=[_sweep(path) for path in tuned or []], trials=trials, workers=workers, observer=observer,
            **{name: value for name, value in settings.items() if value is not None},
        )  # fmt: skip
    for warning in result["warnings"]:
        print(f"fiberdp: warning: {warning}", file=sys.stderr)
    if json:
        print(to_text(result))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in COLUMNS:
        table.add_column(name)
    for row in lines(result):
        table.add_row(*row)
    console = Console()
    console.print(table)
    console.print(f"\n{result['note']}", style="dim", soft_wrap=True)


def _sweep(path: str) -> dict:
    from json import loads
    from pathlib import Path

    try:
        found = loads(Path(path).read_text())
        _ = found["best"]["options"], found["trials"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"--tuned {path}: it must be the sweep.json of `fiberdp sweep`, because options are read from it.") from error
    return found


def _numbers(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"--epsilons {text!r}: it must be numbers, separated by commas, such as 0.5,1,2.") from None
