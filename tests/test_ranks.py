"""Several processes release, charge and end with what one would have (DIST; issue: torchrun)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

import ranks as processes
from fiberdp._ranks import Ranks, launched
from fiberdp.accounting import read_ledger
from fiberdp.cli import main

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available() or not torch.distributed.is_gloo_available(), reason="torch is built without gloo"
)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """R -> what each of R processes found."""
    folder = tmp_path_factory.mktemp("ranks")
    return {count: processes.together("every_method", folder / str(count), count) for count in (1, 2, 3)}


def close(a, b, tolerance):
    return float((a - b).norm()) <= tolerance * float(b.norm())


@given(n=st.integers(0, 200), at_most=st.integers(1, 64), count=st.integers(1, 9))
def test_the_shares_of_all_processes_are_the_batch_and_no_example_is_in_two(n, at_most, count):
    indices = torch.randperm(n)
    parts = [part for rank in range(count) for part in Ranks(rank, count).share(indices, at_most)]
    assert all(torch.equal(part, indices[first : first + len(part)]) for first, part in parts)
    assert sorted(i for _, part in parts for i in part.tolist()) == list(range(n))
    assert all(len(part) <= at_most for _, part in parts)
    sizes = [sum(len(part) for _, part in Ranks(rank, count).share(indices, at_most)) for rank in range(count)]
    assert max(sizes) - min(sizes) <= at_most


@given(numel=st.integers(0, 100), count=st.integers(1, 9))
def test_the_slices_of_all_processes_are_the_vector_and_of_one_size(numel, count):
    slices = Ranks(0, count).slices(numel)
    assert [i for part in slices for i in range(numel)[part]] == list(range(numel))
    assert len(slices) == count
    sizes = [part.stop - part.start for part in slices]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("name", processes.METHODS)
@pytest.mark.parametrize("count", [2, 3])
def test_weights_and_epsilon_of_any_number_of_processes_are_those_of_one(found, name, count):
    """In float64, where the order of additions does not show: what is left would be another sample, another noise or another update."""
    (alone,) = found[1]
    for rank in found[count]:
        got, right = rank[name], alone[name]
        assert close(got["theta"], right["theta"], 1e-12)
        assert got["epsilon"] == right["epsilon"]
        assert got["chain"] == right["chain"]
        assert got["clamp"] == (None if right["clamp"] is None else pytest.approx(right["clamp"], abs=1e-9))
        assert got["receipt"]["std_ratio"] == pytest.approx(right["receipt"]["std_ratio"], rel=1e-12)
        assert (got["bar"] is None) == (right["bar"] is None)
        if right["bar"] is not None:
            assert close(got["bar"], right["bar"], 1e-12)


@pytest.mark.parametrize("name", ["dp-sgd", "dp-adamw", "disk", "fiber-plus"])
@pytest.mark.parametrize("count", [2, 3])
def test_float32_weights_are_those_of_one_process_to_1e6(found, name, count):
    for rank in found[count]:
        assert close(rank[name, "float32"]["theta"], found[1][0][name, "float32"]["theta"], 1e-6)


@pytest.mark.parametrize("count", [2, 3])
def test_all_processes_hold_the_same_weights_bit_for_bit(found, count):
    for key in (*processes.METHODS, ("fiber-plus", "float32")):
        assert all(torch.equal(rank[key]["theta"], found[count][0][key]["theta"]) for rank in found[count])


@pytest.mark.parametrize("count", [2, 3])
def test_the_one_ledger_is_that_of_one_process(found, count, tmp_path_factory):
    folder = tmp_path_factory.getbasetemp()
    for name in ("dp-sgd", "fiber-plus"):
        one, several = (next(folder.glob(f"ranks*/{n}/{name}.jsonl")).read_bytes() for n in (1, count))
        assert one == several
        assert read_ledger(next(folder.glob(f"ranks*/{count}/{name}.jsonl"))).finished


@pytest.mark.parametrize("count", [2, 3])
def test_each_process_keeps_its_slice_of_the_state(found, count):
    for name in processes.METHODS:
        whole = found[1][0][name]["own"]
        held = [rank[name]["own"] for rank in found[count]]
        assert sum(held) == whole
        assert max(held) <= whole / count + 10  # at most one entry more of each vector


@pytest.mark.parametrize("count", [2, 3])
def test_batches_smaller_than_the_number_of_processes_are_steps(found, count):
    for rank in found[count]:
        assert close(rank["tiny batches"]["theta"], found[1][0]["tiny batches"]["theta"], 1e-12)


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 3), (3, 2)])
def test_a_run_goes_on_with_another_number_of_processes(found, before, after, tmp_path):
    states = {name: found[before][0][name, "half"] for name in ("fiber", "mf-dp-ftrl")}
    torch.save(states, tmp_path / "half.pt")
    for rank in processes.together("half_way", tmp_path / "after", after):
        for name, got in rank.items():
            assert close(got["theta"], found[1][0][name]["theta"], 1e-12)
            assert got["epsilon"] == found[1][0][name]["epsilon"]


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """What each of two processes found."""
    return processes.together("several", tmp_path_factory.mktemp("two"), 2)


def test_processes_that_would_not_train_the_same_are_refused_alike(two):
    one, other = (rank["refusals"] for rank in two)
    assert one == other
    assert "process 1 of 2 has another data than process 0" in one["data"]
    assert "another plan" in one["plan"]
    assert "kalman_auto' with 2 processes" in one["filter"]
    assert one["first"].startswith("invalid literal")


def test_a_run_holds_no_process_group(two):
    """A group that something still holds when the interpreter ends has threads that abort it: 1 in 8 scripts ended with SIGABRT."""
    assert [rank["copies"]["held"] for rank in two] == [["count", "rank"]] * 2


def test_model_and_keys_are_the_first_ones(two):
    one, other = (rank["copies"] for rank in two)
    assert one["keys"] == other["keys"]
    assert one["keys"]["kind"] == "secret"
    assert one["state"].keys() == other["state"].keys()
    assert all(torch.equal(one["state"][k], other["state"][k]) for k in one["state"])


def test_noise_that_two_processes_share_is_no_proof(two):
    """Slices of 2,505 coordinates that carry the same noise, 10 steps: the correlation of 1 is seen at any sample size."""
    for rank in two:
        assert "correlation of process 0 with process 1" in rank["faulty"]


def test_processes_that_did_not_join_are_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert launched() == 2
    with pytest.raises(ValueError, match=r"WORLD_SIZE=2 without a process group"):
        processes.run_of("fiber")


DIGITS = ["train", "digits", "--seed", "3", "--method", "fiber-plus"]
ARGUMENTS = ["-m", "fiberdp", *DIGITS]


def test_a_killed_process_ends_all_and_one_process_goes_on(tmp_path):
    """One of two is killed in mid-run: the other says so and ends with 1; resumed by one process, it is as if nothing had happened."""
    out, whole = tmp_path / "killed", tmp_path / "whole"
    started = processes.command([*ARGUMENTS, "--steps", "60", "--out", str(out)], 2)
    metrics, deadline = out / "metrics.jsonl", time.monotonic() + 120
    while not (metrics.exists() and metrics.read_bytes().count(b"\n") >= 2):  # two epochs are on disk
        assert time.monotonic() < deadline
        assert started[0].poll() is None, started[0].communicate()
        time.sleep(0.01)
    started[1].send_signal(signal.SIGKILL)
    started[0].wait(60)
    error = started[0].stderr.read()
    assert started[0].returncode == 1, error
    (line,) = [line for line in error.splitlines() if line.startswith("fiberdp: ")]
    assert "another process of the run is gone" in line
    assert "--resume" in line
    assert not (out / "record.json").exists()
    for process in started:
        process.communicate()

    arguments = [*DIGITS, "--steps", "60"]
    assert main([*arguments, "--out", str(out), "--resume"]) == 0
    assert main([*arguments, "--out", str(whole)]) == 0
    got, right = (load_file(path / "release" / "model.safetensors") for path in (out, whole))
    assert close(*(torch.cat([tensors[name].flatten() for name in right]) for tensors in (got, right)), 1e-6)
    assert (out / "ledger.jsonl").read_bytes() == (whole / "ledger.jsonl").read_bytes()


def torchrun(arguments, count):
    return subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(count), *arguments],
        capture_output=True, text=True, timeout=240, env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"}, check=False,
    )  # fmt: skip


def test_torchrun_trains_a_recipe_and_prints_its_record_once(tmp_path):
    ended = torchrun([*ARGUMENTS, "--steps", "10", "--json", "--out", str(tmp_path / "run")], 2)
    assert ended.returncode == 0, ended.stderr
    record = json.loads(ended.stdout)
    assert record["timing"]["processes"] == 2
    assert record["receipt"]["passed"]
    assert {"std of process 0", "std of process 1"} <= {check["name"] for check in record["receipt"]["checks"]}
    assert (tmp_path / "run" / "release" / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--method", "nonsense"], "method"),
        (["--unaccounted", "--out", "{}"], "unaccounted with 2 processes"),
    ],
)
def test_bad_input_of_all_processes_is_one_line(tmp_path, more, said):
    started = processes.command([*ARGUMENTS, *(word.format(tmp_path / "new") for word in more)], 2)
    errors = [process.communicate(timeout=120)[1] for process in started]
    lines = [line for error in errors for line in error.splitlines() if line.startswith("fiberdp: ")]
    assert len(lines) == 1, errors
    assert said in lines[0]
    assert [process.returncode for process in started] == [2, 2]
    assert not any(path.is_file() and path.name != "lock" for path in tmp_path.rglob("*"))


@pytest.mark.parametrize(("rank", "lines"), [("0", 1), ("1", 0)])
def test_other_commands_are_not_done_once_by_each_process(monkeypatch, capsys, rank, lines):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", rank)
    assert main(["compare", "digits", "--methods", "dp-sgd"]) == 2
    said = capsys.readouterr().err
    assert said.count("compare in 2 processes") == said.count("\n") == lines
