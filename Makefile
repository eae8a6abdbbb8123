# SPDX-License-Identifier: Apache-2.0
# One command per job. A target first creates .venv with pinned versions if necessary. Only gpu and
# functional-gpu run the machine's own Python, or PYTHON, and install nothing; gpu-null and
# gpu-cache create build/nullcuda.
#
#   PYTHON=python3.12            interpreter to build .venv with (default: 3.11 or 3.12 if found), or to
#                                run gpu and functional-gpu (default: python3)
#   TORCH_VERSION=2.10.0         torch version instead of the pinned one
#   TORCH_INDEX=URL              additional package index for torch, e.g. for its CPU builds
#   TESTS="tests/unit_tests"     tests that make test runs    PYTEST_FLAGS="-x -k rope"   pytest options
#   TEST_JOBS=0                  test processes; default: three per two cores, at most 8
#   BENCH_FLAGS="--quick train"  selected benchmarks, see tools/bench/README.md
#   GPU_FLAGS="--stages tests decode"   some stages of the suite   GPU_FLAGS=--rehearse   tiny, on a CPU
#   GPU_FLAGS="--require-gpu --output results"   fail without a GPU; folder for results
#   GPU_COMPILE_FLAGS="--part 1/3"      one of three parts; --only attention: some kernels
#   NULL_FLAGS="--only steps"    parts of the run on the null CUDA device, see tools/nullcuda
#   GPUS=2                       number of GPUs that make functional-gpu requires; default: 1
#   BASE=main                    commit that diff-coverage compares with; default: origin/main
#   SOAK_FLAGS="--kills 20 --seed 7"    number of kills, and random seed

PYTHON ?=
TORCH_VERSION ?= 2.13.0
TORCH_INDEX ?=
TESTS ?= tests experimental
PYTEST_FLAGS ?= -q
# Three per two cores, as tests also wait for ranks, signals and files.
TEST_JOBS ?= $(shell expr $$(getconf _NPROCESSORS_ONLN) '*' 3 / 2)
PRETRAIN_FLAGS ?=
BENCH_FLAGS ?=
GPU_COMPILE_FLAGS ?=
NULL_FLAGS ?=
SOAK_FLAGS ?=
GPUS ?= 1
BASE ?= origin/main

# Timeout of a nightly test in seconds; tests of every change have 120 (pyproject.toml).
NIGHT_TIMEOUT := 600
# Most files run in one process, so that tests share module-scoped fixtures.
XDIST := -n $(TEST_JOBS) --maxprocesses 8 --dist worksteal
PY := .venv/bin/python
STAMP := .venv/.installed-torch-$(TORCH_VERSION)
CLIENTS := build/clients/bin/python
SOURCES := megatron_core megatron tests tools experimental

# Let subprocesses of tests use cached bytecode: otherwise each compiles the modules again.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help venv pretrain lint dead format test test-all clients te-newest status parity gpu functional-gpu gpu-compile gpu-null gpu-cache bench soak coverage diff-coverage

help: ## list the targets
	@echo "Targets (all but gpu and functional-gpu, which install nothing, set themselves up on a fresh"
	@echo "machine with Python 3.11 or 3.12):"
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | while IFS="$$(printf '\t')" read -r name what; \
		do printf '  make %-14s %s\n' "$$name" "$$what"; done
	@echo 'Variables, as in make gpu GPU_FLAGS="--require-gpu --output results":'
	@sed -n 's/^#   /  /p' Makefile

$(STAMP): constraints.txt pyproject.toml megatron_core/pyproject.toml tools/make_venv.sh
	@PYTHON='$(PYTHON)' TORCH_VERSION='$(TORCH_VERSION)' TORCH_INDEX='$(TORCH_INDEX)' \
		sh tools/make_venv.sh
	@touch $@

venv: $(STAMP) ## create .venv and install pinned versions

# TransformerEngine's Python, which tests run without a GPU.
.PHONY: te-wheels
te-wheels: $(STAMP)
	@$(PY) -m tests.support.te_wheel

te-newest: $(STAMP) te-wheels ## check TransformerEngine's newest release: its API, parity on a CPU
	@$(PY) -m tests.support.te_wheel --newest
	@echo "te-newest: pytest, every release in build/transformer-engine"
	@$(PY) -m pytest tests/unit_tests/core/extensions/test_te_contract.py \
		tests/unit_tests/core/extensions/test_gathered_tensors.py \
		tests/parity/test_transformer_engine.py::test_te_layouts_of_other_releases_train_like_local \
		tests/parity/test_te_quantization.py::test_recipes_of_other_releases_train_like_fp32 \
		--timeout $(NIGHT_TIMEOUT) -p tests.support.complete $(PYTEST_FLAGS) -m "not gpu"

pretrain: $(STAMP) ## pretrain a small GPT on real text, resume it, sample from it
	@$(PY) -m megatron.training.quickstart $(PRETRAIN_FLAGS)

lint: $(STAMP) ## ruff, house style, language, import order and types
	@status=0; \
	echo "lint: ruff check";  $(PY) -m ruff check --output-format concise $(SOURCES) || status=1; \
	echo "lint: ruff format"; $(PY) -m ruff format --check -q $(SOURCES) || status=1; \
	echo "lint: house style"; $(PY) tools/style_check.py || status=1; \
	echo "lint: language"; $(PY) -m tools.language --quiet || status=1; \
	echo "lint: import order"; .venv/bin/lint-imports --no-cache || status=1; \
	echo "lint: types"; .venv/bin/basedpyright --level error || status=1; \
	exit $$status

dead: $(STAMP) ## list unreachable code in the wheels: modules, functions, classes, methods
	@$(PY) tools/dead_code.py

format: $(STAMP) ## format, and apply the automatic fixes of ruff
	@$(PY) -m ruff format $(SOURCES)
	@$(PY) -m ruff check --fix $(SOURCES)

test: $(STAMP) te-wheels ## run the tests of every change
	@echo "test: pytest $(TESTS), without those marked slow or gpu"
	@$(PY) -m pytest $(TESTS) $(XDIST) $(PYTEST_FLAGS) -m "not slow and not gpu"

test-all: $(STAMP) te-wheels ## run the nightly tests, slow ones included
	@echo "test-all: pytest $(TESTS), without those marked gpu"
	@$(PY) -m pytest $(TESTS) --timeout $(NIGHT_TIMEOUT) $(PYTEST_FLAGS) -m "not gpu"

# An environment over .venv, so that no client replaces a pinned package.
build/clients/.installed: tests/clients/requirements.txt $(STAMP)
	@echo "clients: installing $$(grep -c == $<) packages in build/clients"
	@$(PY) -m venv --clear --without-pip build/clients
	@site='import sysconfig; print(sysconfig.get_path("purelib"))'; \
		echo "import site; site.addsitedir('$$($(PY) -c "$$site")')" \
			> "$$($(CLIENTS) -c "$$site")/base.pth"
	@$(PY) -m pip --python $(CLIENTS) install -q --disable-pip-version-check --no-deps -r $<
	@touch $@

clients: build/clients/.installed ## run the programs of other projects' clients against the server
	@echo "clients: pytest tests/clients"
	@$(CLIENTS) -m pytest tests/clients --timeout $(NIGHT_TIMEOUT) -W default $(PYTEST_FLAGS)

status: $(STAMP) te-wheels ## write docs/status.md from the results of all tests, nightly ones included
	@echo "status: pytest $(TESTS), those that say what they cover; docs/status.md"
	@status=0; \
	$(PY) -m pytest $(TESTS) $(PYTEST_FLAGS) -m "covers and not gpu" \
		--status-out build/status.json || status=1; \
	$(PY) -m tools.write_status build/status.json || status=1; \
	exit $$status

parity: $(STAMP) te-wheels ## compare every parallel layout with a single process, slow tests included
	@echo "parity: pytest tests/parity"
	@$(PY) -m pytest tests/parity --timeout $(NIGHT_TIMEOUT) $(PYTEST_FLAGS) -m "not gpu"

gpu: ## run GPU tests, kernels, decode and training with the machine's own Python, in 9 minutes
	@$(or $(PYTHON),python3) -m tools.gpu $(GPU_FLAGS)

gpu-compile: $(STAMP) ## compile every kernel for GPUs, without a GPU, with each Triton and ptxas; check its code
	@$(PY) -m tools.gpu_compile $(GPU_COMPILE_FLAGS)

# Both make an environment of their own, with torch's CUDA wheel, in build/nullcuda.
gpu-null: ## run GPU tests, benchmarks and measured steps on a CUDA device that computes nothing; no GPU needed
	@NULLCUDA_PYTHON='$(PYTHON)' $(or $(PYTHON),python3) -m tools.nullcuda $(NULL_FLAGS)

gpu-cache: ## compile Triton kernels for sm_90 into build/nullcuda/triton-cache.tar.xz; no GPU needed
	@NULLCUDA_PYTHON='$(PYTHON)' $(or $(PYTHON),python3) -m tools.nullcuda \
		--cache build/nullcuda/triton-cache.tar.xz $(NULL_FLAGS)

functional-gpu: ## test whole runs and parity with the machine's own Python, one GPU per rank; GPUS=2 requires two
	@echo "functional-gpu: pytest --device cuda, tests marked gpus"
	@$(or $(PYTHON),python3) -m pytest tests/functional_tests tests/parity --device cuda --gpus $(GPUS) \
		--timeout $(NIGHT_TIMEOUT) $(PYTEST_FLAGS) -m "not slow"

bench: $(STAMP) ## run every benchmark and print one table
	@$(PY) -m tools.bench $(BENCH_FLAGS)

soak: $(STAMP) ## kill a small run 200 times at random; check that nothing is lost or different
	@$(PY) -m tools.soak $(SOAK_FLAGS)

coverage: $(STAMP) te-wheels ## measure line and branch coverage of make test per package, in build/coverage
	@$(PY) -m coverage erase
	@$(PY) -m coverage run --branch -m pytest $(TESTS) $(XDIST) $(PYTEST_FLAGS) -m "not slow and not gpu"
	@$(PY) -m coverage combine -q
	@$(PY) -m coverage html -q -d build/coverage/html
	@$(PY) -m coverage json -q -o build/coverage/coverage.json
	@$(PY) -m tools.coverage_report build/coverage/coverage.json | tee build/coverage/packages.md

# sys.monitoring costs little, and counts lines only before Python 3.14.
diff-coverage: $(STAMP) te-wheels ## fail if make test covers less than 80 % of the lines changed since BASE
	@$(PY) -c 'import sys; sys.exit(sys.version_info < (3, 12) and "diff-coverage: needs Python 3.12: make venv PYTHON=python3.12")'
	@$(PY) -m coverage erase
	@COVERAGE_CORE=sysmon $(PY) -m coverage run -m pytest $(TESTS) $(XDIST) $(PYTEST_FLAGS) \
		--timeout $(NIGHT_TIMEOUT) -m "not slow and not gpu"
	@$(PY) -m coverage combine -q && $(PY) -m coverage xml -q -o build/coverage/coverage.xml
	@.venv/bin/diff-cover build/coverage/coverage.xml --compare-branch $(BASE) --fail-under 80
