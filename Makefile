# Everything runs in .venv, which is made on first use from constraints.txt.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SOURCES := conftest.py src tests benchmarks examples fuzz papers tools

# Every install, build tools included, takes the tested versions.
export PIP_CONSTRAINT := $(CURDIR)/constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Tests start hundreds of processes: without bytecode, each compiles every module anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: run test soak quick check compiled format docs clean lab apps flower training runs sessions library rest

run: $(VENV)/.ready-run  ## train auto, gd and laq on digits and compare what they cost
	$(BIN)/aqg run

# One thread each, for they run side by side. A part is a process that loads and collects its own
# files alone. The last one has whatever is in no other; deployments, the first, wait for processes.
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q
lab := tests/lab
apps := tests/flower/test_apps.py tests/flower/test_models.py tests/flower/test_strategy.py
flower := $(filter-out $(apps),$(wildcard tests/flower/test_*.py))
sessions := tests/protocol tests/channel tests/examples
training := tests/sim tests/objectives tests/contrib
runs := tests/cli tests/runs tests/studies tests/report
library := tests/core tests/wire tests/data
PARTS := lab apps flower training runs sessions library

test: $(VENV)/.ready-test  ## what a push needs, within five minutes: format, lint, types, tests
	$(MAKE) --no-print-directory --jobs=3 --keep-going --output-sync=target check $(PARTS) rest

$(PARTS): compiled
	$(PYTEST) -m "not soak" $($@)

rest: compiled
	$(PYTEST) -m "not soak" $(addprefix --ignore=,$(foreach part,$(PARTS),$($(part))))

soak: $(VENV)/.ready-test compiled  ## the rest, within half an hour: faults, installs, many examples
	$(PYTEST) --numprocesses=3 --dist=worksteal -m "soak or hypothesis" --hypothesis-profile=soak

# What most changes break first: the algorithm, the frames, both simulators, and their examples.
QUICK := tests/core tests/wire tests/sim/test_record.py tests/sim/test_engine.py \
	tests/objectives/test_closed_form.py tests/runs/test_config.py tests/runs/test_directory.py \
	tests/test_public_names.py src/aqg/core src/aqg/wire src/aqg/runs \
	--ignore=tests/wire/test_hostile.py

quick: check  ## an answer within about a minute: format, lint, types and the tests of the core
	$(PYTEST) --numprocesses=2 --dist=worksteal -m "not soak" $(QUICK)

check: $(VENV)/.ready-test
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/mypy

compiled: $(VENV)/.ready-test  # else each of the processes that run tests would compile the same
	$(BIN)/python -c 'from aqg.warmup import warm_up; warm_up()'

format: $(VENV)/.ready-test  ## rewrite the sources in the project's format
	$(BIN)/ruff format $(SOURCES)
	$(BIN)/ruff check --fix $(SOURCES)

docs: $(VENV)/.ready-test  ## build the pages in docs/ into site/, offline; broken links are errors
	$(BIN)/python tools/reference.py
	$(BIN)/python tools/site.py
	@echo "Open site/index.html; for the search: $(BIN)/python -m http.server -d site"

clean:
	rm -rf site $(VENV) .mypy_cache .pytest_cache .ruff_cache

$(BIN)/python:
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(None if v >= (3, 11) else f"aqg needs Python 3.11 or newer, and $(PYTHON) is {v.major}.{v.minor}; try make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.ready-run: $(BIN)/python pyproject.toml constraints.txt
	$(BIN)/pip install --quiet --editable '.[sim]'
	touch $@

# CI looks at reports in a browser; elsewhere that test is skipped where there is none.
$(VENV)/.ready-test: $(BIN)/python pyproject.toml constraints.txt
	$(BIN)/pip install --quiet --editable '.[all,dev,docs]'
	@if [ -n "$$CI" ] && ! command -v chromium > /dev/null && command -v apt-get > /dev/null; then \
		apt-get update -qq && apt-get install -y -qq chromium > /dev/null || true; fi
	touch $@ $(VENV)/.ready-run
