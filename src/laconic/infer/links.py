"""Links between one attention worker and one expert worker: rows go out, sums come back.

An expert worker answers every message with one of the same layer, micro-batch and slice, in the order of arrival. A
peer that ends breaks the connection; every waiting and later call of the link then raises CollectiveError at once.
Links here are over TCP and have one thread for what arrives; group_link.py has those over torch.distributed.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Literal, Protocol

from torch import Tensor

from laconic.errors import CollectiveError
from laconic.infer.connections import Connection
from laconic.infer.messages import ROWS, STOP, SUMS, Header, Rows, pack_rows, pack_sums, unpack_rows, unpack_sums
from laconic.infer.payload import Coder, LinkTraffic
from laconic.infer.recorder import AnswerLog, Recorder, now_ns

LinkKind = Literal["tcp", "group"]
"""How rows and sums travel: over connections of our own, or those of a process group of torch.distributed."""


class MessageEnd(Protocol):
    """An expert worker's end of a link, for `serve`; a Connection is one."""

    def receive(self) -> tuple[Header, Tensor]:
        """Wait for a message; its body may be read behind `hand_over`."""

    def hand_over(self) -> None:
        """Wait, on the thread that computes, for the body of the oldest message for which it has not been called."""

    def send(self, header: Header, body: Tensor | None = None) -> None:
        """Send a message without waiting for it to leave."""

    def close(self) -> None:
        """Send what is waiting, and close."""


class ExpertLink(ABC):
    """An expert worker as an attention worker sees it: rows and sums, what has passed, and the end of it.

    An answer that takes longer than `timeout_seconds` means that it is lost; `on_lost` is called once, on any thread,
    with what became of it.
    """

    def __init__(self, name: str, timeout_seconds: float, on_lost: Callable[[str], None]) -> None:
        self.a2e_traffic, self.e2a_traffic = LinkTraffic(), LinkTraffic()
        self._name, self._timeout_seconds, self._on_lost = name, timeout_seconds, on_lost
        self._unanswered: dict[tuple[int, int], tuple[int, int]] = {}
        """By micro-batch and slice: layer and number of rows that were sent, whose answer has not been taken."""
        self._sending = threading.Lock()
        self._changed = threading.Condition()
        self._lost: str | None = None
        self._closed = threading.Event()

    @abstractmethod
    def send(self, rows: Rows) -> None:
        """Send rows without waiting for their answer; refused if others of their micro-batch and slice wait."""

    @abstractmethod
    def receive(self, rows: Rows) -> Tensor:
        """Wait for the answer [m, M] to `rows`; CollectiveError if they were not sent, or the expert worker is lost."""

    @abstractmethod
    def arrived_ns(self, rows: Rows) -> int:
        """Return when the answer to `rows`, which has been received, was here: nanoseconds of the monotonic clock."""

    @abstractmethod
    def close(self, timeout_seconds: float = 5.0) -> None:
        """Tell the expert worker that nothing more comes, and wait for its farewell."""

    def check(self) -> None:
        """Raise CollectiveError if the expert worker is lost."""
        if self._lost is not None:
            raise CollectiveError(self._lost)

    def forget_traffic(self) -> None:
        """Count from here."""
        self.a2e_traffic, self.e2a_traffic = LinkTraffic(), LinkTraffic()

    def _check_sendable(self, rows: Rows) -> None:
        """Refuse rows whose answer could be taken for that of others: others of the same place wait for theirs."""
        if (other := self._unanswered.get((rows.micro_batch, rows.slice))) is not None:
            raise CollectiveError(
                f"rows of layer {rows.layer}, micro_batch {rows.micro_batch}, slice {rows.slice} are sent to"
                f" {self._name}, but the answer to those of layer {other[0]} of the same micro_batch and slice has not"
                " been received; receive it first, or give the rows another slice"
            )

    def _take_sent(self, rows: Rows) -> None:
        """Note that the answer to rows is asked for; refuse rows that were not sent, or whose answer has been taken."""
        asked, place = (rows.layer, len(rows.hidden)), (rows.micro_batch, rows.slice)
        if (sent := self._unanswered.get(place)) != asked:
            what = "none" if sent is None else f"{sent[1]} of layer {sent[0]}"
            raise CollectiveError(
                f"the answer of {self._name} to {asked[1]} rows of layer {asked[0]}, micro_batch {place[0]}, slice"
                f" {place[1]} is asked for, but of those waiting for an answer {what} are of this micro_batch and"
                " slice; send rows once, and receive their answer once"
            )
        del self._unanswered[place]

    def _lose(self, reason: str) -> None:
        with self._changed:
            first = self._lost is None
            self._lost = self._lost or f"{self._name} is lost: {reason}"
            self._changed.notify_all()
        self._closed.set()
        if first:
            self._on_lost(self._lost)


class TcpExpertLink(ExpertLink):
    """The attention worker's end of a connection to an expert worker.

    `coder` is of what is sent; None sends raw values. Answers may be in any coding.
    """

    def __init__(
        self,
        connection: Connection,
        name: str,
        timeout_seconds: float = 120.0,
        on_lost: Callable[[str], None] = lambda why: None,
        coder: Coder | None = None,
    ) -> None:
        super().__init__(name, timeout_seconds, on_lost)
        self._coder, self._connection = coder or Coder(), connection
        self._answers: dict[tuple[int, int], tuple[Header, Tensor]] = {}
        self._arrived_ns: dict[tuple[int, int], int] = {}
        threading.Thread(target=self._receive_all, name=f"laconic-{name}", daemon=True).start()

    def send(self, rows: Rows) -> None:
        header, body = pack_rows(rows, self._coder)
        with self._sending:
            self.check()
            self._check_sendable(rows)
            try:
                self._connection.send(header, body)
                self.a2e_traffic += header.traffic
                self._unanswered[rows.micro_batch, rows.slice] = rows.layer, len(rows.hidden)
            except ConnectionError as error:
                self._lose(str(error))
                self.check()

    def receive(self, rows: Rows) -> Tensor:
        place = (rows.micro_batch, rows.slice)
        self.check()
        self._take_sent(rows)
        with self._changed:
            answered = self._changed.wait_for(
                lambda: place in self._answers or self._lost is not None, self._timeout_seconds
            )
        if not answered:
            self._lose(f"it did not answer within {self._timeout_seconds:g} s")
        with self._changed:
            self.check()
            header, body = self._answers.pop(place)
        if (header.layer, header.num_rows) != (rows.layer, len(rows.hidden)):
            raise CollectiveError(
                f"{self._name} answered {header.num_rows} rows of layer {header.layer} where {len(rows.hidden)} of"
                f" layer {rows.layer} were sent; run the same version of laconic on all workers"
            )
        return unpack_sums(header, body)

    def arrived_ns(self, rows: Rows) -> int:
        return self._arrived_ns[rows.micro_batch, rows.slice]

    def close(self, timeout_seconds: float = 5.0) -> None:
        with self._sending:
            if self._lost is None:
                with contextlib.suppress(ConnectionError):  # it has ended already
                    self._connection.send(Header(STOP))
                    self._closed.wait(timeout_seconds)
        self._connection.close()

    def _receive_all(self) -> None:
        try:
            while True:
                header, body = self._connection.receive()
                arrived_ns = now_ns()
                if header.kind == STOP:
                    self._closed.set()
                    return
                if header.kind != SUMS:
                    raise CollectiveError(f"{self._name} sent a message of kind {header.kind}, not sums")
                self.e2a_traffic += header.traffic
                with self._changed:
                    self._arrived_ns[header.micro_batch, header.slice] = arrived_ns
                    self._answers[header.micro_batch, header.slice] = (header, body)
                    self._changed.notify_all()
        except Exception as error:
            self._lose(str(error))


def serve(
    connections: Sequence[MessageEnd],
    run: Callable[[Rows], Tensor],
    coder: Coder | None = None,
    recorder: Recorder | None = None,
) -> None:
    """Answer the rows of all attention workers, in the order of arrival, until each has said stop or is lost.

    `connections` are in the workers' order. Rows may come in any coding; None as `coder` answers with raw values. The
    recorder is asked for each message whether to record it. A FormatError is a damaged message, or one of another
    version of laconic; what a link raises that is not of its attention worker, such as an error of the device, is
    raised.
    """
    coder, recorder = coder or Coder(), recorder or Recorder()
    inbox: queue.SimpleQueue[tuple[int, Rows | Exception | None, int]] = queue.SimpleQueue()

    def receive_from(peer: int) -> None:
        try:
            while (message := connections[peer].receive())[0].kind == ROWS:
                inbox.put((peer, unpack_rows(*message), now_ns()))
            connections[peer].send(Header(STOP))
        except ConnectionError:
            pass  # the attention worker has ended: nobody waits for answers
        except Exception as error:
            inbox.put((peer, error, 0))  # such as what is no message: nothing behind it can be understood
        finally:
            inbox.put((peer, None, 0))

    for peer in range(len(connections)):
        threading.Thread(target=receive_from, args=(peer,), name=f"laconic-attention-{peer}", daemon=True).start()
    open_links, broken_links = set(range(len(connections))), set[int]()
    num_answered: Counter[int] = Counter()
    while open_links:
        peer, rows, arrived_ns = inbox.get()
        if isinstance(rows, Exception):
            raise rows
        if rows is None:
            connections[peer].close()
            open_links.discard(peer)
            continue
        if peer in broken_links:
            continue
        log = recorder.log
        try:
            connections[peer].hand_over()
            start_ns = 0 if log is None else now_ns()
            header, body = pack_sums(rows, run(rows), coder)
            if log is not None:
                log.add_answer(AnswerLog(peer, num_answered[peer], arrived_ns, start_ns, now_ns()))
            num_answered[peer] += 1
            connections[peer].send(header, body)
        except ConnectionError:
            # The receiving thread reports the peer as gone. Until then its other rows stay without answers: one behind
            # a missing answer would be taken for it.
            broken_links.add(peer)
