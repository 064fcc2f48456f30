# The commands of this project. `make` lists them.

VENV := .venv
PYTHON := $(VENV)/bin/python
# Waiting threads sleep rather than spin: on a busy machine that makes small models ten times faster.
export OMP_WAIT_POLICY ?= PASSIVE

.PHONY: help install demo test quick lint format

help:  ## list the commands
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

install: $(VENV)/.installed  ## make .venv and install the package with all that the commands below need

$(VENV)/.installed: pyproject.toml
	@for python in python3 python3.13 python3.12 python3.11; do \
		if $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
			echo "Making $(VENV) with $$($$python --version)"; \
			$$python -m venv $(VENV) || { echo 'On Debian and Ubuntu: sudo apt install python3-venv' >&2; exit 1; }; \
			break; \
		fi; \
	done; \
	test -x $(PYTHON) || { echo 'No Python 3.11 or newer was found. Install one: https://www.python.org' >&2; exit 1; }
	$(PYTHON) -m pip install --disable-pip-version-check --editable '.[dev]'
	@touch $@

demo: install  ## train on real digits, save, reopen in a fresh process, predict; options: make demo ARGS="--seed 1"
	$(PYTHON) scripts/demo.py $(ARGS)

test: install lint  ## run the linters, the type checker and all tests
	OMP_NUM_THREADS=1 $(PYTHON) -m pytest -n 2 --dist worksteal

quick: install  ## run the tests between edits, without trainings, processes, conversions and drawings: two minutes
	OMP_NUM_THREADS=1 $(PYTHON) -m pytest -n 2 --dist worksteal -m 'not slow'

lint: install  ## check style and types
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/mypy

format: install  ## put the code into the one style
	$(VENV)/bin/ruff check --fix
	$(VENV)/bin/ruff format
