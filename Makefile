# Each target sets up what it needs: a fresh machine with Python 3.11 and its venv, git and make is enough.
PYTHON ?= python3
WORKERS ?= 6
VENV := .venv
RUN := $(VENV)/bin/python

.PHONY: demo test test-skipped test-slow test-darwin check style mypy pyright docs public-api screens bench soak lab clean

demo: $(VENV)/.ready
	$(RUN) examples/01_hello.py
	$(RUN) examples/02_map.py
	$(RUN) examples/04_errors.py
	@echo "The demo has passed. Next: . $(VENV)/bin/activate; skypool run --provider fake --gpu H100 --budget 5 train.py"

# Whole files to several processes, as most tests wait; a file's tests share what it has set up. Hundreds of them start a
# Python of their own, which should find skypool compiled, whatever the shell says. What measures pace runs alone before,
# which compiles the tests, once for all processes. What is skipped goes on the list for test-skipped.
SKIPPED := build/skipped.txt
SERIAL = $(shell grep -rl mark.serial tests --include='test_*.py')
SLOW = $(shell grep -rl mark.slow tests --include='test_*.py') tests/clients
test test-skipped test-slow: export PYTHONDONTWRITEBYTECODE :=
test: $(VENV)/.dev
	rm -f $(SKIPPED)
	$(RUN) -m pytest tests -q -m "serial and not slow" --skipped-to $(SKIPPED); alone=$$?; \
	$(RUN) -m pytest tests -q -m "not slow and not serial" -n $(WORKERS) --dist loadfile --no-loadscope-reorder \
		--skipped-to $(SKIPPED) && exit $$alone

# What `make test` has skipped, when the machine has more: after `make lab`, or as another user.
test-skipped: $(VENV)/.dev
	$(RUN) -m pytest $$(cut -d: -f1 $(SKIPPED) | sort -u) -q -m "not slow and not serial" -n $(WORKERS) --dist loadfile \
		--no-loadscope-reorder --only-skipped $(SKIPPED)
	$(RUN) -m pytest $(SERIAL) -q -m "serial and not slow" --only-skipped $(SKIPPED) || [ $$? -eq 5 ]  # 5: there is none

test-slow: $(VENV)/.dev
	$(RUN) -m pytest $(SLOW) -q -m "slow and not serial and not heavy" -n $(WORKERS) --dist loadfile \
		--no-loadscope-reorder --durations 10
	$(RUN) -m pytest tests/engines tests/test_dask.py -q -m heavy -n 2 --dist loadfile --durations 10
	$(RUN) -m pytest $(SERIAL) -q -m "slow and serial" --durations 10 || [ $$? -eq 5 ]  # 5: there is none

# The client as on macOS: what macOS lacks is taken away from it (tests/darwin.py). Nodes and labs see Linux.
DARWIN := calls cli_accelerators cli_shell console fake_cloud ledger link memory output reaper remote rental together transport
test-darwin: export PYTHONDONTWRITEBYTECODE :=
test-darwin: $(VENV)/.dev
	$(RUN) -m pytest -p tests.darwin $(DARWIN:%=tests/test_%.py) -q -m "not slow and not serial" -n $(WORKERS) --dist loadfile

check: style mypy pyright
style: $(VENV)/.dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
mypy pyright: $(VENV)/.dev $(VENV)/.docs
	$(VENV)/bin/$@

# The documentation as a site, in build/site. A warning, such as one of a link that leads nowhere, is an error.
docs: export NO_MKDOCS_2_WARNING := 1
docs: $(VENV)/.docs
	$(RUN) -m mkdocs build --strict --quiet

# After a change of the public API that is meant (docs/stability.md): write tests/samples/public_api.txt anew.
public-api: $(VENV)/.dev
	$(RUN) -m tests.test_public_api

# What the live view and `skypool top` show, in real terminals: write docs/screens.md anew. Needs tmux.
screens: $(VENV)/.dev
	$(RUN) -m tests.test_screens

# Machines for the tests marked `lab` (docs/lab.md): needs root, once.
lab:
	tests/lab/setup

bench: $(VENV)/.bench
	$(RUN) -m tests.benchmarks

# What happens by chance, for MINUTES; the same SEED draws the same kills, stops and cuts.
SEED ?= 1
MINUTES ?= 10
soak: $(VENV)/.dev
	$(RUN) -m tests.soak --seed $(SEED) --minutes $(MINUTES)

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }  # half of one has a Python, but no pip

# Modules are compiled when they are first imported: most of those that are installed never are.
$(VENV)/.ready: pyproject.toml | $(VENV)/bin/python
	$(RUN) -m pip install --quiet --no-compile --editable .
	touch $@

$(VENV)/.dev: pyproject.toml | $(VENV)/bin/python
	$(RUN) -m pip install --quiet --no-compile --editable '.[dev]'
	touch $@ $(VENV)/.ready

$(VENV)/.docs: pyproject.toml | $(VENV)/bin/python
	$(RUN) -m pip install --quiet --no-compile --editable '.[docs]'
	touch $@ $(VENV)/.ready

$(VENV)/.bench: pyproject.toml $(VENV)/.dev
	$(RUN) -m pip install --quiet --no-compile --editable '.[dev,bench]'
	touch $@

clean:
	rm -rf $(VENV) dist build
