"""This installation: what a user types to install it again and to call the command, and how it starts processes."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import shlex
import shutil
import sys
from pathlib import Path
from urllib.parse import urlparse
from urllib.request import url2pathname

IS_RELEASED = False
"""Whether a package index has laconic. Until it has, pages and messages name a checkout or a wheel."""


def source(direct_url: str | None = None) -> str:
    """What to give `pip install`, quoted for a shell, to get this laconic again.

    Args:
        direct_url: what pip noted at the installation (PEP 610); None reads this installation's.
    """
    if direct_url is None:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            direct_url = importlib.metadata.distribution("laconic").read_text("direct_url.json")
    if direct_url:
        noted = json.loads(direct_url)
        path = Path(url2pathname(urlparse(noted["url"]).path))
        if noted["url"].startswith("file:") and path.exists():
            editable = "-e " if noted.get("dir_info", {}).get("editable") else ""
            return editable + shlex.quote(str(path))
    return "laconic" if IS_RELEASED else "CHECKOUT_OR_WHEEL"


def command() -> str:
    """`laconic` where the shell's PATH leads to this environment's, else its full path, quoted for a shell."""
    own = Path(sys.executable).parent / "laconic"
    found = shutil.which("laconic")
    if not own.exists() or (found is not None and Path(found).samefile(own)):
        return "laconic"
    return shlex.quote(str(own))


def module_command(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module of this installation in a process of its own.

    `python -m` alone looks for modules in the current folder first. A user's queue.py or random.py there would be taken
    for Python's, in a process whose parent, such as the command `laconic`, does not look there.
    """
    return [sys.executable, *safe_path(), "-m", module, *arguments]


def safe_path() -> list[str]:
    """Return the flags with which another process looks for modules in the current folder only if this one does."""
    try:
        here = os.path.realpath(os.getcwd())
    except OSError:  # it has been removed
        return ["-P"]
    return [] if any(os.path.realpath(path or here) == here for path in sys.path) else ["-P"]
