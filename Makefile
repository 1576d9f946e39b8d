# Everything a checkout needs, from nothing: `make demo` shows it, `make test` tests it.
# Stamp files in the virtual environment remember what is done, so the next run starts at once.

export PYTHON ?= python3
PYTEST_ARGS ?=

venv := .venv
bin := $(venv)/bin
pip := $(bin)/python -m pip install -qq --disable-pip-version-check
installed := $(venv)/.installed
developed := $(venv)/.developed
documented := $(venv)/.documented
released := $(venv)/.released

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
MAKEFLAGS += --no-builtin-rules
.DELETE_ON_ERROR:

.PHONY: help
help: ## this list
	@awk -F':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: demo
demo: $(installed) ## a simulated node whose servers stop being restartable; no GPU and no vLLM needed
	@$(bin)/kvwatch demo

.PHONY: test
test: lint unit ## everything that needs no real vLLM

.PHONY: lint
lint: $(developed) ## style and types
	@$(bin)/ruff check --quiet .
	@$(bin)/ruff format --quiet --check .
	@$(bin)/mypy --no-error-summary

.PHONY: unit
unit: $(developed) ## the tests without the linters
	@tools/install_system.sh
	@$(bin)/pytest -n auto --dist loadgroup $(PYTEST_ARGS)

FUZZ_SECONDS ?= 20
.PHONY: fuzz
fuzz: $(developed) ## let a fuzzer loose on all that strangers may send, FUZZ_SECONDS for each way in
	@$(bin)/python -m tests.fuzz.run --seconds $(FUZZ_SECONDS)

# One real server at a time: each takes a core and 2 GB.
.PHONY: e2e
e2e: $(developed) ## the tests against a real vLLM server, which the first run installs (2.5 GB)
	@tools/install_system.sh
	@KVWATCH_VLLM_VENV="$$(tools/install_vllm.sh)" $(bin)/pytest -v -n 0 -m vllm $(PYTEST_ARGS)

.PHONY: docs
docs: $(documented) ## the documentation as a site, in .cache/site; a link that leads nowhere is an error
	@$(bin)/python -m tools.build_docs --check
	@$(bin)/python -m tools.build_shell --check
	@NO_MKDOCS_2_WARNING=1 $(bin)/mkdocs build --quiet --strict

.PHONY: dist
dist: $(released) ## the packages and the bill of materials of what they install, in dist/
	@rm -rf dist .cache/release
	@$(bin)/python -m build --outdir dist . > /dev/null
	@$(PYTHON) -m venv .cache/release
	@.cache/release/bin/python -m pip install -qq --disable-pip-version-check dist/*.whl
	@$(bin)/cyclonedx-py environment --output-format JSON --output-file dist/kvwatch.cdx.json .cache/release
	@ls dist

.PHONY: clean
clean: ## remove what the targets made in this checkout
	@rm -rf $(venv) .cache .mypy_cache .pytest_cache .ruff_cache .hypothesis dist

$(installed): pyproject.toml
	@echo "installing into $(venv)"
	@$(PYTHON) -m venv $(venv)
	@$(pip) 'pip>=25.1'
	@$(pip) --editable .
	@touch $@

$(developed): $(installed)
	@$(pip) --group dev --group deploy
	@touch $@

$(released): $(installed)
	@$(pip) --group release
	@touch $@

$(documented): $(developed)
	@$(pip) --group docs
	@touch $@
