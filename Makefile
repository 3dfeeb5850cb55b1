# make demo   create .venv on first use, then run the main job on a small DeepSeek-V4 model
# make test   lint, types and the whole test suite
# make test-gpu  the GPU tests, on a machine with one
# make fuzz   100,000 drawn calls on the CPU, with new seeds; no part of the gate
# make test-triton-latest  the kernel tests with the newest triton; no part of the gate
# make mutants  plant faults one at a time and see whether the tests notice; half an hour or more
# make lint   only lint and types
# make format rewrite the sources in the project's format
# make clean  remove the environment and every build product
#
# PYTHON=/path/to/python3 chooses the interpreter, JOBS=n the number of test processes.

.DEFAULT_GOAL := demo
.PHONY: demo test test-gpu fuzz test-triton-latest mutants lint format clean

# The first interpreter that can run everything; Python 3.10 only if there is nothing newer.
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo "$$p" && exit; \
	done; echo python3)
JOBS ?= 2

VENV := .venv
READY := $(VENV)/ready
RUN := $(VENV)/bin/python

# Wheels are unpacked and tests write their files here, because /tmp may be small.
export TMPDIR := $(CURDIR)/build/tmp

demo: $(READY)
	@mkdir -p $(TMPDIR)
	$(RUN) -m mlacast demo --out build/demo

# One thread per test process: results do not depend on the number of cores, and the processes do
# not fight for them.
test: lint
	@mkdir -p $(TMPDIR)
	OMP_NUM_THREADS=1 $(RUN) -m pytest -n $(JOBS) --dist worksteal

test-gpu: $(READY)
	@mkdir -p $(TMPDIR)
	$(RUN) -m pytest tests/gpu -q

fuzz: $(READY)
	@mkdir -p $(TMPDIR)
	$(RUN) tools/fuzz.py --jobs $(JOBS)

test-triton-latest: $(READY)
	@mkdir -p $(TMPDIR)
	$(RUN) tools/triton_latest.py build/triton-latest

mutants: $(READY)
	@mkdir -p $(TMPDIR)
	$(RUN) tools/mutation_check.py --jobs $(JOBS) --json build/mutants.json

lint: $(READY)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

format: $(READY)
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

$(READY): pyproject.toml constraints.txt tools/make_env.py
	@mkdir -p $(TMPDIR)
	$(PYTHON) tools/make_env.py $(VENV)
	@touch $@

clean:
	rm -rf $(VENV) build dist mlacast.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find mlacast tests tools -name __pycache__ -type d -prune -exec rm -rf {} +
