# Needs Python 3.11 or newer, git and make; everything else is installed into $(VENV), at the versions of constraints.txt.
PYTHON ?= python3
VENV ?= .venv
CONFIG ?= configs/byte_gpt.yaml
ARGS ?=
PYTEST_ARGS ?=
MINUTES ?= 20
# Of tests that are about packages of ext/: words of their names, and folders.
UPPER_FLOOR := ext docs examples property windows invariant report memory mirror pull verify
empty :=
space := $(empty) $(empty)

SHELL := /bin/bash
BIN := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest -q -p no:cacheprovider
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check
# Paths set for another program must not bring other packages into this environment.
unexport PYTHONPATH PYTHONHOME
# Tests start many processes: without __pycache__ each would compile every module again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help install train test floors nightly device ignite check lint types imports format bench goodput docs house clean

help:  ## print the targets
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /\1\t/' | expand -t 10

install: $(STAMP)  ## make .venv with the pinned versions and the package in editable mode

# torch is installed first and alone, so that no other package selects another build of it; setuptools, pinned, then
# builds the package without a download of its own.
$(STAMP): setup.cfg pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else \
	  "Python 3.11 or newer is needed, $(PYTHON) is %d.%d: use make PYTHON=/path/to/python3.11." % sys.version_info[:2])'
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --constraint constraints.txt torch setuptools
	$(PIP) install --quiet --constraint constraints.txt --no-build-isolation --editable '.[dev,docs]'
	@touch $@

train: $(STAMP)  ## train CONFIG (default: the byte GPT, two minutes on one core); ARGS="run.seed=1 ..."
	$(BIN)/python -m ignite_engine train $(CONFIG) $(ARGS)

test: $(STAMP)  ## run the tests, but the nightly ones: 4 minutes on 2 cores; PYTEST_ARGS="-k schedule"
	$(PYTEST) -n 4 --dist loadfile -m "not nightly and not cuda and not accelerator" $(PYTEST_ARGS)

floors: $(STAMP)  ## run the tests of a copy without ignite_engine/ext and tests/ext, then those that are about ext/
	$(BIN)/python -m tests.floors $(PYTEST_ARGS)
	$(MAKE) test PYTEST_ARGS="-k '$(subst $(space), or ,$(UPPER_FLOOR))' $(PYTEST_ARGS)"

nightly: $(STAMP)  ## run all tests in new ranks each, the judge for MINUTES=20, those of devices, and all of Ignite's
	TEST_FRESH_WORLDS=1 TEST_JUDGE_MINUTES=$(MINUTES) $(PYTEST) -n 2 --dist loadfile -m "not cuda and not accelerator" $(PYTEST_ARGS)
	$(BIN)/python -m tests.device
	$(BIN)/python -m tests.ignite_suite

device: $(STAMP)  ## run the tests that need a device, on this machine's or on fake ones; docs/devices.md
	$(BIN)/python -m tests.device $(PYTEST_ARGS)

ignite: $(STAMP)  ## run Ignite's own tests against the Trainer; downloads its source, or ARGS="--source CHECKOUT"
	$(BIN)/python -m tests.ignite_suite $(ARGS)

check: lint types imports  ## lint, format, types and import rules; make -k check continues after a failure

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy -p ignite_engine
	$(BIN)/mypy examples benchmarks

imports: $(STAMP)
	$(BIN)/python -m pytest -q -p no:cacheprovider tests/test_architecture.py

format: $(STAMP)  ## rewrite the files as check expects them
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP)  ## run every benchmark (20 idle minutes) and write runs/benchmarks/results.md; ARGS="--quick", ARGS="--only overhead,ddp"
	$(BIN)/python -m benchmarks $(ARGS)

goodput: $(STAMP)  ## kill a run on 2 ranks every 15 s for MINUTES=10, and say how much of the time it trained
	$(BIN)/python -m benchmarks.goodput --minutes $(if $(filter file,$(origin MINUTES)),10,$(MINUTES)) $(ARGS)

docs: $(STAMP)  ## build the site into site/, where a broken link or docstring is an error; open site/index.html
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

house: $(STAMP)  ## print the size of each room, and the totals
	$(BIN)/python docs/tools/house.py

clean:  ## remove .venv, builds and caches, but no runs
	rm -rf $(VENV) build dist site *.egg-info .mypy_cache .ruff_cache .pytest_cache
