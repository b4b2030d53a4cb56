PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help venv install test test-all lint format types demo tour bench clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# The stamp is written only after a complete install, so that an interrupted one is taken up again.
$(STAMP): pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing scalelong[dev] into $(VENV); the first time this takes a few minutes."
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]' -c constraints.txt
	@touch $@

install: $(STAMP) ## create .venv and install with the pinned versions
venv: install

# One thread per worker: torch would otherwise start one per core in each of them.
test test-all: export OMP_NUM_THREADS = 1

test: $(STAMP) ## run the tests, without the slow ones
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow"

test-all: $(STAMP) ## run all tests
	$(BIN)/python -m pytest -n 2 --dist worksteal

lint: $(STAMP) ## check style and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(STAMP) ## repair style and formatting
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(STAMP) ## check the types of src
	$(BIN)/pyright src

demo: $(STAMP) ## train a small U-ViT on handwritten digits and draw 64 of them, about three minutes
	$(BIN)/scalelong train digits --out runs/demo
	$(BIN)/scalelong sample runs/demo -n 64
	@echo "Look at the digits: $$(ls -t runs/demo/samples/*/grid.png | head -n 1)"

tour: $(STAMP) ## show scaled skips at work on real networks
	$(BIN)/python examples/tour.py

bench: $(STAMP) ## measure what scaling costs per step, and how fast the trainer is
	$(BIN)/python benchmarks/overhead.py
	$(BIN)/python benchmarks/train.py

clean: ## remove .venv, caches and build output
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
