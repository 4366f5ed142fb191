# Two commands do everything on a machine that has Python 3.11 and make.
#   make demo    environment, install, one private run on the built-in data
#   make test    environment with the development tools, then lint, types and tests

PYTHON ?= python3.11
BIN := .venv/bin

.PHONY: demo test lint types tests clean

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

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/installed: .venv/bin/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[recipes]'
	touch $@

.venv/installed-dev: .venv/bin/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev]'
	touch $@ .venv/installed

clean:
	rm -rf .venv runs build dist src/*.egg-info .pytest_cache .ruff_cache
