# Two commands for a fresh machine with Python 3.11+ and a C++ compiler: `make demo` and `make test`.
# Each sets up its own environment in .venv first. PYTHON chooses the interpreter.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
SOURCES := pyproject.toml $(wildcard ffi/*) $(wildcard jax_ggemm/*.py)
# On a machine with an NVIDIA GPU, JAX's CUDA plugin comes along.
comma := ,
CUDA := $(if $(shell command -v nvidia-smi 2>/dev/null),cuda13$(comma))

.PHONY: demo test test-full bench lint types clean

demo: $(VENV)/train.stamp
	$(BIN)/python examples/train_moe_lm.py

test: $(VENV)/test.stamp
	$(BIN)/pytest tests

$(VENV)/train.stamp: $(SOURCES)
$(VENV)/test.stamp: $(SOURCES)
$(VENV)/%.stamp:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or later is needed; name one with PYTHON=")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet '.[$(CUDA)train,test]'
	touch $@
