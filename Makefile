# Sets up .venv and runs this repository's commands; `make` alone lists them.
# Written for GNU make 3.81 and later, since 3.81 is what macOS ships.

# The Python that makes .venv: `make train PYTHON=python3.12` chooses another.
PYTHON ?= python3

# The Pythons for which the pinned torch has builds.
SUPPORTED = 3.10 3.11 3.12 3.13 3.14

# Passed on to the script and to pytest: `make train ARGS="--max-steps=50"`.
ARGS ?=
PYTEST_ARGS ?=

.PHONY: help train smoke test pages test-all gpu lint figures refresh setup setup-dev clean

help: ## List these targets.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' Makefile

# Each of the two ranks computes with half of the cores. Without this setting
# torchrun gives every rank one thread and warns; with all cores for each rank, the
# ranks would push each other aside.
train: setup ## Set up, then train a small GPT with two processes.
	$(info torchrun --nproc-per-node=2 03_ddp_torchrun/train.py $(ARGS))
	@OMP_NUM_THREADS="$${OMP_NUM_THREADS:-$$(.venv/bin/python -c '$(half_the_cores)')}" \
	    .venv/bin/torchrun --nproc-per-node=2 03_ddp_torchrun/train.py $(ARGS)

# One thread a rank: the tests start up to four ranks, on however few cores. Several
# files at a time, because many tests wait for a time-out; in their own order, or the
# files with few tests would come last, and those take long.
files_at_a_time = 2
pytest = OMP_NUM_THREADS=1 .venv/bin/python -m pytest -n $(files_at_a_time) --dist loadfile \
    --no-loadscope-reorder $(PYTEST_ARGS)

smoke: setup-dev ## Set up, then run one script of each chapter.
	@$(pytest) -m smoke tests

# These look at the pages: at what they quote, draw and ask, and at chapters by themselves.
about_pages = pages exercises communication_exercise pictures chapters_stand_alone
of_pages = $(patsubst %,tests/test_%.py,$(about_pages) readme_runner)

# On two cores a third file ends the tests a twelfth sooner; pages measure some times.
# The files that take longest come first, so that no process idles at the end.
test: files_at_a_time = 3
test: longest = ddp_minimal fsdp rpc_parameter_server one_mesh ranks one_result
test: first = $(longest:%=tests/test_%.py)
test: rest = $(filter-out $(first) $(of_pages),$(wildcard tests/test_*.py))
test: setup-dev ## Set up, then run the tests of the scripts but for the slow ones.
	@$(pytest) -m "not slow" $(first) $(rest)

# The pages that take longest come first, so that neither process idles at the end.
pages: longest = $(wildcard 0[345]*/*.md) $(of_pages)
pages: setup-dev ## Set up, then run the pages' commands and tests but for the slow ones.
	@$(pytest) -m "not slow" $(longest) $(wildcard 0*/*/*.md 0[126789]*/*.md *.md)

test-all: setup-dev ## Set up, then run every test and every command of every page.
	@$(pytest)

# Takes whatever torch is there: a machine that is lent may have its own, and no network.
gpu: ## Run on this machine's accelerators what takes one, and write a report.
	@$(if $(wildcard .venv/bin/python),.venv/bin/python,$(python)) \
	    tests/gpu/gpu_report.py $(ARGS)

lint: setup-dev ## Check format, style, spelling and types.
	@.venv/bin/ruff format --check .
	@.venv/bin/ruff check .
	@.venv/bin/codespell
	@.venv/bin/basedpyright --pythonpath .venv/bin/python

figures: setup ## Draw again every picture under assets/.
	@for script in */draw_*.py; do \
	    if [ ! -e "$$script" ]; then echo "No script here draws a picture yet."; break; fi; \
	    echo "python $$script"; .venv/bin/python "$$script" || exit 1; \
	done

refresh: setup-dev figures ## Draw every picture, run every command, rewrite the pages.
	@OMP_NUM_THREADS=1 .venv/bin/python tests/support/readme_runner.py --update

setup: ## Make .venv and install requirements.txt, unless that is done.
	$(eval fault := $(venv_fault))
	$(if $(or $(fault),$(python_chosen)),$(call stop_on,$(python_fault)))
	@$(if $(fault),$(make_venv))
	@$(call install,requirements.txt)

setup-dev: setup ## The same, with requirements-dev.txt.
	@$(call install,requirements-dev.txt)

clean: ## Remove .venv and the tools' caches.
	@rm -rf .venv .pytest_cache .ruff_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

# What the recipes above are made of.

# As $(error) this is the one line that the reader sees: a recipe that fails would
# add a line of make's own.
stop_on = $(if $(1),$(error $(1)))

# The chosen interpreter as one word for the shell, whatever its path holds.
python := '$(subst ','\'',$(PYTHON))'
python_chosen := $(filter-out file,$(origin PYTHON))

# Python 2 and 3 both understand this, so that a wrong version can be named.
version = import sys; print("%d.%d" % sys.version_info[:2])

# The installed interpreter behind $(PYTHON). In a shell that has .venv activated,
# $(PYTHON) itself lies in .venv and goes when .venv is removed.
base = import sys; print(getattr(sys, "_base_executable", 0) or sys.executable)

# The cores that this process may use, where the system can say so.
half_the_cores = import os; \
    cores = getattr(os, "sched_getaffinity", lambda _: range(os.cpu_count() or 1)); \
    print(max(1, len(cores(0)) // 2))

# Why $(PYTHON) cannot make .venv and what to type instead; empty if it can.
python_fault = $(shell \
    advise() { \
        for other in python3.11 python3.12 python3.13 python3.14 python3.10; do \
            if $$other -c 'import ensurepip, venv' 2>/dev/null; then \
                echo "type: make $(MAKECMDGOALS) PYTHON=$$other"; return; \
            fi; \
        done; \
        echo "install Python 3.11, then type: make $(MAKECMDGOALS) PYTHON=python3.11"; \
    }; \
    name=$(python); \
    range="$(firstword $(SUPPORTED)) to $(lastword $(SUPPORTED))"; \
    if ! version=$$("$$name" -c '$(version)' 2>/dev/null </dev/null); then \
        echo "There is no working Python called '$$name'; $$(advise)"; \
    elif ! echo " $(SUPPORTED) " | grep -qF " $$version "; then \
        echo "'$$name' is Python $$version, but torch needs $$range; $$(advise)"; \
    elif ! "$$name" -c 'import ensurepip, venv' 2>/dev/null; then \
        echo "'$$name' lacks the venv module; on Debian or Ubuntu" \
            "type: sudo apt install python$$version-venv; elsewhere $$(advise)"; \
    fi)

# Why .venv has to be made, or made again; empty if it can stay. bin/activate is the
# last file that venv writes and holds the folder for which .venv was made: the
# commands in bin/ work in that folder only.
venv_fault = $(shell \
    found=$$(.venv/bin/python -c 'import pip; $(version)' 2>/dev/null); \
    if [ ! -e .venv ] && [ ! -L .venv ]; then \
        echo "Making .venv."; \
    elif [ -e .venv/unfinished ]; then \
        echo "The last install did not finish: making .venv again."; \
    elif ! echo " $(SUPPORTED) " | grep -qF " $$found "; then \
        echo "The Python in .venv does not work: making .venv again."; \
    elif ! (. .venv/bin/activate && [ "$$VIRTUAL_ENV" -ef .venv ]) >/dev/null 2>&1; then \
        echo "This .venv was made for another folder or is incomplete: making it again."; \
    elif [ "$(python_chosen)" ] && [ "$$($(python) -c '$(version)' 2>&1)" != "$$found" ]; then \
        echo "This .venv has Python $$found: making it again."; \
    fi)

make_venv = \
    base=$$($(python) -c '$(base)') && \
    echo "$(fault)" && \
    rm -rf .venv && \
    "$$base" -m venv .venv

# A command whose first line names .venv's interpreter cannot start if that path holds a
# space, and `deepspeed` is one. Now sh starts it; for Python its lines are a string.
mend_commands = import pathlib, sys; \
    path, quote = sys.executable, chr(39); \
    old = f"\#!{path}\n".encode(); \
    new = f"\#!/bin/sh\n{quote * 3}exec{quote} \"{path}\" \"$$0\" \"$$@\"\n{quote} {quote * 3}\n"; \
    files = [file for file in pathlib.Path(sys.prefix, "bin").iterdir() if file.is_file()]; \
    found = [file for file in files if " " in path and file.read_bytes().startswith(old)]; \
    [file.write_bytes(new.encode() + file.read_bytes()[len(old):]) for file in found]

# Installs the file $(1), unless the note left by the last install says that just
# this was installed. While .venv/unfinished exists, an install is under way or has
# failed: it may have left half of a package, which pip would take for the whole.
install = \
    cat $(1) Makefile | cmp -s - .venv/$(1).installed || { \
        echo "Installing $(1) into .venv; the first time takes minutes." && \
        touch .venv/unfinished && \
        .venv/bin/python -m pip install --quiet --no-input \
            --disable-pip-version-check -r $(1) && \
        .venv/bin/python -c '$(mend_commands)' && \
        cat $(1) Makefile > .venv/$(1).installed && \
        rm .venv/unfinished; \
    }
