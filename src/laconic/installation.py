"""What a user types for this installation, for messages: what to install again, and how to call the command."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
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
