"""Files that survive a crash, and the checksums that tell whether they did."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import IO, Any

__all__ = ["fsync_directory", "fsync_file", "sha256_of"]


def fsync_file(file: IO[Any]) -> None:
    """Wait until what was written to `file` is on the disk."""
    file.flush()
    os.fsync(file.fileno())


def fsync_directory(directory: Path) -> None:
    """Wait until the names in `directory` (new files, renames) are on the disk."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256_of(path: Path) -> bytes:
    """SHA-256 of a file's bytes."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").digest()
