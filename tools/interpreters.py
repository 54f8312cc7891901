"""Where the interpreter of a version of Python is: on the PATH, or among pyenv's."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

__all__ = ["find_interpreter"]


def find_interpreter(version: str) -> Path | None:
    """Return an interpreter of a version such as 3.12 that starts; None if there is none."""
    on_path = shutil.which(f"python{version}")
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    of_pyenv = sorted(pyenv.glob(f"versions/{version}.*/bin/python"), reverse=True)
    for candidate in [*([Path(on_path)] if on_path else []), *of_pyenv]:
        if _starts(candidate, version):
            return candidate
    return None


def _starts(candidate: Path, version: str) -> bool:
    """Whether it runs and is what its name says; a shim of pyenv does not where its version is not switched on."""
    script = "import sys; print('.'.join(map(str, sys.version_info[:2])))"
    done = subprocess.run([str(candidate), "-c", script], capture_output=True, text=True, check=False)
    return done.returncode == 0 and done.stdout.strip() == version
