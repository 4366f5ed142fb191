"""The documentation says what is true: every block of every page runs and prints what is shown; pages name what exists."""

from __future__ import annotations

import doctest
import json
import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

import fiberdp
from blocks import blocks, run_page
from fiberdp.cli import main
from fiberdp.engines.layers.plan import RULES
from fiberdp.filters import FILTERS
from fiberdp.mechanisms import MECHANISMS
from fiberdp.methods import PARTS
from fiberdp.recipes import RECIPES
from loading import script

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))
WIDTH = 80  # columns of code that a page shows without scrolling


def run_elsewhere(page):
    """Whether a test file of its own runs the page's blocks, which are then no program from top to bottom (an "instead of" page)."""
    others = [path.read_text() for path in Path(__file__).parent.glob("test_*.py") if path != Path(__file__)]
    return any(f'"{page}"' in text and "exec(" in text for text in others)


WHOLE = [page for page in PAGES if not run_elsewhere(page)]


@pytest.fixture
def registries():
    """As they were, whatever a page adds to them."""
    before = [(registry, dict(registry)) for registry in (FILTERS, MECHANISMS, RECIPES, RULES)]
    yield
    for registry, kept in before:
        registry.clear()
        registry.update(kept)


@pytest.mark.parametrize("page", WHOLE)
def test_every_block_of_the_page_runs_and_prints_what_is_shown(page, tmp_path, registries):
    left_out = run_page(DOCS / page, tmp_path)
    if left_out:
        pytest.skip("; ".join(left_out))


def test_an_output_that_is_not_the_one_shown_is_found(tmp_path):
    """The machinery itself: a wrong number, a command that fails, a language that nothing runs."""
    for text in ("```python\nprint(1)\n```\n\n```text\n2\n```\n", "```console\n$ fiberdp train nothing\n```\n", "```rust\n1\n```\n"):
        page = tmp_path / "page.md"
        page.write_text(text)
        with pytest.raises(AssertionError, match=r"page\.md:\d"):
            run_page(page, tmp_path)
    page.write_text("```python\nprint(0.123, 4)\n```\n\n```text\n0.1…   4\n```\n")
    assert run_page(page, tmp_path) == []
    page.write_text('```python title="mine.py"\nimport fiberdp\nprint(2)\n```\n\n```console\n$ python mine.py\n2\n```\n')
    assert run_page(page, tmp_path) == []


def test_what_the_scripts_of_the_site_say_of_themselves():
    for name in ("docs_hooks", "docs_docstrings"):
        found = doctest.testmod(script(name))
        assert found.attempted
        assert not found.failed


@pytest.mark.parametrize("page", WHOLE)
def test_code_fits_the_page(page):
    """Python of a page is as wide as the page at most; output may scroll."""
    for block in blocks((DOCS / page).read_text()):
        if block.language == "python":
            wide = [line for line in block.body.splitlines() if len(line) > WIDTH]
            assert not wide, f"{page}:{block.line}: {wide[0]}"


def test_every_page_is_in_the_navigation():
    """And what is in it exists, or is made by scripts/docs_hooks.py."""
    named = set(re.findall(r"([\w./-]+\.md)", (ROOT / "mkdocs.yml").read_text()))
    assert set(PAGES) <= named
    made = {"reference/command-line.md", "reference/notation.md", "reference/changelog.md", "results/README.md"}
    assert named - set(PAGES) == made


def test_every_public_name_is_in_the_api():
    page = (DOCS / "reference" / "api" / "index.md").read_text()
    for name in fiberdp.__all__:
        assert re.search(rf"fiberdp\.(recipes\.)?{re.escape(name)}\b", page), name
    blocks_page = "".join(path.read_text() for path in (DOCS / "reference" / "api").glob("*.md"))
    for package in fiberdp._PACKAGES:
        assert f"::: fiberdp.{package}" in blocks_page, package


# Records


def keys(value, prefix=""):
    """Every key of a JSON value, "a.b" for one in an object, "a[].b" for one in a list of objects."""
    if isinstance(value, dict):
        return {f"{prefix}{key}" for key in value} | {k for key, inner in value.items() for k in keys(inner, f"{prefix}{key}.")}
    if isinstance(value, list):
        return {k for each in value if isinstance(each, dict) for k in keys(each, f"{prefix.removesuffix('.')}[].")}
    return set()


def explained(heading):
    """The keys in the tables below a heading of the page."""
    page = (DOCS / "reference" / "records.md").read_text()
    section = re.split(r"^## ", page, flags=re.M)
    (text,) = [part for part in section if part.startswith(heading)]
    return set(re.findall(r"^\| `([\w.\[\]-]+)` \|", text, re.M))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Runs that between them write every key: averaging, cyclic sampling, sampling without replacement, details."""
    from dataclasses import replace

    told = {"details": {"bleu": 1.0}, "samples": ["a word"]}
    writing = replace(RECIPES["digits"](), details=lambda model, rows: told)
    folder = tmp_path_factory.mktemp("runs")
    settings = {
        "a": {"averaging": 0.9},
        "b": {"method": "mf-dp-ftrl"},
        "c": {"method": "dp-sgd", "sampling": "fixed_size"},
        "d": {"method": "dp-sgd", "sampling": "shuffle"},
        "e": {"recipe": writing},
    }
    for name, given in settings.items():
        fiberdp.fit(given.pop("recipe", "digits"), steps=6, epsilon=8.0, out=folder / name, seed=0, **given)
    return folder


NESTED = re.compile(r"config\.plan\.(method|clip)\.|result\.(details|samples)[.\[]|heldout(_averaged)?\.")
"""Left to tables that are made from the code, and to the recipes."""


@pytest.mark.parametrize("name", ["record.json", "ledger.jsonl", "metrics.jsonl"])
def test_every_key_of_a_run_is_explained_and_no_other(name, runs):
    written = set()
    for path in runs.glob(f"*/{name}"):
        text = path.read_text()
        for part in text.splitlines() if name.endswith("l") else [text]:
            written |= keys(json.loads(part))
    written = {key for key in written if not NESTED.match(key)}
    assert explained(name) == written


def test_the_table_of_parts_names_every_field():
    hooks = script("docs_hooks")
    for part, known in PARTS.items():
        for name, cls in known.items():
            (row,) = [line for line in hooks.parts().splitlines() if line.startswith(f"| `{part}` | `{name}` |")]
            assert set(re.findall(r"`(\w+)`", row.split("|")[3])) == {field.name for field in fields(cls)}


def test_the_command_line_page_has_every_option_of_every_command(capsys):
    page = script("docs_hooks").command_line()
    for name in re.findall(r"^##+ fiberdp (.*)$", page, re.M):
        section = page.split(f"# fiberdp {name}\n")[1].split("\n##")[0]
        assert main([*name.split(), "--help"]) == 0
        shown = set(re.findall(r"--[a-z][\w-]*", capsys.readouterr().out)) - {"--help"}
        if re.search(r"^fiberdp \S", section, re.M):  # a command, not a group of commands
            first = {flag for row in re.findall(r"^\| (`--.*?) \|", section, re.M) for flag in re.findall(r"`(--[\w-]+)`", row)}
            assert first <= shown <= set(re.findall(r"(--[a-z][\w-]*)", section)), name


# The site


def test_the_site_is_built_without_a_warning_and_loads_nothing_from_elsewhere(tmp_path):
    site = tmp_path / "site"
    done = subprocess.run(  # --quiet would count no warnings
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)],
        cwd=ROOT, capture_output=True, text=True, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    pages = [path for path in site.rglob("*.html") if path.name != "404.html"]
    assert len(pages) > 20
    for path in pages:
        text = path.read_text()
        loaded = re.findall(r"""<(?:script|link|img|iframe)\b[^>]*?\b(?:src|href)=["']?(https?:)?//[^"'> ]*""", text)
        assert not loaded, path
        prose = re.sub(r"<(pre|code|script|svg)\b.*?</\1>", "", text, flags=re.S)
        assert not re.search(r"```|<!-- made|\$[^$ ][^$]*\$", prose), path  # what was meant to become something else
        for link in re.findall(r'href="([^"#?]+)', text):
            if not re.match(r"[a-z]+:", link):
                assert (path.parent / link).exists(), f"{path.relative_to(site)} links {link}"
    for path in site.rglob("*.css"):
        assert "//fonts." not in path.read_text(), path
