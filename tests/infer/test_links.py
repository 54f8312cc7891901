"""Links over gloo, all ends in this process: answers find their rows, a farewell ends them, a lost worker is named."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore, PrefixStore

from laconic.errors import CollectiveError
from laconic.infer.links import GlooExpertLink, serve
from laconic.infer.messages import Rows

Groups = tuple[dist.ProcessGroup, dist.ProcessGroup]


@pytest.fixture
def loopback() -> Iterator[None]:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    yield
    del os.environ["GLOO_SOCKET_IFNAME"]


def meet(folder: Path, size: int) -> list[Groups]:
    """The groups a2e and e2a of `size` ranks."""
    found: list[Groups | None] = [None] * size

    def join(rank: int) -> None:
        store = FileStore(str(folder / "store"), size)
        found[rank] = tuple(
            dist.ProcessGroupGloo(PrefixStore(name, store), rank, size, timeout=timedelta(seconds=60))
            for name in ("a2e", "e2a")
        )

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [groups for groups in found if groups is not None]


def rows_of(layer: int, micro_batch: int, piece: int, num_rows: int) -> Rows:
    hidden = torch.full((num_rows, 4), float(100 * layer + 10 * micro_batch + piece)) + torch.arange(num_rows)[:, None]
    return Rows(layer, micro_batch, piece, hidden, torch.zeros(num_rows, 1, dtype=torch.int32), torch.ones(num_rows, 1))


def negated(rows: Rows) -> Tensor:
    return -rows.hidden


@pytest.mark.usefixtures("loopback")
def test_answers_find_their_rows_and_a_farewell_ends_the_worker(tmp_path: Path) -> None:
    """Two attention workers with two micro-batches each, all at once; answers are asked for in another order."""
    *attention, expert = meet(tmp_path, 3)
    server = threading.Thread(target=serve, args=(*expert, [0, 1], negated))
    server.start()
    links = [GlooExpertLink(*groups, 2, "expert worker 0") for groups in attention]
    wrong: list[object] = []

    def work(link: GlooExpertLink, micro_batch: int) -> None:
        for layer in range(20):
            sent = [rows_of(layer, micro_batch, piece, 1 + (layer + piece) % 3) for piece in range(3)]
            for rows in sent:
                link.send(rows)
            wrong.extend(rows for rows in sent[::-1] if not torch.equal(link.receive(rows), -rows.hidden))

    threads = [threading.Thread(target=work, args=(link, number)) for link in links for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    assert wrong == []
    for link in links:
        assert server.is_alive()
        link.close()
    server.join(10)
    assert not server.is_alive()


@pytest.mark.usefixtures("loopback")
def test_a_worker_that_breaks_off_is_named_in_every_call(tmp_path: Path) -> None:
    """A receive that times out makes gloo close the connection, as the end of a process does."""
    mine, (a2e, e2a) = meet(tmp_path, 2)
    link = GlooExpertLink(*mine, 1, "expert worker 7")
    rows = rows_of(0, 0, 0, 2)
    link.send(rows)
    for group in (a2e, e2a):
        with pytest.raises(RuntimeError):
            group.recv([torch.empty(1, dtype=torch.uint8)], 0, 1).wait(timedelta(milliseconds=1))
    for _ in range(2):
        with pytest.raises(CollectiveError, match="expert worker 7 is lost: "):
            link.receive(rows)
        with pytest.raises(CollectiveError, match="expert worker 7 is lost: "):
            link.send(rows)
    link.close()


@pytest.mark.usefixtures("loopback")
def test_an_answer_to_other_rows_is_refused(tmp_path: Path) -> None:
    mine, (a2e, e2a) = meet(tmp_path, 2)
    server = threading.Thread(target=serve, args=(a2e, e2a, [0], lambda rows: rows.hidden[1:]))
    server.start()
    link = GlooExpertLink(*mine, 1, "expert worker 0")
    rows = rows_of(3, 0, 0, 2)
    link.send(rows)
    with pytest.raises(CollectiveError, match="answered 1 rows of layer 3 where 2 of layer 3 were sent"):
        link.receive(rows)
    link.close()
    server.join(10)
    assert not server.is_alive()


@pytest.mark.usefixtures("loopback")
def test_a_worker_that_does_not_answer_is_given_up(tmp_path: Path) -> None:
    mine, _silent = meet(tmp_path, 2)
    heard: list[str] = []
    link = GlooExpertLink(*mine, 1, "expert worker 2", 0.2, heard.append)
    rows = rows_of(0, 0, 0, 1)
    link.send(rows)
    for _ in range(2):
        with pytest.raises(CollectiveError, match=r"expert worker 2 is lost: it did not answer within 0\.2 s"):
            link.receive(rows)
    assert len(heard) == 1
    assert "did not answer" in heard[0]
