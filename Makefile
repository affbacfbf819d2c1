# Every target sets up what it needs in .venv, once; `make help` lists them.
PYTHON ?= python3
TORCH ?= 2.14.1
# `make test-all` runs the suite once more against this version of torch; SECOND_TORCH= leaves that out.
SECOND_TORCH ?= 2.13.0
# auto, 0, 1 or nvrtc: see setup.py. Where there is no GPU, only `make build` and `make test-all` take the minutes that nvcc takes.
FUSEDACCUM_CUDA ?= auto
export FUSEDACCUM_CUDA
CUDA_HERE := $(if $(shell command -v nvidia-smi),$(FUSEDACCUM_CUDA),$(FUSEDACCUM_CUDA:auto=0))

# What is measured, and how: `make bench-gpu BENCH="window step --no-compile"`; all of it when left out.
BENCH ?=

# An environment that is there already, `make test-gpu BIN=/path/to/its/bin`, gets this package, and nothing is fetched.
VENV := .venv
BIN := $(VENV)/bin
BUILT := $(if $(filter file,$(origin BIN)),$(VENV)/built,build/$(subst /,_,$(abspath $(BIN))))
WHOLE := $(if $(filter file,$(origin BIN)),$(VENV)/whole,$(BUILT))
SECOND_VENV := .venv-torch-$(SECOND_TORCH)
SECOND_BIN := $(SECOND_VENV)/bin
TOOLS := 'setuptools>=77' wheel ninja
NATIVE := setup.py pyproject.toml $(shell find csrc -type f)
PACKAGE := $(shell find python triton_kernels -name '*.py')
CPP := $(shell find csrc tests -name '*.h' -o -name '*.cpp' -o -name '*.cu')
# The tests of the ops, most of them in one file, where NumPy, in which Triton interprets, may warn of the overflows that they are about.
INTERPRETED := -n auto --dist worksteal -m "not slow" -W ignore::RuntimeWarning $(foreach t,bits memory oracles parts properties rounding,tests/ops/test_ops_$(t).py) \
	tests/gpu/test_gpu_ops.py::test_a_scale_that_is_written_too_is_read_before
# A process a core, and a file's tests, which share what they build, in one; each of them with a second thread would make them wait
# for each other. In the order of tests/conftest.py, not the file of most tests first. Tests of ranks have processes of their own, and
# those of devices and frameworks a run of their own: pyproject.toml leaves them out.
SPREAD := -n auto --dist loadfile --no-loadscope-reorder --ignore tests/distributed
QUICK := $(SPREAD) -m "not slow"
# What the version of torch has no part in.
WITHOUT_TORCH := $(foreach t,core/test_interrupts core/test_without_a_feature docs/test_benchmarks docs/test_site gpu/test_cuda_source \
	test_rooms,--ignore tests/$(t).py)
# Without PyTorch's own caching of memory, so that an access outside of a tensor is one outside of an allocation.
SANITIZED := PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --report-api-errors no --error-exitcode 1
SAY = @printf '\n== %s\n'
NEEDS_GPU = @$(BIN)/python -c 'import torch; torch.cuda.is_available() or exit("There is no CUDA device here that PyTorch can use: nothing was tested.")'

.PHONY: help demo docs test test-all rest test-gpu test-gpu-nvrtc sanitize bench bench-gpu lint format build clean
.DEFAULT_GOAL := help

help:  ## what can be made
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 20

demo: $(BUILT)  ## train two small models with big batches and with accumulated micro-batches, and compare them: a few minutes
	$(SAY) "Demo: big batch, fusedaccum, and PyTorch's own accumulation"
	$(BIN)/python -m demo

# Material's notice that MkDocs 2 is coming is for whoever chooses the tool: docs/decisions.md, "The site".
docs: $(BUILT)  ## the documentation as a site, in build/site; a link that leads nowhere is an error
	$(SAY) "Documentation"
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build

test: lint docs $(BUILT)  ## lint, build, and run the tests of the core, against one version of torch: minutes
	$(SAY) "Tests of the core"
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q $(SPREAD) -m "not slow and not long"
	$(BIN)/python -m pytest -q -m "not slow" tests/distributed/test_ddp_loops.py tests/distributed/test_collectives.py
	$(SAY) "Passed. The rest (all ranks, frameworks, compilers, sanitizers, another version of torch): make test-all"

test-all: test  ## and all other tests, against two versions of torch: half an hour or more
	@$(MAKE) --no-print-directory rest

rest: $(WHOLE) $(if $(SECOND_TORCH),$(SECOND_VENV)/built)
	$(SAY) "Slow tests, and files of long ones"
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q $(SPREAD) -m "slow or long"
	$(SAY) "Ranks"
	$(BIN)/python -m pytest -q tests/distributed
	$(SAY) "Buffers in CPU memory, for parameters on a device made for that"
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n auto --dist worksteal tests/devices
	$(SAY) "Accelerate, Hugging Face Trainer, Lightning"
	$(BIN)/python -m pytest -q tests/frameworks
	$(SAY) "Triton kernels, interpreted on the CPU"
	TRITON_INTERPRET=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q $(INTERPRETED)
	$(if $(SECOND_TORCH),$(SAY) "Tests against torch $(SECOND_TORCH)")
	$(if $(SECOND_TORCH),OMP_NUM_THREADS=1 $(SECOND_BIN)/python -m pytest -q $(QUICK) $(WITHOUT_TORCH))
	$(if $(SECOND_TORCH),$(SECOND_BIN)/python -m pytest -q -m "not slow" tests/distributed)
	$(if $(SECOND_TORCH),OMP_NUM_THREADS=1 $(SECOND_BIN)/python -m pytest -q -n auto --dist worksteal tests/devices)

bench: $(BUILT)  ## measure against plain PyTorch; writes benchmarks/results
	$(SAY) "Benchmarks"
	$(BIN)/python -m benchmarks $(BENCH)

# The slow tests are of builds, sanitizers and four ranks, to which a GPU makes no difference.
test-gpu: $(BUILT)  ## the tests where there is a CUDA device, and `make sanitize`
	$(SAY) "Tests on a GPU"
	$(NEEDS_GPU)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q $(QUICK)
	$(BIN)/python -m pytest -q tests/distributed/test_devices.py
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n auto --dist worksteal tests/devices
	@$(MAKE) --no-print-directory sanitize

test-gpu-nvrtc:  ## the same with kernels that NVRTC compiles when they are first used, which no GPU has run yet
	@rm -f $(BUILT)
	@$(MAKE) --no-print-directory test-gpu FUSEDACCUM_CUDA=nvrtc; status=$$?; rm -f $(BUILT); exit $$status

sanitize: $(BUILT)  ## the kernels on a CUDA device, under compute-sanitizer
	$(SAY) "Kernels under compute-sanitizer"
	$(NEEDS_GPU)
	@command -v compute-sanitizer > /dev/null || { echo "compute-sanitizer is not on PATH: install it with the CUDA toolkit"; exit 1; }
	$(SANITIZED) --tool memcheck $(BIN)/python -m pytest -q tests/gpu/test_gpu_ops.py -k "test_scale or test_stochastic or ((test_accumulate or test_cast) and f32 and bf16)"
	$(foreach tool,racecheck initcheck,$(SANITIZED) --tool $(tool) $(BIN)/python -m pytest -q tests/gpu/test_gpu_ops.py -k "test_scale or (test_accumulate and f32 and bf16)" &&) true

bench-gpu: $(BUILT)  ## measure on a CUDA device; writes benchmarks/results/gpu
	$(SAY) "Benchmarks on a GPU"
	$(BIN)/python -m benchmarks --device cuda $(BENCH)

lint: $(BUILT)  ## ruff, clang-format and mypy
	$(SAY) "Lint: ruff, clang-format, mypy"
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --quiet .
	$(BIN)/clang-format --dry-run --Werror $(CPP)
	$(BIN)/mypy

format: $(BUILT)  ## put the sources into shape
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CPP)

build: $(WHOLE)  ## the package with all of its extensions, editable, in .venv
	$(SAY) "Built; $(BIN)/python -m fusedaccum says what"

clean:  ## remove what was built and set up
	rm -rf build dist .venv .venv-torch-* *.egg-info python/*.egg-info .mypy_cache .pytest_cache .ruff_cache
	rm -rf python/fusedaccum/*.so python/fusedaccum/_build.json python/fusedaccum/_native

# Stamps: an empty file in the environment that it speaks for. A change of TORCH needs `make clean`.

$(VENV)/ready:
	$(SAY) "Setting up $(VENV): torch $(TORCH) and build tools (the first time takes minutes)"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet $(TOOLS) torch==$(TORCH)
	@touch $@

build/%: $(NATIVE)
	$(SAY) "Building fusedaccum in $(BIN)"
	@PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m pip install --quiet --no-index --no-build-isolation --no-deps --editable .
	@$(BIN)/python -m fusedaccum
	@mkdir -p build && touch $@

$(VENV)/built: $(VENV)/ready $(NATIVE)
	$(SAY) "Building fusedaccum in $(VENV)"
	@PATH="$(CURDIR)/$(BIN):$$PATH" FUSEDACCUM_CUDA=$(CUDA_HERE) $(BIN)/pip install --quiet --no-build-isolation --editable '.[test,lint,bench,demo,docs]'
	@$(BIN)/python -m fusedaccum
	@touch $@

$(VENV)/whole: $(VENV)/built
	$(SAY) "Building what else can be built, for more tests"
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/pip install --quiet --no-build-isolation --editable '.[frameworks]'
	@$(BIN)/python -m fusedaccum
	@touch $@

$(SECOND_VENV)/ready:
	$(SAY) "Setting up $(SECOND_VENV): torch $(SECOND_TORCH)"
	$(PYTHON) -m venv $(SECOND_VENV)
	$(SECOND_BIN)/pip install --quiet $(TOOLS) torch==$(SECOND_TORCH)
	@touch $@

# After the other, with `make --jobs`: each makes an egg-info folder in python/.
$(SECOND_VENV)/built: $(SECOND_VENV)/ready $(NATIVE) $(PACKAGE) | $(BUILT)
	$(SAY) "Installing fusedaccum in $(SECOND_VENV)"
	@PATH="$(CURDIR)/$(SECOND_BIN):$$PATH" $(SECOND_BIN)/pip install --quiet --no-build-isolation '.[test]'
	@cd tests && ../$(SECOND_BIN)/python -m fusedaccum
	@touch $@
