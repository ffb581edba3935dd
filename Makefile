# Two commands on a fresh machine: `make demo` and `make test`. The environment lives in .venv.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check

# Without an NVIDIA driver a CUDA build of torch is gigabytes of nothing: constraints-cpu.txt pins a CPU build.
GPU         := $(wildcard /dev/nvidiactl)
CONSTRAINTS := $(if $(GPU),,--constraint constraints-cpu.txt)

export HF_HUB_OFFLINE := 1

.PHONY: demo test check test-gpu test-faults bench clean

$(VENV)/core: pyproject.toml constraints-cpu.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) $(CONSTRAINTS) torch
	$(PIP) $(CONSTRAINTS) --editable .
	touch $@

$(VENV)/dev: $(VENV)/core
	$(PIP) $(CONSTRAINTS) --editable .[dev]
	touch $@

demo: $(VENV)/core  ## two real corpora, embedded and searched
	$(BIN)/python jobs/demo.py demo

test: $(VENV)/dev  ## everything CI runs
	$(BIN)/python -m pytest

check: $(VENV)/dev  ## format, lint, types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

test-gpu: $(VENV)/dev
	$(BIN)/python -m pytest -m gpu

test-faults: $(VENV)/dev  ## thousands of faults, half an hour; the table of what became of them
	mkdir -p .cache
	PYTHONPATH=tests $(BIN)/python -m faults.run --table .cache/faults.md

bench: $(VENV)/dev
	$(BIN)/python jobs/bench/cpu.py
	$(BIN)/python jobs/bench/memory.py

clean:
	rm -rf $(VENV) demo .cache
