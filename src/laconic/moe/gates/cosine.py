"""X-MoE's gate: cosines in a low-dimensional space, with a learned temperature."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from laconic.moe.gates.base import TokenChoiceGate, linear_logits

_FIRST_TEMPERATURE = 0.5
_LEAST_TEMPERATURE = 0.01


class CosineGate(TokenChoiceGate):
    """Logits are cos(x projection^T, embedding of the expert) / temperature; scores their softmax over all experts.

    X-MoE (Chi et al., 2022), section 3. The temperature is learned as its negative logarithm, begins at 0.5 and stays
    above 0.01, as in Tutel's cosine gate.

    Parameters: projection [P, M], embeddings [E, P], log_inverse_temperature [1].
    """

    def __init__(
        self,
        num_experts: int,
        model_dim: int,
        top_k: int,
        *,
        projection_dim: int = 256,
        normalize: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        super().__init__(num_experts, model_dim, top_k, normalize=normalize, **options)
        self.projection = nn.Parameter(torch.empty(projection_dim, model_dim, device=device, dtype=dtype))
        self.embeddings = nn.Parameter(torch.empty(num_experts, projection_dim, device=device, dtype=dtype))
        first = math.log(1 / _FIRST_TEMPERATURE)
        self.log_inverse_temperature = nn.Parameter(torch.full((1,), first, device=device, dtype=dtype))
        nn.init.normal_(self.projection, std=model_dim**-0.5)
        nn.init.normal_(self.embeddings, std=0.01)

    def logits(self, x: Tensor) -> Tensor:
        projected = F.normalize(linear_logits(x, self.projection), dim=-1)
        embeddings = F.normalize(self.embeddings.to(projected.dtype), dim=-1)
        scale = self.log_inverse_temperature.to(projected.dtype).clamp_max(math.log(1 / _LEAST_TEMPERATURE)).exp()
        return linear_logits(projected, embeddings) * scale

    def scores(self, logits: Tensor) -> Tensor:
        return logits.softmax(-1)
