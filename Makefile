# Every target does its own set-up in .venv. `make help` lists them.
SHELL := /bin/bash
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
BACKEND ?= vllm
MODEL ?= smollm2
BASE_URL ?=
TOKENIZER ?=
TEMPERATURE ?= 1.0
TORCH_INDEX ?=
TEST_ARGS ?=
PROVE_ARGS ?=
BENCH_ARGS ?=
BENCH_JOBS ?= 1
TRAIN_ARGS ?=
PACKAGE ?=
PACKAGE_ARGS ?=
SAMPLE ?=
OWNER ?=
ROWS ?=
HARNESS_ARGS ?=
# Container images often set this; each test process would then compile 600 modules anew.
export PYTHONDONTWRITEBYTECODE :=
# One process for each engine, which keeps its server from test to test.
ON_ENGINES := $(BIN)/python -m pytest -q -m engine -n 2 --dist loadscope --timeout 1800

BENCHMARKS := ledger_speed ledger_memory parsing turn_cost gateway retokenizing concurrency collect images templates long_context trace_cost

.DEFAULT_GOAL := help
.PHONY: help setup demo demo-images train-tiny test suite browser coverage conformance engines routers harnesses trainers recipes prove release defects mutants matrix lint lint-types lint-turn lint-rest format docs bench package publish-as lock clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 14

setup: $(READY)  ## make .venv, with uv where it is present

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if (3, 11) <= v[:2] <= (3, 14) else f"strands-tito needs Python 3.11 to 3.14, and {sys.executable} is {v[0]}.{v[1]}: install one and run make PYTHON=python3.12, say.")'
	@if command -v uv >/dev/null; then \
		uv venv -q --seed --allow-existing --python $(PYTHON) $(VENV) && \
		uv pip install -q --python $(BIN)/python -c constraints.txt -e '.[dev,harness]'; \
	else \
		$(PYTHON) -m venv $(VENV) && \
		$(BIN)/python -m pip install -q --upgrade pip 2>&1 | { grep -v '^WARNING: Location' || true; } && \
		$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev,harness]' 2>&1 | { grep -v '^WARNING: Location' || true; }; \
	fi
	@$(BIN)/python -c 'import tito_core'
	@touch $@

demo: $(READY)  ## run the main job: a real engine, an agent with a tool, rollouts that the engine confirms
	@$(BIN)/python examples/demo.py --backend $(BACKEND) --model $(MODEL) --temperature $(TEMPERATURE) \
		$(if $(BASE_URL),--base-url $(BASE_URL)) $(if $(TOKENIZER),--tokenizer $(TOKENIZER)) \
		$(if $(TORCH_INDEX),--torch-index $(TORCH_INDEX))

demo-images: $(READY)  ## run an agent that looks at pictures on a real engine (BACKEND=...), which confirms its logprobs
	@$(BIN)/python -m pip install -q -c constraints.txt -e '.[images]'
	@$(BIN)/python examples/demo_images.py --backend $(BACKEND) \
		$(if $(BASE_URL),--base-url $(BASE_URL) --free) $(if $(TOKENIZER),--tokenizer $(TOKENIZER)) \
		$(if $(TORCH_INDEX),--torch-index $(TORCH_INDEX))

train-tiny: $(READY)  ## train a tool-using agent on this CPU (BACKEND=...), and write docs/training.md
	@$(BIN)/python -m pip install -q -c constraints.txt -e '.[train]'
	@$(BIN)/python examples/train_tiny.py --backend $(BACKEND) --page docs/training.md \
		$(if $(TORCH_INDEX),--torch-index $(TORCH_INDEX)) $(TRAIN_ARGS)

test: $(READY)  ## run the tests that need no engine, trainer or browser; see make suite too
	$(BIN)/python -m pytest -q -n 3 --dist worksteal $(TEST_ARGS)

suite: $(READY)  ## hold the conformance suite and its scripted servers to account: sound ones and ones with planted defects
	$(BIN)/python -m pytest -q -n 6 --dist worksteal -m suite --timeout 600 tests/conformance tests/testing tests/gateway $(TEST_ARGS)

browser: $(READY)  ## run the viewer's pages in a headless Chromium (apt-get install chromium)
	$(BIN)/python -m pytest -q -m browser -s tests/viewer $(TEST_ARGS)

coverage: $(READY)  ## count the lines and branches that make test reaches; fails below 97% of tito_core
	@$(BIN)/coverage erase
	$(BIN)/coverage run -m pytest -q -n 2 $(TEST_ARGS)
	@$(BIN)/coverage combine -q
	@$(BIN)/coverage report
	@$(BIN)/coverage report --include 'src/tito_core/*' --fail-under 97 --format total >/dev/null || \
		{ echo "Less than 97% of tito_core's lines and branches are reached."; exit 1; }

conformance: $(READY)  ## hold real vLLM and SGLang servers on this CPU to every law, and to each other
	$(ON_ENGINES) tests/integration/test_conformance_real.py $(TEST_ARGS)

engines: $(READY)  ## run every test that needs real vLLM and SGLang servers on this CPU, conformance among them
	@$(BIN)/python -m pip install -q -c constraints.txt -e '.[train]'
	$(ON_ENGINES) tests/integration $(TEST_ARGS)

routers: $(READY)  ## run rollouts through the engines' own routers, before scripted servers; it installs the routers
	$(BIN)/python -m pytest -q -m routers --timeout 300 tests/routers $(TEST_ARGS)

harnesses: $(READY)  ## run Claude Code, Codex and mini-swe-agent through the gateway, before scripted engines; it installs them
	$(BIN)/python tools/harnesses.py $(HARNESS_ARGS)

trainers: $(READY)  ## run exporters on trainers' own packages, collections on Ray; it installs what they resolve to
	$(BIN)/python -m pytest -q -m trainers --timeout 2400 tests/export tests/collect tests/integrations $(TEST_ARGS)

# $(call recipe,NAME,ROW,COMMAND): COMMAND with the Python of a row of tools/matrix.py; prints the last line of its log.
recipe = export PYTHON && PYTHON=$$($(BIN)/python tools/matrix.py --python $(2)) && \
	{ $(3) >runs/$(1).log 2>&1 || { tail -n 30 runs/$(1).log; exit 1; }; } && tail -n 1 runs/$(1).log

recipes: $(READY)  ## run the part of each recipe that needs no GPU, through its trainer (slime's source: SLIME_SRC=...)
	@mkdir -p runs
	@$(call recipe,slime_retool,slime,recipes/slime_retool/run.sh --tiny)
	@$(call recipe,verl_agent_loop,verl-0.9.1,recipes/verl_agent_loop/run.sh --tiny)
	@$(call recipe,gpu,trl-1.16.0,recipes/gpu.sh --tiny $(if $(TORCH_INDEX),--torch-index $(TORCH_INDEX)))

matrix: $(READY)  ## run rollouts and tests in resolved environments, or in ROWS="lowest verl-0.9.1"; writes docs/compatibility.md
	$(BIN)/python tools/matrix.py $(ROWS)

prove: $(READY)  ## run the large proofs and write evidence/proofs.md; PROVE_ARGS=--smallest in .ci/run
	@$(BIN)/python tools/prove.py $(PROVE_ARGS)

release: $(READY)  ## before a tag: all evidence of this commit, in about two hours; fails on what is older than its code
	@$(MAKE) package PACKAGE_ARGS=--to-publish
	@$(MAKE) lint docs test suite browser matrix defects
	@$(MAKE) prove PROVE_ARGS='--smallest --record'
	@$(MAKE) bench BENCH_ARGS='--quick --write'
	@$(BIN)/python tools/prove.py --check

mutants: $(READY)  ## mutate each package, or PACKAGE=ledger, or SAMPLE=500 of each, and print the survivors (an hour each)
	@$(BIN)/python -m pip install -q -c constraints.txt -e '.[mutants]'
	@$(BIN)/python tools/mutants.py $(if $(PACKAGE),--package $(PACKAGE)) $(if $(SAMPLE),--sample $(SAMPLE))

defects: $(READY)  ## plant every defect, and see that the conformance suite notices; writes evidence/defects.md
	@$(BIN)/python tools/defects.py $(DEFECTS_ARGS)

lint: $(READY)  ## ruff, mypy, import contracts and circles, what every test imports, and the calls of a turn
	@$(MAKE) --no-print-directory -j 2 -k lint-types lint-turn lint-rest

lint-types: $(READY)
	$(BIN)/mypy

lint-turn: $(READY)
	$(BIN)/python benchmarks/warm_turn.py --check

lint-rest: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo
	$(BIN)/python tools/house.py --check
	$(BIN)/python tools/matrix.py --check
	@echo 'every test can be collected'; tests=$$($(BIN)/python -m pytest --collect-only -qq -m "" 2>&1) || { tail -n 40 <<<"$$tests"; exit 1; }

format: $(READY)  ## format, and apply ruff's fixes
	$(BIN)/ruff check -q --fix . && $(BIN)/ruff format -q .

docs: $(READY)  ## build the documentation into site/
	@$(BIN)/python -m pip install -q -c constraints.txt -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build -q --strict

bench: $(READY)  ## print the benchmark tables; BENCH_ARGS=--smallest BENCH_JOBS=2 to see that they run
	@printf '%s\n' $(BENCHMARKS) | xargs -P $(BENCH_JOBS) -I{} $(BIN)/python benchmarks/{}.py $(BENCH_ARGS)

package: $(READY)  ## build the wheel and the sdist into dist/, and check them
	@$(BIN)/python -m pip install -q -c constraints.txt build twine
	@$(BIN)/python tools/package.py $(PACKAGE_ARGS)

# The owner of today is the one in pyproject.toml; tests/test_release.py checks that no address has another.
publish-as:  ## put the repository's owner into every address: OWNER=name
	@test -n "$(OWNER)" || { echo "Give the account that owns the repository: make publish-as OWNER=name"; exit 1; }
	@old=$$(sed -nE 's|^Repository = "https://github.com/([^/]+)/.*|\1|p' pyproject.toml) && \
	grep -rlIE --exclude-dir=.git --exclude-dir=$(VENV) "\b$$old(/strands-tito|\.github\.io)" . | \
	xargs sed -i -E "s#\b$$old(/strands-tito|\.github\.io)#$(OWNER)\1#g"

lock: $(READY)  ## rewrite constraints.txt from pyproject.toml
	$(BIN)/python -m pip install -q pip-tools
	$(BIN)/pip-compile -q --strip-extras --no-emit-index-url --no-emit-find-links --no-emit-trusted-host --no-annotate \
		--no-header --extra dev --extra docs --extra harness --extra mutants --extra renderers --extra train --output-file constraints.txt pyproject.toml

clean:  ## remove .venv and what tools left behind
	rm -rf $(VENV) site dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis
