"""Softmax over all experts, then the best k: Switch (k = 1), Mixtral, Qwen, OLMoE, DeepSeek-V2."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from laconic.errors import RoutingError
from laconic.moe.gates.base import LinearGate


class SoftmaxGate(LinearGate):
    """Scores are softmax(x weight^T) over all experts.

    With `normalize` the weights are a softmax over the chosen ones (Mixtral, Qwen3 with norm_topk_prob); without it
    they are probabilities among all (Switch, OLMoE, DeepSeek-V2).

    Parameter: weight [E, M].

    Args:
        num_experts, model_dim, top_k, options: as in LinearGate.
        jitter: in training tokens are multiplied, for the gate only, by noise uniform in [1 - jitter, 1 + jitter]
            (Switch Transformers, section 2.4).

    Raises:
        RoutingError: jitter is not in [0, 1).
    """

    def __init__(self, num_experts: int, model_dim: int, top_k: int, *, jitter: float = 0.0, **options: Any) -> None:
        super().__init__(num_experts, model_dim, top_k, **options)
        if not 0 <= jitter < 1:
            raise RoutingError(f"jitter = {jitter} must be in [0, 1)")
        self.jitter = jitter

    def logits(self, x: Tensor) -> Tensor:
        if self.jitter and self.training:
            x = x * torch.empty_like(x).uniform_(1 - self.jitter, 1 + self.jitter)
        return super().logits(x)

    def scores(self, logits: Tensor) -> Tensor:
        return logits.softmax(-1)
