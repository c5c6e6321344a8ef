# Two commands for a fresh machine: `make demo` and `make test`. Only python3 (3.11 or newer), pip and make are needed.

PYTHON ?= python3
VENV ?= .venv
PYTEST ?= -n 3
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

REPORTS := .pytest_cache/reports
BIOME := @biomejs/biome@2.3.8

.PHONY: help demo test test-rest test-all test-nightly nightly durations soak simulate learning bench bench-check check format lint types tests docs lock clean

help:
	@echo "make demo    train CartPole on everything real: Redis, S3, Ray, two workers, a trainer, an evaluator"
	@echo "make test    install what the tests need and run the quick part of them, in three processes: some 6 minutes"
	@echo "make test-all  run all tests that gate a change, some 30 minutes; test-rest: those that make test leaves out"
	@echo "make nightly  run what takes longer: test-nightly (benchmarks, learning, long searches), ten minutes of simulation, and soak"
	@echo "make simulate  simulate whole runs with faults in virtual time, from a seed on (SEED=1 SECONDS=60)"
	@echo "make soak    kill parts of a real run at random, and see that nothing is lost (SOAK=\"--minutes 10 --seed 1 …\")"
	@echo "make durations  write tests/durations.json anew from the reports of the last make test, test-rest and test-nightly"
	@echo "make learning  train every task of the table and write docs/learning/ (LEARNING=\"--only cartpole-ppo --seeds 5 …\")"
	@echo "make bench   measure what is fast and what is not, against others too; writes docs/benchmarks/ (BENCH=\"transport --repeats 3\"; all of them take some two hours)"
	@echo "make bench-check  measure again, and compare the ratios with docs/benchmarks/ (BENCH=\"transport\")"
	@echo "make check   format, lint, types, tests"
	@echo "make docs    write docs/reference/config.md anew and build the documentation into site/"
	@echo "make lock    resolve the requirements anew and write requirements.lock, with hashes"
	@echo "make clean   remove the virtual environment and caches (not your runs)"

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Error: $(PYTHON) is older than 3.11; run make PYTHON=python3.11 …"; exit 2; }
	@$(PYTHON) -m venv $(VENV) || { echo "Error: no virtual environment could be made; on Debian: apt-get install python3-venv"; exit 2; }

$(VENV)/.installed: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "installing Stagecoach into $(VENV) (PyTorch and Ray are large; a few minutes the first time) …"
	@$(PIP) torch==2.13.0
	@$(PIP) --editable .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@echo "installing what the tests need …"
	@$(PIP) --editable '.[dev]'
	@touch $@

demo: $(VENV)/.installed
	@$(BIN)/stagecoach train examples/cartpole.yaml

test: $(VENV)/.installed-dev
	@$(BIN)/python -m pytest --part quick --durations 20 --junitxml $(REPORTS)/quick.xml $(PYTEST)

test-rest: $(VENV)/.installed-dev
	@$(BIN)/python -m pytest --part rest --durations 20 --junitxml $(REPORTS)/rest.xml $(PYTEST)

test-nightly: $(VENV)/.installed-dev
	@$(BIN)/python -m pytest --part nightly --durations 20 --junitxml $(REPORTS)/nightly.xml $(PYTEST)

test-all:
	@$(MAKE) --keep-going test test-rest

tests: test

nightly:
	@$(MAKE) --keep-going test-nightly simulate soak SECONDS=600 SEED=$$(date +%s)

durations: $(VENV)/.installed-dev
	@$(BIN)/python -m tests.support.suite.durations

SEED ?= 1
SECONDS ?= 60

simulate: $(VENV)/.installed-dev
	@$(BIN)/python -m tests.simulation.walk --seed $(SEED) --seconds $(SECONDS)

soak: $(VENV)/.installed-dev
	@$(BIN)/python -m tests.chaos.soak $(SOAK)

$(VENV)/.installed-learning: $(VENV)/.installed-dev
	@echo "installing the environments of the learning table …"
	@$(PIP) --editable '.[dev,box2d,mujoco,robotics,minatar]' minigrid
	@$(PIP) --no-deps mpe2
	@touch $@

learning: $(VENV)/.installed-learning
	@$(BIN)/python -m benchmarks.learning $(LEARNING)

bench: $(VENV)/.installed-dev
	@$(BIN)/python -m benchmarks $(BENCH)

bench-check: $(VENV)/.installed-dev
	@$(BIN)/python -m benchmarks check $(BENCH)

check: format lint types test

format: $(VENV)/.installed-dev
	@$(BIN)/ruff format --check .

lint: $(VENV)/.installed-dev
	@$(BIN)/ruff check .
	@$(BIN)/lint-imports --no-cache
	@if command -v npx >/dev/null; then npx --yes $(BIOME) lint --error-on-warnings coordinator/page docs/assets clients/javascript; \
	 else echo "not linted: JavaScript, as npx is missing (Debian: apt-get install nodejs npm)"; fi

types: $(VENV)/.installed-dev
	@$(BIN)/mypy

docs: $(VENV)/.installed-dev
	@$(BIN)/python docs/config_reference.py > docs/reference/config.md
	@$(BIN)/python -m docs.build_site

# All but PyTorch and its CUDA packages, whose wheels differ from machine to machine (docs/operations/security.md).
lock: $(VENV)/.installed
	@$(PIP) uv
	@echo "torch ; python_version < '0'" | $(BIN)/uv pip compile pyproject.toml --override - --extra cluster \
	  --constraint constraints.txt --universal --python-version 3.11 --generate-hashes --no-annotate --quiet --upgrade \
	  --custom-compile-command "make lock" --output-file requirements.lock

clean:
	rm -rf $(VENV) site .site .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis
