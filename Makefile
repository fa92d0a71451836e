# `make help` lists the targets. PYTHON=python3.12 picks another interpreter, ARGS="-k ref" passes on.
PYTHON ?= python3
ARGS ?=
VENV := .venv
RUN := $(VENV)/bin/python -m
# The environment, not an option, so that constraints also hold where the package itself is built.
PIP := PIP_CONSTRAINT=constraints.txt PIP_BUILD_CONSTRAINT=constraints.txt \
	$(RUN) pip install -qq --disable-pip-version-check --no-input

.PHONY: help demo test lint types bench peers docs clean
.DELETE_ON_ERROR:

help: ## this list
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' Makefile | expand -t 10

demo: $(VENV)/.demo ## train on shared memory, and measure it against plain torch RPC
	@echo "1. A job from a config: a parameter server and two trainers learn handwritten digits"
	@$(VENV)/bin/mmrpc launch configs/digits.yaml $(ARGS)
	@printf '\n2. One dataset for three processes: what is sent, and what a removed file comes to\n'
	@$(VENV)/bin/python examples/digits_slice.py

test: $(VENV)/.dev ## all tests
	$(RUN) pytest $(ARGS)

lint: $(VENV)/.dev ## style, and which module may import which
	$(RUN) ruff check .
	$(RUN) ruff format --check .
	$(VENV)/bin/lint-imports --no-cache

types: $(VENV)/.dev ## mypy --strict
	$(RUN) mypy

bench: $(VENV)/.dev ## measure against other ways to do the same; ARGS=--quick takes 3 minutes
	$(RUN) benchmarks $(ARGS)

peers: $(VENV)/.dev ## install Ray and Hugging Face datasets, so that bench measures them too
	@$(PIP) -e ".[peers]"

docs: $(VENV)/.dev ## run what the documents show, and follow their links
	$(RUN) pytest tests/unit/test_readme.py tests/unit/test_docs.py $(ARGS)

clean: ## remove what make made
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks

# A stamp is newer than what it was installed from, so that nothing is installed twice.
$(VENV)/.dev: pyproject.toml constraints.txt | $(VENV)/bin/pip
	@echo "Installing mmrpc and its tools into $(VENV) (some minutes the first time)"
	@$(PIP) -e ".[dev,bench]"
	@touch $@ $(VENV)/.demo

$(VENV)/.demo: pyproject.toml constraints.txt | $(VENV)/bin/pip
	@echo "Installing mmrpc into $(VENV) (some minutes the first time)"
	@$(PIP) -e ".[demo]"
	@touch $@

$(VENV)/bin/pip:
	@$(PYTHON) -m venv --clear $(VENV)
