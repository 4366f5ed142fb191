"""E14 (DIST): 2 ranks, C = 1, sigma = 1, B = 8: every rank ends with (s_0 + s_1 + z)/8 and one z of std 1, so std 0.125.

Two processes joined by gloo, with the blocks that a distributed trainer is to be made of: sampler, engine, gate.  Origin: CASES.md
(opacus#191, #444, #745).  Wrong: 0.17678 (the full noise twice), 0.25 (the same noise twice), 0.0625 (divided by the number of ranks
again), other weights on each rank.  With half the noise sigma is 0.7071: epsilon is 4.481, not 1.828.
"""

from __future__ import annotations

import os
import sys
import traceback
from datetime import timedelta

import pytest
import torch
from torch import nn

import fiberdp
from fiberdp.clipping import Flat
from fiberdp.engines import GhostEngine, Loss
from fiberdp.flat import FlatParameters
from fiberdp.mechanisms import Gaussian
from fiberdp.observation import OnePoint
from fiberdp.sampling import Poisson, Shuffle
from fiberdp.types import ClippedSum, Noise

RANKS, N, B, SIGMA, C, D, STEPS = 2, 40, 8, 1.0, 1.0, 100_000, 3
KEYS = fiberdp.Keys.seeded(14)
SAMPLERS = {"poisson": Poisson(num_examples=N, batch_size=B), "shuffle": Shuffle(num_examples=N, batch_size=B)}
GATE = Gaussian(noise_multiplier=SIGMA, batch_size=B)
SECONDS = 120

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available() or not torch.distributed.is_gloo_available(), reason="torch is built without gloo"
)


class Vector(nn.Module):
    """f(w; x) = w.x, whose gradient is x."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(D))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.w


def rows():
    x = torch.randn(N, D, generator=torch.Generator().manual_seed(14)) / D**0.5  # norms of about 1: some are clipped
    x[::3] *= 3
    return x


def shared(indices, rank):
    """The sample is drawn alike on every rank, since the keys are the same, and dealt out."""
    return indices[rank::RANKS]


def local_sum(x):
    model = Vector()
    engine = GhostEngine(FlatParameters(model), Loss(model, lambda m, batch: m(batch)))
    return engine.clipped_sum(OnePoint().probes(), None, x, Flat(clip_norm=C), seed=0)


def all_reduced(tensor):
    torch.distributed.all_reduce(tensor)
    return tensor


def share_of_the_noise(clipped, rank, step):
    """std sigma C / sqrt(ranks) on every rank, from streams of their own."""
    own = fiberdp.Keys.seeded(1000 + rank).stream("noise")
    return own.add_normal_(clipped.total.clone(), step=step, scale=SIGMA * C / RANKS**0.5)


def work(rank):
    """What one rank finds, by name."""
    x, found = rows(), {}
    for name, sampler in SAMPLERS.items():
        for step in range(STEPS):
            mine = shared(sampler.indices(KEYS.stream("data"), step), rank)
            clipped = local_sum(x[mine])
            whole = ClippedSum(all_reduced(clipped.total.clone()), clipped.sensitivity)
            release = GATE.release(whole, KEYS.stream("noise"), step)
            found[name, step] = {"rows": mine, "sum": clipped.total, "release": release.value, "noise": release.noise}
    zero, stream = ClippedSum(torch.zeros(D), C), KEYS.stream("noise")
    found["each its part"] = all_reduced(share_of_the_noise(zero, rank, 0)) / B
    # faults: what each would do to the noise
    alone = GATE.release(ClippedSum(torch.zeros(D), C), fiberdp.Keys.seeded(2000 + rank).stream("noise"), 0).value
    found["full noise twice"] = all_reduced(alone)
    found["same noise twice"] = all_reduced(GATE.release(ClippedSum(torch.zeros(D), C), stream, 0).value)
    found["divided again"] = GATE.release(ClippedSum(torch.zeros(D), C), stream, 0).value / RANKS
    half = stream.add_normal_(torch.zeros(D), step=0, start=rank * D // RANKS, scale=1.0)[: D // RANKS]
    parts = [torch.empty(D // RANKS) for _ in range(RANKS)]
    torch.distributed.all_gather(parts, half)
    found["slices"] = torch.cat(parts)
    return found


def process(rank, store, folder):
    """One rank: leaves what it found, or why it failed, in `folder`."""
    torch.set_num_threads(1)
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the processes are on one machine, which need not know its own name
    try:
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS, timeout=timedelta(seconds=SECONDS)
        )  # fmt: skip
        found = work(rank)
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
    except BaseException:
        (folder / f"{rank}.txt").write_text(traceback.format_exc())
        raise
    torch.save(found, folder / f"{rank}.pt")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    context = torch.multiprocessing.get_context("spawn")
    processes = [context.Process(target=process, args=(rank, folder / "store", folder)) for rank in range(RANKS)]
    for each in processes:
        each.start()
    for each in processes:
        each.join(SECONDS)
        if each.is_alive():
            each.kill()
    failed = [path.read_text() for path in sorted(folder.glob("*.txt"))]
    assert not failed, failed[0]
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(RANKS)]


def agrees(noise, std):
    """100,000 samples: the standard error of a std is 0.22 %, and 4.5 of them are 1 %."""
    assert noise.numel() == D
    return abs(float(noise.double().square().mean().sqrt()) / std - 1) < 4.5 * (2 * D) ** -0.5


EVERY = [(name, step) for name in SAMPLERS for step in range(STEPS)]


@pytest.mark.parametrize("at", EVERY)
def test_every_rank_ends_with_the_same_release_of_both_sums_and_one_draw(ranks, at):
    one, other = (rank[at] for rank in ranks)
    assert torch.equal(one["release"], other["release"])
    z = KEYS.stream("noise").normal(at[1], 0, D)
    torch.testing.assert_close(one["release"], (one["sum"] + other["sum"] + z) / 8, rtol=1e-5, atol=1e-6)
    noise = one["release"] - (one["sum"] + other["sum"]) / 8
    assert agrees(noise, 0.125)
    assert not agrees(noise * 1.1, 0.125)  # a sigma off by a tenth is seen
    assert one["noise"] == other["noise"] == Noise(0.125)


@pytest.mark.parametrize("at", EVERY)
def test_ranks_read_disjoint_rows_and_together_the_whole_sample(ranks, at):
    one, other = (set(rank[at]["rows"].tolist()) for rank in ranks)
    assert not one & other
    assert one
    assert other
    assert one | other == set(SAMPLERS[at[0]].indices(KEYS.stream("data"), at[1]).tolist())
    x = rows()
    for rank in ranks:
        mine = x[rank[at]["rows"]]
        right = (mine * (C / mine.norm(dim=1, keepdim=True)).clamp(max=1)).sum(0)
        torch.testing.assert_close(rank[at]["sum"], right, rtol=1e-5, atol=1e-6)


def test_the_sum_of_ranks_is_the_sum_of_one_process(ranks):
    x = rows()
    for at in EVERY:
        whole = local_sum(x[SAMPLERS[at[0]].indices(KEYS.stream("data"), at[1])])
        torch.testing.assert_close(ranks[0][at]["sum"] + ranks[1][at]["sum"], whole.total, rtol=1e-5, atol=1e-6)


def test_noise_may_be_added_in_independent_parts_or_drawn_in_slices(ranks):
    one, other = (rank["each its part"] for rank in ranks)
    assert torch.equal(one, other)
    assert agrees(one, 0.125)
    for rank in ranks:
        assert torch.equal(rank["slices"], KEYS.stream("noise").normal(0, 0, D))


@pytest.mark.parametrize(("fault", "std"), [("full noise twice", 0.17678), ("same noise twice", 0.25), ("divided again", 0.0625)])
def test_each_fault_has_its_signature_and_is_rejected(ranks, fault, std):
    for rank in ranks:
        assert agrees(rank[fault], std)
        assert not agrees(rank[fault], 0.125)


def test_epsilon_of_the_right_noise_and_of_half_of_it_on_each_rank():
    """std 1/2 on each of two ranks is std 0.7071 on the sum.  The charge is that of the whole batch, whatever the number of ranks."""
    sizes = {"num_examples": 10_000, "batch_size": 100, "steps": 1000, "delta": 1e-5}
    assert fiberdp.account(**sizes, noise_multiplier=1.0)["epsilon"] == pytest.approx(1.828, abs=1e-3)
    assert fiberdp.account(**sizes, noise_multiplier=0.7071)["epsilon"] == pytest.approx(4.481, abs=2e-3)
