"""What each rank of an engine on several hosts does: `python -m tests.netlab.inference_ranks TASK`.

Rank 0 generates for one prompt after the other, so that batches do not depend on the time, and prints one JSON object.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, dataclass
from typing import Any, cast

from laconic.infer import Engine, serve_rank
from tests.netlab.ranks_once import on_the_interface
from tests.patience import patient


@dataclass(frozen=True)
class Task:
    """What all ranks are told."""

    model: str
    payload: str = "raw"
    dtype: str = "bfloat16"
    num_prompts: int = 12
    prompt_tokens: int = 120
    new_tokens: int = 2

    def as_arguments(self) -> list[str]:
        """The command that carries it out."""
        return [sys.executable, "-m", "tests.netlab.inference_ranks", json.dumps(asdict(self))]

    @property
    def prompts(self) -> list[list[int]]:
        """Prompts of one length that begin differently, so that no cached prefix is reused; the first is to warm up."""
        return [[(7 * i + 13 * j) % 97 for j in range(self.prompt_tokens)] for i in range(self.num_prompts + 1)]


def main(task: Task) -> None:
    if os.environ["RANK"] != "0":
        serve_rank(patient(60))
    payload = cast(Any, task.payload)
    with Engine(
        task.model, dtype=task.dtype, payload=payload, launcher="torchrun", start_timeout_seconds=patient(60)
    ) as engine:
        before = on_the_interface()  # the check of the load has sent rows, too, which `engine.traffic` does not count
        engine.generate(task.prompts[:1], task.new_tokens)
        tokens = [row for prompt in task.prompts[1:] for row in engine.generate([prompt], task.new_tokens)]
        found = {
            "tokens": tokens,
            "traffic": [asdict(direction) for direction in engine.traffic],
            "interface_nbytes": on_the_interface() - before,
            "hosts": [worker.host for worker in engine.workers],
        }
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(Task(**json.loads(sys.argv[1])))
