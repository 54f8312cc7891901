"""How this installation starts processes of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from laconic.installation import module_command, safe_path


def test_a_file_of_the_users_folder_is_not_taken_for_a_module_of_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "queue.py").write_text("raise RuntimeError('this is no module of Python')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    command = module_command("concurrent.futures.thread")  # which imports queue
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    assert safe_path() == []
    monkeypatch.setattr(sys, "path", [os.path.join(tmp_path, "."), *sys.path[1:]])
    assert safe_path() == []


def test_a_folder_that_is_gone_is_not_looked_into(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert safe_path() == ["-P"]
