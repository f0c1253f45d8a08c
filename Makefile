# Two commands for a fresh machine with Python 3.11+ and a C++ compiler: `make demo` and `make test`.
# Each sets up its own environment first. PYTHON names the interpreter, VENV the environment's folder, and JAX
# a version to test with instead of the newest one. SELECT is passed on to pytest.

PYTHON ?= python3
VENV ?= .venv
JAX ?=
SELECT ?=

BIN := $(VENV)/bin
SOURCES := pyproject.toml $(wildcard ffi/* jax_ggemm/*.py jax_ggemm/*/*.py)
comma := ,
space := $(subst ,, )
# On a machine with an NVIDIA GPU, JAX's CUDA plugin comes along.
CUDA := $(if $(shell command -v nvidia-smi 2>/dev/null),cuda13$(comma))

# The architectures that a wheel holds compiled kernels for, and how many MiB of them for each.
OBJECTS_MIB ?= 4
ARCHITECTURES ?= sm_90a

.PHONY: demo test test-full bench lint wheel clean

demo: $(VENV)/train.stamp
	$(BIN)/python examples/train_moe_lm.py

test: $(VENV)/test.stamp
	JAX_PLATFORMS=cpu $(BIN)/pytest --numprocesses auto $(SELECT) tests
	$(if $(CUDA),$(BIN)/pytest --numprocesses 4 -m gpu tests)

test-full: $(VENV)/test.stamp
	JAX_PLATFORMS=cpu JAX_GGEMM_TEST_FULL=1 $(BIN)/pytest --numprocesses auto $(SELECT) tests
	$(if $(CUDA),JAX_GGEMM_TEST_FULL=1 $(BIN)/pytest --numprocesses 4 -m gpu tests)

bench: $(VENV)/train.stamp
	$(BIN)/python -m jax_ggemm bench

lint: $(VENV)/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run -Werror ffi/*.cc ffi/*.h tests/*.cc tests/ptx_emulator/*/*.cc tests/ptx_emulator/*/*.h

# A wheel with compiled GPU kernels in it; no GPU is needed. `pip install .` builds one without.
wheel: $(VENV)/compile.stamp
	for arch in $(ARCHITECTURES); do \
	  $(BIN)/python -m jax_ggemm compile --release --arch $$arch --out build/objects/$$arch --max-mib $(OBJECTS_MIB) || exit 1; \
	done
	$(BIN)/python -m pip wheel --no-deps --wheel-dir dist . \
	  '--config-settings=cmake.define.JAX_GGEMM_OBJECTS=$(subst $(space),;,$(ARCHITECTURES:%=$(CURDIR)/build/objects/%))'

clean:
	rm -rf $(VENV) build dist

$(VENV)/%.stamp: $(SOURCES)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or later is needed: name one with PYTHON=")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet '.[$(CUDA)$*]' $(if $(JAX),jax==$(JAX) jaxlib==$(JAX))
	touch $@
