# `make serve` and `make test` are all that a newcomer needs: both install what they need into .venv first.
#   make serve PORT=9443 ARGS='--model /path/to/model'      make test PYTEST_ARGS='-k scheduler'
# PYTHON names the interpreter to make .venv with, BLINK_TORCH the torch to install (see .ci/install).
PORT ?= 8443
ARGS ?=
PYTEST_ARGS ?=
GPU_PYTHON ?= python3
BIN := .venv/bin
ON_GPU = PYTHONPATH=$(CURDIR)/proto:$(CURDIR)/deploy:$(CURDIR)$${PYTHONPATH:+:$$PYTHONPATH} $(GPU_PYTHON)
GENERATED := -name arena.h -o -name layout.h
CPP_FILES = $(shell find dpu_service gpu_runtime proto tests \( -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh' \) ! \( $(GENERATED) \))

.PHONY: serve test test-ecosystem test-rdma test-gpu bench-gpu bench-front bench-rdma lint format generate bench install install-serve sbom clean
.SILENT:

serve: install-serve
	exec $(BIN)/blink up --https-port $(PORT) $(ARGS)

test: lint
	$(BIN)/python -m pytest $(PYTEST_ARGS)

install-serve:
	.ci/install dpu,gpu

install:
	.ci/install dpu,gpu,dev

lint: install
	$(BIN)/python -m blink_proto.generate --check
	$(BIN)/ruff check -q .
	$(BIN)/ruff format --check -q .
	$(BIN)/clang-format --dry-run -Werror $(CPP_FILES)
	$(BIN)/mypy

format: install
	$(BIN)/ruff check -q --fix .
	$(BIN)/ruff format -q .
	$(BIN)/clang-format -i $(CPP_FILES)

generate: install
	$(BIN)/python -m blink_proto.generate

# Client packages, schemathesis and fuzzers at length, about 8 minutes; `make test` runs them in short.
test-ecosystem: install
	BLINK_ECOSYSTEM=all BLINK_SCHEMATHESIS=200 BLINK_FUZZ_SECONDS=60 \
	  $(BIN)/python -m pytest tests/ecosystem tests/fuzz/test_front_end_fuzz.py $(PYTEST_ARGS)

# RDMA without an adapter, about 6 minutes: emulated machines with Soft-RoCE. Installs the emulator (Debian, as root).
test-rdma:
	.ci/install-rdma
	.ci/install dpu,gpu,dev,rdma
	BLINK_TEST_RDMA=1 $(BIN)/python -m pytest tests/rdma $(PYTEST_ARGS)

bench-rdma:
	.ci/install-rdma
	.ci/install dpu,gpu,dev,rdma
	BLINK_TEST_RDMA=1 $(BIN)/python -m tests.rdma.bench

# On a machine with a GPU, torch, nvcc, g++ and pytest; these two install and download nothing, and skip, with the reason,
# what needs a package that is not there. Both end with one table within 10 minutes.
test-gpu:
	$(ON_GPU) -m tests.bench.gpu.prepare
	$(ON_GPU) -m tests.gpu $(PYTEST_ARGS)

bench-gpu:
	$(ON_GPU) -m tests.bench.gpu.prepare
	$(ON_GPU) -m tests.bench.gpu $(ARGS)

# The README's numbers, side by side in one run: transformers, the soft GPU, the scheduler's step.
bench: install
	$(BIN)/python -m tests.bench.transformers_rate 2>/dev/null
	$(BIN)/python -m tests.bench.soft_gpu --max-tokens 64 --extra-body '{"ignore_eos": true}' $(ARGS)
	$(BIN)/python -m tests.bench.scheduler_step

# What one worker of the front end streams and answers; wants a quiet machine of two cores or more.
bench-front: install
	$(BIN)/python -m tests.bench.front_end $(ARGS)

# A bill of materials of each image's Python packages: CycloneDX, by its own tool.
sbom:
	test -x build/sbom/tool/bin/cyclonedx-py || { python3 -m venv build/sbom/tool && build/sbom/tool/bin/pip install -q cyclonedx-bom==7.5.0; }
	for image in dpu gpu; do build/sbom/tool/bin/cyclonedx-py requirements deploy/images/$$image.lock -o build/sbom/$$image.cdx.json || exit 1; done
	echo "build/sbom/dpu.cdx.json build/sbom/gpu.cdx.json"

clean:
	rm -rf .venv build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	rm -f gpu_runtime/*.so dpu_service/*.so
