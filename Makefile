# Every target does its own set-up: a virtual environment in .venv from the fully pinned lock.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
export VLLM_CPU_KVCACHE_SPACE ?= 1
export VLLM_CPU_OMP_THREADS_BIND ?= nobind
export VLLM_LOGGING_LEVEL ?= ERROR
export HF_HUB_OFFLINE ?= 1
# Packages are installed uncompiled: where Python may not keep what it compiles, each process of an
# engine compiles torch and vLLM anew, which takes it half a minute.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help setup demo test test-slow bench bench-suite bench-all bench-sources bench-broadcast bench-disk bench-engines bench-gpu bench-multi-gpu compat example-collector test-verl example-verl example-ray example-trl example-torchrl dist bench-imports docs docs-serve lint types format clean

help:
	@echo "make demo       train a tiny policy with GRPO, rollouts from real vLLM, one weight sync per step"
	@echo "make test       lint, types and the test suite (real vLLM on the CPU included)"
	@echo "make test-slow  the long kill, torn-read and soak loops"
	@echo "make bench-sources  what extraction costs: plain, LoRA, two FSDP2 ranks"
	@echo "make bench-broadcast  updates through NCCLScheme on gloo against torch's own broadcast"
	@echo "make bench-disk  publish and load through DiskScheme against dd, safetensors, torch.save"
	@echo "make compat     what other releases of vLLM have of what is relied on; RUN='0.31.0' runs tests on one"
	@echo "make bench-engines  the gap between tokens that an update costs, AsyncLLM and server"
	@echo "make bench-gpu PYTHON=python  updates on an NVIDIA GPU, in an environment of yours with vLLM and CUDA"
	@echo "make bench-multi-gpu PYTHON=python  broadcasts, TP=2, replicas, sharded trainers on several GPUs"
	@echo "make example-collector  a collector and an asynchronous loop of your own, with bounded staleness"
	@echo "make test-verl  verl's own checkpoint-engine manager over our schemes, in an environment of its own"
	@echo "make example-verl  verl trains a tiny policy on two actor ranks, for two rollout workers"
	@echo "make example-ray  GRPO with Ray actors on two nodes, vLLM replicas, one of which dies"
	@echo "make example-trl  TRL's GRPOTrainer with a vLLM server, or ARGS=--colocate, by a scheme"
	@echo "make example-torchrl  trains with a TorchRL collector over ours, and over TorchRL's own schemes"
	@echo "make bench-imports  the time of importing weightsync and its common names, against torch alone"
	@echo "make dist       a source distribution, and the wheel made from it, into dist/"
	@echo "make docs       the documentation and an API reference, as pages in build/site"
	@echo "make docs-serve  the same at http://127.0.0.1:8000, built anew when a file changes"
	@echo "make bench-suite  our schemes beside TorchRL's, Ray's and others' ways; ARGS=\"--sizes 1 --tensors 300\""
	@echo "make bench-all  every benchmark of this machine, one by one: all figures of README and docs"
	@echo "make bench      publish and apply against a plain copy and TorchRL's double buffer"

setup: $(READY)

# --no-deps: a lock is complete, and leaves out packages that do not import beside a CPU build of torch.
# --no-compile: most of it is never imported, and what is, Python compiles then, and once.
# Where only a CUDA build of torch is to be had, it wants libraries that the lock leaves out.
define environment
	@echo "== setting up $(1) (about two minutes the first time)"
	$(PYTHON) -m venv $(1)
	$(1)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile --no-deps -r $(2)
	@$(1)/bin/python -c "import torch" 2>/dev/null || { \
	  echo "== this build of torch needs CUDA libraries: installing them as well"; \
	  $(1)/bin/python -m pip install --quiet --disable-pip-version-check $$(grep '^torch==' $(2)); }
	$(1)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
endef

$(READY): requirements/cpu.lock pyproject.toml
	$(call environment,$(VENV),requirements/cpu.lock)
	$(BIN)/python -c "import torch, vllm, weightsync"
	@touch $@

demo: $(READY)
	@echo "== GRPO on a tiny Llama: the trainer here, vLLM in another process, one sync per step"
	$(BIN)/python examples/grpo_tiny.py $(ARGS)

test: lint types
	@echo "== tests"
	$(BIN)/python -m pytest -m "not slow" $(ARGS)

test-slow: $(READY)
	@echo "== slow tests: kills, torn reads, soak"
	$(BIN)/python -m pytest -m slow $(ARGS)

bench: $(READY)
	@echo "== publish and apply against a plain warm copy"
	$(BIN)/python benchmarks/double_buffer.py $(ARGS)

bench-suite: $(READY)
	@echo "== side by side: our schemes and others' ways"
	$(BIN)/python -m weightsync bench --suite $(ARGS)

bench-all: $(READY)
	@echo "== every benchmark that this machine can run (an hour and a half on two cores)"
	$(BIN)/python benchmarks/reproduce.py $(ARGS)

bench-sources: $(READY)
	@echo "== extraction: a plain module, LoRA, two FSDP2 ranks"
	$(BIN)/python benchmarks/sources.py $(ARGS)

bench-broadcast: $(READY)
	@echo "== broadcast: NCCLScheme on gloo against torch's own"
	$(BIN)/python benchmarks/broadcast.py $(ARGS)

bench-disk: $(READY)
	@echo "== disk: DiskScheme against dd, safetensors and torch.save (8 GB of room needed)"
	$(BIN)/python benchmarks/disk.py $(ARGS)

compat: $(READY)
	@echo "== other releases of vLLM (1.3 GB of wheels, kept in ~/.cache/weightsync)"
	$(BIN)/python -m tools.compat $(ARGS) $(if $(RUN),--run $(RUN))

bench-engines: $(READY)
	@echo "== engines: the pause that requests see at an update"
	$(BIN)/python benchmarks/engines.py $(ARGS)

# Not in .venv, whose torch is of the CPU: PYTHON is of an environment with vLLM, torch for CUDA and this.
bench-gpu:
	@echo "== one NVIDIA GPU: ours, vLLM's own and others' ways (about eight minutes)"
	$(PYTHON) benchmarks/gpu.py $(ARGS)

bench-multi-gpu:
	@echo "== several NVIDIA GPUs: broadcasts, engines, sharded trainers (about six minutes)"
	$(PYTHON) benchmarks/multi_gpu.py $(ARGS)

example-collector: $(READY)
	@echo "== a collector of your own: asynchronous, no sample older than two versions"
	$(BIN)/python examples/custom_collector.py $(ARGS)

# verl wants other releases of tensordict and transformers than vLLM does.
VERL := .venv-verl
$(VERL)/.ready: requirements/verl.lock pyproject.toml
	$(call environment,$(VERL),requirements/verl.lock)
	$(VERL)/bin/python -c "import weightsync.integrations.verl"
	@touch $@

test-verl: $(VERL)/.ready
	@echo "== verl's checkpoint-engine manager over our schemes"
	RAY_AUTH_MODE=disabled $(VERL)/bin/python -m pytest tests/integrations/verl $(ARGS)

example-verl: $(VERL)/.ready
	@echo "== verl: two actor ranks, two rollout workers, one weight sync per step"
	RAY_AUTH_MODE=disabled $(VERL)/bin/python examples/verl_counting.py $(ARGS)

example-ray: $(READY)
	@echo "== GRPO with Ray: a trainer and vLLM replicas as actors on two nodes (about two minutes)"
	$(BIN)/python examples/ray_grpo.py $(ARGS)

example-trl: $(READY)
	@echo "== TRL's GRPOTrainer on a tiny Llama, its weights brought to vLLM by a scheme"
	$(BIN)/python examples/trl_grpo.py $(ARGS)

example-torchrl: $(READY)
	@echo "== TorchRL: a control policy, two collector processes, our scheme beside TorchRL's"
	$(BIN)/python -W ignore examples/torchrl_collector.py $(ARGS)

bench-imports: $(READY)
	@echo "== importing weightsync against importing torch alone"
	$(BIN)/python benchmarks/imports.py $(ARGS)

# The wheel is made from the source distribution, so what is in dist/ can be built again from it.
dist: $(READY)
	@echo "== source distribution and wheel, into dist/"
	rm -rf dist
	$(BIN)/python -c "from setuptools import build_meta; build_meta.build_sdist('dist')" >/dev/null
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation -w dist dist/*.tar.gz
	@ls dist

# Sources are read for the reference, not imported: no torch is needed.
DOCS := .venv-docs
$(DOCS)/.ready: requirements/docs.lock
	@echo "== setting up $(DOCS)"
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r $<
	@touch $@

docs docs-serve: export NO_MKDOCS_2_WARNING := 1

docs: $(DOCS)/.ready
	@echo "== documentation"
	$(DOCS)/bin/mkdocs build --strict $(ARGS)

docs-serve: $(DOCS)/.ready
	$(DOCS)/bin/mkdocs serve $(ARGS)

lint: $(READY)
	@echo "== ruff"
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	@echo "== mypy"
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) $(VERL) $(DOCS) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache
