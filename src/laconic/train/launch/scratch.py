"""The launcher's scratch folder, which goes even when the launcher is killed.

A small process of its own waits at a pipe whose other end only the launcher holds. When that end closes, whatever
closed it, the folder is removed.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["scratch_folder"]

# Processes of a launcher that was killed leave at once, but may still be writing: hence a second and a third try.
_REMOVER = """
import shutil, sys, time
sys.stdin.buffer.read()
for pause in (0, 1, 3):
    time.sleep(pause)
    shutil.rmtree(sys.argv[1], ignore_errors=True)
"""
_LEAVE_SECONDS = 10.0


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """A new folder that only this user can enter; removed at the end of the block or of this process."""
    folder = Path(tempfile.mkdtemp(prefix="laconic-"))
    # Isolated and without site-packages it starts in some 20 ms; a session of its own keeps Ctrl-C away from it.
    remover = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _REMOVER, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        remover.kill()  # the folder is gone
        assert remover.stdin is not None
        with contextlib.suppress(OSError):
            remover.stdin.close()
        remover.wait(_LEAVE_SECONDS)
