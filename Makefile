# The README's commands. Each makes .venv on its first run and goes straight to work on later ones.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: tune test check docs clean

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

$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Tilewright needs Python 3.11 or later; run make PYTHON=python3.12")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test]'
	touch $@

clean:
	rm -rf $(VENV)
