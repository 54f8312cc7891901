"""A few training steps under FSDP2 in each of several ways: `python -m tests.netlab.ranks_sharded`, two ranks a node.

Each rank prints a line of JSON: by way, losses, and the fewest bytes that left its node in a forward and in a backward;
what a full queue drops is sent again, and counts in others.
"""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import laconic
from laconic.collectives import Lossless
from tests.netlab.ranks_once import on_the_interface

WIDTH, LAYERS = 256, 4


def train(in_node: bool, shorten: str) -> tuple[list[str], list[int]]:
    """`in_node`: backward gathers from the shards that the ranks of a node have kept."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)])
    for layer in model:
        fully_shard(layer, reshard_after_forward=2 if in_node else True)
    fully_shard(model)
    if shorten == "quantized":
        laconic.quantize_gathers(model)
    elif shorten == "zipped":
        laconic.zip_collectives(model, codec=Lossless())
    seen: dict[nn.Module, torch.Tensor] = {}

    def forward(module: Any, *_: object) -> None:
        seen[module] = module.weight.detach().clone()

    def backward(module: Any, *_: object) -> None:
        assert torch.equal(seen.pop(module), module.weight)

    for layer in model:
        layer[0].register_forward_hook(forward)
        layer[0].register_full_backward_pre_hook(backward)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(4, WIDTH, requires_grad=True)  # a hook in backward wants that of its input
    losses, fewest = [], [1 << 40, 1 << 40]
    for _ in range(4):
        dist.barrier()
        passed = [on_the_interface()]
        loss = model(x).square().mean()
        dist.barrier()
        passed.append(on_the_interface())
        loss.backward()
        dist.barrier()
        passed.append(on_the_interface())
        assert not seen
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item().hex())
        fewest = [min(fewest[i], passed[i + 1] - passed[i]) for i in range(2)]
    return losses, fewest


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ways = [(in_node, shorten) for shorten in ("", "quantized", "zipped") for in_node in (False, True)]
    print(json.dumps([train(*way) for way in ways]), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
