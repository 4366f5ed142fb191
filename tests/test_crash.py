"""A run survives what happens to disks and folders: a second process, a full or read-only disk, a damaged checkpoint, a power cut.

A tiny run is broken at every call it makes to the operating system; each time it is continued and compared with the unbroken one.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import json
import os
import resource
import shutil
import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

import fiberdp
from fiberdp import experiment
from fiberdp.accounting import ledger as ledger_module
from fiberdp.accounting import read_ledger
from fiberdp.checkpoint import load_checkpoint
from fiberdp.cli import main
from fiberdp.recipes.recipe import Recipe, classification_loss

PATHS = [str(Path(fiberdp.__file__).parents[1]), str(Path(__file__).parent)]
ENV = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(PATHS)}
CLI = [
    sys.executable,
    "-c",
    "import sys, test_crash as t; t.experiment.recipe_named = lambda name: t.RECIPE; sys.exit(t.main(sys.argv[1:]))",
    "train",
    "tiny",
]
"""The command line as a process of its own, which knows the recipe `tiny`."""


def rows(n: int, seed: int) -> dict[str, torch.Tensor]:
    image = torch.randn(n, 4, generator=torch.Generator().manual_seed(seed))
    return {"image": image, "label": (image[:, 0] > 0).long()}


DATA = {"train": rows(40, 1), "heldout": rows(10, 2), "test": rows(10, 3)}
RECIPE = Recipe(
    name="tiny", task="", model="", data="", paper="", cpu_minutes=0, epsilon=3.0, clip_norm=1.0, batch_size=20, epochs=2,
    num_examples=40, options={"fiber": {"lr": 0.02}, "mf-dp-ftrl": {"bands": 2}}, load=lambda data: DATA, loss=classification_loss,
    build=lambda: nn.Linear(4, 2),
)  # fmt: skip


@pytest.fixture(autouse=True)
def _prove_the_noise_once(monkeypatch):
    """The receipt takes most of the time of a tiny run, touches no disk, and is the same each time."""
    real, known = fiberdp.Run.prove, {}

    def prove(run):
        name = run.plan.method.name
        run.receipt = known.get(name)
        known[name] = real(run)
        return known[name]

    monkeypatch.setattr(fiberdp.Run, "prove", prove)


@pytest.fixture
def tiny(monkeypatch):
    """The command line knows the recipe `tiny`."""
    monkeypatch.setattr(experiment, "recipe_named", lambda name: RECIPE)


def fit(out: Path, **options):
    return fiberdp.fit(RECIPE, **{"seed": 7, "out": out} | options)


class Reporter:
    """Does `then` after step `at`."""

    def __init__(self, at: int, then):
        self.at, self.then = at, then

    def proved(self, plan, receipt): ...
    def evaluated(self, line, steps): ...
    def stepped(self, step, steps):
        if step == self.at:
            self.then()


class Crash(Exception):
    pass


def crash() -> None:
    raise Crash


def files(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def finished(out: Path) -> dict[str, bytes]:
    """What a finished run leaves that two runs of one seed have in common; and nothing is left over."""
    found = files(out)
    assert set(found) == {
        "ledger.jsonl", "metrics.jsonl", "record.json", "release/config.json", "release/ledger_summary.json", "release/model.safetensors",
        "resume/checkpoint.safetensors", "resume/lock",
    }  # fmt: skip
    record = json.loads(found.pop("record.json"))
    found.pop("resume/checkpoint.safetensors")  # holds the time it took
    return found | {"record": json.dumps([record["privacy"], record["result"], record["receipt"]]).encode()}


def continued(out: Path, **options) -> None:
    """As the user would go on: resume if there is a checkpoint, start again if the run never began, nothing if it had ended."""
    if not (out / "record.json").exists():
        fit(out, resume=(out / "resume" / "checkpoint.safetensors").exists(), **options)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    out = tmp_path_factory.mktemp("whole") / "run"
    fit(out)
    return finished(out)


def refused(match: str, kind: type[Exception] = ValueError, **options) -> None:
    with pytest.raises(kind, match=match) as error:
        fit(**options)
    assert "\n" not in str(error.value)


def command(capsys, *arguments: str) -> tuple[int, str]:
    """Exit code and stderr of `fiberdp train tiny`; the last line is the error, if there is one."""
    code = main(["train", "tiny", "--seed", "7", "--json", *arguments])
    return code, capsys.readouterr().err


# ---- two processes on one run directory ----


def test_a_second_run_in_a_folder_is_one_line_exit_code_2_and_changes_nothing(tmp_path, capsys, tiny, whole):
    """Whether it starts or resumes, from another thread; the first goes on to the bit-identical end."""
    out, codes = tmp_path / "run", []

    def second() -> None:
        before = files(out)
        for more in ([], ["--resume"]):
            line = ["train", "tiny", "--seed", "7", "--out", str(out), *more]
            thread = threading.Thread(target=lambda line=line: codes.append(main(line)))
            thread.start()
            thread.join()
        assert files(out) == before

    fit(out, reporter=Reporter(3, second))
    assert codes == [2, 2]
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2
    assert "is not empty" in said[0]
    assert "belongs to a run that is still going on" in said[1]
    assert finished(out) == whole


def test_a_second_start_before_the_first_checkpoint_is_refused(tmp_path, whole, monkeypatch):
    """Between the first run's folder and its checkpoint the folder still looks unused: the lock tells, and the keys stay the first's."""
    out, real, seen = tmp_path / "run", fiberdp.run_directory.RunDirectory._checkpoint, []

    def checkpoint(self) -> None:
        if not seen:
            seen.append(files(out))
            refused("still going on", out=out, seed=8)
            refused("does not exist", out=out, resume=True)
            seen.append(files(out))
        real(self)

    monkeypatch.setattr(fiberdp.run_directory.RunDirectory, "_checkpoint", checkpoint)
    fit(out)
    assert seen == [{"resume/lock": b""}] * 2
    assert finished(out) == whole


def test_a_start_that_waited_while_another_ran_through_is_refused(tmp_path, whole, monkeypatch):
    """The folder was unused when the second looked, and is another run's when it begins."""
    out, real, first = tmp_path / "run", fiberdp.Run.prove, []

    def prove(run):
        if not first:
            first.append(run)
            fit(out)
        return real(run)

    monkeypatch.setattr(fiberdp.Run, "prove", prove)
    refused("is not empty", out=out, seed=8)
    assert finished(out) == whole


def test_a_killed_process_leaves_no_lock(tmp_path, whole):
    """The lock is another process's, which is killed: the resume that was refused goes through."""
    out = tmp_path / "run"
    with pytest.raises(Crash) as kept:  # as in a notebook, where the last traceback holds everything: the run gave its files back itself
        fit(out, reporter=Reporter(3, crash))
    holder = (
        "import os, sys, time; from fiberdp._disk import lock; print(lock(os.open(sys.argv[1], os.O_RDWR)), flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", holder, str(out / "resume" / "lock")], stdout=subprocess.PIPE, text=True, env=ENV)
    try:
        assert process.stdout
        assert process.stdout.readline() == "True\n"
        refused("still going on", out=out, resume=True)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    fit(out, resume=True)
    assert finished(out) == whole
    del kept


def test_two_processes_that_start_at_once_are_one_run(tmp_path):
    """Real processes of the command line: one run, whole, and one line with exit code 2."""
    line = [*CLI, "--accountant", "rdp", "--json", "--out", str(tmp_path / "run")]
    both = [subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENV) for _ in range(2)]
    said = [process.communicate(timeout=120) for process in both]
    won, lost = sorted(zip([process.returncode for process in both], said))
    assert won[0] == 0, won
    assert (tmp_path / "run" / "record.json").read_text().strip() == won[1][0].strip()
    assert (lost[0], lost[1][0], lost[1][1].count("\n")) == (2, "", 1)
    assert lost[1][1].startswith("fiberdp: --out ")


def test_where_there_are_no_locks_runs_go_without(tmp_path, whole, monkeypatch):
    from fiberdp import _disk

    def flock(descriptor, how):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(_disk.fcntl, "flock", flock)
    fit(tmp_path / "a")
    monkeypatch.setattr(_disk, "fcntl", None)
    fit(tmp_path / "b")
    assert finished(tmp_path / "a") == finished(tmp_path / "b") == whole


# ---- every call to the operating system fails once ----

CALLS = ("open", "write", "fsync", "replace", "mkdir", "chmod", "ftruncate", "unlink")
CLEANING = ("ftruncate", "unlink")  # what works on a full disk


class Disk:
    """os, with a disk that is full (or gone, with EROFS: nothing works) from call number `fail` on.  A write that fails is half done."""

    def __init__(self, monkeypatch, fail: int = -1, number: int = errno.ENOSPC):
        self.calls, self.fail, self.number = 0, fail, number
        for name in CALLS:
            monkeypatch.setattr(os, name, self.wrapped(name, getattr(os, name)))

    def wrapped(self, name, real):
        def call(*arguments, **options):
            if name == "open" and not (len(arguments) > 1 and arguments[1] & os.O_CREAT):
                return real(*arguments, **options)
            if name in CLEANING and self.number == errno.ENOSPC:
                return real(*arguments, **options)
            self.calls += 1
            if 0 <= self.fail < self.calls:
                if name == "write":
                    real(arguments[0], bytes(arguments[1])[: len(arguments[1]) // 2])
                raise OSError(self.number, os.strerror(self.number))
            return real(*arguments, **options)

        return call


@pytest.fixture
def _one_charge_at_a_time(monkeypatch):
    """How many steps are charged together depends on how fast the disk is: here the number of calls must not."""
    monkeypatch.setattr(ledger_module, "AIM", 1e9)


def charged(out: Path) -> int:
    return len(read_ledger(out / "ledger.jsonl").events) if (out / "ledger.jsonl").exists() else 0


@pytest.fixture
def released(monkeypatch) -> list[int]:
    """The steps whose gradient left the gate."""
    steps, real = [], fiberdp.pipeline.Pipeline.release

    def release(self, step, *arguments, **options):
        steps.append(step)
        return real(self, step, *arguments, **options)

    monkeypatch.setattr(fiberdp.pipeline.Pipeline, "release", release)
    return steps


@pytest.mark.usefixtures("_one_charge_at_a_time")
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS], ids=["full", "read-only"])
def test_a_disk_that_fails_at_any_call_costs_no_charge_and_the_run_goes_on_bit_for_bit(tmp_path, monkeypatch, whole, released, number):
    """One OSError of one line that names the file; the ledger holds every release; what is published is whole; then the same run.

    A full disk at every call, one that went read-only (where nothing can be cleaned up either) at every third.
    """
    with monkeypatch.context() as patch:
        disk = Disk(patch, number=number)
        fit(tmp_path / "count", unaccounted=True)
    assert disk.calls > 60
    for k in range(0, disk.calls, 1 if number == errno.ENOSPC else 3):
        out = tmp_path / f"{k}"
        released.clear()
        with monkeypatch.context() as patch:
            Disk(patch, k, number)
            with pytest.raises(OSError, match=f"{out}") as error:
                fit(out, unaccounted=True)
        assert error.value.errno == number
        assert "could not be written" in str(error.value)
        assert "\n" not in str(error.value)
        assert charged(out) >= len(released)
        left = files(out)
        assert number == errno.EROFS or not [name for name in left if name.endswith(".tmp")]
        if "record.json" in left:  # only the folder's fsync was left to do
            assert json.loads(left["record.json"])["privacy"]["steps"] == 4
        for path in out.rglob(".*.tmp"):
            path.rename(path.with_name(path.name.replace(f"{os.getpid()}", "1")))  # the process that goes on has another number
        continued(out, unaccounted=True)
        raw = (out / "resume" / "unaccounted.jsonl").read_text().splitlines()
        assert [json.loads(line)["step"] for line in raw] == [0, 1, 2, 3]
        (out / "resume" / "unaccounted.jsonl").unlink()
        assert finished(out) == whole, k


class Cut:
    """What a power cut would leave: files as they were at their last fsync, in folders as they were at theirs, and nothing else."""

    def __init__(self, monkeypatch, root: Path, released: list[int]):
        self.root = root.stat().st_ino
        self.entries: dict[int, dict[str, tuple[int, bool]]] = {}
        self.content: dict[int, bytes] = {}
        self.moments: list[tuple[dict, dict, int]] = []
        real = os.fsync

        def fsync(descriptor: int) -> None:
            real(descriptor)
            self.moments.append((dict(self.entries), dict(self.content), len(released)))  # cut just before it took effect
            status, path = os.fstat(descriptor), Path(f"/proc/self/fd/{descriptor}")
            if stat.S_ISDIR(status.st_mode):
                self.entries[status.st_ino] = {e.name: (e.inode(), e.is_dir()) for e in os.scandir(path)}
            else:
                self.content[status.st_ino] = path.read_bytes()

        monkeypatch.setattr(os, "fsync", fsync)

    def rebuild(self, entries: dict, content: dict, folder: Path, inode: int | None = None) -> None:
        for name, (inner, is_folder) in entries.get(self.root if inode is None else inode, {}).items():
            if is_folder:
                (folder / name).mkdir()
                self.rebuild(entries, content, folder / name, inner)
            else:
                (folder / name).write_bytes(content.get(inner, b""))


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="finds the file of a descriptor in /proc")
@pytest.mark.usefixtures("_one_charge_at_a_time")
@pytest.mark.parametrize("method", ["fiber", "mf-dp-ftrl"])
def test_a_power_cut_at_any_moment_costs_no_charge_and_the_run_goes_on_bit_for_bit(tmp_path, monkeypatch, released, method):
    """Nothing that was not fsynced is there afterwards, entries of folders included."""
    (tmp_path / "disk").mkdir()
    out = tmp_path / "disk" / "runs" / "a"
    with monkeypatch.context() as patch:
        cut = Cut(patch, tmp_path / "disk", released)
        fit(out, method=method)
    expected, seen = finished(out), []
    for k, (entries, content, steps) in enumerate(cut.moments):
        found = tmp_path / f"{k}"
        found.mkdir()
        cut.rebuild(entries, content, found)
        assert charged(found / "runs" / "a") >= steps
        if (left := files(found)) not in seen:
            seen.append(left)
            continued(found / "runs" / "a", method=method)
            assert finished(found / "runs" / "a") == expected, k
    assert len(seen) > 15


# ---- the same with the operating system's own refusals, through the command line ----


@pytest.mark.usefixtures("_one_charge_at_a_time")
@pytest.mark.parametrize("limit", [100, 600, 1000, 1900, 2500])
def test_a_file_that_may_not_grow_is_one_line_and_exit_code_1(tmp_path, capsys, tiny, whole, limit):
    """RLIMIT_FSIZE: the checkpoint, a line of the ledger, record.json (4 kB) do not fit; without the limit the run goes on."""
    out, (soft, hard) = tmp_path / "run", resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        code, said = command(capsys, "--out", str(out))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (code, said.count("\n")) == (1, 1)
    assert said.startswith(f"fiberdp: {out}")
    assert "could not be written (File too large)" in said
    continued(out)
    assert finished(out) == whole


@contextlib.contextmanager
def mounted(folder: Path, options: str):
    """A small file system of its own, or the test is skipped where none may be mounted."""
    folder.mkdir(exist_ok=True)
    line = ["mount", "-t", "tmpfs", "-o", options, "none", str(folder)]
    if not shutil.which("mount") or subprocess.run(line, capture_output=True, check=False).returncode:
        pytest.skip("no file system may be mounted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.usefixtures("_one_charge_at_a_time")
def test_a_full_disk_is_one_line_and_exit_code_1(tmp_path, capsys, tiny, whole):
    """A real one, with room for 0, 1, 2, … pages of the run; with more room the run goes on."""
    for pages in range(10):
        with mounted(tmp_path / "disk", "size=128k") as disk:
            ballast = disk / "ballast"
            ballast.touch()
            free = os.statvfs(disk).f_bavail
            ballast.write_bytes(bytes((free - pages) * 4096))
            code, said = command(capsys, "--out", str(disk / "run"))
            if not code:
                break
            assert (code, said.count("\n")) == (1, 1)
            assert said.startswith(f"fiberdp: {disk / 'run'}")
            assert "could not be written (No space left on device)" in said
            ballast.unlink()
            continued(disk / "run")
            assert finished(disk / "run") == whole
    assert pages > 4


@pytest.fixture
def begun(tmp_path):
    with pytest.raises(Crash):
        fit(tmp_path / "run", reporter=Reporter(3, crash))
    return tmp_path / "run"


def test_a_folder_that_may_not_be_written_is_one_line_and_exit_code_2(tmp_path, capsys, tiny, monkeypatch):
    """Refused before the data are read: for a new run, for one inside a folder to be made, and for a resume."""
    monkeypatch.setattr(experiment, "_device", lambda device: pytest.fail("went on"))
    with mounted(tmp_path / "disk", "size=128k") as disk:
        (disk / "run" / "resume").mkdir(parents=True)
        (disk / "run" / "resume" / "checkpoint.safetensors").touch()
        (disk / "empty").mkdir()
        before = files(disk)
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        for more in ([disk / "new"], [disk / "a" / "b"], [disk / "empty"], [disk / "run", "--resume"]):
            code, said = command(capsys, "--out", *map(str, more))
            assert (code, said.count("\n")) == (2, 1)
            assert "may not be written to" in said
        assert files(disk) == before


def test_no_permission_is_one_line_and_exit_code_2(tmp_path, capsys, tiny, monkeypatch, begun):
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    before = files(tmp_path)
    for more in (["new"], ["run", "--resume"]):
        code, said = command(capsys, "--out", str(tmp_path / more[0]), *more[1:])
        assert (code, said.count("\n")) == (2, 1)
        assert "may not be written to" in said
    assert files(tmp_path) == before


def test_an_out_that_is_no_folder_is_one_line_and_exit_code_2(tmp_path, capsys, tiny):
    (tmp_path / "file").write_text("mine")
    for out in (tmp_path / "file", tmp_path / "file" / "run", tmp_path / "file" / "a" / "b", tmp_path / ("x" * 300)):
        for more in ([], ["--resume"]):
            code, said = command(capsys, "--out", str(out), *more)
            assert (code, said.count("\n")) == (2, 1)
            assert "is a file" in said or "File name too long" in said
    assert files(tmp_path) == {"file": b"mine"}


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is full")
def test_output_that_does_not_fit_is_one_line_and_exit_code_1():
    line = [sys.executable, "-m", "fiberdp", "recipes", "--json"]
    env = {name: value for name, value in ENV.items() if name != "PYTHONUNBUFFERED"}
    with open("/dev/full", "w") as full:
        done = subprocess.run(line, stdout=full, stderr=subprocess.PIPE, text=True, env=env, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert done.stderr.startswith("fiberdp: standard output could not be written (No space left on device)")


# ---- damaged files ----


def test_a_checkpoint_cut_or_changed_anywhere_is_refused_in_one_line(begun):
    """Cut at lengths all over the file, and with one bit of each of its bytes flipped: nothing but the very content is ever read."""
    folder, path = begun / "resume", begun / "resume" / "checkpoint.safetensors"
    whole, right = path.read_bytes(), load_checkpoint(begun / "resume")
    damaged = [whole[:length] for length in {*range(12), *range(12, len(whole), 7), len(whole) - 1}] + [whole + b"\0"]
    damaged += [whole[:i] + bytes([whole[i] ^ 1 << i % 8]) + whole[i + 1 :] for i in range(len(whole))]
    said = []
    for data in damaged:
        path.write_bytes(data)
        try:
            tensors, state = load_checkpoint(folder)
        except ValueError as error:
            said.append(str(error))
            continue
        assert state == right[1]
        assert tensors.keys() == right[0].keys()
        assert all(torch.equal(t, right[0][name]) and t.dtype == right[0][name].dtype for name, t in tensors.items())
    assert len(said) > len(damaged) - 10
    assert all(line.startswith(f"{path} cannot be read (") and "\n" not in line for line in said)


def test_a_damaged_checkpoint_is_exit_code_2_and_changes_nothing(begun, capsys, tiny, whole):
    path = begun / "resume" / "checkpoint.safetensors"
    kept = path.read_bytes()
    key = kept.index(b"key", kept.index(b"keys") + 4)
    digit = kept[key + 20]
    for data in (b"", kept[:1], kept[:100], kept[:-1], kept.replace(b'"sha256"', b'"sha255"'),
                 kept[: key + 20] + (b"0" if digit != ord("0") else b"1") + kept[key + 21 :]):  # fmt: skip
        path.write_bytes(data)
        before = files(begun)
        code, said = command(capsys, "--out", str(begun), "--resume")
        assert (code, said.count("\n")) == (2, 1)
        assert "cannot be read" in said
        assert files(begun) == before
    path.write_bytes(kept)
    continued(begun)
    assert finished(begun) == whole


@pytest.mark.parametrize("name", ["ledger.jsonl", "metrics.jsonl", "resume/unaccounted.jsonl"])
def test_a_torn_last_line_is_written_again_and_another_damage_is_one_line(tmp_path, capsys, tiny, name):
    for damage in (b"", b"[]\n", b"{}\n", b"\xff\n", b"0\n"):
        out = tmp_path / f"{damage.hex()}"
        with pytest.raises(Crash):
            fit(out, reporter=Reporter(3, crash), unaccounted=True)
        lines = (out / name).read_bytes().splitlines(keepends=True)
        (out / name).write_bytes(damage + b"".join(lines) + lines[-1][:-9])
        code, said = command(capsys, "--out", str(out), "--resume", "--unaccounted")
        assert (code, said.count("\n")) == ((2, 1) if damage else (0, 0)), said
        assert not damage or "line 1 is not what a run writes there" in said


# ---- what is secret ----


def spellings(secret: bytes) -> set[bytes]:
    """Any 8 bytes of it in a row: raw, hex, base64 in each of its three alignments, Python's repr, decimal; and all of it as one number."""
    found = {str(int.from_bytes(secret, order)).encode() for order in ("big", "little")}
    for start in range(len(secret) - 7):
        part = secret[start : start + 8]
        found |= {part, part[::-1], part.hex().encode(), part.hex().upper().encode(), repr(part)[2:-1].encode()}
        found |= {comma.join(map(str, part)).encode() for comma in (",", ", ")}
        for shift in range(3):
            code = base64.b64encode(bytes(shift) + part)[(0, 2, 3)[shift] : (8 + shift) * 8 // 6]
            found |= {code, code.replace(b"+", b"-").replace(b"/", b"_")}
    return found


def numbers(values) -> set[bytes]:
    """As text, in full and to 6 digits; short ones, such as 0.75, may stand anywhere."""
    return {text.encode() for x in values for text in (repr(x), f"{x:.6g}") if len(text) > 6}


def public(out: Path) -> dict[str, bytes]:
    return {name: data for name, data in files(out).items() if not name.startswith("resume/")}


def secrets_of(out: Path) -> set[bytes]:
    """The key, the fingerprint of the data, the noise and its memory, and the raw statistics."""
    tensors, state = load_checkpoint(out / "resume")
    key = bytes.fromhex(state["keys"]["key"])
    noise = [fiberdp.Keys(key, "secret").stream("noise").normal(step, 0, 10) for step in range(4)]
    noise += [t.flatten() for name, t in tensors.items() if name == "noise.w"]
    raw = [json.loads(line) for line in (out / "resume" / "unaccounted.jsonl").read_text().splitlines()]
    found = spellings(key) | spellings(bytes.fromhex(state["fingerprint"])) | {b"clipped", b"silenced", b"fingerprint", b"noise.w"}
    for t in noise:
        found |= spellings(t.numpy().tobytes()) | numbers(t.tolist())
    return found | numbers(line[name] for line in raw for name in ("loss", "clipped"))


@pytest.mark.parametrize("method", ["fiber", "mf-dp-ftrl"])
def test_no_public_file_holds_a_secret_in_any_spelling(tmp_path, method):
    """While a run goes on and after it; --unaccounted is on.  Then each secret is planted, and found."""
    out, during = tmp_path / "run", []
    fit(out, method=method, seed=None, unaccounted=True, reporter=Reporter(3, lambda: during.append(public(out))))
    secrets = secrets_of(out)
    assert len(secrets) > 1000
    for name, data in [*during[0].items(), *public(out).items()]:
        assert not [secret for secret in secrets if secret in data], name
    tensors, state = load_checkpoint(out / "resume")
    key = bytes.fromhex(state["keys"]["key"])
    z = tensors.get("noise.w", fiberdp.Keys(key, "secret").stream("noise").normal(1, 0, 10))
    planted = [
        key, key.hex().encode(), base64.b64encode(key), base64.b64encode(b"x" + key), base64.urlsafe_b64encode(b"xx" + key[:16]),
        str(key).encode(), json.dumps(list(key)).encode(), str(int(key.hex(), 16)).encode(), z.numpy().tobytes(),
        json.dumps(z.tolist()).encode(), json.dumps(state).encode(),
        *((out / "resume" / name).read_bytes() for name in ("unaccounted.jsonl", "checkpoint.safetensors")),
    ]  # fmt: skip
    for data in planted:
        assert [secret for secret in secrets if secret in b"before " + data + b" after"], data


def modes(out: Path) -> dict[str, int]:
    paths = [out / "resume", *(out / "resume").iterdir()]
    return {p.name: stat.S_IMODE(p.stat().st_mode) for p in paths if p.name != "lock"}  # the lock says nothing


@pytest.mark.parametrize("mask", [0, 0o022, 0o077])
def test_what_is_secret_is_closed_to_others_whatever_the_umask_and_the_folder_was(tmp_path, monkeypatch, mask):
    """0700 and 0600 at any moment a name appears; also in a folder that was there, and for files that were opened up meanwhile."""
    out, seen, real = tmp_path / "run", [], os.replace

    def replace(source, target):
        seen.append((Path(target).parent.name, stat.S_IMODE(os.stat(source).st_mode)))
        assert stat.S_IMODE((out / "resume").stat().st_mode) == 0o700
        real(source, target)

    right = {"resume": 0o700, "checkpoint.safetensors": 0o600, "unaccounted.jsonl": 0o600}
    monkeypatch.setattr(os, "replace", replace)
    before = os.umask(mask)
    try:
        (out / "resume").mkdir(parents=True, mode=0o777)
        stray = out / "resume" / f".checkpoint.safetensors.{os.getpid()}.tmp"
        stray.touch(mode=0o666)
        with pytest.raises(Crash):
            fit(out, reporter=Reporter(3, crash), unaccounted=True)
        assert modes(out) == right
        for path in [out / "resume", *(out / "resume").iterdir()]:
            path.chmod(0o777)
        stray.touch(mode=0o666)
        fit(out, resume=True, unaccounted=True)
        assert modes(out) == right
    finally:
        os.umask(before)
    assert len(seen) > 5
    assert {mode for folder, mode in seen if folder == "resume"} == {0o600}
    assert {mode for folder, mode in seen if folder != "resume"} == {0o644 & ~mask}
