"""Pretrain with FSDP2 over a slow link: what is gathered and reduced travels in fewer bytes, bit for bit. 30 seconds.

    pip install 'laconic[train]'
    python examples/fsdp2_slow_link.py

With root, two hosts with 100 Mbit/s between them are made on this machine; without, the link is this machine, nothing
gets faster, and a line says so. The audit says what would have travelled, and what did. On two real hosts:
`torchrun --nnodes 2 --node-rank 0 --master-addr HOST examples/fsdp2_slow_link.py`, with --node-rank 1 on the other.
"""

from __future__ import annotations

import os
import sys
import time

import torch
import torch.distributed as dist
from common import batches, llama, on_two_hosts
from torch.distributed.fsdp import fully_shard

import laconic
from laconic.collectives import Lossless, audit


def main() -> None:
    """Train 10 steps on each of the ranks."""
    dist.init_process_group("gloo")
    model = llama()
    laconic.compress_activations(model, bits=4)  # before it is sharded
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    laconic.zip_collectives(model, codec=Lossless())  # "auto" codes where your link makes that faster
    optimizer = laconic.AdamW8bit(model.parameters(), lr=2e-3)
    began = time.perf_counter()
    for batch in batches(10, seed=dist.get_rank()):
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(f"loss {loss.item():.3f}, {(time.perf_counter() - began) / 10:.2f} s per step")
        print(audit.snapshot().table())
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" not in os.environ:
        sys.exit(on_two_hosts(__file__, ranks_per_host=1, bits_per_second=100e6))
    main()
