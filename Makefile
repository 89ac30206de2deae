# Everything on a machine with Python 3.11 and make; `make PYTHON=python3.12 test` for another interpreter.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install -c constraints.txt
# pip compiles only the files that it copies into the environment. This compiles the product's own files, which stay in the
# clone, so that the first demo or test need not.
COMPILE = $(BIN)/python -m compileall -q client common consilium server

# Number of tests that run at once. Slow tests use two processes more, because daemons mostly wait for one another. Slow tests of
# one file run in one process, because they share a federation, a browser or networks that take long to train. Slow tests
# run at low priority: the dashboard's background work has the lowest, and would otherwise wait minutes for a processor.
JOBS ?= 2
SLOW_JOBS ?= 4
TESTS ?= tests

# Stamps live inside the environment, so deleting it deletes them. The dev stamp implies the other.
RUNTIME := $(VENV)/.installed
DEV := $(VENV)/.installed-dev

.DEFAULT_GOAL := help
.PHONY: help venv demo bench test test-research test-slow test-gpu test-large test-sensitivity test-audit test-fuzz test-faults test-experiment test-docker test-hospital test-parties check docs docker-image docker-demo docker-down bundle clean

help:  ## print what each target does
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

demo: $(RUNTIME)  ## run a federation of real daemons on phantoms; writes demo-out/report.html
	$(BIN)/consilium demo --out demo-out

test: $(DEV)  ## the fast tests of the product (TESTS="tests research/tests": with those of research, collected once)
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "not slow and not docker and not faults and not hospital and not gpu" $(TESTS)

test-research: $(DEV)  ## the fast tests of research/
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "not slow and not gpu" research/tests

test-slow: $(DEV)  ## the slow tests: federations of real daemons, long statistics
	nice -n 15 $(BIN)/python -m pytest -n $(SLOW_JOBS) --dist loadfile --no-loadscope-reorder -m "slow and not docker and not faults and not hospital and not gpu"

test-large: $(DEV)  ## measure the peak memory of each process on BraTS-sized volumes, from teacher to student; minutes
	$(BIN)/python -m benchmarks.large_volumes --out large-out

test-gpu: $(DEV)  ## the tests that need a GPU: speed compared with MONAI's inferer, mixed precision
	$(BIN)/python -m pytest -m gpu -s

check: $(DEV)  ## format, lint, types, fast tests
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(MAKE) test TESTS="tests research/tests"

bench: $(DEV)  ## measure speed and size of each part (PARTS="core ledger"), and compare with the records; docs/lab/performance.md
	$(BIN)/python -m benchmarks.run $(PARTS)

test-sensitivity: $(DEV)  ## measure how much one patient changes each message, for every exchange and configuration; ten minutes
	CONSILIUM_SENSITIVITY=all $(BIN)/python -m pytest tests/sensitivity

test-audit: $(DEV)  ## audit each broken variant of the code and the correct code twenty times; half an hour
	CONSILIUM_AUDITS=20 $(BIN)/python -m pytest -m slow tests/consilium/audit tests/common/privacy/test_noise_audit.py

test-fuzz: $(DEV)  ## fuzz worker and core with 20,000 messages of each kind, the readers with 20,000 damaged images, each parser for ten minutes; half an hour
	CONSILIUM_FUZZ=20000 $(BIN)/python -m pytest tests/attacks/test_schema_fuzz.py tests/common/data/test_mutations.py
	CONSILIUM_FUZZ_SECONDS=600 $(BIN)/python -m pytest tests/attacks/test_parser_fuzz.py

test-faults: $(DEV)  ## kill, disconnect and starve real daemons; needs root, and gcore for one test; an hour
	$(BIN)/python -m pytest -m faults tests/faults/deployment

test-experiment: $(DEV)  ## run the papers' experiment as its page prints it, every strategy and codec and two studies of one ledger over real daemons, all fits of the ball encoder; minutes
	$(BIN)/python -m pytest -m "faults or slow" tests/e2e/test_paper_experiment.py tests/e2e/test_papers_studies.py tests/e2e/test_second_study.py tests/common/codecs/test_ball_autoencoder.py

test-docker: $(DEV)  ## run the federation in containers, from nothing to a student; starts a container engine if none runs
	docker/engine.sh run $(BIN)/python -m pytest -m docker tests/docker

test-hospital: $(DEV)  ## test with systems of hospitals: rsyslog, journald, Slurm, Podman, squid; needs them and root; docs/hospital-systems.md; minutes
	$(BIN)/python -m pytest -m hospital tests/hospital

test-parties: $(DEV)  ## test the offline bundle on two machines and the systemd units; needs root
	docker/engine.sh run $(BIN)/python -m pytest -m docker tests/parties

docs: $(DEV)  ## build the documents as a site in build/docs, readable without a network; fails at a broken link
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build

docker-image:  ## build the container images
	docker/image.sh

docker-demo: docker-image  ## run a study of a server and three sites in containers; results in docker-out/
	docker/demo.sh up

docker-down:  ## remove the containers, networks and volumes of docker-demo
	docker/demo.sh down

bundle: docker-image  ## pack images, compose files, units, documents and checksums for machines without internet
	docker/bundle.sh

clean:  ## remove the environment, caches and the demo's output
	rm -rf $(VENV) demo-out large-out build dist consilium.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
