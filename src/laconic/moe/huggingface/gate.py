"""Gates of a layer in a Hugging Face model: its router's decisions, or a gate of laconic.moe with its weight."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from laconic.errors import ModelError, RoutingError
from laconic.moe.gates.base import Gate, checked
from laconic.moe.routing import Routing, SoftRouting

READ_BY_GATE = "_laconic_gate_reads"
"""Attribute of a router whose weight a gate reads: its name."""


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

    def routing(self, x: Tensor, indices: Tensor, weights: Tensor) -> Routing | SoftRouting:
        """Make the routing of tokens x [..., M] from indices, integers [..., k], and weights [..., k].

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

    def of_call(self, x: Tensor, indices: Tensor, weights: Tensor, /) -> tuple[Tensor, Routing | SoftRouting]:
        """Return tokens and their routing, of what a block calls its experts with."""
        return x, self.routing(x, indices, weights)

    def beside(self, out: Tensor, /, *call: Tensor) -> Tensor:
        """Return the experts' sums `out`, and what else a block that calls its experts with `call` gets from them."""
        return out

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


class RoutedRows(GivenRouting):
    """Routes rows [E n, M], of which those that are not zero go to their expert: number i / n of row i."""

    def of_call(self, x: Tensor, /, *_: Tensor) -> tuple[Tensor, Routing]:
        tokens = x.detach().any(-1).nonzero().squeeze(1)
        num_tokens = max(1, len(x) // self.num_experts)
        self.top_k = max(1, -(-len(tokens) // num_tokens))
        return x, Routing(tokens, tokens // num_tokens, x.new_ones(len(tokens)), len(x), self.num_experts)


class WithIdentities(GivenRouting):
    """Leaves out the choices behind the experts' numbers, which return their input: no row of theirs travels."""

    def routing(self, x: Tensor, indices: Tensor, weights: Tensor) -> Routing:
        routing = super().routing(x, indices, weights)
        assert isinstance(routing, Routing)
        return replace(routing.keep(routing.experts < self.num_experts), num_dropped=0)

    def beside(self, out: Tensor, /, *call: Tensor) -> Tensor:
        x, indices, weights = call
        share = (weights * (indices >= self.num_experts)).sum(-1, keepdim=True)
        return out + (x * share).to(out.dtype)


class RouterGate(GivenRouting):
    """Decides by a gate in the place of a model's router, whose weight it reads; the model's parameters stay.

    The gate has a weight [E, M] and nothing else that is trained or saved, the router that weight alone; others are a
    ModelError. `top_k` are the router's experts per token, for which the gate was made; the gate checks its own logits.
    """

    def __init__(self, gate: Gate, router: nn.Module, name: str, top_k: int, check_weights: bool = True) -> None:
        super().__init__(gate.num_experts, check_weights)
        self._name, self._made_for = name, top_k
        more = sorted({*gate.state_dict()} - {"weight"})
        own = dict(gate.named_parameters()).get("weight")
        weight = dict(router.named_parameters())
        if more or own is None:
            raise ModelError(
                f"{type(gate).__name__} has {', '.join(more) or 'no weight'} where the model's checkpoints have only"
                f" {name}.weight; use a gate with a weight [experts, hidden] alone, as softmax, sinkhorn and"
                " expert_choice"
            )
        if {*weight} != {"weight"} or weight["weight"].shape != own.shape:
            shapes = {key: list(p.shape) for key, p in weight.items()}
            raise ModelError(
                f"router {name} has {shapes}, but a gate in its place reads a weight {list(own.shape)} and nothing"
                " else; leave gate out"
            )
        del gate.weight
        self.gate = gate
        self.__dict__["router"] = router  # which is the model's, not this layer's
        router.__dict__[READ_BY_GATE] = name

    def routing(self, x: Tensor, indices: Tensor, weights: Tensor) -> Routing | SoftRouting:
        """Route tokens x [..., M]; of the router's decision only the number of experts per token is read.

        Another number than the gate was made for is a RoutingError.
        """
        router = self.__dict__["router"]
        self.top_k = indices.shape[-1]
        if self.top_k != self._made_for:
            raise RoutingError(
                f"{self._name} takes {self.top_k} experts per token, but {type(self.gate).__name__} in its place was"
                f" made for {self._made_for}; set top_k before parallelize is called with gate"
            )
        self.gate.train(router.training)
        self.gate.__dict__["weight"] = router.weight  # read anew: hosts replace parameters
        routing: Routing | SoftRouting = self.gate(x.reshape(-1, x.shape[-1]))
        return routing
