"""What the kernel counts is what was sent, whoever sent it and however it was cut."""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laconic.run.tcp import tcp_sent_nbytes

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux counts")


@contextmanager
def connected(family: socket.AddressFamily, address: str) -> Iterator[tuple[socket.socket, socket.socket]]:
    with closing(socket.socket(family, socket.SOCK_STREAM)) as listener:
        listener.bind((address, 0))
        listener.listen()
        with closing(socket.create_connection(listener.getsockname()[:2])) as client:
            server, _ = listener.accept()
            with closing(server):
                yield client, server


def receive(connection: socket.socket, nbytes: int) -> None:
    while nbytes:
        nbytes -= len(connection.recv(min(nbytes, 1 << 16)))


@linux
@pytest.mark.parametrize(("family", "address"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])
@settings(max_examples=20)
@given(sizes=st.lists(st.integers(1, 300_000), min_size=1, max_size=5))
def test_bytes_sent_are_counted_once(family: socket.AddressFamily, address: str, sizes: list[int]) -> None:
    if family is socket.AF_INET6 and not os.path.exists("/proc/net/if_inet6"):
        pytest.skip("no IPv6 here")
    with connected(family, address) as (client, server):
        before = tcp_sent_nbytes()
        reader = threading.Thread(target=receive, args=(server, sum(sizes)))
        reader.start()
        for size in sizes:
            client.sendall(bytes(size))
        reader.join()
        after = tcp_sent_nbytes()
    assert before is not None
    assert after is not None
    assert after - before == sum(sizes)


@linux
def test_other_sockets_and_files_count_nothing() -> None:
    before = tcp_sent_nbytes()
    one, other = socket.socketpair()
    datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    unconnected = socket.socket()
    with closing(one), closing(other), closing(datagrams), closing(unconnected):
        one.send(b"x" * 1000)
        datagrams.sendto(b"x" * 1000, ("127.0.0.1", 9))
        assert tcp_sent_nbytes() == before


def test_elsewhere_nothing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert tcp_sent_nbytes() is None
