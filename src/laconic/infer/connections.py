"""Connections between attention workers and expert workers: TCP, one for each pair, both directions at once.

Process groups are not the default for rows: gloo hands a message over when its receiver has asked for it, twice for
header and body, and while both ends compute that wait cost a third of a 400 Mbit/s link. A connection here streams: the
kernel takes and buffers what comes while nobody asks. Those of group_link.py, where answers find a receiver that has
asked, still take 1.2 to 1.3 times as long there.

Expert workers listen at one address of their machine and put it into the store in which all workers meet, with a token
that whoever connects has to know. A shared secret keeps out who can read the store, too (shared_secret.py). Nothing is
encrypted: a network in which strangers can read or change the packets is not safe, as with torch's own groups.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import queue
import secrets
import socket
import struct
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Generic, TypeVar

import psutil
import torch
from torch import Tensor

from laconic.errors import ConfigError
from laconic.infer.connection_table import ConnectionTable, SeldomWarning, is_shortage
from laconic.infer.messages import HEADER_LENGTH, Header
from laconic.shared_secret import admit, enter, seal, unseal

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

T = TypeVar("T")

FOREVER = timedelta(days=3650)
"""How long workers wait for each other: the engine ends those whose peers never come."""

_HELLO_SECONDS = 5.0
_MOST_HEARD = 64
_SHORTAGE_SECONDS = 0.2
_TOKEN_NBYTES = 16
_HELLO = struct.Struct("!I")
"""The number of the attention worker; follows the proof that it takes part."""

_KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 5}
"""A machine that has gone without a word is noticed after 15 s, by a connection on which nothing waits to leave."""
_USER_TIMEOUT_MILLISECONDS = 15_000
"""The same where something waits. It also ends a connection whose other end lives and reads nothing."""


class Connection:
    """One end of a connection, a TCP socket that is its own from now on. Messages arrive whole and in their order."""

    def __init__(self, connected: socket.socket, name: str) -> None:
        self._socket = connected
        connected.settimeout(None)
        keep_alive(connected, reads_at_once=False)
        self._outbox: queue.SimpleQueue[tuple[Header, Tensor | None] | None] = queue.SimpleQueue()
        self._broken: str | None = None
        self._sender = threading.Thread(target=self._send_all, name=f"{name}-out", daemon=True)
        self._sender.start()

    def send(self, header: Header, body: Tensor | None = None) -> None:
        """Send a message without waiting for it to leave; a connection that has broken is a ConnectionError.

        The body, uint8 [header.nbytes] and contiguous, is not changed until the message has arrived.
        """
        if self._broken is not None:
            raise ConnectionError(self._broken)
        self._outbox.put((header, body))

    def receive(self) -> tuple[Header, Tensor]:
        """Wait for a message: its header and body, uint8 [header.nbytes]; a ConnectionError if the link is gone."""
        front = torch.empty(HEADER_LENGTH, dtype=torch.int64, device="cpu")
        self._receive_into(front)
        header = Header.from_tensor(front)
        body = header.make_body(torch.device("cpu"))
        self._receive_into(body)
        return header, body

    def hand_over(self) -> None:
        """Do nothing: a body is whole when `receive` returns it."""

    def close(self) -> None:
        """Send what is waiting, and close; a thread that waits in `receive` ends."""
        self._outbox.put(None)
        self._sender.join(_HELLO_SECONDS)
        self._break("it was closed")
        self._socket.close()

    def _receive_into(self, wanted: Tensor) -> None:
        view, done = _bytes_of(wanted), 0
        while done < len(view):
            try:
                # The kernel waits for all of it: this thread takes the interpreter once, not for every packet.
                count = self._socket.recv_into(view[done:], 0, socket.MSG_WAITALL)
            except OSError as error:
                raise ConnectionError(self._broken or error.strerror or str(error)) from error
            if count == 0:
                raise ConnectionError(self._broken or "the other end has closed the connection")
            done += count

    def _send_all(self) -> None:
        try:
            while (message := self._outbox.get()) is not None:
                header, body = message
                parts = [_bytes_of(header.to_tensor())]
                if body is not None and body.numel():
                    parts.append(_bytes_of(body))
                while parts:
                    sent = self._socket.sendmsg(parts)
                    while parts and sent >= len(parts[0]):
                        sent -= len(parts.pop(0))
                    if parts:
                        parts[0] = parts[0][sent:]
        except OSError as error:
            self._break(error.strerror or str(error))

    def _break(self, why: str) -> None:
        self._broken = self._broken or why
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes whoever waits; its number stays taken until `close`


class Admission(Generic[T]):
    """Connections of those who take part, in the order in which they have said who they are.

    Each is heard in a thread of its own, so that a stranger who says nothing holds up nobody. There are few such
    threads, `most`: a new connection that finds no room ends the one that has been heard for longest. `hear` returns
    what the other end says, None for a stranger, whose connection is closed. `listening` is closed by `close`.
    """

    def __init__(
        self, listening: socket.socket, hear: Callable[[socket.socket], T | None], most: int = _MOST_HEARD
    ) -> None:
        self._listening, self._hear = listening, hear
        host, port = listening.getsockname()[:2]
        # Ranks of one machine have one address, so an address may have all that there is room for.
        self._table, self._lock = ConnectionTable(f"the listener at {host}:{port}", most, most), threading.Lock()
        self._short = SeldomWarning(
            f"the listener at {host}:{port} could not accept, %d times since it last said so: no descriptor is left;"
            " raise `ulimit -n`"
        )
        self._heard: queue.SimpleQueue[tuple[socket.socket, T]] = queue.SimpleQueue()
        self._closed = threading.Event()
        threading.Thread(target=self._accept_all, name="laconic-accept", daemon=True).start()

    def next(self, seconds: float | None = None) -> tuple[socket.socket, T]:
        """Wait for the next one, whose connection is the caller's; TimeoutError if nobody comes within `seconds`."""
        try:
            return self._heard.get(timeout=None if seconds is None else max(0.0, seconds))
        except queue.Empty:
            raise TimeoutError(f"nobody came within {seconds:g} s") from None

    def close(self) -> None:
        """Listen no more, and close the connections that nobody has taken."""
        self._closed.set()
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)  # which ends `accept`
        self._listening.close()
        with contextlib.suppress(queue.Empty):
            while True:
                self._heard.get_nowait()[0].close()

    def _accept_all(self) -> None:
        while True:
            try:
                connected, address = self._listening.accept()
            except ConnectionAbortedError:
                continue
            except OSError as error:
                if self._closed.is_set() or not is_shortage(error):
                    return  # `listening` is closed
                self._short.add()
                self._closed.wait(_SHORTAGE_SECONDS)
                continue
            with self._lock:
                self._table.enter(connected, str(address[0]), functools.partial(_hang_up, connected))
            threading.Thread(target=self._hear_one, args=(connected,), daemon=True).start()

    def _hear_one(self, connected: socket.socket) -> None:
        try:
            said = self._hear(connected)
        finally:
            with self._lock:
                self._table.leave(connected)
        if said is None or self._closed.is_set():
            connected.close()
        else:
            self._heard.put((connected, said))


def _hang_up(connected: socket.socket) -> None:
    """End a connection that another thread reads, which then closes it."""
    with contextlib.suppress(OSError):
        connected.shutdown(socket.SHUT_RDWR)


def accept_attention(store: Store, number: int, attention: int) -> list[Connection]:
    """Wait, as expert worker `number`, for all attention workers; returns a connection to each, in their order."""
    token = secrets.token_hex(_TOKEN_NBYTES)
    with _listen(own_address()) as listening:
        store.set(_key(number), seal(_key(number), json.dumps([*listening.getsockname()[:2], token])))
        found: dict[int, Connection] = {}
        admission = Admission(listening, lambda connected: _read_hello(connected, token, number))
        while len(found) < attention:
            connected, rank = admission.next()
            if rank in found or rank >= attention:
                connected.close()
                continue
            found[rank] = Connection(connected, f"laconic-attention-{rank}")
        admission.close()
    return [found[rank] for rank in range(attention)]


def connect_expert(store: Store, number: int, rank: int) -> Connection:
    """Connect, as attention worker `rank`, to expert worker `number`, once it is there, or raise a ConfigError."""
    store.set_timeout(FOREVER)
    address, port, token = json.loads(unseal(_key(number), store.get(_key(number))))
    connected = None
    try:
        connected = socket.create_connection((address, port), timeout=15.0)
        enter(connected, token, _purpose(number), seconds=15.0)
        connected.sendall(_HELLO.pack(rank))
    except ConfigError:
        assert connected is not None
        connected.close()
        raise
    except OSError as error:
        if connected is not None:
            connected.close()
        raise ConfigError(
            f"attention worker {rank} on {socket.gethostname()} cannot reach expert worker {number} at"
            f" {address}:{port} ({error.strerror or error}); let the workers' machines reach each other, and name the"
            " interface by which they do in GLOO_SOCKET_IFNAME"
        ) from error
    return Connection(connected, f"laconic-expert-{number}")


def own_address() -> str:
    """Return the address of this machine by which other workers reach it; a ConfigError if there is none.

    It is that of the interface GLOO_SOCKET_IFNAME, as for torch's groups; without one, that from which MASTER_ADDR is
    reached; without either, the loopback address.
    """
    if name := os.environ.get("GLOO_SOCKET_IFNAME"):
        name = name.partition(",")[0]
        known = psutil.net_if_addrs()
        for family in (socket.AF_INET, socket.AF_INET6):
            for address in known.get(name, ()):
                if address.family == family:
                    return str(address.address)
        raise ConfigError(
            f"GLOO_SOCKET_IFNAME is {name!r}, but the interfaces with an address are {', '.join(sorted(known))}"
        )
    master = os.environ.get("MASTER_ADDR")
    if master is None:
        return "127.0.0.1"
    try:
        family, kind, _, _, place = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(place)  # nothing is sent
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ConfigError(
            f"MASTER_ADDR is {master!r}, to which {socket.gethostname()} has no way ({error.strerror}); name an"
            " interface in GLOO_SOCKET_IFNAME"
        ) from error


def keep_alive(connected: socket.socket, reads_at_once: bool) -> None:
    """Let a TCP connection notice a machine that has gone, and send small messages at once.

    An end that does not read at once, as it computes meanwhile or stands still, may let megabytes wait.
    """
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    limits = _KEEPALIVE | ({"TCP_USER_TIMEOUT": _USER_TIMEOUT_MILLISECONDS} if reads_at_once else {})
    for name, value in limits.items():
        if hasattr(socket, name):
            connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.view(torch.uint8).numpy().data


def _listen(address: str) -> socket.socket:
    try:
        family, _, _, _, place = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        return socket.create_server(place[:2], family=family, backlog=128)
    except OSError as error:
        raise ConfigError(
            f"{socket.gethostname()} cannot listen at {address} ({error.strerror}); name another interface in"
            " GLOO_SOCKET_IFNAME"
        ) from error


def _key(number: int) -> str:
    return f"expert worker {number}"


def _purpose(number: int) -> str:
    return f"rows of expert worker {number}"


def _read_hello(connected: socket.socket, token: str, number: int) -> int | None:
    if not admit(connected, token, _purpose(number), _HELLO_SECONDS):
        return None
    connected.settimeout(_HELLO_SECONDS)
    try:
        (rank,) = _HELLO.unpack(connected.recv(_HELLO.size, socket.MSG_WAITALL))
    except (OSError, struct.error):
        return None
    return int(rank)
