# Two commands do everything on a machine that has Python 3.11 and make.
#   make demo    environment, install, one private run on the built-in data
#   make test    environment with the development tools, then lint, types and tests
# make docs builds the site into site/, make dist the package into dist/ and tries it in an empty environment.

PYTHON ?= python3.11
# the torch to install: pinned is that of constraints.txt; newest, or a version (pyproject.toml allows 2.6.0 and newer)
TORCH ?= pinned
# the extras that make dist tries the wheel with, one after the other; the wheel alone if empty
EXTRAS ?=
BIN := .venv/bin

.PHONY: demo test lint types tests docs dist tag clean

demo: .venv/installed
	rm -rf runs/demo
	$(BIN)/fiberdp train digits --method fiber --out runs/demo

test: lint types tests

lint: .venv/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/installed-dev
	$(BIN)/pyright

tests: .venv/installed-dev
	$(BIN)/python -m pytest -q -n 2 --dist loadfile

docs: .venv/installed-dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

dist: .venv/installed-dev
	rm -rf dist
	$(BIN)/python -m build
	$(BIN)/python scripts/check_wheel.py dist/*.whl --extras "$(EXTRAS)"

# make tag TAG=v0.1.0 fails unless that is the version
tag:
	test "$(TAG)" = "v$$(sed -n 's/^__version__ = "\(.*\)"/\1/p' src/fiberdp/_version.py)"

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/constraints.txt: .venv/bin/python constraints.txt
	sed '$(if $(filter newest,$(TORCH)),/^torch==/d,$(if $(filter-out pinned,$(TORCH)),s/^torch==.*/torch==$(TORCH)/))' constraints.txt > $@

.venv/installed: .venv/constraints.txt pyproject.toml
	$(BIN)/python -m pip install -q -c .venv/constraints.txt -e '.[recipes]'
	touch $@

.venv/installed-dev: .venv/constraints.txt pyproject.toml
	$(BIN)/python -m pip install -q -c .venv/constraints.txt -e '.[dev]'
	touch $@ .venv/installed

clean:
	rm -rf .venv runs build dist site src/*.egg-info .pytest_cache .ruff_cache docs/.ruff_cache
