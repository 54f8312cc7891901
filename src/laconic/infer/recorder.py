"""What a worker writes down of a run: times of passes and answers, by the machine's monotonic clock.

Nothing is written unless the engine has asked for it; then a layer costs a few readings of the clock. All processes of
one machine read the same clock. `machine` tells machines apart; see laconic.infer.run_trace for several.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from typing import Any

from laconic.train.step_timeline import machine

now_ns = time.monotonic_ns

_MOST_ENTRIES = 50_000


@dataclass(slots=True)
class MessageLog:
    """Rows of a slice on their way to one expert worker and home.

    Attributes:
        worker: number of the expert worker.
        number: of all messages of this attention worker to that expert worker, from 0.
        slice: of the micro-batch.
        num_rows: in the message.
        posted_ns: when it was given to the link.
        arrived_ns: when its answer was here.
    """

    worker: int
    number: int
    slice: int
    num_rows: int
    posted_ns: int
    arrived_ns: int = 0


@dataclass(slots=True)
class LayerLog:
    """One layer of experts of one pass, as its attention worker sees it.

    Attributes:
        turn_ns: when the micro-batch got its turn to compute.
        attention_end_ns: when its shared experts began or its first rows left, whichever was first.
        sent_ns: when all its rows had left.
        shared_start_ns, shared_end_ns: of the shared experts; both `attention_end_ns` without any.
        messages: in the order of sending.
    """

    turn_ns: int
    attention_end_ns: int = 0
    sent_ns: int = 0
    shared_start_ns: int = 0
    shared_end_ns: int = 0
    messages: list[MessageLog] = field(default_factory=list)


@dataclass(slots=True)
class PassLog:
    """One pass of a micro-batch over all layers.

    Attributes:
        micro_batch: number in its attention worker.
        num_rows: tokens.
        turn_ns: when the micro-batch last got its turn; in the end, for what follows the last layer of experts.
        end_ns: when the pass ended.
        layers: those with experts.
    """

    micro_batch: int
    num_rows: int
    turn_ns: int
    end_ns: int = 0
    layers: list[LayerLog] = field(default_factory=list)


@dataclass(slots=True)
class AnswerLog:
    """One message as its expert worker sees it.

    Attributes:
        peer: rank of the attention worker.
        number: as in MessageLog; both ends of a link count, and messages do not overtake each other.
        arrived_ns: when its rows were here.
        start_ns, end_ns: of the experts.
    """

    peer: int
    number: int
    arrived_ns: int
    start_ns: int
    end_ns: int


@dataclass(slots=True)
class WorkerLog:
    """All that one worker has recorded.

    Attributes:
        clock: name of the clock that it read.
        passes: of an attention worker, whole ones only.
        answers: of an expert worker.
        num_dropped: passes and answers that came when the log was full.
        num_entries: layers and messages in `passes`.
    """

    clock: str
    passes: list[PassLog] = field(default_factory=list)
    answers: list[AnswerLog] = field(default_factory=list)
    num_dropped: int = 0
    num_entries: int = 0

    def add_pass(self, entry: PassLog) -> None:
        """Keep a pass, if there is room."""
        size = sum(1 + len(layer.messages) for layer in entry.layers)
        if self.num_entries + size > _MOST_ENTRIES:
            self.num_dropped += 1
        else:
            self.num_entries += size
            self.passes.append(entry)

    def add_answer(self, entry: AnswerLog) -> None:
        """Keep an answer, if there is room."""
        if len(self.answers) >= _MOST_ENTRIES:
            self.num_dropped += 1
        else:
            self.answers.append(entry)

    def to_dict(self) -> dict[str, Any]:
        """Return the log as JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> WorkerLog:
        """Read what `to_dict` returned."""
        passes = []
        for entry in data["passes"]:
            layers = [
                LayerLog(**layer | {"messages": [MessageLog(**message) for message in layer["messages"]]})
                for layer in entry["layers"]
            ]
            passes.append(PassLog(**entry | {"layers": layers}))
        answers = [AnswerLog(**entry) for entry in data["answers"]]
        return cls(data["clock"], passes, answers, data["num_dropped"], data["num_entries"])


class Recorder:
    """Hands out the log of the recording that is on."""

    def __init__(self) -> None:
        """Start without a recording."""
        self.log: WorkerLog | None = None
        """Of the recording that is on; None while none is."""

    def start(self) -> None:
        """Begin a recording, with an empty log."""
        self.log = WorkerLog(machine())

    def stop(self) -> WorkerLog:
        """End the recording and return its log. What is being computed is not in it."""
        log, self.log = self.log, None
        return log if log is not None else WorkerLog(machine())
