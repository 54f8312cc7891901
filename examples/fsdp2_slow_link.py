"""Pretrain with FSDP2 over a slow link: what is gathered and reduced travels in fewer bytes, bit for bit. 20 seconds.

    torchrun --nproc-per-node 2 examples/fsdp2_slow_link.py

Here the link is this machine, so nothing gets faster; the audit says what would have travelled, and what did.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from common import batches, llama
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
    for batch in batches(10, seed=dist.get_rank()):
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(f"loss {loss.item():.3f}")
        print(audit.snapshot().table())
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
