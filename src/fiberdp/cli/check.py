"""fiberdp check: which rule serves each parameter, and whether it is right."""

from __future__ import annotations

from typing import Annotated, Any

import typer


def check(
    target: Annotated[str, typer.Argument(help="A recipe, a model of `fiberdp bench`, or module:function.")],
    engine: Annotated[str, typer.Option(help="ghost or vmap.")] = "ghost",
    examples: Annotated[int, typer.Option(help="Synthetic examples; 2 is quicker for large models.")] = 3,
    json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> int:
    """Compare an engine's clipped sum with the oracle's, parameter by parameter, on synthetic examples.

    module:function returns (model, loss_fn, batch); of the batch only the structure is used.  Exit code 1 if an error is too large.
    """
    import os
    import sys

    from fiberdp.checking import check_named
    from fiberdp.record import to_text

    sys.path.insert(0, os.getcwd())  # as `python -m` does, so that the user's own module is found
    try:
        found = check_named(target, engine=engine, examples=examples)
    finally:
        sys.path.remove(os.getcwd())
    if json:
        print(to_text(found))
    else:
        _show(found)
    return 0 if found["passed"] else 1


def _show(found: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("parameter", "shape", "rule", "error"):
        table.add_column(name, justify="right" if name == "error" else "left", overflow="fold")
    for row in found["parameters"]:
        shape = " x ".join(map(str, row["shape"])) or "scalar"
        table.add_row(row["name"], shape, " + ".join(row["rules"]) or "not used", f"{row['error']:.1e}")
    Console(markup=False, highlight=False).print(table)
    verdict = "passed" if found["passed"] else "FAILED"
    print(f"engine {found['engine']}, largest error {found['max_error']:.1e} of the oracle's sum: {verdict}")
