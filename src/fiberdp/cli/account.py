"""fiberdp account: epsilon for a noise multiplier, or the noise multiplier for an epsilon."""

from __future__ import annotations

from typing import Annotated

import typer


def account(
    num_examples: Annotated[int, typer.Option(help="N, the public number of training examples.")],
    batch_size: Annotated[int, typer.Option(help="B, the expected batch size.")],
    steps: Annotated[int, typer.Option(help="T, the number of releases.")],
    delta: Annotated[float, typer.Option(help="Failure probability, below 1/N.")],
    epsilon: Annotated[float | None, typer.Option(help="Target: find the noise multiplier.")] = None,
    noise_multiplier: Annotated[float | None, typer.Option(help="sigma: find epsilon.")] = None,
    sampling: Annotated[str, typer.Option(help="poisson, fixed_size, shuffle or cyclic.")] = "poisson",
    groups: Annotated[int | None, typer.Option(help="Groups of cyclic sampling: at least the bands of the noise.")] = None,
    accountant: Annotated[str | None, typer.Option(help="pld, rdp or rdp-classic; pld if it can price the sampler.")] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> None:
    """Price a run before it is made: epsilon from sigma, or sigma from epsilon, by every accountant that applies."""
    from fiberdp.record import to_text
    from fiberdp.statement import account as priced

    statement = priced(
        num_examples=num_examples, batch_size=batch_size, steps=steps, delta=delta, epsilon=epsilon,
        noise_multiplier=noise_multiplier, sampling=sampling, groups=groups, accountant=accountant,
    )  # fmt: skip
    if json:
        print(to_text(statement))
        return
    from rich.console import Console
    from rich.table import Table

    print(
        f"({statement['epsilon']:.4g}, {statement['delta']:.3g})-DP, {statement['relation'].replace('_', '-')}, at noise multiplier "
        f"{statement['noise_multiplier']:.4g}: {statement['steps']} steps of {statement['sampling']} sampling, by "
        f"{statement['accountant']}."
    )
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("alternative", "noise multiplier", "epsilon"):
        table.add_column(name)
    for name, numbers in statement["alternatives"].items():
        table.add_row(name, f"{numbers['noise_multiplier']:.4g}", f"{numbers['epsilon']:.4g}")
    Console().print(table)
