# The front door; CMake does the work. Run `make help`.

MAKEFLAGS += --no-print-directory
BUILD := build
JOBS ?= $(shell nproc)
PREFIX ?= /usr/local
PROMPT ?= Explain in three sentences why the sky is blue.
BENCH ?= q1s8k 32q1s4k 4q4s8k q2k

.PHONY: all program setup run test bench install format clean help

all: # what is there to build with; `make setup` gets the rest
	@scripts/setup.sh check
	@cmake --preset release $(if $(wildcard $(BUILD)/CMakeCache.txt),>/dev/null,)
	@cmake --build --preset release --parallel $(JOBS)

program: # the program alone, without tests and plugins
	@cmake --preset release $(if $(wildcard $(BUILD)/CMakeCache.txt),>/dev/null,)
	@cmake --build --preset release --parallel $(JOBS) --target fovea_program

setup:
	@scripts/setup.sh packages

run: setup
	@$(MAKE) program
	@FOVEA_MODEL="$$(scripts/setup.sh model)" && export FOVEA_MODEL && \
	$(BUILD)/fovea generate "$(PROMPT)"

test: setup
	@scripts/setup.sh model >/dev/null
	@scripts/setup.sh model gemma >/dev/null
	@$(MAKE) all
	@CUOBJDUMP="$$(scripts/setup.sh cuobjdump)" ctest --preset release --parallel 2 # the longest have a thread for each CPU

bench: all
	@scripts/bench.sh $(BENCH)

install: all
	@cmake --install $(BUILD) --prefix $(PREFIX)

format:
	@scripts/check_format.sh --fix

clean:
	@rm -rf $(BUILD)

help:
	@echo "make          build the library, the engine and build/fovea"
	@echo "make setup    install the packages that are missing (Debian, as root)"
	@echo "make run      setup, get the model, build, and write text with it; PROMPT=..."
	@echo "make test     setup, get the two models, build, and run all tests"
	@echo "make bench    time the attention kernels; BENCH=\"q1s8k q2k\"; see fovea bench --help"
	@echo "make install  PREFIX=$(PREFIX)"
	@echo "make format   lay out the sources with clang-format"
	@echo "make clean    remove $(BUILD)/"
