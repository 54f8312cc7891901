"""Sends and receives of a process group, each coded by itself.

They have no common order: both ends of a link may send first and receive then, or the other way round. So nothing is
asked of the other end. Whether a message is coded follows from its number of elements, its dtype and the rates on which
the ranks agreed when the group was made, and not from how far earlier ones shrank, which the receiver learns later than
the sender. The length of a message is in its header, and gloo delivers a short one into a longer buffer. NCCL does not,
so CUDA tensors are sent uncoded.

Two ranks that both send first and receive then wait for each other for ever, unless NCCL gets both operations at once.
torch's batch_isend_irecv starts them together for groups of exactly its own class; for others it calls isend and irecv
one by one (from 2.15 on between `ProcessGroupLaconic._start_coalescing` and its end). So operations are deferred here
until one of them is waited for or the group is used otherwise, and are started as one batch then.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from laconic.collectives import audit
from laconic.collectives.arguments import check_group_rank
from laconic.collectives.codec import Codec, Lossless, Raw, is_auto
from laconic.collectives.policy.selector import predict
from laconic.collectives.process_group.work_handles import AfterWork, PeerWork
from laconic.collectives.runtime.background import TensorsWork
from laconic.collectives.runtime.device_streams import Ready
from laconic.collectives.runtime.failure_diagnosis import is_own, reason_of
from laconic.collectives.runtime.group_facts import options_of, ranks_of
from laconic.collectives.runtime.torch_compat import untraced
from laconic.cost.comm.seconds import NO_CODE, RAW, TOO_SMALL
from laconic.errors import CollectiveError, FormatError, LaconicError

CODED = (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2)
"""Dtypes that are coded. Integers and float64 are not."""

_ASKED_FOR = "asked for"
_OTHER_DEVICE = "lengths of messages have to be known on this device"


class P2P:
    """Sends and receives over `group`, whose tags and order messages keep; tensors below min_nbytes are sent uncoded.

    `codec` is lossless, or "auto" for the one that is predicted to be fastest, if the group was prepared.
    """

    def __init__(self, group: dist.ProcessGroup, codec: Codec | str, min_nbytes: int) -> None:
        self._group = group
        self._ranks = ranks_of(group)
        self._size = len(self._ranks)
        self._options = options_of(group)
        # With a capacity, a message might have to be sent twice; without, it is as long as it needs to be.
        self._codec = replace(codec, capacity_bits=None) if isinstance(codec, Lossless) else codec
        self._min_nbytes = min_nbytes
        self._batches = Batches(group)

    def send(self, tensors: list[Tensor], dst: int, tag: int) -> dist.Work:
        """Send one tensor to the rank `dst` of the group; it may be changed when the work is done."""
        codec, reason = self.choose(tensors)
        x = tensors[0]
        if codec is None:
            audit.record("send", x.dtype, x.nbytes, x.nbytes, RAW, reason, 0.0)
            return self._together(x, lambda: self.send_raw(x, as_bytes(tensors), dst, tag))
        started = time.perf_counter()
        message = codec.encode(x.detach().view(-1))
        audit.record("send", x.dtype, x.nbytes, message.nbytes, codec.name, reason, time.perf_counter() - started)
        return self.send_raw(x, [message], dst, tag)

    def recv(self, tensors: list[Tensor], src: int | None, tag: int) -> dist.Work:
        """Receive one tensor from the rank `src` of the group, or from any if None.

        The work's `wait` raises FormatError for a message that is damaged or holds something else.
        """
        codec, _ = self.choose(tensors)
        if codec is None:
            return self._together(tensors[0], lambda: self.receive_raw(tensors[0], as_bytes(tensors), src, tag))
        (tensor,) = tensors
        buffer = torch.empty(codec.max_nbytes(tensor.numel(), tensor.dtype), dtype=torch.uint8, device="cpu")
        work = self.receive_raw(tensor, [buffer], src, tag)

        def decode() -> None:
            try:
                codec.decode_into(codec.cut(buffer), tensor.detach().view(-1))
            except FormatError as error:
                peer = work._source_rank() if src is None else src
                raise FormatError(
                    f"the message received from rank {self._ranks[peer]} cannot be decoded: {error}"
                ) from error

        return AfterWork(work, tensors, decode)

    def start(self) -> None:
        """Start deferred operations; call it before the group is used otherwise."""
        self._batches.start()

    def _together(self, x: Tensor, start: Callable[[], dist.Work]) -> dist.Work:
        """Start at once where every operation makes progress by itself, and as one of a batch elsewhere."""
        if x.device.type == "cpu" or not self._group._get_backend(x.device).supports_coalescing:
            return start()
        return self._batches.add(x, start)

    def send_raw(self, x: Tensor, tensors: list[Tensor], dst: int, tag: int) -> dist.Work:
        """Pass `tensors`, the message of `x`, to the backend."""
        self._check_rank("dst", dst)
        call = "send", x.numel(), x.dtype, dst
        try:
            return PeerWork(self._group.send(tensors, dst, tag), tensors, self._explain, call, self._options_for(x))
        except RuntimeError as error:
            raise self._explain(error, *call) from error

    def receive_raw(self, x: Tensor, tensors: list[Tensor], src: int | None, tag: int) -> dist.Work:
        """Receive the message of `x` into `tensors`."""
        if src is not None:
            self._check_rank("src", src)
        call = "recv", x.numel(), x.dtype, src
        try:
            work = self._group.recv_anysource(tensors, tag) if src is None else self._group.recv(tensors, src, tag)
            return PeerWork(work, tensors, self._explain, call, self._options_for(x))
        except RuntimeError as error:
            raise self._explain(error, *call) from error

    def _options_for(self, x: Tensor) -> Any:
        return self._options if x.is_cpu else None  # on CUDA a wait with a timeout would block the host

    def _check_rank(self, name: str, rank: int) -> None:
        """Refuse what is no rank of the group: gloo reads past its list of peers."""
        if not 0 <= rank < self._size:
            check_group_rank(name, rank, self._size)

    def _explain(
        self, error: RuntimeError, function: str, numel: int, dtype: torch.dtype, peer: int | None
    ) -> Exception:
        """Make an error that names the operation and the rank that broke it off."""
        if isinstance(error, LaconicError) or is_own(error):
            return error
        reason = reason_of(error)
        name = "a rank that sends" if peer is None else f"rank {self._ranks[peer]}"
        return CollectiveError(
            f"{function} of {numel} {str(dtype).removeprefix('torch.')} broke off on rank"
            f" {self._ranks[self._group.rank()]}, which waited for {name}: {reason}; {name} ended, stopped, raised"
            " an error or took longer than the group's timeout, see its own output"
        )

    def choose(self, tensors: list[Tensor]) -> tuple[Codec | None, str]:
        """Choose the codec, None for the tensor's own bytes, and give the reason."""
        x = tensors[0]
        if x.device.type != "cpu":
            return None, _OTHER_DEVICE
        if x.dtype not in CODED:
            return None, NO_CODE
        if x.nbytes < max(1, self._min_nbytes):
            return None, TOO_SMALL
        if not is_auto(self._codec):
            return None if isinstance(self._codec, Raw) else self._codec, _ASKED_FOR
        choice = predict("send", x.numel(), x.dtype, self._group)
        return None if choice.codec == RAW else Lossless(choice.codec), choice.reason


def as_bytes(x: Any) -> Any:
    """View fp8 tensors, alone or in lists, as bytes: gloo does not know fp8."""
    if isinstance(x, list):
        return [as_bytes(each) for each in x]
    return x.view(torch.uint8) if isinstance(x, Tensor) and x.dtype in CODED and x.dtype.itemsize == 1 else x


# --- started together ---

_NO_TIMEOUT = timedelta()


class Batches:
    """Deferred sends and receives of a group, and those that were started."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._pending: _Batch | None = None

    def add(self, tensor: Tensor, start: Callable[[], object]) -> dist.Work:
        """Defer `start`, which sends or receives `tensor`."""
        if self._pending is None or self._pending.device != tensor.device:
            self.start()
            self._pending = _Batch(self, tensor.device)
        self._pending.add(start)
        return _BatchedWork(self._pending, tensor)

    def start(self) -> None:
        """Start all deferred operations as one batch."""
        batch, self._pending = self._pending, None
        if batch is not None:
            batch.start(self._group)


class _Batch:
    def __init__(self, batches: Batches, device: torch.device) -> None:
        self.device = device
        self._batches = batches
        self._starts: list[Callable[[], object]] = []
        self._ready: list[Ready] = []
        self._work: dist.Work | None = None

    def add(self, start: Callable[[], object]) -> None:
        self._starts.append(start)
        # The tensor belongs to the stream that is current now, which need not be the one in which all start.
        self._ready.append(Ready(self.device))

    def start(self, group: dist.ProcessGroup) -> None:
        for ready in self._ready:
            ready.wait()
        group._start_coalescing(self.device)
        for start in self._starts:
            start()
        self._work = group._end_coalescing(self.device)

    def work(self) -> dist.Work:
        if self._work is None:
            self._batches.start()
        assert self._work is not None, "only the newest batch is not started"
        return self._work


@untraced
class _BatchedWork(TensorsWork):
    def __init__(self, batch: _Batch, tensor: Tensor) -> None:
        super().__init__([tensor])  # which has to live until it is sent
        self._batch = batch

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        return self._batch.work().wait(timeout)

    def is_completed(self) -> bool:
        return self._batch.work().is_completed()

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        return self._batch.work().get_future().then(lambda done: (done.value(), self._tensors)[1])
