"""Sinkhorn's balanced choice in training, the best experts in evaluation: S-BASE, as in Megatron-Core."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from laconic.moe.gates.base import LinearGate


class SinkhornGate(LinearGate):
    """In training experts are chosen by `sinkhorn(logits)`, whose columns have equal sums; in evaluation by the scores.

    Unified Scaling Laws for Routed Language Models (Clark et al., 2022), section 3.1, as Megatron-Core has it: scores,
    and so weights, are sigmoid(x weight^T) with one expert per token and softmax(x weight^T) with more; they carry the
    gradient, the choice has none. Experts are balanced over the tokens of a rank, without a loss.

    Parameter: weight [E, M].

    Args:
        num_experts, model_dim, top_k, normalize, options: as in LinearGate; normalize is False, as in Megatron-Core.
    """

    def __init__(
        self, num_experts: int, model_dim: int, top_k: int = 1, *, normalize: bool = False, **options: Any
    ) -> None:
        super().__init__(num_experts, model_dim, top_k, normalize=normalize, **options)

    def scores(self, logits: Tensor) -> Tensor:
        return logits.sigmoid() if self.top_k == 1 else logits.softmax(-1)

    def choose(self, logits: Tensor, scores: Tensor) -> Tensor:
        return self._best(sinkhorn(logits)) if self.training else super().choose(logits, scores)


@torch.no_grad()
def sinkhorn(logits: Tensor, tolerance: float = 1e-4, max_steps: int = 100) -> Tensor:
    """Scale rows and columns of exp(logits) in turn until rows sum to 1 / n and columns to 1 / E; [n, E].

    Each step waits for a GPU. It ends when factors of columns change by less than `tolerance` in the mean, or after
    `max_steps`.
    """
    num_tokens, num_experts = logits.shape
    costs = logits.softmax(-1)  # exp(logits) up to the factors of rows
    rows, columns = costs.new_ones(num_tokens), costs.new_ones(num_experts)
    for _ in range(max_steps if num_tokens else 0):
        rows = 1 / (num_tokens * (costs @ columns).clamp_min(_TINY))
        before, columns = columns, 1 / (num_experts * (rows @ costs).clamp_min(_TINY))
        if float((columns - before).abs().mean()) <= tolerance:
            break
    return rows[:, None] * costs * columns


_TINY = 1e-8
"""Megatron-Core's eps."""
