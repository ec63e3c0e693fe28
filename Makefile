# make env    the virtual environment .venv, and nothing else
# make demo   217 photographs packed, verified and shown; six of them learned by heart and drawn (three minutes on 2 cores)
# make test   lint, types, unit and property tests, the quick end-to-end tests (five minutes on 2 cores)
#             on the CPU, also where there is a GPU; BUCKETLINE_TEST_GPU=1 lets tests and torture see it
# make gpu    what only a GPU can show: 18 minutes on an H200; CHECKS="resume cli" for some; ACCEPT_DEVICE=cpu tries what needs none
# make test-full  the tests that `make test` leaves out: ranks, benchmarks, faults
# make test-wheel PYTHON=python3.12   the wheel in an environment of its own: every command's help, pack, verify, plan, load, train
# make test-minimums  the same with the oldest libraries that pyproject.toml allows; TORCH=2.11.0 tries another torch
# make test-types  mypy and pyright on examples/, from an editable install and from the wheel; npm downloads pyright
# make lines  the lines of each package, its core and its optional rooms apart; fails on what has outgrown its budget
# make coverage  what the quick tests reach, into build/coverage/index.html
# make lock   resolve requirements.lock again; UPGRADE=--upgrade for newer versions
# make docs   the documentation as a site, in build/site; a broken link is an error
# make torture  faults of every kind, half an hour; JOBS=2 families at a time, SEED=1, MINUTES=600 for rounds with other
#               seeds; writes docs/faults.md. A family: pytest tests/fault/test_faults.py --long --seed 1 -k NAME-
# make bench  every case and every peer with small data, into build/bench (minutes)
# make bench-full  the published figures, into docs/benchmarks: some 12 GiB of disk under build/, an hour, a quiet machine

PYTHON ?= python3
BIN := .venv/bin
MADE := .venv/.made
SEED ?= 1
MINUTES ?= 0
JOBS ?= 2
TORCH ?=
UPGRADE ?=
CHECKS ?=
export HF_HUB_OFFLINE ?= 1
# What pip does not compile is compiled when it is first imported; otherwise every command would compile torch anew.
unexport PYTHONDONTWRITEBYTECODE
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: env docs demo gpu test test-full test-wheel test-minimums test-types coverage lines lock lint types unit torture bench bench-full clean

env: $(MADE)

# The lock names every distribution with its hashes, but torch: see constraints.txt.
# uv installs the lock in 7 s of one core, pip in 32. It does not read pip's configuration, so where packages come from a mirror
# that only pip is told of, pip takes over.
# Python compiles what is imported: compiling 146 packages at once takes 38 s of two cores. torchao is
# compiled here, as its first compilation warns of escape sequences, and the tests take a warning for an error.
$(MADE): pyproject.toml constraints.txt requirements.lock
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "bucketline needs Python 3.11 or newer; name one: make PYTHON=python3.12 …")'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --no-compile --quiet -c constraints.txt torch uv
	$(BIN)/uv pip install --python $(BIN)/python --quiet --no-deps --require-hashes -r requirements.lock || \
	  $(BIN)/pip install --no-compile --quiet --no-deps --require-hashes -r requirements.lock
	$(BIN)/pip install --no-compile --quiet --no-deps --no-build-isolation -e .
	$(BIN)/python -W ignore -c 'import compileall, sysconfig; compileall.compile_dir(sysconfig.get_path("platlib") + "/torchao", quiet=1)'
	@touch $@

# uv resolves for every Python and machine at once, which pip cannot.
lock:
	$(PYTHON) -m venv build/lock
	build/lock/bin/pip install --no-compile --quiet -c constraints.txt uv
	build/lock/bin/uv pip compile --quiet $(UPGRADE) --universal --python-version 3.11 --generate-hashes --no-annotate \
	  --custom-compile-command 'make lock' --no-emit-package torch -c constraints.txt \
	  --all-extras --group dev -o requirements.lock pyproject.toml
	rm -rf build/lock

demo: $(MADE)
	BIN=$(BIN) demo/run build/demo

# mypy takes one core for half a minute, during which the tests have the others. The lines are printed last, where they are seen.
test: lint
	@$(MAKE) --no-print-directory -j2 types unit
	@$(MAKE) --no-print-directory lines

lines:
	@$(PYTHON) tests/lines.py

lint: $(MADE)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(MADE)
	$(BIN)/mypy -p bucketline
	$(BIN)/mypy tests demo examples

# In one process more than there are cores, up to five: many tests wait, for a process, a deadline or the disk. With two cores the quick
# ones took 298 s in two processes and 238 in three, the slow ones 1,208 s in three, some gigabytes of memory, and the disk.
PYTEST := $(BIN)/pytest --dist worksteal
UP_TO_4 := -n auto --maxprocesses 4
ONE_MORE := -n $(shell n=$$(nproc 2>/dev/null || echo 2); echo $$((n < 4 ? n + 1 : 5)))

# Their stores are in memory if there is room: a small pack waits for 26 fsyncs. The slow tests, faults among them, use the disk.
ROOM := $(shell test $$(df --output=avail -k /dev/shm 2>/dev/null | tail -n 1) -gt 1048576 2>/dev/null && echo /dev/shm || echo /tmp)

unit: $(MADE)
	at=$$(mktemp -d $(ROOM)/bucketline-tests-XXXXXX) && trap 'rm -rf "$$at"' EXIT && \
	  $(PYTEST) $(ONE_MORE) -m "not slow" --basetemp="$$at/base" -o tmp_path_retention_policy=failed

gpu: $(MADE)
	BUCKETLINE_TEST_GPU=1 $(BIN)/python -m tests.gpu.accept $(CHECKS)

test-full: $(MADE)
	$(PYTEST) $(ONE_MORE) -m slow

# Neither needs .venv, nor anything of this folder once the wheel is built.
test-wheel:
	PYTHON=$(PYTHON) tests/packaging/try_wheel build/try-wheel

test-minimums:
	PYTHON=$(PYTHON) TORCH=$(TORCH) tests/packaging/try_wheel build/try-minimums --minimums

test-types: $(MADE)
	$(BIN)/python tests/packaging/typed_examples.py

coverage: $(MADE)
	@mkdir -p build
	$(PYTEST) $(UP_TO_4) -m "not slow" --cov --cov-report=term:skip-covered --cov-report=html:build/coverage

docs:
	$(PYTHON) -m venv build/docs-env
	build/docs-env/bin/pip install --no-compile --quiet 'mkdocs-material>=9.6' 'mkdocstrings[python]>=0.29'
	NO_MKDOCS_2_WARNING=1 build/docs-env/bin/mkdocs build --quiet

# A C compiler and a fuzzer, where the machine lacks them; a fault that cannot be tried without them says so in the table.
torture: $(MADE)
	-$(BIN)/pip install --no-compile --quiet 'pip>=25.1'
	-$(BIN)/pip install --no-compile --quiet -c constraints.txt --group torture
	$(BIN)/python -m pytest tests/fault/test_faults.py -v --durations=0 -n $(JOBS) --maxschedchunk 1 \
	  --long --seed $(SEED) --minutes $(MINUTES) --page docs/faults.md

bench: $(MADE)
	$(BIN)/python -m bucketline.bench --publish build/bench

bench-full: $(MADE)
	$(BIN)/python -m bucketline.bench --full --stores build/bench-stores --publish docs/benchmarks
	rm -rf build/bench-stores

clean:
	rm -rf .venv build *.egg-info
