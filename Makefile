# On a fresh machine, `make train` and `make test` are all you need.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
CONFIG ?= configs/tiny.py
WORKDIR ?= runs/tiny
TOPOLOGY ?= v5e:4x4
ARGS ?=
MODEL ?= $(or $(GTPO_SMOLLM2),HuggingFaceTB/SmolLM2-135M-Instruct)

.PHONY: setup train real test test-slow test-manual lint bench plan docs clean

# Installs the program and everything that the other targets need: test tools, libtpu and MkDocs.
setup: $(VENV)/.developer

# Python compiles a module when it is first imported, which most of those installed never are.
INSTALL := $(BIN)/python -m pip install --quiet --no-compile

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or later is needed: make PYTHON=python3.12 ..." if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) --upgrade pip

$(VENV)/.program: setup.py | $(BIN)/python
	$(INSTALL) --editable .
	@touch $@

$(VENV)/.developer: setup.py | $(BIN)/python
	$(INSTALL) --editable '.[dev,plan,docs]'
	@touch $(VENV)/.program $@

$(VENV)/.docs: $(VENV)/.program
	$(INSTALL) --editable '.[docs]'
	@touch $@

# TPUs need libtpu, and GPUs need JAX's CUDA plugin. Neither needs the hardware.
PLAN := $(if $(filter v% cpu%,$(TOPOLOGY)),plan,plan-gpu)
$(VENV)/.plan $(VENV)/.plan-gpu: $(VENV)/.program
	$(INSTALL) --editable '.[$(PLAN)]'
	@touch $@

train: $(VENV)/.program
	$(BIN)/gtpo train --config=$(CONFIG) --workdir=$(WORKDIR) $(ARGS)

# Trains a pretrained model: four to ten minutes on two cores. GTPO_SMOLLM2 may name the model's folder;
# otherwise 270 MB come from the hub.
real: $(VENV)/.program
	$(BIN)/gtpo train --config=configs/smollm2_sentences.py --config.model.path=$(MODEL) \
	  --workdir=runs/real $(ARGS)

PYTEST := $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

test: setup
	$(PYTEST)

# The slow tests, and those that need bubblewrap or Chromium.
test-slow: setup
	$(PYTEST) -m "(slow or sandbox or browser) and not manual"

# The tests that take too long for CI: run them before a release.
test-manual: setup
	$(PYTEST) -m manual

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright --pythonpath $(BIN)/python

bench: $(VENV)/.program
	$(BIN)/python benchmarks/step.py

plan: $(VENV)/.$(PLAN)
	$(BIN)/gtpo plan --config=$(CONFIG) --topology=$(TOPOLOGY) $(ARGS)

# Builds the documentation site in site/.
docs: $(VENV)/.docs
	$(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV) build site *.egg-info .pytest_cache .ruff_cache
