# make demo, make test, make test-all, make lint: each makes its own virtual environment first; python3 >= 3.11 with venv
# is enough. `make test` leaves out the tests marked `slow`; TESTS="tests/unit/test_space.py -x" selects files and options.
#
#   make demo EXTRAS=cuda13                                            the demo on an NVIDIA GPU
#   make test-all PYTHON=python3.12 JAX=0.11.2 VENV=.venv-3.12-0.11.2  another end of the supported range

PYTHON ?= python3
VENV ?= .venv
EXTRAS ?=
TESTS ?=
# The newest JAX that this Python can have; constraints/ says what else fits it.
JAX ?= $(shell $(PYTHON) -c 'import sys; print("0.10.2" if sys.version_info < (3, 12) else "0.12.0.1")')

ifeq ($(findstring cuda,$(EXTRAS)),)
DEMO ?= m=256 n=256 k=256 dtype=float32
DEMO_BUDGET ?= 16
# Tests run beside each other; on a GPU they would share its memory and disturb each other's times.
PYTEST_ARGS ?= --numprocesses=auto --dist=worksteal
# What they compile runs for milliseconds.
test test-all: export XLA_FLAGS := --xla_backend_optimization_level=0 $(XLA_FLAGS)
else
DEMO ?= m=4096 n=4096 k=4096 dtype=bfloat16
DEMO_BUDGET ?= 64
PYTEST_ARGS ?=
endif

comma := ,
BIN := $(VENV)/bin
CONSTRAINTS := constraints/jax-$(JAX).txt
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
install = $(PIP) install -c $(CONSTRAINTS) --no-build-isolation -e ".$(if $(1),[$(1)])"
stamp = $(VENV)/.installed-$(JAX)$(if $(EXTRAS),-$(subst $(comma),-,$(EXTRAS)))

.PHONY: demo test test-all lint check-contrib check-records clean

demo: export TILE_SCHEDULER_CACHE = $(VENV)/demo/cache.db
demo: $(stamp)
	rm -rf $(VENV)/demo
	@echo "== an empty cache: search the tile sizes of a Pallas matmul, check and time them, store the best"
	$(BIN)/tile-scheduler tune matmul $(DEMO) --budget $(DEMO_BUDGET)
	@echo "== tuned_matmul(a, b) finds it"
	$(BIN)/python examples/demo.py $(DEMO)
	@echo "== and so does a second search"
	$(BIN)/tile-scheduler tune matmul $(DEMO) --budget $(DEMO_BUDGET)

# TESTS: files or folders, and what selects among their tests; all by default.
test: $(stamp)-test
	$(BIN)/python -m pytest -m "not slow" $(TESTS) $(PYTEST_ARGS)

test-all: $(stamp)-test
	$(BIN)/python -m pytest $(TESTS) $(PYTEST_ARGS)

lint: $(stamp)-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# The documents as pages in build/site: a link that leads nowhere, or a cell of the notebook that fails, is an error.
.PHONY: site
site: export TILE_SCHEDULER_CACHE = $(abspath $(VENV))/site/cache.db
site: export JAX_PLATFORMS = cpu
site: export NO_MKDOCS_2_WARNING = 1
site: export XLA_FLAGS := --xla_backend_optimization_level=0 $(XLA_FLAGS)
site: $(stamp)-site
	rm -rf $(VENV)/site
	$(BIN)/python -m mkdocs build --strict --quiet

# All tests of the shelf (docs/use/contrib.md). Once they pass, few of them run until its sources change.
check-contrib:
	rm -f tests/contrib/checked.sha256
	$(MAKE) test-all EXTRAS=tpu TESTS=tests/contrib
	$(BIN)/python tests/contrib/conftest.py >tests/contrib/checked.sha256

# Records of this JAX, which kernels may need: PYTHON=python3.12 JAX=0.11.2 VENV=.venv-3.12-0.11.2
check-records: $(stamp)
	$(BIN)/tile-scheduler check-records records

.PHONY: package newer-jax findings

# The sdist and the wheel in dist/. The tree makes the same wheel as the sdist. In an environment with the wheel alone, and
# in an empty directory, README.md's program runs.
package: $(stamp)-dev
	rm -rf dist build/wheel $(VENV)/package
	$(BIN)/python -m build --no-isolation
	$(BIN)/python -m build --no-isolation --wheel --outdir build/wheel
	cmp dist/*.whl build/wheel/*.whl
	$(BIN)/twine check --strict dist/*
	$(PYTHON) -m venv $(VENV)/package
	$(VENV)/package/bin/python -m pip --disable-pip-version-check --quiet install -c $(CONSTRAINTS) dist/*.whl
	mkdir $(VENV)/package/empty
	cd $(VENV)/package/empty && ../bin/python -P $(CURDIR)/tests/installed_wheel.py $(CURDIR)/README.md

# A JAX newer than JAX, if the index has one, without constraints.
newer-jax:
	@if $(PYTHON) -m pip --quiet install --dry-run --ignore-installed --no-deps 'jax>$(JAX)' 2>/dev/null; then \
		$(MAKE) $(BIN)/python && \
		$(PIP) install hatchling editables && \
		$(PIP) install --upgrade --no-build-isolation -e . 'jax>$(JAX)' hypothesis pytest pytest-timeout && \
		$(BIN)/tile-scheduler --version && \
		$(BIN)/python -m pytest -m "not slow" tests/versions; \
	else echo "The index has no JAX newer than $(JAX) for this Python."; fi

# Whether other libraries still behave as findings/ says: each program installs its library, for Python 3.12 unless PYTHON
# is given.
findings:
	@failed=0; for program in findings/*.sh; do \
		if said=$$(bash $$program 2>&1); then echo "as described: $$program"; \
		else failed=1; echo "changed:      $$program"; echo "$$said" | tail -5; fi; \
	done; exit $$failed

clean:
	rm -rf $(VENV) build dist

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "$(PYTHON) is too old: Python 3.11 or newer is needed; name one with PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(stamp): pyproject.toml constraints/common.txt $(CONSTRAINTS) | $(BIN)/python
	$(PIP) install -c $(CONSTRAINTS) hatchling editables
	$(call install,$(EXTRAS))
	touch $@

$(stamp)-test: $(stamp)
	$(call install,$(if $(EXTRAS),$(EXTRAS)$(comma))test)
	touch $@

$(stamp)-site: $(stamp)
	$(call install,$(if $(EXTRAS),$(EXTRAS)$(comma))site)
	touch $@

$(stamp)-dev: $(stamp)
	$(call install,$(if $(EXTRAS),$(EXTRAS)$(comma))dev)
	touch $@
