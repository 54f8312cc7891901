"""Progress: a live bar on a real terminal, plain lines in a pipe, nothing for what is done at once."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios

import pytest

from tests.patience import patient

QUICK = "from laconic.cli import progress\nprogress._SILENT_SECONDS, progress._SECONDS_PER_LINE = 0.0, 0.05\n"
BYTES = """
with progress.progress_bar(lambda: 4000, 'zip') as advance:
    for _ in range(4):
        advance(1000)
        time.sleep(0.1)
"""
WORKING = """
progress._SECONDS_PER_REFRESH = 0.05
with progress.working('measuring the model') as say:
    time.sleep(0.4)
    hidden = os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # as what quiets torch's profiler
    say('measuring the last part')
    time.sleep(0.4)
"""


def in_pipe(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", "import os, time\n" + code], capture_output=True, text=True, timeout=patient(60)
    )
    assert (done.returncode, done.stdout) == (0, "")
    return done.stderr


def on_terminal(code: str) -> str:
    """What a terminal shows of `code`."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))  # a window without width shows no bar
    process = subprocess.Popen([sys.executable, "-c", "import os, time\n" + code], stderr=theirs)
    os.close(theirs)
    shown = b""
    try:
        while part := os.read(ours, 4096):
            shown += part
    except OSError:  # Linux says so that the other end is closed
        pass
    os.close(ours)
    assert process.wait(patient(60)) == 0
    return shown.decode()


def test_bytes_are_a_bar_on_a_terminal_and_lines_in_a_pipe() -> None:
    pytest.importorskip("tqdm")
    bar = on_terminal(QUICK + BYTES)
    assert "zip:" in bar
    assert "\r" in bar
    assert "/4.00k" in bar
    lines = in_pipe(QUICK + BYTES).splitlines()
    assert lines[0] == "laconic: zip: 1.00 KB of 4.00 KB (25%)"
    assert lines[-1] == "laconic: zip: 4.00 KB of 4.00 KB (100%)"


@pytest.mark.ci
def test_work_of_unknown_length_shows_what_is_done_and_for_how_long() -> None:
    pytest.importorskip("tqdm")
    bar = on_terminal(QUICK + WORKING)
    assert "measuring the model, 00:00" in bar
    assert "measuring the last part, 00:0" in bar
    lines = in_pipe(QUICK + WORKING).splitlines()
    assert lines[0] == "laconic: measuring the model"
    assert "laconic: measuring the last part" in lines
    assert len(lines) > 3


def test_a_terminal_without_tqdm_gets_lines() -> None:
    without = "import sys\nsys.modules['tqdm'] = None\n"
    assert "laconic: zip: 1.00 KB of 4.00 KB (25%)\r\n" in on_terminal(without + QUICK + BYTES)


def test_what_is_done_at_once_says_nothing() -> None:
    code = "from laconic.cli import progress\nwith progress.progress_bar(lambda: 1, 'zip') as advance: advance(1)\n"
    assert in_pipe(code + "with progress.working('measuring'): pass\n") == ""
