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

from laconic.infer.bench.demo_model import save_demo_model
from tests.patience import patient

SLEEPING = """
import signal, sys, time, types
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in what a shell has put into the background
from laconic.cli import main
stand_in = types.ModuleType("laconic.cli.doctor")
def run(args):
    try:
        print("ready", flush=True)
        for _ in range(1200):  # a signal may come just before a sleep begins, which then takes all its time
            time.sleep(0.05)
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

SIGNALLED = """
import os, signal, subprocess
signal.signal(signal.SIGINT, signal.default_int_handler)
started = []
def start(self, args, *more, _start=subprocess.Popen._execute_child, **named):
    _start(self, args, *more, **named)  # has forked; the new object is not yet the caller's
    if any(each.endswith("{program}") for each in args):
        started.append(self.pid)
        print(self.pid, flush=True)
        if len(started) == {started}:
            os.kill(os.getpid(), {number})
subprocess.Popen._execute_child = start
"""

IMPORTING = """
import signal, sys, types
signal.signal(signal.SIGINT, signal.default_int_handler)
from laconic.cli import main
stand_in = types.ModuleType("laconic.cli.doctor")
def run(args):
    import swallows
    print("went on", flush=True)
    import time
    time.sleep(60)
stand_in.run = run
sys.modules["laconic.cli.doctor"] = stand_in
sys.exit(main.main(["doctor"]))
"""
SWALLOWS = """
import os, signal, time
try:
    for _ in range({times}):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.2)
    print("imported", flush=True)
except KeyboardInterrupt:
    print("raised within", flush=True)
    raise
"""


def start_as_a_shell_does(args: list[str], folder: Path) -> subprocess.Popen[str]:
    """Start laconic in a process group of its own, as a shell does; its temporary files are in a folder."""
    script = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "from laconic.cli.main import main; sys.exit(main(sys.argv[1:]))"
    )
    (folder / "temporary").mkdir()
    return subprocess.Popen(
        [sys.executable, "-c", script, *args],
        cwd=folder,
        env=os.environ | {"TMPDIR": str(folder / "temporary")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def left_in(folder: Path) -> list[str]:
    """Temporary files but torch's own cache."""
    return [path.name for path in (folder / "temporary").iterdir() if not path.name.startswith("torchinductor")]


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


@pytest.mark.ci  # it waits until they are killed
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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("started", [1, 2])
def test_a_signal_while_a_child_process_starts_ends_it_too(
    number: signal.Signals, started: int, tmp_path: Path
) -> None:
    child = tmp_path / "child"
    child.write_text("#!/bin/sh\nexec sleep 300\n")
    child.chmod(0o755)
    script = SIGNALLED.format(program="child", started=started, number=int(number))
    done = subprocess.run(
        [sys.executable, "-c", script + PROFILE, str(child)],
        capture_output=True,
        text=True,
        timeout=patient(60),  # a child that is left would hold the pipes for longer
    )
    assert done.returncode == 128 + number, done.stderr
    ready, *pids = done.stdout.split()
    assert (ready, len(pids)) == ("ready", started)
    assert not [pid for pid in map(int, pids) if psutil.pid_exists(pid)]


@pytest.mark.parametrize(
    ("started", "number"),
    [
        (2, signal.SIGTERM),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in ((1, signal.SIGTERM), (1, signal.SIGINT))),
        pytest.param(2, signal.SIGINT, marks=pytest.mark.slow),
    ],
)
@pytest.mark.ci
def test_a_signal_while_an_engine_starts_a_worker_ends_it_too(
    number: signal.Signals, started: int, tmp_path: Path
) -> None:
    save_demo_model(tmp_path, hidden_size=32, layers=2, experts=4)
    script = SIGNALLED.format(program="laconic.infer.worker", started=started, number=int(number))
    script += "import sys\nfrom laconic.cli.main import main\nsys.exit(main(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", script, "generate", "--model", str(tmp_path), "--prompt", "a"],
        capture_output=True,
        text=True,
        timeout=patient(100),
    )
    assert done.returncode == 128 + number, done.stderr
    pids = done.stdout.split()
    assert len(pids) == started
    assert not [pid for pid in map(int, pids) if psutil.pid_exists(pid)]


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


@pytest.mark.ci
def test_a_script_of_run_finds_the_signals_of_a_fresh_interpreter(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import signal\nassert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL\nprint('fine')\n")
    done = subprocess.run(
        [sys.executable, "-m", "laconic", "run", str(script)], capture_output=True, text=True, timeout=patient(200)
    )
    assert (done.returncode, done.stdout) == (0, "fine\n"), done.stderr


@pytest.mark.parametrize(("times", "said"), [(1, "imported\n"), (2, "raised within\n")])
def test_ctrl_c_within_an_import_waits_for_its_end_and_a_second_does_not(times: int, said: str, tmp_path: Path) -> None:
    (tmp_path / "swallows.py").write_text(SWALLOWS.format(times=times))
    variables = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}
    done = subprocess.run(
        [sys.executable, "-c", IMPORTING], env=variables, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (130, "laconic: interrupted\n")
    assert done.stdout in (said, said + "went on\n")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code", "said"),
    [(signal.SIGINT, 130, "laconic: interrupted\n"), (signal.SIGTERM, -15, ""), (signal.SIGKILL, -9, "")],
)
def test_a_signal_at_a_script_of_run_leaves_nothing(
    number: signal.Signals, code: int, said: str, tmp_path: Path
) -> None:
    (tmp_path / "script.py").write_text(
        "import time\nprint('ready', flush=True)\nfor _ in range(6000):\n    time.sleep(0.05)\n"
    )
    process = start_as_a_shell_does(["run", "script.py"], tmp_path)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    os.killpg(process.pid, number)
    out, err = process.communicate(timeout=100)
    assert (process.returncode, out, err) == (code, "", said)  # those of a script without laconic, but for Ctrl-C
    assert not left_in(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["at once", "processes", "measuring"])
def test_ctrl_c_at_a_profile(moment: str, tmp_path: Path) -> None:
    process = start_as_a_shell_does(["profile", "--out", "rates.json"], tmp_path)
    of_parent = psutil.Process(process.pid)
    children: list[psutil.Process] = []
    deadline = time.monotonic() + 100
    while moment != "at once" and len(children := of_parent.children()) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    if moment == "measuring":  # when the processes have met, there is a store to meet in, and threads of gloo
        while not all(child.num_threads() > 2 for child in children) and time.monotonic() < deadline:
            time.sleep(0.05)
    time.sleep(patient(1.0))
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=100)
    assert process.returncode == 130, err
    assert out == ""
    progress = "laconic: measuring "  # what it had reached
    said = [line for line in err.splitlines() if not line.startswith(progress)]
    # Python itself complains in a process that is interrupted while its interpreter starts.
    assert (said[-1:] if moment == "at once" else said) == ["laconic: interrupted"], err
    assert not left_in(tmp_path)
    assert not (tmp_path / "rates.json").exists()
    assert not [one for one in children if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]
