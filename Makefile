# Each target works from a bare clone: it makes its own virtual environment in .venv and installs what it needs.
TORCH ?= torch==2.13.0
PYTHON ?= python3
CONSTRAINTS ?=
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready
PIP := $(BIN)/python -m pip install -q $(if $(CONSTRAINTS),-c $(CONSTRAINTS))
# One process per core; tests of one file stay together, so that what a file records is recorded once. Files begin in the
# order in which they were collected: tests/conftest.py puts the longest first.
PYTEST := $(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder
# The CUDA build of torch (three equal signs: PyPI's own build) has an environment for each version, of about 5 GB.
CUDA_TORCH ?= 2.13.0
CUDA_VENV := .venv-cuda-$(CUDA_TORCH)
CUDA_READY := $(CUDA_VENV)/ready
CUDA_PYTEST = $(CUDA_VENV)/bin/python -m pytest -m cuda -p tests.cuda.table
NULLCUDA := $(CUDA_VENV)/nullcuda
# Random programs for each setting of the CUDA allocator.
CUDA_FUZZ_SEEDS ?= 20
export CUDA_FUZZ_SEEDS
EXPORT_TOOLS := out/export-tools

.PHONY: demo integrations test test-all test-compat test-exports test-cuda test-cuda-null cuda-env lint mypy docs docs-serve dist check-dist bench clean

$(READY): setup.cfg pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(PIP) $(TORCH)
	$(PIP) -e ".[dev]"
	touch $@

# The frameworks whose integrations are tested; without them these tests are skipped. torch stays as it is.
integrations: $(READY)
	$(PIP) -e ".[integrations]"

demo: $(READY)
	mkdir -p out
	$(BIN)/python examples/gpt.py --steps 20 --record out/gpt.memtrace
	$(BIN)/memtrace summary out/gpt.memtrace
	$(BIN)/memtrace report out/gpt.memtrace -o out/report.html

test: $(READY)
	$(PYTEST) -m "not slow"

test-all: $(READY)
	$(PYTEST)

# The wheel with each supported version of Python and torch that this machine has, each in an empty environment; the table
# of results is printed at the end. Variables: tests/compatibility/__main__.py.
test-compat: dist
	$(BIN)/python -m tests.compatibility

# Exports in the programs that open them, as far as these can be downloaded: CONTRIBUTING.md.
test-exports: $(READY)
	bash tests/exporters/get_tools.sh $(BIN)/python $(EXPORT_TOOLS)
	MEMTRACE_EXPORT_TOOLS=$(abspath $(EXPORT_TOOLS)) $(BIN)/python -m pytest tests/exporters

$(CUDA_READY): setup.cfg pyproject.toml
	$(PYTHON) -m venv $(CUDA_VENV)
	$(CUDA_VENV)/bin/python -m pip install -q "torch===$(CUDA_TORCH)"
	$(CUDA_VENV)/bin/python -m pip install -q -e ".[test]"
	touch $@

cuda-env: $(CUDA_READY)

# The tests of CUDA on a GPU, one process: they fill its memory.
test-cuda: $(CUDA_READY)
	$(CUDA_PYTEST)

# The same without a GPU, on a device that computes nothing: tests/nullcuda/README.md.
test-cuda-null: $(NULLCUDA)/built
	NULLCUDA_LIB=$(NULLCUDA) bash tests/nullcuda/nullcuda $(CUDA_PYTEST) -n auto

$(NULLCUDA)/built: $(CUDA_READY) $(wildcard tests/nullcuda/*.cpp tests/nullcuda/*.h tests/nullcuda/build.sh)
	bash tests/nullcuda/build.sh $(CUDA_VENV)/bin/python $(NULLCUDA)
	touch $@

lint: $(READY) mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# mypy does not follow the mapping of cli/ and dashboards/ in an editable install: it gets a plain one.
mypy: $(READY)
	rm -rf build
	$(BIN)/python -m pip install -q --no-deps --target build/typecheck .
	MYPYPATH=build/typecheck $(BIN)/mypy -p memtrace

docs: $(READY)
	$(BIN)/python docs/generate.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

docs-serve: $(READY)
	$(BIN)/mkdocs serve

dist: $(READY)
	rm -rf dist
	$(BIN)/python -m build --quiet --outdir dist .

# The demo with nothing but the wheel, then with nothing but the sdist, each in an empty environment away from here.
check-dist: dist
	PYTHON=$(PYTHON) TORCH="$(TORCH)" bash tests/check_dist.sh

bench: $(READY)
	$(BIN)/python benchmarks/overhead.py
	$(BIN)/python benchmarks/footprint.py
	$(BIN)/python benchmarks/analysis.py
	$(BIN)/python benchmarks/readers.py
	$(BIN)/python benchmarks/allocator.py
	$(BIN)/python benchmarks/pipeline.py
	$(BIN)/python benchmarks/pipeline_measured.py

clean:
	rm -rf $(VENV) .venv-cuda-* build dist out site
