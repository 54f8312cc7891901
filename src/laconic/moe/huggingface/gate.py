"""A Hugging Face router as a gate, its parameters under the names they always had."""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor, nn

from laconic.moe.gates.base import Gate, checked
from laconic.moe.routing import Routing

__all__ = ["RouterGate"]


class RouterGate(Gate):
    """Runs the router's own code, and makes a Routing of its weights and indices; no losses of its own.

    [Note: the router's shell]
    The router's parameters and buffers belong to this module, under their own names. The child `router` is what is left
    of the original: it is called, so that hooks of transformers that record router logits (and compute the auxiliary
    loss from them) see what they always saw, and reads the tensors that are this module's at that moment, sharded or
    exchanged by others as they may be.
    """

    def __init__(self, router: nn.Module, num_experts: int, top_k: int, check_logits: bool = True) -> None:
        """`check_logits` refuses logits that are NaN or infinite, which waits for a GPU once in each forward."""
        super().__init__()
        self.num_experts, self.top_k, self.check_logits = num_experts, top_k, check_logits
        tensors = {**router._parameters, **router._buffers}
        shell = copy.copy(router)
        shell.__dict__ = {**router.__dict__, "_parameters": {}, "_buffers": {}, "_non_persistent_buffers_set": set()}
        for name, parameter in router._parameters.items():
            self.register_parameter(name, parameter)
        for name, buffer in router._buffers.items():
            self.register_buffer(name, buffer, persistent=name not in router._non_persistent_buffers_set)
        self._tensor_names = tuple(tensors)
        self.router = shell

    def forward(self, x: Tensor) -> Routing:
        """Tokens x [n, M] to a Routing over all experts; raises RoutingError for logits that are no numbers."""
        shell: dict[str, Any] = self.router.__dict__
        shell.update({name: getattr(self, name) for name in self._tensor_names})
        try:
            logits, weights, indices = self.router(x)
        finally:
            for name in self._tensor_names:
                del shell[name]
        if self.check_logits:
            checked(logits)
        return Routing.of_choices(indices, weights, self.num_experts)

    def extra_repr(self) -> str:
        return f"num_experts={self.num_experts}, top_k={self.top_k}"
