# Every target sets up what it needs, by itself, in $(VENV); the second time is fast.

VENV   ?= .venv
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python3.10 python3.14; do \
	"$$p" -c 'import sys, ensurepip, venv; sys.exit(not (3, 10) <= sys.version_info < (3, 15))' \
	2>/dev/null && echo "$$p" && break; done)
# Open MPI's wheel exists for these; elsewhere Horovod brings its own Gloo. MPI=system takes yours.
MPI    ?= $(if $(filter x86_64 aarch64,$(shell uname -m)),wheel,none)
NP     ?= 4
# Scripts in benchmarks/ and proofs/, half an hour in all; BENCH=failure (10 minutes, root, several hosts), comeback,
# many_ranks, large_input (20 GB of disk) and false_alarms only by name.
BENCH  ?= dense fit compiled allreduce ring scaling embedding checkpoint store startup loss_curves resume large_table \
	control_plane input

# Options of tests/run.py; see its --help.
TESTS  ?=
# Text in the first cells of a row of docs/compatibility.md.
ONLY   ?=

BIN := $(VENV)/bin
# The environment's programs come first; root, and more ranks than cores, are fine on one's own machine.
RUN := env PATH="$(abspath $(BIN)):$$PATH" OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 \
	OMPI_MCA_rmaps_base_oversubscribe=1

.PHONY: help setup tools demo smoke test test-all test-rest test-nightly lint docs docs-check tutorials tutorials-check \
	bench dist dist-check compatibility lock clean

help: ## show this list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

setup: $(VENV)/.horovod ## make the environment: hvdkit, Horovod compiled, and what the demo needs

tools: $(VENV)/.tools ## add what the tests, the checks and the benchmarks need

demo: setup ## train the CIFAR-10 network on real images over $(NP) ranks
	@$(RUN) hvdkit run -np $(NP) -- python models/train.py cifar10

smoke: setup ## train small programs with each launcher, compare them with one process: a minute
	@$(RUN) hvdkit doctor --smoke

# Seconds of each launch and test of the last run; tests/run.py ends with the slowest.
SECONDS_FILE = .cache/test-seconds-$@.json

test: setup tools ## run the core of the tests: ten minutes on two slow cores
	$(RUN) python tests/run.py --tier core --seconds $(SECONDS_FILE) $(TESTS)

test-all: setup tools ## run all tests but the nightly ones: half an hour
	$(RUN) python tests/run.py --tier all --seconds $(SECONDS_FILE) $(TESTS)

test-rest: setup tools ## run what test-all has and test lacks
	$(RUN) python tests/run.py --tier rest --seconds $(SECONDS_FILE) $(TESTS)

test-nightly: setup tools .cache/trackers/.made .cache/ray/.made .cache/otel/.made .cache/stores/.made ## run every test, every fault under every launcher, Slurm, 20 GB: two hours or more
	$(RUN) python tests/run.py --tier nightly --seconds $(SECONDS_FILE) $(TESTS)

lint: tools ## ruff (rules, format), mypy, and the schema of the workflows
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml

docs-check: setup tools ## run the examples in the docstrings and documents, check the documents' links
	$(RUN) python -m pytest -q --doctest-modules hvdkit
	$(BIN)/python tools/check_links.py
	$(BIN)/python tools/check_docs.py

docs: .cache/docs/.made ## build the documentation site: site/index.html
	NO_MKDOCS_2_WARNING=1 .cache/docs/bin/mkdocs build
	.cache/docs/bin/python tools/check_site.py

tutorials: setup tools .cache/tutorials/.made ## execute the tutorials' notebooks, and write their outputs to docs/tutorials
	@$(RUN) .cache/tutorials/bin/python tools/tutorials.py

tutorials-check: setup tools .cache/tutorials/.made ## execute the tutorials' notebooks, and write nothing
	@$(RUN) .cache/tutorials/bin/python tools/tutorials.py --check

# A goal that is missed (exit code 3) does not stop the others; an error, or Ctrl-C, does.
bench: setup tools ## measure hvdkit beside its peers and write the report; BENCH="dense fit" picks
	@for script in $(foreach name,$(BENCH),$(or $(wildcard proofs/$(name).py),benchmarks/$(name).py)); do \
		$(RUN) python "$$script" || [ $$? -eq 3 ] || exit 1; \
	done
	@$(RUN) python benchmarks/report.py

dist: tools ## build the source archive and the wheel of the last commit in dist/
	$(BIN)/python tools/build_dist.py

dist-check: setup tools ## install them with pip and uv as docs/install.md says, and run two ranks
	$(RUN) python tools/check_dist.py

compatibility: tools ## build and test with other versions, rewrite docs/compatibility.md; ONLY=2.19.1 picks
	$(BIN)/python tools/compatibility.py --only "$(ONLY)"

lock: tools ## pin the newest versions of all dependencies
	$(BIN)/uv pip compile --upgrade --universal --python-version 3.10 --no-emit-index-url \
		--no-emit-find-links --custom-compile-command "make lock" --extra cpu --extra files \
		setup.cfg requirements/dev.in --output-file requirements/lock.txt
	$(BIN)/uv pip compile --upgrade --universal --python-version 3.14 --no-emit-index-url \
		--no-emit-find-links --custom-compile-command "make lock" --extra cpu --extra files \
		setup.cfg requirements/dev.in requirements/python-3.14.in --output-file requirements/lock-3.14.txt
	$(BIN)/uv pip compile --upgrade --universal --python-version 3.10 --no-emit-index-url \
		--no-emit-find-links --custom-compile-command "make lock" \
		setup.cfg requirements/docs.in --output-file requirements/docs.txt
	$(BIN)/uv pip compile --upgrade --universal --python-version 3.10 --no-emit-index-url \
		--no-emit-find-links --custom-compile-command "make lock" \
		requirements/tutorials.in --output-file requirements/tutorials.txt
	grep -v '^importlib-metadata==' requirements/lock.txt > .cache/trackers.txt  # MLflow needs an earlier one
	$(BIN)/uv pip compile --upgrade --universal --python-version 3.10 --no-emit-index-url \
		--no-emit-find-links --custom-compile-command "make lock" --constraint .cache/trackers.txt \
		requirements/trackers.in --output-file requirements/trackers.txt
	$(BIN)/uv pip compile --upgrade --universal --python-version 3.10 --no-emit-index-url \
		--no-emit-find-links --custom-compile-command "make lock" --constraint requirements/lock.txt \
		requirements/ray.in --output-file requirements/ray.txt
	$(BIN)/uv pip compile --upgrade --universal --python-version 3.10 --no-emit-index-url \
		--no-emit-find-links --custom-compile-command "make lock" --constraint requirements/lock.txt \
		requirements/otel.in --output-file requirements/otel.txt
	$(BIN)/uv pip compile --upgrade --universal --python-version 3.10 --no-emit-index-url \
		--no-emit-find-links --custom-compile-command "make lock" --constraint requirements/lock.txt \
		requirements/stores.in --output-file requirements/stores.txt

clean: ## remove the environments and all caches in this folder
	rm -rf $(VENV) .cache/docs .cache/peers .cache/otel .cache/ray .cache/stores .cache/trackers .cache/tutorials site build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache \
		.hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# --- the environment, a stamp for each part ---------------------------------------------------

CHECK_PYTHON = $(if $(PYTHON),,$(error No Python 3.10 to 3.14 with the venv module found. Install one \
	(on Debian: python3-venv), or name it: make PYTHON=/path/to/python3))

$(VENV)/.made:
	$(CHECK_PYTHON)
	$(PYTHON) -m venv --clear $(VENV)
	@touch $@

# Pins for Python 3.14, for which only a release candidate of TensorFlow has wheels.
LOCK = requirements/lock$(if $(shell ls -d $(VENV)/lib/python3.14 2>/dev/null),-3.14).txt

# Python compiles modules when they are imported first: few of those that are installed.
PIP_INSTALL = $(BIN)/python -m pip install --disable-pip-version-check --no-compile

# scikit-learn has the images of the demo. "compat" puts this folder on Python's path: with setuptools' default, a folder
# named hvdkit next to a user's program, such as a clone, is found before the package.
$(VENV)/.packages: $(VENV)/.made $(wildcard requirements/lock*.txt) setup.cfg pyproject.toml
	$(PIP_INSTALL) --constraint $(LOCK) --config-settings editable_mode=compat --editable '.[cpu]' scikit-learn
	@touch $@

$(VENV)/.tools: $(VENV)/.packages
	$(PIP_INSTALL) --requirement $(LOCK)
	@touch $@

# The site needs no TensorFlow, and gets a separate environment, which takes half a minute.
.cache/docs/.made: requirements/docs.txt
	$(CHECK_PYTHON)
	$(PYTHON) -m venv --clear .cache/docs
	.cache/docs/bin/python -m pip install --disable-pip-version-check --quiet --requirement requirements/docs.txt
	@touch $@

$(VENV)/.horovod: $(VENV)/.packages $(wildcard hvdkit/commands/build_horovod/*.py)
	$(BIN)/hvdkit build-horovod --mpi $(MPI)
	@touch $@

# Jupyter's kernel and matplotlib, apart from $(VENV): there, Keras would import matplotlib in every process.
.cache/tutorials/.made: $(VENV)/.made requirements/tutorials.txt
	$(BIN)/python -m venv --clear .cache/tutorials
	.cache/tutorials/bin/python -m pip install --disable-pip-version-check --quiet --no-deps \
		--requirement requirements/tutorials.txt
	@touch $@

# Trackers and tuners, which bring web frameworks and databases, Ray, OpenTelemetry, and servers of stores: each apart from
# $(VENV), whose packages they see.
.cache/trackers/.made .cache/ray/.made .cache/otel/.made .cache/stores/.made: .cache/%/.made: $(VENV)/.tools requirements/%.txt
	$(BIN)/python -m venv --clear .cache/$*
	echo "import site; site.addsitedir('$$($(BIN)/python -c 'import site; print(site.getsitepackages()[0])')')" \
		> "$$(.cache/$*/bin/python -c 'import site; print(site.getsitepackages()[0])')/hvdkit.pth"
	.cache/$*/bin/python -m pip install --disable-pip-version-check --quiet --no-compile \
		--requirement requirements/$*.txt
	@touch $@
