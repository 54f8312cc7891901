"""Send and receive over a codec.

Sends and receives of two ranks may cross in any order that torch allows: on the CPU an asynchronous one is handed to
gloo in the call, and the rest (decoding, raising errors) runs in the first thread that waits for it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from laconic.collectives.arguments import check_tensors, find_group_rank, find_groups, flat_group, flatten
from laconic.collectives.codec import Codec, setting_of
from laconic.collectives.engine import uncoded
from laconic.collectives.engine.call import find_route, finish, slices
from laconic.collectives.engine.handshake import Announcement, Peers, Settings
from laconic.collectives.engine.transport import WIRE_VERSION, Incoming, InFlightMessages, Outgoing, Wire
from laconic.collectives.policy.raw_calls import known_route
from laconic.collectives.policy.selector import leaves_raw
from laconic.collectives.runtime.background import Work, done, future_of, run_in_background
from laconic.collectives.runtime.group_facts import ranks_of
from laconic.collectives.runtime.thread_state import as_here
from laconic.errors import ConfigError

T = TypeVar("T")
S = TypeVar("S")


def send(
    tensor: Tensor,
    dst: int,
    group: dist.ProcessGroup | None = None,
    *,
    codec: Codec | str = "auto",
    async_op: bool = False,
) -> Work[Tensor]:
    """Send `tensor`, of any shape and dtype, to the global rank `dst`, which calls `recv`.

    "auto" is raw in groups that were not prepared with `laconic.collectives.policy.selector.prepare`. Between two ranks
    messages of one direction are received in the order in which they were sent.

    Raises:
        FormatError: the tensor does not fit.
        ConfigError: the two ranks disagree about the message; raised on both. Or `dst` is this rank.
    """
    return _start(tensor, dst, True, group, codec, async_op)


def recv(
    tensor: Tensor,
    src: int,
    group: dist.ProcessGroup | None = None,
    *,
    codec: Codec | str = "auto",
    async_op: bool = False,
) -> Work[Tensor]:
    """Receive into `tensor` the message of the global rank `src`: as many elements, the same dtype. Else as `send`."""
    return _start(tensor, src, False, group, codec, async_op)


def _start(
    tensor: Tensor, other: int, sends: bool, group: dist.ProcessGroup | None, codec: Codec | str, async_op: bool
) -> Work[Tensor]:
    function = "send" if sends else "recv"
    route = known_route(group, ("send", other, sends), tensor, None, async_op) if codec == "auto" else None
    if route is not None:
        return (uncoded.send if sends else uncoded.recv)(tensor, route.group(), route.root, async_op)
    check_tensors(codec, tensor=tensor)
    name = "dst" if sends else "src"
    _, groups = find_groups(flat_group(function, group))
    peer = find_group_rank(groups[0], other, name)
    if peer == groups[0].rank():
        raise ConfigError(f"{name} is {other}, which is this rank; copy the tensor instead")

    call = "send", other, sends
    if codec == "auto" and leaves_raw(group, call, tensor.numel(), tensor, None, groups, async_op, peer, not sends):
        return (uncoded.send if sends else uncoded.recv)(tensor, groups[0], peer, async_op)

    def begin(group: dist.ProcessGroup) -> Callable[[], Tensor]:
        message = _ChunkedMessage(tensor, group, peer, sends, codec)
        return as_here(lambda: message.finish(tensor), (tensor,))

    if tensor.device.type == "cpu" and async_op:
        with torch.no_grad():
            return _LateWork(begin(groups[0]))
    if async_op:
        return run_in_background(lambda groups: begin(groups[0])(), groups, tensor.device, (tensor,))
    with torch.no_grad():
        return done(begin(groups[0])())


class _ChunkedMessage:
    """A message in chunks, under way."""

    def __init__(self, tensor: Tensor, group: dist.ProcessGroup, peer: int, sends: bool, codec: Codec | str) -> None:
        ranks = ranks_of(group)
        here, there = ranks[group.rank()], ranks[peer]
        src, dst = (here, there) if sends else (there, here)
        settings: Settings = {
            "function": "send",
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "numel": tensor.numel(),
            "src": src,
            "dst": dst,
            "codec": setting_of(codec),
            "version": WIRE_VERSION,
        }
        self._sends, self._peer = sends, peer
        self._wire = Wire(group, Peers(ranks, (peer,), sends), Announcement(settings), tensor.dtype, tensor.device)
        self._route = find_route(codec, "send", tensor.numel(), tensor.dtype, group, tensor.device)
        x = flatten(tensor)
        step = self._route.step(x.numel(), x.dtype)
        self._parts = [x[part] for part in slices(x.numel(), step)]
        self._started = [self._start(part) for part in self._parts]

    def finish(self, tensor: Tensor) -> Tensor:
        self._wire.agree()
        for part, messages in zip(self._parts, self._started, strict=True):
            if not self._sends and part.numel():
                self._wire.decode_into(self._peer, *messages.take(self._peer), part)
            messages.wait_sent()
        if self._sends:
            finish(self._wire, "send", self._route)
        return tensor

    def _start(self, part: Tensor) -> InFlightMessages:
        if self._sends:
            return self._wire.start(self._route.codec, [Outgoing((self._peer,), part)], [])
        return self._wire.start(self._route.codec, [], [Incoming(self._peer, part.numel(), part)])


class _LateWork(Work[T]):
    """A message under way; `finish` is run once, by the first caller that waits, or else by a thread."""

    def __init__(self, finish: Callable[[], T]) -> None:
        self._finish: Callable[[], T] | None = finish
        self._result: Future[T] = Future()
        self._lock = threading.Lock()

    def wait(self) -> T:
        finish = self._claim()
        if finish is not None:
            self._run(finish)
        return self._result.result()

    def is_completed(self) -> bool:
        self._go_on()
        return self._result.done()

    def get_future(self) -> torch.futures.Future[T]:
        self._go_on()
        return future_of(self._result)

    def map(self, change: Callable[[T], S]) -> Work[S]:
        change = as_here(change)
        return _LateWork(lambda: change(self.wait()))

    def _claim(self) -> Callable[[], T] | None:
        with self._lock:
            finish, self._finish = self._finish, None
        return finish

    def _go_on(self) -> None:
        finish = self._claim()
        if finish is not None:
            threading.Thread(target=self._run, args=(finish,), name="laconic-message", daemon=True).start()

    def _run(self, finish: Callable[[], T]) -> None:
        try:
            self._result.set_result(finish())
        except BaseException as error:
            self._result.set_exception(error)
