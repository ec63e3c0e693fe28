# make env    the virtual environment .venv, and nothing else
# make demo   real photographs to a training run: pack, verify, train, pictures (minutes on 2 cores)
# make test   lint, types and tests
# make torture  faults of every kind, half an hour; JOBS=2 families at a time, SEED=1, MINUTES=600 for rounds with other
#               seeds; writes docs/faults.md
# make bench  every case and every peer with small data, into build/bench (minutes)
# make bench-full  the published figures, into docs/benchmarks: some 12 GiB of disk under build/, an hour, a quiet machine

PYTHON ?= python3
BIN := .venv/bin
MADE := .venv/.made
SEED ?= 1
MINUTES ?= 0
JOBS ?= 2
export HF_HUB_OFFLINE ?= 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: env demo test lint types unit torture bench bench-full clean

env: $(MADE)

$(MADE): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "bucketline needs Python 3.11 or newer; name one: make PYTHON=python3.12 …")'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet -c constraints.txt torch
	$(BIN)/pip install --quiet -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(MADE)
	BIN=$(BIN) demo/run build/demo

test: lint types unit

lint: $(MADE)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# The installed package is what is checked: a wheel's contents, not the source tree.
types: $(MADE)
	rm -rf build/typed build/lib
	$(BIN)/pip install --quiet --no-deps --no-build-isolation --target build/typed .
	MYPYPATH=build/typed $(BIN)/mypy -p bucketline
	MYPYPATH=build/typed $(BIN)/mypy tests demo examples

# In as many processes as there are cores, up to four: half the time on two.
unit: $(MADE)
	$(BIN)/pytest -n auto --maxprocesses 4 --dist worksteal

# A C compiler and a fuzzer, where the machine lacks them; a fault that cannot be tried without them says so in the table.
torture: $(MADE)
	-$(BIN)/pip install --quiet -c constraints.txt -e '.[torture]'
	$(BIN)/python -m tests.fault.torture --seed $(SEED) --minutes $(MINUTES) --jobs $(JOBS)

bench: $(MADE)
	$(BIN)/python -m bucketline.bench --publish build/bench

bench-full: $(MADE)
	$(BIN)/python -m bucketline.bench --full --stores build/bench-stores --publish docs/benchmarks
	rm -rf build/bench-stores

clean:
	rm -rf .venv build *.egg-info
