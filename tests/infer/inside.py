"""An engine without processes: the attention side and the expert shares of a model in this process."""

from __future__ import annotations

import queue
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.kit.local_link import LocalLink
from laconic.infer.attention_worker import put_remote_experts
from laconic.infer.coded_experts import keep_experts
from laconic.infer.expert_share import ExpertShare
from laconic.infer.load_check import expected_logits, made_up_trials, try_engine
from laconic.infer.remote_experts import RemoteExperts, RemoteLayer
from laconic.infer.sampling import Sampling
from laconic.infer.split import EngineSplit
from laconic.infer.transformers_seam import (
    CacheLimits,
    Finished,
    Requests,
    find_experts,
    fit_latent_attention,
    load_attention_model,
    load_experts,
    read_config,
)
from laconic.schedule.inference import InferencePlan
from tests.patience import patient


class Inside:
    """A split model whose links are calls."""

    def __init__(
        self,
        path: Path,
        num_experts_workers: int,
        plan: InferencePlan,
        dtype: torch.dtype = torch.float32,
        expert_format: str = "exact",
    ) -> None:
        split, keep = EngineSplit(1, num_experts_workers), partial(keep_experts, expert_format)
        self.shares = [
            ExpertShare(load_experts(path, dtype, lambda count, w=w: split.expert_range(w, count), keep))
            for w in range(num_experts_workers)
        ]
        _, blocks = find_experts(read_config(path))
        ranges = [[split.expert_range(w, b.num_experts) for w in range(num_experts_workers)] for b in blocks.values()]
        self.plan = plan
        self.experts = RemoteExperts([LocalLink(share.run) for share in self.shares], ranges, plan)
        self.model: Any = load_attention_model(path, dtype, lambda layer, _: RemoteLayer(self.experts, layer))
        self.moved, self.left = put_remote_experts(self.model, self.experts)
        self.limits = CacheLimits(cache_tokens=256, batch_tokens=64)
        self.expected = expected_logits(
            self.model, made_up_trials(self.model.config, self.limits), False, expert_format
        )
        fit_latent_attention(self.model)

    def check(self) -> str:
        """What a worker does when it has loaded."""
        managers = [Requests(self.model, self.limits, print) for _ in range(self.plan.num_micro_batches)]
        try:
            return try_engine(self.expected, managers, lambda: None)
        finally:
            for manager in managers:
                manager.stop()

    def generate(self, prompts: list[list[int]], new_tokens: int, limits: CacheLimits) -> list[list[int]]:
        ended: queue.SimpleQueue[Finished] = queue.SimpleQueue()
        managers = [Requests(self.model, limits, ended.put) for _ in range(self.plan.num_micro_batches)]
        for number, prompt in enumerate(prompts):
            managers[number % len(managers)].add(str(number), prompt, Sampling(max_new_tokens=new_tokens))
        found: dict[str, list[int]] = {}
        while len(found) < len(prompts):
            finished = ended.get(timeout=patient(60))
            assert finished.error is None, finished.error
            found[finished.name] = finished.tokens
        for manager in managers:
            manager.stop()
        return [found[str(number)] for number in range(len(prompts))]
