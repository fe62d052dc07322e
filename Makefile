# Everything runs in .venv. `make demo` and `make test` install what they need first.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/installed

.PHONY: install demo test test-slow qa soak soak-serve lint bench load clean

install: $(STAMP)

# torch first and alone: pip then takes the build that this machine is set up for, and nothing later replaces it.
# CPU builds of torch bring no triton; a CUDA build's own comes back in the last step where it is another version.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet -c constraints.txt torch
	$(BIN)/pip install --quiet --no-deps triton==3.6.0
	$(BIN)/pip install --quiet -c constraints.txt -e .[server,test]
	touch $@

demo: $(STAMP)
	$(BIN)/python demo/run.py

test: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist loadgroup -m "not slow and not soak and not soak_serve and not gpu and not qa"

test-slow: $(STAMP)
	$(BIN)/python -m pytest -m slow

qa: $(STAMP)
	$(BIN)/python -m pytest --durations=10 -m qa

soak: $(STAMP)
	$(BIN)/python -m pytest -s -m soak

soak-serve: $(STAMP)
	$(BIN)/python -m pytest -s -m soak_serve

lint: $(STAMP)
	$(BIN)/ruff check .

bench: $(STAMP)
	$(BIN)/python -m benchmarks.cpu $(BENCH)

# BENCH="--rounds 1" and LOAD="--concurrency 1,64 --num-requests 500" say how much; --help lists all
load: $(STAMP)
	$(BIN)/python -m benchmarks.load_report $(LOAD)

clean:
	rm -rf .venv .cache
