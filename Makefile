# Every target sets up .venv by itself. `make help` lists them.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: help setup docs web pictures demo demo-sim test test-browser test-gallery test-long lint bench bench-runtime bench-cluster bench-platform bench-ray soak mutants clean
.DEFAULT_GOAL := help

# Tests and benchmarks start thousands of processes: each module is compiled once, not in each of them.
export PYTHONDONTWRITEBYTECODE :=

help:  ## What can be made
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

# torch first and pinned: with it installed, nothing else can pull a build with CUDA packages in.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[all,dev]'
	@touch $@

setup: $(STAMP)  ## Make .venv with everything in it

demo: $(STAMP)  ## The platform on 4 CPU slots: jobs that swell and ebb, promises made and kept
	$(BIN)/swell demo

demo-sim: $(STAMP)  ## Every kind of scheduler side by side on a generated workload
	$(BIN)/python scripts/demo_sim.py

test: $(STAMP)  ## The whole test suite
	$(BIN)/python -m pytest -n 4 --dist worksteal

test-browser: $(STAMP)  ## The tests that need Chromium or Prometheus (skipped, saying so, where there is none)
	$(BIN)/python -m pytest tests/dashboard tests/api/test_grafana.py

test-gallery: $(STAMP)  ## What --auto must run as plain Python does: a third of the gallery, and wider forms of some tests
	$(BIN)/python -m pytest -n 4 -m gallery tests/train

test-long: $(STAMP)  ## Wider forms of some tests: the same on every engine (30 minutes)
	$(BIN)/python -m pytest -m long

lint: $(STAMP)  ## Style, types, the import contract, plain words
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python scripts/words.py --ratchet

bench: $(STAMP)  ## Fidelity, speed and decision-time benchmarks (needs ../shared/data)
	$(BIN)/python -m benchmarks.all

bench-runtime: $(STAMP)  ## The elastic runtime: pauses, deaths, overhead, bit-identity; a verdict for each (25 minutes)
	$(BIN)/python -m benchmarks.runtime

bench-cluster: $(STAMP)  ## Services, teams, sweeps, rented nodes, GPU types: a verdict for each (25 minutes, needs ../shared/data)
	$(BIN)/python -m benchmarks.cluster

bench-platform: $(STAMP)  ## Crashes and fail-overs of the control plane, and promises kept, with real jobs (20 minutes)
	$(BIN)/python -m benchmarks.platform.crash
	$(BIN)/python -m benchmarks.platform.failover
	$(BIN)/python -m benchmarks.platform.quotes
	$(BIN)/python -m benchmarks.platform.start

bench-ray: $(STAMP)  ## Growth on a Ray cluster of four nodes on this machine, with and without spares; failures; 100 kills (45 minutes)
	$(BIN)/python -m benchmarks.ray.growth
	$(BIN)/python -m benchmarks.ray.failures
	$(BIN)/python -m benchmarks.ray.head_away
	$(BIN)/python -m benchmarks.ray.kills

soak: $(STAMP)  ## Ten minutes of kills, full disks, hostile jobs and strangers: nothing lost, doubled or left (MINUTES=2 for CI)
	$(BIN)/python -m benchmarks.soak --minutes $(or $(MINUTES),10)

mutants: $(STAMP)  ## 300 small changes to the pure machines: do the tests notice? (20 minutes)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt cosmic-ray
	$(BIN)/python scripts/mutants.py

docs: $(STAMP)  ## The documentation as a site in build/site, with search; dead links are errors
	$(BIN)/python scripts/docs.py

web:  ## Check and build the dashboard from web/ into src/swell/web (needs Node.js)
	cd web && npm ci --no-audit --no-fund && npm run check && npm run build

pictures: $(STAMP)  ## Pictures of the dashboard for docs/ (needs Chromium; 4 minutes)
	$(BIN)/python -m benchmarks.dashboard.screenshots docs/pictures
	$(BIN)/python scripts/demo_picture.py

clean:  ## Remove .venv and caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
