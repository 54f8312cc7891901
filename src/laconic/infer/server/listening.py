"""The server's listener under uvicorn: time limits for request heads, and bounds on connections.

uvicorn waits for ever for a head that never ends, and takes as many connections as come; when descriptors run out,
asyncio logs each of thousands of failed calls of `accept` in a loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from laconic.errors import ConfigError
from laconic.infer.connection_table import ConnectionTable, SeldomWarning, descriptors_left, is_shortage

_MOST_CONNECTIONS = 1024
_RESERVED_DESCRIPTORS = 64  # for workers that start again, files, and connections that are being closed
_ACCEPTED_AT_ONCE = 16
_NO_ROOM = b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nRetry-After: 1\r\nContent-Length: 0\r\n\r\n"


@dataclass(frozen=True)
class ConnectionLimits:
    """Bounds on a server's connections, each at least 1.

    Attributes:
        max_connections: at once; None is 1024, or fewer as the process has descriptors for.
        max_connections_per_address: of one client's address; None is three quarters of all.
        head_seconds: for the head of a request, from the connection or from the head's first byte.
    """

    max_connections: int | None = None
    max_connections_per_address: int | None = None
    head_seconds: int = 10

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}, but it must be at least 1")

    def table(self) -> ConnectionTable:
        """Return a table of these bounds, as many connections as this process has descriptors for now."""
        most = self.max_connections or min(_MOST_CONNECTIONS, descriptors_left(_RESERVED_DESCRIPTORS))
        return ConnectionTable("the server", most, self.max_connections_per_address or max(1, most * 3 // 4))


def serve_http(app: Starlette, listening: socket.socket, limits: ConnectionLimits, drain_seconds: int) -> None:
    """Serve until SIGTERM or SIGINT, in the main thread; at a stop requests have `drain_seconds` to end.

    `listening` is closed at the end.
    """
    config = uvicorn.Config(
        app,
        loop="asyncio",  # whose `accept` is the socket's
        http=limited_protocol(limits.table(), limits.head_seconds),  # type: ignore[arg-type]
        log_level="warning",
        lifespan="off",
        # Longer than clients keep idle connections, so that none sends a request while the server hangs up.
        timeout_keep_alive=75,
        timeout_graceful_shutdown=drain_seconds,
    )
    with CautiousSocket(listening) as cautious:
        uvicorn.Server(config).run(sockets=[cautious])


class CautiousSocket(socket.socket):
    """A listening socket for asyncio's loop that accepts a few connections in each round of it.

    A loop accepts as many as its backlog before it hears of the first, so that no bound would hold. When descriptors
    run out, waiting connections are closed with one that was kept for that, since they would wake the loop again.
    """

    def __init__(self, listening: socket.socket) -> None:
        super().__init__(fileno=listening.detach())
        self._accepted = 0
        self._spare = os.open(os.devnull, os.O_RDONLY)
        self._short = SeldomWarning("the server has no descriptor left: turned %d connections away; raise `ulimit -n`")

    def accept(self) -> tuple[socket.socket, Any]:
        """Accept a connection; BlockingIOError if nobody waits, or the loop has to go on first."""
        if self._accepted >= _ACCEPTED_AT_ONCE:
            raise BlockingIOError
        if self._accepted == 0:
            asyncio.get_running_loop().call_soon(self._next_round)
        self._accepted += 1
        try:
            return super().accept()
        except OSError as error:
            if not is_shortage(error):
                raise
        self._accepted = _ACCEPTED_AT_ONCE
        self._turn_away()
        raise BlockingIOError

    def close(self) -> None:
        """Listen no more."""
        if self._spare >= 0:
            os.close(self._spare)
            self._spare = -1
        super().close()

    def _next_round(self) -> None:
        self._accepted = 0

    def _turn_away(self) -> None:
        if self._spare >= 0:
            os.close(self._spare)
            self._spare = -1
        with contextlib.suppress(OSError):
            super().accept()[0].close()
            self._short.add()
        with contextlib.suppress(OSError):
            self._spare = os.open(os.devnull, os.O_RDONLY)


def limited_protocol(table: ConnectionTable, head_seconds: float) -> Callable[..., asyncio.Protocol]:
    """Return a protocol for `uvicorn.Config(http=...)` whose connections are those of `table`; see ConnectionLimits."""
    protocol: Any = AutoHTTPProtocol

    class Limited(protocol):
        _deadline: asyncio.TimerHandle | None = None
        _is_taken = False

        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            address = self.client[0] if self.client else ""
            self._is_taken = table.enter(self, address, transport.abort)
            if self._is_taken:
                self._await_head()
            else:
                transport.write(_NO_ROOM)
                transport.close()

        def data_received(self, data: bytes) -> None:
            if not self._is_taken:
                return
            super().data_received(data)
            if self._is_answering():
                self._stop_waiting()
                table.busy(self)
            elif self._deadline is None:
                self._await_head()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            if not self._is_answering():
                table.silent(self, self.transport.abort)

        def connection_lost(self, error: Exception | None) -> None:
            self._stop_waiting()
            table.leave(self)
            super().connection_lost(error)

        def _is_answering(self) -> bool:
            return self.cycle is not None and not self.cycle.response_complete

        def _await_head(self) -> None:
            if not self.transport.is_closing():
                self._deadline = self.loop.call_later(head_seconds, self.transport.abort)

        def _stop_waiting(self) -> None:
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None

    return Limited
