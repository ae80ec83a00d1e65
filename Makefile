# Everything a contributor runs. Each target sets up .venv by itself; `make` alone explains them.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
ARGS   ?=
COMMA  := ,

.DEFAULT_GOAL := help
.PHONY: help demo test check bench capacity prove torture audit fuzz format docs site clean
.DELETE_ON_ERROR:

help:  ## Show this list
	@awk 'BEGIN { FS = ":.*## "; print "Usage: make TARGET [PYTHON=python3.12] [ARGS=...]\n" } \
	     /^[a-z]+:.*## / { printf "  %-8s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

demo: $(VENV)/.spark  ## Run the demo shop: workers are killed, no event is lost, Spark reports (ARGS=--keep: stay open)
	@$(BIN)/postbus demo $(ARGS)

test: $(VENV)/spark.jsa $(VENV)/.browser  ## Run the tests (ARGS="-k retry" picks some)
	@$(BIN)/pytest -q -n 3 $(ARGS)

check: $(VENV)/.dev  ## Lint, format, types, layers, and generated pages: changes nothing
	@$(BIN)/ruff check
	@$(BIN)/bandit -q -c pyproject.toml -r src
	@$(BIN)/ruff format --check
	@$(BIN)/pyright
	@$(BIN)/lint-imports
	@$(BIN)/python tools/requirements_page.py --check
	@$(BIN)/python tools/cli_page.py --check
	@$(BIN)/python tools/llms_page.py --check
	@$(BIN)/python tools/proof_page.py --check

bench: $(VENV)/.bench bench/node/node_modules/.ready  ## Measure postbus and its peers side by side
	@$(BIN)/python -m bench $(ARGS)

capacity: $(VENV)/.bench  ## Count what an event costs at three sizes of the log (docs/capacity.md)
	@$(BIN)/python -m bench.capacity $(ARGS)

prove: $(VENV)/spark.jsa $(VENV)/.browser  ## Run the long trials: crashes, power loss, poison
	@$(BIN)/pytest -q -n 2 -m slow --timeout=3600 $(ARGS)

audit: $(VENV)/.audit  ## Look for known weaknesses, in the source and in the packages (asks a service on the network)
	@$(BIN)/bandit -q -c pyproject.toml -r src
	@$(BIN)/python tools/audit.py

fuzz: $(VENV)/.fuzz  ## Fuzz what reads from outside, a minute each (ARGS="-max_total_time=600")
	@for each in address cloudevents pattern payload wire; do \
	 $(BIN)/python -m tests.fuzz $$each $(or $(ARGS),-max_total_time=60) || exit 1; done

torture: $(VENV)/spark.jsa  ## Break it on purpose, check every promise (ARGS="kill-worker --trials 20 --report proof")
	@SPARK_SUBMIT_OPTS="$$($(BIN)/python -m tests.quick_spark --options)" $(BIN)/postbus torture $(ARGS)

format: $(VENV)/.dev  ## Format the code and apply the safe lint fixes
	@$(BIN)/ruff check --fix-only --exit-zero
	@$(BIN)/ruff format

docs: $(VENV)/.dev  ## Regenerate the pages made from the tests and the commands
	@$(BIN)/python tools/requirements_page.py
	@$(BIN)/python tools/cli_page.py
	@$(BIN)/python tools/proof_page.py
	@$(BIN)/python tools/llms_page.py

site: $(VENV)/.dev  ## Build the documents as a site, into site/
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean:  ## Remove .venv, caches and build products
	@rm -rf $(VENV) dist build site .pytest_cache .ruff_cache .hypothesis .fuzz .import_linter_cache
	@find src tests tools bench -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

# --- the virtual environment: a stamp file a set of extras, renewed when pyproject.toml changes ---

define install
	@echo "Installing postbus$(1) into $(VENV) ..."
	@if command -v uv >/dev/null 2>&1; then uv pip install --quiet --python $(BIN)/python -e '.$(1)'; \
	 else $(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.$(1)'; fi
endef

$(VENV)/pyvenv.cfg:
	@command -v $(PYTHON) >/dev/null 2>&1 || \
	 { echo "postbus needs Python 3.11 or newer, and $(PYTHON) is not on PATH: make PYTHON=/path/to/python" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	 { echo "postbus needs Python 3.11 or newer, and $(PYTHON) is $$($(PYTHON) -V 2>&1): make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.spark: pyproject.toml | $(VENV)/pyvenv.cfg
	$(call install,[server$(COMMA)spark$(COMMA)jdk])
	@touch $@

$(VENV)/.dev: pyproject.toml | $(VENV)/pyvenv.cfg
	$(call install,[dev$(COMMA)server$(COMMA)spark$(COMMA)jdk])
	@touch $(VENV)/.spark $@

# The tests of the dashboard need a browser. Playwright brings one, or else Debian does, to whoever may install it.
$(VENV)/.browser: | $(VENV)/.dev
	@command -v chromium >/dev/null || command -v google-chrome >/dev/null || $(BIN)/playwright install chromium >/dev/null 2>&1 || \
	 { apt-get update && apt-get install -y --no-install-recommends chromium; } >$@.log 2>&1 || \
	 { echo "No browser could be installed, and the tests of the dashboard need one: apt install chromium" >&2; exit 0; }; \
	 touch $@

# Spark's classes as Java has read them: the drivers that tests start take a third of the time. Without Java, nothing.
$(VENV)/spark.jsa: $(VENV)/.dev
	@echo "Keeping what Spark loads, so that the tests start it quickly ..."
	@$(BIN)/python -m tests.quick_spark >/dev/null 2>&1 || echo "That could not be done: the tests start Spark slowly, if at all."

$(VENV)/.bench: pyproject.toml | $(VENV)/pyvenv.cfg
	$(call install,[dev$(COMMA)bench$(COMMA)server$(COMMA)spark$(COMMA)jdk])
	@touch $(VENV)/.spark $(VENV)/.dev $@

$(VENV)/.audit: pyproject.toml | $(VENV)/pyvenv.cfg
	$(call install,[audit$(COMMA)dev$(COMMA)server$(COMMA)spark$(COMMA)jdk])
	@touch $(VENV)/.spark $(VENV)/.dev $@

$(VENV)/.fuzz: pyproject.toml | $(VENV)/pyvenv.cfg
	$(call install,[dev$(COMMA)fuzz$(COMMA)server$(COMMA)spark$(COMMA)jdk])
	@touch $(VENV)/.spark $(VENV)/.dev $@

# Two of the bench's peers live on Node. Without npm they are left out, and the bench says so.
bench/node/node_modules/.ready: bench/node/package.json
	@if command -v npm >/dev/null 2>&1; then echo "Installing the bench's peers on Node ..."; \
	 npm install --prefix bench/node --no-audit --no-fund --loglevel=error >/dev/null && touch $@ || true; fi
