"""How many connections a listener holds, and which of them goes when there are too many.

Whoever can reach a listener can open connections and say nothing, without a key. So the number of connections is
bounded, in all and by address, below what the process has descriptors for; and where a new one finds no room, the one
that has been silent for longest is closed. A connection whose request is being answered is never closed for another.
"""

from __future__ import annotations

import errno
import logging
import time
from collections import Counter
from collections.abc import Callable, Hashable

import psutil

from laconic.errors import ConfigError

_WARNING_SECONDS = 10.0


class SeldomWarning:
    """Logs `text`, whose %d is how often it would have been logged, at most every ten seconds."""

    def __init__(self, text: str) -> None:
        self._text, self._count, self._next = text, 0, 0.0

    def add(self) -> None:
        """Count, and log if it is time to."""
        self._count += 1
        if (now := time.monotonic()) >= self._next:
            logging.getLogger("laconic").warning(self._text, self._count)
            self._count, self._next = 0, now + _WARNING_SECONDS


class ConnectionTable:
    """The connections of the listener `what`, at most `most` and `most_of_address` of one address; not locked."""

    def __init__(self, what: str, most: int, most_of_address: int) -> None:
        for name, value in (("most", most), ("most_of_address", most_of_address)):
            if value < 1:
                raise ConfigError(f"{name} of {what} is {value}, but there must be room for at least 1 connection")
        self._most, self._most_of_address = most, most_of_address
        self._addresses: dict[Hashable, str] = {}
        self._count = Counter[str]()
        self._silent: dict[Hashable, Callable[[], None]] = {}  # in the order in which they fell silent
        self._closed = SeldomWarning(f"{what}: closed %d silent connections to make room for others")
        self._refused = SeldomWarning(f"{what}: refused %d connections, since all that there is room for are busy")

    def __len__(self) -> int:
        return len(self._addresses)

    def enter(self, key: Hashable, address: str, close: Callable[[], None]) -> bool:
        """Take a connection, which is silent so far; False without room for it.

        `close` ends it, at once or later, to make room.
        """
        if self._count[address] >= self._most_of_address:
            room = self._close_silent(address)
        else:
            room = len(self._addresses) < self._most or self._close_silent(None)
        if not room:
            self._refused.add()
            return False
        self._addresses[key] = address
        self._count[address] += 1
        self._silent[key] = close
        return True

    def busy(self, key: Hashable) -> None:
        """Keep a connection: it has said what it wants."""
        self._silent.pop(key, None)

    def silent(self, key: Hashable, close: Callable[[], None]) -> None:
        """Let a connection go where there is no room: it has had its answer."""
        self._silent.pop(key, None)
        if key in self._addresses:
            self._silent[key] = close

    def leave(self, key: Hashable) -> None:
        """Forget a connection, if it is known."""
        self._silent.pop(key, None)
        if (address := self._addresses.pop(key, None)) is not None:
            self._count[address] -= 1
            if not self._count[address]:
                del self._count[address]

    def _close_silent(self, address: str | None) -> bool:
        """Close the connection that has been silent for longest, of one address or of all."""
        key = next((key for key in self._silent if address in (None, self._addresses[key])), None)
        if key is None:
            return False
        close = self._silent[key]
        self.leave(key)
        self._closed.add()
        close()
        return True


def descriptors_left(reserved: int) -> int:
    """Return how many descriptors this process may still open, less `reserved`, and at least 8."""
    process = psutil.Process()
    limit = process.rlimit(psutil.RLIMIT_NOFILE)[0] if hasattr(process, "rlimit") else 1024
    limit = 1 << 20 if limit < 0 else limit  # without one
    opened = process.num_fds() if hasattr(process, "num_fds") else 64
    return max(8, limit - opened - reserved)


def is_shortage(error: OSError) -> bool:
    """Whether a connection could not be accepted because descriptors or memory are used up, which may pass."""
    return error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
