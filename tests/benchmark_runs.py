"""Running benchmarks. As a program this prints the tables of one, whose ranks on hosts of a lab are forked, too."""

from __future__ import annotations

import subprocess
import sys

from benchmarks.run import main
from netlab import program
from tests.distributed.forked import ForkedPython, forked_programs
from tests.distributed.processes import ROOT, finish
from tests.patience import patient

__all__ = ["run", "run_command", "tables"]


def tables(*arguments: str) -> str:
    """What `run` prints of a benchmark that succeeds."""
    result = run(*arguments)
    assert result.returncode == 0, result.stderr
    return result.stdout


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The tables of a benchmark with one thread, from a forked process: the command without a report around them."""
    command = [sys.executable, "-m", __name__, *arguments, "--threads", "1"]
    ending = finish(ForkedPython(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE), 250)
    return subprocess.CompletedProcess(command, ending.code, ending.out, ending.err)


def run_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command as it is typed."""
    command = [sys.executable, "-m", "benchmarks.run", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=patient(250), check=False)


if __name__ == "__main__":
    with forked_programs(program):
        sys.exit(main([*sys.argv[1:], "--part"]))
