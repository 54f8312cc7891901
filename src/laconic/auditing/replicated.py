"""Weights that ranks hold alike, by their bits; experts on several ranks have replicas of their own."""

from __future__ import annotations

import sys

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from laconic.gradients.members import Subset
from laconic.replicas import ReplicaReport, verify_replicas


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
    others = Subset(model, (p for p in model.parameters() if p not in left_out)) if left_out else model
    return verify_replicas(others, group=group, groups=experts)
