# Two commands to know: `make demo` and `make test`. Both work on a fresh clone.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# An environment variable, not an option: the isolated build of remat itself obeys it too.
export PIP_CONSTRAINT := $(CURDIR)/constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# No AMX: on some virtual machines PyTorch dies of it (tests/conftest.py says more).
export ONEDNN_MAX_CPU_ISA ?= AVX512_CORE_FP16

# As many workers as there are cores; whoever is done takes tests from the others.
PYTEST := $(BIN)/pytest --numprocesses=auto --dist=worksteal

.PHONY: demo test test-all test-integrations test-lowest test-newest lint types imports tests fuzz bench clean

demo: $(VENV)/.demo                ## differentiate a long simulation in a few percent of the memory
	$(BIN)/remat demo

test: lint types imports tests     ## every feature against an oracle, in five minutes

test-all: lint types imports $(VENV)/.integrations fuzz  ## matrices in full, slow tests, coverage, fuzzers
	$(PYTEST) --all --cov --cov-report=term-missing:skip-covered
	$(BIN)/python -m tests.engines.numpy.fuzz --count $(N) --seed $(or $(SEED),0)
	$(BIN)/python -m tests.source.random_loops numpy $(N) $(or $(SEED),0)
	$(BIN)/python -m tests.source.random_loops torch $(N) $(or $(SEED),0)

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.test
	$(BIN)/mypy

imports: $(VENV)/.test
	$(BIN)/lint-imports

tests: $(VENV)/.test
	$(PYTEST) --ignore=tests/integrations --ignore=tests/distributed

test-integrations: $(VENV)/.integrations  ## several processes; Transformers, Diffusers, PEFT, Accelerate, Lightning
	$(PYTEST) --all tests/integrations tests/distributed

# Both may be given paths: make test-lowest TESTS=tests/engines/numpy
TESTS := tests --ignore=tests/integrations --ignore=tests/distributed --ignore=tests/typing
test-lowest: .venv-lowest/.done    ## the tests with the lowest versions that pyproject.toml admits
	.venv-lowest/bin/pytest --numprocesses=auto --dist=worksteal $(TESTS)

TORCH_TESTS := tests/engines/torch tests/api tests/loops tests/fuzz tests/source
test-newest: .venv-newest/.done    ## the tests of the PyTorch engine with the newest PyTorch
	.venv-newest/bin/pytest --numprocesses=auto --dist=worksteal $(TORCH_TESTS)

N ?= 1000
fuzz: $(VENV)/.test                ## N random programs against plain autograd: make fuzz N=10000 SEED=7
	$(BIN)/python -m tests.fuzz.run --count $(N) $(if $(SEED),--seed $(SEED))

bench: $(VENV)/.bench              ## all figures, written to benchmarks/results/ and docs/benchmarks.md
	$(BIN)/python -m benchmarks

clean:
	rm -rf $(VENV) .venv-lowest .venv-newest .mypy_cache .pytest_cache .ruff_cache .hypothesis .coverage

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: $(BIN)/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet --editable '.[plot]'
	touch $@

$(VENV)/.test: $(BIN)/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet --editable '.[dev,plot,torch]'
	touch $@

.venv-%/.done: pyproject.toml constraints.txt tests/environment.py
	rm -rf $(@D)
	$(PYTHON) -m tests.environment $* $(@D)
	touch $@

$(VENV)/.bench: $(BIN)/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet --editable '.[bench,plot,torch]'
	touch $@

$(VENV)/.integrations: $(VENV)/.test
	$(BIN)/python -m pip install --quiet --editable '.[dev,plot,torch,integrations]'
	touch $@
