"""Files that appear whole or not at all and survive a crash, and SHA-256 digests to verify them. No torch."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import IO, Any

from laconic.errors import CheckpointError

_WRITEBACK_NBYTES = 1 << 22
_WRITE = 2  # SYNC_FILE_RANGE_WRITE
_NO_HARD_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EMLINK, errno.ENOSYS}


def fsync_file(file: IO[Any]) -> None:
    """Wait until what was written to `file` is on the disk."""
    file.flush()
    os.fsync(file.fileno())


def begin_writeback(file: IO[Any], start: int, stop: int) -> None:
    """Have the kernel begin to write to the disk what it was given, so that fsync has less to wait for.

    Args:
        file: open for writing.
        start, stop: bytes of it that were written just now; nothing is done unless they end a piece of 4 MB.
    """
    sync = _sync_file_range()
    if sync is not None and start // _WRITEBACK_NBYTES != stop // _WRITEBACK_NBYTES:
        sync(file.fileno(), 0, 0, _WRITE)  # all of the file; it hints, so what it answers does not matter


@cache
def _sync_file_range() -> Callable[[int, int, int, int], int] | None:
    """The system's function, which Linux has and Python does not."""
    try:
        function = ctypes.CDLL(None).sync_file_range
    except (AttributeError, OSError, TypeError):
        return None
    function.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    return function


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


def write_whole(path: Path, text: str) -> None:
    """Write a text file that appears whole or not at all, in the place of one of its name; a crash may lose it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[IO[bytes]]:
    """A file to write that gets the name `path` when the block ends, complete and on the disk.

    When the block raises there is no such file, and one that appeared meanwhile is not overwritten.

    Raises:
        CheckpointError: `path` exists or cannot be written.
    """
    temporary = _temporary(path)
    with _refusal(path):
        try:
            with open(temporary, "xb") as file:
                yield file
                fsync_file(file)
            _rename_new(temporary, path)
            fsync_directory(path.parent)
        finally:
            with contextlib.suppress(OSError):
                os.unlink(temporary)


@contextlib.contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """A directory to fill that gets the name `path` when the block ends; the caller fsyncs its files.

    An empty directory may be at `path`.

    Raises:
        CheckpointError: anything else is at `path`, or it cannot be written.
    """
    temporary = _temporary(path)
    with _refusal(path, empty_directory=True):
        try:
            temporary.mkdir()
            yield temporary
            for directory, _, _ in os.walk(temporary):
                fsync_directory(Path(directory))
            os.rename(temporary, path)  # refuses what is not an empty directory
            fsync_directory(path.parent)
        except CheckpointError as error:  # of a file inside, whose name is of no use once it is gone
            raise CheckpointError(str(error).replace(str(temporary), str(path))) from error
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.tmp-{secrets.token_hex(4)}")


@contextlib.contextmanager
def _refusal(path: Path, empty_directory: bool = False) -> Iterator[None]:
    """Turn failures of the system into an error that names `path`; checks first whether the name is free."""
    try:
        if os.path.lexists(path) and not (empty_directory and path.is_dir() and not any(path.iterdir())):
            raise CheckpointError(f"{path} exists already; it is not overwritten, so remove it or choose another name")
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise CheckpointError(f"cannot write {path}: {error.strerror or error}") from error


def _rename_new(temporary: Path, path: Path) -> None:
    """Give a file its name unless something else has it."""
    try:
        os.link(temporary, path)
    except OSError as error:
        if error.errno not in _NO_HARD_LINKS:
            raise
        if os.path.lexists(path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path)) from None
        os.rename(temporary, path)
