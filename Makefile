# `make` without a target prints the targets. Every target first creates .venv if it is missing.

BIN := .venv/bin
PYTHON ?=
export PYTHON

.DEFAULT_GOAL := help
# Published trainers and agents whose pins exclude each other's: an environment, a lock and a directory of tests for each.
TRAINERS := verl skyrl nemo gateways agents
.PHONY: help setup demo test test-prove test-trainers test-trainers-all $(TRAINERS:%=test-%) test-deploy test-vllm-next vllm-contract soak elastic check quick docs format lock clean

help:
	@echo "make demo    run the tour: a tiny MoE on a real engine over NATS, on this machine"
	@echo "make test    run the whole test suite; ARGS='-k name' passes arguments to pytest"
	@echo "make test-trainers    test TRL, verifiers and Megatron, unchanged, in a separate environment, and long runs of examples"
	@echo "make test-trainers-all    also $(TRAINERS:%=test-%), each in an environment of its own"
	@echo "make test-prove       prove sound and faulty models of five families on a real vLLM, in ten minutes"
	@echo "make test-deploy      run all tests of Ray, and those of the Helm chart with Helm itself, which it installs into .make"
	@echo "make test-vllm-next   run the tests of the engine with a newer vLLM, in a separate environment"
	@echo "make vllm-contract   check that each vLLM release has the names that the worker uses (downloads 2 GB once)"
	@echo "make elastic ten minutes of load while workers join, leave, are killed and restarted"
	@echo "make soak    ten minutes of load on three servers while everything is killed; fails if memory or the store grows"
	@echo "make check   check lint, format, types, import rules and the budget of lines"
	@echo "make quick   lint, types and unit tests of files that differ from HEAD, in seconds; BASE=main: another commit"
	@echo "make docs    build the site with the API reference in site/; fails at broken links and undocumented public names"
	@echo "make format  format files and sort imports with ruff"
	@echo "make lock    resolve requirements-cpu.lock and the locks in .ci again from pyproject.toml"
	@echo "make clean   remove .venv and all other files that make and the tools wrote"
	@echo "Needs Python 3.11 (or PYTHON=/path/to/python3.11), pip and make. The first run creates .venv."

setup: .venv/ready
	@:

.venv/ready: requirements-cpu.lock pyproject.toml src/rollbus/__init__.py .ci/venv
	@.ci/venv

demo: setup
	@$(BIN)/rollbus demo

test: setup
	@.ci/test $(ARGS)

test-prove: setup
	@OMP_NUM_THREADS=1 ROLLBUS_TEST_PROVE=1 $(BIN)/pytest -n 2 $(or $(ARGS),tests/prove/test_families.py tests/prove/test_real_stages.py)
	@$(if $(ARGS),:,.ci/unchanged test-prove --record)

test-deploy: setup
	@.ci/deploy-packages
	@OMP_NUM_THREADS=1 ROLLBUS_TEST_DEPLOY=1 $(BIN)/pytest $(or $(ARGS),tests/deploy tests/ray)
	@$(if $(ARGS),:,.ci/unchanged test-deploy --record)

# The environment of trainers has the client but no engine. Packages of the same version, such as torch, are links to .venv.
.venv-trainers/ready: .ci/requirements-trainers.lock pyproject.toml src/rollbus/__init__.py .ci/venv .ci/link_packages.py | .venv/ready
	@.ci/venv .venv-trainers .ci/requirements-trainers.lock "msgspec, nats, torch, trl, verifiers" .venv

test-trainers: setup .venv-trainers/ready
	@OMP_NUM_THREADS=1 ROLLBUS_TEST_TRAINERS=trainers $(BIN)/pytest -n 2 --dist loadfile $(or $(ARGS),tests/integrations/test_*.py tests/examples tests/trainer/test_replay_compiled.py)
	@$(if $(ARGS),:,.ci/unchanged test-trainers --record)

test-trainers-all: test-trainers $(TRAINERS:%=test-%)

# Verifiers needs an older client of OpenAI than the other agents.
test-agents: .venv-trainers/ready

# SkyRL asks for Python 3.12. Its files run on 3.11, the only Python for which PyPI's packages have a torch without CUDA.
.venv-skyrl/ready: export PIP_IGNORE_REQUIRES_PYTHON := 1

$(TRAINERS:%=.venv-%/ready): .venv-%/ready: .ci/requirements-%.lock pyproject.toml src/rollbus/__init__.py .ci/venv .ci/link_packages.py | .venv/ready
	@.ci/venv .venv-$* .ci/requirements-$*.lock "msgspec, nats" .venv

$(TRAINERS:%=test-%): test-%: setup .venv-%/ready
	@OMP_NUM_THREADS=1 ROLLBUS_TEST_TRAINERS=$* $(BIN)/pytest -n 0 $(or $(ARGS),tests/integrations/$*)
	@$(if $(ARGS),:,.ci/unchanged test-$* --record)

.venv-next/ready: .ci/requirements-next.lock pyproject.toml src/rollbus/__init__.py .ci/venv
	@.ci/venv .venv-next .ci/requirements-next.lock

# This leaves out the test of the bench that compares rollbus with the HTTP server of vLLM 0.30.
test-vllm-next: .venv-next/ready
	@.venv-next/bin/pytest $(or $(ARGS),tests/engine --ignore=tests/engine/test_transport_bench.py)

vllm-contract: setup
	@PYTHONPATH=. $(BIN)/python .ci/vllm_contract.py
	@$(BIN)/pytest tests/engine/test_unpacked_releases.py

soak: setup
	@$(BIN)/python -m tests.soak $(ARGS)

elastic: setup
	@$(BIN)/python -m tests.elastic $(ARGS)

check: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/python .ci/size

quick: setup
	@.ci/quick $(or $(BASE),HEAD)

# mkdocs is strict: each warning is an error, but not with `--quiet`, which hides warnings from the count.
# NO_MKDOCS_2_WARNING hides a notice about a later mkdocs.
docs: setup
	@mkdir -p .make
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build > .make/docs.log 2>&1 || { grep -v ^INFO .make/docs.log; exit 1; }
	@echo "The site is in site/: open site/index.html"

format: setup
	$(BIN)/ruff check --fix --select I
	$(BIN)/ruff format

lock:
	@$(or $(PYTHON),python3.11) .ci/lock.py

clean:
	rm -rf .venv .venv-next .venv-trainers $(TRAINERS:%=.venv-%) site .make .rollbus .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
