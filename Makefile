# `make` alone prints the targets. Settings: PYTHON (3.11 or newer) makes the environments; pip's own PIP_* variables are respected.
PYTHON ?= python3
VENV := .venv
PILLOW_VENV := .venv-pillow
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip
INSTALLED := $(VENV)/.installed
PILLOW_INSTALLED := $(PILLOW_VENV)/.installed
DALI := .dali
DALI_INSTALLED := $(DALI)/.installed
GPU_PYTHON ?= python3

# What changes an installation: the pins, the package's declaration, the native source.
SETUP := pyproject.toml constraints.txt lfdata/format/_native.c lfdata/codecs/_pixels.c tools/debian-packages.sh tools/install-pil.sh
CHECKED := lfdata lftrain tools/shard_builder benchmarks
# The second environment holds plain pillow and only what these tests import; matplotlib needs plain pillow too.
PILLOW_PACKAGES := pillow matplotlib click hypothesis msgspec numpy pytest soundfile soxr tqdm xxhash zstandard
PILLOW_TESTS := $(wildcard tests/codecs/test_image*.py tests/codecs/test_jpeg*.py tests/codecs/test_sniff.py tests/codecs/test_pixels.py tests/benchmarks/test_plot.py)
# DALI and what it needs, in a folder of its own that its tests alone see: it asks for other versions than the rest, and is large.
DALI_PACKAGES := nvidia-dali-cuda120 nvidia-libnvcomp-cu12 nvidia-nvimgcodec-cu12 nvidia-nvjpeg2k-cu12 nvidia-nvjpeg-cu12 nvidia-nvtiff-cu12 \
	nvtx astunparse gast libcst makefun optree six
DALI_TESTS := tests/device/test_dali.py tests/benchmarks/test_gpu_feed.py
LONG := slow or fault or service
GPU := gpu or multigpu
# As many test processes as there are cores.
PARALLEL := -n auto --dist worksteal
DEMO := demo-out

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help install demo lint test test-quick test-pillow test-long test-dali test-all test-gpu clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/make \1\t\2/' | expand -t 18

install: $(INSTALLED)  ## environment in .venv with everything pinned in constraints.txt
	@true

$(INSTALLED): $(SETUP)
	tools/debian-packages.sh
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --constraint constraints.txt pip setuptools wheel
	tools/install-pil.sh $(BIN)/python
	$(PIP) install --quiet --constraint constraints.txt --editable '.[tokenizers,arrow,hdf5,video,yaml,webdataset,remote,gcs,ray,bench,frameworks,safetensors,tensorboard,dev]'
	@$(BIN)/python -c "import PIL, torch; print(f'installed: torch {torch.__version__}, PIL {PIL.__version__}')"
	@touch $@

$(PILLOW_INSTALLED): $(SETUP)
	tools/debian-packages.sh
	$(PYTHON) -m venv $(PILLOW_VENV)
	$(PILLOW_VENV)/bin/python -m pip install --quiet --constraint constraints.txt pip
	$(PILLOW_VENV)/bin/python -m pip install --quiet --constraint constraints.txt $(PILLOW_PACKAGES)
	@touch $@

$(DALI_INSTALLED): $(INSTALLED)
	rm -rf $(DALI)
	$(PIP) install --quiet --no-deps --constraint constraints.txt --target $(DALI) $(DALI_PACKAGES)
	@touch $@

demo: $(INSTALLED)  ## convert the sample set, verify, iterate, contact sheet
	rm -rf $(DEMO)
	mkdir $(DEMO)
	$(BIN)/shard-builder convert samples/dataset/samples.jsonl $(DEMO)/dataset --map samples/dataset/fields.toml
	$(BIN)/shard-builder verify $(DEMO)/dataset
	$(BIN)/shard-builder inspect $(DEMO)/dataset
	$(BIN)/python samples/demo.py $(DEMO)/dataset
	$(BIN)/shard-builder show $(DEMO)/dataset --output $(DEMO)/contact.png

lint: $(INSTALLED)  ## format, style, types, import contracts
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy $(CHECKED)
	$(BIN)/lint-imports

test: lint test-quick test-pillow  ## lint and all quick tests, with both PILs (20 minutes at most)

test-quick: $(INSTALLED)  ## quick tests only
	$(BIN)/python -m pytest $(PARALLEL) -m "not ($(LONG) or $(GPU))"

test-pillow: $(PILLOW_INSTALLED)  ## picture codecs with plain pillow
	$(PILLOW_VENV)/bin/python -m pytest -m "not ($(LONG) or $(GPU))" $(PILLOW_TESTS)

test-long: $(INSTALLED)  ## long fault and property runs, then DALI's
	$(BIN)/python -m pytest $(PARALLEL) -m "($(LONG)) and not ($(GPU))"
	@$(MAKE) $(DALI_INSTALLED) || echo "DALI cannot be installed here (see above): its tests are left out"
	@[ ! -e $(DALI_INSTALLED) ] || $(MAKE) test-dali

test-dali: $(DALI_INSTALLED)  ## pictures decoded by DALI on the processor (a download of some hundred MB)
	PYTHONPATH=$(CURDIR)/$(DALI) $(BIN)/python -m pytest $(PARALLEL) -m "not ($(GPU))" $(DALI_TESTS)

test-all: test  ## test, then test-long (45 minutes at most)
	$(MAKE) test-long

# On a GPU machine the torch that is there is used, so nothing is installed. pytest's exit 5: no such test.
test-gpu:  ## tests that need CUDA, with GPU_PYTHON's torch
	$(GPU_PYTHON) -m pytest -m "$(GPU)" || { code=$$?; [ $$code = 5 ] && echo "no test needs a GPU yet"; }

clean:  ## remove environments, caches and outputs (but no benchmark records)
	[ ! -d bench-data ] || find bench-data -mindepth 1 -maxdepth 1 ! -name records -exec rm -rf {} +
	rm -rf $(VENV) $(PILLOW_VENV) $(DALI) $(DEMO) build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find lfdata lftrain tools benchmarks tests samples -name __pycache__ -prune -exec rm -rf {} +
	find lfdata -name '*.so' -delete
