"""Every collective once, and what left the host meanwhile: `python -m tests.netlab.ranks_once [levels]`.

Each rank prints a line of JSON: by operation, bytes raw and sent as the audit counts them, and bytes on the interface.
With `levels`, collectives run on two levels: LOCAL_WORLD_SIZE ranks are a node.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from laconic import collectives
from laconic.collectives import Lossless, TwoLevel, audit

NUMEL = 3 << 18  # 2, 3 or 4 ranks share it


def on_the_interface() -> int:
    """Bytes that have left this host."""
    return int(Path("/sys/class/net/eth0/statistics/tx_bytes").read_text())


def main(two_levels: bool) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    group = None
    if two_levels:
        per_node = int(os.environ["LOCAL_WORLD_SIZE"])
        mesh = init_device_mesh("cpu", (world // per_node, per_node), mesh_dim_names=("cluster", "node"))
        group = TwoLevel(node=mesh["node"].get_group(), cluster=mesh["cluster"].get_group())
    x = torch.randn(NUMEL).bfloat16()
    part, codec = NUMEL // world, Lossless("tiered")
    calls: dict[str, Callable[[], object]] = {
        "all_gather": lambda: collectives.all_gather(torch.empty_like(x), x[:part], group, codec=codec),
        "reduce_scatter": lambda: collectives.reduce_scatter(torch.empty_like(x[:part]), x, group, codec=codec),
        "all_reduce": lambda: collectives.all_reduce(x.clone(), group, codec=codec),
        "all_to_all": lambda: collectives.all_to_all(torch.empty_like(x), x, group=group, codec=codec),
    }
    if os.environ["LOCAL_WORLD_SIZE"] == "1":
        calls["broadcast"] = lambda: collectives.broadcast(x, 0, codec=codec)
    found = {}
    for operation, call in calls.items():
        call()  # connections stand now
        dist.barrier()
        audit.reset()
        before = on_the_interface()
        call()
        dist.barrier()
        counted = audit.snapshot()
        found[operation] = (counted.raw_nbytes, counted.sent_nbytes, on_the_interface() - before)
        dist.barrier()
    print(json.dumps(found), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(two_levels="levels" in sys.argv[1:])
