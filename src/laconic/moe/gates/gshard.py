"""GShard's noisy top-k: learned noise while training, softmax over the chosen."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from laconic.moe.gates.base import LinearGate, linear_logits


class GShardGate(LinearGate):
    """Logits are x weight^T, in training plus N(0, 1) * softplus(x noise_weight^T); weights a softmax over the best k.

    Shazeer et al. (2017), equations 3 to 5, as GShard and FSMoE (section 3) use them. The softmax over the best k is
    the softmax over all, divided by its sum over the best k.

    Parameters: weight, noise_weight, both [E, M]; noise_weight begins at zero, which is noise of log(2).
    """

    def __init__(self, num_experts: int, model_dim: int, top_k: int = 2, **options: Any) -> None:
        super().__init__(num_experts, model_dim, top_k, **options)
        self.noise_weight = nn.Parameter(torch.zeros_like(self.weight))

    def logits(self, x: Tensor) -> Tensor:
        logits = super().logits(x)
        if not self.training:
            return logits
        return logits + torch.randn_like(logits) * F.softplus(linear_logits(x, self.noise_weight))

    def scores(self, logits: Tensor) -> Tensor:
        return logits.softmax(-1)
