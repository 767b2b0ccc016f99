# Every target makes its own environment from a bare Python >= 3.11; see `make help`.
PYTHON ?= $(shell for p in python3.11 python3 python; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
VENV ?= .venv
ARGS ?=

RUN := $(VENV)/bin/python -m

# Workers of pytest share the cores, so NumPy's BLAS starts no threads of its own in each, and
# they share bytecode, also where the environment says not to write any.
export OPENBLAS_NUM_THREADS ?= 1
export PYTHONDONTWRITEBYTECODE :=

.DELETE_ON_ERROR:
.PHONY: help test test-examples test-extended test-all test-optimized test-oldest clients test-gpu coverage covered mutants faults lint format docs linkcheck bench bench-gpu bench-tpu demo \
	demo-moe demo-vision track0 dist release clean

help: ## Show this list.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo "Variables: PYTHON=$(PYTHON) VENV=$(VENV) ARGS=\"$(ARGS)\""

$(VENV)/pyvenv.cfg:
	@test -n "$(PYTHON)" || { echo "No Python >= 3.11 (make clients: 3.12) found: make PYTHON=/path/to/python"; exit 1; }
	@echo "Creating $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV)

# The stamp's name holds the extras that it stands for: $(VENV)/.has-examples,test
$(VENV)/.has-%: pyproject.toml constraints.txt | $(VENV)/pyvenv.cfg
	@echo "Installing orscale-jax[$*] into $(VENV)"
	@$(RUN) pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[$*]'
	@touch $@

PYTEST := $(RUN) pytest -n 2 --dist worksteal
QUICK := not extended and not slow and not client
# They have no such test, and what they import takes seconds.
IMPORTING := tests/clients $(addprefix tests/examples/,benchmarks pretrain vision)

test: $(VENV)/.has-examples,test ## Run the quick tests of the package, and see that the programs start.
	$(PYTEST) -m "$(QUICK) and not examples" $(IMPORTING:%=--ignore=%) $(ARGS)

test-examples: $(VENV)/.has-examples,test ## Run the quick tests of the programs in examples/.
	$(PYTEST) -m "$(QUICK)" tests/examples $(ARGS)

test-extended: $(VENV)/.has-examples,test ## Run the extended tests.
	$(PYTEST) -m "extended and not slow and not client" $(ARGS)

test-all: $(VENV)/.has-examples,test ## Run all tests.
	$(PYTEST) -m "not client" $(ARGS)

# What a compiler's optimizations can change.
NUMERIC_TESTS := tests/newton_schulz tests/transforms tests/distributed tests/test_optimizers.py \
	tests/test_family.py

test-optimized: $(VENV)/.has-examples,test ## Run the quick numeric tests with all of XLA's optimizations.
	XLA_FLAGS= $(PYTEST) -m "$(QUICK)" $(NUMERIC_TESTS) $(ARGS)

# Of the versions that pyproject.toml promises, the oldest, on what touches them.
OLDEST := jax==0.10.0 jaxlib==0.10.0 optax==0.2.8
OLDEST_TESTS := tests/test_optimizers.py tests/test_checkpoints.py tests/transforms/test_stages.py \
	tests/trees tests/sharding/test_param_shardings.py tests/flax/test_annotations.py

test-oldest: ## Run the tests that touch JAX and Optax most, on their oldest versions.
	@$(MAKE) --no-print-directory VENV=.venv-oldest .venv-oldest/.has-examples,test
	.venv-oldest/bin/python -m pip install --quiet --disable-pip-version-check $(OLDEST)
	.venv-oldest/bin/python -m pytest -n 2 -m "$(QUICK)" $(OLDEST_TESTS) $(ARGS)

# Environments of their own, since levanter and marin-levanter install the same modules. The extra
# `haliax` would do the same to marin-haliax, so it belongs into neither.
CLIENTS := jax==0.10.2 jaxlib==0.10.2 optax==0.2.8 haliax==1.4.dev453 keras==3.15.1 \
	numpyro==0.22.0 ray==2.60.0 # Spares pip a search.
# It pins Optax below 0.2.7, whose schedules of weight decay do not advance (and 0.2.7 fails to
# import with JAX 0.10).
MARIN := chex hypothesis 'pytest>=9' marin-levanter==0.2.227.dev40316220070
# They need a newer Flax than Python 3.11 has.
TUNIX := chex hypothesis 'pytest>=9' google-tunix==0.1.7
GEMMA := chex hypothesis 'pytest>=9' gemma==4.0.1 kauldron==1.4.4
CLIENT_TESTS = -m pytest -m client -W ignore tests/clients $(ARGS)
install = $(if $(shell command -v uv),uv pip install -q --python $(1)/bin/python,$(1)/bin/python -m pip \
	install --quiet --disable-pip-version-check)
# marin-levanter needs 3.12. A name on the PATH may be a shim of pyenv that does not run.
NEWER_PYTHON ?= $(shell for v in 13 12; do for p in python3.$$v "$$(pyenv prefix 3.$$v 2>/dev/null)/bin/python"; do \
	"$$p" -c '' 2>/dev/null && echo "$$p" && exit; done; done)

clients: ## Train with other people's trainers, as they are; takes minutes to install without uv.
	@$(MAKE) --no-print-directory VENV=.venv-clients .venv-clients/pyvenv.cfg
	$(call install,.venv-clients) -e '.[clients]' $(CLIENTS)
	.venv-clients/bin/python $(CLIENT_TESTS)
	@$(MAKE) --no-print-directory VENV=.venv-marin PYTHON='$(NEWER_PYTHON)' .venv-marin/pyvenv.cfg
	$(call install,.venv-marin) $(MARIN)
	$(call install,.venv-marin) 'optax>=0.2.8' -e .
	.venv-marin/bin/python $(CLIENT_TESTS)
	@$(MAKE) --no-print-directory VENV=.venv-tunix PYTHON='$(NEWER_PYTHON)' .venv-tunix/pyvenv.cfg
	$(call install,.venv-tunix) $(TUNIX) -e .
	.venv-tunix/bin/python $(CLIENT_TESTS)
	@$(MAKE) --no-print-directory VENV=.venv-gemma PYTHON='$(NEWER_PYTHON)' .venv-gemma/pyvenv.cfg
	$(call install,.venv-gemma) $(GEMMA) -e .
	.venv-gemma/bin/python $(CLIENT_TESTS)

test-gpu: ## Count the kernels of steps compiled for a GPU, which it needs none of.
	@$(MAKE) --no-print-directory VENV=.venv-gpu .venv-gpu/.has-examples,gpu,test
	.venv-gpu/bin/python -m pytest tests/examples/benchmarks/test_gpu_kernels.py $(ARGS)

coverage: ## Run the quick, the examples' and the extended tests; require 97 % of branches.
	rm -f .coverage
	$(MAKE) --no-print-directory test test-examples test-extended \
		ARGS="--cov=orscale_jax --cov-branch --cov-append --cov-report= $(ARGS)"
	@$(MAKE) --no-print-directory covered

covered: ## List the branches that the tests so far have left out; require 97 % of them.
	$(RUN) coverage report --show-missing --skip-covered --fail-under=97

mutants: $(VENV)/.has-examples,test ## Break the numeric code, one expression at a time; tests must notice.
	$(RUN) tests.mutants $(ARGS)

faults: $(VENV)/.has-examples,test ## Kill, starve and damage runs of the training program; words in ARGS choose.
	$(RUN) tests.faults $(ARGS)

lint: $(VENV)/.has-examples,lint ## Check style, formatting, spelling and types.
	$(RUN) ruff check
	$(RUN) ruff format --check
	$(RUN) codespell_lib
	$(RUN) mypy

format: $(VENV)/.has-examples,lint ## Mend style and formatting.
	$(RUN) ruff check --fix-only
	$(RUN) ruff format

docs: $(VENV)/.has-docs ## Build the site into docs/_build/html; warnings are errors.
	$(RUN) sphinx -W -n --keep-going -q -b html docs docs/_build/html

linkcheck: $(VENV)/.has-docs ## Follow the links of the site to other sites, which needs the network.
	$(RUN) sphinx -q -b linkcheck docs docs/_build/linkcheck

bench: $(VENV)/.has-examples ## Time a step against its peers; pass options in ARGS.
	$(RUN) examples.benchmarks.step $(ARGS)

# An environment of its own: with its TPU plugin, JAX looks for TPUs in every program.
bench-tpu: ## Compile a step for TPUs, which it needs none of; pass options in ARGS.
	@$(MAKE) --no-print-directory VENV=.venv-tpu .venv-tpu/.has-examples,tpu
	.venv-tpu/bin/python -m examples.benchmarks.ahead_of_time $(ARGS)

bench-gpu: ## Compile a step for GPUs, which it needs none of; pass options in ARGS.
	@$(MAKE) --no-print-directory VENV=.venv-gpu .venv-gpu/.has-examples,gpu
	.venv-gpu/bin/python -m examples.benchmarks.ahead_of_time --platform gpu $(ARGS)

demo: $(VENV)/.has-examples ## Train a small decoder with AdamW, Muon and OrScale; options in ARGS.
	$(RUN) examples.pretrain --recipe demo --sample "def update(" $(ARGS)

demo-moe: $(VENV)/.has-examples ## The same with a small mixture of experts.
	$(RUN) examples.pretrain --recipe demo-moe $(ARGS)

demo-vision: $(VENV)/.has-examples ## The same with a small DavidNet on drawings.
	$(RUN) examples.pretrain --recipe demo-vision $(ARGS)

track0: $(VENV)/.has-examples ## Try the leaderboard of optimizers: one text, 300 steps.
	$(RUN) examples.track0 orscale_jax.family:normuon --smoke $(ARGS)

dist: $(VENV)/.has-dist ## Build the source distribution, and from it the wheel, into dist/.
	rm -rf dist
	$(RUN) build

release: test-all $(VENV)/.has-dist,docs ## Run all tests, check what a release needs, build it, and print what is left to do.
	$(RUN) tests.release

clean: ## Remove what the targets made, except environments and runs.
	rm -rf .coverage build dist docs/_build .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find orscale_jax examples tests docs -name __pycache__ -prune -exec rm -rf {} +
