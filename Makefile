# Everything on a machine with Python 3.11 and make; `make PYTHON=python3.12 test` for another interpreter.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install -c constraints.txt
# pip compiles only the files that it copies into the environment. This compiles the product's own files, which stay in the
# clone, so that the first demo or test need not.
COMPILE = $(BIN)/python -m compileall -q client common consilium server

# How many tests run at once. Of the slow ones two more, since daemons mostly wait for one another; a file of those stays
# with one process, for its tests share a federation, a browser or networks that take long to train. Their priority is low,
# for what the dashboard makes at the lowest of all would wait for the others' processor for minutes.
JOBS ?= 2
SLOW_JOBS ?= 4
TESTS ?= tests

# Stamps live inside the environment, so deleting it deletes them. The dev stamp implies the other.
RUNTIME := $(VENV)/.installed
DEV := $(VENV)/.installed-dev

.DEFAULT_GOAL := help
.PHONY: help venv demo bench test test-research test-slow test-gpu test-large test-sensitivity test-audit test-fuzz test-faults test-experiment test-docker test-hospital test-parties check docs docker-image docker-demo docker-down bundle clean

help:  ## say what each target does
	@sed -n 's/^\([a-z-]*\):.*## /\1	/p' Makefile

$(RUNTIME): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) -e .
	$(COMPILE)
	@touch $@

$(DEV): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) -e '.[dev]'
	$(COMPILE)
	@touch $(RUNTIME) $@

venv: $(DEV)  ## make .venv with everything a developer needs

demo: $(RUNTIME)  ## hospitals, real daemons, a student and demo-out/report.html
	$(BIN)/consilium demo --out demo-out

test: $(DEV)  ## the fast tests of the product (TESTS="tests research/tests": with those of research, collected once)
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "not slow and not docker and not faults and not hospital and not gpu" $(TESTS)

test-research: $(DEV)  ## the fast tests of research/
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "not slow and not gpu" research/tests

test-slow: $(DEV)  ## the slow ones: federations of real daemons, long statistics
	nice -n 15 $(BIN)/python -m pytest -n $(SLOW_JOBS) --dist loadfile --no-loadscope-reorder -m "slow and not docker and not faults and not hospital and not gpu"

test-large: $(DEV)  ## BraTS-sized volumes from teacher to student: peak memory of each process, in minutes
	$(BIN)/python -m benchmarks.large_volumes --out large-out

test-gpu: $(DEV)  ## what only a GPU can show: speed beside MONAI's inferer, mixed precision
	$(BIN)/python -m pytest -m gpu -s

check: $(DEV)  ## format, lint, types, fast tests
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(MAKE) test TESTS="tests research/tests"

bench: $(DEV)  ## speed and size by part (PARTS="core ledger"), held against what is recorded; docs/lab/performance.md
	$(BIN)/python -m benchmarks.run $(PARTS)

test-sensitivity: $(DEV)  ## one patient's reach from file to sum, every exchange in every configuration; ten minutes
	CONSILIUM_SENSITIVITY=all $(BIN)/python -m pytest tests/sensitivity

test-audit: $(DEV)  ## twenty audits of each broken production and of what is not broken; half an hour
	CONSILIUM_AUDITS=20 $(BIN)/python -m pytest -m slow tests/consilium/audit tests/common/privacy/test_noise_audit.py

test-fuzz: $(DEV)  ## 20,000 messages of every kind at worker and core, 20,000 damaged images, ten minutes of files at every parser; half an hour
	CONSILIUM_FUZZ=20000 $(BIN)/python -m pytest tests/attacks/test_schema_fuzz.py tests/common/data/test_mutations.py
	CONSILIUM_FUZZ_SECONDS=600 $(BIN)/python -m pytest tests/attacks/test_parser_fuzz.py

test-faults: $(DEV)  ## real daemons killed, cut off and starved; needs root, and gcore for one test; about half an hour
	$(BIN)/python -m pytest -m faults tests/faults/deployment

test-experiment: $(DEV)  ## the papers' experiment as a page types it, and every strategy and codec over real daemons; minutes
	$(BIN)/python -m pytest -m "faults or slow" tests/e2e/test_paper_experiment.py tests/e2e/test_papers_studies.py

test-docker: $(DEV)  ## the federation in containers, from nothing to a student; starts an engine if none answers
	docker/engine.sh run $(BIN)/python -m pytest -m docker tests/docker

test-hospital: $(DEV)  ## with what hospitals run: rsyslog, journald, Slurm, Podman, squid; needs root and these; docs/hospital-systems.md; minutes
	$(BIN)/python -m pytest -m hospital tests/hospital

test-parties: $(DEV)  ## what each party runs alone: the offline bundle on two machines, the systemd units; needs root
	docker/engine.sh run $(BIN)/python -m pytest -m docker tests/parties

docs: $(DEV)  ## the documents as a site in build/docs, readable without a network; a link that leads nowhere fails
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build

docker-image:  ## build the container images
	docker/image.sh

docker-demo: docker-image  ## a server and three sites in containers, a study to its end, results in docker-out/
	docker/demo.sh up

docker-down:  ## remove the containers, networks and volumes of docker-demo
	docker/demo.sh down

bundle: docker-image  ## pack images, compose files, units, documents and checksums for machines without internet
	docker/bundle.sh

clean:  ## remove the environment, caches and the demo's output
	rm -rf $(VENV) demo-out large-out build dist consilium.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
