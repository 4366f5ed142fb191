"""fiberdp sweep: tune a method on held-out rows."""

from __future__ import annotations

from typing import Annotated

import typer


def sweep(
    recipe: Annotated[str, typer.Argument(help="A name from `fiberdp recipes`.")],
    method: Annotated[str, typer.Option(help="fiber, disk, dp-adamw, dp-sgd, …")] = "fiber",
    trials: Annotated[int, typer.Option(help="Runs in all: give every method the same number.")] = 20,
    epsilon: Annotated[float | None, typer.Option(help="Privacy budget of a run; the recipe's if left out.")] = None,
    out: Annotated[str | None, typer.Option(help="Folder for the trials; called again, it goes on.")] = None,
    storage: Annotated[
        str | None, typer.Option(help="Database URL for the trials, for several machines; sweep.db in --out if left out.")
    ] = None,
    study: Annotated[str | None, typer.Option(help="Name of the study in the storage.")] = None,
    seed: Annotated[int, typer.Option(help="Of the search, and of every trial's keys.")] = 100,
    epochs: Annotated[int | None, typer.Option(help="Passes over the data.")] = None,
    steps: Annotated[int | None, typer.Option(help="Releases, instead of epochs.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="B, the expected batch size.")] = None,
    clip_norm: Annotated[float | None, typer.Option(help="C, the bound on one example's contribution.")] = None,
    multiplicity: Annotated[
        int | None, typer.Option(help="Augmented copies an example, averaged before the clip; none if left out.")
    ] = None,
    data: Annotated[str | None, typer.Option(help="Folder of Parquet files in the hub's layout (or FIBERDP_DATA).")] = None,
    engine: Annotated[str | None, typer.Option(help="ghost, vmap or loop.")] = None,
    workers: Annotated[int | None, typer.Option(help="Processes at a time; one a core if left out.")] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> None:
    """Tune a method for a recipe on held-out training rows: the learning rate first, then (kappa, gamma), then omega."""
    from fiberdp.cli.progress import runs
    from fiberdp.record import to_text
    from fiberdp.sweeping import markdown
    from fiberdp.sweeping import sweep as searched

    settings = {
        "epochs": epochs, "steps": steps, "batch_size": batch_size, "clip_norm": clip_norm, "multiplicity": multiplicity,
        "data": data, "engine": engine,
    }  # fmt: skip
    with runs(quiet=json) as observer:
        found = searched(
            recipe, method=method, trials=trials, epsilon=epsilon, out=out, storage=storage, study=study, seed=seed, workers=workers,
            observer=observer, **{name: value for name, value in settings.items() if value is not None},
        )  # fmt: skip
    print(to_text(found) if json else markdown(found), end="\n" if json else "")
