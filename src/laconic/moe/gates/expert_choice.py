"""Expert choice: each expert chooses its tokens, so that all have the same number."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from laconic.errors import RoutingError
from laconic.moe.gates.base import Gate, checked, linear_logits
from laconic.moe.gates.capacity import capacity_of
from laconic.moe.gates.losses import z_loss
from laconic.moe.routing import Routing


class ExpertChoiceGate(Gate):
    """Each expert takes the T = min(n, ceil(n * experts_per_token / E)) tokens with its highest scores.

    Scores are softmax(x weight^T) over experts. Mixture-of-Experts with Expert Choice Routing (Zhou et al., 2022),
    section 3. A token may have no expert or all; balance is perfect. A token's experts depend on the other tokens of
    the batch, also on later ones: not for the decoding of a causal model.

    Parameter: weight [E, M].

    Args:
        num_experts, model_dim: E and M.
        experts_per_token: on average, need not be whole; the paper's capacity factor.
        z_coef, check_logits: as in TokenChoiceGate.
        device, dtype: of the parameter.

    Raises:
        RoutingError: numbers do not fit together.
    """

    def __init__(
        self,
        num_experts: int,
        model_dim: int,
        experts_per_token: float = 2.0,
        *,
        z_coef: float = 0.0,
        check_logits: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not 0 < experts_per_token <= num_experts:
            raise RoutingError(
                f"experts_per_token = {experts_per_token} must be positive and at most num_experts = {num_experts}"
            )
        self.num_experts, self.model_dim, self.experts_per_token = num_experts, model_dim, experts_per_token
        self.z_coef, self.check_logits = z_coef, check_logits
        self.weight = nn.Parameter(torch.empty(num_experts, model_dim, device=device, dtype=dtype))
        nn.init.normal_(self.weight, std=model_dim**-0.5)

    def forward(self, x: Tensor) -> Routing:
        logits = linear_logits(x, self.weight)
        if self.check_logits:
            checked(logits)
        scores = logits.softmax(-1)
        taken = min(x.shape[0], capacity_of(self.experts_per_token, x.shape[0], self.num_experts))
        chosen = scores.detach().T.topk(taken, dim=-1).indices
        # A mask, whose nonzero entries are ordered by token, then by expert.
        mask = torch.zeros_like(scores, dtype=torch.bool).T.scatter(1, chosen, True).T
        tokens, experts = mask.nonzero(as_tuple=True)
        losses = {"z": self.z_coef * z_loss(logits)} if self.z_coef else {}
        return Routing(tokens, experts, scores[tokens, experts], x.shape[0], self.num_experts, losses)

    def extra_repr(self) -> str:
        """Show num_experts, model_dim and experts_per_token."""
        return f"num_experts={self.num_experts}, model_dim={self.model_dim}, experts_per_token={self.experts_per_token}"
