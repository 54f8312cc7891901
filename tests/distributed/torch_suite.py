"""torch's own tests of its backends, over one backend: `python -m tests.distributed.torch_suite BACKEND OPTIONS FILE`.

The suite, `torch.testing._internal.distributed.distributed_test`, asks in many places whether the backend is called
"gloo" or "mpi", and skips or chooses accordingly. `_Name` answers yes, so that all that torch runs on CPU tensors over
either of them is run; what it then asks of the process group is left as it is. Processes are forked from one that has
imported the suite, since an import takes longer than most tests.

Writes a line of JSON per test to FILE: name, "passed", "failed" or "skipped", seconds, reason.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import re
import sys
import time
import traceback
import unittest
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from laconic.collectives import Lossless, ProcessGroupOptions, audit

__all__ = ["OPTIONS", "main"]

OPTIONS: dict[str, ProcessGroupOptions | None] = {
    "default": None,
    "coded": ProcessGroupOptions(Lossless(), min_nbytes=0),
}
"""What groups are made with. By default nearly all messages of the suite are too short to be coded."""


class _Name(str):
    """A backend's name that passes for gloo's and MPI's where the suite asks."""

    __slots__ = ()
    _LIKE = ("gloo", "mpi")

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other) is True or other in self._LIKE

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash("gloo")  # sets of backends that have a feature are asked for gloo's


def _suite(backend: str, world_size: int, *, has_events: bool) -> Any:
    """The suite's module, which reads its environment when it is imported."""
    # torch.testing's class of tests is a child of this package's, which is not needed for anything else.
    sys.modules.setdefault("expecttest", mock.Mock(TestCase=unittest.TestCase))
    # "mpi" is for tests that torch runs in large worlds only, MPI's excepted.
    os.environ |= {"WORLD_SIZE": str(world_size), "BACKEND": "mpi"}
    from torch.testing._internal.common_distributed import DistTestCases

    DistTestCases.backend_feature["plugin"].add(backend)
    with mock.patch.object(os, "environ", {**os.environ, "BACKEND": _Name(backend), "INIT_METHOD": "file://"}):
        from torch.testing._internal.distributed import distributed_test as suite
    if has_events:
        for names in (suite.PROFILING_SUPPORTED_BACKENDS, suite.SEND_RECV_PROFILING_SUPPORTED_BACKENDS):
            names.append(backend)
        suite.get_profiling_event = _under_name_of(backend, suite.get_profiling_event)
    return suite


def _under_name_of(backend: str, find: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """What gloo carried for `backend` is "gloo:all_reduce" in profiles, and the suite asks for the backend's name."""

    def get_profiling_event(event_name: str, *args: Any, **kwargs: Any) -> list[Any]:
        events = find(event_name.replace(f"{backend}:", "gloo:"), *args, **kwargs)
        found = [copy.copy(event) for event in events]
        for event in found:
            event.name = event.name.replace("gloo:", f"{backend}:")
        return found

    return get_profiling_event


def _with_options(make: Callable[..., None], options: ProcessGroupOptions | None, backend: str) -> Callable[..., None]:
    @wraps(make)
    def init_process_group(*args: Any, **kwargs: Any) -> None:
        assert not args, "the suite names its arguments"
        assert kwargs["backend"] == backend
        make(**{**kwargs, "backend": backend, "pg_options": options})

    return init_process_group


def _tests(backend: str, options: ProcessGroupOptions | None, world_size: int) -> type[unittest.TestCase]:
    # torch's profiler sees what gloo is handed, and of coded collectives nothing but their dispatch.
    suite = _suite(backend, world_size, has_events=options is None)

    processes: Any = suite.TestDistBackend
    questions: Any = suite.DistributedTest._DistTestBase

    class TorchSuite(processes, questions):
        def setUp(self) -> None:
            super().setUp()
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

        def tearDown(self) -> None:
            folder = Path(os.environ["TEMP_DIR"])
            self.num_coded = sum(int(file.read_text()) for file in folder.glob("coded-*"))
            super().tearDown()

        def _check_return_codes(self, *args: Any) -> None:
            super()._check_return_codes(*args)
            # The suite looks at those of ranks that raise, and of the first.
            codes = [process.exitcode for process in self.processes]
            assert len(set(codes)) == 1, f"exit codes {codes}"

        @classmethod
        def _run(cls, rank: int, *args: Any, **kwargs: Any) -> None:
            torch.set_num_threads(1)
            suite.INIT_METHOD = os.environ["INIT_METHOD"]  # another one for each test
            dist.init_process_group = _with_options(dist.init_process_group, options, backend)
            try:
                super()._run(rank, *args, **kwargs)
            finally:
                coded = sum(entry.num_calls for entry in audit.snapshot().entries if entry.codec != "raw")
                Path(os.environ["TEMP_DIR"], f"coded-{rank}").write_text(str(coded))

    return TorchSuite


class _Written(unittest.TestResult):
    """Writes each result down at once, so that it is known where a run was when it was stopped."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self._file = file

    def startTest(self, test: unittest.TestCase) -> None:
        super().startTest(test)
        self._started, self._outcome, self._reason = time.monotonic(), "passed", ""

    def stopTest(self, test: unittest.TestCase) -> None:
        super().stopTest(test)
        line = {
            "name": test._testMethodName,
            "outcome": self._outcome,
            "seconds": round(time.monotonic() - self._started, 2),
            "reason": self._reason,
            "num_coded": getattr(test, "num_coded", 0),
        }
        with self._file.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        super().addSkip(test, reason)
        self._outcome, self._reason = "skipped", reason

    def addFailure(self, test: unittest.TestCase, err: Any) -> None:
        super().addFailure(test, err)
        self._outcome, self._reason = "failed", "".join(traceback.format_exception(*err))

    addError = addFailure


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("backend")
    parser.add_argument("options", choices=OPTIONS)
    parser.add_argument("file", type=Path)
    parser.add_argument("--world-size", type=int, default=4)
    parser.add_argument("--only", default="", help="a regular expression found in the names of tests")
    given = parser.parse_args()
    tests = _tests(given.backend, OPTIONS[given.options], given.world_size)
    names = [name for name in unittest.TestLoader().getTestCaseNames(tests) if re.search(given.only, name)]
    result = _Written(given.file)
    for name in names:
        tests(name).run(result)


if __name__ == "__main__":
    main()
