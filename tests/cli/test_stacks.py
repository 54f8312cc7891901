"""`laconic doctor --pid`: the rank that the others wait for is named first, and what cannot be read is an error."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from laconic.cli import stacks
from laconic.cli.main import main
from laconic.cli.stacks import read_stacks, render_stacks


def process(rank: int | None, *frames: str, busy: bool = False) -> dict[str, Any]:
    main_thread = {"name": "MainThread", "busy": busy, "frames": list(frames)}
    idle = {"name": "pin_memory", "busy": False, "frames": ["wait threading.py:1"]}
    return {"pid": 100 + (rank or 0), "rank": rank, "command": "python train.py", "threads": [main_thread, idle]}


def test_the_rank_that_is_elsewhere_comes_first() -> None:
    reducing = ["all_reduce c10d.py:9", *(f"outer train.py:{line}" for line in range(20))]
    text = render_stacks(
        [process(None, "wait agent.py:1"), process(0, *reducing), process(1, "read data.py:5"), process(2, *reducing)]
    )
    assert text.splitlines()[:2] == ["rank 1: read data.py:5", "ranks 0, 2: all_reduce c10d.py:9"]
    assert "rank 1, pid 101: python train.py\n  MainThread, waiting\n    read data.py:5\n  and 1 waiting thread" in text
    assert "and 5 outer frames; --json has all" in text


def test_what_cannot_be_read_is_an_error_with_its_remedy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(stacks.shutil, "which", lambda name: None)
    monkeypatch.setattr(stacks.sys, "executable", "/nowhere/python")
    assert main(["doctor", "--pid", "1"]) == 2
    assert "pip install 'laconic[debug]'" in capsys.readouterr().err
    monkeypatch.setattr(stacks.shutil, "which", lambda name: "py-spy")
    for pid in ("-1", "4194305", "1" * 30):
        assert main(["doctor", "--pid", pid]) == 2
        assert "there is no such process" in capsys.readouterr().err
    refused = SimpleNamespace(
        returncode=1,
        stderr="Error: Permission Denied: Try running again with elevated permissions\n\nStack backtrace:\n   0: main",
    )
    monkeypatch.setattr(stacks.subprocess, "run", lambda *_, **__: refused)
    assert main(["doctor", "--pid", str(os.getpid())]) == 2
    assert "Permission Denied" in (said := capsys.readouterr().err)
    assert "SYS_PTRACE" in said
    assert "backtrace" not in said


@pytest.mark.slow  # a fresh interpreter, and py-spy reads it
def test_a_waiting_process_and_its_child_are_read() -> None:
    if not stacks.program():
        pytest.skip("py-spy is not installed")
    waits = "import time\ndef load_batch():\n    print('there', flush=True); time.sleep(100)\nload_batch()"
    starts = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {waits!r}])"
    with subprocess.Popen(
        [sys.executable, "-c", starts], stdout=subprocess.PIPE, env=os.environ | {"RANK": "3"}
    ) as parent:
        try:
            assert parent.stdout is not None
            assert parent.stdout.readline() == b"there\n"
            found = read_stacks(parent.pid)
        finally:
            for child in stacks.psutil.Process(parent.pid).children():
                child.kill()
    assert [one["rank"] for one in found] == [3, 3]
    assert any(one["threads"][0]["frames"][0].startswith("load_batch") for one in found), json.dumps(found)
