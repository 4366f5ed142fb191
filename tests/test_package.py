"""The package: what a wheel and an sdist hold, which names are public, where the version stands, and what the workflows run."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

import fiberdp

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES = (*fiberdp._PACKAGES, "recipes", "scaling", "report", "reference")
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
SOURCES = {path.relative_to(ROOT / "src").as_posix() for path in (ROOT / "src" / "fiberdp").rglob("*.py")}
DATA = {"fiberdp/py.typed", "fiberdp/_random.c", "fiberdp/_outer.c"} | {f"fiberdp/report/page.{kind}" for kind in ("html", "css", "js")}


# What is built


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The sdist, the wheel that is made from it, and the wheel that is made from the tree."""
    folder = tmp_path_factory.mktemp("built")
    tree = folder / "tree"
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "src", tree / "src", ignore=ignored)
    shutil.copytree(ROOT / "tests", tree / "tests", ignore=ignored)  # to see that they stay out
    for name in ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md", "NOTATION.md"):
        shutil.copy(ROOT / name, tree / name)
    for out, more in (("from-sdist", []), ("from-tree", ["--wheel"])):  # setuptools is here: no index is asked for it
        build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder / out), *more, str(tree)]
        done = subprocess.run(build, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    (sdist,) = (folder / "from-sdist").glob("*.tar.gz")
    return sdist, *(next((folder / out).glob("*.whl")) for out in ("from-sdist", "from-tree"))


def contents(wheel):
    with zipfile.ZipFile(wheel) as found:
        return {name: found.read(name) for name in found.namelist()}


def test_the_wheel_holds_the_package_and_nothing_else(built):
    held = contents(built[1])
    outside = {name for name in held if not name.startswith(f"fiberdp-{fiberdp.__version__}.dist-info/")}
    assert outside == SOURCES | DATA
    assert held["fiberdp/_random.c"] == (ROOT / "src/fiberdp/_random.c").read_bytes()


def test_the_sdist_builds_the_wheel_that_the_tree_builds(built):
    assert contents(built[1]) == contents(built[2])


def test_the_sdist_holds_what_a_build_needs_and_no_tests(built):
    with tarfile.open(built[0]) as found:
        names = {name.partition("/")[2] for name in found.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md"} <= names
    assert {f"src/{name}" for name in SOURCES | DATA} <= names
    assert not any(name.startswith(("tests", "docs", "results", "runs")) for name in names)


def test_the_metadata_name_the_version_the_extras_and_the_command(built):
    held = contents(built[1])
    folder = f"fiberdp-{fiberdp.__version__}.dist-info"
    metadata = held[f"{folder}/METADATA"].decode()
    assert f"\nVersion: {fiberdp.__version__}\n" in metadata
    assert set(re.findall(r"^Provides-Extra: (\w+)$", metadata, re.M)) == set(PROJECT["project"]["optional-dependencies"])
    assert b"fiberdp = fiberdp.cli:main" in held[f"{folder}/entry_points.txt"]


def test_the_installed_wheel_trains_and_reports(built, tmp_path):
    """Away from the checkout, with the packages that are installed here; scripts/check_wheel.py does it in an empty environment."""
    there = tmp_path / "site-packages"
    with zipfile.ZipFile(built[1]) as found:
        found.extractall(there)
    commands = (["train", "digits", "--steps", "6", "--seed", "0", "--out", "run"], ["report", "run"])
    code = "import sys, fiberdp.cli; print(fiberdp.__file__); sys.exit(fiberdp.cli.main(sys.argv[1:]))"
    given = os.environ | {"PYTHONPATH": str(there)}
    for command in commands:
        done = subprocess.run([sys.executable, "-c", code, *command], cwd=tmp_path, env=given, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith(str(there))
    assert (tmp_path / "run" / "report.html").exists()


# What is public


def test_the_public_names_are_the_listed_ones():
    """A name that goes or comes is a change of the interface: it is made in tests/public_names.txt too, and in the changelog."""
    found = {f"fiberdp.{name}" for name in fiberdp.__all__}
    for package in PACKAGES:
        module = importlib.import_module(f"fiberdp.{package}")
        found |= {f"fiberdp.{package}.{name}" for name in module.__all__}
        assert all(hasattr(module, name) for name in module.__all__), package
    assert sorted(found) == sorted((ROOT / "tests" / "public_names.txt").read_text().split())


def test_type_checkers_see_every_public_name():
    """`__getattr__` hides names from them: each must be imported under TYPE_CHECKING too."""
    source = (ROOT / "src" / "fiberdp" / "__init__.py").read_text()
    told = source.split("if TYPE_CHECKING:")[1].split("\n\n")[0]
    for name in set(fiberdp.__all__) - {"__version__"}:
        assert re.search(rf"\bimport .*\b{name}\b", told), name


def test_the_version_is_written_in_one_place():
    assert PROJECT["project"]["dynamic"] == ["version"]
    assert re.fullmatch(r"\d+\.\d+\.\d+", fiberdp.__version__)
    assert f"## {fiberdp.__version__} " in (ROOT / "CHANGELOG.md").read_text()
    for path in (ROOT / "src").rglob("*.py"):
        if path.name != "_version.py":
            assert f'"{fiberdp.__version__}"' not in path.read_text(), path


def test_every_pinned_package_is_one_that_is_asked_for():
    """constraints.txt pins what pyproject.toml names, or what its comments explain."""
    text = (ROOT / "constraints.txt").read_text()
    pinned = re.findall(r"^([\w.-]+)==", text, re.M)
    asked = {re.split(r"[\[<>=]", each)[0] for group in PROJECT["project"]["optional-dependencies"].values() for each in group}
    asked |= {re.split(r"[\[<>=]", each)[0] for each in PROJECT["project"]["dependencies"]}
    comments = "".join(line for line in text.splitlines() if line.startswith("#"))
    assert [name for name in pinned if name not in asked and name not in comments] == []
    assert pinned[1:] == sorted(pinned[1:], key=lambda name: f"{name}=")  # as `sort` does; torch stands first


# What the workflows run


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_runs_make_targets_and_pinned_actions(path):
    flow = yaml.safe_load(path.read_text())
    assert flow["permissions"] == {"contents": "read"}
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M)
    steps = [step for job in flow["jobs"].values() for step in job["steps"]]
    assert steps
    for step in steps:
        if "uses" in step:
            assert re.fullmatch(r"[\w-]+/[\w-]+@v\d+\.\d+\.\d+", step["uses"]), step
        else:
            make, target, *variables = re.sub(r"\$\{\{.*?\}\}", "x", step["run"]).split()
            assert make == "make", step
            assert target in targets, step
            assert all(re.fullmatch(r"(PYTHON|TORCH|EXTRAS|TAG)=\S+", each) for each in variables), step


def test_the_workflows_cover_the_oldest_and_the_newest_of_everything():
    (ci,) = [yaml.safe_load(path.read_text()) for path in WORKFLOWS if path.stem == "ci"]
    matrix = ci["jobs"]["tests"]["strategy"]["matrix"]["include"]
    told = re.findall(r"Python :: (3\.\d+)", " ".join(PROJECT["project"]["classifiers"]))
    assert {row["python"] for row in matrix} == set(told)
    (oldest,) = [each.partition(">=")[2] for each in PROJECT["project"]["dependencies"] if each.startswith("torch>=")]
    assert {row["torch"] for row in matrix} == {"pinned", "newest", f"{oldest}.0"}
    assert {path.stem for path in WORKFLOWS} == {"ci", "docs", "release"}


def test_publishing_trusts_the_workflow_and_keeps_no_token():
    (release,) = [path for path in WORKFLOWS if path.stem == "release"]
    flow = yaml.safe_load(release.read_text())
    assert flow["jobs"]["publish"]["permissions"] == {"id-token": "write"}
    assert flow["jobs"]["publish"]["needs"] == "build"
    assert "secrets." not in release.read_text()
    assert flow[True]["push"]["tags"] == ["v*"]  # yaml reads the key `on` as true
