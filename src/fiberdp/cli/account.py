"""fiberdp account: epsilon for a noise multiplier, the noise multiplier for an epsilon, or what a run's ledger cost."""

from __future__ import annotations

from typing import Annotated, Any

import typer


def account(
    num_examples: Annotated[int | None, typer.Option(help="N, the public number of training examples.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="B, the expected batch size.")] = None,
    steps: Annotated[int | None, typer.Option(help="T, the number of releases.")] = None,
    delta: Annotated[float | None, typer.Option(help="Failure probability, below 1/N.")] = None,
    epsilon: Annotated[float | None, typer.Option(help="Target: find the noise multiplier.")] = None,
    noise_multiplier: Annotated[float | None, typer.Option(help="sigma: find epsilon.")] = None,
    sampling: Annotated[str, typer.Option(help="poisson, fixed_size, shuffle or cyclic.")] = "poisson",
    groups: Annotated[int | None, typer.Option(help="Groups of cyclic sampling: at least the bands of the noise.")] = None,
    accountant: Annotated[str | None, typer.Option(help="pld, rdp or rdp-classic; pld if it can price the sampler.")] = None,
    phase: Annotated[
        list[str] | None, typer.Option(help="B,T,sigma of a part of the run, once for each, instead of the three options.")
    ] = None,
    ledger: Annotated[str | None, typer.Option(help="Price this ledger.jsonl instead, from the file alone.")] = None,
    unfinished: Annotated[bool, typer.Option("--unfinished", help="With --ledger: of a run that has not ended.")] = False,
    json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> None:
    """Price a run before it is made: epsilon from sigma, or sigma from epsilon, by every accountant that applies.

    With --ledger, price what a run was charged, and refuse a ledger that was cut or edited.
    """
    from fiberdp.record import to_text
    from fiberdp.statement import account as priced
    from fiberdp.statement import account_ledger, account_phases

    numbers = {"num_examples": num_examples, "batch_size": batch_size, "steps": steps, "delta": delta}
    if ledger is not None:
        others = {
            **numbers,
            "epsilon": epsilon,
            "noise_multiplier": noise_multiplier,
            "groups": groups,
            "accountant": accountant,
            "phase": phase,
        }
        _refuse([name for name, value in others.items() if value is not None], "a ledger holds its own numbers", "Leave it out")
        statement = account_ledger(ledger, unfinished=unfinished)
        print(to_text(statement) if json else _sentence(statement, f"{statement['steps']} steps, as charged in {ledger}"))
        return
    if phase:
        others = {**numbers, "epsilon": epsilon, "noise_multiplier": noise_multiplier, "groups": groups}
        told = [name for name, value in others.items() if value is not None and name not in ("num_examples", "delta")]
        _refuse(told, "a phase holds its own batch size, steps and noise", "Leave it out, or --phase")
    needed = ("num_examples", "delta") if phase else tuple(numbers)
    _refuse([name for name in needed if numbers[name] is None], "epsilon depends on it", "Give it, or --ledger")
    _refuse(["unfinished"] * unfinished, "it is about a ledger", "Give --ledger")
    if phase:
        assert num_examples is not None
        assert delta is not None
        statement = account_phases(
            [_phase(text) for text in phase], num_examples=num_examples, delta=delta, sampling=sampling, accountant=accountant
        )
    else:
        statement = priced(
            **numbers, epsilon=epsilon, noise_multiplier=noise_multiplier, sampling=sampling, groups=groups, accountant=accountant
        )  # pyright: ignore[reportArgumentType]
    if json:
        print(to_text(statement))
        return
    from rich.console import Console
    from rich.table import Table

    noise = f"{len(phase)} phases" if phase else f"noise multiplier {statement['noise_multiplier']:.4g}"
    print(_sentence(statement, f"{noise}: {statement['steps']} steps of {statement['sampling']} sampling"))
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("alternative", *(["noise multiplier"] * (not phase)), "epsilon"):
        table.add_column(name)
    for name, row in statement["alternatives"].items():
        table.add_row(name, *(f"{value:.4g}" for value in row.values()))
    Console().print(table)


def _phase(text: str) -> tuple[int, int, float]:
    try:
        batch_size, steps, sigma = text.split(",")
        return int(batch_size), int(steps), float(sigma)
    except ValueError:
        raise ValueError(
            f"--phase {text!r}: it must be B,T,sigma, two whole numbers and a number, because those are what a step costs. Give "
            "--phase 500,1000,1.2, once for each part of the run."
        ) from None


def _sentence(statement: dict[str, Any], what: str) -> str:
    relation = statement["relation"].replace("_", "-")
    return f"({statement['epsilon']:.4g}, {statement['delta']:.3g})-DP, {relation}, at {what}, by {statement['accountant']}."


def _refuse(names: list[str], why: str, remedy: str) -> None:
    if names:
        raise ValueError(f"--{names[0].replace('_', '-')}: {why}. {remedy}.")
