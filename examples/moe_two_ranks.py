"""A mixture of experts over two processes: each keeps half of the experts, tokens travel. About 20 seconds.

    pip install 'laconic[train]'
    torchrun --nproc-per-node 2 examples/moe_two_ranks.py

Prints what `parallelize` did and how the loss falls.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from common import batches, mixture, need_torchrun

import laconic
from laconic.moe import Grid, parallelize


def main() -> None:
    """Train 20 steps, other tokens on each rank."""
    need_torchrun(__file__)
    dist.init_process_group("gloo")
    model = mixture(top_k=2)
    spread = parallelize(model, Grid(ep=2))
    laconic.compress_activations(model, bits=4)
    optimizer = torch.optim.AdamW(spread.parameter_groups(), lr=3e-3)
    for step, batch in enumerate(batches(20, seed=dist.get_rank())):
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        spread.reduce_gradients()
        spread.clip_gradients(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0 and step % 5 == 4:
            print(f"step {step + 1}: loss {loss.item():.3f}")
    if dist.get_rank() == 0:
        print(spread)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
