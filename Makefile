# On a fresh machine: `make train` or `make test`. Only python3 and make are needed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: train test check format bench clean

train: $(INSTALLED)
	$(BIN)/freerun train CartPole-v1 --total-steps 100000 --envs-per-worker 4 --segment-steps 256 --learning-rate 0.001 --anneal-learning-rate

test: $(INSTALLED)
	$(BIN)/python -m pytest

check: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(INSTALLED)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(INSTALLED)
	$(BIN)/python benchmarks/throughput.py
	$(BIN)/python benchmarks/peers.py
	$(BIN)/python benchmarks/learning.py
	$(BIN)/python benchmarks/time_to_score.py

# torch first and by itself: a constraints file does not stop pip from looking at other builds of it.
$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -c constraints.txt torch==2.13.0
	$(BIN)/pip install -q -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
