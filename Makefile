# Every target sets up its own requirements in .venv, and does not touch the rest of the machine.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.DEFAULT_GOAL := help
.PHONY: help install install-recipes train test test-slow test-lanes test-long test-engines test-torch check wheel-check chaos bench pictures notebooks \
	docs clean

help:  ## show this help
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# One stamp file for each set of extras: installed once, and again after a change of the pins or the package's metadata.
$(VENV)/.digits: $(BIN)/python pyproject.toml constraints.txt
	@echo "installing Paceline and PyTorch into $(VENV) …"
	$(PIP) -e '.[digits]'
	@touch $@

$(VENV)/.dev: $(BIN)/python pyproject.toml constraints.txt
	@echo "installing Paceline, PyTorch and the tools for tests into $(VENV) …"
	$(PIP) -e '.[dev]'
	@touch $@ $(VENV)/.digits $(VENV)/.recipes

$(VENV)/.recipes: $(BIN)/python pyproject.toml constraints.txt
	@echo "installing Paceline, PyTorch and what the recipes need into $(VENV) …"
	$(PIP) -e '.[recipes]'
	@touch $@ $(VENV)/.digits

$(VENV)/.docs: $(BIN)/python pyproject.toml constraints.txt
	@echo "installing Paceline, PyTorch and the tools for the docs into $(VENV) …"
	$(PIP) -e '.[docs]'
	@touch $@

install: $(VENV)/.digits  ## install Paceline into .venv

install-recipes: $(VENV)/.recipes  ## install Paceline with the extras of all recipes

train: $(VENV)/.digits  ## train a digit classifier on two ranks (seconds)
	$(BIN)/paceline train digits --nproc 2 $(ARGS)

# Tests run on CPU ranks, forked from processes that run backward passes, which is impossible if torch sees a GPU. Byte
# code is kept for the many processes.
TESTED := CUDA_VISIBLE_DEVICES= PYTHONDONTWRITEBYTECODE=
# Each worker takes neighboring tests, so that they share their ranks.
PYTEST := $(TESTED) $(BIN)/python -m pytest -n 2 --dist worksteal -q

test: $(VENV)/.dev  ## run all fast tests (minutes)
	$(PYTEST) -m 'not slow and not engines' $(ARGS)

test-slow: $(VENV)/.dev  ## run the slow tests: whole trainings, injected faults, torch's own suite, browsers
	$(PYTEST) -m slow $(ARGS)

test-lanes: $(VENV)/.dev  ## run the wrapper's tests twice: with all possible steps frozen, and with none
	PACELINE_TEST_FROZEN=always $(PYTEST) -m 'not engines' tests/unit/ddp tests/peers/test_torch_ddp_suite.py tests/property $(ARGS)
	PACELINE_TEST_FROZEN=never $(PYTEST) -m 'not engines' tests/unit/ddp tests/peers/test_torch_ddp_suite.py tests/property $(ARGS)

test-long: $(VENV)/.dev  ## run all tests, with ten times as many random cases
	PACELINE_LONG_TESTS=1 $(PYTEST) $(ARGS)

# Without workers: the jobs share one small cluster.
test-engines: $(VENV)/.dev  ## run jobs under Slurm, mpirun, Ray and on two hosts (installs them; Debian, as root; minutes)
	@test "$$(id -u)" = 0 || { echo "make test-engines needs root: it installs packages, and starts slurmd"; exit 2; }
	apt-get install -y -qq slurm-wlm munge openmpi-bin iproute2
	$(PIP) -e '.[test,engines]'
	$(TESTED) $(BIN)/python -m pytest -q -m engines tests/engines $(ARGS)

# Another torch in its own environment of several GB. The other packages stay pinned.
TORCH = .venv-torch-$(VERSION)
test-torch:  ## run the whole test suite with another torch: make test-torch VERSION=2.15.0
	@test -n "$(VERSION)" || { echo "which torch? make test-torch VERSION=2.15.0"; exit 2; }
	$(PYTHON) -m venv $(TORCH)
	grep -v '^torch==' constraints.txt > $(TORCH)/constraints.txt
	$(TORCH)/bin/python -m pip install --quiet --disable-pip-version-check -c $(TORCH)/constraints.txt \
		-e '.[test]' torch==$(VERSION)
	$(TESTED) $(TORCH)/bin/python -m pytest -n 2 --dist worksteal -q $(ARGS)

check: $(VENV)/.dev  ## run the lint, format, type, layer and budget checks
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python scripts/house.py

wheel-check: $(VENV)/.dev  ## build sdist and wheel, install the wheel in a new environment, and train there
	$(BIN)/python scripts/wheel_check.py

chaos: $(VENV)/.dev  ## kill ranks at exact moments and compare the final bits (minutes)
	$(BIN)/python scripts/chaos.py --keep $(ARGS)

bench: $(VENV)/.dev  ## run the benchmarks and save dated results in benchmarks/results
	$(BIN)/python benchmarks/run.py

pictures: $(VENV)/.docs  ## draw the pictures of the docs again, with Chromium; ARGS=--record also runs their jobs again
	$(BIN)/python scripts/pictures.py $(ARGS)

notebooks: $(VENV)/.dev  ## run the notebooks and save their output
	$(BIN)/python scripts/run_notebooks.py $(ARGS)

docs: $(VENV)/.docs  ## build the docs site from docs/, docstrings, notebooks and results
	$(BIN)/python scripts/docs_site

clean:  ## remove .venv and caches
	rm -rf $(VENV) .venv-torch-* .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache build dist src/*.egg-info
