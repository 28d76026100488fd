# Every command of the project; `make` alone prints them.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
MAKEFLAGS += --no-builtin-rules --no-print-directory
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

# What a user may set on the command line. INVENTORIES: the folder with one inventory a cluster.
INVENTORIES ?= $(CURDIR)/ansible/inventories
CLUSTER ?=
K ?=
N ?=
REV ?=
NEW ?=
FROM ?=
SET ?=
PYTHON ?= python3.11
# An extra package index for torch's CPU build (torch==2.13.0+cpu is not on PyPI). Empty: pip as it is configured.
TORCH_INDEX ?=
# Extra arguments: ARGS for ansible-playbook and the load test, PYTEST_ARGS for pytest.
ARGS ?=
PYTEST_ARGS ?=

ROOT := $(CURDIR)
VENV := .venv
LOCAL := .local
BIN := $(ROOT)/$(VENV)/bin
ENGINE_PYTHON := $(ROOT)/$(LOCAL)/engine/bin/python
CONFORMANCE_PYTHON := $(ROOT)/$(LOCAL)/conformance/bin/python
CLUSTERS := $(notdir $(patsubst %/,%,$(wildcard $(INVENTORIES)/*/)))
DEPLOYED = $(notdir $(patsubst %/,%,$(wildcard $(LOCAL)/clusters/*/)))

# Everything that runs keeps its files inside the repository: temporary files, caches, Ansible's own folders.
export TMPDIR := $(ROOT)/$(LOCAL)/tmp
# libnuma, which vLLM's extension needs, where the machine lacks it.
export LD_LIBRARY_PATH := $(ROOT)/$(LOCAL)/deb/usr/lib/x86_64-linux-gnu
# Ansible refuses to start in a locale that the machine has not generated.
export LC_ALL := C.UTF-8
export XDG_CACHE_HOME := $(ROOT)/$(LOCAL)/cache
export ANSIBLE_CONFIG := $(ROOT)/ansible/ansible.cfg
export ANSIBLE_HOME := $(ROOT)/$(LOCAL)/ansible
export HF_HOME := $(ROOT)/$(LOCAL)/cache/huggingface
export MPLCONFIGDIR := $(ROOT)/$(LOCAL)/cache/matplotlib
# pip's cache stays the user's own: it is what makes a second clone fast.
USER_CACHE := $(or $(shell printenv PIP_CACHE_DIR),$(shell printenv XDG_CACHE_HOME | sed 's,$$,/pip,'),$(HOME)/.cache/pip)
export PIP_CACHE_DIR := $(USER_CACHE)
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export TORCH_INDEX

say = printf '\033[1m==> %s\033[0m\n' $(1)
fail = { printf 'error: %s\n' $(1) >&2; exit 2; }
with-k = $(if $(K),--k $(K))
playbook = cd ansible && $(BIN)/ansible-playbook -i $(INVENTORIES)/$(CLUSTER)

##@ Start here

.PHONY: help
help: ## this text
	@awk 'BEGIN {FS = ":.*## "; printf "Usage: make TARGET [CLUSTER=name] [K=n]\n"} \
	  /^##@ / {printf "\n%s\n", substr($$0, 5)} \
	  /^[a-zA-Z0-9_-]+:.*## / {printf "  %-14s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))
	@printf '\nClusters: %s. A first run: make deploy CLUSTER=local\n' "$(CLUSTERS)"

.PHONY: deploy
deploy: need-cluster no-k venv ## CLUSTER=name: install, start and prove the cluster (run again: only what changed)
	@$(call say,'deploy $(CLUSTER)')
	@$(BIN)/mtpctl check $(CLUSTER) --inventories $(INVENTORIES)
	@$(playbook) site.yml $(ARGS)

.PHONY: status
status: some-venv ## [CLUSTER=name]: processes, health, MTP state
	@$(BIN)/mtpctl status $(or $(CLUSTER),$(DEPLOYED))

.PHONY: validate
validate: one-deployed venv ## [CLUSTER= USERS= REQUESTS= DURATION=]: load test through the router, with a report
	@$(BIN)/python -m loadtests.validate --cluster $(or $(CLUSTER),$(DEPLOYED)) $(if $(USERS),--users $(USERS)) \
	  $(if $(REQUESTS),--requests $(REQUESTS)) $(if $(DURATION),--duration $(DURATION)) $(ARGS)

.PHONY: mtp
mtp: need-cluster need-k venv ## CLUSTER=name K=0..15: turn MTP off (0) or set K, restart what changed, canary
	@$(BIN)/mtpctl check $(CLUSTER) --k $(K) --inventories $(INVENTORIES)
	@# Writes K into mtp.yml once every check has passed, before the first change on a host.
	@$(playbook) site.yml -e mtp_k=$(K) $(ARGS)

.PHONY: active-k
active-k: one-deployed some-venv ## [CLUSTER=name] [N=0..K]: show or set the drafts of a step in the running engines, no restart
	@$(BIN)/mtpctl active-k $(or $(CLUSTER),$(DEPLOYED)) $(N)

.PHONY: logs
logs: one-deployed some-venv ## [CLUSTER=name]: the last lines of every log
	@$(BIN)/mtpctl logs $(or $(CLUSTER),$(DEPLOYED))

.PHONY: destroy
destroy: need-cluster some-venv ## CLUSTER=name: stop it and remove its state (installed software stays in .local)
	@$(call say,'destroy $(CLUSTER)')
	@$(playbook) destroy.yml $(ARGS)

##@ Change an inventory

.PHONY: init
init: venv ## NEW=name FROM=name: a new inventory from another one, and what to edit in it
	@[ -n '$(NEW)' ] && [ -n '$(FROM)' ] || $(call fail,'which ones? Add NEW=name FROM=name; there are: $(CLUSTERS)')
	@$(BIN)/mtpctl init '$(NEW)' --from '$(FROM)' --inventories $(INVENTORIES)

.PHONY: set
set: need-cluster no-k venv ## CLUSTER=name SET='key=value ...': change keys when the result breaks no rule
	@[ -n '$(SET)' ] || $(call fail,'which keys? Add SET=mtp.padding=slack; docs/configuration.md lists them')
	@$(BIN)/mtpctl set $(CLUSTER) --inventories $(INVENTORIES) -- $(SET)

##@ Look before you start (touches nothing; K=n: as if mtp.yml had it)

.PHONY: check
check: need-cluster venv ## CLUSTER=name [K=n]: is the inventory right?
	@$(BIN)/mtpctl check $(CLUSTER) --inventories $(INVENTORIES) $(with-k)

.PHONY: render
render: need-cluster venv ## CLUSTER=name [K=n] [ARGS=--explain]: environment and command line of every rank; or where derived values come from
	@$(BIN)/mtpctl render $(CLUSTER) --inventories $(INVENTORIES) $(with-k) $(ARGS)

.PHONY: diff
diff: need-cluster no-k venv ## CLUSTER=name [REV=HEAD] [ARGS=--deployed]: what the files as they are now would change
	@$(BIN)/mtpctl diff $(CLUSTER) $(REV) --inventories $(INVENTORIES) $(ARGS)

.PHONY: offline
offline: need-cluster venv ## CLUSTER=name [K=n] [ARGS='--rank NAME']: the same configuration as a Python program without a server
	@$(BIN)/mtpctl offline $(CLUSTER) --inventories $(INVENTORIES) $(with-k) $(ARGS)

.PHONY: plan
plan: need-cluster no-k venv ## CLUSTER=name: what would deploy change? (Ansible's check mode)
	@$(playbook) site.yml --check --diff $(ARGS)

.PHONY: canary
canary: one-deployed some-venv ## [CLUSTER=name]: one completion through the router, with proof that MTP took part
	@$(BIN)/mtpctl canary $(or $(CLUSTER),$(DEPLOYED))

##@ Tests and measurements

.PHONY: test
test: lint test-unit test-engine test-live ## everything

.PHONY: lint
lint: venv ## ruff, mypy, yamllint, ansible-lint
	@$(call say,'lint')
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/yamllint -s .
	@cd ansible && PATH=$(BIN):$$PATH $(BIN)/ansible-lint -q -c ../.ansible-lint

# Unit tests that need torch; the others run in the control environment.
UNIT_ENGINE := $(wildcard $(addprefix tests/unit/,adapters attention drafting model static_graphs verify))
# Those of the Triton kernels, on Triton's interpreter; the engine environment has no Triton.
UNIT_TRITON := tests/unit/triton
TRITON := $(ROOT)/$(LOCAL)/triton

.PHONY: test-unit
test-unit: venv engine triton ## tests that start no server (torch parts run in the engine environment)
	@$(call say,'unit tests (control environment)')
	@# Outside the repository and removed again: messages shorten paths inside it, the tests compare whole ones.
	@folder=$$(mktemp -d /tmp/mtp-unit.XXXXXX); trap 'rm -rf '$$folder EXIT; TMPDIR=$$folder \
	  $(BIN)/python -m pytest $(filter-out $(UNIT_ENGINE) $(UNIT_TRITON),$(wildcard tests/unit/*)) -m 'not live' $(PYTEST_ARGS)
	@$(call say,'unit tests (engine environment)')
	@$(ENGINE_PYTHON) -m pytest $(UNIT_ENGINE) $(PYTEST_ARGS)
	@$(call say,'unit tests (Triton kernels)')
	@TRITON_INTERPRET=1 PYTHONPATH=$(TRITON) $(ENGINE_PYTHON) -m pytest $(UNIT_TRITON) $(PYTEST_ARGS)

.PHONY: fuzz
fuzz: ## unit tests with new random examples (those of make test are always the same)
	@$(MAKE) test-unit PYTEST_ARGS="--hypothesis-profile=default $(PYTEST_ARGS)"

.PHONY: triton
triton: engine
	@cmp -s requirements/triton.txt $(TRITON)/.stamp || { $(call say,'Triton for its tests: $(LOCAL)/triton'); rm -rf $(TRITON); \
	  $(ENGINE_PYTHON) -m pip install -qq --no-deps --require-hashes --target $(TRITON) -r requirements/triton.txt; \
	  cp requirements/triton.txt $(TRITON)/.stamp; }

.PHONY: test-engine
test-engine: engine ## tests with vLLM in one process
	@$(call say,'engine tests')
	@$(ENGINE_PYTHON) -m pytest tests/engine $(PYTEST_ARGS)

.PHONY: test-full
test-full: engine ## the combinations of modes and K that test-engine leaves out (it takes all pairs)
	@$(call say,'engine tests: the full matrix')
	@$(ENGINE_PYTHON) -m pytest tests/engine -m full $(PYTEST_ARGS)

.PHONY: test-conformance
test-conformance: conformance engine ## the Ascend adapter against the real vllm-ascend and torch_npu, without an NPU
	@$(call say,'conformance tests')
	@# vllm-ascend writes its logs below the home folder, whatever it is told.
	@mkdir -p $(LOCAL)/tmp/home; HOME=$(ROOT)/$(LOCAL)/tmp/home $(CONFORMANCE_PYTHON) -m pytest tests/conformance $(PYTEST_ARGS)

.PHONY: test-live
test-live: venv ## tests on a running stack (deploys CLUSTER=local, destroys it)
	@$(call say,'live tests')
	@$(BIN)/python -m pytest tests/monitoring tests/deploy -m live $(PYTEST_ARGS)

.PHONY: bench bench-core bench-attention bench-engine bench-acceptance bench-ascend
bench: bench-core bench-attention bench-engine bench-acceptance bench-ascend ## all benchmarks
bench-core: engine ## verification, planning, padding and rendering, without an engine
	@$(ENGINE_PYTHON) -m loadtests.bench_core $(ARGS)
	@$(BIN)/python -m loadtests.bench_render
bench-attention: engine ## decode attention: three ways to verify K + 1 tokens, without an engine
	@$(ENGINE_PYTHON) -m loadtests.bench_attention $(ARGS)
bench-engine: engine ## [ARGS='--part cost modes load active-k']: step cost and TPOT with and without MTP, with verdicts
	@$(ENGINE_PYTHON) -m loadtests.bench_engine $(ARGS)
bench-ascend: conformance ## verification inside vllm-ascend: ours against the package's own functions
	@mkdir -p $(LOCAL)/tmp/home; HOME=$(ROOT)/$(LOCAL)/tmp/home OMP_NUM_THREADS=1 $(CONFORMANCE_PYTHON) -m loadtests.bench_ascend_sampler $(ARGS)
bench-acceptance: engine ## how many drafts each verification accepts on the shipped model
	@$(ENGINE_PYTHON) -m loadtests.bench_acceptance $(ARGS)

##@ Build

.PHONY: model
model: engine ## train the tiny model again and measure it (resumable)
	@$(ENGINE_PYTHON) -m mtp_runtime.model train $(ARGS)
	@$(ENGINE_PYTHON) -m mtp_runtime.model quality --report docs/model.md

.PHONY: dashboards
dashboards: venv ## generate the Grafana dashboard
	@$(BIN)/python -m dashboards.build

.PHONY: docs
docs: venv ## generate docs/configuration.md, docs/rules.md and the schemas for editors
	@$(BIN)/mtpctl keys --markdown > $(TMPDIR)/keys.md && mv $(TMPDIR)/keys.md docs/configuration.md
	@$(BIN)/mtpctl rules --markdown > $(TMPDIR)/rules.md && mv $(TMPDIR)/rules.md docs/rules.md
	@$(BIN)/mtpctl schema --write

.PHONY: lock
lock: venv ## write requirements/*.txt from *.in
	@$(BIN)/python requirements/lock.py control
	@$(BIN)/python requirements/lock.py engine-cpu --skip torchvision torchaudio torchcodec triton --no-deps nixl nixl-cu12
	@$(BIN)/python requirements/lock.py triton

.PHONY: venv some-venv
venv: ## the control environment (.venv)
	@# The Python that was named, else the one that .venv was made with, else python3.11.
	@python='$(PYTHON)'; \
	  if [ '$(origin PYTHON)' = file ] && $(VENV)/bin/python -c '' 2>/dev/null; then python=$(VENV)/bin/python; fi; \
	  command -v "$$python" >/dev/null || $(call fail,'$(PYTHON) not found; install it (Debian: apt-get install python3 python3-venv) or set PYTHON=...'); \
	  "$$python" requirements/control_env.py

# For looking at what runs and stopping it: an older environment will do, and is not touched under it.
some-venv: $(if $(wildcard $(VENV)/.stamp),,venv)

.PHONY: engine
engine: venv ## the engine environment (.local/engine)
	@cd ansible && $(BIN)/ansible-playbook engine-env.yml

.PHONY: conformance
conformance: venv ## the environment of the conformance tests (.local/conformance; MTP_CACHE=folder keeps its build)
	@$(BIN)/python tests/conformance/environment/make_env.py

# Guards: one clear line instead of a stack of errors.
.PHONY: need-cluster need-k no-k one-deployed
need-cluster:
	@[ -n '$(CLUSTER)' ] || $(call fail,'which cluster? Add CLUSTER=name; there are: $(CLUSTERS)')
	@[ -f '$(INVENTORIES)/$(CLUSTER)/hosts.yml' ] || $(call fail,'no inventory $(INVENTORIES)/$(CLUSTER)/hosts.yml; there are: $(CLUSTERS)')

need-k:
	@[[ '$(K)' =~ ^[0-9]+$$ ]] || $(call fail,'which K? Add K=n: 0 turns MTP off; 1 to 15 are draft tokens a step')

no-k:
	@[ -z '$(K)' ] || $(call fail,'K=$(K) changes nothing here: make mtp CLUSTER=$(CLUSTER) K=$(K) sets it; make check and render look at it')

one-deployed:
	@[ '$(words $(or $(CLUSTER),$(DEPLOYED)))' = 1 ] || $(call fail,'which cluster? Add CLUSTER=name; deployed: $(or $(DEPLOYED),none)')
