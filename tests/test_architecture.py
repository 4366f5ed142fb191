"""Data flows one way, and the package stays quick to import (DESIGN.md sections 1-2)."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import fiberdp

ROOT = Path(fiberdp.__file__).parent
STAGES = (
    "sampling",
    "augmentation",
    "observation",
    "clipping",
    "engines",
    "mechanisms",
    "filters",
    "moments",
    "optim",
    "scaling",
    "accounting",
)
SHARED = ("types", "flat", "linear", "_disk", "_tree", "_native", "_normals", "_random", "_threads", "_validate")


def imports(package: str) -> dict[Path, set[str]]:
    """file -> the fiberdp modules it imports (first name after fiberdp), imports inside functions included."""
    found: dict[Path, set[str]] = {}
    for path in sorted((ROOT / package).rglob("*.py")) if (ROOT / package).is_dir() else [ROOT / f"{package}.py"]:
        names: set[str] = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                if node.module == "fiberdp":
                    names |= {alias.name for alias in node.names}
                elif node.module.startswith("fiberdp."):
                    names.add(node.module.split(".")[1])
            elif isinstance(node, ast.Import):
                names |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("fiberdp.")}
        found[path] = names
    return found


@pytest.mark.parametrize("stage", STAGES)
def test_no_stage_imports_another(stage):
    """A stage sees the shared values and itself."""
    allowed = {stage, *SHARED}
    for path, names in imports(stage).items():
        assert names <= allowed, f"{path.relative_to(ROOT)} imports {sorted(names - allowed)}"


@pytest.mark.parametrize("shared", SHARED)
def test_shared_values_import_no_stage(shared):
    for names in imports(shared).values():
        assert names <= set(SHARED), names


def test_nothing_right_of_the_gate_can_name_a_raw_gradient():
    """filters, moments and optim never see ClippedSum, a data set, an engine or a sampler."""
    for package in ("filters", "moments", "optim", "scaling"):
        for path, names in imports(package).items():
            assert not names & {"engines", "sampling", "augmentation", "observation", "clipping", "pipeline"}, path
            assert "ClippedSum" not in path.read_text(), path


def test_only_the_pipeline_opens_the_gate():
    callers = [p.relative_to(ROOT).as_posix() for p in ROOT.rglob("*.py") if "mechanism.release(" in p.read_text()]
    assert callers == ["pipeline.py"]


def test_a_report_reads_records_and_runs_nothing():
    """report/ sees records, what is said about runs, and the plan, whose filter it asks for the noise gain; no stage and no trainer."""
    read = {"record", "intervals", "methods", "planning", "recipes", "_version", "_disk", "report"}
    for path, names in imports("report").items():
        assert names <= read, f"{path.relative_to(ROOT)} imports {sorted(names - read)}"


def test_only_the_command_line_imports_the_report():
    for path in ROOT.rglob("*.py"):
        if path.relative_to(ROOT).parts[0] not in ("cli", "report"):
            assert "fiberdp.report" not in path.read_text(), path


def test_nothing_below_imports_an_integration():
    for path in ROOT.rglob("*.py"):
        if path.relative_to(ROOT).parts[0] != "integrations":
            assert "fiberdp.integrations" not in path.read_text(), path


def test_no_print_in_the_library():
    """Only the command line prints (ruff's T20 says so too); and nothing swallows every exception."""
    for path in ROOT.rglob("*.py"):
        if "cli" in path.relative_to(ROOT).parts:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id != "print", path
            assert not (isinstance(node, ast.ExceptHandler) and node.type is None), path


@pytest.mark.parametrize(
    ("statement", "never"),
    [
        ("import fiberdp", ("torch", "dp_accounting", "datasets", "matplotlib", "transformers")),
        ("import fiberdp.cli", ("torch", "dp_accounting", "datasets", "matplotlib", "transformers")),
        ("import fiberdp.accounting, fiberdp.sampling", ("torch", "datasets")),
        ("import fiberdp.experiment", ("datasets", "sklearn", "PIL", "matplotlib", "transformers")),
        ("import fiberdp.report", ("datasets", "sklearn", "PIL", "matplotlib", "transformers", "tensorboard", "dp_accounting")),
    ],
)
def test_heavy_packages_are_imported_late(statement, never):
    code = f"import sys; {statement}; print(','.join(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip().split(",")
    assert not set(never) & set(loaded)


def test_every_public_name_can_be_imported():
    for name in fiberdp.__all__:
        assert getattr(fiberdp, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = fiberdp.nonsense


def test_every_file_says_what_it_is():
    for path in ROOT.rglob("*.py"):
        assert ast.get_docstring(ast.parse(path.read_text())), f"{path.relative_to(ROOT)} has no docstring"
