"""account: the privacy statement of a run, from its public numbers; what `fiberdp account` prints."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from fiberdp._validate import choice, count, interval, positive
from fiberdp.accounting import ACCOUNTANTS, read_ledger
from fiberdp.accounting import epsilon as price
from fiberdp.accounting import noise_multiplier as calibrate
from fiberdp.accounting.events import compose
from fiberdp.sampling import SAMPLERS
from fiberdp.sampling import sampler as sampler_named

# The names scripts rely on: METHODS.md calls the two conversions improved and classic.
_ALTERNATIVE = {"pld": "pld", "rdp": "rdp_improved", "rdp-classic": "rdp_classic"}


def account(
    *,
    num_examples: int,
    batch_size: int,
    steps: int,
    delta: float,
    epsilon: float | None = None,
    noise_multiplier: float | None = None,
    sampling: str = "poisson",
    groups: int | None = None,
    accountant: str | None = None,
) -> dict[str, Any]:
    """The noise a target epsilon needs, or the epsilon a noise multiplier gives, by every accountant that can tell.

    num_examples: N.  batch_size: B, expected.  steps: T.  delta: in (0, 1), below 1/N to mean anything.
    noise_multiplier: sigma, std of the noise on the clipped sum in units of C.  accountant: the sampler's tightest if not given.
    groups: of cyclic sampling, which prices rounds of banded noise (columns of norm 1, at most `groups` bands) or of white noise.

    Returns JSON values: noise_multiplier, epsilon, delta, relation, accountant, sampling, num_examples,
    batch_size, steps, and alternatives {name: {noise_multiplier, epsilon}} with rdp_improved, rdp_classic and, if
    another accountant is the main one, pld.  Given epsilon, an alternative's noise_multiplier is what it would
    need; given noise_multiplier, its epsilon is what it reports.  An alternative that cannot is left out.
    epsilon never exceeds the target, and falls short of it by less than 1 %.
    Raises ValueError unless exactly one of epsilon and noise_multiplier is given and everything is in range.

    >>> stated = account(num_examples=50_000, batch_size=50_000, steps=100, delta=1e-5, noise_multiplier=10.0)
    >>> round(stated["epsilon"], 4), stated["relation"], round(stated["alternatives"]["rdp_improved"]["epsilon"], 4)
    (4.3772, 'add_or_remove_one', 4.7285)
    """
    sampler = sampler_named(sampling, num_examples, batch_size, groups)
    main = choice("accountant", sampler.accountant if accountant is None else accountant, ACCOUNTANTS)
    count("steps", steps, why="It is T, the number of steps taken, each of which releases a gradient.")
    interval("delta", delta, 0, 1, open_low=True, open_high=True, why="Choose it below 1/N, for example N^-1.1.")
    if (epsilon is None) == (noise_multiplier is None):
        given = "neither" if epsilon is None else "both"
        raise ValueError(
            f"epsilon and noise_multiplier: {given} given, exactly one is needed. Each determines the other. Give epsilon "
            "to find the noise, or noise_multiplier to find epsilon."
        )
    if epsilon is not None:
        positive("epsilon", epsilon, why="It is the privacy budget of the whole run.")
    if noise_multiplier is not None:
        _check_noise(noise_multiplier)

    def figures(name: str) -> dict[str, float]:
        sigma = noise_multiplier
        if sigma is None:
            assert epsilon is not None
            sigma = calibrate(lambda s: sampler.charge(s, steps), epsilon, delta, relation=sampler.relation, accountant=name)
        spent = price(sampler.charge(sigma, steps), delta, relation=sampler.relation, accountant=name)
        return {"noise_multiplier": float(sigma), "epsilon": spent}

    rest = {"batch_size": batch_size, "steps": steps, **({} if groups is None else {"groups": groups})}
    return _stated(figures, main, sampler, delta, rest)


def account_phases(
    phases: Sequence[tuple[int, int, float]],
    *,
    num_examples: int,
    delta: float,
    sampling: str = "poisson",
    accountant: str | None = None,
) -> dict[str, Any]:
    """epsilon of a run whose batch size or noise changes on the way.

    phases: (B, T, sigma) of each, in any order.  The rest as in `account`; cyclic sampling is left out, because its groups hold for a
    whole run.  A pass of shuffled batches that a phase does not finish is paid in full.

    Returns JSON values: epsilon, delta, relation, accountant, sampling, num_examples, steps of all, phases, and alternatives {name:
    {epsilon}} by the other accountants.
    Raises ValueError for anything out of range.

    >>> account_phases([(1000, 50, 20.0), (1000, 200, 20.0)], num_examples=1000, delta=1e-5)["epsilon"] == account_phases(
    ...     [(1000, 250, 20.0)], num_examples=1000, delta=1e-5)["epsilon"]
    True
    """
    choice("sampling", sampling, tuple(name for name in SAMPLERS if name != "cyclic"))
    interval("delta", delta, 0, 1, open_low=True, open_high=True, why="Choose it below 1/N, for example N^-1.1.")
    count("phases", len(phases), why="A run has at least one phase.")
    samplers = [sampler_named(sampling, num_examples, batch_size) for batch_size, _, _ in phases]
    for _, steps, sigma in phases:
        count("steps", steps, why="It is the number of steps of a phase, each of which releases a gradient.")
        _check_noise(sigma)
    charges = [sampler.charge(sigma, steps) for sampler, (_, steps, sigma) in zip(samplers, phases)]
    sampler = samplers[0]  # all have one relation
    main = choice("accountant", sampler.accountant if accountant is None else accountant, ACCOUNTANTS)

    def figures(name: str) -> dict[str, float]:
        return {"epsilon": price(compose(charges), delta, relation=sampler.relation, accountant=name)}

    each = [{"batch_size": b, "steps": t, "noise_multiplier": sigma} for b, t, sigma in phases]
    return _stated(figures, main, sampler, delta, {"steps": sum(steps for _, steps, _ in phases), "phases": each})


def _stated(figures: Callable[[str], dict[str, float]], main: str, sampler: Any, delta: float, rest: dict[str, Any]) -> dict[str, Any]:
    """figures(accountant) by the main one, what they are about, and by the others under "alternatives"."""
    stated = figures(main)
    alternatives: dict[str, dict[str, float]] = {}
    for name in ACCOUNTANTS:
        if name == main:
            if name != "pld":
                alternatives[_ALTERNATIVE[name]] = dict(stated)
            continue
        try:
            alternatives[_ALTERNATIVE[name]] = figures(name)
        except ValueError:  # the inputs are valid, main priced them: this accountant cannot reach the target
            continue
    return {
        **stated,
        "delta": delta,
        "relation": sampler.relation,
        "accountant": main,
        "sampling": sampler.name,
        "num_examples": sampler.num_examples,
        **rest,
        "alternatives": alternatives,
    }


def _check_noise(sigma: float) -> None:
    why = "Without noise epsilon is infinite. Give sigma = std / C."
    interval("noise_multiplier", sigma, 0, math.inf, open_low=True, open_high=True, why=why)


def account_ledger(path: str, *, unfinished: bool = False) -> dict[str, Any]:
    """What the steps of a ledger cost, from the file alone.

    Returns JSON values: epsilon, delta, relation, accountant, steps, finished, chain (of the last line; the record of the run has it
    too) and ledger, the path.  unfinished: price the steps that are there, of a run that goes on or was given up.
    Raises ValueError, with the line number, for a file that was edited; that was cut, so that no line says how many steps there were,
    unless `unfinished`; or that does not say how epsilon is computed.
    """
    found = read_ledger(path)
    if not found.chained or found.terms is None:
        raise ValueError(
            f"{path}: line 1 does not name delta, relation and accountant: epsilon means nothing without them. Give the ledger of a run "
            "made with fiberdp train, or price its numbers with --noise-multiplier."
        )
    if not found.finished and not unfinished:
        raise ValueError(
            f"{path}: line {found.lines + 1} is missing: no line says that the run ended after step {len(found.events) - 1}, so the "
            "file was cut or the run was not finished. Restore the file, or give --unfinished to price the steps that it has."
        )
    return {
        "epsilon": price(found.event(), found.terms["delta"], relation=found.terms["relation"], accountant=found.terms["accountant"]),
        **found.terms,
        "steps": len(found.events),
        "finished": found.finished,
        "chain": found.chain,
        "ledger": path,
    }
