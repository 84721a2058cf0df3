# `make help` lists what there is. Needs Python 3.11 or newer with venv, and nothing else.
#
# TORCH_INDEX=URL  package index to take torch from, such as one that has CPU builds only
# PYTHON=python3   interpreter that makes the environment
# ARGS=...         passed on by run, bench and test
# JOBS=2           processes that share the tests out
# VENV=.venv       folder of the environment

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
ARGS ?=
JOBS ?= 2
TORCH := 2.13.0
TORCHVISION := 0.28.0
VENV := .venv
BIN := $(VENV)/bin
# Tells every later target that gpu-install made this environment.
GPU := $(VENV)/gpu
LOCK := requirements/$(if $(wildcard $(GPU)),gpu,cpu).lock
STAMP := $(VENV)/installed
TORCH_STAMP := $(VENV)/torch-$(TORCH)
PIP := $(BIN)/python -m pip --disable-pip-version-check
# pip may warn a hundred times about an index that lacks a package; an error shows all it said.
PIP_LOG := $(VENV)/pip.log
SHOW_PIP_LOG := { cat $(PIP_LOG) >&2; exit 1; }
EXTENSIONS := kv_transfer/_copy.c
HEADERS := $(wildcard kv_transfer/*.h)
PROTOS := $(wildcard protos/pdserve/v1/*.proto)
PROTOC := PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m grpc_tools.protoc -I protos
TOOLS := chromium prometheus buildah mmdebstrap
# The Python clients of tests/slow/test_clients.py; their pins conflict with ours. Those that make
# load need torch and transformers: they see the project's, behind packages of their own.
CLIENTS := .venv-clients
LOAD_CLIENTS := .venv-load-clients
CODE := pdserve router workers kv_transfer benchmarks
PYTEST := $(BIN)/python -m pytest -n $(JOBS) --no-loadscope-reorder

.PHONY: help install gpu-install ray-install run test test-all test-gpu test-tools test-programs lint format typecheck screenshots proto proto-check size \
	docs chart check bench clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(STAMP) ## make the environment in .venv, or bring it up to date
	@$(BIN)/python -c 'import kv_transfer._copy' 2>/dev/null \
		|| echo "KV is copied in Python: $(EXTENSIONS) is not built. With a C compiler: rm $(STAMP); make install"

gpu-install: ## the same for NVIDIA GPUs: vLLM with CUDA, on Linux x86_64 with Python 3.12
	@[ -e $(GPU) ] || [ ! -e $(VENV) ] || { echo "$(VENV) is an environment without CUDA;" \
		"name another folder: make gpu-install VENV=.venv-gpu" >&2; exit 1; }
	@mkdir -p $(VENV) && touch $(GPU)
	@$(MAKE) --no-print-directory install

ray-install: $(VENV)/ray ## add Ray, which `pdserve up --on ray` and its tests need

$(VENV)/ray $(VENV)/kubernetes: $(VENV)/%: requirements/%.lock | $(STAMP)
	@echo "installing what $< lists"
	@$(PIP) install -q --no-deps -r $< 2>$(PIP_LOG) || $(SHOW_PIP_LOG)
	@touch $@

run: $(STAMP) ## start one prefill worker, one decode worker and the router
	@exec $(BIN)/pdserve up $(ARGS)

test: check ## before every commit: lint, types, protos, and the tests that take minutes
	$(PYTEST) -m "not slow and not gpu" $(ARGS)

test-all: check ## every test: also soak, chaos, comparisons, resharding and upstream connectors
	$(PYTEST) -m "not gpu" --hypothesis-profile=deep $(ARGS)

# Installs nothing: a machine with a GPU may have no network, and a torch of its own. pytest exits
# with 5 if every file is skipped.
test-gpu: ## the tests that need a CUDA GPU, with VENV or else PYTHON; says why each is skipped
	@python=$(BIN)/python; [ -x $$python ] || python=$(PYTHON); \
		$$python -m pytest tests/gpu -rs $(ARGS) || [ $$? = 5 ]

test-tools: test-programs ray-install $(VENV)/kubernetes $(CLIENTS)/installed $(LOAD_CLIENTS)/installed tests/clients/node_modules ## what some tests use, and are skipped without

test-programs: ## part of test-tools, as root on Debian: its programs
	apt-get update -q
	apt-get install -q -y --no-install-recommends $(TOOLS)

$(CLIENTS)/installed $(LOAD_CLIENTS)/installed: .venv-%/installed: requirements/%.lock | $(STAMP)
	@$(BIN)/python -m venv --clear $(@D)
	@$(SEE_PROJECT)
	@$(@D)/bin/python -m pip --disable-pip-version-check install -q --no-deps -r $<
	@touch $@

$(LOAD_CLIENTS)/installed: SEE_PROJECT = packages() { $$1/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }; \
	packages $(VENV) > "$$(packages $(@D))/project.pth"

tests/clients/node_modules: tests/clients/package-lock.json
	@cd tests/clients && npm ci --no-audit --no-fund --ignore-scripts
	@touch $@

check: lint typecheck proto-check size ## everything that can be said without running the code

size: ## lines of code by package, without generated stubs
	@for package in $(CODE) examples deploy tests; do \
		git ls-files $$package | { grep -E '\.(py|c|h|js|mjs)$$' || true; } | { grep -v '^pdserve/v1/' || true; } \
			| xargs -r cat | awk -v name=$$package 'END {printf "  %-12s %6d lines\n", name, NR}'; \
	done

lint: $(STAMP) ## style and common mistakes
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(STAMP) ## put the code into the house's form
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

typecheck: $(STAMP) ## mypy, strict
	$(BIN)/mypy

proto: $(STAMP) ## generate pdserve/v1 from protos/
	@$(PROTOC) --python_out=. --grpc_python_out=. --pyi_out=. --mypy_grpc_out=quiet:. $(PROTOS)

proto-check: $(STAMP) ## prove that pdserve/v1 is what protos/ generates
	@fresh=$$(mktemp -d); trap 'rm -rf "$$fresh"' EXIT; \
	$(PROTOC) --python_out="$$fresh" --grpc_python_out="$$fresh" --pyi_out="$$fresh" \
		--mypy_grpc_out=quiet:"$$fresh" $(PROTOS); \
	diff -r -q --exclude=__init__.py --exclude=__pycache__ "$$fresh/pdserve/v1" pdserve/v1 \
		|| { echo "pdserve/v1 is not what protos/ generates: run make proto" >&2; exit 1; }

chart: $(STAMP) ## generate deploy/helm/pdserve from deploy/kubernetes/base, with kubectl
	$(BIN)/python deploy/helm/generate.py

docs: $(STAMP) ## generate docs/api.md, configuration.md, metrics.md and deploy/dashboards/
	$(BIN)/python -m pdserve.config
	$(BIN)/python -m pdserve.metrics
	$(BIN)/python -m router.api.reference
	$(BIN)/python deploy/dashboards/generate.py

screenshots: $(STAMP) ## take the pictures of docs/console.md, with chromium
	$(BIN)/python -m tests.screenshots

bench: $(STAMP) ## compare 1P1D with two aggregated workers on a shipped trace
	$(BIN)/pdserve bench compare --arms 1P1D,2A --trace chat --kv-cache-mib 512 $(ARGS)

clean: ## remove the environment and every cache
	rm -rf $(VENV) $(CLIENTS) $(LOAD_CLIENTS) tests/clients/node_modules build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	rm -f $(EXTENSIONS:.c=.*.so)
	find $(CODE) tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "$(PYTHON) is older than 3.11; name a newer one: make PYTHON=python3.12" >&2; exit 1; }
	@echo "making $(VENV)"
	@$(PYTHON) -m venv $(VENV) \
		|| { rm -rf $(VENV); echo "$(PYTHON) cannot make environments: install its venv module" >&2; exit 1; }

# torch comes first and by itself: the CPU build where the index has one, else the plain one. vLLM
# needs torchvision for multimodal models only; a build that does not fit torch breaks vLLM.
$(TORCH_STAMP): | $(BIN)/python
	@echo "installing torch $(TORCH)"
	@index=$${TORCH_INDEX:+--index-url $$TORCH_INDEX}; \
	$(PIP) install -q --no-deps $$index "torch==$(TORCH)+cpu" 2>$(PIP_LOG) \
		|| $(PIP) install -q $$index "torch==$(TORCH)" 2>>$(PIP_LOG) || $(SHOW_PIP_LOG); \
	build=$$($(BIN)/python -c 'from importlib.metadata import version as v; print("".join(v("torch").partition("+")[1:]))'); \
	$(PIP) install -q --no-deps $$index "torchvision==$(TORCHVISION)$$build" 2>$(PIP_LOG) \
		|| echo "no torchvision $(TORCHVISION)$$build at this index: multimodal models will be refused"
	@touch $@

$(STAMP): $(LOCK) pyproject.toml $(EXTENSIONS) $(HEADERS) \
		$(if $(wildcard $(GPU)),| $(BIN)/python,$(TORCH_STAMP))
	@echo "installing the packages of $(LOCK)"
	@$(PIP) install --no-deps -r $(LOCK) 2>$(PIP_LOG) | { \
		total=$$(grep -c '^[A-Za-z]' $(LOCK)); n=0; next=10; \
		while read -r line; do case "$$line" in \
			*"(from -r"*) n=$$((n + 1)); \
				if [ -t 1 ]; then printf '\r  %d of %d' $$n $$total; \
				elif (( SECONDS >= next )); then echo "  $$n of $$total"; next=$$((SECONDS + 10)); fi;; \
			Installing*) [ ! -t 1 ] || echo; echo "  unpacking $$n packages";; \
		esac; done; } || $(SHOW_PIP_LOG)
	@$(PIP) install -q --no-deps --no-build-isolation -e . 2>$(PIP_LOG) || $(SHOW_PIP_LOG)
	@touch $@
