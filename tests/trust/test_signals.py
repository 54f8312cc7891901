"""Ctrl-C, SIGTERM and SIGHUP at random moments: a known exit code, and no process or temporary file is left."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping
from pathlib import Path

import pytest

from laconic.infer.bench.demo_model import save_demo_model
from tests.distributed.processes import environment, wait_until
from tests.patience import patient

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

_ENDLESS = {129, 130, 143}
_SHORT = {*_ENDLESS, -1, -2, -15}  # the last three: while the interpreter ends itself, which no longer listens
COMMANDS: Mapping[str, tuple[list[str], set[int]]] = {
    "train": (["train", "--steps", "100000", "--nproc", "2", "--run-dir", "run"], _ENDLESS),
    "profile": (["profile", "--out", "rates.json"], _ENDLESS),
    "profile --moe": (["profile", "--moe", "--moe-out", "rates.json"], _ENDLESS),
    "advise": (["advise", "model"], _SHORT),
    "generate": (["generate", "--model", "model", "--prompt", "a", "--max-new-tokens", "1500"], _SHORT),
    "bench": (["bench", "infer", "--model", "model"], _SHORT),
    "serve": (["serve", "--model", "model", "--port", "0"], {0, *_ENDLESS}),  # 0: SIGTERM or SIGHUP while it serves
    "run": (["run", "script.py"], {-1, -15, *_ENDLESS}),  # negative: as `python script.py` would
    "zip": (["zip", "model", "--out", "zipped"], _SHORT),
}
"""Arguments of each, and the exit codes it may end with, beside 0 when it was done before the signal."""
_SCRIPT = """
import time, torch
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8))
for _ in range(6000):
    model(torch.ones(4, 8)).sum().backward()
    time.sleep(0.01)
"""
_START = (
    "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
    "signal.signal(signal.SIGHUP, signal.SIG_DFL); "  # the suite itself may run under nohup
    "from laconic.cli.main import main; open('begun', 'x').close(); sys.exit(main(sys.argv[1:]))"
)


def processes_with(mark: str) -> list[str]:
    """Command lines of what runs with `mark` in its environment, which all descendants inherit."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and mark.encode() in (folder / "environ").read_bytes():
                state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
                found += [(folder / "cmdline").read_text().replace("\0", " ")] if state != "Z" else []
        except OSError:
            continue
    return found


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("name", COMMANDS)
def test_a_signal_at_any_moment_leaves_nothing(name: str, number: signal.Signals, tmp_path: Path) -> None:
    arguments, codes = COMMANDS[name]
    rng = random.Random(f"{name} {number}")
    if "model" in arguments:
        save_demo_model(tmp_path / "model", hidden_size=32, layers=2, experts=4)
    (tmp_path / "script.py").write_text(_SCRIPT)
    (tmp_path / "temporary").mkdir()
    mark = f"mark-{uuid.uuid4().hex}"
    process = subprocess.Popen(
        [sys.executable, "-c", _START, *arguments],
        cwd=tmp_path,
        # As a user has it: no ResourceWarning where a signal ends an import amid the reading of a file.
        env=environment(TMPDIR=str(tmp_path / "temporary"), LACONIC_TEST_MARK=mark, PYTHONWARNINGS="ignore"),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        wait_until((tmp_path / "begun").exists)
        time.sleep(rng.uniform(0.0, patient(4.0)))
        was_done = process.poll() is not None
        if rng.random() < 0.5:
            process.send_signal(number)  # as `kill` does
        elif not was_done:
            os.killpg(process.pid, number)  # as a terminal does
        _, error = process.communicate(timeout=patient(60))
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise
    assert process.returncode in (codes | {0} if was_done or codes is _SHORT else codes), error
    assert "Traceback" not in error, error
    deadline = time.monotonic() + patient(10)  # workers see that their parent has gone
    while (left := processes_with(mark)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left
    kept = [path.name for path in (tmp_path / "temporary").iterdir() if not path.name.startswith("torchinductor")]
    assert not kept
