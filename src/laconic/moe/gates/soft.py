"""SoftMoE: every slot of every expert takes a mixture of all tokens."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from laconic.errors import RoutingError
from laconic.moe.gates.base import Gate, checked, linear_logits
from laconic.moe.routing import SoftRouting
from laconic.moe.row_ops import accumulation_dtype


class SoftMoEGate(Gate):
    """Logits of token t and slot s are <normalized x_t, scale * normalized slot s>.

    Dispatch is their softmax over tokens, combine over slots. From Sparse to Soft Mixtures of Experts (Puigcerver et
    al., 2024), sections 2.1 and 2.3. Each output depends on all tokens of the batch: not for causal models.

    Parameters: slots [E * s, M], scale [1].

    Args:
        num_experts, model_dim: E and M.
        slots_per_expert: s.
        check_logits: as in TokenChoiceGate.
        device, dtype: of the parameters.

    Raises:
        RoutingError: slots_per_expert is below 1.
    """

    def __init__(
        self,
        num_experts: int,
        model_dim: int,
        slots_per_expert: int = 1,
        *,
        check_logits: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if slots_per_expert < 1:
            raise RoutingError(f"slots_per_expert = {slots_per_expert} must be at least 1")
        self.num_experts, self.model_dim, self.slots_per_expert = num_experts, model_dim, slots_per_expert
        self.check_logits = check_logits
        self.slots = nn.Parameter(torch.empty(num_experts * slots_per_expert, model_dim, device=device, dtype=dtype))
        self.scale = nn.Parameter(torch.ones(1, device=device, dtype=dtype))
        nn.init.normal_(self.slots, std=model_dim**-0.5)

    def forward(self, x: Tensor) -> SoftRouting:
        dtype = accumulation_dtype(x.dtype)
        slots = F.normalize(self.slots.to(dtype), dim=-1) * self.scale.to(dtype)
        logits = linear_logits(F.normalize(x.to(dtype), dim=-1), slots)
        if self.check_logits:
            checked(logits)
        shape = (x.shape[0], self.num_experts, self.slots_per_expert)
        return SoftRouting(logits.softmax(0).view(shape), logits.softmax(1).view(shape))

    def extra_repr(self) -> str:
        """Show num_experts, model_dim and slots_per_expert."""
        return f"num_experts={self.num_experts}, model_dim={self.model_dim}, slots_per_expert={self.slots_per_expert}"
