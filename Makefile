# The commands of this project. `make` lists them.

VENV := .venv
PYTHON := $(VENV)/bin/python
CONSTRAINTS := .ci/constraints.txt
# Waiting threads sleep rather than spin: on a busy machine that makes small models ten times faster.
export OMP_WAIT_POLICY ?= PASSIVE
# Compiled modules are kept: processes started by tests import them faster.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help install demo test quick nightly test-newest test-oldest lock lint format

help:  ## list the commands
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

install: $(VENV)/.installed  ## create .venv and install the package with everything that the commands below need

$(VENV)/.installed: pyproject.toml $(CONSTRAINTS)
	$(call install,$(VENV),--constraint $(CONSTRAINTS))
	@touch $@

# Create the virtual environment $(1) and install the package in it, with the pip arguments $(2).
define install
	@for python in python3 python3.13 python3.12 python3.11; do \
		if $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
			echo "Creating $(1) with $$($$python --version)"; \
			$$python -m venv $(1) || { echo 'On Debian and Ubuntu: sudo apt install python3-venv' >&2; exit 1; }; \
			break; \
		fi; \
	done; \
	test -x $(1)/bin/python || { echo 'No Python 3.11 or newer was found. Install one: https://www.python.org' >&2; exit 1; }
	$(1)/bin/python -m pip install --disable-pip-version-check --editable '.[dev]' $(2)
endef

demo: install  ## train on real digits, save, reopen in a fresh process, predict; options: make demo ARGS="--seed 1"
	$(PYTHON) scripts/demo.py $(ARGS)

test: install lint  ## run the linters, the type checker and all tests
	OMP_NUM_THREADS=1 $(PYTHON) -m pytest -n 2 --dist worksteal

quick: install  ## run each fast test once, for use between edits: 90 seconds
	OMP_NUM_THREADS=1 $(PYTHON) -m pytest -n 2 --dist worksteal -m 'not slow' --first

nightly: install  ## run the parameter combinations that `make test` leaves out
	OMP_NUM_THREADS=1 $(PYTHON) -m pytest -n 2 --dist worksteal -m nightly

test-newest:  ## run all tests with the newest release of every dependency, in .venv-newest
	$(call install,$(VENV)-newest,--upgrade --upgrade-strategy eager)
	OMP_NUM_THREADS=1 $(VENV)-newest/bin/python -m pytest -n 2 --dist worksteal

test-oldest:  ## run the quick tests with the oldest supported releases, in .venv-oldest
	$(call install,$(VENV)-oldest,'transformers==5.17.*' 'torch==2.9.*' 'torchvision==0.24.*')
	OMP_NUM_THREADS=1 $(VENV)-oldest/bin/python -m pytest -n 2 --dist worksteal -m 'not slow'

lock: test-newest  ## write the versions that passed test-newest to .ci/constraints.txt, which `make install` uses
	@{ echo '# Tested versions, written by `make lock`. torch chooses the versions of its CUDA packages itself.'; \
		$(VENV)-newest/bin/python -m pip freeze --exclude-editable | grep -viE '^(nvidia|cuda|triton)'; } > $(CONSTRAINTS)

lint: install  ## check style and types
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/mypy

format: install  ## put the code into the one style
	$(VENV)/bin/ruff check --fix
	$(VENV)/bin/ruff format
