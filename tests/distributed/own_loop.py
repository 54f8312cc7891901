"""A training loop of a user's own, for torchrun: compressed activations and gradients, a checkpoint of torch.save.

python -m torch.distributed.run ... -m tests.distributed.own_loop FOLDER [STEP]: rank 1 kills itself once, before STEP.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import laconic
from laconic.collectives import agent_store
from tests.integrations.hand_loops import LENGTH, VOCABULARY, Classic

STEPS, EVERY = 8, 2


def main(folder: Path, killed_before: int | None) -> None:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=agent_store(), rank=rank, world_size=world_size)
    torch.manual_seed(0)
    model = Classic()
    laconic.compress_activations(model, bits=4)
    gradients = laconic.compress_gradients(model, dist.group.WORLD)
    optimizer = laconic.AdamW8bit(model.parameters(), lr=3e-3)
    file, first = folder / "checkpoint.pt", 0
    if file.exists():
        saved = torch.load(file, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["step"]
    (folder / f"first-{rank}").open("a").write(f"{first}\n")
    for step in range(first, STEPS):
        dying = folder / "killed"
        if step == killed_before and rank == 1 and not dying.exists():
            dying.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        generator = torch.Generator().manual_seed(world_size * step + rank)
        ids = torch.randint(VOCABULARY, (4, LENGTH + 1), generator=generator)
        _, loss = model(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())
        with gradients.last_micro_batch():
            loss.backward()
        gradients.reduce()
        gradients.clip_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % EVERY == 0 and rank == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
            torch.save(state, folder / "new.pt")
            os.replace(folder / "new.pt", file)
    torch.save(model.state_dict(), folder / f"end-{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else None)
