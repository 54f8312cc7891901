"""A mixture of experts over two nodes of two processes: a token's row crosses to the other node once. 40 seconds.

    pip install 'laconic[train]'
    python examples/moe_two_nodes.py

With root the nodes are hosts with 100 Mbit/s between them; without, two launches of torchrun on this machine. On two
real nodes run the same file: `torchrun --nnodes 2 --nproc-per-node 2 --node-rank 0 --master-addr HOST
examples/moe_two_nodes.py`, with --node-rank 1 on the other. Prints how the loss falls and how many rows left the node.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from common import batches, mixture, on_two_hosts

import laconic
from laconic.moe import Grid, HierarchicalDispatcher, parallelize


def main() -> None:
    """Train 15 steps, other tokens on each rank."""
    dist.init_process_group("gloo")
    model = mixture(top_k=4)
    grid = Grid(levels=(2,))  # all processes: two nodes, then ranks
    spread = parallelize(model, grid, dispatcher=lambda grid: HierarchicalDispatcher(grid.levels))
    laconic.compress_activations(model, bits=4)
    optimizer = torch.optim.AdamW(spread.parameter_groups(), lr=3e-3)
    for step, batch in enumerate(batches(15, seed=dist.get_rank())):
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        spread.reduce_gradients()
        spread.clip_gradients(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0 and step % 5 == 4:
            print(f"step {step + 1}: loss {loss.item():.3f}")
    if dist.get_rank() == 0:
        sent = next(iter(spread.layers.values())).dispatcher.traffic[0]
        print(f"last step: {sent.num_sent_rows} rows left for the other node, for {sent.num_sent_entries} assignments")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" not in os.environ:
        sys.exit(on_two_hosts(__file__, ranks_per_host=2, bits_per_second=100e6))
    main()
