"""Where the parameters of fused experts are cut over an EP and an ESP group, as placements of a DTensor.

Experts are cut along the first dimension, as `laconic.moe.dispatch.staged.experts_of` says. Over esp an expert's hidden
dimension I is cut: inputs of `down_proj`, outputs of `gate_up_proj`. Where gate and up lie behind each other, as [gate
0 ... I - 1, up 0 ... I - 1], a process holds a part of each half, which is torch's strided shard; where they alternate,
and without a gate, a part is one block. The bias of `down_proj` is whole on each process.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from laconic.formats.shards import local_runs, taken
from laconic.moe.parallel.grid import Grid


def hidden_placement(name: str, experts: Any) -> Placement:
    """Return how the hidden dimension of the parameter `name` of fused experts is cut over esp.

    Args:
        name: gate_up_proj, up_proj, down_proj or the bias of one.
        experts: the module, with the flags of transformers' ExpertsInterface.
    """
    if name == "down_proj_bias":
        return Replicate()
    if name == "down_proj":
        return Shard(1 if experts.is_transposed else 2)
    dim = 1 if name.endswith("_bias") or not experts.is_transposed else 2
    if name.startswith("gate_up_proj") and experts.is_concatenated:
        return _StridedShard(dim, split_factor=2)
    return Shard(dim)


def hidden_dim(experts: Any) -> int:
    """Return I, the hidden dimension of fused experts."""
    size: int = experts.get_parameter("down_proj").shape[1 if experts.is_transposed else 2]
    return size


def shard(name: str, parameter: nn.Parameter, experts: Any, grid: Grid) -> nn.Parameter:
    """Return this process's part of a parameter [E, ...], in memory of its own; nothing is sent."""
    if grid.layout.esp > 1:
        mesh, placements = grid.expert_mesh["ep", "esp"], [Shard(0), hidden_placement(name, experts)]
    else:
        mesh, placements = grid.expert_mesh["ep"], [Shard(0)]
    runs = local_runs(parameter.shape, mesh, placements)
    local: Tensor = taken(parameter.detach(), runs).clone().contiguous()
    sharded = DTensor.from_local(
        local, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
    )
    made = nn.Parameter(sharded, requires_grad=parameter.requires_grad)
    made.__dict__.update(parameter.__dict__)  # marks such as _no_weight_decay
    return made
