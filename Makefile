# make demo    train a small transformer under `perfscope run`, analyze it and name the report
# make test    the test suite: unit tests, then real trainings, browsers and large jobs
# make frameworks  trainings with every parallel strategy and framework, in .venv-frameworks (half an hour)
# make codebases  public training programs as they are, recorded and judged, in .venv-codebases (about an hour)
# make gpu     the acceptance run on this machine's GPUs, with the torch that PYTHON has, in .venv-gpu (ten minutes)
# make lint    ruff, mypy, import contracts
# make check   lint and test
# make samples record sample_traces/ again (with nothing else running on the machine)
# make campaign  a million mutated files of every kind, processes killed, hostile files, planted secrets (hours)
# make site    the documentation as a site, in site/, built strict, its links checked
# make pictures  pages in every look, in pictures/, and the pictures of the documentation
# make clean   remove everything that was made here
#
# Each makes the environment it needs, in .venv, the first time. Another interpreter: make PYTHON=python3.12 demo

PYTHON ?= python3
VENV := .venv
# Third-party frameworks bring a hundred packages that nothing else here needs.
FRAMEWORKS_VENV := .venv-frameworks
CODEBASES_VENV := .venv-codebases
GPU_VENV := .venv-gpu
# What a command in the environment starts (torchrun, python) comes from the environment too.
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)
export PIP_DISABLE_PIP_VERSION_CHECK := 1

DEMO := demo-recording
# What is planted in the demo, for the verdict to find: each batch takes 120 ms to load, in the training process.
DEMO_ARGS ?= --load-ms 120
# A process for each of two cores; twice as many where most of the time tests wait for trainings and browsers. Each begins
# with a half (a quarter) of the folders, so that what a file's tests share is made once, and one that has no test left
# takes some of another's.
PYTEST_ARGS ?= -n 2 --dist worksteal
WAITING_ARGS ?= -n 4 --dist worksteal
WHOLE := training or browser or scale
# Test files that name one of these marks. To import all of them, to find no such test in most, takes every process ten
# seconds.
marked = $(shell grep -rlE --include='test_*.py' 'mark\.($(1))' tests)

.PHONY: demo test frameworks codebases gpu lint check samples site pictures campaign clean

demo: $(VENV)/collect.stamp
	@rm -rf $(DEMO)
	@ranks=$$($(VENV)/bin/python -c 'import torch; print(min(torch.cuda.device_count(), 2) or 2)') && set -x && \
	OMP_NUM_THREADS=1 $(VENV)/bin/perfscope run --output $(DEMO) -- \
	    torchrun --standalone --nproc-per-node $$ranks sample_traces/train.py $(DEMO_ARGS)
	$(VENV)/bin/perfscope analyze $(DEMO)

# First the unit tests, then real trainings, browsers and large jobs, last what times trainings. Tests start hundreds of
# commands: what these import is compiled once, also where the environment asks for no bytecode to be written.
test: export PYTHONDONTWRITEBYTECODE :=
test: $(VENV)/dev.stamp
	$(VENV)/bin/python -m pytest $(PYTEST_ARGS) -m "not frameworks and not alone and not ($(WHOLE))"
	$(VENV)/bin/python -m pytest $(WAITING_ARGS) -m "($(WHOLE)) and not frameworks" $(call marked,training|browser|scale)
	$(VENV)/bin/python -m pytest -m alone $(call marked,alone)

frameworks: export PATH := $(CURDIR)/$(FRAMEWORKS_VENV)/bin:$(PATH)
frameworks: $(FRAMEWORKS_VENV)/frameworks.stamp
	$(FRAMEWORKS_VENV)/bin/python -m pytest $(PYTEST_ARGS) -m frameworks $(call marked,frameworks)

# With nothing else running on the machine: step times are measured. More: make codebases CODEBASES_ARGS='--only timm'
codebases: export PATH := $(CURDIR)/$(CODEBASES_VENV)/bin:$(PATH)
codebases: $(CODEBASES_VENV)/codebases.stamp
	$(CODEBASES_VENV)/bin/python -m tests.codebases.table $(CODEBASES_ARGS)

# On a machine with CUDA and nothing else to do. Some of it: make gpu GPU_ARGS='--only account'. Without a network:
# make gpu WHEELS=wheels, a folder that python -m tests.gpu.wheels has filled elsewhere.
GPU_INDEX := $(if $(WHEELS),--no-index --find-links '$(WHEELS)')
gpu: $(GPU_VENV)/gpu.stamp
	$(GPU_VENV)/bin/python -m tests.gpu $(GPU_ARGS)

lint: $(VENV)/dev.stamp
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

check: lint test

samples: $(VENV)/collect.stamp
	sample_traces/record.sh

site: export PYTHONPATH := $(CURDIR)
site: export NO_MKDOCS_2_WARNING := 1
site: $(VENV)/docs.stamp
	$(VENV)/bin/python -m mkdocs build --strict --quiet
	$(VENV)/bin/python -m website.check_links site

pictures: $(VENV)/dev.stamp
	$(VENV)/bin/python -m tests.benchmarks.pictures $(PICTURES_ARGS)
	$(VENV)/bin/python -m tests.benchmarks.watch_picture

CAMPAIGN_INPUTS ?= 1000000
CAMPAIGN_KILLS ?= 200
CAMPAIGN_RESULTS ?= campaign-results.jsonl
campaign: $(VENV)/dev.stamp
	$(VENV)/bin/python -m tests.campaign inputs --inputs $(CAMPAIGN_INPUTS) --results $(CAMPAIGN_RESULTS) --resume --show
	$(VENV)/bin/python -m tests.campaign kills --count $(CAMPAIGN_KILLS)
	$(VENV)/bin/python -m tests.benchmarks.fuzz_chrome --inputs 100000 --jobs 2 --seed 1 --sanitize
	$(VENV)/bin/python -m tests.benchmarks.sanitized
	$(VENV)/bin/python -m tests.benchmarks.fuzz_metadata --inputs 1000
	$(VENV)/bin/python -m pytest tests/analyzers/test_hostile_files.py tests/collectors/test_secrets.py

clean:
	rm -rf $(VENV) $(FRAMEWORKS_VENV) $(CODEBASES_VENV) $(GPU_VENV) $(DEMO) pictures site gpu-acceptance \
	    build dist *.egg-info .coverage* htmlcov \
	    .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# `make demo` installs what a training environment would have; `make test` and `make lint` add the tools.
$(VENV)/%.stamp: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(VENV)/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[$*]'
	@touch $@

$(FRAMEWORKS_VENV)/frameworks.stamp: pyproject.toml constraints.txt tests/frameworks/requirements.txt | $(FRAMEWORKS_VENV)/bin/python
	$(FRAMEWORKS_VENV)/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	$(FRAMEWORKS_VENV)/bin/python -m pip install --quiet --constraint constraints.txt --requirement tests/frameworks/requirements.txt
	@touch $@

# LitGPT asks for an older huggingface-hub than the others. The last ones lie where only those that need them find them
# (tests/codebases/programs/with_torchvision.py).
$(CODEBASES_VENV)/codebases.stamp: pyproject.toml constraints.txt tests/codebases/requirements.txt tests/codebases/torchvision.txt | $(CODEBASES_VENV)/bin/python
	$(CODEBASES_VENV)/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	$(CODEBASES_VENV)/bin/python -m pip install --quiet --constraint constraints.txt --requirement tests/codebases/requirements.txt
	$(CODEBASES_VENV)/bin/python -m pip install --quiet --no-deps litgpt==0.5.13
	$(CODEBASES_VENV)/bin/python -m pip install --quiet --no-deps --upgrade --target $(CODEBASES_VENV)/torchvision --requirement tests/codebases/torchvision.txt
	@touch $@

# The torch in use is the one to accept: it comes from the interpreter's own packages.
$(GPU_VENV)/gpu.stamp: pyproject.toml | $(GPU_VENV)/bin/python
	$(GPU_VENV)/bin/python -c 'import torch' || { echo "make gpu needs a CUDA build of torch in $(PYTHON)'s packages"; exit 1; }
	$(GPU_VENV)/bin/python -m pip install --quiet $(GPU_INDEX) --editable '.[sampler]' 'nvtx>=0.2.10'
	@touch $@

# An environment on top of another one sees the system's packages only: PYTHON's own are added.
$(GPU_VENV)/bin/python:
	$(PYTHON) -m venv --system-site-packages $(GPU_VENV)
	$(PYTHON) -c 'import sys; print(*(p for p in sys.path if p.endswith("-packages")), sep="\n")' \
	    > "$$($(GPU_VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/of_python.pth"

$(VENV)/bin/python $(FRAMEWORKS_VENV)/bin/python $(CODEBASES_VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit("PerfScope needs Python 3.10 or newer; try: make PYTHON=python3.12 ..." if sys.version_info < (3, 10) else 0)'
	$(PYTHON) -m venv $(@:/bin/python=)
