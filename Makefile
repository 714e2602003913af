# Each target works on a fresh checkout, alone. `make setup` does nothing when nothing changed.
PYTHON ?= python3.11
VENV ?= .venv
BIN := $(VENV)/bin
# On an ordinary machine PyPI's torch is a CUDA build: it works on CPUs too, but is gigabytes larger.
# TORCH_INDEX takes the address of PyTorch's own index of CPU wheels.
TORCH ?= torch==2.13.0
TORCH_INDEX ?=
# How many processes run the tests. A test of a whole run keeps more than one core busy.
TEST_PROCESSES ?= 2
STAMP := $(VENV)/.installed

.PHONY: setup quickstart test lint bench torture clean

setup: $(STAMP)

$(STAMP): requirements/cpu.txt requirements/cpu-no-deps.txt pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet "uv>=0.9,<1"
	$(BIN)/python -c "import torch" 2>/dev/null || $(BIN)/pip install --quiet $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) "$(TORCH)"
	VIRTUAL_ENV=$(VENV) $(BIN)/uv pip install --quiet --no-deps -r requirements/cpu.txt -r requirements/cpu-no-deps.txt
	VIRTUAL_ENV=$(VENV) $(BIN)/uv pip install --quiet --no-deps --editable .
	touch $@

quickstart: setup
	$(BIN)/forebay train deployments/recipes/quickstart.yaml

lint: setup
	$(BIN)/ruff check flows grpo_core storage tests benchmarks
	$(BIN)/mypy

test: lint
	$(BIN)/python -m pytest tests -n $(TEST_PROCESSES) --dist loadfile

torture: setup
	$(BIN)/python -m tests.torture

bench: setup
	$(BIN)/python -m benchmarks

clean:
	rm -rf $(VENV) forebay-runs
