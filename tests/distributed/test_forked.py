"""A forked program is the process that a fresh interpreter would be, as far as tests ask."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.distributed.forked import ForkedPython, forked_programs
from tests.distributed.processes import is_running
from tests.patience import patient

pytestmark = pytest.mark.slow

PROGRAM = """
import os, signal, sys, warnings
print(__name__, sys.argv[1:], os.getcwd(), os.environ["MINE"], "HOME" in os.environ, os.getsid(0) == os.getpid())
print(sys.stdin.readline(), end="", file=sys.stderr)
if sys.argv[1] == "warn":
    warnings.warn("now")
if sys.argv[1] == "wait":
    print("ready", flush=True)
    signal.pause()
sys.exit(int(sys.argv[2]))
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "made_up_program.py").write_text(PROGRAM)
    monkeypatch.syspath_prepend(tmp_path)
    return "made_up_program"


def start(program: str, *arguments: str, **options: object) -> ForkedPython:
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    return ForkedPython([sys.executable, "-m", program, *arguments], **pipes, **options)  # type: ignore[arg-type]


def test_arguments_environment_streams_and_exit_code(program: str, tmp_path: Path) -> None:
    process = start(program, "end", "7", env={"MINE": "yes"}, cwd=tmp_path, start_new_session=True)
    process.stdin.write("a line\n")
    process.stdin.close()
    out, err = process.communicate(20)
    assert (out, err) == (f"__main__ ['end', '7'] {tmp_path} yes False True\n", "a line\n")
    assert process.wait(patient(1)) == process.poll() == process.returncode == 7


@pytest.mark.skipif(torch.cuda.is_available(), reason="forked from a fresh interpreter beside CUDA")
def test_it_has_what_was_collected_and_nothing_of_pytests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "made_up_looks.py").write_text(
        f"import logging, sys\nprint({__name__!r} in sys.modules)\nlogging.getLogger('made up').warning('heard')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with start("made_up_looks") as process:
        assert process.communicate(20) == ("True\n", "heard\n")


def test_an_error_is_told_and_warnings_are_errors_where_asked(program: str) -> None:
    for warnings, code in (("default", 0), ("error", 1)):
        with start(program, "warn", "0", env={"MINE": "", "PYTHONWARNINGS": warnings}) as process:
            process.stdin.close()
            _, err = process.communicate(20)
        assert process.returncode == code
        assert "UserWarning: now" in err
        assert ("Traceback" in err) == (code == 1)


def test_signals_and_time_limits(program: str) -> None:
    process = start(program, "wait", "0", env={"MINE": ""})
    process.stdin.write("\n")
    process.stdin.flush()
    while process.stdout.readline() != "ready\n":
        pass
    assert process.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.01)
    process.send_signal(signal.SIGTERM)
    assert process.wait(patient(20)) == -signal.SIGTERM
    process.send_signal(signal.SIGKILL)  # nobody is hit
    assert not is_running(process.pid)
    process.communicate(1)
    process.stdin.close()


def test_only_modules_of_python_are_forked_and_only_where_asked(program: str) -> None:
    module: Any = ModuleType("starts")
    module.subprocess = subprocess
    with forked_programs(module):
        popen = module.subprocess.Popen
        with popen([sys.executable, "-m", program, "end", "0"], env={"MINE": ""}, stdout=subprocess.PIPE) as process:
            assert isinstance(process, ForkedPython)
            process.communicate(20)
        with popen([sys.executable, "-S", "-c", "print(5)"], stdout=subprocess.PIPE) as fresh:
            assert isinstance(fresh, subprocess.Popen)
            assert fresh.communicate(timeout=patient(20))[0] == b"5\n"
    assert module.subprocess is subprocess
