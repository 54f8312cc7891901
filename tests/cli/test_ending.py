"""How a command ends from outside: signals, a reader that leaves, and what becomes of child processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.patience import patient

SLEEPING = """
import signal, sys, time, types
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in what a shell has put into the background
from laconic.cli import main
stand_in = types.ModuleType("laconic.cli.doctor")
def run(args):
    try:
        print("ready", flush=True)
        time.sleep(60)
    finally:
        print("cleaned up", flush=True)
stand_in.run = run
sys.modules["laconic.cli.doctor"] = stand_in
sys.exit(main.main(["doctor"]))
"""
PROFILE = """
import contextlib, sys, types
stand_in = types.ModuleType("laconic.train.launch.rendezvous")
stand_in.local_rendezvous = lambda folder: contextlib.nullcontext(print("ready", flush=True))
sys.modules["laconic.train.launch.rendezvous"] = stand_in
world = types.ModuleType("laconic.train.distributed.world")
world.join_world, world.read_environment = None, lambda environment: None
sys.modules["laconic.train.distributed.world"] = world
sys.executable = sys.argv[1]
from laconic.cli.main import main
sys.exit(main(["profile", "--nproc", "2"]))
"""


@pytest.mark.parametrize(
    ("number", "code", "said"), [(signal.SIGINT, 130, "laconic: interrupted\n"), (signal.SIGTERM, 143, "")]
)
def test_a_signal_ends_a_command_in_order(number: signal.Signals, code: int, said: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SLEEPING], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    out, err = process.communicate(timeout=patient(60))
    assert (process.returncode, out, err) == (code, "cleaned up\n", said)


def test_child_processes_are_gone_after_a_signal(tmp_path: Path) -> None:
    child = tmp_path / "child"
    child.write_text("#!/bin/sh\ntrap '' TERM\nexec sleep 300\n")  # as a rank that waits in a collective
    child.chmod(0o755)
    process = subprocess.Popen(
        [sys.executable, "-c", PROFILE, str(child)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    deadline = time.monotonic() + 60
    while len(children := psutil.Process(process.pid).children()) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.terminate()
    _, err = process.communicate(timeout=patient(120))
    assert process.returncode == 143, err
    assert "Traceback" not in err
    assert not [one for one in children if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]


def test_a_reader_that_leaves_ends_a_command_with_0() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as pipe:
        done = subprocess.run(
            [sys.executable, "-m", "laconic", "train", "--print-config"],
            stdout=pipe,
            stderr=subprocess.PIPE,
            text=True,
            timeout=patient(60),
        )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_script_of_run_finds_the_signals_of_a_fresh_interpreter(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import signal\nassert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL\nprint('fine')\n")
    done = subprocess.run(
        [sys.executable, "-m", "laconic", "run", str(script)], capture_output=True, text=True, timeout=patient(200)
    )
    assert (done.returncode, done.stdout) == (0, "fine\n"), done.stderr
