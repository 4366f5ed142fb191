"""The share of the noise that a run's filter lets through at each step, from the configuration in its record alone."""

from __future__ import annotations

import json
from functools import lru_cache

from fiberdp.planning import Plan
from fiberdp.report.reading import Run

STEPS = 500
"""Filters have settled long before; DOPPLER's default is within 1 % after 330 steps."""


def noise_gain(run: Run) -> tuple[tuple[float, ...], float] | None:
    """(A_t for t < T, at most `STEPS`; A, which it settles to); None where gains follow the data, or if the method is not one of ours.

        A_t = Var[filtered noise at step t] / sigma_w^2

    sigma_w: std of one coordinate of what is released, for correlated noise of its white part.
    """
    plan = run.record["config"]["plan"] | {"method": run.plan["method"]}
    if plan["method"].get("mechanism", {}).get("type") == "banded":
        return _gains(json.dumps(plan, sort_keys=True))
    # white noise: neither its strength nor how batches are drawn matters, so runs that differ in those are computed once
    kept = {"noise_multiplier": 1.0, "batch_size": 1, "num_examples": 1, "sampling": "poisson", "delta": 0.5, "clip": plan.get("clip")}
    return _gains(json.dumps({key: value for key, value in plan.items() if key != "groups"} | kept, sort_keys=True))


@lru_cache(maxsize=256)
def _gains(plan: str) -> tuple[tuple[float, ...], float] | None:
    try:
        agreed = Plan.from_json(json.loads(plan))
    except ValueError:
        return None
    noise, filter = agreed.mechanism.noise(agreed.clip.sensitivity, 0), agreed.method.filter
    if filter.learns:
        return None
    gains = filter.noise_gains(min(agreed.steps, STEPS), noise)
    return tuple(float(gain) for gain in gains), filter.system(None).noise_gain(noise)
