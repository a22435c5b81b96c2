# Every target sets itself up from a bare machine with Python 3.11.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
DONE := $(VENV)/.setup-done

# Ray: token authentication on, so that `ray start`, `ray job submit` and local runs agree; no usage reports.
export RAY_AUTH_MODE ?= token
export RAY_USAGE_STATS_ENABLED ?= 0
export RAY_DATA_DISABLE_PROGRESS_BARS ?= 1
export MLFLOW_DISABLE_TELEMETRY ?= true

.PHONY: setup demo test check bench ui fuzz chaos clean

setup: $(DONE)

$(DONE): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,slides]'
	@touch $@

demo: setup
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/deco-ray demo

test: setup
	$(BIN)/pytest tests

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: setup
	@for script in benchmarks/*.py; do echo "== $$script"; $(BIN)/python $$script $(BENCH_FLAGS) || exit 1; done

ui: setup
	$(BIN)/deco-ray ui

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
