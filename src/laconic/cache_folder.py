"""Where files are kept that can be made again: measured rates, token files. No torch."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """laconic in $XDG_CACHE_HOME, or in ~/.cache; with the ~ as it is for a user without a home directory."""
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "laconic"


def is_homeless(path: Path) -> bool:
    """Whether a path is in the home directory of a user who has none, as in some containers: nothing can be there."""
    return path.parts[:1] == ("~",)
