# The two commands of the README are `make serve` and `make test`.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
MODEL ?= smollm2-135m-instruct
ROOMS := gateway kernels scheduler_svc shared tokenizer_svc worker_svc

.PHONY: build/types serve test lint format clean

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

serve: $(VENV)/.installed
	$(BIN)/pagemesh serve $(MODEL)

test: $(VENV)/.installed
	$(BIN)/python -m pytest

# mypy follows no import hooks, so it reads the packages through a tree of links.
build/types: $(VENV)/.installed
	@rm -rf $@ && mkdir -p $@/pagemesh
	@ln -s $(CURDIR)/pagemesh/* $@/pagemesh/
	@for room in $(ROOMS); do ln -s $(CURDIR)/$$room $@/pagemesh/$$room; done

lint: $(VENV)/.installed build/types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	cd build/types && MYPYPATH=. ../../$(BIN)/mypy --config-file ../../pyproject.toml -p pagemesh

format: $(VENV)/.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache
