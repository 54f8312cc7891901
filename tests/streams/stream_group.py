"""What process groups on the simulated device share: NCCL's streams and works.

A collective that the caller waits for runs on the current stream, every other operation on a stream of the group, which
waits for the current one. A work's `wait` makes the current stream wait; until then the group holds the tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["StreamGroup", "StreamWork"]


class StreamWork(dist.Work):
    """One operation; `event` is None as long as it has not been started."""

    def __init__(self, held: list[Tensor], result: list[Tensor]) -> None:
        super().__init__()
        self.event: Any = None
        self.held, self._result = held, result

    def wait(self, timeout: timedelta | None = None) -> bool:
        if self.event is not None:
            torch.cuda.current_stream().wait_event(self.event)
        assert self.event is not None or not any(x.is_cuda for x in self.held), "this rank has to send that itself"
        self.held.clear()
        return True

    def is_completed(self) -> bool:
        return self.event is None or self.event.query()

    def get_future(self) -> Any:
        if self.event is None:  # on the host, and over
            done: Any = torch.futures.Future()
            done.set_result(self._result)
            return done
        future: Any = torch.futures.Future(devices=[torch.device("cuda", 0)])
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda.current_stream().wait_event(self.event)
            future.set_result(self._result)
        return future


class StreamGroup(dist.ProcessGroup):
    """Base of process groups of which a subclass says what each collective does."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self.stream: Any = None
        self._name = ""
        self._in_flight: list[list[Tensor]] = []

    def getGroupName(self) -> str:
        return self._name

    def setGroupName(self, name: str) -> None:
        self._name = name

    def start(
        self, run: Callable[[], object], held: Sequence[Tensor], result: Sequence[Tensor], opts: Any = None
    ) -> StreamWork:
        """Issue a collective that uses the tensors `held` and leaves `result`."""
        work = StreamWork(list(held), list(result))
        with torch.no_grad(), self.on_stream(held, is_waited_for=opts is not None and not opts.asyncOp):
            run()
            self.finish(work)
        return work

    def finish(self, work: StreamWork) -> None:
        """`work` is what the current stream has been given last."""
        if any(x.is_cuda for x in work.held):
            work.event = torch.cuda.current_stream().record_event()
            self._in_flight.append(work.held)

    @contextmanager
    def on_stream(self, tensors: Sequence[Tensor], is_waited_for: bool = False) -> Iterator[None]:
        """Make current the stream that an operation with `tensors` runs on."""
        if is_waited_for or not any(x.is_cuda for x in tensors):
            yield
            return
        self.stream = self.stream or torch.cuda.Stream()
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            yield
