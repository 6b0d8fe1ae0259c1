# The README's commands. Each makes .venv on its first run and goes straight to work on later ones.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

# Where it is set, every process that a test starts would compile what it imports.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: tune test test-fast test-oldest check docs install lock audit gpu clean

tune: $(VENV)/.installed
	$(BIN)/tilewright tune $(ARGS)

test: $(VENV)/.installed-test
	$(BIN)/python -m pytest -n auto --dist worksteal $(ARGS)

# For daily work: what takes long, and what starts processes, is left out.
test-fast: $(VENV)/.installed-test
	$(BIN)/python -m pytest -n auto --dist worksteal --fast $(ARGS)

check: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python docs/generate.py --check
	$(BIN)/python tools/lock.py --check

docs: $(VENV)/.installed
	$(BIN)/python docs/generate.py

install: $(VENV)/.installed-test

# Writes locks/ and the SBOM, from the package index that pip is configured for.
lock: $(VENV)/.installed-test
	$(BIN)/python tools/lock.py

audit: $(VENV)/.installed-test
	$(BIN)/python tools/audit.py

# What is installed for the tests is enough for everything. Every file is checked against the hashes in locks/, whatever
# index it comes from; make LOCKED=0 takes the newest versions that pyproject.toml and constraints.txt allow. pip would
# compile it on one core; what is in it for another Python does not compile, and need not. What is hardly ever imported
# is compiled when it is.
LOCKED ?= 1
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile
HASHED := $(PIP) --no-deps --require-hashes
WANTS_CUDA := import importlib.metadata, sys; sys.exit(not any("cuda" in each for each in importlib.metadata.requires("torch")))
$(VENV)/.installed: EXTRAS :=
$(VENV)/.installed: FILES := -r locks/tune.txt
$(VENV)/.installed-test: EXTRAS := [test]
$(VENV)/.installed-test: FILES := -r locks/tune.txt -r locks/test.txt
$(VENV)/.installed $(VENV)/.installed-test: pyproject.toml constraints.txt $(wildcard locks/*.txt)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Tilewright needs Python 3.11 or later; run make PYTHON=python3.12")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
ifeq ($(LOCKED),1)
	@test -e /proc/driver/nvidia/version || $(HASHED) -r locks/cpu.txt 2> /dev/null || echo 'this index has no build of torch for CPUs alone'
	$(HASHED) $(FILES)
	@if $(BIN)/python -c '$(WANTS_CUDA)'; then echo '$(HASHED) -r locks/cuda.txt'; $(HASHED) -r locks/cuda.txt; fi
	$(PIP) --no-deps --no-build-isolation -e .
else
	$(PIP) -c constraints.txt -e '.$(EXTRAS)'
endif
	@$(BIN)/python -m compileall -qq -j 0 -x '/transformers/models/|/tests/|/pip/' $(VENV)/lib src || true
	touch $(VENV)/.installed $@

# The same tests with the oldest torch and Triton that pyproject.toml allows, in an environment of their own (5 GB).
# Triton 3.6 interprets kernels with a NumPy before 2.4 alone.
OLDEST := .venv-oldest
test-oldest: $(OLDEST)/.installed
	$(OLDEST)/bin/python -m pytest -n auto --dist worksteal $(ARGS)

$(OLDEST)/.installed: pyproject.toml
	test -x $(OLDEST)/bin/python || $(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip install --quiet --disable-pip-version-check 'torch==2.11.*' 'triton==3.6.*' 'numpy<2.4' -e '.[test]'
	touch $@

# What only a GPU can show, the most valuable first: ARGS="--budget 1500 --resume runs/gpu_round".
gpu: $(VENV)/.installed-test
	$(BIN)/python tools/gpu_round.py $(ARGS)

clean:
	rm -rf $(VENV) $(OLDEST)
