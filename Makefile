# The verbs of this repository. `make test` does everything that must pass before a change is done.
#
# PYTHON       the Python (3.11 or newer) that .venv is made with
# TORCH_INDEX  the package index for torch; see scripts/install_torch.sh
# JOBS         test processes
# ROWS         of test-versions, only these
# ARGS         of gpu, for `python -m benchmarks.gpu`: ARGS="--steps 3 6"

SHELL := /bin/bash
TORCH_INDEX ?=
JOBS ?= 2
MARKS := not gpu and not slow
export TORCH_INDEX
# What is imported is compiled then; most of what is installed never is.
export PIP_NO_COMPILE := 1

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check

.DEFAULT_GOAL := help
.PHONY: help venv demo test test-all test-versions lint format types system-packages pytest pytest-gpu \
	gpu gpu-wheels bench mutants docs notebooks lock clean

help:  ## Show the verbs
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 17

venv: $(STAMP)  ## Make .venv with everything in it, at the versions of constraints.txt

$(STAMP): pyproject.toml constraints.txt scripts/install_torch.sh
	@test -x $(BIN)/python || "$$(PYTHON='$(PYTHON)' scripts/find_python.sh)" -m venv $(VENV)
	$(PIP) install --quiet "$$(grep '^pip==' constraints.txt)"
	scripts/install_torch.sh $(BIN)/python
	$(PIP) install --quiet --constraint constraints.txt --group dev
	$(PIP) install --quiet --constraint constraints.txt --no-build-isolation \
		--editable '.[cli,hf,postgres,ray,server,viz]'
	@touch $@

demo: $(STAMP)  ## Train a small model within a budget, and see what it costs
	$(BIN)/remat run hf:gpt2 --set n_layer=12 --set n_embd=384 --set n_head=6 --set n_positions=128 \
		--set vocab_size=8192 --batch 8 --tokens 128 --budget 45% --gap 0.01 --time-limit 30 \
		--option stall=6 --device "$$($(BIN)/python -c \
		'import torch; print("cuda" if torch.cuda.is_available() else "cpu")')"

# What needs one core or none goes side by side first.
test: $(STAMP)  ## Format, lint, import contracts, types, tests
	@$(MAKE) --no-print-directory --jobs=3 --output-sync=target lint types system-packages
	@$(MAKE) --no-print-directory MARKS='$(MARKS)' pytest pytest-gpu

test-all: MARKS := not gpu
test-all: export REMAT_EXAMPLES := 50
test-all: test  ## The same with the slow tests, which repeat at length what others show

# Takes an hour and 25 GB in VERSIONS_DIR; what cannot be had here is skipped, with the reason.
test-versions:  ## The tests in every environment that remat promises, and the images; see scripts/versions
	@scripts/system_packages.sh debootstrap
	@export JOBS='$(JOBS)'; "$$(PYTHON='$(PYTHON)' scripts/find_python.sh)" -m scripts.versions $(ROWS)

lint: $(STAMP)  ## ruff, the import contracts, and the words of docs/glossary.md
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/python -m scripts.plain_english

format: $(STAMP)  ## Let ruff format and fix what it can
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

types: $(STAMP)  ## pyright
	PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(BIN)/pyright

# Never fails: tests whose packages are missing are skipped. NO_SYSTEM_PACKAGES=1 installs none.
system-packages:  ## PostgreSQL and Chromium for tests, where we may install Debian packages
	@scripts/system_packages.sh

# One thread for each process: on few cores, threads of several processes only wait for each other.
pytest: $(STAMP)  ## The tests that need no GPU
	OMP_NUM_THREADS=1 $(BIN)/pytest -m "$(MARKS)" -n $(JOBS) --dist worksteal -q

# One process: they measure memory and time, and would disturb each other.
pytest-gpu: $(STAMP)  ## The tests that need a GPU, where there is one
	@if $(BIN)/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then \
		$(BIN)/pytest -m gpu -q; \
	else \
		echo "no CUDA device: the tests marked gpu are left out"; \
	fi

# Makes no .venv, so that it runs where nothing can be installed. Exit codes: `ARGS=--help`.
gpu:  ## The acceptance run on a GPU, with the Python at hand: tests, then benchmarks; 25 minutes
	@PYTHON='$(PYTHON)' scripts/gpu.sh $(ARGS)

gpu-wheels:  ## What that needs beside torch, into build/gpu-wheels, for a machine without network
	@"$$(PYTHON='$(PYTHON)' scripts/find_python.sh)" scripts/gpu_wheels.py $(ARGS)

bench: $(STAMP)  ## Benchmarks; results go to benchmarks/results
	$(BIN)/python -m benchmarks

notebooks: $(STAMP)  ## Run the notebooks and write their outputs
	$(BIN)/python -m notebooks.refresh

mutants: $(STAMP)  ## Small bugs put into a copy of the code, and whether tests notice: 20 minutes
	$(PIP) install --quiet --constraint constraints.txt --group mutants
	$(BIN)/python -m benchmarks.mutants

docs: $(STAMP)  ## The documentation as a site in build/docs; warnings are errors
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs build/docs
	@echo "build/docs/index.html"

lock:  ## Write constraints.txt anew, from today's newest versions
	scripts/lock.sh "$$(PYTHON='$(PYTHON)' scripts/find_python.sh)"

clean:  ## Remove what the verbs made, .venv included
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache .grimp_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
