"""fiberdp bench: what a step costs beside a plain one and beside Opacus, and an update beside torch's own."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

METHODS = "dp-adamw,disk,fiber,fiber-lookahead"


def bench(
    models: Annotated[
        str, typer.Option(help="Comma-separated: cnn5, wrn-16-4, mlp, vit-tiny, roberta-like, gpt2-like, update; all if left out.")
    ] = "all",
    variants: Annotated[str, typer.Option(help="Comma-separated: nonprivate, one-point-vmap, opacus-hooks, …; all if left out.")] = "all",
    elements: Annotated[int, typer.Option(help="Length of the vector of model update.")] = 20_000_000,
    rounds: Annotated[int, typer.Option(help="How often everything is timed.")] = 7,
    batch_size: Annotated[int | None, typer.Option(help="Examples a step, instead of each model's own.")] = None,
    memory: Annotated[bool, typer.Option(help="Measure peak memory too, each variant in a process of its own.")] = True,
    tricks: Annotated[bool, typer.Option("--tricks", help="Time the engine without each of its tricks too.")] = False,
    out: Annotated[str | None, typer.Option(help="A file that keeps every model's rows as they are done; continued if it exists.")] = None,
    recipe: Annotated[
        str | None, typer.Option(help="Time whole steps of this recipe by several methods instead, on its own data and batch size.")
    ] = None,
    methods: Annotated[str, typer.Option(help="Of --recipe, comma-separated; the others are compared with the first.")] = METHODS,
    accuracies: Annotated[
        str | None, typer.Option(help="comparison.json of `fiberdp compare` on --recipe: accuracy gained per overhead is told too.")
    ] = None,
    data: Annotated[str | None, typer.Option(help="Folder of Parquet files for --recipe (or FIBERDP_DATA).")] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> None:
    """Time whole private steps beside plain forward and backward: one process, interleaved, medians, ratios."""
    from fiberdp._allocator import keep_freed_memory
    from fiberdp.bench import MODELS, VARIANTS
    from fiberdp.bench import bench as measured
    from fiberdp.record import to_text

    keep_freed_memory()
    if recipe is not None:
        from fiberdp.bench.resources import resources

        told = resources(
            recipe, methods.split(","), accuracies=None if accuracies is None else _comparison(accuracies), rounds=rounds, data=data,
            memory=memory, progress=lambda line: print(line, file=sys.stderr, flush=True),
        )  # fmt: skip
        if out is not None:
            from pathlib import Path

            from fiberdp._disk import write_atomically

            write_atomically(Path(out), to_text(told))
        print(to_text(told)) if json else _show_resources(told)
        return
    found = measured(
        MODELS if models == "all" else models.split(","), tuple(VARIANTS) if variants == "all" else variants.split(","),
        elements=elements, rounds=rounds, batch_size=batch_size, memory=memory, tricks=tricks, kept=out,
        progress=lambda line: print(line, file=sys.stderr, flush=True),
    )  # fmt: skip
    if json:
        print(to_text(found))
    else:
        _show(found)


def _comparison(path: str) -> dict:
    from json import loads
    from pathlib import Path

    try:
        found = loads(Path(path).read_text())
        _ = found["rows"][0]["mean"], found["settings"]["recipe"]
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(f"--accuracies {path}: must be the comparison.json of `fiberdp compare`: accuracies are read from it.") from error
    return found


def _show_resources(told: dict) -> None:
    from rich.console import Console
    from rich.table import Table

    cost = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("method", "evaluations", "step ms", "examples/s", "run s", "overhead", "+-", "peak MiB"):
        cost.add_column(name, justify="left" if name in ("method", "evaluations") else "right", no_wrap=True)
    worth = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("method", "epsilon", "test, %", "gain", "gain / overhead"):
        worth.add_column(name, justify="left" if name == "method" else "right", no_wrap=True)
    for row in told["rows"]:
        cost.add_row(
            row["method"], row["evaluations"], _number(1e3 * row["step_seconds"], ".1f"), _number(row["examples_per_second"], ",.0f"),
            _number(row["run_seconds"], ".0f"), _number(row["overhead"], ".3f"), _number(row["spread"], ".3f"),
            _number(row["peak_mib"], ".0f"),
        )  # fmt: skip
        for at in row["results"]:
            worth.add_row(
                row["method"], f"{at['epsilon']:g}", f"{100 * at['accuracy']:.2f}", _number(at["gain"], "+.2f"),
                _number(at["efficiency"], "+.2f"),
            )  # fmt: skip
    console = Console()
    console.print(cost)
    if worth.row_count:
        console.print()
        console.print(worth)
    console.print(
        f"\nMedians of {told['rounds']} interleaved rounds of whole steps; a run is its steps alone. Overhead and gain, in points, over "
        f"{told['baseline']}.",
        style="dim",
    )


def _show(found: dict) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("model", "variant", "batch", "ms", "ratio", "+-", "kernel ratio", "peak MiB"):
        table.add_column(name, justify="left" if name in ("model", "variant") else "right", no_wrap=True)
    for row in found["rows"]:
        numbers = [
            _number(row["seconds"] and 1e3 * row["seconds"], ".1f"), _number(row["ratio"], ".2f"), _number(row["spread"], ".2f"),
            _number(row["kernel_ratio"], ".2f"), _number(row["peak_mib"], ".0f"),
        ]  # fmt: skip
        table.add_row(row["model"], row["variant"], _number(row["batch_size"], "d"), *numbers)
    console = Console()
    console.print(table)
    for row in found["rows"]:
        if row["skipped"]:
            console.print(f"{row['model']} {row['variant']}: {row['skipped']}", style="dim")
    console.print(
        f"\n{found['threads']} threads, medians of {found['rounds']} interleaved rounds; ratios to nonprivate, forward and backward. "
        f"Model update: {found['elements']:,} floats, ratios to adamw-fused.",
        style="dim",
    )  # fmt: skip


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
