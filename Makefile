# Levada's commands. `make demo` and `make test` install what they need and say so.

CARGO ?= cargo
DEMO_DIR ?= $(CURDIR)/target/demo

.PHONY: help setup build bench-build demo test check bench soak clean

help: ## Shows this list.
	@awk -F':.*## ' '/^[a-z]+:.*## /{printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## Names and installs what the build needs.
	@scripts/setup

build: setup ## Builds the `levada` program: target/release/levada.
	$(CARGO) build --release --locked -p levada

demo: build bench-build ## The main job on real input, in about two minutes; cleans up behind itself.
	scripts/demo $(DEMO_DIR)

test: setup ## All tests, with a few hundred simulated seeds and 5 kill rounds.
	scripts/test

check: setup ## Format, lints, documentation: before every commit.
	$(CARGO) fmt --all --check
	$(CARGO) clippy --locked --workspace --all-targets -- -D warnings
	RUSTDOCFLAGS="-D warnings -A rustdoc::private_intra_doc_links" $(CARGO) doc --locked --workspace --no-deps --document-private-items

bench-build:
	$(CARGO) build --release --locked -p levada-survey

bench: build bench-build ## Measures, for hours; writes target/figures.json and prints it. RESUME=1 goes on with it.
	scripts/peers target/peers
	target/release/levada-survey bench --out target/figures.json $(if $(RESUME),--resume)

soak: build ## The long checks: seeds, kill rounds, guests, loads, fuzzing. Two hours, LONG=1 days; RESUME=1 goes on, STEPS=... are some.
	scripts/soak $(STEPS)

clean: ## Removes what the build and the demo made; a cluster in ./levada-data stays.
	$(CARGO) clean
