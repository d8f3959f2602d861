# Every target makes what it needs: a virtual environment in .venv with the tested versions (constraints.txt).
#
#   make demo        train a small GPT with compressed gradients and without, side by side
#   make demo-elastic  four replicas train it together; one is killed and comes back, one freezes for a while
#   make test        the test suite, without the tests marked slow
#   make test-all    the whole suite
#   make test-oldest the same as make test with the oldest versions that pyproject.toml claims (constraints-oldest.txt)
#   make test-newest the same with the newest torch (constraints-newest.txt), once per release
#   make check       formatter, linter, type checker, layer contract, documentation, sdist and wheel
#   make docs        the documentation as a web site, build/docs/index.html; a warning is an error
#   make gpu-acceptance  does it work on this machine's GPUs? parts of under eight minutes; without one, what a CPU shows
#   make bench-X     benchmarks/X.py, options in ARGS:  make bench-network ARGS="--rate 1gbit"  (as root)
#   make clean       remove .venv and everything built

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:

CANDIDATES := python3 python3.14 python3.13 python3.12 python3.11 python3.10
USABLE := import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 10))
# The first that is new enough and can make virtual environments; a name that only prints an error is passed over.
PYTHON ?= $(shell for p in $(CANDIDATES); do "$$p" -c '$(USABLE)' >/dev/null 2>&1 && { echo "$$p"; break; }; done; true)

VENV := .venv
BIN := $(VENV)/bin
OLDEST := .venv-oldest
NEWEST := .venv-newest
ARGS ?=
# Three at a time, file by file: tests of one file share launches, and on two cores one computes while others wait.
# Integration tests, the long ones, come first, so that all end together. PARALLEL= for one at a time.
PARALLEL ?= -n 3 --dist loadfile --no-loadscope-reorder
# A change to any of these means another installation.
INSTALLS := pyproject.toml constraints.txt $(wildcard setup.py lowbit_strategy/kernels/native/*.c lowbit_strategy/kernels/native/*.h)
PIP_INSTALL := $(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt

.PHONY: demo demo-elastic test test-all test-oldest test-newest test-gpu check docs clean
.DEFAULT_GOAL := test

# Tests start many interpreters, none of which should compile the package again.
test test-all test-oldest test-newest: export PYTHONDONTWRITEBYTECODE :=

demo: $(VENV)/.runtime
	$(BIN)/python recipes/demo.py $(ARGS)

demo-elastic: $(VENV)/.dev
	$(BIN)/python recipes/demo_elastic.py $(ARGS)

test: $(VENV)/.dev
	$(BIN)/python -m pytest $(PARALLEL) $(ARGS)

test-all: $(VENV)/.dev
	$(BIN)/python -m pytest $(PARALLEL) -m "" $(ARGS)

test-oldest: $(OLDEST)/.test
	$(OLDEST)/bin/python -m pytest $(PARALLEL) $(ARGS)

test-newest: $(NEWEST)/.test
	$(NEWEST)/bin/python -m pytest $(PARALLEL) $(ARGS)

test-gpu: $(VENV)/.dev
	$(BIN)/python -m pytest -m gpu $(ARGS)

gpu-acceptance:
	$(or $(wildcard $(BIN)/python),$(PYTHON)) benchmarks/gpu_acceptance/run.py $(ARGS)

check: $(VENV)/.dev docs
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	rm -rf build/dist && mkdir -p build
	$(BIN)/python -m build --no-isolation --outdir build/dist . >build/dist.log 2>&1 || { cat build/dist.log >&2; exit 1; }
	$(BIN)/python -m twine check --strict build/dist/*

docs: $(VENV)/.dev
	$(BIN)/python -m sphinx -b html --fail-on-warning --keep-going -q docs build/docs
	@echo "The documentation is in build/docs/index.html"

bench-%: $(VENV)/.runtime
	$(BIN)/python -m benchmarks.$(subst -,_,$*) $(ARGS)

$(VENV)/.python:
	@test -n "$(PYTHON)" || { \
	  echo "Python 3.10 or newer with its venv module is needed; tried: $(CANDIDATES)." >&2; \
	  echo "Install it (on Debian also the package python3-venv), or name one: make PYTHON=/path/to/python" >&2; exit 1; }
	@"$(PYTHON)" -c '$(USABLE)' || { \
	  echo "$(PYTHON) is not usable: Python 3.10 or newer with its venv module is needed." >&2; exit 1; }
	"$(PYTHON)" -m venv --clear $(VENV)
	@touch $@

# torch first and by its exact version, so that a CPU build offered through pip's own configuration is taken.
$(VENV)/.torch: constraints.txt | $(VENV)/.python
	@echo "Installing torch into $(VENV) (some minutes on a slow line)"
	$(PIP_INSTALL) "$$(grep -E '^torch==' constraints.txt)"
	@touch $@

$(VENV)/.runtime: $(VENV)/.torch $(INSTALLS)
	@echo "Installing lowbit-strategy into $(VENV)"
	$(PIP_INSTALL) -e ".[recipes]"
	@touch $@

$(VENV)/.dev: $(VENV)/.runtime
	@echo "Installing the test and check tools into $(VENV)"
	$(PIP_INSTALL) -e ".[dev]"
	@touch $@

$(OLDEST)/.test: constraints-oldest.txt $(INSTALLS) | $(VENV)/.python
	$(BIN)/python -m venv --clear $(OLDEST)
	$(OLDEST)/bin/python -m pip install -q --disable-pip-version-check "$$(grep -E '^torch==' constraints-oldest.txt)"
	$(OLDEST)/bin/python -m pip install -q --disable-pip-version-check -c constraints-oldest.txt -e ".[test]"
	@touch $@

# The tested versions of all but torch and the triton that it brings.
$(NEWEST)/.test: constraints-newest.txt constraints.txt $(INSTALLS) | $(VENV)/.python
	$(BIN)/python -m venv --clear $(NEWEST)
	mkdir -p build && grep -vE '^(torch|triton)==' constraints.txt | cat - constraints-newest.txt > build/constraints-newest.txt
	$(NEWEST)/bin/python -m pip install -q --disable-pip-version-check "$$(grep -E '^torch==' constraints-newest.txt)"
	$(NEWEST)/bin/python -m pip install -q --disable-pip-version-check -c build/constraints-newest.txt -e ".[test]"
	@touch $@

clean:
	rm -rf $(VENV) $(OLDEST) $(NEWEST) build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .import_linter_cache .hypothesis
	find lowbit_strategy -name '*.so' -delete
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
