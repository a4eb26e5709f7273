# Each target is enough on a bare clone: it makes its own virtual environment and installs what it needs.
TORCH ?= torch==2.13.0
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready

.PHONY: demo test lint bench clean

$(READY): setup.cfg pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q "$(TORCH)"
	$(BIN)/python -m pip install -q -e ".[dev]"
	touch $@

demo: $(READY)
	mkdir -p out
	$(BIN)/python examples/gpt.py --steps 20 --record out/gpt.memtrace
	$(BIN)/memtrace summary out/gpt.memtrace
	$(BIN)/memtrace report out/gpt.memtrace -o out/report.html

test: $(READY)
	$(BIN)/python -m pytest

# mypy does not follow the mapping of cli/ and dashboards/ in an editable install: it gets a plain one.
lint: $(READY)
	$(BIN)/ruff check .
	rm -rf build
	$(BIN)/python -m pip install -q --no-deps --target build/typecheck .
	MYPYPATH=build/typecheck $(BIN)/mypy -p memtrace

bench: $(READY)
	$(BIN)/python benchmarks/overhead.py
	$(BIN)/python benchmarks/footprint.py
	$(BIN)/python benchmarks/analysis.py
	$(BIN)/python benchmarks/readers.py
	$(BIN)/python benchmarks/allocator.py
	$(BIN)/python benchmarks/pipeline.py
	$(BIN)/python benchmarks/pipeline_measured.py

clean:
	rm -rf $(VENV) build out
