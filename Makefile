# Everything runs from a bare checkout: each target makes the environment it needs, and a second run reuses it.
#   make demo      convert a real small pruned checkpoint, validate it, multiply with it, print a table
#   make test      all tests that need no GPU and no torch
#   make emulate   random conversions by CUDA kernels on the CPU, compared with the numpy code: no GPU needed, but g++;
#                  EMULATE=--products: random products instead
#   make torch     the tests of spformat.torch on the CPU, with torch and transformers in an environment of their own
PYTHON     ?= python3
GPU_PYTHON ?= $(PYTHON)
VENV       ?= .venv
PYTEST     ?= -q
SANITIZER  ?= compute-sanitizer
BIN        := $(VENV)/bin
PIP        := $(BIN)/python -m pip --disable-pip-version-check install --quiet

.PHONY: help demo test check emulate torch fuzz nightly gpu fixtures docs bench clean
.DELETE_ON_ERROR:

help:
	@echo "make demo | test | check | emulate | torch | fuzz | nightly | gpu | fixtures | docs | bench | clean"

demo: $(VENV)/cpu.stamp
	$(BIN)/python fixtures/demo.py

test: $(VENV)/test.stamp
	$(BIN)/python -m pytest $(PYTEST) -n auto

check: $(VENV)/test.stamp
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest $(PYTEST) -n auto

# CASES random cases of every format, the first with SEED. EMULATE="--formats csr" narrows it; --products runs product kernels,
# --kernels NAME some of them: tests/emulator has its options.
CASES ?= 20
SEED  ?= 0
emulate: $(VENV)/test.stamp
	PYTHONPATH=tests $(BIN)/python -m emulator --cases $(CASES) --seed $(SEED) $(EMULATE)

# torch is large, so it is in no other environment. A build for the CPU is enough, and smaller than the default one:
# PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make torch
TORCH_VENV  ?= .venv-torch
# Those of spformat.torch and Hugging Face, and others that have a few tests with torch, which `make test` skips.
TORCH_TESTS := $(wildcard tests/test_torch_*.py tests/test_hf_*.py) $(shell grep -l 'importorskip."torch' tests/test_*.py)
TORCH_TESTS := $(sort $(TORCH_TESTS))
torch:
	@$(MAKE) --no-print-directory VENV=$(TORCH_VENV) $(TORCH_VENV)/torch-test.stamp
	$(TORCH_VENV)/bin/python -m pytest $(PYTEST) -n auto -m "not gpu" $(TORCH_TESTS)

nightly: $(VENV)/test.stamp
	$(BIN)/python -m pytest $(PYTEST) -n auto --hypothesis-profile nightly -m "not gpu" $(PROPERTIES)

# Hours: see docs/decisions/0015-fuzzing.md. FUZZ="mutants --count 10000" runs one campaign; tests/fuzz has their options.
fuzz: $(VENV)/fuzz.stamp
	PYTHONPATH=tests $(BIN)/python -m fuzz $(FUZZ)

PROPERTIES := tests/test_formats.py tests/test_masks.py tests/test_order.py tests/test_schedule.py \
  tests/test_matrices.py tests/test_compressed_tensors.py

# CuPy, CUDA and the driver belong to the machine: the Python that has them is used as it is. Tests that take much of the
# device's memory run after the others; GPU_JOBS processes share it before. Every part runs, also after one that fails.
GPU_JOBS ?= 4
GPUTEST := -m pytest $(PYTEST) -m gpu --backends cuda -p no:benchmark
GPUPATH := PYTHONPATH=.$${PYTHONPATH:+:$$PYTHONPATH}
gpu:
	@$(GPU_PYTHON) -c "import cupy, pytest, xdist, hypothesis" || { echo "make gpu: GPU_PYTHON=$(GPU_PYTHON) needs:" \
	  "$(GPU_PYTHON) -m pip install '.[cuda13,test]'   (or cuda12)"; exit 69; }
	@status=0; set -x; \
	$(GPUPATH) $(GPU_PYTHON) $(GPUTEST) -n $(GPU_JOBS) --dist worksteal -m "gpu and not device_memory" \
	  --ignore tests/rows/test_device_rows.py || status=1; \
	$(GPUPATH) $(GPU_PYTHON) $(GPUTEST) tests/rows/test_device_rows.py || status=1; \
	$(GPUPATH) $(GPU_PYTHON) $(GPUTEST) -m "gpu and device_memory" || status=1; \
	if $(GPU_PYTHON) -c "import torch" 2>/dev/null; then \
	  $(GPUPATH) $(GPU_PYTHON) -m pytest $(PYTEST) -m "not gpu" -p no:benchmark -n $(GPU_JOBS) $(TORCH_TESTS) || status=1; \
	else echo "$(GPU_PYTHON) has no torch: the tests of spformat.torch were not run"; fi; \
	if command -v $(SANITIZER) >/dev/null; then \
	  $(GPUPATH):tests $(GPU_PYTHON) tests/sanitize.py --tool $(SANITIZER) --jobs $(GPU_JOBS) || status=1; \
	else echo "$(SANITIZER) not found: memcheck and racecheck were not run"; fi; \
	exit $$status

fixtures: $(VENV)/test.stamp
	$(BIN)/python fixtures/make.py

docs: $(VENV)/docs.stamp
	$(BIN)/python docs/tables.py
	$(BIN)/python -m sphinx -q -W -b html docs build/docs
	@echo "build/docs/index.html"

BENCH ?= fixtures/checkpoint/digits -n 16,360
bench: $(VENV)/cpu.stamp
	$(BIN)/spformat bench $(BENCH)

clean:
	rm -rf $(VENV) $(TORCH_VENV) build dist *.egg-info demo-output

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# One stamp per extra; a changed pyproject.toml (dependencies, packages) installs again.
$(VENV)/%.stamp: pyproject.toml | $(BIN)/python
	$(PIP) --editable ".[$*]"
	@touch $@
