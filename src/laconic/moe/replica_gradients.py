"""Gradients of models whose experts have other replicas than the dense parameters: by FSDP2, or a plain reduction.

The training loss is the mean of the N_DP dp ranks' losses. Dense parameters are averaged over dp. Backward of the
exchange has brought all rows' gradients to an expert already, so those of its N_EDP replicas are added, and divided by
N_DP, not by N_EDP.
"""

from __future__ import annotations

import gc
import math
import warnings
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils.weak import WeakIdKeyDictionary

from laconic.collectives import api
from laconic.collectives.codec import Codec
from laconic.errors import ConfigError, ModelError
from laconic.formats import quantized_gradient
from laconic.formats.shards import local_part
from laconic.moe.layer import MoELayer, moe_layers
from laconic.moe.parallel.grid import Grid

BUCKET_NBYTES = 25 << 20
"""Bytes of gradients in one message, as in DDP."""
_reduced: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Gradients of experts, with their version when they had been reduced."""
_looked_around: WeakSet[nn.Module] = WeakSet()
"""Models of which the first call of `reduce_gradients` has looked at what is around them."""


def fully_shard_layers(
    model: nn.Module,
    grid: Grid,
    *,
    units: Iterable[nn.Module] = (),
    gradient_divide_factor: float | None = None,
    **options: Any,
) -> FSDPModule:
    """Apply FSDP2 to a model with MoELayers: experts are sharded over edp, everything else over dp.

    Args:
        model: with this rank's experts in its layers; sharded in place.
        grid: the process groups.
        units: modules that are gathered on their own, such as a transformer's blocks, in the order of their use.
        gradient_divide_factor: of gradients that have been added up over dp; None is N_DP. 1 is for losses that are
            divided by the tokens of all processes already, as torchtitan's.
        options: of fully_shard, for all of them.

    Raises:
        ModelError: there is no MoELayer.
        ConfigError: gradient_divide_factor is not positive.
    """
    if gradient_divide_factor is not None and not gradient_divide_factor > 0:
        raise ConfigError(
            f"gradient_divide_factor is {gradient_divide_factor}, but it must be positive; 1 leaves sums as they are"
        )
    for layer in _layers(model):
        layer.is_fully_sharded = True
        _shard_experts(layer.experts, grid, gradient_divide_factor or float(grid.layout.dp), options)
    for module in (*units, model):
        sharded = fully_shard(module, mesh=grid.dense_mesh["dp"], **options)
        if gradient_divide_factor is not None and grid.layout.dp > 1:
            sharded.set_gradient_divide_factor(gradient_divide_factor)
            sharded.set_force_sum_reduction_for_comms(True)  # gloo cannot multiply while it adds
    assert isinstance(model, FSDPModule)
    return model


def _shard_experts(experts: nn.Module, grid: Grid, divisor: float, options: dict[str, Any]) -> None:
    parameters = [*experts.parameters()]  # frozen ones too, which may be trained later
    options = {"shard_placement_fn": partial(_cut_of_replicas, num_replicas=grid.layout.edp), **options}
    sharded = fully_shard(experts, mesh=grid.expert_mesh["edp"], **options)
    if not parameters:
        return
    sharded.set_gradient_divide_factor(divisor)
    if grid.layout.edp > 1:
        sharded.set_force_sum_reduction_for_comms(True)  # gloo cannot multiply while it adds
        return
    from laconic.collectives.integrations.fsdp2 import DividedOnce, param_groups

    for group in param_groups(sharded):
        sharded.set_all_reduce_hook(DividedOnce(group))


def _cut_of_replicas(parameter: nn.Parameter, num_replicas: int) -> Shard | None:
    """Return the dimension that replicas cut; None is that of the experts.

    Where EP ranks have different numbers of experts, or have them of several blocks, replicas cut another one, which
    has to divide evenly: not every cut of the cut experts is one that a DTensor can describe.
    """
    if not isinstance(parameter, DTensor):
        return None
    num_parts = math.prod(
        parameter.device_mesh.size(i) for i, place in enumerate(parameter.placements) if place.is_shard(0)
    )
    in_blocks = any(isinstance(place, _StridedShard) and place.dim == 0 for place in parameter.placements)
    if num_replicas == 1 or (len(parameter) % num_parts == 0 and not in_blocks):
        return None
    local = parameter.to_local()
    for dim in range(1, local.dim()):
        if local.shape[dim] % num_replicas == 0:
            return Shard(dim)
    raise ConfigError(
        f"experts {list(parameter.shape)} are spread unevenly or in blocks, and {num_replicas} replicas (edp)"
        f" divide no other dimension of {list(local.shape)}; change ep, or leave fully_shard out and call"
        " reduce_gradients"
    )


def reduce_gradients(
    model: nn.Module, grid: Grid, *, codec: Codec | str = "auto", bucket_nbytes: int = BUCKET_NBYTES
) -> None:
    """Reduce gradients as DDP does, for a model without a wrapper: call it after backward, on all ranks, once a step.

    With several micro-batches call it after the last backward: a second call divides experts' gradients once more, and
    warns where it sees that.

    Gradients of parameters around `model`, as those of a head in a module that holds both, are not reduced here; the
    first call for a model looks for them in Python's heap (0.2 to 0.5 s with 500,000 objects), and warns where
    processes have different ones. Pass the whole model, or average them before.

    Gradients of one dtype and device are sent in buckets of about `bucket_nbytes` bytes, in the order of the model's
    parameters, so each rank sends the same ones; a bucket is a copy. Gradients that a rank does not have count as zero
    where another may have one.

    Raises:
        ModelError: there is no MoELayer, or a gradient is in codes (compress_gradients); nothing has been sent then.
        ConfigError: bucket_nbytes is not positive, or a part of the model is FSDP2's, which reduces in backward.
    """
    if bucket_nbytes <= 0:
        raise ConfigError(f"bucket_nbytes is {bucket_nbytes}, but it must be positive")
    cut = next((name for name, module in model.named_modules() if isinstance(module, FSDPModule)), None)
    if cut is not None:
        raise ConfigError(
            f"reduce_gradients is called, but {cut or type(model).__name__} is FSDP2's, whose gradients are reduced in"
            " backward, each process having others; leave the call out, and shard the model by fully_shard of what"
            " parallelize returns, or by laconic.moe.fully_shard_layers(model, grid)"
        )
    of_experts = {id(p) for layer in _layers(model) for p in layer.experts.parameters()}
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    for name, parameter in trained.items():
        if quantized_gradient(parameter) is not None:
            raise ModelError(
                f"the gradient of {name} is in codes, which reduce_gradients cannot add; call remove() of what"
                " compress_gradients returned before backward"
            )
    if grid.layout.dp > 1 and model not in _looked_around:
        _looked_around.add(model)
        _warn_of_others(model, grid)
    held: dict[tuple[bool, torch.dtype, torch.device], list[Tensor]] = {}
    for parameter in trained.values():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        if isinstance(parameter.grad, DTensor) and any(place.is_partial() for place in parameter.grad.placements):
            # Of norms under sequence parallelism: sums over the tokens of one rank.
            assert isinstance(parameter, DTensor)
            parameter.grad = parameter.grad.redistribute(placements=parameter.placements)
        # The local part of a DTensor (experts of parallelize).
        gradient = local_part(parameter.grad)
        held.setdefault((id(parameter) in of_experts, gradient.dtype, gradient.device), []).append(gradient)
    grads_of_experts = [p.grad for p in trained.values() if p.grad is not None and id(p) in of_experts]
    if grid.layout.dp > 1 and grads_of_experts and all(map(_holds_reduced, grads_of_experts)):
        warnings.warn(
            "the gradients of experts were reduced before and seem to hold that still, which is divided by"
            f" {grid.layout.dp} once more; call reduce_gradients once a step, after the backward of the last"
            " micro-batch",
            stacklevel=3,
        )
    for (expert, _, _), gradients in held.items():
        for bucket in _buckets(gradients, bucket_nbytes):
            flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
            api.all_reduce(flat, grid.edp if expert else grid.dp, codec=codec)
            parts = flat.div_(grid.layout.dp).split([gradient.numel() for gradient in bucket])
            for gradient, part in zip(bucket, parts, strict=True):
                gradient.copy_(part.view(gradient.shape))
    for grad in grads_of_experts:
        _reduced[grad] = grad._version


def _warn_of_others(model: nn.Module, grid: Grid) -> None:
    """Warn of gradients around a model that differ between the ranks of dp, where nobody has reduced them.

    A rank that finds no answer, as while another thread changes what is looked at, takes part without a say.
    """
    device = next((parameter.device for parameter in model.parameters()), grid.dense_mesh.device_type)
    facts = torch.full((2,), -math.inf, dtype=torch.float64, device=device)
    others = dict[str, Tensor]()
    with suppress(Exception):
        others = _gradients_around(model)
        sums = [gradient.detach().sum(dtype=torch.float64).to(device) for gradient in others.values()]
        total = torch.stack(sums).sum() if sums else facts.new_zeros(())
        facts = torch.stack((total, -total))
    dist.all_reduce(facts, dist.ReduceOp.MAX, group=grid.dp)
    if others and facts.sum() > 0:  # the largest of the ranks and the smallest; not if they are NaN
        first = ", ".join([*others][:3]) + (f" and {len(others) - 3} more" if len(others) > 3 else "")
        warnings.warn(
            f"{first} are trained outside of the {type(model).__name__} whose gradients are reduced, and each process"
            " has other gradients of them, so these weights will drift apart; pass the whole model to parallelize, or"
            " average those gradients over the processes before reduce_gradients",
            stacklevel=4,
        )


def _gradients_around(model: nn.Module) -> dict[str, Tensor]:
    """Return the gradients in modules that hold a model, by name, but for those of other models with MoELayers."""
    within, found = {id(p) for p in model.parameters()}, dict[str, Tensor]()
    chain, seen = [model], {id(model)}
    for inner in chain:  # which grows; a module that its own child holds is in it once
        for holder in _holders(inner):
            if id(holder) in seen:
                continue
            seen.add(id(holder))
            chain.append(holder)
            own = [*holder.named_parameters(recurse=False)]
            for name, child in holder.named_children():
                if id(child) not in seen and not moe_layers(child):
                    own += child.named_parameters(name)
            for name, p in own:
                if id(p) not in within and isinstance(p.grad, Tensor) and not isinstance(p.grad, DTensor):
                    within.add(id(p))
                    found[name] = p.grad
    return found


def _holders(module: nn.Module) -> list[nn.Module]:
    """Return the modules that a module is a child of; they are not known to it, but to Python's collector."""
    found = []
    for children in gc.get_referrers(module):
        if not isinstance(children, dict) or not all(_is_child(one) for one in [*children.values()]):
            continue
        for owner in gc.get_referrers(children):
            if isinstance(owner, dict) and owner.get("_modules") is children:  # the attributes of one
                found += [one for one in gc.get_referrers(owner) if _is_child(one) and vars(one) is owner]
            elif _is_child(owner) and owner._modules is children:
                found.append(owner)
    return found


def _is_child(value: object) -> bool:
    return value is None or issubclass(type(value), nn.Module)


def _holds_reduced(gradient: Tensor) -> bool:
    """Return whether at most one operation has changed a gradient since its reduction: to zero and to add are two."""
    version = _reduced.get(gradient)
    return version is not None and gradient._version - version <= 1


def _buckets(gradients: Iterable[Tensor], bucket_nbytes: int) -> Iterator[list[Tensor]]:
    """Group consecutive gradients into buckets of about that size; a larger gradient is a bucket of its own."""
    bucket: list[Tensor] = []
    nbytes = 0
    for gradient in gradients:
        if bucket and nbytes + gradient.nbytes > bucket_nbytes:
            yield bucket
            bucket, nbytes = [], 0
        bucket.append(gradient)
        nbytes += gradient.nbytes
    if bucket:
        yield bucket


def _layers(model: nn.Module) -> list[MoELayer]:
    layers = [*moe_layers(model).values()]
    if not layers:
        raise ModelError(
            f"{type(model).__name__} has no MoELayer, so there are no experts to treat apart; use fully_shard or DDP"
        )
    return layers
