# On a fresh machine: `make train` or `make test`. Only python3 and make are needed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
ISAAC := build/isaac
MJLAB := build/mjlab
FEDERATED := build/federated
SIMULATORS := build/simulators
ISAAC_PYTHON ?= python3.12

.PHONY: train train-mbpo test test-browser chaos test-cyborg test-isaac test-mjlab test-federated test-simulators check format bench figures stale docs clean

# A defender of a network: it beats one that restores on sight within a minute.
train: RUN := runs/defender-$(shell date +%Y%m%d-%H%M%S)
train: $(INSTALLED)
	$(BIN)/freerun train --preset defender --run-dir $(RUN)
	$(BIN)/freerun eval $(RUN) --episodes 200 --compare

# Model-based: a drone learns to hover from some 40,000 steps.
train-mbpo: RUN := runs/drone-$(shell date +%Y%m%d-%H%M%S)
train-mbpo: $(INSTALLED)
	$(BIN)/freerun train --preset mbpo-drone --eval-every 4000 --run-dir $(RUN)
	$(BIN)/freerun eval $(RUN) --episodes 10

# Tests start some 250 Python processes, so bytecode is kept even where the environment says otherwise.
# Four processes on two cores: a test computes for about half of its time, and waits for other processes otherwise.
test: $(INSTALLED)
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 4 --dist loadgroup --no-loadscope-reorder

# The web page in a real Chromium, which must be installed: apt-get install chromium.
test-browser: $(INSTALLED)
	$(BIN)/python -m pytest -o addopts="-ra" tests/browser

# What a run survives, the long way; `make test` has the short one.
chaos: $(INSTALLED)
	$(BIN)/python scripts/chaos_resume.py --kills 50
	$(BIN)/python scripts/chaos_resume.py --kills 20 --algo sac --total-steps 20000
	$(BIN)/python scripts/chaos_disk.py
	$(BIN)/python tests/chaos.py --faults 200

# The tests of the CybORG adapter, on your copy of the real one too.
test-cyborg: $(INSTALLED)
	@test -n "$(CYBORG_PATH)" || { echo "Clone https://github.com/cage-challenge/cage-challenge-2, then: make test-cyborg CYBORG_PATH=<the folder CybORG in it>"; exit 2; }
	@test -f "$(CYBORG_PATH)/CybORG/Shared/Scenarios/Scenario2.yaml" || { echo "There is no CybORG in $(CYBORG_PATH)"; exit 2; }
	@$(BIN)/python -c "import paramiko, prettytable, yaml" || $(BIN)/pip install -q -c constraints.txt -e '.[cyborg]'
	CYBORG_PATH="$(abspath $(CYBORG_PATH))" $(BIN)/python -m pytest tests/adapters/test_cyborg.py

# The adapter on the real Isaac Lab 3, on the CPU and without Isaac Sim: Python 3.12, 6 GB, minutes the first time.
test-isaac: $(ISAAC)/.installed
	ISAACSIM_ASSET_ROOT="$(abspath $(ISAAC))/assets" PYTHONPATH=src $(ISAAC)/bin/python -m pytest -W default -o timeout=1200 tests/isaac

$(ISAAC)/.installed: pyproject.toml tests/isaac/requirements.txt tests/isaac/make_assets.py
	@$(ISAAC_PYTHON) -c "" 2>/dev/null || { echo "Isaac Lab 3 needs Python 3.12: make test-isaac ISAAC_PYTHON=<its path>"; exit 2; }
	$(ISAAC_PYTHON) -m venv $(ISAAC)
	$(ISAAC)/bin/pip install -q -r tests/isaac/requirements.txt
	$(ISAAC)/bin/pip install -q --no-deps isaaclab==3.0.0
	$(ISAAC)/bin/python tests/isaac/make_assets.py $(ISAAC)/assets
	touch $@

# RSL-RL's adapter on the real mjlab, on the CPU; the first run compiles its kernels, which takes a minute.
test-mjlab: $(MJLAB)/.installed
	PYTHONPATH=src $(MJLAB)/bin/python -m pytest -W default -o timeout=1200 tests/real_mjlab tests/adapters/test_rsl_rl.py

$(MJLAB)/.installed: pyproject.toml
	$(PYTHON) -m venv $(MJLAB)
	$(MJLAB)/bin/pip install -q torch==2.13.0
	$(MJLAB)/bin/pip install -q torch==2.13.0 mjlab==1.6.0 hypothesis pytest pytest-timeout pytest-xdist -e '.[rsl-rl]'
	touch $@

# Federations on the real Flower and its simulation engine, whose pins clash with ours. Nothing is reported to anybody.
test-federated: $(FEDERATED)/.installed
	FLWR_TELEMETRY_ENABLED=0 RAY_USAGE_STATS_ENABLED=0 PYTHONPATH=src $(FEDERATED)/bin/python -m pytest -W default -o timeout=600 tests/real_flower tests/tools/federation

$(FEDERATED)/.installed: tests/real_flower/requirements.txt
	$(PYTHON) -m venv $(FEDERATED)
	$(FEDERATED)/bin/pip install -q torch==2.13.0
	$(FEDERATED)/bin/pip install -q -r tests/real_flower/requirements.txt
	touch $@

# The presets of real simulators: traffic in SUMO, the power grid in grid2op, Atari.
test-simulators: $(SIMULATORS)/.installed
	PYTHONPATH=src $(SIMULATORS)/bin/python -m pytest -W default -o timeout=600 tests/real_simulators tests/adapters/test_env_wrappers.py

$(SIMULATORS)/.installed: tests/real_simulators/requirements.txt constraints.txt
	$(PYTHON) -m venv $(SIMULATORS)
	$(SIMULATORS)/bin/pip install -q -c constraints.txt torch==2.13.0
	$(SIMULATORS)/bin/pip install -q -c constraints.txt -r tests/real_simulators/requirements.txt
	touch $@

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
	$(BIN)/python benchmarks/sample_efficiency.py
	$(BIN)/python benchmarks/overlap.py
	$(BIN)/python benchmarks/timeline.py
	$(BIN)/python benchmarks/watching.py
	$(BIN)/python benchmarks/beside_rsl_rl.py
	$(BIN)/python benchmarks/ray_straggler.py
	$(BIN)/python benchmarks/sweeping.py
	$(BIN)/python benchmarks/scaling.py
	$(BIN)/python benchmarks/network_defence.py
	$(BIN)/python benchmarks/cyber.py
	$(BIN)/python benchmarks/cyber_learning.py
	$(BIN)/python benchmarks/probe_accuracy.py
	$(BIN)/python benchmarks/chaos_storms.py
	$(BIN)/python benchmarks/matrix.py --run

# Every number, table and picture of README.md and docs/ that was measured, from the JSON files under benchmarks/results.
figures: $(INSTALLED)
	$(BIN)/python benchmarks/figures.py

# Which results were measured with other sources than today's, and how they are renewed.
stale: $(INSTALLED)
	$(BIN)/python benchmarks/figures.py --stale

# The documentation as a site that works from the disk: build/site/index.html. Broken links are errors.
# Without --quiet: mkdocs drops warnings there before --strict could count them.
docs: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "build/site/index.html"

# torch first and by itself: a constraints file does not stop pip from looking at other builds of it.
$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -c constraints.txt torch==2.13.0
	$(BIN)/pip install -q -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
