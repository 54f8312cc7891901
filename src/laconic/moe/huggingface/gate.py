"""Gate of a layer whose routing comes from the model's own router."""

from __future__ import annotations

import torch
from torch import Tensor

from laconic.errors import RoutingError
from laconic.moe.gates.base import Gate, checked
from laconic.moe.routing import Routing

__all__ = ["GivenRouting"]


class GivenRouting(Gate):
    """Makes a Routing of the indices and weights that a router of the model has chosen.

    Attributes:
        top_k: experts per token in the last forward; None before the first.
    """

    def __init__(self, num_experts: int, check_weights: bool = True) -> None:
        """Set the number of experts.

        Args:
            num_experts: E.
            check_weights: refuse weights that are NaN or infinite, which waits for a GPU once in each forward.
        """
        super().__init__()
        self.num_experts, self.check_weights = num_experts, check_weights
        self.top_k: int | None = None

    def routing(self, indices: Tensor, weights: Tensor) -> Routing:
        """Make the routing of indices, integers [..., k], and weights [..., k].

        Raises:
            RoutingError: shapes differ or, with `check_weights`, weights are NaN or infinite.
        """
        if indices.shape != weights.shape:
            raise RoutingError(
                f"indices {list(indices.shape)} and weights {list(weights.shape)} of a router differ in shape, but each"
                " choice has one weight; let the router return both as [tokens, k]"
            )
        indices, weights = indices.reshape(-1, indices.shape[-1]).long(), weights.reshape(-1, weights.shape[-1])
        self.top_k = indices.shape[1]
        return Routing.of_choices(
            indices, checked(weights, "routing weights") if self.check_weights else weights, self.num_experts
        )

    def forward(self, x: Tensor) -> Routing:
        """Spread tokens x [n, M] evenly over the experts, for measuring a layer, where there is no router.

        Raises:
            RoutingError: the layer has had no forward yet.
        """
        if self.top_k is None:
            raise RoutingError("the layer has not run yet, so its number of experts per token is not known; run it")
        places = torch.arange(len(x) * self.top_k, device=x.device) % self.num_experts
        weights = x.new_full((len(x), self.top_k), 1 / self.top_k)
        return Routing.of_choices(places.view(-1, self.top_k), weights, self.num_experts)

    def extra_repr(self) -> str:
        """Show num_experts and top_k."""
        return f"num_experts={self.num_experts}, top_k={self.top_k}"
