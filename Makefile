# make demo       see it train on four local devices
# make test       everything: format, lint, types, then the tests from the cheapest to the dearest
# make test-slow  the heaviest models on real processes, and many more random plans: 16 GB of memory, half an hour
# make check      format, lint and types only
# make clean      remove what the tools leave behind; the environment in .venv stays

PYTHON ?= python3
BIN := .venv/bin
INSTALL := $(BIN)/python -m pip install -q -c constraints.txt
PYTEST := $(BIN)/python -m pytest -q
# One thread a worker, or the workers fight for the cores.
PARALLEL := OMP_NUM_THREADS=1 $(PYTEST) -n auto --maxprocesses 8

# Tests are sorted by what they need. A folder not named here counts as one-process, so none is forgotten.
ARCHITECTURE := tests/test_architecture.py
PURE := $(wildcard tests/ir tests/planning tests/reporting tests/golden tests/data)
MANY_PROCESS := $(wildcard tests/dist)
ONE_PROCESS := $(filter-out $(ARCHITECTURE) $(PURE) $(MANY_PROCESS) tests/__pycache__, \
    $(wildcard tests/test_*.py) $(patsubst %/,%,$(wildcard tests/*/)))

.PHONY: demo test test-slow check clean

demo: .venv/installed
	$(BIN)/manyhands demo

test: check
	$(PYTEST) $(ARCHITECTURE)
	$(if $(PURE),$(PARALLEL) $(PURE))
	$(if $(ONE_PROCESS),$(PARALLEL) $(ONE_PROCESS))
	$(if $(MANY_PROCESS),OMP_NUM_THREADS=1 $(PYTEST) -n 2 --dist loadfile $(MANY_PROCESS))

test-slow: .venv/installed-test
	$(PYTEST) -m slow

check: .venv/installed-test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy src

clean:
	rm -rf build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamps are newer than what they were installed from, so a second run installs nothing.
.venv/installed: pyproject.toml constraints.txt | $(BIN)/pip
	$(INSTALL) -e .
	touch $@

.venv/installed-test: pyproject.toml constraints.txt | $(BIN)/pip
	$(INSTALL) -e ".[test]"
	touch $@ .venv/installed

$(BIN)/pip:
	$(PYTHON) -m venv .venv
