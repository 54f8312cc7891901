"""What a worker is told when it starts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from laconic.infer.split import EngineSplit
from laconic.schedule.inference import InferencePlan


@dataclass(frozen=True)
class WorkerSettings:
    """What a worker is told when it starts; see Engine and EngineSplit.

    Workers meet in `store`, a file or "tcp://HOST:PORT" of a TCPStore. `threads` None leaves torch's default. `held`
    has for each layer the experts of each expert worker; None: ranges, see EngineSplit.
    """

    rank: int
    model_dir: str
    store: str
    split: EngineSplit = field(default_factory=EngineSplit)
    plan: InferencePlan = field(default_factory=InferencePlan)
    dtype: str = "auto"
    cache_tokens: int = 4096
    batch_tokens: int = 256
    answer_timeout_seconds: float = 120.0
    threads: int | None = None
    device: str = "cpu"
    payload: str = "raw"
    link: str = "tcp"
    expert_format: str = "exact"
    held: Sequence[Sequence[Sequence[int]]] | None = None

    def experts_of(self, layer: int, worker: int, num_experts: int) -> Sequence[int]:
        """Return the experts of a layer of `num_experts` that an expert worker holds."""
        return self.split.expert_range(worker, num_experts) if self.held is None else self.held[layer][worker]

    def to_json(self) -> str:
        """Return the argument of the worker's command line."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> WorkerSettings:
        """Read what `to_json` wrote."""
        values: dict[str, Any] = json.loads(text)
        return cls(**values | {"split": EngineSplit(**values["split"]), "plan": InferencePlan(**values["plan"])})
