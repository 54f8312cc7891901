"""Gradients of a model whose experts have other replicas than the rest: FSDP2, or one plain reduction.

The training loss is the mean of the N_DP dp ranks' losses. Dense parameters are averaged over dp. Backward of the
exchange has brought all rows' gradients to an expert already, so those of its N_EDP replicas are added, and divided by
N_DP, not by N_EDP.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from laconic.collectives import operations
from laconic.collectives.codec import Codec
from laconic.errors import ModelError
from laconic.formats.shards import local_part
from laconic.moe.grid import Grid
from laconic.moe.layer import MoELayer

__all__ = ["fully_shard_layers", "reduce_gradients"]


def fully_shard_layers(model: nn.Module, grid: Grid, *, units: Iterable[nn.Module] = (), **options: Any) -> FSDPModule:
    """FSDP2 for a model with MoELayers: experts are sharded over edp, everything else over dp.

    Arguments:
        model: with this rank's experts in its layers; sharded in place.
        units: modules that are gathered on their own, such as a transformer's blocks, in the order of their use.
        options: of fully_shard, for all of them.

    Raises ModelError if there is no MoELayer.
    """
    ignored = set(options.pop("ignored_params", ()))
    for layer in _layers(model):
        ignored |= _shard_experts(layer.experts, grid, options)
    for module in (*units, model):
        fully_shard(module, mesh=grid.dense_mesh["dp"], ignored_params=ignored or None, **options)
    assert isinstance(model, FSDPModule)
    return model


def _shard_experts(experts: nn.Module, grid: Grid, options: dict[str, Any]) -> set[nn.Parameter]:
    """Shard over edp; returns the parameters that were left as they are."""
    parameters = [parameter for parameter in experts.parameters() if parameter.requires_grad]
    policy = options.get("mp_policy")
    dtypes = {(policy.reduce_dtype or policy.param_dtype if policy else None) or p.dtype for p in parameters}
    if grid.layout.edp == 1 and not dtypes <= {torch.float32, torch.bfloat16}:
        # On a mesh of one rank FSDP2 divides gradients of other types twice; without replicas nothing is to shard.
        for parameter in parameters:
            parameter.register_hook(lambda grad: grad / grid.layout.dp)
        return set(experts.parameters())
    sharded = fully_shard(experts, mesh=grid.expert_mesh["edp"], **options)
    if parameters:
        sharded.set_gradient_divide_factor(float(grid.layout.dp))
        # gloo cannot multiply while it adds; on a mesh of one rank a forced sum would be divided twice.
        sharded.set_force_sum_reduction_for_comms(grid.layout.edp > 1)
    return set()


def reduce_gradients(model: nn.Module, grid: Grid, *, codec: Codec | str = "auto") -> None:
    """What DDP does, for a model without a wrapper: call it after backward, on all ranks.

    Gradients that a rank does not have count as zero where another may have one. Raises ModelError if there is no
    MoELayer.
    """
    of_experts = {id(p) for layer in _layers(model) for p in layer.experts.parameters()}
    for parameter in model.parameters():
        if not parameter.requires_grad:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        expert = id(parameter) in of_experts
        # Of a DTensor (experts of parallelize) what is here.
        held = local_part(parameter.grad)
        grad = held.contiguous()
        operations.all_reduce(grad, grid.edp if expert else grid.dp, codec=codec)
        held.copy_(grad.div_(grid.layout.dp))


def _layers(model: nn.Module) -> list[MoELayer]:
    layers = [module for module in model.modules() if isinstance(module, MoELayer)]
    if not layers:
        raise ModelError(
            f"{type(model).__name__} has no MoELayer, so there are no experts to treat apart; use fully_shard or DDP"
        )
    return layers
