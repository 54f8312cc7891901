"""Shared by all tests."""

from __future__ import annotations

import atexit
import gc
import os
import re
import sys
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from zlib import crc32

import pytest
import torch
from hypothesis import settings

from tests.patience import measure, slowness

# Small tensors gain nothing from a second thread, and beside other work each operation waits for it: a suite takes up
# to ten times as long then. The same holds for processes that tests start. Tests of threads set their own number.
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"

# Else each worker rewrites and compiles all tests again, and each process that a test starts all that it imports.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# How long an example takes says how busy the machine is. `--hypothesis-profile=ci` has no deadline either.
settings.register_profile("laconic", deadline=None)
settings.load_profile("laconic")

# A seed for a device that is not initialized keeps the text of the stack, three times a seed: a third of what an item
# of pytest costs. The seeds themselves are kept.
for _device in (torch.cuda, torch.mtia, torch.xpu):
    _device.traceback = SimpleNamespace(format_stack=list)  # type: ignore[attr-defined]


_FIRST = (
    "netlab",
    "tests/activations/test_families.py",
    "tests/distributed/test_torch_suite.py",
    "tests/distributed/test_spread_runs.py",
    "tests/distributed/test_faults.py",
    "tests/ops/test_interpreted.py",
    "tests/ops/test_kernel_code.py",
    "tests/test_examples.py",
    "tests/test_side_by_side.py",
    "tests/train/test_lora.py",
    "tests/trust/test_restarts.py",
    "tests/vision/test_resnet.py",
)
"""Groups that take longest, in the slow suite up to minutes, or that are long and would come last: one that begins last
keeps two of three workers waiting."""


_ROOMS = tuple(
    f"tests/{room}/"
    for room in ("activations", "audit", "formats", "gpu_day", "gradients", "moe", "optim", "run", "vision")
)
"""What computes: CI runs a case of every slow test there."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--one-of-each`: what CI runs of the slow suite; `--left-out`: the rest; `--shard`: a share of the files."""
    parser.addoption("--one-of-each", action="store_true", help="of slow tests what CI runs")
    parser.addoption("--left-out", action="store_true", help="of slow tests what CI leaves out")
    parser.addoption("--shard", metavar="K/N", help="the tests of every N-th file or so, from K = 1")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Files of which the default run, or CI of the slow suite, takes nothing are not even imported, unless named."""
    if collection_path.suffix == ".py":
        if config.option.markexpr == "not slow":
            return is_all_slow(collection_path) or None
        if config.option.markexpr == "slow" and config.getoption("one_of_each"):
            return not may_be_one_of_each(collection_path, config.rootpath) or None
    return None


def is_all_slow(file: Path) -> bool:
    """Whether a file of tests marks all of them, each by a line above it or the whole file by `pytestmark`."""
    text = file.read_text(encoding="utf-8")
    if re.search(r"^pytestmark = .*(\n .*)*?pytest\.mark\.(slow|ci)\b", text, re.MULTILINE):
        return True
    blocks = [
        block for block in text.split("\n\n") if re.search(r"^(def test|class Test|[Tt]est\w* = )", block, re.MULTILINE)
    ]
    return bool(blocks) and all(re.search(r"^@pytest\.mark\.(slow|ci)$", block, re.MULTILINE) for block in blocks)


def may_be_one_of_each(file: Path, root: Path) -> bool:
    """Whether `one_of_each` may keep slow tests of a file: by what marks them there, or the fixture `family`."""
    in_rooms = file.relative_to(root).as_posix().startswith(_ROOMS)
    marks = r"slow|\bci\b|\b(grid|few|family)\b" if in_rooms else r"\bci\b"
    return re.search(marks, file.read_text(encoding="utf-8")) is not None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests that share an expensive fixture, or the machine's network, run in the same worker of pytest-xdist."""
    marked = {item for item in items if any(map(item.get_closest_marker, ("slow", "ci")))}
    in_ci = one_of_each(items)
    for file in {item.path for item in in_ci & marked}:
        assert may_be_one_of_each(file, config.rootpath), f"CI of the slow suite leaves out {file}"
    kept = in_ci if config.getoption("one_of_each") else set(items)
    if config.getoption("left_out"):
        kept -= in_ci
    if config.getoption("shard"):
        kept &= in_shard(items, config.getoption("shard"))
    if config.option.markexpr == "not slow":  # before others go through thousands of items that do not run
        kept -= marked
    if len(kept) < len(items):
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = [item for item in items if item in kept]
    for item in items:
        if item.get_closest_marker("ci") is not None:
            item.add_marker(pytest.mark.slow)
    for file in {item.path for item in items if item not in marked}:
        assert not is_all_slow(file), f"the default run leaves out {file}, which has tests that are not slow"
    groups = {}
    for item in items:
        file = item.nodeid.partition("::")[0]
        if file.startswith("tests/netlab/"):
            group = "netlab"
        elif file.startswith("tests/distributed/") and "pair" in getattr(item, "fixturenames", ()):
            group = "pair"
        else:
            group = file
        item.add_marker(pytest.mark.xdist_group(group))
        groups[item] = group
    factor = slowness()
    for item in items:
        if (seconds := stretched_timeout(item, factor)) is not None:
            item.add_marker(pytest.mark.timeout(seconds), append=False)
    items.sort(key=lambda item: _FIRST.index(groups[item]) if groups[item] in _FIRST else len(_FIRST))


def one_of_each(items: list[pytest.Item]) -> set[pytest.Item]:
    """All that is not slow; in `_ROOMS` also one case of every slow test but those that try a benchmark.

    A test of which a case is not slow has none. The case is the same whatever else is collected.
    """
    kept: dict[str, pytest.Item] = {}
    names = {item: item.nodeid.partition("[")[0] for item in items}
    is_slow = {item: item.get_closest_marker("slow") is not None for item in items}
    quick = {names[item] for item in items if not is_slow[item]}
    for item in items:
        if is_slow[item] and (names[item] in quick or not item.nodeid.startswith(_ROOMS) or "benchmark" in item.nodeid):
            continue
        name = names[item] if is_slow[item] else item.nodeid
        if name not in kept or crc32(item.nodeid.encode()) < crc32(kept[name].nodeid.encode()):
            kept[name] = item
    return set(kept.values())


def in_shard(items: list[pytest.Item], shard: str) -> set[pytest.Item]:
    """The items of a shard K/N. A file is in the same one whatever else is collected."""
    found = re.fullmatch(r"([1-9]\d*)/([1-9]\d*)", shard)
    if found is None or int(found[1]) > int(found[2]):
        raise pytest.UsageError(f"--shard is {shard!r}, not K/N with K from 1 to N; say 1/4 for the first of four")
    k, n = int(found[1]), int(found[2])
    return {item for item in items if crc32(item.nodeid.partition("::")[0].encode()) % n == k - 1}


def stretched_timeout(item: pytest.Item, factor: float) -> float | None:
    """The timeout of an item on a machine that is `factor` times slower than a quiet one; None without any."""
    marker = item.get_closest_marker("timeout")
    if marker is None:
        quiet = item.config.getoption("timeout") or item.config.getini("timeout")
    else:
        quiet = marker.args[0] if marker.args else marker.kwargs.get("timeout")
    return factor * float(quiet) if quiet else None


def pytest_configure(config: pytest.Config) -> None:
    """Set what the processes of the tests take over, before anything else runs."""
    measure()
    if not hasattr(config, "workerinput"):
        # Nothing that a user has measured is read, nor what an earlier run has. A build of extensions that is killed
        # leaves a lock which all later ones wait for without limit.
        for variable in ("XDG_CACHE_HOME", "TORCH_EXTENSIONS_DIR"):
            folder = tempfile.TemporaryDirectory(prefix="laconic-tests-", ignore_cleanup_errors=True)
            os.environ[variable] = folder.name
            config.add_cleanup(folder.cleanup)


class _LogsForThoseWhoAsk:
    """Pytest's plugin of logs for tests that take `caplog` alone.

    Around setup, call and teardown it visits all loggers there are, six hundred of them, for those that do not
    propagate. Without it warnings reach standard error, which is captured as well.
    """

    def __init__(self, logs: Any) -> None:
        self._logs = logs

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None, object, object]:
        return (yield from self._logs.pytest_runtest_setup(item)) if _asks(item) else (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, object, object]:
        return (yield from self._logs.pytest_runtest_call(item)) if _asks(item) else (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None, object, object]:
        return (yield from self._logs.pytest_runtest_teardown(item)) if _asks(item) else (yield)


def _asks(item: pytest.Item) -> bool:
    return "caplog" in getattr(item, "fixturenames", ())


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What imports and the collection make stays to the end: no garbage collection looks through it again and again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        atexit.register(gc.unfreeze)  # libraries that look for leaks at exit would find all of it
        gc.set_threshold(20_000)  # with 700 a twentieth of the run is spent on it
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtestloop(session: pytest.Session) -> Generator[None, object, object]:
    """Before the first test: the process from which ranks and commands are forked; logs for tests that ask alone."""
    config = session.config
    processes = sys.modules.get("tests.distributed.processes")
    if processes is not None and not torch.cuda.is_available():  # the copy of a process that has asked CUDA cannot
        config.pluginmanager.getplugin("capturemanager").resume_global_capture()  # what they print is captured
        processes.copy_as_fork_server()
        config.pluginmanager.getplugin("capturemanager").suspend_global_capture()
    logs = config.pluginmanager.get_plugin("logging-plugin")
    if logs is not None and not any(map(config.getoption, ("log_level", "log_cli_level", "log_file"))):
        config.pluginmanager.unregister(logs)
        config.pluginmanager.register(_LogsForThoseWhoAsk(logs))
    return (yield)


@pytest.fixture(autouse=True)
def _nothing_stays() -> Iterator[None]:
    """Each test begins with the same seed, and leaves to later ones of its process:

    - one thread, where it took all cores;
    - what the environment says of ranks and interfaces, which would reach their processes;
    - none of Accelerate's state, whose first one would settle the precision of the next Trainer.
    """
    torch.manual_seed(0)
    before = _network_settings()
    yield
    if torch.get_num_threads() != 1:
        torch.set_num_threads(1)
    if (state := sys.modules.get("accelerate.state")) is not None:
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()
    assert _network_settings() == before


def _network_settings() -> dict[bytes, bytes]:
    prefixes = (b"RANK", b"WORLD_SIZE", b"LOCAL_", b"MASTER_", b"GLOO_", b"NCCL_")
    return {name: value for name, value in os.environb.items() if name.startswith(prefixes)}


@pytest.fixture(scope="module")
def forked_workers() -> Iterator[None]:
    """Engines of this process start their workers without a fresh interpreter."""
    from laconic.infer import control
    from tests.distributed.forked import forked_programs

    with forked_programs(control):
        yield
