"""A worker of a whole model, and requests of one, in this process: what is heard of them, and how they end."""

from __future__ import annotations

import queue
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from laconic.infer.attention_worker import AttentionWorker
from laconic.infer.sampling import ChosenToken, Sampling
from laconic.infer.settings import WorkerSettings
from laconic.infer.split import EngineSplit
from laconic.infer.transformers_seam import CacheLimits, Finished, Requests
from laconic.schedule.inference import InferencePlan
from tests.patience import patient


class Asked:
    """Requests of a model."""

    def __init__(self, model: Any, cache_tokens: int = 512, batch_tokens: int = 64, **options: Any) -> None:
        self.heard: dict[str, list[ChosenToken]] = defaultdict(list)
        self._ended: queue.SimpleQueue[Finished] = queue.SimpleQueue()
        limits = CacheLimits(cache_tokens, batch_tokens)
        self.requests = Requests(model, limits, self._ended.put, self._hear, **options)

    def _hear(self, chosen: list[tuple[str, ChosenToken]]) -> None:
        for name, token in chosen:
            self.heard[name].append(token)

    def add(self, name: str, prompt: list[int], **sampling: Any) -> None:
        self.requests.add(name, prompt, Sampling(**sampling))

    def end(self) -> Finished:
        """The next request that ends."""
        return self._ended.get(timeout=patient(60))

    def ends(self, count: int) -> dict[str, Finished]:
        """The next that end, by their names."""
        return {finished.name: finished for finished in (self.end() for _ in range(count))}


def worker_of(
    path: Path,
    dtype: torch.dtype = torch.float32,
    micro_batches: int = 1,
    cache_tokens: int = 512,
    batch_tokens: int = 256,
    on_finished: Callable[[Finished], None] = print,
    on_tokens: Callable[[list[tuple[str, ChosenToken]]], None] = lambda chosen: None,
    **options: Any,
) -> AttentionWorker:
    """A worker without expert workers."""
    settings = WorkerSettings(
        rank=0,
        model_dir=str(path),
        store="",
        split=EngineSplit(1, 0),
        plan=InferencePlan(num_micro_batches=micro_batches),
        cache_tokens=cache_tokens,
        batch_tokens=batch_tokens,
    )
    return AttentionWorker(settings, dtype, torch.device("cpu"), list, on_finished, on_tokens, **options)
