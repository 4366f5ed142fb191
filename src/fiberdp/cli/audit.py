"""fiberdp audit: attack a run, and say what epsilon the attack rules out."""

from __future__ import annotations

from typing import Annotated

import typer


def audit(
    target: Annotated[str, typer.Argument(help="A recipe, or the folder of a finished run, whose configuration is run again.")],
    method: Annotated[str | None, typer.Option(help="fiber, disk, dp-adamw, dp-sgd, …; fiber if left out.")] = None,
    epsilon: Annotated[float | None, typer.Option(help="Privacy budget; the recipe's if left out.")] = None,
    delta: Annotated[float | None, typer.Option(help="Failure probability; 0.01 over the canaries if left out.")] = None,
    canaries: Annotated[int, typer.Option(help="Rows that are there or not by a coin.")] = 10_000,
    guesses: Annotated[int | None, typer.Option(help="On how many of them a guess is made; a tenth if left out.")] = None,
    attack: Annotated[str, typer.Option(help="sum, or differences, which finds noise that is drawn twice.")] = "sum",
    confidence: Annotated[float, typer.Option(help="Of the lower bound.")] = 0.95,
    steps: Annotated[int | None, typer.Option(help="Releases; the recipe's if left out.")] = None,
    sampling: Annotated[str | None, typer.Option(help="poisson, fixed_size, shuffle or cyclic.")] = None,
    data: Annotated[str | None, typer.Option(help="Folder of Parquet files in the hub's layout (or FIBERDP_DATA).")] = None,
    seed: Annotated[int | None, typer.Option(help="Reproducible; secret keys if left out.")] = None,
    engine: Annotated[str, typer.Option(help="ghost, vmap or loop.")] = "ghost",
    json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> int:
    """Train once with canaries, guess which of them were there, and bound epsilon from below by the guesses.

    Exit code 1 if the bound is above the accounted epsilon: then the run is not what its ledger says.
    """
    from fiberdp._allocator import keep_freed_memory
    from fiberdp.auditing import audit_named
    from fiberdp.cli.progress import progress
    from fiberdp.record import to_text

    keep_freed_memory()
    with progress(quiet=json) as reporter:
        found = audit_named(
            target, method=method, epsilon=epsilon, delta=delta, canaries=canaries, guesses=guesses, attack=attack, confidence=confidence,
            steps=steps, sampling=sampling, data=data, seed=seed, engine=engine, progress=reporter.stepped,
        )  # fmt: skip
    if json:
        print(to_text(found.to_json()))
    else:
        print(
            f"epsilon is at least {found.epsilon_lower:.3f} with {found.confidence:.0%} confidence; accounted: "
            f"{found.epsilon_accounted:.4g} (delta {found.delta:.3g}).\n"
            f"{found.correct} of {found.guesses} guesses about {found.canaries} canaries were right (attack: {found.attack}).\n"
            f"The audit {'agrees with' if found.agrees else 'CONTRADICTS'} the account."
        )
    return 0 if found.agrees else 1
