"""What a wrapper that takes in a model with spread experts has to know of them, in whatever order it comes.

[Note: wrappers are seen when they register the model]
Hosts wrap models themselves: Lightning puts one into a module of its own, PEFT replaces experts by a module around
them, Accelerate calls DistributedDataParallel on what it is given. Each registers what it wraps as its child, and torch
calls a global hook then.
"""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from laconic.errors import ConfigError
from laconic.moe.huggingface.adapters import adapt
from laconic.moe.huggingface.apart import own_names
from laconic.moe.huggingface.gate import READ_BY_GATE
from laconic.moe.huggingface.layer import ExpertsLayer
from laconic.moe.huggingface.spread import spread_layers
from laconic.moe.layer import moe_layers
from laconic.moe.parallel.calling_host import calling_host, fsdp_refused


@cache
def watch_wrappers() -> None:
    """Let DDP leave spread experts alone, FSDP1 be refused, and PEFT's adapters find their parts, from now on."""
    register_module_module_registration_hook(_registered)


def _registered(module: nn.Module, name: str, child: nn.Module | None) -> None:
    if isinstance(module, DistributedDataParallel) and name == "module" and child is not None:
        _leave_experts(module, child)
    elif isinstance(module, FullyShardedDataParallel) and child is not None:
        if any(isinstance(one, ExpertsLayer) and one.has_own_replicas for one in moe_layers(child).values()):
            raise fsdp_refused()
    elif name == "base_layer" and child is not None:
        _check_adapted(child)
        if type(module).__name__ == "ParamWrapper":
            adapt(child, module)
    elif name == "model" and child is not None and type(module).__module__.startswith("peft.tuners."):
        _warn_of_stacks(child)


def _warn_of_stacks(model: nn.Module) -> None:
    stacks = own_names(model)
    if stacks:
        warnings.warn(
            f"adapters by target_modules do not reach the experts of {type(model).__name__}, which are parts of stacks"
            f" over processes; give their names in target_parameters, as {next(iter(stacks))}, or leave them without",
            stacklevel=8,
        )


def _check_adapted(child: nn.Module) -> None:
    """Refuse adapters around a router whose forward nobody asks, since a gate reads its weight."""
    for part in child.modules():
        if (router := part.__dict__.get(READ_BY_GATE)) is not None:
            raise ConfigError(
                f"adapters are put around router {router}, but the gate in its place reads its weight without them;"
                " leave it out of target_modules and target_parameters, or call parallelize without gate"
            )


def _leave_experts(ddp: Any, model: nn.Module) -> None:
    """Take experts with replicas of their own out of what DDP broadcasts and reduces, before it does either."""
    sharded = {
        id(parameter)
        for layer in moe_layers(model).values()
        if isinstance(layer, ExpertsLayer) and layer.has_own_replicas
        for parameter in layer.experts.parameters()
    }
    _check_host(model)
    ddp.parameters_to_ignore |= {name for name, p in model.named_parameters() if id(p) in sharded}


def _check_host(model: nn.Module) -> None:
    """Refuse a host that would save rank 0's experts as if they were all, or wait for the others in vain."""
    layers = [layer for layer in spread_layers(model) if any(p.requires_grad for p in layer.experts.parameters())]
    if all(layer.is_saved_by_host for layer in layers):
        return
    found = calling_host()
    if found is not None:
        name, package, remedy = found
        raise ConfigError(
            f"experts are spread over processes, but {package}'s {name} saves and resumes on rank 0 what it takes for"
            f" the whole model; {remedy}"
        )
