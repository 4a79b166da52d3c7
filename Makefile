# Every target works from a fresh clone with Python 3.11 and a C++ compiler; all else is installed here.

PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
PACKAGES := zero_compile runtime bench examples tools tests setup.py
TORCH ?= torch==2.13.0
CSRC := $(wildcard csrc/*.h csrc/*.cpp csrc/tests/*.cpp csrc/cuda/*.h csrc/cuda/*.cpp csrc/storage/*.cpp)

# One thread a rank, on the loopback device: the two-rank cluster of this Makefile.
LOCAL := OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME=lo
TORCHRUN := $(LOCAL) $(BIN)/torchrun --nproc-per-node 2 --master-addr 127.0.0.1 --master-port 0 --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:0

# The compiler of CUDA, which only checks: `make lint NVCC=/opt/cuda/bin/nvcc`, or NVCC= to go without.
NVCC ?= $(firstword $(shell command -v nvcc) $(wildcard /usr/local/cuda/bin/nvcc))
NVCC_ABI := $(shell sed -n 's/^TORCH_ABI = "\([^"]*\)".*/\1/p' setup.py)
NVCC_FLAGS := -x cu -c -o /dev/null -std=c++17 -DUSE_CUDA -DTORCH_TARGET_VERSION=$(NVCC_ABI) \
  -gencode arch=compute_80,code=sm_80 -gencode arch=compute_90,code=sm_90 \
  -Werror all-warnings -Xcompiler -Wall,-Wextra,-Werror
HEADERS := import sysconfig, importlib.util as u; \
  print("-isystem", u.find_spec("torch").submodule_search_locations[0] + "/include", \
        "-isystem", sysconfig.get_path("include"))

.PHONY: help quick slow demo test fuzz browser lint lint-cuda bench zoo asan tsan valgrind format clean install

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | sort | awk -F '\t' '{ printf "  %-10s %s\n", $$1, $$2 }'

install: $(VENV)/.installed  ## the environment in .venv, which every other target makes too

# torch first and alone: the extension is built against it, so pip must not bring another one.
$(VENV)/.installed: pyproject.toml setup.py $(CSRC)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || python3 -m venv $(VENV)
	$(BIN)/pip install --quiet $(TORCH) "setuptools>=77" wheel numpy
	$(BIN)/pip install --quiet --no-build-isolation --editable ".[test,lint,bench]" $(TORCH)
	touch $@

demo: install  ## a minute of training on two local ranks
	$(TORCHRUN) examples/demo.py --time-budget 60 --output runs/demo

# Neighbours in a process, since processes of ranks are kept from test to test.
test: install browser  ## the tests, but for those that take longest
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow"

slow: install  ## the tests that take longest
	$(BIN)/python -m pytest -n 2 --dist worksteal -m slow

# Structure, passes, planner and one training on two ranks.
quick: install  ## a minute of tests, to run after each change
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow" tests/test_structure.py tests/ir tests/passes \
	  tests/scheduler tests/simulator tests/compiler/test_bucketing.py tests/compiler/test_verify.py \
	  tests/programs/test_training.py::test_inference_graphs_between_training_steps

# Random training programs, each compared with its unsharded run.
PROGRAMS ?= 3000
SEED ?= 0
fuzz: install  ## random training programs; PROGRAMS=200 SEED=1 say how many, which
	$(BIN)/python tests/support/fuzz.py --programs $(PROGRAMS) --seed $(SEED)

# The browser that the tests of the page drive; where it cannot be installed they are skipped.
browser:
	@command -v chromium >/dev/null || command -v google-chrome >/dev/null || \
	{ test "$$(id -u)" = 0 && command -v apt-get >/dev/null && \
	  { apt-get update && apt-get install -y --no-install-recommends chromium; } >/dev/null 2>&1; } || \
	echo "no Chromium here: the tests of the page in a browser will be skipped"

lint: install  ## ruff, mypy, clang-format: looks, changes nothing
	$(BIN)/ruff check $(PACKAGES)
	$(BIN)/ruff format --check $(PACKAGES)
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(CSRC)
	@$(MAKE) --no-print-directory lint-cuda

# Is csrc/cuda valid CUDA C++ for each architecture? Warnings in headers that are not ours are let be.
ifeq ($(NVCC),)
lint-cuda:
	@echo "no nvcc here: csrc/cuda was not compiled ('make lint NVCC=path/to/nvcc' does)"
else
lint-cuda: install
	@echo "$(NVCC), for sm_80 and sm_90: csrc/cuda"
	@headers="$$($(BIN)/python -c '$(HEADERS)')" && ls csrc/cuda/*.cpp | \
	xargs -P 2 -I SOURCE $(NVCC) $(NVCC_FLAGS) $$headers SOURCE
endif

format: install  ## ruff and clang-format: changes what they can
	$(BIN)/ruff check --fix $(PACKAGES)
	$(BIN)/ruff format $(PACKAGES)
	$(BIN)/clang-format -i $(CSRC)

bench: install  ## side by side with other ways to train
	$(BIN)/python -m bench

zoo: install  ## every model of the zoo, partitioned and unsharded
	$(BIN)/python tests/support/zoo.py --bf16

# The C++ tests of the swap engine, which need neither Python nor torch, under a sanitizer.
CHECKED ?= build/checked
CHECK := $(CXX) -std=c++17 -g1 -Wall -Wextra -Werror -pthread csrc/tests/swap_test.cpp

asan:  ## the swap engine under the address sanitizer
	mkdir -p $(CHECKED)
	$(CHECK) -fsanitize=address,undefined -fno-sanitize-recover=all -o $(CHECKED)/asan
	$(CHECKED)/asan $(CHECKED)

tsan:  ## the swap engine under the thread sanitizer
	mkdir -p $(CHECKED)
	$(CHECK) -fsanitize=thread -o $(CHECKED)/tsan
	$(CHECKED)/tsan $(CHECKED)

# Without io_uring: valgrind runs one thread at a time, and waits in the kernel with it.
valgrind:  ## the swap engine under valgrind
	@command -v valgrind >/dev/null || { echo "valgrind is not installed: install it, or run make asan and make tsan"; exit 1; }
	mkdir -p $(CHECKED)
	$(CHECK) -O1 -o $(CHECKED)/plain
	valgrind --quiet --error-exitcode=1 --leak-check=full $(CHECKED)/plain $(CHECKED) threads

clean:  ## removes what the targets have made
	rm -rf $(VENV) build runs *.egg-info runtime/zero_runtime/*.so
