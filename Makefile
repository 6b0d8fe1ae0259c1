# The README's commands. Each makes .venv on its first run and goes straight to work on later ones.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: tune test check docs install clean

tune: $(VENV)/.installed
	$(BIN)/tilewright tune $(ARGS)

test: $(VENV)/.installed-test
	$(BIN)/python -m pytest -n auto --dist worksteal $(ARGS)

check: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python docs/generate.py --check

docs: $(VENV)/.installed
	$(BIN)/python docs/generate.py

install: $(VENV)/.installed-test

# What is installed for the tests is enough for everything. pip would compile it on one core; what is in it for another
# Python does not compile, and need not.
$(VENV)/.installed: EXTRAS :=
$(VENV)/.installed-test: EXTRAS := [test]
$(VENV)/.installed $(VENV)/.installed-test: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Tilewright needs Python 3.11 or later; run make PYTHON=python3.12")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e '.$(EXTRAS)'
	@$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true
	touch $(VENV)/.installed $@

clean:
	rm -rf $(VENV)
