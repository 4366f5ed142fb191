"""C files compiled on the spot: kept, made again when anything changes, and done without where they cannot be had."""

from __future__ import annotations

import shutil
import stat

import pytest

from fiberdp import _native

needs_a_compiler = pytest.mark.skipif(_native.library("_random") is None, reason="no C compiler here")


@pytest.fixture
def cache_home(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def fresh() -> object:
    """As in a new process."""
    return _native.library.__wrapped__("_random")


def stub(folder, script: str) -> str:
    """A compiler that runs `script`."""
    path = folder / "cc"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(folder)


@needs_a_compiler
def test_compiled_once_in_a_folder_that_only_its_owner_reads(cache_home):
    assert fresh()
    (kept,) = (cache_home / "fiberdp").iterdir()
    made = kept.stat().st_mtime_ns
    assert fresh()
    assert kept.stat().st_mtime_ns == made
    assert stat.S_IMODE((cache_home / "fiberdp").stat().st_mode) == 0o700


@needs_a_compiler
def test_another_processor_has_a_file_of_its_own(cache_home, monkeypatch):
    fresh()
    monkeypatch.setattr(_native, "_processor", lambda: b"another")
    fresh()
    assert len(list((cache_home / "fiberdp").iterdir())) == 2


@needs_a_compiler
def test_without_a_cache_it_is_compiled_for_this_process(cache_home):
    cache_home.write_text("a file where the folder should be")
    assert fresh()


def test_no_compiler_and_a_failing_one_give_none_and_leave_nothing(cache_home, monkeypatch, tmp_path):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert fresh() is None
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache_home))
    monkeypatch.setenv("PATH", stub(tmp_path, 'test "$1" = --version'))
    assert fresh() is None
    assert not list((cache_home / "fiberdp").iterdir())


@needs_a_compiler
def test_a_damaged_file_in_the_cache_is_passed_over(cache_home):
    fresh()
    (kept,) = (cache_home / "fiberdp").iterdir()
    damaged = kept.with_name("damaged")
    damaged.write_bytes(b"not a library")
    damaged.replace(kept)  # the first is still loaded, so its own bytes must not be written over
    assert fresh()
