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
# Every Ray worker imports the package: let the first one keep its bytecode.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup demo test browser check audit bench ui fuzz chaos clean

setup: $(DONE)

$(DONE): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,slides]'
	@touch $@

demo: setup
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/deco-ray demo

# Two files at a time: a third gains nothing on two cores, which are busy with what the processes of Ray import.
test: setup browser
	$(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder

# Pages are tested in a real browser; a machine without one, and without a way to get one, skips those tests.
browser:
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null || command -v google-chrome >/dev/null || \
	  { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && apt-get update -qq && \
	    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq chromium >/dev/null; } || \
	  echo "no Chromium here: the browser tests will be skipped"

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	@$(MAKE) --no-print-directory audit

# Known vulnerabilities of the pinned versions; skipped where the advisory data cannot be reached.
audit: setup
	@found=$$(timeout 60 $(BIN)/pip-audit --progress-spinner off --timeout 5 -r constraints.txt --no-deps --disable-pip 2>&1); \
	code=$$?; \
	if echo "$$found" | grep -q "^Found"; then echo "$$found"; exit 1; \
	elif [ $$code -ne 0 ] || echo "$$found" | grep -q "could not be audited"; then echo "pip-audit: skipped, its advisory data cannot be reached from here"; \
	else echo "pip-audit: no known vulnerabilities"; fi

bench: setup
	@for script in benchmarks/*.py; do echo "== $$script"; $(BIN)/python $$script $(BENCH_FLAGS) || exit 1; done

ui: setup
	$(BIN)/deco-ray ui

# The bounded fuzz tests of `make test` with many more cases; in memory where there is such a folder: files are tiny.
fuzz: setup
	DECO_RAY_FUZZ_EXAMPLES=50000 $(BIN)/pytest -vv -n 2 tests/unit/test_fuzz_readers.py tests/unit/test_fuzz_texts.py \
	  --timeout 36000 $(if $(wildcard /dev/shm),--basetemp /dev/shm/deco-ray-fuzz)

# Random fault schedules against whole pipelines; every result must equal the calm run's bit for bit.
chaos: setup
	$(BIN)/python tests/faults/chaos.py
	$(BIN)/python tests/faults/sweep.py
	$(BIN)/python tests/faults/soak.py

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
