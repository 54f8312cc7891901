"""Sigmoid scores, balanced by a bias instead of a loss: DeepSeek-V3; without the bias BASE and StableMoE."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from laconic.moe.gates.base import LinearGate
from laconic.moe.gates.losses import FirstRuns, load_step, summed_counts
from laconic.moe.routing import Routing


class SigmoidGate(LinearGate):
    """Scores are sigmoid(x weight^T); the choice is made by score + bias, the weights are the scores alone.

    DeepSeek-V3 (2024), section 2.1.2: the bias of an overloaded expert falls by `bias_rate` after each step, that of an
    underloaded one rises. Groups are chosen by the sum of their two best. Call `update_bias` after each optimizer step.

    Parameter: weight [E, M]. Buffers: bias fp32 [E], in the state dict; load int64 [E], tokens since the last update,
    counted in training only, not in the state dict.

    Args:
        num_experts, model_dim, top_k, options: as in LinearGate.
        bias_rate: of one update; 0 keeps the bias as it is.
    """

    bias: Tensor
    load: Tensor

    def __init__(
        self, num_experts: int, model_dim: int, top_k: int, *, bias_rate: float = 1e-3, **options: Any
    ) -> None:
        super().__init__(num_experts, model_dim, top_k, **options)
        self.bias_rate, device = bias_rate, self.weight.device
        self._runs = FirstRuns()
        self.register_buffer("bias", torch.zeros(num_experts, device=device, dtype=torch.float32))
        load = torch.zeros(num_experts, device=device, dtype=torch.int64)
        self.register_buffer("load", load, persistent=False)

    def scores(self, logits: Tensor) -> Tensor:
        return logits.sigmoid()

    def preferences(self, scores: Tensor) -> Tensor:
        return scores + self.bias.to(scores.dtype)

    def group_preferences(self, grouped: Tensor) -> Tensor:
        """See `TokenChoiceGate.group_preferences`: the sum of the two best."""
        return grouped.topk(min(2, grouped.shape[-1]), dim=-1).values.sum(-1)

    def chose(self, routing: Routing) -> None:
        """See `TokenChoiceGate.chose`: counts the load."""
        if self.training and self._runs.is_first():
            self.load += routing.counts()

    @torch.no_grad()
    def update_bias(self, group: dist.ProcessGroup | None = None) -> None:
        """Move the bias by bias_rate * sign(mean load - load) and reset the load.

        Args:
            group: all ranks whose tokens these experts serve; each calls it. None uses the load that was counted here.
        """
        load = self.load if group is None else summed_counts(self.load, group)
        self.bias += load_step(load, self.bias_rate, self.bias.dtype)
        self.forget_load()

    def forget_load(self) -> None:
        """Count anew."""
        self.load.zero_()
        self._runs.forget()
