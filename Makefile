# The two commands of the README are `make serve` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
MODEL ?= smollm2-135m-instruct
ARGS ?=
ROOMS := gateway kernels scheduler_svc shared tokenizer_svc worker_svc
# A CUDA build of PyTorch brings the Triton it needs. With a CPU build, this one interprets kernels.
TRITON := triton==3.6.0
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check \
	--constraint constraints.txt

.PHONY: serve test compose chaos fuzz lint docs format clean

serve: $(VENV)/serve.installed
	@$(BIN)/pagemesh serve $(MODEL) $(ARGS)

# Two processes: many tests wait, and those that compute leave a core now and then.
test: $(VENV)/dev.installed
	$(BIN)/python -m pytest -n 2 --dist loadfile $(ARGS)

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
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache

# A system without ensurepip (Debian's python3 without python3-venv) lends its own pip.
$(BIN)/python:
	@echo "creating $(VENV)"
	@$(PYTHON) -m venv $(VENV) >/dev/null 2>&1 || { \
		$(PYTHON) -m venv --clear --without-pip $(VENV) && \
		$(PYTHON) -m pip --python $(BIN)/python install --quiet pip; }

$(VENV)/serve.installed: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing pagemesh and what it needs into $(VENV) (the first time takes minutes)"
	@$(PIP_INSTALL) --editable '.[all]'
	@touch $@

$(VENV)/dev.installed: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing pagemesh, what it needs and the tools into $(VENV)"
	@$(PIP_INSTALL) --editable '.[dev]'
	@$(BIN)/python -c 'import triton' 2>/dev/null || $(PIP_INSTALL) '$(TRITON)'
	@touch $@ $(VENV)/serve.installed
