# Two commands for a fresh machine with Python 3.11+ and a C++ compiler: `make demo` and `make test`.
# Each sets up its own environment first. PYTHON names the interpreter, VENV the environment's folder, and JAX
# a version to test with instead of the newest one.

PYTHON ?= python3
VENV ?= .venv
JAX ?=

BIN := $(VENV)/bin
SOURCES := pyproject.toml $(wildcard ffi/* jax_ggemm/*.py jax_ggemm/*/*.py)
comma := ,
# On a machine with an NVIDIA GPU, JAX's CUDA plugin comes along.
CUDA := $(if $(shell command -v nvidia-smi 2>/dev/null),cuda13$(comma))

.PHONY: demo test test-full bench lint clean

demo: $(VENV)/train.stamp
	$(BIN)/python examples/train_moe_lm.py

test: $(VENV)/test.stamp
	JAX_PLATFORMS=cpu $(BIN)/pytest --numprocesses auto tests
	$(if $(CUDA),$(BIN)/pytest --numprocesses 4 -m gpu tests)

test-full: $(VENV)/test.stamp
	JAX_PLATFORMS=cpu JAX_GGEMM_TEST_FULL=1 $(BIN)/pytest --numprocesses auto tests
	$(if $(CUDA),JAX_GGEMM_TEST_FULL=1 $(BIN)/pytest --numprocesses 4 -m gpu tests)

bench: $(VENV)/train.stamp
	$(BIN)/python -m jax_ggemm bench

lint: $(VENV)/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run -Werror ffi/*.cc ffi/*.h tests/*.cc

clean:
	rm -rf $(VENV) build dist

$(VENV)/%.stamp: $(SOURCES)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or later is needed: name one with PYTHON=")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet '.[$(CUDA)$*]' $(if $(JAX),jax==$(JAX) jaxlib==$(JAX))
	touch $@
