"""fiberdp diagnose: what the paper measures beside accuracy, measured here."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

diagnose = typer.Typer(help="Measure drift tracking, noise attenuation, the correction's assumptions, and the floor.", no_args_is_help=True)

Out = Annotated[str | None, typer.Option(help="New folder for a JSON file, a Markdown page and a figure.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]
Recipe = Annotated[str, typer.Option(help="A name from `fiberdp recipes`.")]
Epsilon = Annotated[float | None, typer.Option(help="Privacy budget of each run; the recipe's if left out.")]
Data = Annotated[str | None, typer.Option(help="Folder of Parquet files in the hub's layout (or FIBERDP_DATA).")]
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


@diagnose.command("attenuation")
def attenuation_(
    filter: Annotated[str, typer.Option(help="Name of the filter, such as innovation, ema, lowpass, kalman_auto.")] = "innovation",
    omega: Annotated[float | None, typer.Option(help="Of innovation.")] = None,
    kappa: Annotated[float | None, typer.Option(help="Of ema.")] = None,
    alpha: Annotated[float | None, typer.Option(help="Of alpha_beta.")] = None,
    beta: Annotated[float | None, typer.Option(help="Of alpha_beta.")] = None,
    sigma_s: Annotated[float | None, typer.Option(help="Of kalman.")] = None,
    sigma_r: Annotated[float | None, typer.Option(help="Of kalman.")] = None,
    mechanism: Annotated[str, typer.Option(help="gaussian, gaussian-on-grid or banded.")] = "gaussian",
    bands: Annotated[int | None, typer.Option(help="Coefficients of the banded noise; 4 if left out.")] = None,
    recipe: Recipe = "digits",
    steps: Annotated[int | None, typer.Option(help="Of training; the filter's warm-up and 300 if left out.")] = None,
    epsilon: Annotated[float | None, typer.Option(help="Privacy budget of each run; 0.5 if left out.")] = None,
    projections: Annotated[int, typer.Option(help="Random directions.")] = 256,
    seed: Seed = 0,
    data: Data = None,
    out: Out = None,
    json: Json = False,
) -> None:
    """How much noise the filter lets through in training, beside what it declares (section 5.3, Figure 6)."""
    from fiberdp.diagnostics import attenuation

    given = {"omega": omega, "kappa": kappa, "alpha": alpha, "beta": beta, "sigma_s": sigma_s, "sigma_r": sigma_r}
    chosen = attenuation.filter_named(filter, **{name: value for name, value in given.items() if value is not None})
    _run(
        attenuation, "attenuation", out, json, filter=chosen, mechanism=attenuation.mechanism_named(mechanism, bands), recipe=recipe,
        steps=steps, epsilon=epsilon, projections=projections, seed=seed, data=data,
    )  # fmt: skip


@diagnose.command("assumptions")
def assumptions_(
    recipe: Recipe = "digits",
    steps: Annotated[int, typer.Option(help="Of each run; an eighth is warm-up (the paper: 800).")] = 400,
    epsilon: Epsilon = None,
    omega: Annotated[float | None, typer.Option(help="Gain of the innovation filter.")] = None,
    eps_v: Annotated[float | None, typer.Option(help="Floor of the corrected second moment.")] = None,
    seeds: Annotated[int, typer.Option(help="Runs.")] = 3,
    projections: Annotated[int, typer.Option(help="Random directions in each.")] = 16,
    seed: Seed = 0,
    data: Data = None,
    out: Out = None,
    json: Json = False,
) -> None:
    """Whether signal and noise are uncorrelated (Tables 7 and 11).  Reads the noise: for whoever holds the data, not for release."""
    from fiberdp.diagnostics import assumptions

    _run(
        assumptions, "assumptions", out, json, recipe=recipe, steps=steps, epsilon=epsilon, omega=omega, eps_v=eps_v, seeds=seeds,
        projections=projections, seed=seed, data=data,
    )  # fmt: skip


@diagnose.command("clamp")
def clamp_(
    recipe: Recipe = "digits",
    steps: Annotated[int | None, typer.Option(help="Of each run; the recipe's if left out.")] = None,
    epsilon: Epsilon = None,
    seed: Seed = 0,
    data: Data = None,
    out: Out = None,
    json: Json = False,
) -> None:
    """How much of the update each floor decides (appendix E.6, Figure 13)."""
    from fiberdp.diagnostics import clamp

    _run(clamp, "clamp", out, json, recipe=recipe, steps=steps, epsilon=epsilon, seed=seed, data=data)


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

    console = Console(markup=False, highlight=False)
    for one in tables:
        shown = table.Table(box=None, pad_edge=False, header_style="bold")
        for i, column in enumerate(one.columns):
            shown.add_column(column, justify="right" if i else "left")
        for row in one.rows:
            shown.add_row(*row)
        console.print(one.title, style="bold")
        console.print(shown)
        console.print()
