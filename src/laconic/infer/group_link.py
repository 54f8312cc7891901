"""Links between attention and expert workers over torch.distributed: gloo between CPUs, NCCL between GPUs.

Both ends know how long a message is before it comes: the header of rows goes ahead from host to host, by gloo, and an
answer has as many values as its rows. So no host reads what a device has computed in order to send or to receive, and
an answer finds its receiver waiting. An attention worker needs no thread for what arrives.

    attention worker                        expert worker
    header                 by gloo      ->  posts the receive of the rows
    rows                   gloo, NCCL   ->  computes behind them
    posts the receive of the answer     <-  answers in the order of arrival

On GPUs the two directions are two NCCL groups, since messages of one pass one after the other. Sizes are those of a
slice: which of its rows are meant for a worker only the device knows (remote_experts.py), so all of them travel. Values
are raw; nobody is asked for a shared secret, as in all groups of torch.
"""

from __future__ import annotations

import contextlib
import re
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore

from laconic.errors import CollectiveError, FormatError, first_line
from laconic.infer.connections import FOREVER, own_address
from laconic.infer.links import ExpertLink
from laconic.infer.messages import HEADER_LENGTH, ROWS, STOP, Header, Rows, pack_rows
from laconic.infer.payload import RAW, Coder, LinkTraffic, bytes_of
from laconic.infer.recorder import now_ns

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch._C._distributed_c10d import Store

_HEADER, _ROWS, _SUMS = 1, 2, 3
"""Tags, by which gloo keeps messages apart; each kind arrives in the order in which it was sent."""
_FAREWELL = timedelta(seconds=5)
_HEADERS_HELD = 64
"""On their way; where a GPU computes, the host is that far ahead of an expert worker's at most."""
_OF_PEER = re.compile(r"\A\[[^\]]*gloo/transport/[^\]]*\] |\AApplication timeout caused pair closure|ncclRemoteError")
"""gloo's transports, which say where in their code they are except behind a timeout, and NCCL."""


@dataclass(frozen=True)
class LinkGroups:
    """The groups, of all workers, that the links of an engine use: headers go from host to host."""

    headers: Any
    rows: Any
    sums: Any
    device: torch.device


def join_link(store: Store, rank: int, size: int, device: torch.device, timeout_seconds: float) -> LinkGroups:
    """Join the groups of all workers, who meet in the store and call this together.

    `timeout_seconds` is for a message between devices, behind which NCCL ends the process; on CPUs each wait has its
    own. A machine without an address at which the others could reach it is a ConfigError.
    """
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=own_address())]
    options._timeout = FOREVER
    headers = gloo(PrefixStore("link", store), rank, size, options)
    if device.type == "cpu":
        return LinkGroups(headers, headers, headers, device)
    nccl: Any = dist.ProcessGroupNCCL
    limit = nccl.Options()
    limit._timeout = timedelta(seconds=timeout_seconds)
    rows, sums = (nccl(PrefixStore(name, store), rank, size, limit) for name in ("link rows", "link sums"))
    return LinkGroups(headers, rows, sums, device)


class GroupExpertLink(ExpertLink):
    """The attention worker's end of a link to the expert worker of rank `peer`."""

    def __init__(
        self,
        groups: LinkGroups,
        peer: int,
        name: str,
        timeout_seconds: float = 120.0,
        on_lost: Callable[[str], None] = lambda why: None,
    ) -> None:
        super().__init__(name, timeout_seconds, on_lost)
        self._groups, self._peer = groups, peer
        self._headers: deque[tuple[Any, Tensor]] = deque()
        self._pending: dict[tuple[int, int], tuple[Any, Tensor, Any, Tensor]] = {}
        """By micro-batch and slice: works and memory of the answer and of the rows."""

    def send(self, rows: Rows) -> None:
        limit = timedelta(seconds=self._timeout_seconds)
        header, body = pack_rows(rows, Coder())
        front, answer = header.to_tensor(), torch.empty_like(rows.hidden, memory_format=torch.contiguous_format)
        with self._sending:
            self.check()
            self._check_sendable(rows)
            try:
                # In this order: NCCL makes a communicator at the first message, for which both ends wait.
                self._headers.append((self._groups.headers.send([front], self._peer, _HEADER), front))
                if len(self._headers) > _HEADERS_HELD:
                    self._headers.popleft()[0].wait(limit)
                sent = self._groups.rows.send([body], self._peer, _ROWS)
                coming = self._groups.sums.recv([bytes_of(answer)], self._peer, _SUMS)
            except Exception as error:  # whatever it is: the header may have left without its rows
                self._lose(self._reason(error))
                self.check()
            self.a2e_traffic += header.traffic
            self._pending[rows.micro_batch, rows.slice] = coming, answer, sent, body
            self._unanswered[rows.micro_batch, rows.slice] = rows.layer, len(rows.hidden)

    def receive(self, rows: Rows) -> Tensor:
        """See ExpertLink; on a GPU the current stream waits, and the host does not."""
        self.check()
        self._take_sent(rows)
        coming, answer, sent, _ = self._pending.pop((rows.micro_batch, rows.slice))
        try:
            if self._groups.device.type == "cpu":
                coming.wait(timedelta(seconds=self._timeout_seconds))
            else:
                coming.wait()
            sent.wait()  # it has arrived
        except Exception as error:
            self._lose(self._reason(error))
            self.check()
        with self._changed:
            self.e2a_traffic += LinkTraffic(1, 0, answer.nbytes, answer.nbytes)
        return answer

    def arrived_ns(self, rows: Rows) -> int:
        """See ExpertLink; at the latest now: nothing here notes when, so engines refuse traces."""
        return now_ns()

    def close(self, timeout_seconds: float = 5.0) -> None:
        limit, farewell, last = timedelta(seconds=timeout_seconds), _room(), Header(STOP).to_tensor()
        if not self._sending.acquire(timeout=timeout_seconds):
            return  # a `send` waits for longer than that: the expert worker takes nothing
        try:
            if self._lost is None:
                coming = self._groups.headers.recv([farewell], self._peer, _HEADER)
                self._groups.headers.send([last], self._peer, _HEADER).wait(limit)
                coming.wait(limit)
        except RuntimeError:
            pass  # it has ended already
        finally:
            self._sending.release()

    def _reason(self, error: Exception) -> str:
        if not _is_of_peer(error):
            return f"its link failed here: {_reason(error)}"
        late = "Timed out" in str(error)
        return f"it did not answer within {self._timeout_seconds:g} s" if late else _reason(error)


class GroupConnection:
    """The expert worker's end of a link to the attention worker of rank `peer`; see MessageEnd."""

    def __init__(self, groups: LinkGroups, peer: int) -> None:
        self._groups, self._peer = groups, peer
        # Rows come on a stream of their own, which does not wait for what is computed meanwhile.
        self._arrivals = torch.cuda.Stream(groups.device) if groups.device.type == "cuda" else None
        self._coming: deque[tuple[Any, Tensor]] = deque()
        self._asked: deque[Header] = deque()
        self._sent: dict[tuple[int, int], tuple[Any, Tensor]] = {}
        """By micro-batch and slice: their last answer, which has arrived when the next rows of the same come."""
        self._farewell: tuple[Any, Tensor] | None = None

    def receive(self) -> tuple[Header, Tensor]:
        """Wait for a header, as `Connection` does; rows are there when it returns, or on a GPU behind `hand_over`."""
        front = _room()
        with _as_connection_error():
            self._groups.headers.recv([front], self._peer, _HEADER).wait(FOREVER)
        header = Header.from_tensor(front)
        if header.kind == STOP:
            return header, torch.empty(0, dtype=torch.uint8, device="cpu")
        if header.kind != ROWS or header.coding != RAW:
            raise FormatError(
                f"a message of kind {header.kind} in coding {header.coding} came over a link that takes raw rows; run"
                " the same version of laconic on all workers"
            )
        self._asked.append(header)
        with contextlib.nullcontext() if self._arrivals is None else torch.cuda.stream(self._arrivals):
            body = header.make_body(self._groups.device)
            with _as_connection_error():
                work = self._groups.rows.recv([body], self._peer, _ROWS)
                if self._arrivals is None:
                    work.wait(FOREVER)  # on this thread: a worker that stands still holds up no other
                else:
                    self._coming.append((work, body))
        return header, body

    def hand_over(self) -> None:
        """Let the current stream wait for the oldest rows."""
        if self._arrivals is not None:
            work, body = self._coming.popleft()
            with _as_connection_error():
                work.wait()
            body.record_stream(torch.cuda.current_stream(self._groups.device))

    def send(self, header: Header, body: Tensor | None = None) -> None:
        """Answer the oldest rows, or say farewell; ConnectionError if the attention worker has ended.

        An answer of other sizes than its rows, which the other end would not notice, is a CollectiveError.
        """
        if header.kind == STOP:
            front = header.to_tensor()
            with _as_connection_error():
                self._farewell = self._groups.headers.send([front], self._peer, _HEADER), front
            return
        asked, fields = self._asked.popleft(), ("layer", "micro_batch", "slice", "num_rows", "width", "dtype", "coding")
        wrong = [name for name in fields if getattr(header, name) != getattr(asked, name)]
        if wrong:
            raise CollectiveError(
                "an expert worker's answer differs from its rows in "
                + ", ".join(f"{name} ({getattr(header, name)}, not {getattr(asked, name)})" for name in wrong)
                + "; over link = 'group' both must be alike"
            )
        assert body is not None
        place = (header.micro_batch, header.slice)
        with _as_connection_error():
            if place in self._sent:
                self._sent.pop(place)[0].wait()
            self._sent[place] = self._groups.sums.send([body], self._peer, _SUMS), body

    def close(self) -> None:
        """Wait until the farewell has left; groups end with the process."""
        if self._farewell is not None:
            with contextlib.suppress(RuntimeError):
                self._farewell[0].wait(_FAREWELL)


@contextlib.contextmanager
def _as_connection_error() -> Iterator[None]:
    """Inside, what a backend raises of a peer is a ConnectionError; errors of this process stay what they are."""
    try:
        yield
    except RuntimeError as error:
        if not _is_of_peer(error):
            raise
        raise ConnectionError(_reason(error)) from error


def _is_of_peer(error: Exception) -> bool:
    """Whether gloo or NCCL says that a peer has ended, or waits no longer; torch has no class for either."""
    return _OF_PEER.search(str(error)) is not None


def _reason(error: Exception) -> str:
    """What torch says, without the place in its code and its advice."""
    first = first_line(error)
    return first.rpartition("cc:")[2].partition("] ")[2].partition(". ")[0] or first


def _room() -> Tensor:
    return torch.empty(HEADER_LENGTH, dtype=torch.int64, device="cpu")
