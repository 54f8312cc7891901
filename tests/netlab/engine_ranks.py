"""Each rank of an engine that generates once for a longer time: `python -m tests.netlab.engine_ranks TASK`.

Rank 0 prints "begun" at the fifth token of the first request, and at last one JSON object, whatever becomes of it.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from dataclasses import asdict, dataclass, field
from typing import Any

from laconic.errors import LaconicError
from laconic.infer import ChosenToken, Engine, Sampling, connections, serve_rank
from tests.patience import patient


@dataclass(frozen=True)
class Task:
    """What all ranks are told.

    Attributes:
        silence_seconds: after which a machine that has gone is noticed, in place of the 15 s of `connections`.
    """

    model: str
    new_tokens: int = 200
    num_requests: int = 3
    answer_timeout_seconds: float = field(default_factory=lambda: patient(120))
    silence_seconds: int = 15

    def as_arguments(self) -> list[str]:
        """The command that carries it out."""
        return [sys.executable, "-m", "tests.netlab.engine_ranks", json.dumps(asdict(self))]


class Listener:
    """Prints when the fifth token has come."""

    def __init__(self, speaks: bool) -> None:
        self.tokens: list[int] = []
        self.error: LaconicError | None = None
        self.ended = threading.Event()
        self._speaks = speaks

    def on_token(self, token: ChosenToken) -> None:
        self.tokens.append(token.token)
        if self._speaks and len(self.tokens) == 5:
            print("begun", flush=True)

    def on_end(self, error: LaconicError | None) -> None:
        self.error = error
        self.ended.set()


def main(task: Task) -> None:
    every = max(1, task.silence_seconds // 6)
    connections._KEEPALIVE |= {"TCP_KEEPIDLE": 2 * every, "TCP_KEEPINTVL": every, "TCP_KEEPCNT": 4}
    connections._USER_TIMEOUT_MILLISECONDS = 1000 * task.silence_seconds
    if os.environ["RANK"] != "0":
        serve_rank(patient(60))
    found: dict[str, Any] = {}
    with Engine(
        task.model,
        dtype="float32",
        launcher="torchrun",
        start_timeout_seconds=patient(60),
        answer_timeout_seconds=task.answer_timeout_seconds,
    ) as engine:
        heard = [Listener(number == 0) for number in range(task.num_requests)]
        begin = time.monotonic()
        for number, each in enumerate(heard):
            engine.stream([number + 1, 5, 9], Sampling(max_new_tokens=task.new_tokens), each)
        for each in heard:
            each.ended.wait()
        found |= {
            "seconds": time.monotonic() - begin,
            "sent_nbytes": [direction.sent_nbytes for direction in engine.traffic],
            "tokens": [each.tokens for each in heard],
            "errors": [None if each.error is None else str(each.error) for each in heard],
            "refusal": None if engine.error is None else str(engine.error),
        }
        begin = time.monotonic()
    print(json.dumps(found | {"close_seconds": time.monotonic() - begin}), flush=True)


if __name__ == "__main__":
    main(Task(**json.loads(sys.argv[1])))
