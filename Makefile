# `make demo` and `make test` do all their set-up themselves; both can be run again at any time.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test test-all lint format test-gpu docs notebooks bench results fuzz soak mutants clean

demo: $(STAMP)
	$(BIN)/attractor demo --out out/demo

# One process per core and one thread per process, since the tensors of the tests are small. Each process
# takes its half of the tests in order, so that the fixtures of a test file are made once.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n auto --dist worksteal

test: lint
	$(PYTEST)

# All tests that need no GPU and are not part of `make test`: slow cases, the remaining kernels in Triton's
# interpreter, the documentation build, and the fuzz targets with more inputs.
test-all: $(STAMP) $(VENV)/.store
	$(PYTEST) -m "slow and not gpu"

$(VENV)/.store: $(STAMP)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[store]'
	touch $@

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

test-gpu: $(STAMP)
	$(BIN)/python -m pytest -q -m gpu

# The pages, into out/docs/index.html; a warning is an error. The pictures are made by docs/pictures.py.
docs: $(STAMP)
	$(BIN)/python -m sphinx -n -W --keep-going -q docs out/docs

# Jupyter notebooks of the examples.
notebooks: $(STAMP)
	$(BIN)/python docs/notebooks.py out/notebooks

# Every public function with 10,000 inputs (300 where a call takes more than 5 ms): hours. What is done
# is kept in benchmarks/results/fuzz.json; ONLY=pdes tries those with that in their name.
fuzz: $(STAMP)
	$(BIN)/python -m benchmarks.fuzz $(if $(ONLY),--only $(ONLY))

# Small random faults put into src/ one at a time: how many do the tests of `make test` notice?
mutants: $(STAMP)
	$(BIN)/python -m benchmarks.mutants

# 10,000 calls of each hot function, then mixed work: memory, open files and threads must stay.
MINUTES ?= 60
soak: $(STAMP)
	$(BIN)/python -m benchmarks.soak --minutes $(MINUTES)

# Peers for the benchmarks (jax and diffrax are large, so they are not part of `make test`).
$(VENV)/.bench: $(STAMP)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[bench]'
	touch $@

bench: $(VENV)/.bench
	$(BIN)/python -m benchmarks.stepping

results: $(VENV)/.bench $(VENV)/.store
	$(BIN)/python -m benchmarks.order
	$(BIN)/python -m benchmarks.detest
	$(BIN)/python -m benchmarks.energy
	$(BIN)/python -m benchmarks.stiffness
	$(BIN)/python -m benchmarks.stiff
	$(BIN)/python -m benchmarks.hybrid
	$(BIN)/python -m benchmarks.untuned
	$(BIN)/python -m benchmarks.theory
	$(BIN)/python -m benchmarks.interrupted
	$(BIN)/python -m benchmarks.saves
	$(BIN)/python -m benchmarks.damage
	$(BIN)/python -m benchmarks.malformations
	$(BIN)/python -m benchmarks.scale
	$(BIN)/python -m benchmarks.cluster
	$(BIN)/python -m benchmarks.workers
	$(BIN)/python -m benchmarks.elastic_cluster
	$(BIN)/python -m benchmarks.compare
	$(BIN)/python -m benchmarks.stepping
	$(BIN)/python -m benchmarks.attention
	$(BIN)/python -m benchmarks.probing
	$(BIN)/python -m benchmarks.pages

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "attractor needs Python 3.11 or later; set PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,report,docs]'
	touch $@

clean:
	rm -rf $(VENV) out .pytest_cache .ruff_cache .mypy_cache .hypothesis
