"""What a worker is told when it starts."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from laconic.infer.split import Split
from laconic.schedule.inference import InferencePlan

__all__ = ["WorkerSettings"]


@dataclass(frozen=True)
class WorkerSettings:
    """What a worker is told when it starts.

    Attributes:
        rank: of this worker, see Split.
        model_dir: directory of the model.
        store: file in which the workers meet, or "tcp://HOST:PORT" of a TCPStore.
        split, plan: of the engine.
        dtype: name of a torch dtype, or "auto" for the checkpoint's.
        cache_tokens, batch_tokens: of each micro-batch, see CacheLimits.
        answer_timeout_seconds: for the answer of an expert worker.
        threads: that torch computes with; None leaves torch's default.
        device: of the worker, see laconic.infer.device.
        payload: coding of rows and sums, see laconic.infer.payload.
    """

    rank: int
    model_dir: str
    store: str
    split: Split = field(default_factory=Split)
    plan: InferencePlan = field(default_factory=InferencePlan)
    dtype: str = "auto"
    cache_tokens: int = 4096
    batch_tokens: int = 256
    answer_timeout_seconds: float = 120.0
    threads: int | None = None
    device: str = "cpu"
    payload: str = "raw"

    def to_json(self) -> str:
        """Return the argument of the worker's command line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> WorkerSettings:
        """Read what `to_json` wrote."""
        values: dict[str, Any] = json.loads(text)
        return cls(**values | {"split": Split(**values["split"]), "plan": InferencePlan(**values["plan"])})
