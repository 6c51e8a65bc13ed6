# Everything a contributor runs. Needs make, git and Python 3.11 or newer; all else comes from PyPI into .venv.

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# The pip wrapper of pyright asks PyPI at each start whether it is the newest. The version is pinned, so do not ask.
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1

.DEFAULT_GOAL := help
.PHONY: help env lint format test train bench clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-7s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

env: $(STAMP) ## Create or update .venv with the pinned packages

# The stamp makes a second `make env` free: it is renewed only when the project's needs or the pins change.
$(STAMP): pyproject.toml constraints.txt
	@$(BIN)/python -c '' 2>/dev/null || { \
		for python in python3.11 python3; do \
			if $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
				echo "$$python -m venv $(VENV)"; exec $$python -m venv --clear $(VENV); \
			fi; \
		done; \
		echo "error: foldtrain needs Python 3.11 or newer, and neither python3.11 nor python3 is one" >&2; exit 1; \
	}
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

lint: env ## Check style, format, types and the direction of imports
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright
	$(BIN)/lint-imports --no-logo

format: env ## Fix what ruff can fix, and format
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

# One thread a worker: more would fight over the cores, and the order of a parallel sum is not fixed.
test: env lint ## Lint, then run the whole test suite
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2

train: env ## Train a small classifier of handwritten digits
	$(BIN)/python examples/digits.py

bench: env ## Run the benchmarks, and write docs/benchmarks.md (ONLY=step,import: some; TRAINERS=1: against other trainers too)
	$(if $(TRAINERS),$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[trainers]')
	$(BIN)/python tests/benchmarks/run.py $(if $(ONLY),--only $(ONLY)) $(if $(TRAINERS),--trainers)

clean: ## Remove the environment, caches and build artefacts (not runs/)
	rm -rf $(VENV) build dist *.egg-info .hypothesis .import_linter_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
