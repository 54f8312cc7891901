"""Settings handshake through a backend without tags (NCCL), where a message meets whatever the peer does next.

Every call begins with an announcement between every two ranks, as long in all calls of a group whatever they are: that
of a rank always meets that of its peer, also if the two mean different calls. An all-gather by those ranks to which the
settings are new would meet the messages of those that know them already.

Reading an announcement makes the host wait for the device. A rank does so where it has not yet seen its settings agreed
on in this group (everything but what may vary from call to call), and where it waits for lengths anyway. Else the
announcements are copied to the host behind the values, and compared when they are there, by the group's next call or
by a thread. Where ranks disagree although each knows its settings, messages of unequal length may have met already:
they hang. Then the thread aborts the group, so that what waits for it goes on, and every rank raises the same error.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch import Tensor

from laconic.collectives.engine.handshake import GROUP_ENDED, Announcement, Peers, Splits
from laconic.collectives.runtime import torch_compat
from laconic.collectives.runtime.device_streams import Ready
from laconic.collectives.runtime.group_facts import fail, raise_if_failed
from laconic.errors import ConfigError

_VARYING = ("numel", "num_gradients", "splits", "src", "dst")
"""Settings that may be others in every call; the rest are a program's few kinds of calls."""

_MAX_KINDS = 256
"""Kinds of calls that are remembered per group."""

_known: WeakKeyDictionary[dist.ProcessGroup, set[tuple[object, ...]]] = WeakKeyDictionary()


def remember(announcement: Announcement, group: dist.ProcessGroup) -> None:
    """All ranks of `group` agree on these settings. What is forgotten is read once more."""
    kinds = _known.setdefault(group, set())
    if len(kinds) >= _MAX_KINDS:
        kinds.clear()
    kinds.add(_kind_of(announcement))


def all_wait(fronts: Mapping[int, bytes]) -> bool:
    """Whether no rank sends values before it has read the announcements of all, by group rank."""
    return not any(front[-1] for front in fronts.values())


def _kind_of(announcement: Announcement) -> tuple[object, ...]:
    return tuple(item for item in announcement.settings.items() if item[0] not in _VARYING)


class DeviceHandshake:
    """Announcements of one call, to and from each peer, all other ranks of the group, on their way.

    `is_known` says whether this rank has seen all ranks agree on such calls before, so that it need not wait.
    """

    def __init__(
        self, group: dist.ProcessGroup, peers: Peers, announcement: Announcement, device: torch.device
    ) -> None:
        self._device, self._me = device, group.rank()
        self.is_known = _kind_of(announcement) in _known.get(group, ())
        # As long in every call of the group.
        self._front = announcement.pack().ljust(len(announcement.line) + Splits.nbytes(group.size()), b"\0")
        self._front += bytes([self.is_known])
        mine = _host_tensor(len(self._front), device)
        mine.copy_(torch.frombuffer(bytearray(self._front), dtype=torch.uint8))
        self._sent = mine = mine.to(device, non_blocking=True)
        self._peers = peers.group_ranks
        self._received = torch.empty(len(self._peers), len(self._front), dtype=torch.uint8, device=device)
        operations = [
            dist.P2POp(dist.irecv, row, group=group, group_peer=peer)
            for peer, row in zip(self._peers, self._received, strict=True)
        ]
        operations += [dist.P2POp(dist.isend, mine, group=group, group_peer=peer) for peer in self._peers]
        self.sent_nbytes = len(self._front) * len(self._peers)
        """Bytes that leave this rank."""
        self._works: Sequence[dist.Work] = torch_compat.batch_isend_irecv(operations)
        self._copy: Tensor | None = None

    def collect(self) -> None:
        """Let the announcements be copied to the host behind what the current stream has been given so far."""
        if self._copy is not None:
            return
        for work in self._works:
            work.wait()
        self._copy = _host_tensor(self._received.numel(), self._device).view(self._received.shape)
        self._copy.copy_(self._received, non_blocking=True)
        self._ready = Ready(self._device)

    @property
    def are_here(self) -> bool:
        """Whether `read` would return at once. Call `collect` before."""
        return self._ready.is_over

    def read(self) -> dict[int, bytes]:
        """Wait for what all ranks announce, this one included, by group rank. Call `collect` before."""
        assert self._copy is not None
        self._ready.synchronize()
        rows = [row.numpy().tobytes() for row in self._copy]
        return dict(zip(self._peers, rows, strict=True)) | {self._me: self._front}


def _host_tensor(nbytes: int, device: torch.device) -> Tensor:
    """Memory of the host, uint8 [nbytes], from and to which copies do not make the host wait."""
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda", device="cpu")


# --- announcements that no host waits for ---

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
    """Compare announcements of earlier calls on `group` that are there; a ConfigError if ranks disagreed in one."""
    with _changed:
        of_group = [entry for entry in _pending if entry.group() is group]
    for entry in of_group[: max(0, len(of_group) - _MAX_PENDING)]:
        _compare(entry)
    _compare_those_here(of_group)
    raise_if_failed(group)


def _start() -> None:
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
