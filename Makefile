# `make serve` and `make test` are all a newcomer needs; both install what they need into .venv.
PORT ?= 8443
ARGS ?=
PYTEST_ARGS ?=
BIN := .venv/bin
CXX_FILES := $(shell git ls-files '*.cpp' '*.h' 2>/dev/null | grep -v -e arena.h -e layout.h)

.PHONY: serve test lint format generate bench install clean
.SILENT:

serve:
	.ci/install dpu,gpu
	exec $(BIN)/blink up --https-port $(PORT) $(ARGS)

test: lint
	$(BIN)/python -m pytest $(PYTEST_ARGS)

install:
	.ci/install dpu,gpu,dev

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check -q .
	$(BIN)/clang-format --dry-run -Werror $(CXX_FILES)
	$(BIN)/python -m blink_proto.generate --check
	$(BIN)/mypy

format: install
	$(BIN)/ruff check --fix -q .
	$(BIN)/ruff format -q .
	$(BIN)/clang-format -i $(CXX_FILES)

generate: install
	$(BIN)/python -m blink_proto.generate

bench: install
	$(BIN)/python -m tests.bench.soft_gpu $(ARGS)

clean:
	rm -rf .venv build *.egg-info .pytest_cache .mypy_cache .ruff_cache gpu_runtime/*.so dpu_service/*.so
