"""Links, all ends in this process: answers find their rows, a farewell ends them, a lost worker is named.

Both kinds do what a link does; what is of TCP alone is here too, what is of process groups in test_group_link.py.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from laconic.errors import CollectiveError, ConfigError, FormatError
from laconic.infer import connections
from laconic.infer.connections import Connection, accept_attention, connect_expert, own_address
from laconic.infer.group_link import GroupConnection, GroupExpertLink, LinkGroups, join_link
from laconic.infer.links import ExpertLink, MessageEnd, TcpExpertLink, serve
from laconic.infer.messages import SUMS, Header, Rows, pack_rows
from laconic.infer.payload import Coder
from laconic.infer.remote_experts import RemoteExperts
from laconic.schedule.inference import InferencePlan
from laconic.shared_secret import enter, seal
from tests.patience import patient

SECONDS = 30
CPU = torch.device("cpu")


def pair() -> tuple[Connection, Connection]:
    """Both ends of a connection."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        one = socket.create_connection(listening.getsockname())
        other, _ = listening.accept()
    return Connection(one, "one"), Connection(other, "other")


def raw_pair() -> tuple[Connection, socket.socket]:
    """A connection and what is behind it."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        connected = socket.create_connection(listening.getsockname())
        behind, _ = listening.accept()
    behind.settimeout(SECONDS)
    return Connection(connected, "one"), behind


def join(size: int) -> list[LinkGroups]:
    """The groups of `size` workers, all in this process."""
    store = HashStore()
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(lambda rank: join_link(store, rank, size, CPU, SECONDS), range(size)))


def serving(peers: Sequence[MessageEnd], run: Callable[[Rows], Tensor]) -> tuple[threading.Thread, list[Exception]]:
    """An expert worker of some attention workers, and what it raises."""
    raised: list[Exception] = []

    def work() -> None:
        try:
            serve(peers, run)
        except Exception as error:
            raised.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread, raised


def served(
    kind: str, run: Callable[[Rows], Tensor], peers: int = 1
) -> tuple[list[ExpertLink], threading.Thread, list[Exception]]:
    """Links of attention workers to an expert worker, its thread and what it raises."""
    if kind == "tcp":
        pairs = [pair() for _ in range(peers)]
        return [TcpExpertLink(mine, "expert worker 0") for mine, _ in pairs], *serving([each for _, each in pairs], run)
    groups = join(peers + 1)
    links = [GroupExpertLink(each, peers, "expert worker 0") for each in groups[:peers]]
    return list(links), *serving([GroupConnection(groups[peers], peer) for peer in range(peers)], run)


@contextlib.contextmanager
def connected() -> Iterator[tuple[Connection, socket.socket]]:
    mine, behind = raw_pair()
    yield mine, behind
    behind.close()
    mine.close()


def bytes_of(header: Header) -> bytes:
    return bytes(header.to_tensor().view(torch.uint8).tolist())


def rows_of(layer: int, micro_batch: int, piece: int, num_rows: int) -> Rows:
    hidden = torch.full((num_rows, 4), float(100 * layer + 10 * micro_batch + piece)) + torch.arange(num_rows)[:, None]
    return Rows(layer, micro_batch, piece, hidden, torch.zeros(num_rows, 1, dtype=torch.int32), torch.ones(num_rows, 1))


def negated(rows: Rows) -> Tensor:
    return -rows.hidden


def ask_in_another_order(links: Sequence[ExpertLink]) -> None:
    """Two micro-batches over each link, all at once, of 20 layers in three slices; their answers are negated."""
    wrong: list[object] = []

    def work(link: ExpertLink, micro_batch: int) -> None:
        for layer in range(20):
            sent = [rows_of(layer, micro_batch, piece, 1 + (layer + piece) % 3) for piece in range(3)]
            for rows in sent:
                link.send(rows)
            wrong.extend(rows for rows in sent[::-1] if not torch.equal(link.receive(rows), -rows.hidden))

    threads = [threading.Thread(target=work, args=(link, number)) for link in links for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
        assert not thread.is_alive()
    assert wrong == []


@pytest.mark.parametrize("kind", ["tcp", "group"])
def test_answers_find_their_rows_and_a_farewell_ends_the_worker(kind: str) -> None:
    """Two attention workers with two micro-batches each, all at once; answers are asked for in another order."""
    links, server, raised = served(kind, negated, peers=2)
    ask_in_another_order(links)
    for link in links:
        assert server.is_alive()
        assert link.a2e_traffic.messages == link.e2a_traffic.messages == 120
        header_nbytes = 88 if kind == "tcp" else 0
        assert link.e2a_traffic.raw_nbytes == 120 * (header_nbytes + 2 * 16)  # two rows of 16 bytes in the mean
        link.close()
    server.join(patient(10))
    assert not server.is_alive()
    assert raised == []


@pytest.mark.parametrize("kind", ["tcp", "group"])
def test_messages_of_megabytes_both_ways_at_once(kind: str) -> None:
    """Nobody reads an answer before all has been sent, which is more than the kernel buffers: nobody waits for ever."""
    (link,), server, _ = served(kind, negated)
    many = [
        Rows(0, 0, piece, torch.randn(2048, 512), torch.zeros(2048, 2, dtype=torch.int32), torch.ones(2048, 2))
        for piece in range(12)
    ]
    for rows in many:
        link.send(rows)
    for rows in many:
        assert torch.equal(link.receive(rows), -rows.hidden)
    link.close()
    server.join(patient(10))
    assert not server.is_alive()


def test_a_message_of_megabytes_both_ways_at_once() -> None:
    """Neither end reads before it has written more than the kernel buffers: nobody waits for ever."""
    ends = pair()
    rows = Rows(0, 0, 0, torch.randn(4096, 1024), torch.zeros(4096, 2, dtype=torch.int32), torch.ones(4096, 2))
    for end in ends:
        for _ in range(3):
            end.send(*pack_rows(rows, Coder()))
    for end in ends:
        for _ in range(3):
            header, body = end.receive()
            assert torch.equal(body, pack_rows(rows, Coder())[1])
            assert header.num_rows == 4096
    for end in ends:
        end.close()


@pytest.mark.slow
def test_a_worker_that_stands_still_for_a_while_is_not_lost() -> None:
    """Longer than the 15 s after which a machine that has gone is given up."""
    ends = pair()
    rows = Rows(0, 0, 0, torch.randn(4096, 1024), torch.zeros(4096, 2, dtype=torch.int32), torch.ones(4096, 2))
    for _ in range(4):
        ends[0].send(*pack_rows(rows, Coder()))
    time.sleep(20)
    for _ in range(4):
        assert torch.equal(ends[1].receive()[1], pack_rows(rows, Coder())[1])
    for end in ends:
        end.close()


@pytest.mark.parametrize("reset", [False, True])
def test_a_worker_that_breaks_off_is_named_in_every_call(reset: bool) -> None:
    """In the middle of a message; as when a process ends, or a machine that has forgotten the connection answers."""
    mine, behind = raw_pair()
    link = TcpExpertLink(mine, "expert worker 7")
    rows = rows_of(0, 0, 0, 2)
    link.send(rows)
    behind.recv(40)
    behind.sendall(bytes_of(Header(SUMS, num_rows=2, width=4, values_nbytes=32)))
    if reset:
        behind.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    behind.close()
    for _ in range(2):
        with pytest.raises(CollectiveError, match="expert worker 7 is lost: "):
            link.receive(rows)
        with pytest.raises(CollectiveError, match="expert worker 7 is lost: "):
            link.send(rows)
    link.close()


@pytest.mark.parametrize("reset", [False, True])
def test_the_others_are_served_when_an_attention_worker_is_gone(reset: bool) -> None:
    (mine, theirs), (gone, behind) = pair(), raw_pair()
    server = threading.Thread(target=serve, args=([gone, theirs], negated))
    server.start()
    header, body = pack_rows(rows_of(0, 0, 0, 3), Coder())
    behind.sendall(bytes_of(header) + bytes(body.tolist()[:10]))
    if reset:
        behind.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    behind.close()
    link = TcpExpertLink(mine, "expert worker 0")
    for layer in range(3):
        rows = rows_of(layer, 0, 0, 2)
        link.send(rows)
        assert torch.equal(link.receive(rows), -rows.hidden)
    link.close()
    server.join(SECONDS)
    assert not server.is_alive()


@given(st.binary(min_size=88, max_size=300))
def test_what_is_no_message_is_refused(noise: bytes) -> None:
    with connected() as (mine, behind):
        behind.sendall(noise)
        behind.shutdown(socket.SHUT_WR)
        with pytest.raises((FormatError, ConnectionError)):
            mine.receive()


def test_a_message_beyond_the_memory_is_refused() -> None:
    header = Header(SUMS, num_rows=1 << 40, width=1 << 10, values_nbytes=1 << 52)
    with connected() as (mine, behind):
        behind.sendall(bytes_of(header))
        with pytest.raises(FormatError, match=f"{1 << 52} bytes follow"):
            mine.receive()


def test_an_answer_to_other_rows_is_refused() -> None:
    (link,), server, _ = served("tcp", lambda rows: rows.hidden[1:])
    rows = rows_of(3, 0, 0, 2)
    link.send(rows)
    with pytest.raises(CollectiveError, match="answered 1 rows of layer 3 where 2 of layer 3 were sent"):
        link.receive(rows)
    link.close()
    server.join(patient(10))
    assert not server.is_alive()


@pytest.mark.parametrize("kind", ["tcp", "group"])
def test_a_worker_that_does_not_answer_is_given_up(kind: str) -> None:
    with connected() as (mine, _silent):
        heard: list[str] = []
        link: ExpertLink
        if kind == "tcp":
            link = TcpExpertLink(mine, "expert worker 2", 0.2, heard.append)
        else:
            groups = join(2)  # of which the second is held, and says nothing
            link = GroupExpertLink(groups[0], 1, "expert worker 2", 0.2, heard.append)
        rows = rows_of(0, 0, 0, 1)
        link.send(rows)
        for _ in range(2):
            with pytest.raises(CollectiveError, match=r"expert worker 2 is lost: it did not answer within 0\.2 s"):
                link.receive(rows)
            with pytest.raises(CollectiveError, match=r"expert worker 2 is lost"):
                link.send(rows)
        link.close()
        (why,) = heard
        assert "did not answer" in why


@pytest.mark.parametrize("kind", ["tcp", "group"])
def test_rows_wait_for_one_answer_at_a_time(kind: str) -> None:
    """An answer is found by its micro-batch and slice: a second message of the same would take the first's."""
    (link,), _, _ = served(kind, negated)
    first, second = rows_of(1, 0, 0, 2), rows_of(2, 0, 0, 2)
    with pytest.raises(CollectiveError, match="of those waiting for an answer none are of this micro_batch"):
        link.receive(first)
    link.send(first)
    for again in (first, second):
        with pytest.raises(CollectiveError, match=r"but the answer to those of layer 1 .* has not been received"):
            link.send(again)
    with pytest.raises(CollectiveError, match=r"to 2 rows of layer 2, .* an answer 2 of layer 1 are of this"):
        link.receive(second)
    assert torch.equal(link.receive(first), -first.hidden)  # nothing was lost
    with pytest.raises(CollectiveError, match="send rows once, and receive their answer once"):
        link.receive(first)
    link.send(second)
    assert torch.equal(link.receive(second), -second.hidden)
    link.close()


@pytest.mark.parametrize("kind", ["tcp", "group"])
def test_a_forward_does_not_take_the_answers_of_one_that_has_failed(kind: str) -> None:
    """Of the same layer and as many rows: nothing but their values tells them apart."""

    def slowly(rows: Rows) -> Tensor:
        time.sleep(0.2)
        return -rows.hidden

    (link,), _, _ = served(kind, slowly)
    experts = RemoteExperts([cast(Any, link)], [[[0]]], InferencePlan())

    def forward(value: float, shared: Callable[[], None]) -> Tensor:
        experts.begin_forward(2)
        try:
            choices = torch.zeros(2, 1, dtype=torch.int64)
            return experts.run(0, torch.full((2, 4), value), choices, torch.ones(2, 1), shared)
        finally:
            experts.end_forward()

    def fails() -> None:
        raise MemoryError("no room for the shared experts")

    with pytest.raises(MemoryError, match="no room"):
        forward(1.0, fails)
    assert torch.equal(forward(5.0, lambda: None), torch.full((2, 4), -5.0))
    link.close()


# --- how they find each other ---


def test_workers_find_each_other_in_any_order_and_strangers_are_sent_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "_HELLO_SECONDS", 10 * SECONDS)  # one who says nothing holds up nobody
    store = HashStore()
    found: dict[object, object] = {}

    def accept(number: int) -> None:
        found["expert", number] = accept_attention(store, number, 2)

    def connect(rank: int) -> None:
        found["attention", rank] = [connect_expert(store, number, rank) for number in range(2)]

    experts = [threading.Thread(target=accept, args=(number,)) for number in range(2)]
    for thread in experts:
        thread.start()
    store.wait(["expert worker 0"])
    address, port, token = json.loads(store.get("expert worker 0"))
    assert address == "127.0.0.1"
    strangers = [b"", b"GET / HTTP/1.1\r\n\r\n" * 3, bytes(100)]
    held = [socket.create_connection((address, port)) for _ in strangers]
    for hello, stranger in zip(strangers, held, strict=True):
        stranger.sendall(hello)
    guest = socket.create_connection((address, port))
    enter(guest, token, "rows of expert worker 0", SECONDS)
    guest.sendall(bytes([0, 0, 0, 9]))  # no attention worker has this number
    strangers.append(b"is none")
    held.append(guest)
    attention = [threading.Thread(target=connect, args=(rank,)) for rank in (1, 0)]
    for thread in attention:
        thread.start()
    for thread in (*experts, *attention):
        thread.join(SECONDS)
        assert not thread.is_alive()
    for hello, stranger in zip(strangers, held, strict=True):
        stranger.settimeout(SECONDS)
        with contextlib.suppress(ConnectionResetError):
            assert not hello or len(stranger.makefile("rb").read()) <= 16  # a nonce
        stranger.close()
    for rank, number in itertools.product(range(2), range(2)):
        mine, theirs = found["attention", rank][number], found["expert", number][rank]  # type: ignore[index]
        mine.send(Header(SUMS, layer=10 * rank + number))
        assert theirs.receive()[0].layer == 10 * rank + number
        mine.close()
        theirs.close()


def test_an_address_that_a_stranger_wrote_into_the_store_is_not_called(monkeypatch: pytest.MonkeyPatch) -> None:
    store = HashStore()
    monkeypatch.setenv("LACONIC_SECRET", "correct horse battery staple")
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        forged = json.dumps([*stranger.getsockname(), "0" * 32])
        for value in (forged, "laconic-hmac:" + "0" * 64 + ":" + forged, seal("expert worker 1", forged)):
            store.set("expert worker 0", value)
            with pytest.raises(ConfigError, match="'expert worker 0' in the store was written by a process"):
                connect_expert(store, 0, 0)
        stranger.settimeout(0.05)
        with pytest.raises(TimeoutError):
            stranger.accept()
        # Who listens there without the secret is found out before a row is sent.
        store.set("expert worker 0", seal("expert worker 0", forged))
        found: list[bytes] = []
        thread = threading.Thread(target=lambda: found.append(_play_expert(stranger)))
        thread.start()
        with pytest.raises(ConfigError, match="listens for rows of expert worker 0 has another shared secret"):
            connect_expert(store, 0, 0)
        thread.join(SECONDS)
        assert len(found[0]) == 48


def _play_expert(listening: socket.socket) -> bytes:
    """Everything that is sent to one who answers with the right lengths."""
    listening.settimeout(SECONDS)
    connected, _ = listening.accept()
    with connected:
        connected.sendall(bytes(16 + 32))
        heard = b""
        while more := connected.recv(1000):
            heard += more
    return heard


def test_addresses_follow_the_interface_or_the_way_to_the_master(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GLOO_SOCKET_IFNAME", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    assert own_address() == "127.0.0.1"
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    assert own_address() == "127.0.0.1"
    monkeypatch.setenv("MASTER_ADDR", "no such host.invalid")
    with pytest.raises(ConfigError, match=r"MASTER_ADDR is 'no such host\.invalid', to which .* has no way"):
        own_address()
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,eth9")
    assert own_address() == "127.0.0.1"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth99")
    with pytest.raises(
        ConfigError, match=r"GLOO_SOCKET_IFNAME is 'eth99', but the interfaces with an address are .*lo"
    ):
        own_address()


def test_an_expert_worker_that_cannot_be_reached_is_named() -> None:
    store = HashStore()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    store.set("expert worker 3", json.dumps(["127.0.0.1", port, "0" * 32]))
    with pytest.raises(ConfigError, match=f"attention worker 1 on .* cannot reach expert worker 3 at 127.0.0.1:{port}"):
        connect_expert(store, 3, 1)
