"""Programs that train models inside of torch's own FSDP2 and DDP objects, on any device; what they end with.

Each is called as program(device, group, rank) and returns the parameters of this rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from laconic.collectives import Lossless, Raw
from laconic.collectives.integrations.zip import zip_collectives
from laconic.gradients import ddp_q8_hook, quantize_reduction
from laconic.moe import reduce_in_slots
from laconic.moe.pipeline.grad_reduce import DenseGradients
from laconic.schedule.moe_gradients import GradientPlan, ReductionSlot

__all__ = ["DDP", "FSDP2", "Program"]

DIM = 6
Program = Callable[[torch.device, dist.ProcessGroup, int], list[Tensor]]


def layers(device: torch.device) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh(), nn.Linear(DIM, DIM), nn.Tanh(), nn.Linear(DIM, 3)).to(device)


def batch(device: torch.device, number: int, rank: int) -> Tensor:
    """Another one on each rank."""
    torch.manual_seed(100 * rank + number)
    return torch.randn(4, DIM).to(device)


def results(model: nn.Module) -> list[Tensor]:
    local = [getattr(parameter, "_local_tensor", parameter) for parameter in model.parameters()]
    return [x.detach().cpu().clone() for x in local]


def stepped(model: nn.Module) -> None:
    SGD(model.parameters(), lr=0.1, foreach=False).step()
    model.zero_grad()


# --- FSDP2 ---


def sharded(device: torch.device, group: dist.ProcessGroup, **options: Any) -> nn.Sequential:
    """Two units, and a third of what the root itself has."""
    model = layers(device)
    mesh = DeviceMesh.from_group(group, device.type)
    for unit in (model[0], model[2], model):
        fully_shard(unit, mesh=mesh, **options)
    return model


def trained(model: nn.Module, device: torch.device, rank: int) -> list[Tensor]:
    for step in range(2):
        model(batch(device, step, rank)).pow(2).mean().backward()
        stepped(model)
    return results(model)


def quantized(device: torch.device, group: dist.ProcessGroup, rank: int) -> list[Tensor]:
    model = sharded(device, group)
    quantize_reduction(model, min_nbytes=0)
    zip_collectives(model, codec=Raw())
    return trained(model, device, rank)


def lossless_in_bf16(device: torch.device, group: dist.ProcessGroup, rank: int) -> list[Tensor]:
    """The host waits for lengths on FSDP2's streams; values are cast on both ways."""
    model = sharded(device, group, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    zip_collectives(model, codec=Lossless())
    return trained(model, device, rank)


def native(device: torch.device, group: dist.ProcessGroup, rank: int) -> list[Tensor]:
    """Units too small for codes, and collectives that were given back."""
    model = sharded(device, group)
    quantize_reduction(model)
    zip_collectives(model, codec=Raw()).remove()
    return trained(model, device, rank)


def averaged_by_a_hook(device: torch.device, group: dist.ProcessGroup, rank: int) -> list[Tensor]:
    """`across` on FSDP2's third stream. Two ranks have no second node: the group stands in for it."""
    model = sharded(device, group)
    quantize_reduction(model, min_nbytes=0, across=group)
    return trained(model, device, rank)


def accumulated(device: torch.device, group: dist.ProcessGroup, rank: int) -> list[Tensor]:
    """Micro-batches without a reduction, and parameters that stay gathered until backward."""
    model: Any = sharded(device, group, reshard_after_forward=False)
    quantize_reduction(model, min_nbytes=0)
    zip_collectives(model, codec=Raw(), prefetch=True)
    for step in range(2):
        for is_last in (False, True):
            model.set_requires_gradient_sync(is_last)
            model.set_reshard_after_backward(is_last)
            model(batch(device, 2 * step + is_last, rank)).pow(2).mean().backward()
        stepped(model)
    return results(model)


def gathered_asynchronously(device: torch.device, group: dist.ProcessGroup, rank: int) -> list[Tensor]:
    """FSDP2 gathers on the current stream, and what it calls gives it a work to wait for."""
    model: Any = sharded(device, group)
    zip_collectives(model, codec=Raw())
    for unit in (model[0], model[2], model):
        unit._set_unshard_async_op(True)
    return trained(model, device, rank)


def reduced_in_slots(device: torch.device, group: dist.ProcessGroup, rank: int) -> list[Tensor]:
    """The link's stream reduces half of a unit while backward goes on, and the rest at the end."""
    return trained_in_slots(sharded(device, group), 0.5, device, rank)


def reduced_in_whole_slots(device: torch.device, group: dist.ProcessGroup, rank: int) -> list[Tensor]:
    """Whole units: nothing but `DenseGradients` holds their buffers until the end."""
    return trained_in_slots(sharded(device, group), 2.0, device, rank)


def trained_in_slots(model: nn.Sequential, num_units: float, device: torch.device, rank: int) -> list[Tensor]:
    quantize_reduction(model, min_nbytes=0)
    zip_collectives(model, codec=Raw())
    nbytes = num_units * sum(parameter.nbytes for parameter in model[2].parameters())
    slots = ReductionSlot("layer", 2, 0.0, 0.0, 0.0), ReductionSlot("behind", None, nbytes, 0.0, 0.0)
    gradients = DenseGradients([], None, GradientPlan(slots, 0.0, 0.0, ()))
    assert reduce_in_slots(model, gradients) == 3

    def backward_is_here(module: nn.Module, inputs: object, out: Tensor) -> None:
        out.register_hook(lambda _: gradients.after("layer"))

    model[1].register_forward_hook(backward_is_here)
    for step in range(2):
        model(batch(device, step, rank)).pow(2).mean().backward()
        gradients.finish()
        stepped(model)
    return results(model)


FSDP2: list[Program] = [
    quantized,
    lossless_in_bf16,
    native,
    averaged_by_a_hook,
    accumulated,
    gathered_asynchronously,
    reduced_in_slots,
    reduced_in_whole_slots,
]

# --- DDP ---


def wrapped(device: torch.device, group: dist.ProcessGroup, **options: Any) -> DistributedDataParallel:
    """Of three buckets, once DDP has built them anew after the first step."""
    return DistributedDataParallel(layers(device), process_group=group, bucket_cap_mb=160 / 2**20, **options)


def ddp_quantized(device: torch.device, group: dist.ProcessGroup, rank: int) -> list[Tensor]:
    model = wrapped(device, group)
    model.register_comm_hook(*ddp_q8_hook(group, error_feedback=True, min_nbytes=0))
    trained(model, device, rank)
    return trained(model, device, rank)


def ddp_lossless(device: torch.device, group: dist.ProcessGroup, rank: int) -> list[Tensor]:
    """Gradients are views of buckets, and a micro-batch is not reduced."""
    model = wrapped(device, group, gradient_as_bucket_view=True)
    zip_collectives(model, codec=Lossless())
    for step in range(3):
        with model.no_sync():
            model(batch(device, 2 * step, rank)).pow(2).mean().backward()
        model(batch(device, 2 * step + 1, rank)).pow(2).mean().backward()
        stepped(model)
    return results(model)


def ddp_given_back(device: torch.device, group: dist.ProcessGroup, rank: int) -> list[Tensor]:
    """The hook stays after `remove`, and does what DDP does without one."""
    model = wrapped(device, group)
    zipped = zip_collectives(model, codec=Raw())
    trained(model, device, rank)
    zipped.remove()
    return trained(model, device, rank)


DDP: list[Program] = [ddp_quantized, ddp_lossless, ddp_given_back]
