# The commands of this repository. `make test` runs all checks that a change must pass.
#
# PYTHON       the Python (3.11 or newer) that .venv is made with
# TORCH_INDEX  the package index for torch; see scripts/install_torch.sh
# JOBS         number of test processes
# ROOM         the part of the library that `make test-rooms` tests: ROOM=milp
# ROWS         rows that `make test-versions` runs; default: all except `pinned`
# ARGS         arguments that `make gpu` passes to `python -m benchmarks.gpu`: ARGS="--steps 3 6"

SHELL := /bin/bash
TORCH_INDEX ?=
JOBS ?= 2
MARKS := not gpu and not slow
export TORCH_INDEX
# Most installed modules are never imported, so bytecode is compiled at the first import.
export PIP_NO_COMPILE := 1

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check

.DEFAULT_GOAL := help
.PHONY: help venv demo test test-code test-repo test-rooms test-all test-versions lint format types system-packages pytest pytest-gpu \
	gpu gpu-in-software gpu-wheels bench mutants docs notebooks lock clean

help:  ## Show the commands
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 17

venv: $(STAMP)  ## Make .venv with all dependencies, at the versions of constraints.txt

$(STAMP): pyproject.toml constraints.txt scripts/install_torch.sh
	@test -x $(BIN)/python || "$$(PYTHON='$(PYTHON)' scripts/find_python.sh)" -m venv $(VENV)
	$(PIP) install --quiet "$$(grep '^pip==' constraints.txt)"
	scripts/install_torch.sh $(BIN)/python
	$(PIP) install --quiet --constraint constraints.txt --group dev
	$(PIP) install --quiet --constraint constraints.txt --no-build-isolation \
		--editable '.[cli,hf,postgres,ray,server,viz]'
	@touch $@

demo: $(STAMP)  ## Train a small model within a budget, and show the extra time
	$(BIN)/remat run hf:gpt2 --set n_layer=12 --set n_embd=384 --set n_head=6 --set n_positions=128 \
		--set vocab_size=8192 --batch 8 --tokens 128 --budget 45% --gap 0.01 --time-limit 30 \
		--option stall=6 --device "$$($(BIN)/python -c \
		'import torch; print("cuda" if torch.cuda.is_available() else "cpu")')"

# Types are checked alongside the rest: they take as long as a third of the tests.
test: $(STAMP)  ## Format, lint, import contracts, types, tests
	@$(MAKE) --no-print-directory MARKS='$(MARKS)' test-code
	@$(MAKE) --no-print-directory MARKS='$(MARKS)' test-repo
	@$(MAKE) --no-print-directory pytest-gpu

test-code: $(STAMP)  ## The same without test-repo: what a change of the code must pass
	@$(MAKE) --no-print-directory --jobs=3 MARKS='($(MARKS)) and not repo' types checked-pytest

test-repo: $(STAMP) system-packages  ## Documentation, images, notebooks, acceptance run, versions, page
	@$(MAKE) --no-print-directory MARKS='($(MARKS)) and repo' pytest

# A room is a folder of the library. Its tests are the folders of that name and test_ROOM*.py.
ROOM_TESTS = $(shell for room in $(ROOM); do \
	find tests -type d -name "$$room" -prune -print -o -name "test_$$room*.py" -print; done)

test-rooms: $(STAMP)  ## The tests of parts of the library: ROOM=milp, or ROOM="split offload"
	@test -n "$(ROOM_TESTS)" || { echo "no tests of ROOM='$(ROOM)'; one is ROOM=milp"; exit 2; }
	OMP_NUM_THREADS=1 $(BIN)/pytest -m "$(MARKS)" -n $(JOBS) --dist worksteal -q $(ROOM_TESTS)

.PHONY: checked-pytest
checked-pytest: lint system-packages
	@$(MAKE) --no-print-directory MARKS='$(MARKS)' pytest

test-all: MARKS := not gpu
test-all: export REMAT_EXAMPLES := 50
test-all: test  ## The same with the slow tests, which check more cases of the same claims

# Takes four hours and 25 GB in VERSIONS_DIR. Rows that this machine cannot run are skipped.
test-versions:  ## The tests in every supported environment, and the images; see scripts/versions
	@scripts/system_packages.sh debootstrap
	@export JOBS='$(JOBS)'; "$$(PYTHON='$(PYTHON)' scripts/find_python.sh)" -m scripts.versions $(ROWS)

lint: $(STAMP)  ## ruff, the import contracts, and the words of docs/glossary.md
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/python -m scripts.plain_english

format: $(STAMP)  ## Format and fix the code by ruff
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

types: $(STAMP)  ## pyright
	PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(BIN)/pyright

# Never fails: tests whose packages are missing are skipped. NO_SYSTEM_PACKAGES=1 installs none.
system-packages:  ## Install PostgreSQL and Chromium for tests, if run as root on Debian
	@scripts/system_packages.sh

# One thread for each process: on few cores, the threads of several processes block each other.
pytest: $(STAMP)  ## The tests that need no GPU
	OMP_NUM_THREADS=1 $(BIN)/pytest -m "$(MARKS)" -n $(JOBS) --dist worksteal -q

# One process: tests that measure memory and time would disturb each other.
pytest-gpu: $(STAMP)  ## The tests that need a GPU, if there is one
	@if $(BIN)/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then \
		$(BIN)/pytest -m gpu -q; \
	else \
		echo "no CUDA device: the tests marked gpu are skipped"; \
	fi

# Makes no .venv, so that it runs on machines without network. Exit codes: `ARGS=--help`.
gpu:  ## The acceptance run on a GPU, with the installed Python: tests, then benchmarks; 25 minutes
	@PYTHON='$(PYTHON)' scripts/gpu.sh $(ARGS)

# Installs a CUDA build of torch (5.5 GB) into VERSIONS_DIR; ARGS="eager-memory --only gpt2" selects.
gpu-in-software:  ## What can be proved about CUDA without a GPU: tests, memory, code, numbers; three hours
	@export ARGS='$(ARGS)'; "$$(PYTHON='$(PYTHON)' scripts/find_python.sh)" -m scripts.versions \
		software-gpu

gpu-wheels:  ## Download its dependencies except torch to build/gpu-wheels, for a machine without network
	@"$$(PYTHON='$(PYTHON)' scripts/find_python.sh)" scripts/gpu_wheels.py $(ARGS)

bench: $(STAMP)  ## Benchmarks; results go to benchmarks/results
	$(BIN)/python -m benchmarks

notebooks: $(STAMP)  ## Run the notebooks and write their outputs
	$(BIN)/python -m notebooks.refresh

mutants: $(STAMP)  ## Mutation tests: put small bugs into a copy of the code and run its tests; 20 minutes
	$(PIP) install --quiet --constraint constraints.txt --group mutants
	$(BIN)/python -m benchmarks.mutants

docs: $(STAMP)  ## The documentation as a site in build/docs; warnings are errors
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs build/docs
	@echo "build/docs/index.html"

lock:  ## Rewrite constraints.txt with today's newest versions
	scripts/lock.sh "$$(PYTHON='$(PYTHON)' scripts/find_python.sh)"

clean:  ## Remove all generated files, .venv included
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache .grimp_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
