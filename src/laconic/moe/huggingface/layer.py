"""A MoELayer in the place of a Hugging Face block, with the block's names."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from laconic.moe.dispatch import Dispatcher
from laconic.moe.hooks import Hook
from laconic.moe.huggingface.blocks import Block
from laconic.moe.huggingface.experts import FusedExperts
from laconic.moe.huggingface.gate import RouterGate
from laconic.moe.layer import MoELayer, Schedule
from laconic.moe.order import Order
from laconic.moe.placement import Placement

__all__ = ["BlockLayer"]


class BlockLayer(MoELayer):
    """The block as a layer: same children under the same names in the same order, so the same names in state dicts.

    `gate`, `experts` and `shared` are found here by MoELayer's names as well, whatever the block calls them.
    """

    def __init__(
        self,
        original: nn.Module,
        block: Block,
        gate: RouterGate,
        experts: FusedExperts,
        order: Order | None = None,
        dispatcher: Dispatcher | None = None,
        *,
        schedule: Schedule | None = None,
        hooks: Iterable[Hook] = (),
        placement: Placement | None = None,
    ) -> None:
        super().__init__(gate, experts, order, dispatcher, schedule=schedule, hooks=hooks)
        self.jitter_noise = float(getattr(original, "jitter_noise", 0.0))
        self.block = block
        self.training = original.training
        children = {**original._modules, block.router: gate, block.experts: experts}
        self._modules.clear()
        self._modules.update(children)
        # Under MoELayer's names they are plain attributes: registered twice, they would be saved twice.
        if block.router != "gate":
            self.__dict__["gate"] = gate
        if block.experts != "experts":
            self.__dict__["experts"] = experts
        if placement is not None:
            self.placement = placement.to(experts.get_parameter("down_proj").device)
        if block.shared is not None:
            shared = self._modules[block.shared]
            weigher = None if block.shared_gate is None else self._modules[block.shared_gate]
            assert shared is not None
            self.__dict__["shared"] = shared if weigher is None else _Weighed(shared, weigher)

    def forward(self, x: Tensor) -> Tensor:
        """Outputs [..., M] of hidden states x [..., M]."""
        if self.training and self.jitter_noise > 0:
            x = x * torch.empty_like(x).uniform_(1.0 - self.jitter_noise, 1.0 + self.jitter_noise)
        return super().forward(x)


class _Weighed(nn.Module):
    """sigmoid(gate(x)) * shared(x)."""

    def __init__(self, shared: nn.Module, gate: nn.Module) -> None:
        super().__init__()
        self.shared, self.gate = shared, gate

    def forward(self, x: Tensor) -> Tensor:
        weighed: Tensor = torch.sigmoid(self.gate(x)) * self.shared(x)
        return weighed
