# Every target sets up what it needs, by itself, in $(VENV); the second time is fast.

VENV   ?= .venv
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python3.10; do \
	"$$p" -c 'import sys, ensurepip, venv; sys.exit(not (3, 10) <= sys.version_info < (3, 14))' \
	2>/dev/null && echo "$$p" && break; done)
# Open MPI's wheel exists for x86_64; elsewhere Horovod brings its own Gloo. MPI=system takes yours.
MPI    ?= $(if $(filter x86_64,$(shell uname -m)),wheel,none)
NP     ?= 4
# Scripts in benchmarks/ and proofs/, half an hour in all; BENCH=failure (10 minutes, root, several hosts), comeback,
# many_ranks, large_input (20 GB of disk) and false_alarms only by name.
BENCH  ?= dense fit allreduce ring scaling embedding checkpoint startup loss_curves resume large_table \
	control_plane input

BIN := $(abspath $(VENV))/bin
# The environment's programs come first; root, and more ranks than cores, are fine on one's own machine.
RUN := env PATH="$(BIN):$$PATH" OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 \
	OMPI_MCA_rmaps_base_oversubscribe=1

.PHONY: help setup demo test lint docs-check tutorials tutorials-check bench compatibility lock clean

help: ## show this list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

setup: $(VENV)/.horovod ## make the environment: pinned packages, hvdkit, Horovod compiled

demo: setup ## train the CIFAR-10 network on real images over $(NP) ranks
	@$(RUN) hvdkit run -np $(NP) -- python models/train.py cifar10

test: setup ## run every test: one process, 1 to 4 ranks under MPI, Gloo, jobs that fail
	$(RUN) python tests/run.py

lint: $(VENV)/.packages ## ruff (rules, format) and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs-check: setup ## run the examples in the docstrings and documents, check the documents' links
	$(RUN) python -m pytest -q --doctest-modules hvdkit
	$(BIN)/python tools/check_links.py
	$(BIN)/python tools/check_docs.py

tutorials: setup .cache/tutorials/.made ## execute the tutorials' notebooks, and write their outputs to docs/tutorials
	@$(RUN) .cache/tutorials/bin/python tools/tutorials.py

tutorials-check: setup .cache/tutorials/.made ## execute the tutorials' notebooks, and write nothing
	@$(RUN) .cache/tutorials/bin/python tools/tutorials.py --check

# A goal that is missed (exit code 3) does not stop the others; an error, or Ctrl-C, does.
bench: setup ## measure hvdkit beside its peers and write the report; BENCH="dense fit" picks
	@for script in $(foreach name,$(BENCH),$(or $(wildcard proofs/$(name).py),benchmarks/$(name).py)); do \
		$(RUN) python "$$script" || [ $$? -eq 3 ] || exit 1; \
	done
	@$(RUN) python benchmarks/report.py

compatibility: $(VENV)/.packages ## build and try Horovod on other versions, rewrite docs/compatibility.md
	$(BIN)/python tools/compatibility.py

lock: $(VENV)/.packages ## pin the newest versions of all dependencies
	$(BIN)/python -m pip install --quiet uv
	$(BIN)/uv pip compile --upgrade --universal --python-version 3.10 --no-emit-index-url \
		--no-emit-find-links --custom-compile-command "make lock" --extra cpu --extra files \
		setup.cfg requirements/dev.in --output-file requirements/lock.txt
	$(BIN)/uv pip compile --upgrade --universal --python-version 3.10 --no-emit-index-url \
		--no-emit-find-links --custom-compile-command "make lock" \
		requirements/tutorials.in --output-file requirements/tutorials.txt

clean: ## remove the environment and all caches in this folder
	rm -rf $(VENV) .cache/peers .cache/tutorials build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# --- the environment, a stamp for each part ---------------------------------------------------

$(VENV)/.made:
	$(if $(PYTHON),,$(error No Python 3.10 to 3.13 with the venv module found. Install one \
		(on Debian: python3-venv), or name it: make PYTHON=/path/to/python3))
	$(PYTHON) -m venv --clear $(VENV)
	@touch $@

$(VENV)/.packages: $(VENV)/.made requirements/lock.txt setup.cfg pyproject.toml
	$(BIN)/python -m pip install --disable-pip-version-check --requirement requirements/lock.txt
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --no-deps --editable .
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
