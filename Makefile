# Two commands are all the set-up: `make demo` and `make test`. Both make .venv and install what they need.
#
#   make demo                       the layer from an FP8 checkpoint, checked against its oracle (examples/demo.py)
#   make test                       all tests that this machine can run
#   make test PYTHON=python3 VENV=  the same with an interpreter that has everything already; nothing is installed
#
# Without an NVIDIA GPU a pinned torch is taken, of which package indexes offer a CPU build; with one, pip's choice.

PYTHON ?= python3
VENV ?= .venv
PYTEST_ARGS ?=
# Twelve processes at most, one for each core, where pytest-xdist is installed; `PARALLEL=` runs everything in one.
PARALLEL ?= $$($(PY) -c 'import os, xdist; print("--dist worksteal -n", min(12, len(os.sched_getaffinity(0))))' 2>/dev/null)
DEMO_ARGS ?=
HAS_GPU := $(shell nvidia-smi -L 2>/dev/null | head -c 3)
TORCH ?= $(if $(HAS_GPU),torch>=2.10,torch==2.13.0)

ifeq ($(strip $(VENV)),)
PY := $(PYTHON)
READY :=
export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))
else
PY := $(VENV)/bin/python
READY := $(VENV)/.ready
endif

.PHONY: demo test slow lint format tables clean

demo: $(READY)
	$(PY) examples/demo.py $(DEMO_ARGS)

test: $(READY)
	$(PY) -m pytest $(PARALLEL) $(PYTEST_ARGS)

slow: $(READY)
	$(PY) -m pytest -m "slow or compile_all" $(PARALLEL) $(PYTEST_ARGS)

lint: $(READY)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

format: $(READY)
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

tables: $(READY)
	$(PY) -m benchmarks.tables

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache

ifneq ($(READY),)
$(READY): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install -qq "$(TORCH)"
	$(PY) -m pip install -qq "$(TORCH)" -e ".[triton,cute,test]"
	touch $@
endif
