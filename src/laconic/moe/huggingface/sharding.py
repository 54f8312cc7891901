"""Where the parameters of fused experts are cut over an EP and an ESP group, as placements of a DTensor.

Experts are cut along the first dimension, as `laconic.moe.dispatch.staged.experts_of` says. Over esp an expert's hidden
dimension I is cut: inputs of `down_proj`, outputs of `gate_up_proj`. Where gate and up lie behind each other, as [gate
0 ... I - 1, up 0 ... I - 1], a process holds a part of each half, which is torch's strided shard; where they alternate,
and without a gate, a part is one block. The bias of `down_proj` is whole on each process.

[Note: experts beside identities]
LongCat's `gate_up_proj` has rows for its E experts and for its Z identities, which nobody reads, and `down_proj` for
the experts only: plain shards of both would hold other experts. So both are taken for blocks of gcd(E, Z) rows, each of
which is cut over ep, and `Slots` says in which slot of which process an expert is then.
"""

from __future__ import annotations

from math import gcd
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from laconic.formats.shards import local_runs, taken
from laconic.moe.parallel.grid import Grid


def hidden_placement(name: str, experts: Any) -> Placement:
    """Return how the hidden dimension of fused experts' parameter `name`, a projection or its bias, is cut over esp."""
    if name == "down_proj_bias":
        return Replicate()
    if name == "down_proj":
        return Shard(1 if experts.is_transposed else 2)
    dim = 1 if name.endswith("_bias") or not experts.is_transposed else 2
    if name.startswith("gate_up_proj") and experts.is_concatenated:
        return _StridedShard(dim, split_factor=2)
    return Shard(dim)


def block_size(experts: Any) -> int:
    """Return the number of experts in a block that is cut over ep: all, but beside identities."""
    return gcd(experts.num_experts, getattr(experts, "num_identities", 0))


class Slots(nn.Module):
    """Maps experts in blocks that are cut over `num_ranks` to their slots; see [Note: experts beside identities]."""

    slots: Tensor

    def __init__(self, num_experts: int, block: int, num_ranks: int, device: torch.device | str) -> None:
        super().__init__()
        experts = torch.arange(num_experts, device=device).view(-1, num_ranks, block // num_ranks)
        self.register_buffer("slots", experts.transpose(0, 1).flatten().argsort(), persistent=False)

    def forward(self, experts: Tensor) -> Tensor:
        """Return the slots, int64, of experts, int64 of any shape."""
        return self.slots[experts]


def hidden_dim(experts: Any) -> int:
    """Return I, the hidden dimension of fused experts."""
    if "w1" in experts._parameters:  # DBRX
        return len(experts.w1) // int(experts.num_experts)
    size: int = experts.get_parameter("down_proj").shape[1 if experts.is_transposed else 2]
    return size


def shard(name: str, parameter: nn.Parameter, experts: Any, grid: Grid) -> nn.Parameter:
    """Return this process's part of a parameter [E, ...], in memory of its own; nothing is sent."""
    blocks = len(parameter) // block_size(experts) if hasattr(experts, "num_identities") else 1
    first: Placement = Shard(0) if blocks == 1 else _StridedShard(0, split_factor=blocks)
    if grid.layout.esp > 1:
        mesh, placements = grid.expert_mesh["ep", "esp"], [first, hidden_placement(name, experts)]
    else:
        mesh, placements = grid.expert_mesh["ep"], [first]
    runs = local_runs(parameter.shape, mesh, placements)
    local: Tensor = taken(parameter.detach(), runs).clone().contiguous()
    return as_sharded(local, mesh, placements, parameter, parameter)


def as_sharded(
    local: Tensor, mesh: DeviceMesh, placements: list[Placement], whole: Tensor, like: nn.Parameter
) -> nn.Parameter:
    """Return a parameter of the shape and stride of `whole`, of which this process holds `local`, marked as `like`."""
    sharded = DTensor.from_local(local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride())
    made = nn.Parameter(sharded, requires_grad=like.requires_grad)
    made.__dict__.update(like.__dict__)  # such as _no_weight_decay
    return made
