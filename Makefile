# The two commands of the README are `make serve` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CLIENTS := tests/clients/apart
CLIENTS_VENV := build/clients
CLIENTS_PYTHON ?= $(PYTHON)
MODEL ?= smollm2-135m-instruct
ARGS ?=
ROOMS := gateway kernels scheduler_svc shared tokenizer_svc worker_svc
# A CUDA build of PyTorch brings the Triton it needs. With a CPU build, this one interprets kernels.
TRITON := triton==3.6.0
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check \
	--constraint constraints.txt

.PHONY: serve test test-clients compose chaos fuzz lint docs format clean

serve: $(VENV)/serve.installed
	@$(BIN)/pagemesh serve $(MODEL) $(ARGS)

# Two processes: many tests wait, and those that compute leave a core now and then.
test: $(VENV)/dev.installed
	$(BIN)/python -m pytest -n 2 --dist loadfile $(ARGS)

# Released clients with much in tow, in an environment without pagemesh; those of npm where it is.
# Then forced calls and nested schemas, a hundred times each.
test-clients: $(VENV)/dev.installed $(CLIENTS_VENV)/clients.installed
	cd $(CLIENTS) && $(CURDIR)/$(CLIENTS_VENV)/bin/python -m pytest $(ARGS)
	$(BIN)/python -m pytest -n 0 --timeout 900 --runs 100 -k whatever_is_drawn \
		tests/clients/test_openai_structured.py tests/clients/test_openai_tools.py

# compose.yaml at length, its containers being network namespaces: root, iproute2 and haproxy.
compose: $(VENV)/dev.installed
	$(BIN)/python -m pytest -n 0 tests/deploy/compose_check.py $(ARGS)

# Everything that may befall a mesh, under load, in about five minutes; what its clients notice.
chaos: $(VENV)/dev.installed
	$(BIN)/pagemesh prepare smollm2-135m-instruct
	$(BIN)/python benchmarks/chaos.py scripted $(ARGS)

# Hostile requests beside a healthy stream for some minutes; another FUZZ_SEED draws others.
FUZZ_SEED ?= 1
fuzz: $(VENV)/dev.installed
	$(BIN)/python -m pytest -n 0 tests/mesh/test_mesh_fuzz.py --timeout 1800 \
		--fuzz-requests 50000 --fuzz-seed $(FUZZ_SEED) $(ARGS)

# mypy follows no import hooks, so it reads the packages through a tree of links.
lint: $(VENV)/dev.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@rm -rf build/types && mkdir -p build/types/pagemesh
	@ln -s $(CURDIR)/pagemesh/* build/types/pagemesh/
	@for room in $(ROOMS); do ln -s $(CURDIR)/$$room build/types/pagemesh/$$room; done
	cd build/types && MYPYPATH=. $(CURDIR)/$(BIN)/mypy --config-file $(CURDIR)/pyproject.toml -p pagemesh

docs: $(VENV)/dev.installed
	$(BIN)/python -m pagemesh.settings_docs > docs/settings.md

format: $(VENV)/dev.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache $(CLIENTS)/node/node_modules

# A system without ensurepip (Debian's python3 without python3-venv) lends its own pip.
define create_venv
	@echo "creating $(1)"
	@$(2) -m venv $(1) >/dev/null 2>&1 || { \
		$(2) -m venv --clear --without-pip $(1) && \
		$(2) -m pip --python $(1)/bin/python install --quiet pip; }
endef

$(BIN)/python:
	$(call create_venv,$(VENV),$(PYTHON))

$(CLIENTS_VENV)/bin/python:
	$(call create_venv,$(CLIENTS_VENV),$(CLIENTS_PYTHON))

$(VENV)/serve.installed: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing pagemesh and what it needs into $(VENV) (the first time takes minutes)"
	@$(PIP_INSTALL) --editable '.[all]'
	@touch $@

$(VENV)/dev.installed: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing pagemesh, what it needs and the tools into $(VENV)"
	@$(PIP_INSTALL) --editable '.[dev]'
	@$(BIN)/python -c 'import triton' 2>/dev/null || $(PIP_INSTALL) '$(TRITON)'
	@touch $@ $(VENV)/serve.installed

$(CLIENTS_VENV)/clients.installed: $(addprefix $(CLIENTS)/,requirements.txt constraints.txt \
		node/package.json node/package-lock.json) | $(CLIENTS_VENV)/bin/python
	@echo "installing the clients into $(CLIENTS_VENV) (the first time takes minutes)"
	@$(CLIENTS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check \
		--requirement $(CLIENTS)/requirements.txt --constraint $(CLIENTS)/constraints.txt
	@if command -v npm >/dev/null; then npm ci --silent --prefix $(CLIENTS)/node; fi
	@touch $@
