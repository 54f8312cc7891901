"""Announcements that no host waits for: compared when they are there, by the group's next call or by a thread.

Where ranks disagree although each knows its settings, messages of unequal length may have met already: they hang. Then
the thread aborts the group, so that what waits for it goes on, and every rank raises the same error.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from weakref import ref

import torch.distributed as dist

from laconic.collectives.engine.device_handshake import DeviceHandshake
from laconic.collectives.engine.handshake import GROUP_ENDED, Announcement
from laconic.collectives.runtime.group_failures import fail, raise_if_failed
from laconic.errors import ConfigError

__all__ = ["poll", "watch"]

_POLL_SECONDS = 0.05

_MAX_PENDING = 256
"""Announcements of a group that are not compared yet; the host waits for the oldest when there are more."""


@dataclass(frozen=True, eq=False)
class _Pending:
    group: ref[dist.ProcessGroup]
    handshake: DeviceHandshake
    announcement: Announcement
    ranks: Sequence[int]

    def compare(self) -> None:
        """Compare; if ranks differ, end the group."""
        group = self.group()
        try:
            self.announcement.check(self.handshake.read(), self.ranks, GROUP_ENDED)
        except ConfigError as error:
            if group is not None:
                fail(group, error)


_changed = threading.Condition()
_pending: list[_Pending] = []
_thread: threading.Thread | None = None


def watch(
    group: dist.ProcessGroup, handshake: DeviceHandshake, announcement: Announcement, ranks: Sequence[int]
) -> None:
    """Compare the announcements of a call later; `collect` was called."""
    entry = _Pending(ref(group), handshake, announcement, ranks)
    with _changed:
        _pending[:] = [*(other for other in _pending if other.group() is not None), entry]
        _start()
        _changed.notify()


def poll(group: dist.ProcessGroup) -> None:
    """Compare announcements of earlier calls on `group` that are there.

    Raises:
        ConfigError: ranks disagreed in one of them.
    """
    with _changed:
        of_group = [entry for entry in _pending if entry.group() is group]
    for entry in of_group[: max(0, len(of_group) - _MAX_PENDING)]:
        _compare(entry)
    _compare_those_here(of_group)
    raise_if_failed(group)


def _start() -> None:
    """Start the thread if it does not run."""
    global _thread
    if _thread is None or not _thread.is_alive():
        _thread = threading.Thread(target=_serve, name="laconic-announcements", daemon=True)
        _thread.start()


def _serve() -> None:
    while True:
        with _changed:
            while not _pending:
                _changed.wait()
            entries = list(_pending)
        _compare_those_here(entries)
        time.sleep(_POLL_SECONDS)


def _compare_those_here(entries: Sequence[_Pending]) -> None:
    for entry in entries:
        try:
            if entry.handshake.are_here:
                _compare(entry)
        except RuntimeError:  # of the device: there is nothing to compare any more, and other calls report it
            _remove(entry)


def _compare(entry: _Pending) -> None:
    entry.compare()
    _remove(entry)


def _remove(entry: _Pending) -> None:
    with _changed:
        if entry in _pending:
            _pending.remove(entry)
