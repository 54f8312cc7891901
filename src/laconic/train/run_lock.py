"""Lock of a run directory: one run at a time.

A second run in the same directory would cut the first one's metrics and remove its checkpoints. The file `lock.json`
names the holder: host, process and since when. The holder touches it every few seconds. A lock whose holder is gone is
taken over: on the same machine that is seen from the process (and its start, for process numbers are used again),
elsewhere from a lock that nobody touches any more. Clocks of different machines are never compared.

Where a launcher starts the processes of a run, and starts them again when one is lost, the lock is the launcher's: it
names that process, so no other run gets in between two attempts, and the first process of each attempt takes it over.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import IO, Any

import psutil

from laconic.durable import fsync_file
from laconic.errors import CheckpointError, ConfigError
from laconic.json_text import parse_json

logger = logging.getLogger(__name__)

LOCK_FILE = "lock.json"
"""Its name in a run directory."""

_BEAT_SECONDS = 10.0
_SILENCE_SECONDS = 60.0
"""A lock of another machine that is not touched for so long counts as released."""
_POLL_SECONDS = 1.0
_NO_FLOCK = {errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL}


class RunLock:
    """A run directory's lock; a context manager that releases it, and holds nothing before `acquire`.

    Args:
        launch: id of the launch that has started this process, whose parent is the launcher then. The lock names the
            launcher, may be taken from an earlier process of the same launch, and stays when the block fails.
    """

    def __init__(self, launch: str | None = None) -> None:
        self._launch = launch
        self._holder = os.getpid() if launch is None else os.getppid()
        self._file: Path | None = None
        self._token = secrets.token_hex(8)
        self._done = threading.Event()
        self._lost = False

    def acquire(self, run_dir: Path) -> None:
        """Take the lock of `run_dir`, which is made if it does not exist.

        May wait a minute to see whether a holder on another machine is alive.
        """
        file = run_dir / LOCK_FILE
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            self._take(file)
        except OSError as error:
            raise ConfigError(
                f"run_dir is {str(run_dir)!r}, which cannot be written: {error.strerror or error}"
            ) from error
        self._file = file
        threading.Thread(target=self._beat, name="run lock", daemon=True).start()

    def check(self) -> None:
        """Check that the lock is still held."""
        if self._file is not None and (self._lost or _token_of(self._file) != self._token):
            self._lost = True
            raise CheckpointError(
                f"{self._file} is no longer this run's: it was removed, or another run went on in its directory while "
                "this one was suspended; nothing more is written"
            )

    def __enter__(self) -> RunLock:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._done.set()
        if self._file is None or (self._launch is not None and kind is not None):
            return  # the launcher's: it starts the processes again, or ends
        with contextlib.suppress(OSError), _exclusive(self._file) as stream:
            if _parsed(stream).get("token") == self._token:
                self._file.unlink()

    def _take(self, file: Path) -> None:
        watched: tuple[Any, int] | None = None
        since = 0.0
        while True:
            with _exclusive(file) as stream:
                holder = _parsed(stream)
                seen = holder.get("token"), os.fstat(stream.fileno()).st_mtime_ns
                own = _is_of_launch(holder, self._launch, self._holder)
                alive = False if own else _is_alive(holder)
                if alive is None and watched is not None:
                    if seen != watched:
                        alive = True  # it has touched its lock, or another run has taken it
                    elif time.monotonic() - since > _SILENCE_SECONDS:
                        alive = False
                if alive is False:
                    if holder and not own:
                        logger.warning("taking over from %s, which is gone", _described(holder))
                    _write(stream, _record(self._token, self._holder) | {"launch": self._launch})
                    return
            if alive:
                raise ConfigError(
                    f"run_dir is {str(file.parent)!r}, where {_described(holder)} is at work; stop it or choose "
                    f"another run_dir (if it is not there any more, delete {file})"
                )
            if watched is None:
                watched, since = seen, time.monotonic()
                logger.warning(
                    "waiting up to %.0f s to see whether %s is still at work", _SILENCE_SECONDS, _described(holder)
                )
            time.sleep(_POLL_SECONDS)

    def _beat(self) -> None:
        assert self._file is not None
        while not self._done.wait(_BEAT_SECONDS):
            if _token_of(self._file) != self._token:
                self._lost = True
                return
            with contextlib.suppress(OSError):  # a disk that is full or away; `check` decides
                os.utime(self._file)


@contextlib.contextmanager
def keep_for_launch(run_dir: Path, launch: str) -> Iterator[None]:
    """Keep the lock that processes of this launcher take in `run_dir`, also while none of them runs.

    Args:
        run_dir: need not exist yet.
    """
    file, done = run_dir / LOCK_FILE, threading.Event()

    def touch() -> None:
        while not done.wait(_BEAT_SECONDS):
            with contextlib.suppress(OSError):
                if _is_of_launch(_read(file), launch, os.getpid()):
                    os.utime(file)

    threading.Thread(target=touch, name="run lock", daemon=True).start()
    try:
        yield
    finally:
        done.set()
        if _is_of_launch(_read(file), launch, os.getpid()):
            with contextlib.suppress(OSError), _exclusive(file) as stream:
                if _is_of_launch(_parsed(stream), launch, os.getpid()):
                    file.unlink()


@contextlib.contextmanager
def _exclusive(file: Path) -> Iterator[IO[bytes]]:
    """`file`, made if need be, opened by one process at a time where the file system can tell."""
    while True:
        with open(file, "a+b") as stream:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX)
            except OSError as error:
                if error.errno not in _NO_FLOCK:
                    raise
            try:
                same = os.stat(file).st_ino == os.fstat(stream.fileno()).st_ino
            except FileNotFoundError:
                same = False
            if same:  # else its holder has removed it while we waited
                yield stream
                return


def _parsed(stream: IO[bytes]) -> dict[str, Any]:
    stream.seek(0)
    try:
        content = parse_json(stream.read())
    except ValueError:
        return {}
    whole = isinstance(content, dict) and all(name in content for name in _record("", os.getpid()))
    return content if whole else {}


def _read(file: Path) -> dict[str, Any]:
    try:
        with open(file, "rb") as stream:
            return _parsed(stream)
    except OSError:
        return {}


def _token_of(file: Path) -> Any:
    return _read(file).get("token")


def _write(stream: IO[bytes], content: dict[str, Any]) -> None:
    stream.seek(0)
    stream.truncate()
    stream.write(json.dumps(content, indent=1).encode() + b"\n")
    fsync_file(stream)


def _record(token: str, pid: int) -> dict[str, Any]:
    return {
        "token": token,
        "host": socket.gethostname(),
        "machine": _machine(),
        "pid": pid,
        "started": _started(pid),
        "since": datetime.now().astimezone().isoformat(timespec="seconds"),
    }


def _described(holder: dict[str, Any]) -> str:
    return f"a run (pid {holder['pid']} on {holder['host']}, since {holder['since']})"


def _is_of_launch(holder: dict[str, Any], launch: str | None, launcher: int) -> bool:
    """Whether a process of this launch holds the lock, for the process `launcher` of this machine.

    The id alone would not tell: users give torchrun's rendezvous the same one again.
    """
    if launch is None or not holder or holder.get("launch") != launch:
        return False
    expected = _record("", launcher)
    return all(holder[name] == expected[name] for name in ("host", "machine", "pid", "started"))


def _is_alive(holder: dict[str, Any]) -> bool | None:
    if not holder:
        return False
    if (holder["host"], holder["machine"]) != (socket.gethostname(), _machine()):
        return None
    started = _started(holder["pid"]) if isinstance(holder["pid"], int) else None
    return started is not None and started == holder["started"]


def _machine() -> str:
    """Identity of this machine as processes see it: the kernel's boot and the process namespace."""
    parts = []
    for read in (
        lambda: Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip(),
        lambda: os.readlink("/proc/self/ns/pid"),
    ):
        with contextlib.suppress(OSError):
            parts.append(read())
    return " ".join(parts)


def _started(pid: int) -> str | None:
    """When process `pid` began, as its kernel counts; None if there is none, or only its remains."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        return None if fields[0] in "ZX" else fields[19]
    except (OSError, IndexError):
        pass
    if Path("/proc/self/stat").exists():
        return None
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else str(process.create_time())
    except (psutil.Error, ValueError, OverflowError):
        return None
