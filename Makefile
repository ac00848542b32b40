# On a fresh machine, `make train` and `make test` are all you need.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
CONFIG ?= configs/tiny.py
WORKDIR ?= runs/tiny
TOPOLOGY ?= v5e:4x4
ARGS ?=

.PHONY: setup train test test-slow lint bench plan docs clean

# Installs the program, the test tools, libtpu for `make plan`, and MkDocs for `make docs`.
setup: $(VENV)/.developer

$(VENV)/.program: setup.py
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or later is needed: make PYTHON=python3.12 ..." if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable .
	@touch $@

$(VENV)/.developer: $(VENV)/.program
	$(BIN)/python -m pip install --quiet --editable '.[dev,plan,docs]'
	@touch $@

train: $(VENV)/.program
	$(BIN)/gtpo train --config=$(CONFIG) --workdir=$(WORKDIR) $(ARGS)

test: setup
	$(BIN)/python -m pytest -n 2 --dist loadfile

test-slow: setup
	$(BIN)/python -m pytest -n 2 --dist loadfile -m slow

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

bench: setup
	$(BIN)/python benchmarks/step.py

plan: setup
	$(BIN)/gtpo plan --config=$(CONFIG) --topology=$(TOPOLOGY) $(ARGS)

# Builds the documentation site in site/.
docs: setup
	$(BIN)/python docs/make_configs.py
	$(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV) build site *.egg-info .pytest_cache .ruff_cache
