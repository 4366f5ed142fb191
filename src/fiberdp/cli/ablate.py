"""fiberdp ablate: one part at a time."""

from __future__ import annotations

from typing import Annotated

import typer


def ablate(
    recipe: Annotated[str, typer.Argument(help="A name from `fiberdp recipes`.")],
    study: Annotated[str, typer.Argument(help="filter, omega, geometry, gain, correction or eps_v.")],
    epsilon: Annotated[float | None, typer.Option(help="Privacy budget of a run; the recipe's if left out.")] = None,
    seeds: Annotated[int, typer.Option(help="Runs of each arm, with keys of seeds 0, 1, …")] = 3,
    trials: Annotated[int, typer.Option(help="Learning rates tried for each arm on held-out rows, 1 to 7.")] = 3,
    out: Annotated[str | None, typer.Option(help="Folder that keeps the runs; called again, it goes on.")] = None,
    epochs: Annotated[int | None, typer.Option(help="Passes over the data.")] = None,
    steps: Annotated[int | None, typer.Option(help="Releases, instead of epochs.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="B, the expected batch size.")] = None,
    clip_norm: Annotated[float | None, typer.Option(help="C, the bound on one example's contribution.")] = None,
    multiplicity: Annotated[
        int | None, typer.Option(help="Augmented copies an example, averaged before the clip; none if left out.")
    ] = None,
    data: Annotated[str | None, typer.Option(help="Folder of Parquet files in the hub's layout (or FIBERDP_DATA).")] = None,
    workers: Annotated[int | None, typer.Option(help="Processes at a time; one a core if left out.")] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> None:
    """Change one part of FiBeR and nothing else: the filter, omega, (kappa, gamma), (kappa, omega), the correction, or eps_v."""
    from fiberdp.ablation import ablate as ablated
    from fiberdp.ablation import markdown
    from fiberdp.cli.progress import runs
    from fiberdp.record import to_text

    settings = {
        "epochs": epochs, "steps": steps, "batch_size": batch_size, "clip_norm": clip_norm, "multiplicity": multiplicity, "data": data,
    }  # fmt: skip
    with runs(quiet=json) as observer:
        found = ablated(
            recipe, study, epsilon=epsilon, seeds=seeds, trials=trials, out=out, workers=workers, observer=observer,
            **{name: value for name, value in settings.items() if value is not None},
        )  # fmt: skip
    print(to_text(found) if json else markdown(found), end="\n" if json else "")
