PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DEMO := runs/demo-$(shell date +%Y%m%d-%H%M%S)
DEMO_FLAGS := --data digits --partition dirichlet:0.5 --clients 10 --seeds 0 1 2 --out $(DEMO)

.PHONY: attacks demo hospital picture test slow lint docs links coverage setup

# The main job on real data: four methods over ten silos. Three train, at equal compute (the teacher of FedTasuki costs a third
# of an epoch); FedGram does not, and moves as many bytes.
demo: $(VENV)/.base
	$(BIN)/ekiden run fedelmy $(DEMO_FLAGS) --models 3 --epochs 10 --warmup 10
	$(BIN)/ekiden run fedseq $(DEMO_FLAGS) --epochs 31
	$(BIN)/ekiden run fedtasuki $(DEMO_FLAGS) --epochs 30
	$(BIN)/ekiden run fedgram $(DEMO_FLAGS)
	@echo && echo "side by side:"
	$(BIN)/ekiden compare $(DEMO)/*

# The picture of FedSeq, FedELMY and FedTasuki: accuracy against bytes of the runs of the demo.
picture: demo
	$(BIN)/pip install --quiet --editable ".[report]"
	$(BIN)/ekiden report $(DEMO) -o $(DEMO)-report --details 0
	cp $(DEMO)-report/figures/bytes-1.svg docs/assets/curves-demo.svg

# Eight hospitals, processes killed at random, and the bits of a run without faults; some minutes on two cores.
hospital: setup
	$(BIN)/python -m benchmarks.hospital

# What attackers read from sums where silos allow it, and by default: the numbers on the page on security.
attacks: setup
	HF_HUB_OFFLINE=1 $(BIN)/pytest -q -s $(addprefix tests/silos/across/test_,crafted_features.py members.py records_in_sums.py)

# All fast tests; or those of one room: make test ROOM=clinic
ifdef ROOM
test: setup
	HF_HUB_OFFLINE=1 $(BIN)/pytest -m "not slow" tests/$(ROOM)
else
test: setup lint docs
	HF_HUB_OFFLINE=1 $(BIN)/pytest -n auto --dist loadgroup --no-loadscope-reorder -m "not slow"
endif

slow: setup
	HF_HUB_OFFLINE=1 EKIDEN_FUZZ=5 $(BIN)/pytest -m "slow or hypothesis"

# Which lines the fast tests run. Apart from them, because tracing costs 42 % more processor time (Python 3.11).
coverage: setup
	HF_HUB_OFFLINE=1 $(BIN)/pytest -n auto --dist loadgroup --no-loadscope-reorder -m "not slow" --cov=ekiden --cov-report=term:skip-covered

# The site, in site/: open site/index.html, no server needed.
docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet
	$(BIN)/python -m tests.tools.links site

# Asks for every address that the pages and docstrings name; needs a network.
links: setup
	$(BIN)/python -m tests.tools.links

lint: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/codespell
	$(BIN)/python -m tests.tools.prose
	$(BIN)/python -m tests.tools.tokens

setup: $(VENV)/.ready

# What the demo needs, without tests and silos.
$(VENV)/.base: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --editable .
	touch $@

$(VENV)/.ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --editable ".[dev,flower]"
	touch $(VENV)/.base $@
