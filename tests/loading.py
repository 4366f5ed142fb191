"""The scripts of scripts/ as modules, for the tests that run them."""

from __future__ import annotations

import importlib.util
from pathlib import Path

SCRIPTS = Path(__file__).parent.parent / "scripts"


def script(name):
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
