"""What a worker writes down of a run: times of passes and answers, by the machine's monotonic clock.

Nothing is written unless the engine has asked for it; then a layer costs a few readings of the clock. All processes of
one machine read the same clock. `machine` tells machines apart; see laconic.infer.run_trace for several.

A CUDA device computes after the host has gone on. What an attention worker computes there is timed by events, which are
read when the recording ends; no host waits for one before.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from laconic.train.step_timeline import machine

if TYPE_CHECKING:
    import torch

now_ns = time.monotonic_ns

_MOST_ENTRIES = 50_000


@dataclass(slots=True)
class MessageLog:
    """Rows of a slice on their way to one expert worker and home: when they went to the link, and the answer came.

    `number` counts the messages of this attention worker to that expert worker, from 0.
    """

    worker: int
    number: int
    slice: int
    num_rows: int
    posted_ns: int
    arrived_ns: int = 0


@dataclass(slots=True)
class LayerLog:
    """One layer of experts of one pass, as its attention worker sees it, from when it got its turn to compute.

    Attention ends when its shared experts began or its first rows left, whichever was first, and shared experts take no
    time where there are none; `sent_ns` is when all rows had left. Messages are in the order of sending.
    """

    turn_ns: int
    attention_end_ns: int = 0
    sent_ns: int = 0
    shared_start_ns: int = 0
    shared_end_ns: int = 0
    messages: list[MessageLog] = field(default_factory=list)


@dataclass(slots=True)
class PassLog:
    """One pass of a micro-batch, by its number in its attention worker, of so many tokens over all layers with experts.

    `turn_ns` is when it last got its turn; in the end, for what follows the last layer of experts.
    """

    micro_batch: int
    num_rows: int
    turn_ns: int
    end_ns: int = 0
    layers: list[LayerLog] = field(default_factory=list)


@dataclass(slots=True)
class AnswerLog:
    """One message of the attention worker of rank `peer` as its expert worker sees it, from when its rows were here.

    The host's clock is right for a CUDA device, too: it is idle when it gets the rows, and the host waits for the sums.
    `number` is as in MessageLog: both ends of a link count, and messages do not overtake each other.
    """

    peer: int
    number: int
    arrived_ns: int
    start_ns: int
    end_ns: int


@dataclass(slots=True)
class WorkerLog:
    """All that one worker has recorded, by the clock of that name: whole passes, or answers of an expert worker.

    `num_dropped` counts those that came when the log was full, `num_entries` layers and messages in `passes`.
    """

    clock: str
    passes: list[PassLog] = field(default_factory=list)
    answers: list[AnswerLog] = field(default_factory=list)
    num_dropped: int = 0
    num_entries: int = 0

    def add_pass(self, entry: PassLog) -> bool:
        """Keep a pass, if there is room; returns whether there was."""
        size = sum(1 + len(layer.messages) for layer in entry.layers)
        if self.num_entries + size > _MOST_ENTRIES:
            self.num_dropped += 1
            return False
        self.num_entries += size
        self.passes.append(entry)
        return True

    def add_answer(self, entry: AnswerLog) -> None:
        """Keep an answer, if there is room."""
        if len(self.answers) >= _MOST_ENTRIES:
            self.num_dropped += 1
        else:
            self.answers.append(entry)


class PassClock:
    """The clock of one pass: the machine's, for what the host itself computes or waits for."""

    def now(self) -> int:
        """Return the time at which the pass is here."""
        return now_ns()

    def meet(self) -> None:
        """Take note that the host has waited for all that the pass has computed."""

    def settle(self, passed: PassLog) -> bool:
        """Put in the times that were not known when the pass was here; False if they cannot be known."""
        return True


class DeviceClock(PassClock):
    """The clock of a pass that a CUDA device computes, on the current stream.

    `now` records an event and returns the host's time, which stands for the device's until `settle`. Events are counted
    from the last place before them where the host had waited for the stream anyway, at which both clocks were read: so
    neither clocks that drift apart nor the rounding of long times matter.
    """

    def __init__(self) -> None:
        self._events: dict[int, tuple[torch.cuda.Event, int]] = {}
        """By the host's time; with the number of places before where both clocks were read."""
        self._met: list[tuple[torch.cuda.Event, int]] = []

    def now(self) -> int:
        event, here = _recorded(), now_ns()
        self._events[here] = event, len(self._met)
        return here

    def meet(self) -> None:
        self._met.append((_recorded(), now_ns()))

    def settle(self, passed: PassLog) -> bool:
        """See PassClock; waits for the events."""
        if not self._met:
            return False
        entries: list[tuple[PassLog | LayerLog, tuple[str, ...]]] = [(passed, ("turn_ns", "end_ns"))]
        of_layers = ("turn_ns", "attention_end_ns", "shared_start_ns", "shared_end_ns")
        entries += [(layer, of_layers) for layer in passed.layers]
        for entry, names in entries:
            for name in names:
                if (found := self._events.get(getattr(entry, name))) is not None:
                    setattr(entry, name, self._ns(*found))
        return True

    def _ns(self, event: torch.cuda.Event, met_before: int) -> int:
        met, at_ns = self._met[max(0, met_before - 1)]
        event.synchronize()
        if met_before:
            return at_ns + round(1e6 * met.elapsed_time(event))
        met.synchronize()
        return at_ns - round(1e6 * event.elapsed_time(met))


def _recorded() -> torch.cuda.Event:
    import torch

    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


class Recorder:
    """Hands out the log of the recording that is on.

    Args:
        device: on which the worker computes; None is the CPU.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._of_pass = DeviceClock if device is not None and device.type == "cuda" else PassClock
        self._clocks: list[tuple[PassLog, PassClock]] = []
        self._lock = threading.Lock()
        self.log: WorkerLog | None = None
        """Of the recording that is on; None while none is."""

    def start(self) -> None:
        """Begin a recording, with an empty log."""
        self.log = WorkerLog(machine())

    def clock(self) -> PassClock:
        """Return a clock for one pass."""
        return self._of_pass()

    def add_pass(self, log: WorkerLog, entry: PassLog, clock: PassClock) -> None:
        """Keep a pass that began with `log`, if that recording is still on and has room."""
        with self._lock:
            if log is self.log and log.add_pass(entry):
                self._clocks.append((entry, clock))

    def stop(self) -> WorkerLog:
        """End the recording and return its log. What is being computed is not in it."""
        with self._lock:
            log, self.log = self.log, None
            clocks, self._clocks = self._clocks, []
        if log is None:
            return WorkerLog(machine())
        if unknown := [entry for entry, clock in clocks if not clock.settle(entry)]:
            log.passes = [entry for entry in log.passes if not any(entry is each for each in unknown)]
            log.num_dropped += len(unknown)
        return log
