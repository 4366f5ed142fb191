"""fiberdp train: one run of a recipe."""

from __future__ import annotations

import sys
from typing import Annotated

import typer


def train(
    recipe: Annotated[str, typer.Argument(help="A name from `fiberdp recipes`.")],
    method: Annotated[str, typer.Option(help="fiber, disk, dp-adamw, dp-sgd, …")] = "fiber",
    epsilon: Annotated[float | None, typer.Option(help="Privacy budget; the recipe's if left out.")] = None,
    delta: Annotated[float | None, typer.Option(help="Failure probability; N**-1.1 if left out.")] = None,
    data: Annotated[str | None, typer.Option(help="Folder of Parquet files in the hub's layout (or FIBERDP_DATA).")] = None,
    out: Annotated[str | None, typer.Option(help="Run directory; without it nothing is written.")] = None,
    epochs: Annotated[int | None, typer.Option(help="Passes over the data.")] = None,
    steps: Annotated[int | None, typer.Option(help="Releases, instead of epochs.")] = None,
    seed: Annotated[int | None, typer.Option(help="Reproducible, and NOT private against who knows it.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, …")] = "cpu",
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in --out from its checkpoint.")] = False,
    batch_size: Annotated[int | None, typer.Option(help="B, the expected batch size.")] = None,
    clip_norm: Annotated[float | None, typer.Option(help="C, the bound on one example's contribution.")] = None,
    clip: Annotated[str, typer.Option(help="flat, automatic (every gradient scaled to just under C) or per_layer.")] = "flat",
    lr: Annotated[float | None, typer.Option(help="Peak learning rate.")] = None,
    omega: Annotated[float | None, typer.Option(help="Innovation filter's gain, in (0, 1].")] = None,
    kappa: Annotated[float | None, typer.Option(help="Two-point geometry (and DiSK's filter), in (0, 1).")] = None,
    gamma: Annotated[float | None, typer.Option(help="How far the second point looks ahead.")] = None,
    eps_v: Annotated[str | None, typer.Option(help="Floor of the corrected second moment, or auto.")] = None,
    eps_v_scale: Annotated[float | None, typer.Option(help="With --eps-v auto: the floor in standard deviations of the noise.")] = None,
    allow_extrapolation: Annotated[bool, typer.Option("--allow-extrapolation", help="Accept (1-kappa)/(kappa*gamma) > 1.")] = False,
    bands: Annotated[int | None, typer.Option(help="Coefficients of the banded noise of mf-dp-ftrl.")] = None,
    sampling: Annotated[str | None, typer.Option(help="poisson, fixed_size, shuffle or cyclic; what the method's noise needs.")] = None,
    groups: Annotated[int | None, typer.Option(help="Groups of cyclic sampling; the bands if left out.")] = None,
    multiplicity: Annotated[
        int | None, typer.Option(help="Augmented copies an example, averaged before the clip; none if left out.")
    ] = None,
    scaling: Annotated[
        float | None, typer.Option(help="Scale gradients before the clip by 1/(sqrt(v) + this) of what was released; costs no epsilon.")
    ] = None,
    averaging: Annotated[float | None, typer.Option(help="Decay of an average of the weights, kept beside them; costs no epsilon.")] = None,
    accountant: Annotated[str | None, typer.Option(help="pld, rdp or rdp-classic.")] = None,
    engine: Annotated[
        str, typer.Option(help="ghost, vmap or loop; auto measures which of the first two is faster. Changes no epsilon.")
    ] = "ghost",
    precision: Annotated[
        str, typer.Option(help="Of the forward and backward pass: float32, bf16 or fp16; changes no epsilon.")
    ] = "float32",
    micro_batch_size: Annotated[int | None, typer.Option(help="Examples in memory at a time; changes no epsilon.")] = None,
    exact_noise: Annotated[
        bool, typer.Option("--exact-noise", help="White noise in exact arithmetic: its last bits tell nothing; slower, 0.1 % more noise.")
    ] = False,
    unaccounted: Annotated[bool, typer.Option("--unaccounted", help="Keep raw training statistics in resume/ (NOT private).")] = False,
    json: Annotated[bool, typer.Option("--json", help="The record as one JSON document on stdout.")] = False,
) -> None:
    """Train a recipe under differential privacy, with the noise proved first."""
    from fiberdp._allocator import keep_freed_memory
    from fiberdp._ranks import join, said_once
    from fiberdp.cli.progress import progress
    from fiberdp.experiment import fit
    from fiberdp.record import to_text

    keep_freed_memory()
    given = {
        "lr": lr, "omega": omega, "kappa": kappa, "gamma": gamma, "eps_v": _floor(eps_v), "eps_v_scale": eps_v_scale, "bands": bands,
        "allow_extrapolation": allow_extrapolation or None,
    }  # fmt: skip
    with join(device) as (ranks, device), progress(quiet=json, mute=not ranks.first) as reporter, said_once(ranks):
        record = fit(
            recipe, method=method, options={name: value for name, value in given.items() if value is not None},
            multiplicity=multiplicity, averaging=averaging, scaling=scaling,
            epsilon=epsilon, delta=delta, clip_norm=clip_norm, clip=clip, batch_size=batch_size, epochs=epochs, steps=steps,
            sampling=sampling, groups=groups, accountant=accountant, data=data, out=out, resume=resume, seed=seed, device=device,
            engine=engine, precision=precision, micro_batch_size=micro_batch_size, exact_noise=exact_noise,
            unaccounted=unaccounted, reporter=reporter,
        )  # fmt: skip
    if not ranks.first:
        return
    for warning in record["warnings"]:
        print(f"fiberdp: warning: {warning}", file=sys.stderr)
    if json:
        print(to_text(record))
    else:
        print(_summary(record, out))


def _floor(eps_v: str | None) -> float | str | None:
    try:
        return None if eps_v is None else float(eps_v)
    except ValueError:
        return eps_v  # "auto", or refused by the calibration, which knows why


def _summary(record: dict, out: str | None) -> str:
    privacy, receipt, result, timing = record["privacy"], record["receipt"], record["result"], record["timing"]
    return (
        f"({privacy['epsilon']:.4g}, {privacy['delta']:.3g})-DP, {privacy['relation'].replace('_', '-')}, by "
        f"{privacy['accountant']} from the ledger of "
        f"{privacy['steps']} steps ({privacy['sampling']} sampling, noise multiplier {privacy['noise_multiplier']:.4g}).\n"
        f"Noise receipt: std is {receipt['std_ratio']:.4f} +- {receipt['standard_error']:.4f} of what is charged.\n"
        f"Accuracy: test {result['test']:.4f}, held-out {result['heldout']:.4f} (outside epsilon), in {timing['seconds']:.0f} s at "
        f"{timing['examples_per_second']:.0f} images/s.\n"
        + _averaged(result["averaged"])
        + ("Keys were derived from the seed: reproducible, not private against who knows it.\n" if record["keys"] == "seeded" else "")
        + (f"Run directory: {out}" if out else "Nothing was kept: give --out DIR to keep the model, ledger and record.")
    )


def _averaged(result: dict | None) -> str:
    return f"Averaged weights: test {result['test']:.4f}, held-out {result['heldout']:.4f}.\n" if result else ""
