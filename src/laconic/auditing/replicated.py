"""Weights that ranks hold alike, by their bits; experts on several ranks have replicas of their own."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from laconic.replicas import ReplicaReport, verify_replicas

__all__ = ["compare_replicas", "is_sharded_by_fsdp", "spread_experts"]


def spread_experts(model: nn.Module) -> dict[nn.Parameter, dist.ProcessGroup | None]:
    """Parameters of experts of which other ranks have others, and the group whose ranks have the same, if it is known.

    Without laconic.moe, whose import takes a second, there are none.
    """
    if "laconic.moe.layer" not in sys.modules:
        return {}
    from laconic.moe.dispatch.base import LocalDispatcher
    from laconic.moe.huggingface.layer import ExpertsLayer
    from laconic.moe.layer import moe_layers

    found: dict[nn.Parameter, dist.ProcessGroup | None] = {}
    for layer in moe_layers(model).values():
        if not isinstance(layer.dispatcher, LocalDispatcher):
            grid = layer._own_replicas if isinstance(layer, ExpertsLayer) else None
            found |= dict.fromkeys(layer.experts.parameters(), None if grid is None else grid.edp)
    return found


def is_sharded_by_fsdp(model: nn.Module) -> bool:
    """Whether FSDP2 shards any part of it."""
    return any(isinstance(module, FSDPModule) for module in model.modules())


def compare_replicas(model: nn.Module, group: dist.ProcessGroup | None) -> ReplicaReport:
    """`verify_replicas` of a model whose experts may lie on several ranks; all ranks of the group call it together.

    Shards of experts that are plain tensors are left out: nothing says who has the same.

    Raises:
        CorruptionError, ConfigError: as `verify_replicas`.
    """
    experts = spread_experts(model)
    left_out = {parameter for parameter in experts if not isinstance(parameter, DTensor)}
    return verify_replicas(_Without(model, left_out) if left_out else model, group=group, groups=experts)


class _Without(nn.Module):
    """A model without some of its parameters, as a module with the names of the others."""

    def __init__(self, model: nn.Module, parameters: set[nn.Parameter]) -> None:
        super().__init__()
        self._held = [(name, p) for name, p in model.named_parameters() if p not in parameters]

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """The other parameters, under their names in the model."""
        return ((prefix + name, parameter) for name, parameter in self._held)
