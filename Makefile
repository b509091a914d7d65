# `make run` on a fresh clone sets everything up and serves; `make test` sets everything up and tests. What is done already is
# not done again: stamp files in the virtual environment say what is installed.

VENV ?= .venv
PYTHON ?= python3
# Passed on to the command of the target, as in: make test ARGS='-k routing', make run ARGS='--config my.yaml'
ARGS ?=

PY := $(VENV)/bin/python
PIP_INSTALL := $(PY) -m pip install --disable-pip-version-check --constraint constraints.txt
MODEL := models/SmolLM2-135M-Instruct.Q4_1.gguf
GEMMA := models/gemma-3-270m-q4_k_m.gguf
BENCHMARKS := $(sort $(filter-out %/__init__.py,$(wildcard benchmarks/*.py)))
PACKAGING := setup.cfg setup.py pyproject.toml constraints.txt $(wildcard src/laya/*/native/*)

.NOTPARALLEL:
.PHONY: help install dev model gemma run test check docs bench fuzz binary binary-router clean

help:
	@echo "make run      set up, bring the default model, serve on 127.0.0.1:8000"
	@echo "make install  virtual environment ($(VENV)) with router and engine"
	@echo "make model    the default model, 98 MB, under models/"
	@echo "make gemma    Gemma 3 270M, 253 MB, which the tests use too"
	@echo "make test     set up and run all tests"
	@echo "make check    linter, settings manual, configuration"
	@echo "make docs     write laya.yaml and docs/configuration.md from the code"
	@echo "make bench    run the benchmarks (their short form)"
	@echo "make fuzz     compare the HTTP parsers on random input"
	@echo "make binary         one executable, dist/laya: router, engine and the default model (some 370 MB)"
	@echo "make binary-router  dist/laya-router: the router alone (some 16 MB)"
	@echo "make clean    remove environments, caches and builds; models stay"

install: $(VENV)/.installed

dev: $(VENV)/.installed-dev

model: $(MODEL)

gemma: $(GEMMA)

run: $(VENV)/.installed $(MODEL)
	$(PY) -m laya $(ARGS)

test: $(VENV)/.installed-dev $(MODEL) $(GEMMA)
	$(PY) -m pytest $(ARGS)

check: $(VENV)/.installed-dev
	$(PY) -m ruff check src tests tools benchmarks
	$(PY) tools/settings_manual.py --check
	$(PY) -m laya check

docs: $(VENV)/.installed
	$(PY) tools/settings_manual.py

bench: $(VENV)/.installed-dev $(MODEL)
	@test -n "$(BENCHMARKS)" || { echo "there is no benchmark in benchmarks/"; exit 1; }
	@set -e; for file in $(BENCHMARKS); do echo "== $$file"; $(PY) $$file --quick $(ARGS); done

fuzz: $(VENV)/.installed-dev
	$(PY) tools/fuzz_wire.py $(ARGS)

# What an earlier build left is removed: PyInstaller would pack changed sources into its archive and ship the old one.
binary: $(VENV)/.installed-binary $(MODEL)
	rm -rf build/full
	LAYA_BINARY=full $(VENV)/bin/pyinstaller --noconfirm --log-level WARN --distpath dist --workpath build/full packaging/laya.spec
	@ls -l dist/laya

binary-router: $(VENV)/.installed-binary
	rm -rf build/router
	LAYA_BINARY=router $(VENV)/bin/pyinstaller --noconfirm --log-level WARN --distpath dist --workpath build/router packaging/laya.spec
	@ls -l dist/laya-router

clean:
	rm -rf .venv .venv-ci build dist src/*.egg-info .pytest_cache .hypothesis .ruff_cache
	find src tests tools benchmarks -name __pycache__ -type d -exec rm -rf {} +

$(PY):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "laya needs Python 3.11 or newer; name one with: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(PACKAGING) | $(PY)
	$(PIP_INSTALL) --editable '.[engine]'
	@touch $@

$(VENV)/.installed-dev: $(PACKAGING) | $(PY)
	$(PIP_INSTALL) --editable '.[engine,shared,dev]'
# The tests drive nano-vllm on the CPU; its triton and CUDA parts are replaced there, so they are not brought. Pure Python.
	$(PIP_INSTALL) --no-deps --ignore-requires-python nano-vllm-fork
	@touch $@ $(VENV)/.installed

$(VENV)/.installed-binary: $(PACKAGING) | $(PY)
	$(PIP_INSTALL) --editable '.[engine,shared,redact,binary]'
	@touch $@ $(VENV)/.installed

$(MODEL): | $(VENV)/.installed
	$(PY) -m laya pull default

$(GEMMA): | $(VENV)/.installed
	$(PY) -m laya pull gemma
