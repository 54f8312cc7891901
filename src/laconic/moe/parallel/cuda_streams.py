"""CUDA implementation of the streams of `laconic.schedule.execute`.

The host issues all tasks of a plan at once, in the plan's order; events order the streams, so nothing blocks the host.
Use the current stream for computation and separate streams for communication:

    streams = {"compute": CudaStream(torch.cuda.current_stream()), "inter": CudaStream(), "intra": CudaStream()}

No machine with a GPU has run this yet; the tests marked `gpu` wait for one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from laconic.errors import ScheduleError
from laconic.schedule.execute import TaskHandle


class CudaStream:
    """Runs the tasks that are submitted to it one after the other, on the device, in a given stream or a new one.

    Results of actions are held until the plan has been issued and the caller's stream waits for all of it. So tensors
    that pass from one stream to another must be among the results (or be held by the caller): the allocator may
    otherwise hand their memory to the stream that made them while another one reads it. Without a CUDA device it is a
    ScheduleError.
    """

    def __init__(self, stream: torch.cuda.Stream | None = None) -> None:
        if not torch.cuda.is_available():
            raise ScheduleError("there is no CUDA device; use ThreadStream or InlineStream of laconic.schedule.execute")
        self._stream: torch.cuda.Stream = stream if stream is not None else torch.cuda.Stream()
        self._origin: tuple[torch.cuda.Event, float] | None = None

    def start(self) -> None:
        """See `laconic.schedule.execute.Stream`; the stream waits for the caller's."""
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))

    def submit(self, action: Callable[[], object], after: Sequence[TaskHandle]) -> TaskHandle:
        """Issue the action now; on the device it runs after `after`."""
        with torch.cuda.stream(self._stream):
            for work in after:
                work.wait()
            work = _DeviceWork(self)
            work.run(action)
            return work

    def _clock(self) -> tuple[torch.cuda.Event, float]:
        """Return an event and when it happened by the host's clock."""
        if self._origin is None:
            with torch.cuda.stream(self._stream):
                event = torch.cuda.Event(enable_timing=True)
                event.record()
            event.synchronize()
            self._origin = event, time.perf_counter()
        return self._origin


class _DeviceWork:
    """Work handle of a task that was issued to a CUDA stream."""

    def __init__(self, owner: CudaStream) -> None:
        self._owner = owner
        self._start, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._result: object = None
        self._error: BaseException | None = None

    def run(self, action: Callable[[], object]) -> None:
        self._start.record()
        try:
            self._result = action()
        except BaseException as error:
            self._error = error
        self._end.record()

    def wait(self) -> None:
        """Make the current stream wait for the end of the task; the host does not wait."""
        torch.cuda.current_stream(self._owner._stream.device).wait_event(self._end)

    def result(self) -> object:
        """Return what the action returned, or raise what it raised."""
        if self._error is not None:
            raise self._error
        return self._result

    def span(self) -> tuple[float, float]:
        """Wait for the task and return its start and end by the host's clock."""
        self._end.synchronize()
        event, at = self._owner._clock()
        return at - self._start.elapsed_time(event) * 1e-3, at - self._end.elapsed_time(event) * 1e-3
